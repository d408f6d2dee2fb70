"""Finds backends: the distributions with an entry point in the group `cllm.backends`.

Listing reads metadata and imports nothing; loading imports one. A backend that is missing, double, broken or written to another contract
is said by name, and never stands in the way of the others.
"""

from __future__ import annotations

import difflib
from contextlib import suppress
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, Final

import attrs

from cllm.errors import BackendError, BackendUnavailable, LoadFailed, call_foreign, in_one_line

if TYPE_CHECKING:
    from cllm.backend import Backend, Embedder, Probe, StepModel, StreamModel, Vocabulary

GROUP: Final = "cllm.backends"
OWN: Final = "cllm"  # the distribution that has the built-in ones
STEP_MODEL: Final = ("vocabulary", "info", "capabilities", "n_cells", "n_cells_slot", "n_slots", "n_rows_max", "step", "drop", "close")
"""What no `StepModel` can do without, whatever its capabilities are."""
STREAM_MODEL: Final = ("vocabulary", "info", "n_live_max", "n_ctx", "heeds", "open", "start", "cancel", "close")
"""And no `StreamModel`."""
EMBEDDER: Final = (
    "info", "vocabulary", "pooling", "n_embd", "n_tokens_max", "n_slots", "n_cells", "n_rows_max", "can_split", "step", "drop", "pair",
    "close",
)  # fmt: skip
"""And no `Embedder`."""


@attrs.frozen
class Listed:
    """A backend as its distribution's metadata tell of it."""

    name: str
    distribution: str
    version: str
    entry_point: EntryPoint = attrs.field(repr=False, eq=False)


@attrs.frozen
class Found:
    """A listed backend, and whether it can work here."""

    listed: Listed
    available: bool
    reason: str
    preference: int = 0
    backend: Backend | None = attrs.field(default=None, repr=False, eq=False)


def list_backends() -> list[Listed]:
    """Return every backend that is installed, by name. A name that two distributions claim is there twice."""
    # A distribution that is on the path twice, as an editable one may be, counts once.
    found = {(point.name, *_distribution(point)): point for point in entry_points(group=GROUP)}
    return [Listed(*key, point) for key, point in sorted(found.items(), key=lambda item: item[0])]


def _distribution(point: EntryPoint) -> tuple[str, str]:
    return (point.dist.name, point.dist.version) if point.dist else ("unknown", "unknown")


def load_backend(name: str) -> Backend:
    """Import and return one backend.

    Raises: BackendUnavailable with one line: no such name, a name that is claimed twice, an import that fails, another contract.
    """
    return _load(_listed(name))


def why_missing(name: str) -> str:
    """Say that no backend of that name is installed; empty where one is, whatever may be wrong with it. Imports nothing."""
    names = sorted({one.name for one in list_backends()})
    return "" if name in names else _missing(name, names)


def _listed(name: str) -> Listed:
    listed = list_backends()
    named = [one for one in listed if one.name == name]
    if not named:
        raise BackendUnavailable(_missing(name, sorted({one.name for one in listed})))
    return _only(named)


def factory_of(name: str) -> str:
    """Return what makes a backend that was loaded, as module:callable, for another process to do the same."""
    return next(one.entry_point.value for one in list_backends() if one.name == name)


