"""`python -m benchmarks COMMAND`: each command with options of its own, which `--help` after its name lists."""

from __future__ import annotations

import importlib
import sys
from typing import Final

from benchmarks import results
from cllm.testing.loopback import pass_by_proxies

COMMANDS: Final = {
    "ladder": ("benchmarks.ladder", "what each layer costs over the one below, on a real model"),
    "against-native": ("benchmarks.against_native", "all layers together, over HTTP, beside a bare loop of llama_decode"),
    "passes": ("benchmarks.passes", "what single calls of llama_decode take, by what is in them"),
    "stack": ("benchmarks.ceiling", "what the layers above a model could carry, on fake ones"),
    "peers": ("benchmarks.peers", "other servers beside ours, on the same work"),
    "verify": ("benchmarks.verify", "how far another backend's next tokens are from llama.cpp's, at each precision"),
    "kills": ("benchmarks.kills", "what clients see when the model's own process is killed, again and again"),
    "promises": ("benchmarks.promises", "what scheduling must come to: conversations, overload, keys that flood, too few cells"),
    "simulate": ("benchmarks.simulate", "what rules for the row budget would bring, on a machine that only counts time"),
    "report": ("benchmarks.report", "Markdown and plots of the results that are kept, and README's tables"),
    "smoke": ("benchmarks.smoke", "all of it in two minutes on the demo model, to see that it works"),
}


def main() -> None:
    """Run one command; it reads the rest of the command line itself."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in COMMANDS:
        lines = [f"  {command:14} {text}" for command, (_, text) in COMMANDS.items()]
        print("\n".join(["usage: python -m benchmarks COMMAND [OPTION ...]", *lines]), file=sys.stdout if name == "--help" else sys.stderr)
        sys.exit(0 if name == "--help" else 2)
    pass_by_proxies()  # all that is measured is on this machine
    results.revision()  # as it is now: a run takes long, and what it measures is being imported meanwhile
    sys.argv = [f"python -m benchmarks {name}", *sys.argv[2:]]
    importlib.import_module(COMMANDS[name][0]).main()


if __name__ == "__main__":
    main()
