"""Finding backends, with distributions made of nothing but metadata and a module on a path of their own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cllm import registry
from cllm.backend import FileVocabulary
from cllm.errors import BackendUnavailable, LoadFailed

GOOD = """
from cllm.backend import Probe
class Backend:
    contract_version = {contract}
    def probe(self):
        {probe}
    def load(self, spec, on_progress):
        raise NotImplementedError
"""
AVAILABLE = "return Probe(available=True, reason='found', preference={})"

Install = Callable[..., str]


def backend_source(probe: str = AVAILABLE.format(1), contract: object = 1) -> str:
    return GOOD.format(probe=probe, contract=contract)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Make a distribution with one backend; nothing else that is installed is seen."""
    monkeypatch.syspath_prepend(str(tmp_path))
    real = registry.entry_points
    monkeypatch.setattr(registry, "entry_points", lambda group: [p for p in real(group=group) if p.value.startswith("fake_")])
    modules = set(sys.modules)

    def install(name: str, source: str = "", distribution: str = "", version: str = "1.0") -> str:
        distribution = distribution or f"dist-{name}"
        module = f"fake_{distribution}_{name}".replace("-", "_")
        (tmp_path / f"{module}.py").write_text(source or backend_source())
        info = tmp_path / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[cllm.backends]\n{name} = {module}:Backend\n")
        return module

    yield install
    for module in set(sys.modules) - modules:
        if module.startswith("fake_"):
            del sys.modules[module]


def test_listing_tells_name_distribution_and_version_and_imports_nothing(install: Install) -> None:
    module = install("echo", source="raise SystemExit('imported')", distribution="cllm-echo", version="2.3")
    (listed,) = registry.list_backends()
    assert (listed.name, listed.distribution, listed.version) == ("echo", "cllm-echo", "2.3")
    assert module not in sys.modules


def test_loading_imports_the_named_backend_and_no_other(install: Install) -> None:
    install("echo")
    other = install("other")
    assert registry.load_backend("echo").probe().available
    assert other not in sys.modules


def test_a_missing_backend_is_told_with_what_there_is_and_the_nearest_name(install: Install) -> None:
    install("echo")
    install("mirror")
    assert registry.why_missing("ecko") == "no backend ecko; did you mean echo? (installed: echo, mirror)"
    assert registry.why_missing("echo") == ""
    with pytest.raises(BackendUnavailable, match=r"^no backend ecko; did you mean echo\? \(installed: echo, mirror\)$"):
        registry.load_backend("ecko")


def test_with_no_backend_installed_a_missing_one_says_so(install: Install) -> None:
    with pytest.raises(BackendUnavailable, match=r"^no backend echo \(installed: none\)$"):
        registry.load_backend("echo")


def test_a_name_that_two_distributions_claim_is_refused_with_both(install: Install) -> None:
    install("echo", distribution="first")
    install("echo", distribution="second", version="2.0")
    with pytest.raises(BackendUnavailable, match=r"echo is claimed by first 1\.0 and second 2\.0; uninstall one of them$"):
        registry.load_backend("echo")


def test_a_distribution_that_is_on_the_path_twice_is_no_double(install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install("echo")
    (tmp_path / "again").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path / "again"))
    (tmp_path / "again" / "dist_echo-1.0.dist-info").symlink_to(tmp_path / "dist_echo-1.0.dist-info")
    assert [one.name for one in registry.list_backends()] == ["echo"]


def test_a_backend_whose_import_fails_is_told_in_one_line_with_the_cause(install: Install) -> None:
    install("broken", source="import no_such_module_anywhere")
    with pytest.raises(BackendUnavailable) as caught:
        registry.load_backend("broken")
    assert str(caught.value) == (
        "backend broken (dist-broken 1.0) is broken: ModuleNotFoundError: No module named 'no_such_module_anywhere'"
    )


def test_an_entry_point_that_gives_no_backend_is_told_as_broken(install: Install) -> None:
    install("odd", source="def Backend(): return 'hello'")
    with pytest.raises(BackendUnavailable, match=r"its entry point gives a str, which is no Backend$"):
        registry.load_backend("odd")


