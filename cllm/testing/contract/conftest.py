"""The suite's fixtures: the backend, a model with empty slots, and a hand to feed it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from cllm.backend import Backend, ModelInfo, ModelSpec, StepModel, StreamModel, Vocabulary
from cllm.registry import vocabulary_of
from cllm.testing.contract.hand import Hand, Near, PlainTokens
from cllm.testing.contract.options import backend_of, spec_of

Load = Callable[[], StepModel]


class Shared:
    """One loaded model for all tests that leave it usable; loading takes long with a real one."""

    def __init__(self, load: Callable[[], StepModel | StreamModel]) -> None:
        self._load = load
        self._model: StepModel | None = None
        self._schedules_itself = False
        self._streams: StreamModel | None = None  # kept for its vocabulary
        self._vocabulary: Vocabulary | None = None

    def with_empty_slots(self) -> StepModel:
        if self._model is not None:
            try:
                _empty(self._model)
            except Exception:  # the test before this one broke it, and has failed for that
                self.close()
        if self._model is None:
            self._model = self.load_steps()
        return self._model

    def load_steps(self) -> StepModel:
        """Load a model that has steps, or skip the test."""
        if not self._schedules_itself:
            model = self._load()
            if not isinstance(model, StreamModel):
                return model
            self._schedules_itself = True
            model.close()
        pytest.skip("this model schedules itself")

    def info(self) -> ModelInfo:
        """What either kind of model tells of itself."""
        if self._model is None and self._streams is None:
            model = self._load()
            if isinstance(model, StreamModel):
                self._streams, self._vocabulary = model, vocabulary_of(model)
            else:
                self._model = model
        return (self._streams or self.with_empty_slots()).info

    def vocabulary(self) -> Vocabulary:
        """The vocabulary of either kind of model."""
        self.info()
        if self._streams is not None and self._vocabulary is None:
            pytest.skip("this model reads text")
        return self._vocabulary or self.with_empty_slots().vocabulary

    def load_streams(self) -> StreamModel:
        """Load a model that schedules itself, or skip the test."""
        if self._model is None:
            model = self._load()
            if isinstance(model, StreamModel):
                return model
            self._model = model
        pytest.skip("this model has steps")

    def close(self) -> None:
        if self._streams is not None:
            self._streams.close()
            self._streams = None
        if self._model is not None:
            model, self._model = self._model, None
            model.close()


def _empty(model: StepModel) -> None:
    for slot in range(model.n_slots):
        model.drop(slot)


@pytest.fixture(scope="session")
def backend(pytestconfig: pytest.Config) -> Backend:
    """The backend under test."""
    return backend_of(pytestconfig)


@pytest.fixture(scope="session")
def spec(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    """What is loaded of it."""
    return spec_of(pytestconfig, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def shared(backend: Backend, spec: ModelSpec) -> Iterator[Shared]:
    shared = Shared(lambda: backend.load(spec, lambda _share: True))
    yield shared
    shared.close()


@pytest.fixture
def model(shared: Shared) -> StepModel:
    """A loaded model, all of whose slots are empty. Tests may not close it."""
    return shared.with_empty_slots()


@pytest.fixture
def load(shared: Shared) -> Iterator[Load]:
    """Load a model of the test's own; it is closed after the test, if need be once more."""
    loaded: list[StepModel] = []

    def load() -> StepModel:
        loaded.append(shared.load_steps())
        return loaded[-1]

    yield load
    for one in loaded:
        one.close()


@pytest.fixture
def streams(shared: Shared) -> Iterator[StreamModel]:
    """A model that schedules itself, of the test's own."""
    model = shared.load_streams()
    yield model
    model.close()


@pytest.fixture
def info(shared: Shared) -> ModelInfo:
    """What a loaded model tells of itself."""
    return shared.info()


@pytest.fixture
def vocabulary(shared: Shared) -> Vocabulary:
    """The model's tokens, or its file's."""
    return shared.vocabulary()


@pytest.fixture
def hand(model: StepModel) -> Hand:
    """Feeds the model."""
    return Hand(model)


@pytest.fixture
def near(pytestconfig: pytest.Config) -> Near:
    """Says whether logits are equal as far as arithmetic allows."""
    return Near(pytestconfig.getoption("tolerance"))


@pytest.fixture
def plain(model: StepModel) -> PlainTokens:
    """Draws tokens that are text."""
    return PlainTokens(model.vocabulary)
