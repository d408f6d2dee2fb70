"""Models from the Hugging Face hub: which files a reference means, fetching them, and what the local cache holds.

A reference is `user/repo`, `user/repo:Q4_K_M` (files whose name has that quantisation) or `user/repo:file.gguf`, with the file's folders
where another has its name; `hf.co/` or the hub's address may stand before it. Files live in the cache that all programs of the hub's
library share (`HF_HOME`); `HF_TOKEN`, `HF_ENDPOINT` and `HF_HUB_OFFLINE` mean what they mean there. Blocking.
"""

from __future__ import annotations

import dataclasses
import errno
import glob
import logging
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs
import structlog

from cllm.download import OnBytes, download
from cllm.errors import CllmError, LoadFailed

if TYPE_CHECKING:
    from huggingface_hub import CachedFileInfo, CachedRepoInfo, DeleteCacheStrategy, HFCacheInfo

log = structlog.get_logger("cllm.hub")

_REFERENCE: Final = re.compile(
    r"(?:(?:https://)?(?:hf|huggingface)\.co/)?"  # as a browser shows it, and as Ollama takes it
    r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(?::(?P<wanted>[\w.-]+(?:/[\w.-]+)*))?"
)
_SPLIT: Final = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<total>\d{5})\.gguf", re.IGNORECASE)
ASK_S: Final = 10.0  # as the hub's library waits for the beginning of a file; to ask for a model, it would wait for ever
PASSING: Final = (408, 429)  # statuses of the hub that say nothing of the model, as all from 500 on
OF_THE_DISK: Final = {
    getattr(errno, name) for name in ("ENOSPC", "EDQUOT", "EFBIG", "EACCES", "EPERM", "EROFS", "EIO") if hasattr(errno, name)
}
# Taken in this order when a reference names none: the usual middle between size and quality, then what loses next to nothing.
PREFERRED: Final = ("Q4_K_M", "Q8_0", "F16", "BF16")
# Files beside a model that end in .gguf and cannot be served: what sees or hears for it, what it was quantised with, what drafts for it.
_NO_MODELS: Final = re.compile(
    r"(?:.*/)?(?:[^/]*(?:mmproj|imatrix)[^/]*|(?:mtp|eagle3|dflash|dspark)-[^/]*|[^/]*-mtp\.gguf)|(?:.*/)?mtp/.*"
)


class HubFailed(LoadFailed):
    """The hub, or the cache, does not have what was asked for; the message is one line for the operator."""


@attrs.frozen
class Reference:
    """What a person names."""

    repo: str
    wanted: str | None = None  # a quantisation or a file

    def __str__(self) -> str:
        return self.repo if self.wanted is None else f"{self.repo}:{self.wanted}"


@attrs.frozen(kw_only=True)
class CachedModel:
    """A model whose files are all in the cache."""

    reference: Reference
    path: Path  # its first file
    n_files: int
    size_bytes: int
    used_at: float  # seconds since the epoch


def reference_of(text: str) -> Reference | None:
    """The reference that `text` is; None for what names a file or a folder here."""
    reference = parsed(text)
    return None if reference is None or os.path.exists(text) else reference


def parsed(text: str) -> Reference | None:
    """The reference that `text` is by its form, whatever there is here."""
    match = _REFERENCE.fullmatch(text)
    if match is None or (match["wanted"] is None and text.lower().endswith(".gguf")):
        return None
    return Reference(match["repo"], match["wanted"])


def local_path(model: str, on_bytes: OnBytes) -> str:
    """The file that `model` names; a reference's is fetched if the cache lacks it.

    Raises: HubFailed · LoadAborted.
    """
    reference = reference_of(model)
    if reference is None:
        return model
    path, why = fetch(reference, on_bytes)
    if why:
        log.warning("hub.cached", model=model, why=why)
    return str(path)