def test_an_entry_point_that_gives_the_class_itself_is_told_as_broken(install: Install) -> None:
    install("odd", source=f"{backend_source()}\nInner = Backend\ndef Backend(): return Inner\n")
    with pytest.raises(BackendUnavailable, match=r"its entry point gives the class Backend, which is no Backend$"):
        registry.load_backend("odd")


def test_a_contract_version_that_is_no_number_is_told_as_broken(install: Install) -> None:
    install("odd", source=backend_source(contract="'1'"))
    with pytest.raises(BackendUnavailable, match=r"is broken: its contract_version is a str, not a number$"):
        registry.load_backend("odd")


def test_a_module_that_ends_the_process_when_it_is_imported_ends_nothing(install: Install) -> None:
    install("quitter", source="raise SystemExit('no licence')")
    with pytest.raises(BackendUnavailable, match=r"is broken: SystemExit: no licence$"):
        registry.load_backend("quitter")


def test_a_module_that_raises_what_is_no_exception_is_told_as_broken_beside_the_others(install: Install) -> None:
    """As what a module that is written in Rust raises when it panics."""
    install("good")
    install("panicking", source="class Panic(BaseException): pass\nraise Panic('called unwrap on nothing')")
    with pytest.raises(BackendUnavailable, match=r"is broken: Panic: called unwrap on nothing$"):
        registry.load_backend("panicking")
    assert registry.choose_backend()[0] == "good"


@pytest.mark.parametrize("source", ["raise KeyboardInterrupt", backend_source("raise KeyboardInterrupt")], ids=["its import", "its probe"])
def test_an_operator_who_interrupts_a_backend_is_heard(install: Install, source: str) -> None:
    install("slow", source=source)
    with pytest.raises(KeyboardInterrupt):
        registry.probe_backends()


@pytest.mark.parametrize(
    ("probe", "reason"),
    [
        ("return None", "probe failed: TypeError: it gave a NoneType, which is no Probe"),
        ("raise SystemExit('no device')", "probe failed: SystemExit: no device"),
        ("raise BaseException('panicked')", "probe failed: BaseException: panicked"),
        ("return Probe(available=True, reason=OSError('no device'))", "probe failed: TypeError: its reason is a OSError, not text"),
        ("return Probe(available=True, preference='high')", "probe failed: TypeError: its preference is a str, not a number"),
        ("return Probe(available=False, reason='no device\\n\\tinstall one\\n')", "no device install one"),
    ],
)
def test_a_probe_that_breaks_its_word_is_told_in_one_line_beside_the_others(install: Install, probe: str, reason: str) -> None:
    install("good")
    install("odd", source=backend_source(probe))
    found = {one.listed.name: one for one in registry.probe_backends()}
    assert (found["odd"].available, found["odd"].reason) == (False, reason)
    assert found["good"].available


@pytest.mark.parametrize(("contract", "older"), [(0, "the backend"), (99, "cLLM")])
def test_a_backend_of_another_contract_is_refused_and_the_older_side_named(install: Install, contract: int, older: str) -> None:
    install("skewed", source=backend_source(contract=contract))
    with pytest.raises(BackendUnavailable, match=rf"speaks version {contract} of the contract, .*; update {older}$"):
        registry.load_backend("skewed")


def test_auto_takes_the_available_one_with_the_highest_preference(install: Install) -> None:
    install("low", source=backend_source(AVAILABLE.format(1)))
    install("high", source=backend_source(AVAILABLE.format(9)))
    install("absent", source=backend_source("return Probe(available=False, reason='no device', preference=20)"))
    name, backend = registry.choose_backend()
    assert name == "high"
    assert backend.probe().preference == 9


def test_auto_is_not_disturbed_by_broken_double_or_raising_ones(install: Install) -> None:
    install("broken", source="1/0")
    install("raising", source=backend_source("raise OSError('cannot look')"))
    install("twice", distribution="first")
    install("twice", distribution="second")
    install("good")
    assert registry.choose_backend("auto")[0] == "good"
    reasons = {one.listed.name: one.reason for one in registry.probe_backends()}
    assert reasons["raising"] == "probe failed: OSError: cannot look"
    assert "is broken: ZeroDivisionError" in reasons["broken"]
    assert "claimed by" in reasons["twice"]


