"""Models from the hub: which files a reference means, and fetching them from a hub of our own on loopback."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelInfo

from cllm import demo, hub
from cllm.commands import models
from cllm.errors import LoadAborted
from cllm.hub import HubFailed, Reference

COMMIT = "0123456789abcdef0123456789abcdef01234567"


# --- references and files ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("user/repo", Reference("user/repo")),
        ("user/repo:Q4_K_M", Reference("user/repo", "Q4_K_M")),
        ("user/repo:model.gguf", Reference("user/repo", "model.gguf")),
        ("hf.co/user/repo:Q4_K_M", Reference("user/repo", "Q4_K_M")),
        ("https://hf.co/user/repo", Reference("user/repo")),
        ("huggingface.co/user/repo:model.gguf", Reference("user/repo", "model.gguf")),
        ("https://huggingface.co/user/repo", Reference("user/repo")),
        ("https://example.org/user/repo", None),
        ("hf.co/user/repo.gguf", None),
        ("user/repo.gguf", None),
        ("models/Model.GGUF", None),
        ("./user/repo", None),
        ("/user/repo", None),
        ("a/b/c", None),
        ("model", None),
        ("-user/-repo:x y", None),
    ],
)
def test_a_reference_is_told_from_a_path(text: str, reference: Reference | None) -> None:
    assert hub.reference_of(text) == reference


def test_what_exists_here_is_never_taken_for_a_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "user" / "repo").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub.reference_of("user/repo") is None
    assert hub.parsed("user/repo") == Reference("user/repo")  # which is how what is said to the hub alone is read


FILES = ["a-Q4_K_M.gguf", "a-Q4_K_S.gguf", "a-q8_0.gguf", "mmproj-a-F16.gguf", "README.md", "big/a-F16-00002-of-00002.gguf"]
FILES += ["big/a-F16-00001-of-00002.gguf", "a-Q6_K-00001-of-00003.gguf"]


@pytest.mark.parametrize(
    ("wanted", "files"),
    [
        (None, ["a-Q4_K_M.gguf"]),
        ("Q4_K_S", ["a-Q4_K_S.gguf"]),
        ("Q8_0", ["a-q8_0.gguf"]),
        ("a-Q4_K_M.gguf", ["a-Q4_K_M.gguf"]),
        ("f16", ["big/a-F16-00001-of-00002.gguf", "big/a-F16-00002-of-00002.gguf"]),
        ("a-F16-00001-of-00002.gguf", None),
    ],
)
def test_a_quantisation_or_a_name_chooses_the_files_of_one_model(wanted: str | None, files: list[str] | None) -> None:
    models = hub.models_among(FILES)
    if files is None:
        files = models["big/a-F16.gguf"]
        wanted = "big/a-F16-00001-of-00002.gguf"
    assert hub.choose(models, Reference("user/repo", wanted)) == files


@pytest.mark.parametrize("wanted", ["Q4", "Q6_K", "Q5_K_M", "mmproj-a-F16.gguf"])
def test_what_is_not_there_is_refused_with_what_is(wanted: str) -> None:
    with pytest.raises(HubFailed, match=re.escape("there are Q4_K_M, Q4_K_S, q8_0, F16")):
        hub.choose(hub.models_among(FILES), Reference("user/repo", wanted))


@pytest.mark.parametrize(
    "beside",
    [
        "MTP/a-Q8_0-MTP.gguf",
        "mtp-a-Q8_0.gguf",
        "sub/mtp-a-Q8_0.gguf",
        "a-Q8_0-MTP.gguf",
        "EAGLE3-a-Q8_0.gguf",
        "dflash-a-Q8_0.gguf",
        "dspark-a-Q8_0-00001-of-00001.gguf",
    ],
)
def test_what_drafts_for_a_model_is_none_itself(beside: str) -> None:
    models = hub.models_among(["a-MTP-UD-Q4_K_XL.gguf", beside])
    assert hub.choose(models, Reference("user/repo")) == ["a-MTP-UD-Q4_K_XL.gguf"]  # which answers, whatever its name has
    with pytest.raises(HubFailed, match="has no Q8_0"):
        hub.choose(models, Reference("user/repo", "Q8_0"))


def test_a_model_that_is_there_whole_and_split_or_split_in_two_ways_is_one() -> None:
    def split(n: int) -> list[str]:
        return [f"a-Q8_0-{i:05}-of-{n:05}.gguf" for i in range(1, n + 1)]

    for names in (["a-Q8_0.gguf", *split(2)], ["a-Q8_0.gguf", *split(1)], [*split(2), *split(3)], [*split(2), *split(3)[1:]]):
        models = hub.models_among([*names, "a-Q4_K_M.gguf"])
        assert hub.choose(models, Reference("user/repo", "Q8_0")) == (names[:1] if "a-Q8_0.gguf" in names else split(2))
    assert hub.models_among(split(3)[1:]) == {}


def test_models_whose_names_tell_of_drafts_are_models() -> None:
    assert list(hub.models_among(["a-9b-mtp-kl-Q8_0.gguf", "b-MTP-IQ2_M.gguf"])) == ["a-9b-mtp-kl-Q8_0.gguf", "b-MTP-IQ2_M.gguf"]


def test_files_of_one_name_are_told_apart_by_their_folders() -> None:
    models = hub.models_among(["bert/model-f16.gguf", "jina/model-f16.gguf"])
    with pytest.raises(
        HubFailed, match=r"name one as in user/repo:bert/model-f16.gguf: there are bert/model-f16.gguf, jina/model-f16.gguf"
    ):
        hub.choose(models, Reference("user/repo", "model-f16.gguf"))
    named = hub.parsed("user/repo:jina/model-f16.gguf")
    assert named == Reference("user/repo", "jina/model-f16.gguf")
    assert hub.choose(models, named) == ["jina/model-f16.gguf"]


def test_several_models_without_a_preferred_one_must_be_named() -> None:
    with pytest.raises(HubFailed, match="has several models"):
        hub.choose(hub.models_among(["a-Q2_K.gguf", "a-Q3_K_S.gguf"]), Reference("user/repo"))


def test_models_of_one_quantisation_are_named_by_their_files() -> None:
    models = hub.models_among(["a-7b-Q4_K_M.gguf", "a-14b-Q4_K_M.gguf", "sub/a-7b-Q8_0.gguf", "a-14b.gguf"])
    with pytest.raises(
        HubFailed, match=r"has several Q4_K_M; name one as in user/repo:a-14b-Q4_K_M.gguf: there are a-14b-Q4_K_M.gguf, a-14b"
    ):
        hub.choose(models, Reference("user/repo", "Q4_K_M"))
    for name, files in models.items():
        assert hub.choose(models, Reference("user/repo", hub.name_among(models, name))) == files


def test_a_repository_without_gguf_files_says_so() -> None:
    with pytest.raises(HubFailed, match="has no GGUF files"):
        hub.choose(hub.models_among(["model.safetensors"]), Reference("user/repo"))


@pytest.mark.parametrize("model", [".", "/", "", "..", "missing/model.gguf", "user/repo:Q4_K_M"])
def test_what_is_no_file_here_takes_no_bytes(model: str) -> None:
    assert hub.size_of(model) == 0


def test_a_split_file_takes_the_bytes_of_all_its_parts(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"m[0]-0000{number}-of-00002.gguf").write_bytes(b"x" * 10 * number)
    assert hub.size_of(str(tmp_path / "m[0]-00001-of-00002.gguf")) == 30
    (tmp_path / "m.gguf").write_bytes(b"x")
    assert hub.size_of(str(tmp_path / "m.gguf")) == 1


# --- a hub on loopback -------------------------------------------------------------------------------------------------


class FakeHub:
    """Serves one repository's files as the hub does, and remembers what it was asked for."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.asked: list[tuple[str, str, str | None]] = []  # method, file, range
        self.breaks_once: set[str] = set()  # files whose next download ends in the middle
        self.instead: tuple[int, bytes] | None = None  # status and body that whoever is in its place answers to everything
        hub_ = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def do_HEAD(self) -> None:
                hub_.answer(self, with_body=False)

            def do_GET(self) -> None:
                hub_.answer(self, with_body=True)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, handler: BaseHTTPRequestHandler, *, with_body: bool) -> None:
        path = handler.path.partition("?")[0]
        if self.instead is not None:
            self._send(handler, *self.instead, {})
            return
        if path in ("/api/models/user/repo", f"/api/models/user/repo/revision/{COMMIT}"):
            siblings = [{"rfilename": name, "size": len(data)} for name, data in self.files.items()]
            self._send(handler, 200, json.dumps({"id": "user/repo", "sha": COMMIT, "siblings": siblings}).encode(), {})
            return
        name = path.partition(f"/resolve/{COMMIT}/")[2]
        if not path.startswith("/user/repo/") or name not in self.files:
            self._send(handler, 404, b"{}", {"X-Error-Code": "EntryNotFound" if "user/repo" in path else "RepoNotFound"})
            return
        self._file(handler, name, with_body=with_body)

    def _file(self, handler: BaseHTTPRequestHandler, name: str, *, with_body: bool) -> None:
        data, wanted = self.files[name], handler.headers.get("Range")
        self.asked.append((handler.command, name, wanted))
        start = int(wanted.removeprefix("bytes=").partition("-")[0]) if wanted else 0
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if wanted:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        body = data[start:]
        if with_body and name in self.breaks_once:
            self.breaks_once.discard(name)
            self._send(handler, 200, body, headers, n_bytes_sent=len(body) // 2)
            handler.close_connection = True
            return
        self._send(handler, 206 if wanted else 200, body, headers, n_bytes_sent=len(body) if with_body else 0)

    @staticmethod
    def _send(handler: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str], n_bytes_sent: int | None = None) -> None:
        handler.send_response(status)
        for key, value in headers.items():
            handler.send_header(key, value)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        if handler.command == "GET":
            handler.wfile.write(body[:n_bytes_sent])