def size_of(model: str) -> int:
    """The bytes of the file that `model` names, here or in the cache, with the further files of a split one; 0 for what is neither, or is
    where we may not look.
    """
    reference = reference_of(model)
    if reference is not None:
        try:
            model = str(_from_cache(reference, "nobody asked the hub")[0])
        except HubFailed:
            return 0
    path = Path(model)
    if not path.name:  # `.`, say
        return 0
    split = _SPLIT.fullmatch(path.name)
    name = f"{glob.escape(split['stem'])}-*-of-{split['total']}.gguf" if split else glob.escape(path.name)
    try:
        return sum(part.stat().st_size for part in path.parent.glob(name) if part.is_file())
    except OSError:
        return 0


# --- which files -------------------------------------------------------------------------------------------------------


def models_among(names: Iterable[str]) -> dict[str, list[str]]:
    """The models among a repository's files: for each its files in order. A split model is known by its name without the numbers.

    Of one that is there in one file and split, or split in two ways, the fewest files count, and that one file.
    """
    found: dict[tuple[str, bool, int], list[str]] = {}  # by name, whether it is split, and into how many
    for name in sorted(names):
        if not name.lower().endswith(".gguf") or _NO_MODELS.fullmatch(name.lower()):
            continue
        split = _SPLIT.fullmatch(name)
        kind = (f"{split['stem']}.gguf", True, int(split["total"])) if split else (name, False, 1)
        found.setdefault(kind, []).append(name)
    models: dict[str, list[str]] = {}
    for (name, _, n), files in sorted(found.items(), key=lambda one: (len(one[1]), one[0][1])):
        if len(files) == n:
            models.setdefault(name, files)
    return models


def choose(models: dict[str, list[str]], reference: Reference) -> list[str]:
    """The files of the one model that the reference means. Raises: HubFailed, naming what there is."""
    if not models:
        raise HubFailed(f"{reference.repo} has no GGUF files")
    found = _matching(models, reference.wanted)
    if len(found) != 1:
        asked = "has several models" if reference.wanted is None else f"has {'several' if found else 'no'} {reference.wanted}"
        raise HubFailed(f"{reference.repo} {asked}; {_names(models, reference.repo)}")
    return models[found[0]]


def _names(models: dict[str, list[str]], repo: str) -> str:
    """How a person names one of `models`."""
    names = [name_among(models, name) for name in sorted(models)]
    return f"name one as in {repo}:{names[0]}: there are {', '.join(names)[:500]}"


def name_among(models: dict[str, list[str]], name: str) -> str:
    """What a reference calls one of `models`: its quantisation, or, where that could mean another one too, its file, with its folders."""
    short = (quantization_of(name), name.rpartition("/")[2])
    return next((each for each in short if each and _matching(models, each) == [name]), name)


def _matching(models: dict[str, list[str]], wanted: str | None) -> list[str]:
    if wanted is None:
        if len(models) == 1:
            return list(models)
        return next((found for quantization in PREFERRED if (found := _matching(models, quantization))), [])
    exact = [name for name, files in models.items() if wanted in (name, name.rpartition("/")[2], *files)]
    return exact or [name for name in models if _has(name, wanted)]


def _has(name: str, quantization: str) -> bool:
    # Between signs that are no letters: Q4_K is not Q4_K_M, and UD-Q4_K_XL is not Q4_K_XL's only spelling.
    return re.search(rf"(?<![A-Za-z0-9_]){re.escape(quantization)}(?![A-Za-z0-9_])", name, re.IGNORECASE) is not None


def quantization_of(name: str) -> str:
    """The quantisation in a file's name, as far as one can be told."""
    found = re.search(r"(?<![A-Za-z0-9])((?:I?Q\d|TQ\d|MXFP\d)[A-Za-z0-9_]*|BF16|F16|F32)(?![A-Za-z0-9])", name, re.IGNORECASE)
    return found[1] if found else ""


# --- fetching ----------------------------------------------------------------------------------------------------------