def _missing(name: str, names: list[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"no backend {name}{hint} (installed: {', '.join(names) or 'none'})"


def _only(named: list[Listed]) -> Listed:
    if len(named) > 1:
        claims = " and ".join(f"{one.distribution} {one.version}" for one in named)
        raise BackendUnavailable(f"the backend name {named[0].name} is claimed by {claims}; uninstall one of them")
    return named[0]


def _load(listed: Listed) -> Backend:
    origin = _origin(listed)
    try:
        backend = listed.entry_point.load()()
        complaint = _complaint(backend)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a foreign module may fail in any way: a panic of Rust's is no Exception
        raise BackendUnavailable(f"{origin} is broken: {in_one_line(error)}") from error
    if complaint:
        raise BackendUnavailable(f"{origin} {complaint}")
    return backend  # type: ignore[no-any-return]  # the contract says that it is one


def _origin(listed: Listed) -> str:
    return f"backend {listed.name} ({listed.distribution} {listed.version})"


def _complaint(backend: object) -> str:
    """Say why this is no backend of this server's; empty if it is one."""
    from cllm.backend import CONTRACT_VERSION, Backend

    if isinstance(backend, type) or not isinstance(backend, Backend):  # a class has what its instances have, and can do nothing of it
        return f"is broken: its entry point gives {_what(backend)}, which is no Backend"
    version: object = backend.contract_version
    if not isinstance(version, int):
        return f"is broken: its contract_version is {_what(version)}, not a number"
    if version != CONTRACT_VERSION:
        older = "cLLM" if version > CONTRACT_VERSION else "the backend"
        return f"speaks version {version} of the contract, this server version {CONTRACT_VERSION}; update {older}"
    return ""


def _what(thing: object) -> str:
    return f"the class {thing.__name__}" if isinstance(thing, type) else f"a {type(thing).__name__}"


def checked_model(model: StepModel | StreamModel) -> StepModel | StreamModel:
    """Return what a backend's `load` gave. Raises: LoadFailed when that is no model, after it was closed if that can be."""
    from cllm.backend import StreamModel

    missing = [name for name in STEP_MODEL if not hasattr(model, name)]
    if not missing or isinstance(model, StreamModel):
        return model
    if hasattr(model, "start"):
        missing = [name for name in STREAM_MODEL if not hasattr(model, name)]
    _close(model)
    raise LoadFailed(f"the backend's load gave {_what(model)}, which is no model: it has no {', '.join(missing)}")


def check_embedder(embedder: Embedder) -> None:
    """Raises: LoadFailed when what a backend gave for vectors is no embedder, after it was closed if that can be."""
    if missing := [name for name in EMBEDDER if not hasattr(embedder, name)]:
        _close(embedder)  # before its model, whose memory it may use
        raise LoadFailed(f"the backend gave {_what(embedder)} for vectors, which is no embedder: it has no {', '.join(missing)}")


def _close(thing: object) -> None:
    """Have what is of no use give back what it holds, if it can."""
    close: Any = getattr(thing, "close", None)
    if callable(close):
        with suppress(Exception):  # what is said of it comes first
            call_foreign(close)


def vocabulary_of(model: StreamModel) -> Vocabulary | None:
    """Return a model's vocabulary, read from its file if it is that; None if it has none. Raises: LoadFailed · BackendUnavailable."""
    from cllm.backend import FileVocabulary

    vocabulary = model.vocabulary
    return _load_vocabulary(vocabulary.path) if isinstance(vocabulary, FileVocabulary) else vocabulary


def _load_vocabulary(path: str) -> Vocabulary:
    """Read a file's vocabulary with whichever backend can: our own are looked at first, so that no other one's driver comes in."""
    from cllm.backend import LoadsVocabularies

    failure: BackendError | None = None
    listed = list_backends()
    for one in sorted(listed, key=lambda one: one.distribution != OWN):
        found = _probe(one, [other for other in listed if other.name == one.name])
        if found.available and isinstance(found.backend, LoadsVocabularies):
            try:
                return call_foreign(found.backend.load_vocabulary, path)
            except (BackendUnavailable, LoadFailed) as error:  # which may be for files of other kinds; the next one may read it
                failure = failure or error
            except Exception as error:  # whatever it is, another one's model is not to be kept out by it
                failure = failure or LoadFailed(f"backend {found.listed.name} could not read the vocabulary: {in_one_line(error)}")
    raise failure or BackendUnavailable("no backend that is installed here can read the vocabulary of a model file")


def probe_backends() -> list[Found]:
    """Return every backend with whether it can work here, by name; a broken or double one is there with the reason."""
    listed = list_backends()
    return [_probe(one, [other for other in listed if other.name == one.name]) for one in listed]


def _probe(one: Listed, named: list[Listed]) -> Found:
    try:
        _only(named)
        return _found(one, _load(one))
    except BackendUnavailable as error:
        return Found(one, available=False, reason=str(error).removeprefix(_origin(one) + " "))


def _found(one: Listed, backend: Backend) -> Found:
    """Ask a backend whether it can work here; one whose probe breaks its word cannot."""
    try:
        probe = _checked(backend.probe())
    except BackendUnavailable as error:
        return Found(one, available=False, reason=" ".join(str(error).split()))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the contract forbids it, but the others must go on
        return Found(one, available=False, reason=f"probe failed: {in_one_line(error)}")
    return Found(one, probe.available, " ".join(probe.reason.split()), probe.preference, backend)


def _checked(probe: object) -> Probe:
    from cllm.backend import Probe

    if not isinstance(probe, Probe):
        raise TypeError(f"it gave {_what(probe)}, which is no Probe")
    reason: object = probe.reason
    if not isinstance(reason, str):
        raise TypeError(f"its reason is {_what(reason)}, not text")
    preference: object = probe.preference
    if not isinstance(preference, int):
        raise TypeError(f"its preference is {_what(preference)}, not a number")
    return probe


def choose_backend(name: str = "auto", *, asks: bool = True) -> tuple[str, Backend]:
    """Return a backend with its name: the named one, or for `auto` the available one with the highest preference.

    With `asks` false a named one is not asked whether it can work: its model will be in another process, and this one is to stay free of
    devices and of what their drivers may do. Nor is one that wants that by itself.

    Raises: BackendUnavailable with one line, for a named one with its own reason, for `auto` with every backend and why not.
    """
    if name != "auto":
        one = _listed(name)
        backend = _load(one)
        if not asks or getattr(backend, "wants_worker", False):
            return name, backend
        if not (asked := _found(one, backend)).available:
            raise BackendUnavailable(f"{_origin(one)} cannot work here: {asked.reason or 'it does not say why'}")
        return name, backend
    found = probe_backends()
    able = [one for one in found if one.backend is not None and one.available and one.preference > 0]
    if not able:
        reasons = "; ".join(f"{one.listed.name}: {_why_not(one)}" for one in found)
        raise BackendUnavailable(f"no backend can work here ({reasons or 'none is installed'})")
    best = max(able, key=lambda one: one.preference)  # of equals the first by name
    assert best.backend is not None
    return best.listed.name, best.backend


def _why_not(one: Found) -> str:
    return "only taken when named" if one.available else one.reason or "not available"
