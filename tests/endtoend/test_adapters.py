"""A model beside itself with LoRA adapters, loaded at run time: each says what it says alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
pytest.importorskip("gguf", reason="the package gguf, which makes the tiny models, is not installed")

from cllm.api.app import create_app
from cllm.config import Settings
from cllm.serve.housekeeping import Housekeeper
from cllm.serve.progress import LogProgress
from cllm.testing.tiny import make_tiny_gguf, make_tiny_lora
from tests.api.conftest import Api

TEST_S = 120.0


async def test_adapters_are_loaded_at_run_time_and_each_answers_beside_the_others_as_alone(tmp_path: Path) -> None:
    make_tiny_gguf(tmp_path / "base.gguf", "qwen3")
    (tmp_path / "adapters").mkdir()
    make_tiny_lora(tmp_path / "adapters" / "one.gguf", seed=1)
    make_tiny_lora(tmp_path / "adapters" / "two.gguf", seed=2)
    (tmp_path / "adapters" / "broken.gguf").write_bytes(b"no adapter")
    settings = Settings(
        str(tmp_path / "base.gguf"), backend="llama-cpu", ctx_size=512, parallel=4, threads=1, calibrate="off", cache_type_k="f32",
        cache_type_v="f32", flash_attn="off", enable_admin=True, lora_dir=str(tmp_path / "adapters"),
    )  # fmt: skip
    keeper = Housekeeper(settings, LogProgress)
    names = ["base", "base:one", "base:two"]
    together: dict[str, str] = {}
    with trio.fail_after(TEST_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keeper.run)
            await keeper.ready.wait()
            api = Api(create_app(keeper.house, settings), None)

            async def ask(name: str) -> str:
                answer = await api.complete("hello", model=name, max_tokens=24, temperature=0, ignore_eos=True, cache_prompt=False)
                assert answer.status == 200, answer.body
                return answer.text()

            async def note(name: str) -> None:
                together[name] = await ask(name)

            for name in ("one", "two"):
                loaded = await api.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": f"{name}.gguf"})
                assert (loaded.status, loaded.json["model"]) == (200, f"base:{name}")
            alone = {name: await ask(name) for name in names}
            async with trio.open_nursery() as asking:
                for name in names:
                    asking.start_soon(note, name)
            assert together == alone
            assert len(set(alone.values())) == 3

            await _refusals(api)
            assert (await api.post("/v1/unload_lora_adapter", {"lora_name": "one"})).status == 200
            assert (await api.complete("hello", model="base:one")).status == 404
            assert await ask("base:two") == alone["base:two"]
            keeper.drain()


async def _refusals(api: Any) -> None:
    load = "/v1/load_lora_adapter"
    for path in ("none.gguf", "../base.gguf", "/etc/passwd", "x\0"):
        assert (await api.post(load, {"lora_name": "x", "lora_path": path})).error["param"] == "lora_path"
    assert (await api.post(load, {"lora_name": "a/b", "lora_path": "one.gguf"})).status == 400
    assert (await api.post(load, {"lora_name": "one", "lora_path": "one.gguf"})).status == 400
    assert (await api.post(load, {"lora_name": "x", "lora_path": "one.gguf", "base_model_name": "y"})).status == 404
    broken = await api.post(load, {"lora_name": "x", "lora_path": "broken.gguf"})
    assert (broken.status, broken.error["code"]) == (503, "load_failed")
    assert [one["id"] for one in (await api.get("/v1/models")).json["data"]] == ["base", "base:one", "base:two"]
    assert (await api.post("/v1/unload_lora_adapter", {"lora_name": "base"})).status == 400
