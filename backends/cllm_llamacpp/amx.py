"""Whether a processor's tile instructions (AMX) give what they should, found out in a process that may die of it.

llama.cpp lays weights out for them where it was compiled on a processor that has them. GCC's bug 114098 (seen with 12.2) leaves the tiles
without the shape that they are to have, so that the first step of several rows ends the process with an illegal instruction. That shape is
the same for all kinds of weights, so that one kind tells.

Run as a script, this computes one product with such a layout, or with the plain one where there is no such: it needs nothing but the
standard library, and takes the path of llama.cpp's library. It says what it found, since an exit code tells nothing where children are
nobody's to wait for (SIGCHLD ignored).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import signal
import subprocess
import sys
from typing import Any, Final

logger = logging.getLogger("cllm.llamacpp")

_SOUND: Final = "the product is right"
_WRONG: Final = "the product is wrong"
_TIMEOUT_S: Final = 60
_UNUSED: Final = "it computes without these instructions and without repacked weights, and slower"
_REMEDY: Final = (
    'CXXFLAGS="-fno-tree-dse -fno-dse" {python} -m pip install --force-reinstall --no-deps --no-cache-dir llama-cpp-python=={version}, '
    "with the CMAKE_ARGS that it had"
)
_FAULTS: Final = (signal.SIGILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGABRT)

_PR_SET_DUMPABLE: Final = 4
_CPU: Final = 0  # GGML_BACKEND_DEVICE_TYPE_CPU
_F32: Final = 0  # GGML_TYPE_F32
_Q8_0: Final = 8  # GGML_TYPE_Q8_0: blocks of a scale, which has 16 bits, and 32 numbers of 8
_ONE: Final = b"\x00\x3c"  # as a scale
_N_BLOCK: Final = 32

_N_IN: Final = 256
_N_OUT: Final = 64
_N_ROWS: Final = 40  # whole tiles and a part of one, which go different ways
_N_VALUES: Final = 5  # of the weights: -2 to 2
_TOLERANCE: Final = 4.0  # what goes in is rounded to 8 bits


def is_sound(lib: Any) -> bool:
    """Return whether weights may be laid out for other instructions than the usual ones in this build of llama.cpp (``llama_cpp``)."""
    if b"AMX_INT8 = 1" not in lib.llama_print_system_info():
        return True
    return _computes(str(lib.llama_cpp._lib._name))


@functools.cache
def _computes(library: str) -> bool:
    """Whether a process of its own gives the right product; where none can be started, it does not."""
    try:
        if not sys.executable:  # an interpreter within another program
            raise OSError("there is no Python to start")
        done = subprocess.run(
            [sys.executable, "-I", __file__, library],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
            env=os.environ | {"GGML_NO_BACKTRACE": "1"},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        logger.warning("whether AMX works could not be tried (%s): %s", error, _UNUSED)
        return False
    found = done.stdout.decode("utf-8", "replace").rpartition("\n")[2]
    if found == _SOUND:
        return True
    if found == _WRONG or -done.returncode in _FAULTS:
        how = found or signal.Signals(-done.returncode).name
        logger.warning("this build of llama.cpp fails with AMX (%s): %s; to mend it: %s", how, _UNUSED, _remedy())
    else:
        last = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        logger.warning("whether AMX works could not be tried (exit code %d: %s): %s", done.returncode, last, _UNUSED)
    return False


def _remedy() -> str:
    from cllm_llamacpp.abi import PACKAGE_VERSION  # not at the top: a script in its own process has no packages

    return _REMEDY.format(python=sys.executable, version=PACKAGE_VERSION)


class _Init(ctypes.Structure):
    """ggml_init_params."""

    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


class _Ggml:
    """The functions of ggml that are needed, found in `library` and what it depends on. All handles are addresses."""

    def __init__(self, library: str) -> None:
        self._native = ctypes.CDLL(library)
        self._function("llama_backend_init", None)()  # builds that have a library for each kind of processor choose one here
        pointer, text, size = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t
        self.device_by_type = self._function("ggml_backend_dev_by_type", pointer, ctypes.c_int)
        self.registry_of = self._function("ggml_backend_dev_backend_reg", pointer, pointer)
        self.address = self._function("ggml_backend_reg_get_proc_address", pointer, pointer, text)
        self.layout_name = self._function("ggml_backend_buft_name", text, pointer)
        self.open_device = self._function("ggml_backend_dev_init", pointer, pointer, text)
        self.init = self._function("ggml_init", pointer, _Init)
        self.new_tensor = self._function("ggml_new_tensor_2d", pointer, pointer, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
        self.product = self._function("ggml_mul_mat", pointer, pointer, pointer, pointer)
        self.allocate = self._function("ggml_backend_alloc_ctx_tensors", pointer, pointer, pointer)
        self.allocate_as = self._function("ggml_backend_alloc_ctx_tensors_from_buft", pointer, pointer, pointer)
        self.write = self._function("ggml_backend_tensor_set", None, pointer, text, size, size)
        self.read = self._function("ggml_backend_tensor_get", None, pointer, pointer, size, size)
        self.new_graph = self._function("ggml_new_graph", pointer, pointer)
        self.expand = self._function("ggml_build_forward_expand", None, pointer, pointer)
        self.compute = self._function("ggml_backend_graph_compute", ctypes.c_int, pointer, pointer)

    def _function(self, name: str, result: Any, *arguments: Any) -> Any:
        return ctypes.CFUNCTYPE(result, *arguments)((name, self._native))

    def amx(self, device: int) -> int | None:
        """Return AMX's layout of weights on `device`, None where this build or this machine has none."""
        address = self.address(self.registry_of(device), b"ggml_backend_dev_get_extra_bufts")
        if not address:
            return None
        layouts = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(address)(device)
        for i in range(64):  # they end with NULL
            if not layouts or not layouts[i]:
                break
            if self.layout_name(layouts[i]) == b"AMX":
                return int(layouts[i])
        return None

    def context(self) -> int:
        return int(self.init(_Init(1 << 20, None, True)))


