"""Runs every check as a newcomer or a CI runner would: lint, types, and the tests on the built wheel for each Python that is here.

Needs Python 3.11 to 3.13 and, the first time, a C++ compiler; installs the rest into .tox. Standard library only.
Arguments go to pytest, which then runs for this Python alone:  python3 tools/test.py tests/engine -k cells
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

if not (3, 11) <= sys.version_info[:2] <= (3, 13):  # before anything is compiled for one that pip would refuse
    sys.exit(f"test: cLLM needs Python 3.11, 3.12 or 3.13, and this is {sys.version.split()[0]}")

ROOT = Path(__file__).resolve().parent.parent
RUNNER = ROOT / ".tox" / "runner"
TOX = "tox>=4.25,<5"
PYTHONS = ((3, 11), (3, 12), (3, 13))
AT_ONCE = 2  # environments: most of a test's time is waiting, or one thread's
ALSO = ("plugin-openvino", "plugin-upstream", "clients", "plugin-echo")  # in environments of their own, beside the tree's tests


def bin_of(environment: Path, program: str) -> Path:
    return environment / "bin" / program


def make_runner() -> None:
    """Make the virtual environment that tox itself runs in."""
    # Programs of an environment name its place: in a checkout that was copied they would be the other one's.
    stamp, made_with = RUNNER / "installed", f"{TOX}\n{ROOT}\n{os.path.realpath(sys.executable)}\n{sys.version}"
    if stamp.exists() and stamp.read_text() == made_with:
        return
    shutil.rmtree(RUNNER.parent, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(RUNNER)], check=True)
    subprocess.run([bin_of(RUNNER, "pip"), "install", "--quiet", "--disable-pip-version-check", TOX], check=True, stdin=subprocess.DEVNULL)
    stamp.write_text(made_with)


def find_links() -> str:
    """Return pip's places for wheels, with ours in front."""
    command = [bin_of(RUNNER, "python"), ROOT / "tools" / "llama_wheel.py"]
    ours = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    forget_other_builds(ours)
    return f"{ours} {os.environ.get('PIP_FIND_LINKS', '')}".strip()


def forget_other_builds(ours: str) -> None:
    """Remove the environments in which another build of llama.cpp is installed: to pip, one of the same version is the same."""
    stamp = RUNNER / "llama"
    if stamp.exists() and stamp.read_text() == ours:
        return
    for folder in RUNNER.parent.iterdir():
        if folder != RUNNER:
            shutil.rmtree(folder, ignore_errors=True)
    stamp.write_text(ours)


def more_pythons() -> list[str]:
    """Return Pythons that pyenv keeps and may not have on the path: its shims answer only for the version that is chosen."""
    versions = Path(os.environ.get("PYENV_ROOT") or os.path.expanduser("~/.pyenv")) / "versions"
    names = [f"python{major}.{minor}" for major, minor in PYTHONS]
    return [str(path) for name in names for path in sorted(versions.glob(f"*/bin/{name}"))]


def tox(environments: list[str], arguments: list[str], links: str, *, at_once: int = 1) -> int:
    """Run the environments, `at_once` at a time; of several at a time the output of those is shown that failed."""
    discover = ["--discover", sys.executable, *more_pythons()]
    run = ["run-parallel", f"--parallel={at_once}", "--parallel-no-spinner"] if at_once > 1 else ["run"]
    command = [bin_of(RUNNER, "tox"), *run, *discover, "-e", ",".join(environments), "--", *arguments]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, "PIP_FIND_LINKS": links}, stdin=subprocess.DEVNULL).returncode


def main(arguments: list[str]) -> int:
    make_runner()
    links = find_links()
    names = [f"py{major}{minor}" for major, minor in PYTHONS]
    here = f"py{sys.version_info.major}{sys.version_info.minor}"
    # Other Pythons differ in the language, not in timing or arithmetic: they leave out what takes long, whole servers, and what measures.
    others = [f"{name}-few" for name in names if name != here]
    checks = ["lint", "types"]
    if arguments:  # who asks for some wants to see them run; to those that leave some out none may be left, which pytest calls a failure
        codes = [tox(checks, [], links, at_once=AT_ONCE), tox([here], arguments, links)]
    else:  # the longest first, so that those that run at once end together
        codes = [tox([here, *others, *checks, *ALSO], [], links, at_once=AT_ONCE), tox(["bench-smoke"], [], links)]
    return int(any(codes))  # one that a signal ended has a code below 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)  # what failed has said why
    except KeyboardInterrupt:
        sys.exit(130)