def own_hub(fake_hub: FakeHub, tmp_path: Path) -> dict[str, str]:
    """The environment of a command that asks our hub and keeps its cache here, whatever the user's own says."""
    others = ("HF_", "HUGGINGFACE_", "TRANSFORMERS_OFFLINE")
    plain = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    return {**plain, "HF_ENDPOINT": fake_hub.url, "HF_HOME": str(tmp_path / "hf")}


@pytest.fixture
def fake_hub() -> Iterator[FakeHub]:
    model = demo.path().read_bytes()
    parts = {f"part-Q8_0-{i:05}-of-00002.gguf": bytes([i]) * 300_000 for i in (1, 2)}
    hub_ = FakeHub({"demo-Q4_K_M.gguf": model, "README.md": b"#", **parts})
    yield hub_
    hub_.close()


@pytest.fixture
def cllm_with(tmp_path: Path, fake_hub: FakeHub) -> Callable[..., subprocess.CompletedProcess[str]]:
    """The command, asking our hub and keeping its cache in a folder of the test's; further variables by name."""

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {**own_hub(fake_hub, tmp_path), **variables}
        command = [sys.executable, "-m", "cllm", *arguments]
        return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=600, env=environment)

    return run


Cllm = Callable[..., subprocess.CompletedProcess[str]]


