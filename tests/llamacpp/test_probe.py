"""Whether llama.cpp can work here: the answer is one line, cheap, and never an exception."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import attrs
import pytest

from cllm import machine
from cllm.backend import CONTRACT_VERSION, KvLayout, ModelSpec, SplitMode
from cllm.errors import BackendUnavailable, LoadFailed
from cllm_llamacpp import abi, devices, library, make_cpu_backend, make_gpu_backend
from cllm_llamacpp import backend as backend_module
from cllm_llamacpp.abi import PACKAGE_VERSION
from cllm_llamacpp.backend import _gpu_bytes, _n_gpu_layers, _on_gpus


@pytest.fixture
def lib():
    return library.open_library()


@pytest.fixture
def not_opened(monkeypatch):
    monkeypatch.setattr(library, "_ready", None)


def test_the_cpu_is_available_and_a_gpu_preferred_to_it():
    probe = make_cpu_backend().probe()

    assert probe.available
    assert probe.preference > 0
    assert make_cpu_backend().contract_version == make_gpu_backend().contract_version == CONTRACT_VERSION


def test_importing_the_package_imports_no_llama_cpp():
    code = "import sys, cllm_llamacpp; cllm_llamacpp.make_cpu_backend(); assert 'llama_cpp' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_second_probe_opens_nothing(monkeypatch):
    first = make_cpu_backend().probe()
    monkeypatch.setattr(library, "_open", lambda: pytest.fail("it was opened already"))
    assert make_cpu_backend().probe() == first


def test_a_build_without_gpu_support_says_what_to_install(lib, monkeypatch, tiny_files):
    monkeypatch.setattr(lib, "llama_supports_gpu_offload", lambda: False)

    probe = make_gpu_backend().probe()

    assert not probe.available
    for word in ("GGML_CUDA", "GGML_METAL", "GGML_VULKAN", "wheel", "--force-reinstall", "--no-cache-dir", f"=={PACKAGE_VERSION}"):
        assert word in probe.reason
    assert "\n" not in probe.reason
    with pytest.raises(BackendUnavailable, match="GGML_CUDA"):
        make_gpu_backend().load(ModelSpec(path=str(tiny_files["qwen3"])), lambda _share: True)


def test_a_build_with_gpu_support_but_no_gpu_says_so(lib, monkeypatch):
    """llama.cpp says of it, as of one without, that it offloads nothing."""
    monkeypatch.setattr(lib, "llama_supports_gpu_offload", lambda: False)
    monkeypatch.setattr(devices, "supported", lambda _lib: ["CUDA"])

    reason = make_gpu_backend().probe().reason

    assert "GPU support (CUDA), but found no GPU" in reason
    assert "reinstall" not in reason


def test_what_a_build_supports_is_told_without_what_all_of_them_have(lib):
    if lib.llama_supports_gpu_offload():
        pytest.skip("this build of llama.cpp found a GPU; the test runs where there is none")
    assert not {"CPU", "BLAS", "RPC"} & set(devices.supported(lib))


def test_gpus_are_named_with_their_memory(lib, monkeypatch):
    monkeypatch.setattr(lib, "llama_supports_gpu_offload", lambda: True)
    monkeypatch.setattr(devices, "gpus", lambda _lib: [devices.Gpu("Big One", 20 << 30, 24 << 30)])

    probe = make_gpu_backend().probe()

    assert probe.available
    assert "Big One (20 GiB free)" in probe.reason
    assert probe.preference > make_cpu_backend().probe().preference


CARD = devices.Gpu("card", 7 << 30, 8 << 30, device_id="0000:01:00.0", registry=1)
SAME = attrs.evolve(CARD, name="the same by another backend", registry=2)
UNKNOWN = attrs.evolve(CARD, name="somewhere", device_id="")
INSIDE = devices.Gpu("inside", 15 << 30, 16 << 30, is_integrated=True, registry=1)


@pytest.mark.parametrize(
    ("found", "taken"),
    [
        ([], []),
        ([INSIDE, CARD], [CARD]),
        ([CARD, SAME], [CARD]),
        ([UNKNOWN, UNKNOWN], [UNKNOWN, UNKNOWN]),
        ([INSIDE, attrs.evolve(INSIDE, registry=2)], [INSIDE]),
    ],
)
def test_memory_of_devices_that_llama_cpp_leaves_alone_does_not_count(found, taken):
    assert devices.taken(found) == taken


def test_of_a_model_on_one_device_that_ones_memory_counts(monkeypatch):
    cards = [CARD, attrs.evolve(CARD, free_bytes=3 << 30)]
    monkeypatch.setattr(devices, "gpus", lambda _lib: cards)
    spec = ModelSpec(path="")
    assert _gpu_bytes(None, spec) == 10 << 30
    assert _gpu_bytes(None, attrs.evolve(spec, split_mode=SplitMode.NONE, main_gpu=1)) == 3 << 30
    with pytest.raises(LoadFailed, match="--main-gpu 2: there are GPUs 0 to 1"):
        _gpu_bytes(None, attrs.evolve(spec, split_mode=SplitMode.NONE, main_gpu=2))
    monkeypatch.setattr(devices, "gpus", lambda _lib: cards[:1])
    with pytest.raises(LoadFailed, match="--main-gpu 1: there is GPU 0 alone"):
        _gpu_bytes(None, attrs.evolve(spec, split_mode=SplitMode.NONE, main_gpu=1))


def test_rows_are_not_split_over_gpus_that_cannot(lib, monkeypatch, tiny_files):
    native = lib.llama_cpp._lib
    processor = devices._gpu(native, devices._function(native, "ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t)(0))
    monkeypatch.setattr(lib, "llama_supports_gpu_offload", lambda: True)
    monkeypatch.setattr(devices, "gpus", lambda _lib: [attrs.evolve(CARD, registry=processor.registry)])
    monkeypatch.setattr(lib, "llama_model_load_from_file", lambda *_: pytest.fail("the file was loaded"))
    spec = ModelSpec(path=str(tiny_files["qwen3"]), split_mode=SplitMode.ROW)
    for load in (make_gpu_backend().load, make_gpu_backend().load_embedder):
        with pytest.raises(LoadFailed, match=r"^--split-mode row: with this build of .* card cannot, only one for SYCL can"):
            load(spec, lambda _share: True)


@pytest.mark.parametrize(("parts", "n_gib"), [((), 14), ((0, 0), 14), ((1, 0), 7), ((3, 1), 28 / 3), ((1, 1, 5), 14)])
def test_where_layers_are_dealt_by_parts_the_card_that_is_full_first_bounds_them(monkeypatch, parts, n_gib):
    monkeypatch.setattr(devices, "gpus", lambda _lib: [CARD, CARD])
    assert _gpu_bytes(None, ModelSpec(path="", tensor_split=parts)) == pytest.approx(n_gib * 2**30)


def test_a_model_says_how_many_layers_are_on_which_gpus(load):
    def build(n_layers, *gpus):
        return _on_gpus(load()._facts, n_layers, gpus).info.build

    assert build(-1, CARD).endswith("all layers on card |")
    assert _on_gpus(load()._facts, 18, [CARD]).info.n_gpu_layers == 18
    assert len({build(-1, CARD), build(10, CARD), build(-1, attrs.evolve(CARD, name="another")), build(-1, CARD, CARD)}) == 4


def test_cells_that_were_named_leave_fewer_layers_on_the_gpu(lib, monkeypatch, tiny_files):
    monkeypatch.setattr(devices, "gpus", lambda _lib: [CARD])
    spec = ModelSpec(path=str(tiny_files["qwen3"]))
    assert [_n_gpu_layers(lib, attrs.evolve(spec, n_cells=n_cells)) for n_cells in (None, 4096, 10**9)] == [-1, -1, 0]


LOADED_ON_A_CARD = """
import sys
from cllm.backend import ModelSpec
from cllm_llamacpp import devices, library, make_gpu_backend