def test_auto_with_nothing_that_works_names_each_backend_and_why(install: Install) -> None:
    install("absent", source=backend_source("return Probe(available=False, reason='no device')"))
    install("shy", source=backend_source(AVAILABLE.format(0)))
    with pytest.raises(BackendUnavailable, match=r"^no backend can work here \(absent: no device; shy: only taken when named\)$"):
        registry.choose_backend()


def test_a_backend_without_preference_is_taken_when_named(install: Install) -> None:
    install("shy", source=backend_source(AVAILABLE.format(0)))
    assert registry.choose_backend("shy")[0] == "shy"


@pytest.mark.parametrize(
    ("probe", "reason"),
    [
        ("return Probe(available=False, reason='no device:\\n\\tinstall one')", "no device: install one"),
        ("raise OSError('cannot look')", "probe failed: OSError: cannot look"),
        ("return Probe(available=False)", "it does not say why"),
    ],
)
def test_a_named_backend_that_cannot_work_here_is_told_by_name_with_its_own_reason(install: Install, probe: str, reason: str) -> None:
    install("absent", source=backend_source(probe))
    with pytest.raises(BackendUnavailable, match=rf"^backend absent \(dist-absent 1\.0\) cannot work here: {reason}$"):
        registry.choose_backend("absent")


def test_a_named_backend_whose_model_will_be_in_another_process_is_not_asked_in_this_one(install: Install) -> None:
    install("absent", source=backend_source("return Probe(available=False, reason='asked')"))
    assert registry.choose_backend("absent", asks=False)[0] == "absent"


class Half:
    """What is no model, and has weights all the same."""

    def __init__(self, **has: object) -> None:
        self.__dict__.update(has)
        self.n_closed = 0

    def close(self) -> None:
        self.n_closed += 1


@pytest.mark.parametrize(
    ("has", "missing"),
    [({"step": None}, "vocabulary, info, capabilities"), ({"start": None, "heeds": None}, "vocabulary, info, n_live_max")],
)
def test_what_is_no_model_is_closed_and_told_what_it_lacks_of_its_kind(has: dict[str, object], missing: str) -> None:
    half: Any = Half(**has)
    with pytest.raises(LoadFailed, match=rf"is no model: it has no {missing}"):
        registry.checked_model(half)
    assert half.n_closed == 1


def test_the_built_in_backends_come_through_the_same_door() -> None:
    assert {"llama-cpu", "llama-gpu"} <= {one.name for one in registry.list_backends()}


def test_what_is_no_embedder_is_closed_and_told_what_it_lacks() -> None:
    """Its memory may be its model's, which is closed behind it."""
    half: Any = Half(**dict.fromkeys(name for name in registry.EMBEDDER if name not in ("pair", "close")))
    with pytest.raises(LoadFailed, match=r"is no embedder: it has no pair$"):
        registry.check_embedder(half)
    assert half.n_closed == 1


READS = backend_source() + "    def load_vocabulary(self, path):\n        {}\n"
READS_NOTHING = "from cllm.errors import LoadFailed; raise LoadFailed('no SentencePiece file')"
CANNOT_READ = "raise ValueError('four bytes are missing')"


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (READS_NOTHING, "no SentencePiece file"),
        (CANNOT_READ, "backend acme could not read the vocabulary: ValueError: four bytes are missing"),
    ],
)
def test_a_files_vocabulary_is_read_by_the_first_that_can(install: Install, body: str, told: str) -> None:
    model: Any = SimpleNamespace(vocabulary=FileVocabulary("m.gguf"))
    install("acme", READS.format(body))
    with pytest.raises(LoadFailed, match=told):
        registry.vocabulary_of(model)
    install("llama-cpu", READS.format("return 'of ' + path"))
    assert registry.vocabulary_of(model) == "of m.gguf"  # type: ignore[comparison-overlap]


def test_a_files_vocabulary_brings_no_other_backends_driver_in_where_our_own_can_read_it(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = SimpleNamespace(vocabulary=FileVocabulary("m.gguf"))
    install("acme", source="raise KeyboardInterrupt('it was imported')")
    install("llama-cpu", READS.format("return 'of ' + path"), distribution="own")
    monkeypatch.setattr(registry, "OWN", "own")
    assert registry.vocabulary_of(model) == "of m.gguf"  # type: ignore[comparison-overlap]
