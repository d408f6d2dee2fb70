"""Compiles grammars beside the pipeline, which would do it within a step, and would lose everybody's step by one that does not compile.

A pipeline of its own does it, for a model without weights. It shares the tokenizer, with which OpenVINO keeps what was compiled; its calls,
other than a step's, let Python go on.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np

from cllm_backend_openvino.forms import Grammar

N_KNOWN_MAX: Final = 4096
NAME: Final = "openvino_model.xml"


class Failed(Exception):
    """A grammar does not compile; the message says why."""


class Trials:
    """Belongs to one thread, but for `knows`."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._pipeline: Any = None
        self._known: OrderedDict[Grammar, None] = OrderedDict()

    def knows(self, grammar: Grammar) -> bool:
        """Whether it is compiled already."""
        return grammar in self._known

    def compile(self, grammar: Grammar) -> None:
        """Compile; blocks, for seconds at most. Raises: Failed."""
        import openvino
        import openvino_genai

        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = 1
        config.structured_output_config = grammar.config()
        if self._pipeline is None:
            self._pipeline = _pipeline(self._tokenizer)
        try:
            self._pipeline.generate(openvino.Tensor(np.zeros((1, 1), np.int64)), config)
        except RuntimeError as error:
            raise Failed(_last_line(error)) from error
        self._known[grammar] = None
        if len(self._known) > N_KNOWN_MAX:
            self._known.popitem(last=False)

    def is_text(self, token: int) -> bool:
        """Whether a token stands for something, other than for control."""
        return bool(self._tokenizer.decode([token], skip_special_tokens=True))

    def close(self) -> None:
        """Give back everything."""
        self._pipeline = self._tokenizer = None


def _pipeline(tokenizer: Any) -> Any:
    import openvino
    import openvino_genai

    n_vocab = max(tokenizer.get_vocab().values()) + 1
    with TemporaryDirectory(prefix="cllm-openvino-") as folder:
        openvino.save_model(_indifferent(n_vocab), Path(folder) / NAME)
        return openvino_genai.LLMPipeline(folder, tokenizer, "CPU", ATTENTION_BACKEND="SDPA")


def _indifferent(n_vocab: int) -> Any:
    """A model to which all tokens are equally likely."""
    import openvino
    from openvino import opset13 as op

    inputs = {"input_ids": np.int64, "attention_mask": np.int64, "position_ids": np.int64}
    parameters = [op.parameter([-1, -1], dtype, name=name) for name, dtype in inputs.items()] + [
        op.parameter([-1], np.int32, name="beam_idx")
    ]
    for parameter in parameters:
        parameter.output(0).set_names({parameter.friendly_name})
    shape = op.concat([op.shape_of(parameters[0]), op.constant(np.array([n_vocab], np.int64))], 0)
    logits = op.broadcast(op.constant(np.float32(0)), shape)
    logits.output(0).set_names({"logits"})
    return openvino.Model([logits], parameters, "indifferent")


def _last_line(error: Exception) -> str:
    """What the compiler says, without its places in source code."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1].rpartition(".cc:")[2][:200] if lines else type(error).__name__