lib = library.open_library()
lib.llama_supports_gpu_offload = lambda: True
devices.gpus = lambda _lib: [devices.Gpu("card", 7 << 30, 8 << 30)]
backend = make_gpu_backend()
spec = ModelSpec(path=sys.argv[1], n_threads=1, n_cells=512)
print(backend.load(spec, lambda _share: True).info.build)
backend.load_embedder(spec, lambda _share: True)
"""


def test_layers_that_nobody_counted_are_as_many_as_fit_on_the_gpu(tiny_files):
    """In a process of its own, which llama.cpp ends where a file is looked at in a way that it does not expect."""
    command = [sys.executable, "-c", LOADED_ON_A_CARD, str(tiny_files["qwen3"])]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "all layers on card |" in done.stdout


@pytest.mark.parametrize("n_gpu_layers", [0, 1])
def test_cells_of_layers_that_are_not_on_the_gpu_are_bounded_by_the_machines_memory(lib, monkeypatch, tiny_files, n_gpu_layers):
    monkeypatch.setattr(lib, "llama_supports_gpu_offload", lambda: True)
    monkeypatch.setattr(devices, "gpus", lambda _lib: [CARD])
    monkeypatch.setattr(machine, "memory_bytes", lambda: 1 << 16)
    spec = ModelSpec(path=str(tiny_files["qwen3"]), n_cells=4096, n_gpu_layers=n_gpu_layers)
    with pytest.raises(LoadFailed, match="this machine has 0: ask for fewer"):
        make_gpu_backend().load(spec, lambda _share: True)


@pytest.mark.parametrize("n_gpu_layers", [None, 0])
def test_a_model_without_a_layer_on_the_gpu_can_do_what_one_on_the_processor_can(lib, monkeypatch, tiny_files, n_gpu_layers):
    monkeypatch.setattr(lib, "llama_supports_gpu_offload", lambda: True)
    monkeypatch.setattr(devices, "gpus", lambda _lib: [devices.Gpu("card", 1 << 30, 8 << 30)])  # less than what is to stay free
    spec = ModelSpec(path=str(tiny_files["qwen3"]), n_threads=1, n_cells=512, n_gpu_layers=n_gpu_layers)
    model, processors = (make().load(spec, lambda _share: True) for make in (make_gpu_backend, make_cpu_backend))
    try:
        assert model.info.n_gpu_layers == 0
        assert model.capabilities == processors.capabilities
        assert model.capabilities.can_abort
        assert model.layouts == processors.layouts == {KvLayout.UNIFIED, KvLayout.STREAMS}
    finally:
        model.close()
        processors.close()
    embedder = make_gpu_backend().load_embedder(spec, lambda _share: True)
    assert not embedder._gpu
    embedder.close()


def test_what_a_device_is_stands_where_llama_cpp_writes_it(lib):
    native = lib.llama_cpp._lib
    device = devices._function(native, "ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t)(0)

    processor = devices._gpu(native, device)

    assert processor.name.isprintable()
    assert processor.name
    assert 0 < processor.free_bytes <= processor.total_bytes
    assert (processor.is_integrated, processor.registry > 0) == (False, True)


def test_of_a_device_that_tells_no_memory_the_machines_counts(lib, monkeypatch):
    function = devices._function

    def without_memory(native, name, *types):
        real = function(native, name, *types)
        if name != "ggml_backend_dev_get_props":
            return real

        def props_of(device, pointer):
            real(device, pointer)
            pointer._obj.memory_free = pointer._obj.memory_total = 0

        return props_of

    monkeypatch.setattr(devices, "_function", without_memory)
    monkeypatch.setattr(machine, "free_memory_bytes", lambda: 3 << 30)
    native = lib.llama_cpp._lib
    found = devices._gpu(native, function(native, "ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t)(0))
    assert (found.free_bytes, found.total_bytes) == (3 << 30, machine.memory_bytes())


def test_the_devices_of_this_build_can_be_asked_for(lib):
    assert all(gpu.free_bytes <= gpu.total_bytes for gpu in devices.gpus(lib))


# --- not installed, broken, another version ---


def test_without_llama_cpp_the_reason_says_what_to_install(monkeypatch, not_opened):
    monkeypatch.setitem(sys.modules, "llama_cpp", None)

    for backend in (make_cpu_backend(), make_gpu_backend()):
        probe = backend.probe()
        assert not probe.available
        assert f"pip install llama-cpp-python=={abi.PACKAGE_VERSION}" in probe.reason


@pytest.mark.parametrize("error", [OSError("libllama.so: no such file\nand more"), RuntimeError(), AttributeError("llama_decode")])
def test_a_broken_installation_is_a_reason_and_no_exception(monkeypatch, not_opened, error):
    class Broken:
        def find_spec(self, name, *_):
            if name == "llama_cpp":
                raise error

    monkeypatch.delitem(sys.modules, "llama_cpp")
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])

    probe = make_cpu_backend().probe()

    assert not probe.available
    assert "broken" in probe.reason
    assert "\n" not in probe.reason


def test_this_installation_fits(lib):
    assert abi.what_is_wrong(lib) is None


@pytest.mark.parametrize("struct", abi.SIZES)
def test_a_struct_of_another_size_is_noticed(monkeypatch, not_opened, struct):
    monkeypatch.setitem(abi.SIZES, struct, abi.SIZES[struct] + 8)  # type: ignore[index]

    probe = make_cpu_backend().probe()

    assert not probe.available
    assert struct in probe.reason
    with pytest.raises(BackendUnavailable, match=struct):
        make_cpu_backend().load(ModelSpec(path="any"), lambda _share: True)


def test_a_field_too_many_is_noticed_although_the_size_may_stay(lib, monkeypatch):
    """As happened: a field more in the middle of the struct moves the ones after it by one place."""
    import ctypes

    fields = list(lib.llama_context_params._fields_)
    at = [name for name, *_ in fields].index("n_rs_seq")

    class Shifted(ctypes.Structure):
        _fields_ = [*fields[:at], ("brand_new", ctypes.c_uint32), *fields[at:-1]]

    real = lib.llama_cpp._lib["llama_context_default_params"]
    real.restype = Shifted
    monkeypatch.setattr(lib, "llama_context_default_params", real)

    assert "layout has changed" in abi.what_is_wrong(lib)


def test_another_version_is_named(lib, monkeypatch):
    monkeypatch.setattr(lib, "__version__", "0.3.35")

    assert "0.3.35" in abi.what_is_wrong(lib)


def test_layers_that_are_named_for_a_gpu_that_is_not_used_are_told_of(tiny_files, monkeypatch):
    told = []
    monkeypatch.setattr(backend_module.logger, "warning", lambda text, *values: told.append(text % values))
    spec = ModelSpec(path=str(tiny_files["qwen3"]), n_cells=64)
    for n_gpu_layers in (None, 0, 9):
        make_cpu_backend().load(attrs.evolve(spec, n_gpu_layers=n_gpu_layers), lambda _share: True).close()
    assert [text.partition(" has no effect")[0] for text in told] == ["--gpu-layers 9"]
