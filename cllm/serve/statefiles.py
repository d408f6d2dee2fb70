"""Saved pieces of sequences as files: their names, their form, and what makes one trustworthy.

A file is a header, the tokens of the path as int32, and the state. The header has a checksum of itself and the tokens, which are
read when a server starts, and one of the state, which is read when it is wanted. Whose text it is stands there only as a digest
that nobody can compute without the folder's secret. Numbers are little-endian.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import struct
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final

import attrs
import numpy as np

from cllm.engine.memory.hostpool import Piece, n_bytes_of
from cllm.engine.memory.prefix import Key
from cllm.engine.memory.tokens import shared

SUFFIX: Final = ".cllmkv"
SECRET_NAME: Final = "secret"
_MAGIC: Final = b"cLLMkv01"
_HEADER: Final = struct.Struct("<8s16s16sIIQ16s16s")  # magic, mark, owner, tokens, start, bytes of state, checksums of state and head
_N_DIGEST: Final = 16
_N_SECRET: Final = 32
_FOLDER_MODE, _FILE_MODE = 0o700, 0o600
_LEFT_S: Final = 3600.0  # half a file that is older is nobody's who still writes it
_OWN_LEFT_S: Final = 60.0  # one of this model's: another server of it may have the folder, too, and writes one in a second
_AHEAD_S: Final = 60.0  # a file that is so much newer than now was touched while the clock was wrong


class Unfit(Exception):
    """A file that is not what its name says: cut short, damaged, or another's."""


@attrs.frozen(eq=False)
class StoredPiece:
    """What the index knows of one file. `key` is a digest of the piece's own, so that the index holds no salt."""

    key: Key
    tokens: list[int]
    start: int
    path: Path
    n_bytes: int

    @property
    def n_bytes_in_pool(self) -> int:
        """What it costs the host pool."""
        return n_bytes_of(self.n_bytes, self.start, len(self.tokens))  # a little more, for what a file has beside the state


@attrs.frozen
class StateFiles:
    """One model's files in a folder, which other models' files may share. `mark` is what tells models apart in names and headers."""

    folder: Path
    mark: bytes
    secret: bytes = attrs.field(repr=False)

    @classmethod
    def open(cls, folder: Path, fingerprint: str) -> StateFiles:
        """Make the folder if need be, for its owner's eyes only. Raises: OSError."""
        folder.mkdir(parents=True, exist_ok=True, mode=_FOLDER_MODE)
        return cls(folder, _digest(fingerprint.encode()), _secret(folder / SECRET_NAME))

    def hidden(self, key: Key) -> Key:
        """Return the key under which files know `key`."""
        return hashlib.blake2b(repr(key).encode(), key=self.secret, digest_size=_N_DIGEST).hexdigest(), ""

    def ours(self) -> list[Path]:
        """The model's files, the longest unused first."""
        return _by_age(self.folder.glob(f"{self.mark.hex()}-*{SUFFIX}"))

    def all(self) -> list[Path]:
        """The files of all models, the longest unused first."""
        return _by_age(self.folder.glob(f"*-*{SUFFIX}"))

    def read_head(self, path: Path) -> StoredPiece:
        """Read what the index needs. Raises: Unfit · OSError."""
        with path.open("rb") as file:
            return self._head(path, file)[0]

    def read(self, stored: StoredPiece, key: Key) -> Piece:
        """Read a whole piece. Raises: Unfit · OSError."""
        with stored.path.open("rb") as file:
            head, checksum = self._head(stored.path, file)
            state = file.read()
        if head.key != self.hidden(key) or head.tokens != stored.tokens or head.start != stored.start:
            raise Unfit(f"{stored.path.name} is another piece now")
        if _digest(state) != checksum:
            raise Unfit(f"{stored.path.name} is damaged")
        return Piece(key, stored.tokens, stored.start, state)

    @staticmethod
    def n_bytes_of(piece: Piece) -> int:
        """Bytes of its file."""
        return _HEADER.size + np.dtype("<i4").itemsize * len(piece.tokens) + len(piece.state)

    def write(self, piece: Piece, used_ns: int | None = None) -> StoredPiece:
        """Write `piece`, which was of use last at `used_ns` or just now, so that it is there whole or not at all. Raises: OSError."""
        key, tokens = self.hidden(piece.key), np.array(piece.tokens, "<i4").tobytes()
        front = _HEADER.pack(
            _MAGIC,
            self.mark,
            bytes.fromhex(key[0]),
            len(piece.tokens),
            piece.start,
            len(piece.state),
            _digest(piece.state),
            bytes(_N_DIGEST),
        )
        front = front[:-_N_DIGEST] + _digest(front[:-_N_DIGEST] + tokens)
        name = _digest(front[:-_N_DIGEST] + tokens).hex()
        path = self.folder / f"{self.mark.hex()}-{name}{SUFFIX}"
        partial = path.with_name(f"{path.stem}.{secrets.token_hex(4)}.partial")  # another process may write the same piece
        try:
            with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, _FILE_MODE), "wb") as file:
                for part in (front, tokens, piece.state):
                    file.write(part)
            touch(partial, used_ns)
            partial.replace(path)
        except OSError:  # a full disk, which half a file would keep full
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            raise
        kept = shared(piece.tokens)  # not the objects of the text that it was computed for
        return StoredPiece(key, kept, piece.start, path, self.n_bytes_of(piece))

    def remove_partial(self) -> None:
        """Remove what a process that ended while it wrote has left, of this model and of others: what is so old that nobody writes it."""
        for path in self.folder.glob("*-*.partial"):
            with suppress(OSError):  # on a disk that can only be read it does no harm
                left_s = _OWN_LEFT_S if path.name.startswith(f"{self.mark.hex()}-") else _LEFT_S
                if path.stat().st_mtime < time.time() - left_s:
                    path.unlink(missing_ok=True)

    def _head(self, path: Path, file: BinaryIO) -> tuple[StoredPiece, bytes]:
        front = file.read(_HEADER.size)
        if len(front) < _HEADER.size:
            raise Unfit(f"{path.name} is cut short")
        magic, mark, owner, n_tokens, start, n_state, of_state, of_head = _HEADER.unpack(front)
        n_bytes = path.stat().st_size
        if magic != _MAGIC or mark != self.mark or n_bytes != _HEADER.size + 4 * n_tokens + n_state:
            raise Unfit(f"{path.name} is cut short, or not what its name says")
        tokens = file.read(4 * n_tokens)
        if _digest(front[:-_N_DIGEST] + tokens) != of_head or not 0 <= start < n_tokens:
            raise Unfit(f"{path.name} is damaged")
        ids = shared(np.frombuffer(tokens, "<i4").tolist())
        return StoredPiece((owner.hex(), ""), ids, start, path, n_bytes), of_state


