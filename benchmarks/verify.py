"""How far a backend's distributions of the next token are from llama.cpp's, at each precision that it has: python -m benchmarks verify

Runs `cllm verify --json` once for each set of the backend's own options, in a process of its own. For OpenVINO these are its default
precision and a matched one, F32 inference and 16 bits of keys and values, as llama.cpp has it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks import results
from benchmarks.arguments import model_path
from benchmarks.models import QUANTIZATIONS, model_file

AS_IT_COMES: Final = "as it comes"
USUAL: Final = {"openvino": ("", "precision=f32 kv_precision=f16")}  # sets of options by backend, of the others none


def run(asked: argparse.Namespace, model: Path) -> dict[str, Any]:
    """Compare with each set of options; return `data` of the result. Raises: CalledProcessError."""
    sets = asked.options or USUAL.get(asked.backend, ("",))
    return {"backend": asked.backend, "reference": asked.reference, "rows": [_row(asked, model, options.split()) for options in sets]}


def _row(asked: argparse.Namespace, model: Path, options: Sequence[str]) -> dict[str, Any]:
    """What `cllm verify` tells: the divergence in nats, over all tokens of all texts."""
    command = [sys.executable, "-m", "cllm", "verify", str(model), "--backend", asked.backend, "--reference", asked.reference]
    command += ["--threads", str(asked.threads), "--text-tokens", str(asked.text_tokens), "--json"]
    command += [word for option in options for word in ("--backend-option", option)]
    found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    figures = {name: found[name] for name in ("n_rows", "mean", "p50", "p99", "max", "top1_agreement")}
    return {"options": " ".join(options) or AS_IT_COMES, **figures}


def show(data: dict[str, Any]) -> None:
    """Print what came of it."""
    for row in data["rows"]:
        divergence = f"KL divergence {row['mean']:.3g} nats, {row['max']:.3g} at most"
        same = f"the same likeliest token in {row['top1_agreement']:.1%}"
        print(f"{data['backend']}, {row['options']}: {divergence}, {same} of {row['n_rows']} rows")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of a run."""
    parser.add_argument("--model", type=model_path, help="a GGUF file (default: the qwen3-0.6b shape, made on demand)")
    parser.add_argument("--quantization", default="Q4_K_M", choices=QUANTIZATIONS, help="of the model that is made")
    parser.add_argument("--backend", default="openvino", help="that is compared")
    parser.add_argument("--reference", default="llama-cpu", help="the backend that counts as right")
    parser.add_argument(
        "--options",
        action="append",
        default=[],
        help="the backend's own, as in --options='precision=f32 kv_precision=f16', '' for none; repeatable (default: what it is known for)",
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--text-tokens", type=int, default=96, help="of each text at most")
    parser.add_argument("--results", type=Path, default=results.FOLDER, help="the folder of the results")


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare, tell, keep the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks verify", description=__doc__.splitlines()[0] if __doc__ else None)
    add_arguments(parser)
    asked = parser.parse_args(arguments)
    model = asked.model or model_file("qwen3-0.6b", asked.quantization)
    data = run(asked, model)
    show(data)
    settings = {"model": results.model_facts(model), "threads": asked.threads, "text_tokens": asked.text_tokens}
    print(f"written: {results.write('verify', f'{asked.backend}-{model.stem}', settings, data, asked.results).name}")


if __name__ == "__main__":
    main()