def fetch(reference: Reference, on_bytes: OnBytes) -> tuple[Path, str]:
    """Bring a model's files into the cache; return the first one, which is what llama.cpp opens, and, where it is what the cache had, why.

    A connection that breaks is taken up where it broke; files that are there already are not fetched again. Without the hub (offline, not
    reached, overloaded, or something else in its place) the cache must suffice. Raises: HubFailed · LoadAborted.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    _leave_lines_to_root()
    if constants.HF_HUB_OFFLINE:
        return _from_cache(reference, "the hub is switched off (HF_HUB_OFFLINE)")
    try:
        info = HfApi(library_name="cllm").model_info(reference.repo, files_metadata=True, timeout=ASK_S)
        sizes = {one.rfilename: one.size or 0 for one in info.siblings or ()}
        files = choose(models_among(sizes), reference)
        return download(reference.repo, info.sha, files, sizes, on_bytes), ""
    except CllmError:
        raise
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in PASSING or status >= 500:
            return _from_cache(reference, f"the hub answered {status}")
        raise HubFailed(_one_line(reference, error)) from error
    except HFValidationError as error:
        raise HubFailed(_one_line(reference, error)) from error
    except Exception as error:
        return _from_cache(reference, _why_not(error))


def _leave_lines_to_root() -> None:
    """Where logging is set up, have the library not write its lines by itself as well, which it begins with when it is imported."""
    if logging.getLogger().handlers:
        logging.getLogger("huggingface_hub").handlers.clear()


def _why_not(error: Exception) -> str:
    """Why there is nothing from the hub."""
    if isinstance(error, OSError) and error.errno is not None and error.errno in OF_THE_DISK:
        return f"it could not be written there: {os.strerror(error.errno)}"
    if isinstance(error, OSError) or _is_of_the_network(error):  # the library's errors of the network are of these two kinds
        return f"the hub was not reached ({type(error).__name__})"
    # A proxy that answers in the hub's place, an address that is none: no list of these would be complete.
    return f"the hub could not be asked ({type(error).__name__}: {' '.join(str(error).split())[:300]})"


def _is_of_the_network(error: Exception) -> bool:
    """Whether it comes from the library's HTTP client, whose package changes between its versions."""
    return any(kind.__name__ in ("TransportError", "RequestError", "HTTPError") for kind in type(error).__mro__)


def _one_line(reference: Reference, error: Exception) -> str:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):
        return f"{reference.repo} wants its terms accepted on the hub, and a token in HF_TOKEN"
    if isinstance(error, RepositoryNotFoundError):
        return f"the hub has no model {reference.repo}, or HF_TOKEN may not read it"
    return f"{reference}: {' '.join(str(error).split())[:300]}"


# --- the cache ---------------------------------------------------------------------------------------------------------


def _from_cache(reference: Reference, why: str) -> tuple[Path, str]:
    revisions = [files for repo in _repos() if repo.repo_id == reference.repo for files in _revisions(repo)]
    for files in revisions:  # the newest first; a revision may lack what an older one has
        try:
            return Path(files[choose(models_among(files), reference)[0]].file_path), why
        except HubFailed:
            continue
    raise HubFailed(f"{reference} is not in the cache, and {why}")


def cached_models() -> list[CachedModel]:
    """The models in the cache, the last used first."""
    found: dict[str, CachedModel] = {}
    for repo in _repos():
        for files in _revisions(repo):
            models = models_among(files)
            for name, parts in models.items():
                reference = Reference(repo.repo_id, name_among(models, name))
                model = CachedModel(
                    reference=reference,
                    path=files[parts[0]].file_path,
                    n_files=len(parts),
                    size_bytes=sum(files[part].size_on_disk for part in parts),
                    used_at=max(files[part].blob_last_accessed for part in parts),
                )
                found.setdefault(str(reference), model)
    return sorted(found.values(), key=lambda model: -model.used_at)