def touch(path: Path, used_ns: int | None = None) -> None:
    """Note when a file was of use, just now unless said: finer than the kernel's own clock, whose ticks would make several equally old."""
    used_ns = used_ns or time.time_ns()
    os.utime(path, ns=(used_ns, used_ns))


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_N_DIGEST).digest()


def _secret(path: Path) -> bytes:
    """Return the folder's secret; the first process that comes makes one.

    Also where its file is empty, as a power cut may leave it: what was written with the one before can be read by nobody any more.
    """
    is_empty = path.exists() and not path.stat().st_size
    if is_empty or not path.exists():
        fresh = path.with_name(f"{path.name}.{secrets.token_hex(8)}")  # whole before it has its name, at which another process may look
        try:
            with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _FILE_MODE), "wb") as file:
                file.write(secrets.token_bytes(_N_SECRET))
                file.flush()
                os.fsync(file.fileno())
            _name(fresh, path, replaces=is_empty)
        finally:
            fresh.unlink(missing_ok=True)
    found = path.read_bytes()
    if len(found) != _N_SECRET:
        raise OSError(f"{path} is not a cache folder's secret")
    return found


def _name(fresh: Path, path: Path, *, replaces: bool) -> None:
    """Give a file its name; unless it `replaces` what has that, another process may have been faster, whose file stays."""
    if not replaces:
        try:
            os.link(fresh, path)
        except FileExistsError:
            return
        except OSError:  # a filesystem without links; of two who come there at once the later one's holds, and what the other wrote is lost
            pass
        else:
            return
    fresh.replace(path)


def _by_age(paths: Iterable[Path]) -> list[Path]:
    """The paths, the longest unused first; those from a time that has not come yet, which would stay until then, before all others."""
    aged, latest_ns = [], time.time_ns() + int(_AHEAD_S * 1e9)
    for path in paths:
        try:
            used_ns = path.stat().st_mtime_ns
            aged.append((used_ns if used_ns <= latest_ns else 0, path))
        except OSError:  # another process was faster
            continue
    return [path for _, path in sorted(aged)]