def test_pull_prints_the_path_of_the_fetched_file(cllm_with: Cllm, fake_hub: FakeHub) -> None:
    done = cllm_with("pull", "user/repo:Q4_K_M")
    assert (done.returncode, done.stderr) == (0, "")
    assert Path(done.stdout.strip()).read_bytes() == fake_hub.files["demo-Q4_K_M.gguf"]


def test_what_was_fetched_has_the_name_by_which_the_hubs_own_commands_keep_it_and_other_programs_find_it(
    cllm_with: Cllm, tmp_path: Path
) -> None:
    from huggingface_hub import scan_cache_dir, try_to_load_from_cache

    folder = tmp_path / "hf" / "hub"
    ref = folder / "models--user--repo" / "refs" / "main"
    ref.parent.mkdir(parents=True)
    ref.write_text("f" * 40)  # an older revision's
    path = cllm_with("pull", "user/repo:Q4_K_M").stdout.strip()
    (repo,) = scan_cache_dir(folder).repos
    assert [revision.refs for revision in repo.revisions] == [{"main"}]
    assert try_to_load_from_cache("user/repo", "demo-Q4_K_M.gguf", cache_dir=folder) == path
    assert [one.name for one in ref.parent.iterdir()] == ["main"]


def test_what_is_in_the_cache_is_not_fetched_again(cllm_with: Cllm, fake_hub: FakeHub) -> None:
    first = cllm_with("pull", "user/repo")
    fake_hub.asked.clear()
    assert cllm_with("pull", "user/repo").stdout == first.stdout
    assert [method for method, _, _ in fake_hub.asked if method == "GET"] == []


