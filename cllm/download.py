"""Brings files from the Hugging Face hub into its cache, tells how far that is, and can be given up.

The hub's library tells of bytes in two ways. What comes by plain HTTP is told by the thread that waits for it, where an exception ends
the download. What comes by Xet is told by a thread of Xet's, which goes on whatever is raised there; and of what stands still nobody
tells. So a thread of ours looks on meanwhile. Blocking.
"""

from __future__ import annotations

import contextvars
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from cllm.errors import LoadAborted

OnBytes = Callable[[int, int], bool]
"""Called with the bytes that are there and the bytes of all files, by one thread at a time; an answer of False asks to stop."""

LOOK_S: Final = 0.2
PARTIAL_S: Final = 600.0
_OF_ONE_DOWNLOAD: Final = re.compile(r"\.[0-9a-f]{8}\.incomplete$")


def download(repo: str, revision: str | None, files: Sequence[str], sizes: Mapping[str, int], on_bytes: OnBytes) -> Path:
    """Bring `files` of a repository into the cache; return the path of the first. Raises: LoadAborted · what the library raises."""
    from huggingface_hub import constants, hf_hub_download

    folder = Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"
    _remove_partial(folder / "blobs")
    course = _Course(on_bytes, sum(sizes[name] for name in files))
    paths = []
    with course.looked_at():
        for name in files:
            bar = course.bar_of(sizes[name])
            paths.append(hf_hub_download(repo, name, revision=revision, library_name="cllm", tqdm_class=bar))
            course.is_there(sizes[name])
    if revision is not None and (folder / "snapshots" / revision).is_dir():
        _name_main(folder, revision)
    return Path(paths[0])


def _name_main(folder: Path, revision: str) -> None:
    """Name the revision `main`, as the library does for who asks for none: it calls what has no name detached, its own command prunes that
    from the cache, and other programs do not find it there.
    """
    ref = folder / "refs" / "main"
    with suppress(OSError):  # of a cache that can only be read
        if not ref.exists() or ref.read_text("utf-8") != revision:
            ref.parent.mkdir(parents=True, exist_ok=True)
            fresh = ref.with_name(f"main.{secrets.token_hex(4)}.tmp")
            fresh.write_text(revision, "utf-8")
            fresh.replace(ref)


def _remove_partial(folder: Path) -> None:
    """Remove what downloads left that were killed. The library never takes them up again (but for older versions of it, whose files have
    no number of their own), and one that is under way writes all the time.
    """
    for path in folder.glob("*.incomplete"):
        with suppress(OSError):  # it has ended meanwhile
            if _OF_ONE_DOWNLOAD.search(path.name) and path.stat().st_mtime < time.time() - PARTIAL_S:
                path.unlink()


class _Course:
    """How far one download is."""

    def __init__(self, on_bytes: OnBytes, n_total: int) -> None:
        self._on_bytes = on_bytes
        self._n_total = n_total
        self._n_before = 0  # of the files that are there
        self._n_file = 0  # of the one that comes
        self._thread = threading.get_ident()
        self._telling = threading.Lock()
        self._ended = threading.Event()
        self._is_given_up = False

    @contextmanager
    def looked_at(self) -> Iterator[None]:
        """Tell, and heed what is answered, while the block runs."""
        self._tell()  # that it begins, however soon it fails
        looking = threading.Thread(target=contextvars.copy_context().run, args=(self._look,), name="download", daemon=True)
        looking.start()
        try:
            yield
        except (Exception, KeyboardInterrupt) as error:  # Xet's calls that come after it was called off raise the latter
            if self._is_given_up:  # whatever the library makes of that
                raise LoadAborted("the download was given up") from error
            raise
        finally:
            self._ended.set()
            looking.join()

    def bar_of(self, n_bytes: int) -> Any:
        """What the library takes for its progress bars of the next file, of which it may make several: they show nothing, and tell."""
        from tqdm.auto import tqdm  # type: ignore[import-untyped,unused-ignore]

        course = self
        self._n_file = 0

        class Bar(tqdm):  # type: ignore[misc,type-arg,unused-ignore]
            def __init__(self, *arguments: Any, **options: Any) -> None:
                super().__init__(*arguments, **{**options, "disable": True})
                self.n_told = int(options.get("initial") or 0)

            def update(self, n: float | None = 1) -> bool | None:
                self.n_told += int(n or 0)
                course.reached(min(self.n_told, n_bytes))
                return None

        return Bar

    def reached(self, n: int) -> None:
        """So much of the file is there. Raises: LoadAborted, where that ends the download."""
        self._n_file = max(self._n_file, n)
        if self._is_given_up and threading.get_ident() == self._thread:
            raise LoadAborted("the download was given up")

    def is_there(self, n_bytes: int) -> None:
        """A file of that size is there. Raises: LoadAborted."""
        self._n_before += n_bytes
        self._n_file = 0
        if not self._tell():
            raise LoadAborted("the download was given up")

    def _tell(self) -> bool:
        with self._telling:
            if not self._is_given_up and not self._on_bytes(self._n_before + self._n_file, self._n_total):
                self._is_given_up = True
            return not self._is_given_up

    def _look(self) -> None:
        while not self._ended.wait(LOOK_S):
            if not self._tell():
                _call_off_xet()  # again and again: it may not have begun


def _call_off_xet() -> None:
    """End what comes by Xet. The library itself does so on Ctrl-C alone, and has no public word for it; older ones have none at all."""
    library = sys.modules.get("huggingface_hub.utils._xet")
    call_off = getattr(library, "abort_xet_session", None)
    if call_off is not None:
        call_off()
