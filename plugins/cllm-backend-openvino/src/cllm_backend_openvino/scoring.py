"""The logits behind the tokens, which the pipeline does not tell: the same graph and precisions, computed token by token as answers are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np

from cllm.backend import Logits
from cllm.errors import StepFailed

NAME: Final = "openvino_model.xml"


class Scorer:
    """Computes texts with keys and values in the model's own state instead of the pipeline's blocks. Loads when it is first asked."""

    def __init__(self, path: str, properties: Mapping[str, object]) -> None:
        self._path = Path(path)
        self._properties = dict(properties)
        self._folder: TemporaryDirectory[str] | None = None
        self._request: Any = None

    def logits(self, tokens: Sequence[int]) -> Logits:
        """See `cllm.backend.TellsLogits`."""
        try:
            request = self._open()
            request.reset_state()
            return np.stack([self._step(request, token, position) for position, token in enumerate(tokens)])
        except RuntimeError as error:
            raise StepFailed(f"OpenVINO: {error}") from error

    def close(self) -> None:
        """Give back everything; a second call is harmless."""
        self._request = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _step(self, request: Any, token: int, position: int) -> Logits:
        request.infer(
            {
                "input_ids": np.array([[token]], np.int64),
                "attention_mask": np.ones((1, position + 1), np.int64),
                "position_ids": np.array([[position]], np.int64),
                "beam_idx": np.zeros(1, np.int32),
            }
        )
        row: Logits = request.get_tensor("logits").data[0, -1].astype(np.float32)
        return row

    def _open(self) -> Any:
        if self._request is None:
            import openvino

            graph = self._path / NAME if self._path.is_dir() else self._converted()
            self._request = openvino.Core().compile_model(graph, "CPU", self._properties).create_infer_request()
        return self._request

    def _converted(self) -> Path:
        """Have the file written in OpenVINO's own format, which happens beside it: so beside a link to it, in a folder of ours."""
        import openvino_genai

        self._folder = TemporaryDirectory(prefix="cllm-openvino-")
        link = Path(self._folder.name) / "model.gguf"
        link.symlink_to(self._path.resolve())
        scheduling = openvino_genai.SchedulerConfig()
        scheduling.num_kv_blocks = 1
        openvino_genai.ContinuousBatchingPipeline(link, scheduling, "CPU", {**self._properties, "enable_save_ov_model": True})
        return link.with_name(NAME)