@pytest.mark.slow
def test_a_broken_download_goes_on_where_it_broke(cllm_with: Cllm, fake_hub: FakeHub) -> None:
    n_bytes = 24 * 2**20  # the library writes 10 MiB at a time
    fake_hub.files["large-F16.gguf"] = os.urandom(n_bytes)
    fake_hub.breaks_once.add("large-F16.gguf")
    done = cllm_with("pull", "user/repo:F16")
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).read_bytes() == fake_hub.files["large-F16.gguf"]
    starts = [int(wanted.removeprefix("bytes=").partition("-")[0]) for method, _, wanted in fake_hub.asked if method == "GET" and wanted]
    assert any(0 < start < n_bytes for start in starts)


def test_all_parts_of_a_split_model_come_and_the_first_is_named(cllm_with: Cllm, fake_hub: FakeHub) -> None:
    done = cllm_with("pull", "user/repo:Q8_0")
    assert done.returncode == 0, done.stderr
    first = Path(done.stdout.strip())
    assert first.name == "part-Q8_0-00001-of-00002.gguf"
    assert (first.parent / "part-Q8_0-00002-of-00002.gguf").read_bytes() == fake_hub.files["part-Q8_0-00002-of-00002.gguf"]


@pytest.mark.parametrize(
    ("reference", "words"),
    [("user/repo:Q5_K_M", "has no Q5_K_M"), ("user/none", "the hub has no model user/none"), ("nonsense", "expected USER")],
)
def test_what_the_hub_does_not_have_is_one_line(cllm_with: Cllm, reference: str, words: str) -> None:
    done = cllm_with("pull", reference)
    assert done.returncode != 0
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_offline_the_cache_answers_or_says_what_it_lacks(cllm_with: Cllm) -> None:
    pulled = cllm_with("pull", "user/repo:Q4_K_M")
    assert cllm_with("pull", "user/repo:Q4_K_M", HF_HUB_OFFLINE="1").stdout == pulled.stdout
    lacking = cllm_with("pull", "user/repo:Q8_0", HF_HUB_OFFLINE="1")
    assert lacking.returncode == 1
    assert "is not in the cache, and the hub is switched off" in lacking.stderr


@pytest.mark.slow
def test_a_hub_that_is_not_reached_leaves_the_cache(cllm_with: Cllm) -> None:
    pulled = cllm_with("pull", "user/repo:Q4_K_M")
    nobody = "http://127.0.0.1:9"  # the discard port, where nobody listens
    assert cllm_with("pull", "user/repo:Q4_K_M", HF_ENDPOINT=nobody).stdout == pulled.stdout
    assert "the hub was not reached" in cllm_with("pull", "user/other", HF_ENDPOINT=nobody).stderr


@pytest.mark.slow
@pytest.mark.parametrize("body", [b"<html>Please sign in", b"[]"])
def test_what_answers_in_the_hubs_place_leaves_the_cache_and_is_one_line(cllm_with: Cllm, fake_hub: FakeHub, body: bytes) -> None:
    pulled = cllm_with("pull", "user/repo:Q4_K_M")
    fake_hub.instead = (200, body)
    assert cllm_with("pull", "user/repo:Q4_K_M").stdout == pulled.stdout
    lacking = cllm_with("pull", "user/other")
    assert lacking.returncode == 1
    assert "user/other is not in the cache, and the hub could not be asked (" in lacking.stderr
    assert len(lacking.stderr.splitlines()) == 1


def test_an_address_of_the_hub_that_is_none_is_one_line(cllm_with: Cllm) -> None:
    done = cllm_with("pull", "user/repo", HF_ENDPOINT="http://hub\x01")
    assert done.returncode == 1
    assert "the hub could not be asked (InvalidURL" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("status", [408, 429, 503])
def test_a_hub_that_cannot_answer_at_the_moment_leaves_the_cache(cllm_with: Cllm, fake_hub: FakeHub, status: int) -> None:
    pulled = cllm_with("pull", "user/repo:Q4_K_M")
    fake_hub.instead = (status, b"{}")
    assert cllm_with("pull", "user/repo:Q4_K_M").stdout == pulled.stdout
    assert f"user/other is not in the cache, and the hub answered {status}" in cllm_with("pull", "user/other").stderr


