"""The servers that are measured beside ours, where they are found, and how each is told the same model, threads, slots and cells."""

from __future__ import annotations

import argparse
import atexit
import functools
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

import attrs

from benchmarks.server import Server

START_S: Final = 120.0  # for a program that only tells something of itself; some import much for it
N_VERSION_MAX: Final = 100


@attrs.frozen(kw_only=True)
class House:
    """What all servers get."""

    model: Path
    n_slots: int
    n_cells: int  # of all slots together
    n_threads: int


@attrs.frozen(kw_only=True)
class Contender:
    """A server in one of its settings."""

    peer: str
    setting: str
    command: tuple[str, ...]  # `{port}` is filled in
    ready_path: str = "/v1/models"
    environment: Mapping[str, str] = attrs.field(factory=dict)
    prepare: Callable[[Server], None] | None = None  # what it needs when it is up, before it can answer
    version_command: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """Peer and setting."""
        return f"{self.peer} ({self.setting})"

    def server(self) -> AbstractContextManager[Server]:
        """The server, which runs while one is within."""
        server = _Prepared(self.command, ready_path=self.ready_path, environment=self.environment)
        server.prepare = self.prepare
        return server


class _Prepared(Server):
    """A server that is not ready before something was done to it."""

    prepare: Callable[[Server], None] | None = None

    def _wait_until_ready(self) -> None:
        super()._wait_until_ready()
        if self.prepare is not None:
            self.prepare(self)


CALIBRATION_DIR: Final = "--calibration-dir"


def cllm_serve(house: House, options: Sequence[str], setting: str = "as it comes", *, says_parallel: bool = True) -> Contender:
    """The one that all others are held against: `cllm serve` with the sizes that all have, and the options that were asked for.

    Unless `says_parallel`, it is not told how many run at once, and heeds its `--itl-max-ms` as who starts it without either has it.

    What steps cost is measured anew for each run, unless `options` say where it is kept: what an earlier one kept may be of an hour in
    which the machine did something else.
    """
    is_told = any(option == CALIBRATION_DIR or option.startswith(f"{CALIBRATION_DIR}=") for option in options)
    kept = () if is_told else (CALIBRATION_DIR, _temporary_folder())
    slots = ("--parallel", str(house.n_slots)) if says_parallel else ()
    sizes = ("--ctx-size", str(house.n_cells), *slots, "--threads", str(house.n_threads))
    command = (sys.executable, "-m", "cllm", "serve", str(house.model), *sizes, *kept, *options)
    command = (*command, "--log-level", "warning", "--port", "{port}")
    return Contender(peer="cllm", setting=setting, command=command, ready_path="/ready")


