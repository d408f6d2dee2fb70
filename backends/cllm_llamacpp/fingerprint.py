"""What a saved state fits: a text that is equal where the same file is computed in the same way."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Final

from cllm.backend import ModelSpec
from cllm_llamacpp.abi import PACKAGE_VERSION
from cllm_llamacpp.facts import Facts
from cllm_llamacpp.settings import layout_of

_N_SAMPLES: Final = 64  # places of a file that are read: its head, its end, and between them, evenly
_N_SAMPLE_BYTES: Final = 64 << 10
_FIRST_PART: Final = re.compile(r"-00001-of-\d{5}\.gguf$")


def mark_of_files(spec: ModelSpec) -> bytes:
    """Return a digest of the model and its adapters. Files of many gigabytes are not read whole: what differs in weights differs nearly
    everywhere.
    """
    paths = (*_parts(Path(spec.path)), *(Path(lora.path) for lora in spec.loras))
    return hashlib.sha256(b"".join(_sampled(path) for path in paths)).digest()


def fingerprint(files: bytes, spec: ModelSpec, facts: Facts, *, n_slots: int, n_cells_slot: int, gpu: bool) -> str:
    """Return 32 hexadecimal digits for the `files` that `mark_of_files` has marked, computed as the other arguments say."""
    info = facts.info
    fits_any = facts.keeps_all and not facts.has_two_caches  # the others' states fit a memory that is laid out alike only
    form = () if fits_any else (layout_of(spec), n_slots)
    is_scaled = facts.n_ctx_unscaled is not None and n_cells_slot > facts.n_ctx_unscaled
    facts_that_count = (
        PACKAGE_VERSION,
        info.architecture,
        info.n_params,
        info.size_bytes,
        form,
        spec.cache_type_k,
        spec.cache_type_v,
        spec.flash_attention,
        gpu,
        is_scaled,  # some models turn their keys otherwise when a slot may be longer
        [lora.scale for lora in spec.loras],
    )
    return hashlib.sha256(repr(facts_that_count).encode() + files).hexdigest()[:32]


def _parts(path: Path) -> list[Path]:
    """Return the files of a model that was split into several, else its one file."""
    if not _FIRST_PART.search(path.name):
        return [path]
    stem, _, last = path.name.partition("-00001-")
    return sorted(path.parent.glob(f"{_escaped(stem)}-?????-{last}"))


def _escaped(text: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", text)


def _sampled(path: Path) -> bytes:
    """Return a digest of the file's size and of `_N_SAMPLES` places in it."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        n_bytes = file.seek(0, 2)
        digest.update(str(n_bytes).encode())
        for i in range(_N_SAMPLES):
            file.seek(max(0, n_bytes - _N_SAMPLE_BYTES) * i // (_N_SAMPLES - 1))
            digest.update(file.read(_N_SAMPLE_BYTES))
    return digest.digest()
