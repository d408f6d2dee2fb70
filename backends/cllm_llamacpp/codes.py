"""What llama_decode returns, and after which of it nothing of the memory can be vouched for.

Source: llama_decode in llama.h.
"""

from __future__ import annotations

from typing import Final

from cllm.errors import ModelDied

NO_ROOM: Final = 1
ABORTED: Final = 2
INVALID: Final = -1
FAILED: Final = -3


def check_alive(code: int, *, has_recurrent_state: bool, gpu: bool) -> None:
    """Raises: ModelDied, after a failed computation of a model whose recurrent states lie among each other and move within the graph, also
    those of sequences that have no rows in the step; and where a GPU's command failed, after which every one does.
    """
    if code in (0, NO_ROOM, ABORTED, INVALID):
        return
    if has_recurrent_state:
        raise ModelDied(f"llama.cpp failed with code {code}, and recurrent states cannot be vouched for after that")
    if code == FAILED and gpu:
        raise ModelDied("the GPU failed, and computes nothing more for this process")