def _temporary_folder() -> str:
    folder = tempfile.mkdtemp(prefix="cllm-bench-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


# --- llama-server --------------------------------------------------------------------------------------------------------

# Small batches buy it short gaps, large ones throughput; its cache of prompts saves prefill and costs copies.
LLAMA_SERVER_SETTINGS: Final = {
    "as it comes": (),
    "-no-kvu": ("-no-kvu",),
    "-kvu": ("-kvu",),
    "-b 32": ("-b", "32", "-ub", "32"),
    "-b 64": ("-b", "64", "-ub", "64"),
    "-kvu -b 64": ("-kvu", "-b", "64", "-ub", "64"),
    "no prompt cache": ("--cache-ram", "0", "--no-cache-prompt"),
}
# Two names for one configuration: told how many slots there are, as it always is here, llama-server gives each a memory of its own.
LLAMA_SERVER_ALIKE: Final = ("as it comes", "-no-kvu")


def llama_server(program: str, house: House) -> list[Contender]:
    """In several settings, since each is best at something."""
    sizes = ("-c", house.n_cells, "-np", house.n_slots, "-t", house.n_threads, "-tb", house.n_threads)
    common = (program, "-m", house.model, *sizes, "--host", "127.0.0.1", "--port", "{port}", "--no-webui")
    return [
        Contender(
            peer="llama-server",
            setting=name,
            command=tuple(map(str, (*common, *options))),
            ready_path="/health",
            version_command=(program, "--version"),
        )
        for name, options in LLAMA_SERVER_SETTINGS.items()
    ]


# --- the others ----------------------------------------------------------------------------------------------------------


def llama_cpp_python(python: str, house: House) -> list[Contender]:
    """llama-cpp-python's own server, which computes one request at a time: all cells are that one's, and no other may interrupt it."""
    sizes = ("--n_ctx", house.n_cells, "--n_threads", house.n_threads, "--n_threads_batch", house.n_threads)
    own = ("--interrupt_requests", "false")
    command = (python, "-m", "llama_cpp.server", "--model", house.model, *sizes, *own, "--host", "127.0.0.1", "--port", "{port}")
    version = (python, "-c", "import llama_cpp; print('version', llama_cpp.__version__)")
    return [Contender(peer="llama-cpp-python", setting="as it comes", command=tuple(map(str, command)), version_command=version)]


@functools.cache
def _ollama_folder() -> str:
    """For copies of the models, one of each, however many workloads are measured on it."""
    return _temporary_folder()


def ollama(program: str, house: House) -> list[Contender]:
    """Ollama, with a folder of its own for the model that it makes of the file."""
    folder = _ollama_folder()
    environment = {
        "OLLAMA_HOST": "127.0.0.1:{port}",
        "OLLAMA_MODELS": folder,
        "OLLAMA_NUM_PARALLEL": str(house.n_slots),
        "OLLAMA_CONTEXT_LENGTH": str(house.n_cells // house.n_slots),
        "OLLAMA_KEEP_ALIVE": "-1",
    }

    def create(server: Server) -> None:
        recipe = Path(folder) / "Modelfile"
        recipe.write_text(f"FROM {house.model.resolve()}\nTEMPLATE {{{{ .Prompt }}}}\nPARAMETER num_thread {house.n_threads}\n")
        done = subprocess.run(
            [program, "create", "benched", "-f", str(recipe)],
            env={**os.environ, "OLLAMA_HOST": f"127.0.0.1:{server.port}"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        if done.returncode:
            raise RuntimeError(f"ollama create gave {done.returncode}: {done.stderr.strip()[-300:]}")

    one = Contender(
        peer="ollama",
        setting="as it comes",
        command=(program, "serve"),
        ready_path="/",
        environment=environment,
        prepare=create,
        version_command=(program, "--version"),
    )
    return [one]


def vllm(program: str, house: House) -> list[Contender]:
    """vLLM, by its CPU backend where there is no GPU. It reads GGUF files where it has the plugin for them."""
    sizes = ("--max-num-seqs", house.n_slots, "--max-model-len", house.n_cells // house.n_slots)
    command = (program, "serve", house.model, *sizes, "--host", "127.0.0.1", "--port", "{port}")
    environment = {
        "OMP_NUM_THREADS": str(house.n_threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else it takes a thread for each core, whatever the line above says
        "VLLM_CPU_KVCACHE_SPACE": str(_cells_gib(house)),  # else it takes a large part of the memory, and may not start beside us
        "VLLM_NO_USAGE_STATS": "1",
    }
    one = Contender(
        peer="vllm",
        setting="as it comes",
        command=tuple(map(str, command)),
        ready_path="/health",
        environment=environment,
        version_command=(program, "--version"),
    )
    return [one]


def _cells_gib(house: House) -> int:
    """Whole GiB that hold the cells with keys and values of two bytes each, by the file's own sizes."""
    import gguf

    fields = gguf.GGUFReader(house.model).fields
    name = f"{fields['general.architecture'].contents()}."

    def told(key: str, default: Any = 0) -> Any:
        return fields[name + key].contents() if name + key in fields else default

    def of_all_layers(n_heads: int | list[int]) -> int:
        n_layers: int = told("block_count")
        return sum(n_heads) if isinstance(n_heads, list) else n_heads * n_layers

    n_heads = told("attention.head_count")
    n_embd_head = told("embedding_length") * told("block_count") // max(of_all_layers(n_heads), 1)
    n_embd: int = told("attention.key_length", n_embd_head) + told("attention.value_length", n_embd_head)
    return math.ceil(house.n_cells * of_all_layers(told("attention.head_count_kv", n_heads)) * n_embd * 2 / 2**30)


def find_contenders(asked: argparse.Namespace, house: House) -> tuple[list[Contender], list[str]]:
    """Those that are here, and the names of those that are not. Raises: SystemExit, when one that was named is not, or none is wanted."""
    contenders: list[Contender] = []
    not_found: list[str] = []
    for name, make, given in (
        ("llama-server", llama_server, asked.llama_server),
        ("ollama", ollama, asked.ollama),
        ("vllm", vllm, asked.vllm),
    ):
        program = shutil.which(given)
        if program is None and given != name:
            raise SystemExit(f"--{name}: there is no program {given}")
        if program is None:
            not_found.append(name)
        else:
            contenders += make(program, house)
    if has_llama_cpp_server(asked.llama_cpp_python):
        contenders += llama_cpp_python(asked.llama_cpp_python, house)
    elif asked.llama_cpp_python != sys.executable:
        raise SystemExit(f"--llama-cpp-python: {asked.llama_cpp_python} cannot run llama_cpp.server")
    else:
        not_found.append("llama-cpp-python's server")
    plain = "with --parallel" if asked.without_parallel else "as it comes"
    contenders += [cllm_serve(house, shlex.split(options), options or plain) for options in asked.beside]
    words = [re.compile(rf"(?<![\w-])-*{re.escape(word)}(?![\w-])") for word in asked.only.split(",") if word]
    wanted = [one for one in contenders if not words or any(word.search(one.title) for word in words)]
    if contenders and not wanted:
        raise SystemExit(f"--only: none is named {asked.only}; there are {', '.join(one.title for one in contenders)}")
    return wanted, not_found


def versions(contenders: Sequence[Contender]) -> dict[str, str]:
    """What the peers say of their versions, by name; one that says nothing is left out."""
    commands = {one.peer: one.version_command for one in contenders if one.version_command}
    return {peer: version for peer, command in commands.items() if (version := _version(command))}


def _version(command: Sequence[str]) -> str:
    """The line that names the version, or else the last one: some warn or tell of their libraries before."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=START_S,
            text=True,
            errors="replace",
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    named = [line for line in lines if "version" in line.lower()] or lines[-1:]
    return re.sub(r"\S*/", "", named[0])[:N_VERSION_MAX] if named and not done.returncode else ""  # results name no folders


def has_llama_cpp_server(python: str) -> bool:
    """Whether that Python can run llama-cpp-python's server; its parts are an extra of that distribution."""
    try:
        done = subprocess.run([python, "-c", "import llama_cpp.server.app"], capture_output=True, stdin=subprocess.DEVNULL, timeout=START_S)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
