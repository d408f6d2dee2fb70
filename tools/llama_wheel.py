"""Builds llama-cpp-python once and keeps the wheel: it comes as source only, and compiling llama.cpp takes minutes.

Prints the folder of the wheel as a URL, for pip:  PIP_FIND_LINKS=$(python3 tools/llama_wheel.py) pip install .
The folder is under $CLLM_WHEEL_CACHE (default ~/.cache/cllm/wheels). Standard library only.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NAME = "llama-cpp-python"
BUILD_VARIABLES = ("CMAKE_ARGS", "CC", "CXX", "CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS", "CUDACXX")
BUILD_PREFIXES = ("CMAKE_", "SKBUILD_")  # of more of them, with their names
# GCC's bug 114098 (seen with 12.2) drops what is stored for AMX's tile configuration, and the first product of several rows dies of an
# illegal instruction. These keep it.
AMX_FLAGS = "-fno-tree-dse -fno-dse"
WAIT_S = 3600  # for another build; a machine that compiles longer has other problems


def requirement() -> str:
    """Return the pinned requirement, as in `llama-cpp-python==1.2.3`."""
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
    return next(str(d) for d in dependencies if re.match(rf"{NAME}\s*==", d))


def processor() -> str:
    """Return what the compiler sees of the processor: ggml is compiled for the one it is built on."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return platform.processor()


def is_clang() -> bool:
    """Whether the C++ compiler that a build takes is clang, which has neither GCC's fault nor its options."""
    command = [*os.environ.get("CXX", "c++").split(), "--version"]
    try:
        return "clang" in subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True).stdout
    except OSError:
        return False


def environment() -> dict[str, str]:
    """Return the environment to build in: the process's, and for a processor with AMX what its code needs to be right.

    Without SOURCE_DATE_EPOCH, whose wheels are to be the same wherever they are built: ggml then leaves out AVX and all that came after it.
    """
    variables = {name: value for name, value in os.environ.items() if name != "SOURCE_DATE_EPOCH"}
    if "amx_tile" in processor().split() and not is_clang():
        variables["CXXFLAGS"] = f"{variables.get('CXXFLAGS', '')} {AMX_FLAGS}".strip()
    return variables


def libraries() -> str:
    """Return whose C and C++ libraries it is built with: a home may be shared with containers of other systems."""
    try:
        release = platform.freedesktop_os_release()
    except OSError:
        release = {}
    return " ".join([*platform.libc_ver(), release.get("ID", ""), release.get("VERSION_ID", "")])


def key() -> str:
    """Return a name for the wheel that no other processor, system, build option or version shares."""
    variables = environment()
    more = [f"{name}={variables[name]}" for name in sorted(variables) if name.startswith(BUILD_PREFIXES) and name not in BUILD_VARIABLES]
    build = "\n".join([processor(), libraries(), *(variables.get(name, "") for name in BUILD_VARIABLES), *more])
    version = requirement().partition("==")[2]
    return f"{version}-{platform.system().lower()}-{platform.machine()}-{hashlib.sha256(build.encode()).hexdigest()[:12]}"


def cache() -> Path:
    if named := os.environ.get("CLLM_WHEEL_CACHE"):
        return Path(named)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cllm" / "wheels"
    except RuntimeError:  # a user without a home
        sys.exit("llama_wheel: there is no home to keep the wheel in; CLLM_WHEEL_CACHE names a folder for it")


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the file `path`, which the system lets go when the process dies, however it dies."""
    import fcntl

    with path.open("w") as file:
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    sys.exit(f"llama_wheel: another build has held {path} for {WAIT_S} s")
                time.sleep(1)
        yield


def require_compiler() -> None:
    compilers = [os.environ.get("CXX", "").split(" ")[0], "c++", "g++", "clang++"]
    if not any(name and shutil.which(name) for name in compilers):
        sys.exit(
            "llama_wheel: llama.cpp has to be compiled once, and there is no C++ compiler"
            " (Debian, Ubuntu: apt install build-essential; Fedora: dnf install gcc-c++; macOS: xcode-select --install)"
        )


def build(folder: Path) -> None:
    """Build the wheel into `folder`, which appears only when it is whole."""
    require_compiler()
    print(f"llama_wheel: compiling {requirement()} once; this takes some minutes", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        out = Path(scratch) / "out"
        # pip keeps what it built, too, but would return it whatever the options, and on whatever processor.
        command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-cache-dir", "--wheel-dir", str(out), requirement()]
        # The log goes to stderr: stdout carries the folder's address and nothing else.
        if subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, env=environment()).returncode:
            sys.exit(f"llama_wheel: {requirement()} could not be built; the reason is above")
        out.replace(folder)


def wheel_folder() -> Path:
    """Return the folder that holds the wheel, building it when it is not there."""
    folder = cache() / key()
    try:
        if not folder.is_dir():
            cache().mkdir(parents=True, exist_ok=True)
            with locked(cache() / f"{key()}.lock"):
                if not folder.is_dir():  # unless another built it meanwhile
                    build(folder)
    except OSError as error:
        sys.exit(f"llama_wheel: the wheel cannot be kept in {cache()}: {error.strerror or error}; CLLM_WHEEL_CACHE names another folder")
    return folder


if __name__ == "__main__":
    print(wheel_folder().resolve().as_uri())