@pytest.mark.slow
def test_a_refusal_of_the_hub_is_no_reason_to_serve_from_the_cache(cllm_with: Cllm, fake_hub: FakeHub) -> None:
    cllm_with("pull", "user/repo:Q4_K_M")
    fake_hub.instead = (404, b"{}")
    assert cllm_with("pull", "user/repo:Q4_K_M").returncode == 1


def test_a_download_that_the_disk_does_not_take_says_so(fake_hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "limited.py").write_text(
        "import resource, sys, cllm.cli\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "cllm.cli.main(['pull', 'user/repo:Q4_K_M'])\n"
    )
    environment = own_hub(fake_hub, tmp_path)
    done = subprocess.run([sys.executable, tmp_path / "limited.py"], capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 1
    assert done.stderr == "cllm: user/repo:Q4_K_M is not in the cache, and it could not be written there: File too large\n"


class FullDisk:
    """The library's door to the hub, and beside it a disk that takes nothing more."""

    def __init__(self, **_: object) -> None:
        pass

    def model_info(self, repo: str, **_: object) -> ModelInfo:
        return ModelInfo(id=repo, sha=COMMIT, siblings=[{"rfilename": "a-Q4_K_M.gguf", "size": 10}])


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS])
def test_what_keeps_a_download_from_the_disk_is_told(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def hf_hub_download(*_: object, **__: object) -> str:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("huggingface_hub.HfApi", FullDisk)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", hf_hub_download)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(HubFailed, match=f"it could not be written there: {os.strerror(number)}"):
        hub.fetch(Reference("user/repo"), lambda _n, _total: True)


@pytest.mark.parametrize(("has_begun", "code"), [(True, 1), (False, 0)])
def test_what_the_cache_had_is_told_as_that_and_a_download_that_broke_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], has_begun: bool, code: int
) -> None:
    def fetch(_: Reference, on_bytes: Callable[[int, int], bool]) -> tuple[Path, str]:
        assert not has_begun or on_bytes(5, 10)
        return Path("/cache/old.gguf"), "it could not be written there: No space left on device"

    monkeypatch.setattr(hub, "fetch", fetch)
    assert models.pull("user/repo") == code
    told = capsys.readouterr()
    assert told.out == "/cache/old.gguf\n"
    assert told.err == "cllm: this is what the cache had: it could not be written there: No space left on device\n"


class Xet:
    """The library's way of getting files by Xet: a thread of Xet's tells of bytes, and goes on whatever comes of it, until called off."""

    def __init__(self, error: BaseException) -> None:
        self.is_called_off = threading.Event()
        self.error = error

    def abort_xet_session(self) -> None:
        self.is_called_off.set()

    def hf_hub_download(self, *_: object, tqdm_class: Callable[..., Any], **__: object) -> str:
        transferred, written = tqdm_class(total=10, bar_format=""), tqdm_class(total=10, bar_format="")

        def tell() -> None:
            for bar, n in ((transferred, 4), (written, 2), (transferred, 8), (written, 1)):
                bar.update(n)
                time.sleep(0.01)

        telling = threading.Thread(target=tell)
        telling.start()
        telling.join()
        assert self.is_called_off.wait(60), "it went on to its end"
        raise self.error


@pytest.mark.parametrize("error", [RuntimeError("Operation cancelled"), KeyboardInterrupt()])
def test_a_download_by_xet_is_called_off_when_it_is_given_up(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    xet, told = Xet(error), []

    def on_bytes(n: int, n_total: int) -> bool:
        told.append((n, n_total))
        return n < 10

    monkeypatch.setattr("huggingface_hub.HfApi", FullDisk)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", xet.hf_hub_download)
    monkeypatch.setattr("huggingface_hub.utils._xet.abort_xet_session", xet.abort_xet_session)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("cllm.download.LOOK_S", 0.001)
    with pytest.raises(LoadAborted):
        hub.fetch(Reference("user/repo"), on_bytes)
    assert told == sorted(told), "what two bars tell of one file went back and forth"
    assert told[-1] == (10, 10)


@pytest.mark.slow
def test_a_download_that_is_given_up_leaves_nothing_half(cllm_with: Cllm, fake_hub: FakeHub, tmp_path: Path) -> None:
    fake_hub.files["large-F16.gguf"] = bytes(64 * 2**20)
    code = (
        "import sys, cllm.download\n"
        "from cllm import hub\n"
        "cllm.download.LOOK_S = 0.001\n"
        "try:\n"
        "    hub.fetch(hub.Reference('user/repo', 'F16'), lambda n, _total: n == 0)\n"
        "except hub.CllmError as error:\n"
        "    print(type(error).__name__)\n"
    )
    environment = own_hub(fake_hub, tmp_path)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, env=environment)
    assert done.stdout == "LoadAborted\n", done.stderr
    assert not list((tmp_path / "hf").rglob("*.incomplete"))


