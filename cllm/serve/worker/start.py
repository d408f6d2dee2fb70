"""Begins a worker process: deaf to signals before it imports what takes time.

What is sent to the whole group or unit is the parent's affair, which gives a load up, or ends what runs, in its own way.
"""

from __future__ import annotations

import signal


def main() -> None:
    """Begin."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    from cllm.serve.worker import main as workermain

    workermain.main()


if __name__ == "__main__":
    main()