def _product(ggml: _Ggml) -> tuple[float, ...]:
    """Return `_N_ROWS` rows of ones times weights of which all of one output are the same, row by row."""
    device = ggml.device_by_type(_CPU)
    backend = ggml.open_device(device, None) if device else None
    if not backend:
        raise RuntimeError("llama.cpp finds no processor")
    weights_in, rest_in = ggml.context(), ggml.context()
    weights = ggml.new_tensor(weights_in, _Q8_0, _N_IN, _N_OUT)
    ones = ggml.new_tensor(rest_in, _F32, _N_IN, _N_ROWS)
    result = ggml.product(rest_in, weights, ones)
    graph = ggml.new_graph(rest_in)
    layout = ggml.amx(device)
    held = ggml.allocate_as(weights_in, layout) if layout else ggml.allocate(weights_in, backend)
    if not held or not ggml.allocate(rest_in, backend):
        raise MemoryError("no memory for a product")
    blocks = b"".join(_ONE + bytes([_value(i) & 0xFF]) * _N_BLOCK for i in range(_N_OUT) for _ in range(_N_IN // _N_BLOCK))
    ggml.write(weights, blocks, 0, len(blocks))
    values = bytes((ctypes.c_float * (_N_IN * _N_ROWS))(*[1.0] * (_N_IN * _N_ROWS)))
    ggml.write(ones, values, 0, len(values))
    ggml.expand(graph, result)
    if status := ggml.compute(backend, graph):
        raise RuntimeError(f"computing failed with {status}")
    outputs = (ctypes.c_float * (_N_OUT * _N_ROWS))()
    ggml.read(result, outputs, 0, ctypes.sizeof(outputs))
    return tuple(outputs)


def _value(output: int) -> int:
    return output % _N_VALUES - _N_VALUES // 2


def _main(library: str) -> None:
    right = all(  # written so that a number that is none is wrong
        abs(found - _N_IN * _value(i % _N_OUT)) <= _TOLERANCE for i, found in enumerate(_product(_Ggml(library)))
    )
    os.write(1, (_SOUND if right else _WRONG).encode())


if __name__ == "__main__":
    if sys.platform == "linux":  # that this dies is nothing to look into, nor to report
        with contextlib.suppress(AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    _main(sys.argv[1])
    os._exit(0)  # without the native library's own farewell
