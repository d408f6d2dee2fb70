"""A fake backend whose models end or hang their process, or panic, at a certain token: for tests of what stands up again."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import time

import attrs
import numpy as np

from cllm.backend import CONTRACT_VERSION, Batch, Embedder, ModelSpec, OnProgress, Probe, StepModel
from cllm.testing.fake import FakeBackend, FakeModel, FakeVocabulary
from cllm.testing.fake_embedder import embedder_of

KILL, ABORT, HANG, PANIC, HOLD = 1, 2, 3, 4, 5  # tokens that no text has
HANG_S = 3600.0
DEADLY_TEXT = "a text that kills"
PANICKING_TEXT = "a text that panics"


class Panic(BaseException):
    """What a library that is written in Rust raises when it panics: no Exception."""


def _die(batch: Batch) -> None:
    tokens = set(batch.tokens[: batch.n_rows].tolist())
    if KILL in tokens:
        os.kill(os.getpid(), signal.SIGKILL)
    if ABORT in tokens:
        os.abort()
    if HANG in tokens:
        time.sleep(HANG_S)
    if HOLD in tokens:
        ctypes.PyDLL(None).sleep(int(HANG_S))  # with Python's lock, as of a library that keeps it
    if PANIC in tokens:
        raise Panic("called unwrap on nothing")


class MortalVocabulary(FakeVocabulary):
    """Ends the process when it is to tokenise a certain text, and panics at another one."""

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """See `Vocabulary.tokenize`."""
        if text == DEADLY_TEXT:
            os.kill(os.getpid(), signal.SIGKILL)
        if text == PANICKING_TEXT:
            raise Panic("called unwrap on nothing")
        return super().tokenize(text, add_special=add_special, parse_special=parse_special)


class MortalBackend:
    """`FakeBackend` with such models.

    A path of `dies` ends the process while it loads, `dies loudly` writes to stderr before, `garbled` tells what is no bool, `untellable`
    what no message can carry, and `talks` logs, and writes to stderr; `talks badly` logs what cannot be written down. `panics` does so, and
    `nothing` gives no model. States of `keeps nothing` end with the process.
    """

    contract_version = CONTRACT_VERSION
    wants_worker = True

    def probe(self) -> Probe:
        """See `Backend.probe`."""
        return Probe(available=True, reason="a model that kills, for tests")

    def load(self, spec: ModelSpec, on_progress: OnProgress) -> StepModel:
        """See `Backend.load`."""
        if spec.path == "talks":
            logging.getLogger("mortal").warning("a warning that\nhas %d lines", 2)
        if spec.path == "talks badly":
            logging.getLogger("mortal").warning("%d layers", "many")
            logging.getLogger("mortal").warning("caf\udce9")
        if spec.path in ("talks", "dies loudly"):
            os.write(sys.stderr.fileno(), b"what native code writes\n")
        if spec.path in ("dies", "dies loudly"):
            os.kill(os.getpid(), signal.SIGKILL)
        if spec.path == "panics":
            raise Panic("called unwrap\non nothing")
        if spec.path == "nothing":
            return None  # type: ignore[return-value]
        model = FakeBackend().load(attrs.evolve(spec), on_progress)
        assert isinstance(model, FakeModel)
        model.before_step = _die
        model.vocabulary = MortalVocabulary()
        if spec.path == "keeps nothing":
            model.info = attrs.evolve(model.info, fingerprint="")
        if spec.path == "garbled":
            model.capabilities = attrs.evolve(model.capabilities, can_trim=1)  # type: ignore[arg-type]
        if spec.path == "untellable":
            model.n_cells = np.int64(model.n_cells)  # type: ignore[assignment]
        return model

    def load_embedder(self, spec: ModelSpec, on_progress: OnProgress) -> Embedder:
        """See `LoadsEmbedders.load_embedder`."""
        return embedder_of(spec, before_step=_die)


def make_backend() -> MortalBackend:
    """What an entry point names."""
    return MortalBackend()


def make_isolated_fake() -> object:
    """For the contract suite: a fake model in a process of its own."""
    from cllm.serve.worker.model import WorkerBackend

    return WorkerBackend(FakeBackend(), "cllm.testing.fake:make_backend", hang_s=60.0)


def make_isolated_llama() -> object:
    """For the contract suite: llama.cpp in a process of its own."""
    from cllm.registry import load_backend
    from cllm.serve.worker.model import WorkerBackend

    return WorkerBackend(load_backend("llama-cpu"), "cllm_llamacpp:make_cpu_backend", hang_s=60.0)