def test_what_a_killed_download_left_is_removed_by_the_next(cllm_with: Cllm, fake_hub: FakeHub, tmp_path: Path) -> None:
    cllm_with("pull", "user/repo:Q8_0")
    (blobs,) = (tmp_path / "hf").rglob("blobs")
    names = ("a.0d8e17d8.incomplete", "b.4aed459c.incomplete", "c.incomplete")
    for name in names:
        (blobs / name).write_bytes(bytes(10))
    for name in (names[0], names[2]):  # the last is of an older library, which would take it up
        os.utime(blobs / name, (0, 0))
    cllm_with("pull", "user/repo:Q8_0")
    assert sorted(path.name for path in blobs.glob("*.incomplete")) == list(names[1:])


def test_what_is_in_the_cache_takes_its_bytes_by_its_reference_too(cllm_with: Cllm, fake_hub: FakeHub, tmp_path: Path) -> None:
    cllm_with("pull", "user/repo:Q8_0")
    code = "from cllm import hub; print(hub.size_of('user/repo:Q8_0'), hub.size_of('user/repo:Q4_K_M'), hub.size_of('user/none'))"
    environment = own_hub(fake_hub, tmp_path)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, env=environment)
    assert done.stdout == "600000 0 0\n", done.stderr


def test_what_a_cut_download_left_is_removed_with_its_repository(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    blobs = tmp_path / "models--user--repo" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "abc.1234.incomplete").write_bytes(bytes(1000))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert hub.remove(Reference("user/repo")) == 1000
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(HubFailed, match="user/repo is not in the cache"):
        hub.remove(Reference("user/repo"))