def remove(reference: Reference) -> int:
    """Remove a repository from the cache, or the one model that is named; return the bytes freed. Raises: HubFailed."""
    try:
        return _remove_repo(reference.repo) if reference.wanted is None else _remove_model(reference)
    except OSError as error:
        raise HubFailed(f"{reference} could not be removed: {error}") from error


def _remove_repo(repo: str) -> int:
    """Remove the folder, with what was left of downloads that were cut: the library's own way counts whole files alone.

    That goes first: of what came by Xet the folder has links, and only the library knows whether anything else needs the files themselves.
    """
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"
    if not folder.is_dir():
        raise HubFailed(f"{repo} is not in the cache")
    cache, n_bytes = _cache(), 0
    for own in [one for one in _models(cache) if one.repo_id == repo and one.revisions]:
        assert cache is not None, "it has a repository"
        # Alone: another that was copied or renamed on the hub may have revisions of the same name, and the library would take either.
        going = dataclasses.replace(cache, repos=frozenset({own})).delete_revisions(*(revision.commit_hash for revision in own.revisions))
        n_bytes += going.expected_freed_size + _size_of(folder.rglob("*.incomplete"))
        _execute(going)
    if folder.is_dir():
        n_bytes += _size_of(folder.rglob("*"))
        shutil.rmtree(folder)
    return n_bytes


def _size_of(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths if path.is_file() and not path.is_symlink())


def _execute(going: DeleteCacheStrategy) -> None:
    """Do it; what the library would log of a folder that may not be written is told as an error, when it is found to be there still."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        going.execute()
    finally:
        logger.setLevel(level)


def _remove_model(reference: Reference) -> int:
    cache = _cache()
    files = _files(_models(cache), reference)
    if cache is None or not hasattr(cache, "delete_files"):  # an older library, which has each repository's files in its folder
        return sum(_unlink(paths) for paths in {(file.file_path, file.blob_path) for file in files})
    going = cache.delete_files(*files)
    _execute(going)
    return int(going.expected_freed_size)


def _files(repos: Sequence[CachedRepoInfo], reference: Reference) -> list[CachedFileInfo]:
    """The files of the one model that is named, in every revision. Raises: HubFailed."""
    found: list[CachedFileInfo] = []
    for files in (files for repo in repos for files in _revisions(repo)):
        models = models_among(files)
        names = _matching(models, reference.wanted)
        if len(names) > 1:
            raise HubFailed(f"{reference.repo} has several {reference.wanted}; {_names(models, reference.repo)}")
        found += [files[part] for name in names for part in models[name]]
    if not found:
        raise HubFailed(f"{reference} is not in the cache")
    return found


def _unlink(paths: tuple[Path, Path]) -> int:
    link, blob = paths
    link.unlink(missing_ok=True)
    if not blob.exists():  # another revision had the same file
        return 0
    size = blob.stat().st_size
    blob.unlink()
    return size


def _repos() -> list[CachedRepoInfo]:
    return _models(_cache())


def _models(cache: HFCacheInfo | None) -> list[CachedRepoInfo]:
    return [] if cache is None else [repo for repo in cache.repos if repo.repo_type == "model"]


def _cache() -> HFCacheInfo | None:
    """What the cache holds; None where there is none. Raises: HubFailed."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    _leave_lines_to_root()
    try:
        return scan_cache_dir(constants.HF_HUB_CACHE)
    except CacheNotFound:
        return None
    except (OSError, ValueError) as error:  # not to be read, or no folder
        raise HubFailed(f"the cache cannot be read: {' '.join(str(error).split())}") from error


def _revisions(repo: CachedRepoInfo) -> list[dict[str, Any]]:
    """For each revision, the newest first, its files by their path in the repository."""
    revisions = sorted(repo.revisions, key=lambda revision: -revision.last_modified)
    return [
        {file.file_path.relative_to(revision.snapshot_path).as_posix(): file for file in revision.files if file.file_path.exists()}
        for revision in revisions
    ]
