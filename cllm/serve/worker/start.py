"""Begins a worker process: deaf to signals before it imports what takes time.

What is sent to the whole group or unit is the parent's affair, which gives a load up, or ends what runs, in its own way.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Final

OWN_PATH: Final = "_CLLM_PYTHONPATH"  # the server's own PYTHONPATH, in whose place the worker is given all that the server imports from


def main() -> None:
    """Begin."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for end in sys.argv[1:5]:  # of the parent's sockets: held by a child that outlives this process, they would hide its death
        os.set_inheritable(int(end), False)
    # The path is complete by now. What a plugin starts, which may be another Python, is to find its own packages, not ours.
    if own := os.environ.pop(OWN_PATH, ""):
        os.environ["PYTHONPATH"] = own
    else:
        os.environ.pop("PYTHONPATH", None)
    from cllm.serve.worker import main as workermain

    workermain.main()


if __name__ == "__main__":
    main()