def test_a_repository_that_has_the_same_revision_as_another_is_removed_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As one that was renamed on the hub."""
    names = [f"models--user--{name}" for name in "abcdefgh"]  # the library looks through them in some order
    for name in names:
        snapshot = tmp_path / name / "snapshots" / ("0" * 40)
        for folder in (tmp_path / name / "blobs", tmp_path / name / "refs", snapshot):
            folder.mkdir(parents=True)
        (tmp_path / name / "refs" / "main").write_text(snapshot.name)
        (tmp_path / name / "blobs" / "x").write_bytes(bytes(700))
        (tmp_path / name / "blobs" / "y.incomplete").write_bytes(bytes(30))
        (snapshot / "x-Q8_0.gguf").symlink_to(Path("../../blobs/x"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    while names:
        assert hub.remove(Reference(f"user/{names.pop()[-1]}")) == 730
        assert sorted(path.name for path in tmp_path.iterdir()) == names


@pytest.mark.parametrize(("reference", "n_left"), [("user/repo:Q4_K_M", 1), ("user/repo", 0)])
def test_files_that_lie_outside_their_repository_are_removed_too(
    reference: str, n_left: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """So the library keeps what comes by Xet, since its 2.4: the repository has a link to it."""
    if tuple(map(int, version("huggingface_hub").split(".")[:2])) < (2, 4):
        pytest.skip("huggingface_hub before 2.4 keeps all files in their repository")
    store, repo = tmp_path / "blobs", tmp_path / "models--user--repo"
    snapshot = repo / "snapshots" / ("0" * 40)
    for folder in (store, repo / "blobs", repo / "refs", snapshot):
        folder.mkdir(parents=True)
    (store / ".huggingface-shared-blobs").write_text("1\n")
    (repo / "refs" / "main").write_text(snapshot.name)
    for digit, name in (("a", "x-Q4_K_M.gguf"), ("b", "x-Q8_0.gguf")):
        kept = store / (2 * digit) / (64 * digit)
        kept.parent.mkdir()
        kept.write_bytes(bytes(5000))
        kept.with_name(f"{kept.name}.refs").write_text(f"models--user--repo/blobs/{name}\n")
        (repo / "blobs" / name).symlink_to(kept)
        (snapshot / name).symlink_to(Path("../../blobs", name))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    found = hub.parsed(reference)
    assert found is not None
    assert hub.remove(found) == 5000 * (2 - n_left)
    assert len([path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size == 5000 and not path.is_symlink()]) == n_left
    assert len(hub.cached_models()) == n_left


def test_a_cache_that_may_not_be_written_is_told_where_something_is_to_be_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(path: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    (tmp_path / "models--user--repo").mkdir()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("shutil.rmtree", refuse)
    with pytest.raises(HubFailed, match=r"user/repo could not be removed: .*Permission denied: .*models--user--repo"):
        hub.remove(Reference("user/repo"))


@pytest.mark.slow
def test_of_several_that_a_name_means_none_is_removed(cllm_with: Cllm, fake_hub: FakeHub) -> None:
    fake_hub.files = {"a-7b-Q8_0.gguf": b"a" * 10, "a-14b-Q8_0.gguf": b"b" * 20}
    for name in fake_hub.files:
        assert cllm_with("pull", f"user/repo:{name}").returncode == 0
    refused = cllm_with("models", "remove", "user/repo:Q8_0")
    assert (refused.returncode, "has several Q8_0" in refused.stderr) == (1, True)
    listed = {one["reference"] for one in json.loads(cllm_with("models", "--json").stdout)}
    assert listed == {"user/repo:a-7b-Q8_0.gguf", "user/repo:a-14b-Q8_0.gguf"}
    assert cllm_with("models", "remove", "user/repo:a-7b-Q8_0.gguf").returncode == 0
    (left,) = json.loads(cllm_with("models", "--json").stdout)
    assert (Path(left["path"]).name, left["reference"]) == ("a-14b-Q8_0.gguf", "user/repo:Q8_0"), "there is no other to take it for"


def test_a_folder_of_the_same_name_keeps_nothing_from_being_pulled(
    cllm_with: Cllm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "user" / "repo").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert cllm_with("pull", "user/repo").returncode == 0


def test_a_cache_that_is_no_folder_is_one_line(cllm_with: Cllm, tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "hub").write_text("")
    done = cllm_with("pull", "user/repo:Q4_K_M", HF_HUB_OFFLINE="1")
    assert done.returncode == 1
    assert "the cache cannot be read" in done.stderr
    assert len(done.stderr.splitlines()) == 1


class SilentApi:
    """The library's door to a hub that takes connections and answers nobody."""

    def __init__(self, **_: object) -> None:
        pass

    def model_info(self, repo: str, *, timeout: float | None = None, **_: object) -> None:
        assert timeout is not None, f"waits for {repo} for ever"
        raise TimeoutError


def test_a_hub_that_never_answers_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.HfApi", SilentApi)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(HubFailed, match=r"user/repo is not in the cache, and the hub was not reached \(TimeoutError\)"):
        hub.fetch(Reference("user/repo"), lambda _n, _total: True)


@pytest.mark.slow
def test_models_lists_the_cache_and_removes_from_it(cllm_with: Cllm) -> None:
    assert "no models in the cache" in cllm_with("models").stderr
    path = Path(cllm_with("pull", "user/repo:Q4_K_M").stdout.strip())
    cllm_with("pull", "user/repo:Q8_0")
    listed = {one["reference"]: one for one in json.loads(cllm_with("models", "--json").stdout)}
    assert set(listed) == {"user/repo:Q4_K_M", "user/repo:Q8_0"}
    assert (listed["user/repo:Q8_0"]["n_files"], listed["user/repo:Q8_0"]["size_bytes"]) == (2, 600_000)
    assert cllm_with("models", "remove", "user/repo:Q4_K_M").returncode == 0
    assert not path.exists()
    assert "user/repo:Q8_0" in cllm_with("models").stdout
    assert cllm_with("models", "remove", "user/repo").returncode == 0
    assert "no models in the cache" in cllm_with("models").stderr
    assert cllm_with("models", "remove", "user/repo").returncode == 1


@pytest.mark.slow
def test_a_reference_is_served_as_a_file_is(cllm_with: Cllm) -> None:
    done = cllm_with("generate", "--model", "user/repo:Q4_K_M", "--temperature", "0", "What is 2 + 2?")
    assert done.returncode == 0, done.stderr
    assert "4" in done.stdout
