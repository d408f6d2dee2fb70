"""The embedded demo model: a tiny GGUF file for trying the server and for tests."""

from importlib.resources import files
from pathlib import Path


def path() -> Path:
    """Return the path of the model file; the wheel is installed unpacked, so there always is one."""
    return Path(str(files(__name__) / "demo.gguf"))
