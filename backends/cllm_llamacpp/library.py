"""The native library: imported, checked and initialised once per process."""

from __future__ import annotations

import sys
import threading
from typing import Any, Final

from cllm.errors import BackendUnavailable
from cllm_llamacpp import abi
from cllm_llamacpp.logs import LogSink

LOG: Final = LogSink()
_INSTALL: Final = f"{sys.executable} -m pip install llama-cpp-python"

_lock = threading.Lock()
_ready: Any = None


def open_library() -> Any:
    """Return the module ``llama_cpp``, ready for use. Typed as Any: its functions are built at run time.

    Raises: BackendUnavailable with one line when it is not installed, broken, or not the version this package was written to.
    """
    global _ready
    with _lock:
        if _ready is None:
            _ready = _open()
        return _ready


def _open() -> Any:
    lib = _import()
    if wrong := abi.what_is_wrong(lib):
        raise BackendUnavailable(f"llama-cpp-python does not fit: {wrong}; {_INSTALL}=={abi.PACKAGE_VERSION}")
    LOG.install(lib)
    lib.llama_backend_init()
    return lib


def _import() -> Any:
    try:
        import llama_cpp
    except ModuleNotFoundError as error:
        if error.name != "llama_cpp":
            raise BackendUnavailable(f"llama-cpp-python is broken: {error}") from error
        raise BackendUnavailable(f"llama-cpp-python is not installed: {_INSTALL}=={abi.PACKAGE_VERSION}") from error
    except Exception as error:  # a missing shared library, a wrong CPU, a half-removed package
        reason = str(error).strip() or type(error).__name__
        raise BackendUnavailable(f"llama-cpp-python is broken: {reason.splitlines()[0]}") from error
    return llama_cpp
