"""Tests the choice of number format and device, and the number of KV blocks that fit into memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trioserve.contracts.errors import StartupError
from trioserve.model.device import (
    cache_size,
    default_thread_count,
    free_host_bytes,
    kv_block_bytes,
    multiplies_bfloat16,
    pick_dtype,
    pick_vision_dtype,
    takes_every_cpu,
)
from trioserve.model.layer_config import AttentionConfig, LayerConfig, MlpConfig, RotaryConfig
from trioserve.model.model_config import ModelConfig
from trioserve.model.settings import ModelSettings


def config(**changes: Any) -> ModelConfig:
    rotary = RotaryConfig(theta=10_000.0, rotated_dims=8)
    layer = LayerConfig(
        attention=AttentionConfig(head_count=4, kv_head_count=2, head_dim=8, rotary=rotary),
        mlp=MlpConfig(intermediate_size=64),
    )
    fields: dict[str, Any] = {
        "family": "llama",
        "vocab_size": 100,
        "hidden_size": 32,
        "layers": (layer,) * 3,
        "context_tokens_max": 64,
        "norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_ids": (),
        "dtype_name": "bfloat16",
    }
    return ModelConfig(**{**fields, **changes})


def test_kv_block_contains_keys_and_values_of_every_layer() -> None:
    assert kv_block_bytes(config(), 16, "bfloat16") == 2 * 3 * 2 * 8 * 16 * 2


def test_kv_cache_bytes_are_filled_and_not_exceeded() -> None:
    block = kv_block_bytes(config(), 16, "float32")
    for budget, count in ((block, 1), (3 * block - 1, 2), (3 * block, 3)):
        assert cache_size(config(), ModelSettings(kv_cache_bytes=budget), "cpu", "float32").block_count == count
    with pytest.raises(StartupError, match=f"needs {block}"):
        cache_size(config(), ModelSettings(kv_cache_bytes=block - 1), "cpu", "float32")


def test_kv_cache_on_a_cpu_gets_a_quarter_of_free_memory_up_to_4_gib() -> None:
    block = kv_block_bytes(config(), 16, "float32")
    count = cache_size(config(), ModelSettings(), "cpu", "float32").block_count
    assert 0 < count * block <= min(4 * 2**30, 0.3 * free_host_bytes())


def write_machine(root: Path, *, available_kib: int, cgroup: dict[str, str]) -> Path:
    (root / "proc").mkdir()
    (root / "proc/meminfo").write_text(f"MemTotal: 999999 kB\nMemAvailable:  {available_kib} kB\n")
    for name, text in cgroup.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    "cgroup, expected",
    (
        ({}, 8192 * 1024),
        ({"memory.max": "max\n", "memory.current": "5000", "memory.stat": ""}, 8192 * 1024),
        (
            {
                "memory.max": "100000\n",
                "memory.current": "70000\n",
                "memory.stat": "anon 30000\nactive_file 10000\ninactive_file 30000\n",
            },
            70_000,
        ),
        (
            {
                "memory/memory.limit_in_bytes": "100000",
                "memory/memory.usage_in_bytes": "70000",
                "memory/memory.stat": "total_rss 1\n",
            },
            30_000,
        ),
    ),
    ids=("bare", "unlimited group", "version 2", "version 1"),
)
def test_free_memory_is_limited_by_the_control_group(cgroup: dict[str, str], expected: int, tmp_path: Path) -> None:
    assert free_host_bytes(write_machine(tmp_path, available_kib=8192, cgroup=cgroup)) == expected


def test_default_thread_count_is_the_core_count_or_omp_num_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CPUs 0 and 2 belong to one core, 1 and 3 to another. The core of CPU 5 is unknown."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _process: {0, 1, 2, 3, 5})
    for cpu, siblings in ((0, "0,2\n"), (1, "1,3\n"), (2, "0,2\n"), (3, "1,3\n")):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert default_thread_count(tmp_path) == 3
    for said, count in (("4", 4), ("2,1", 2), ("0", 3), ("many", 3)):
        monkeypatch.setenv("OMP_NUM_THREADS", said)
        assert default_thread_count(tmp_path) == count


def test_step_uses_every_cpu_if_it_has_a_thread_for_each_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _process: {0, 1, 2, 3})
    for threads, takes_every in ((3, False), (4, True), (5, True)):
        assert takes_every_cpu(ModelSettings(threads=threads), "cpu") is takes_every
        monkeypatch.setenv("OMP_NUM_THREADS", str(threads))
        assert takes_every_cpu(ModelSettings(), "cpu") is takes_every
    assert not takes_every_cpu(ModelSettings(threads=4), "cuda")


@pytest.mark.parametrize(
    "line, multiplies",
    (
        ("flags\t\t: fpu avx2 fma avx512f avx512_bf16 avx512_vnni", True),
        ("flags\t\t: fpu avx2 amx_bf16 amx_tile", True),
        ("Features\t: fp asimd i8mm bf16", True),
        ("flags\t\t: fpu avx2 fma avx512f avx512_vnni", False),
        ("Features\t: fp asimd", False),
        ("bugs\t\t: avx512_bf16", False),
    ),
)
def test_images_are_encoded_in_float32_if_the_cpu_cannot_multiply_bfloat16(
    line: str, multiplies: bool, tmp_path: Path
) -> None:
    assert not multiplies_bfloat16(tmp_path)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(f"processor\t: 0\n{line}\npower management:\n")
    assert multiplies_bfloat16(tmp_path) is multiplies
    assert pick_vision_dtype("bfloat16", "cpu", tmp_path) == ("bfloat16" if multiplies else "float32")
    for dtype in ("float32", "float16"):
        assert pick_vision_dtype(dtype, "cpu", tmp_path) == dtype
    assert pick_vision_dtype("bfloat16", "cuda", tmp_path) == "bfloat16"


def test_auto_dtype_is_the_checkpoints_except_float16_on_a_cpu() -> None:
    auto = ModelSettings()
    assert pick_dtype(config(dtype_name="float32"), auto, "cpu") == "float32"
    assert pick_dtype(config(dtype_name="float16"), auto, "cpu") == "bfloat16"
    assert pick_dtype(config(dtype_name="float16"), auto, "cuda") == "float16"
    assert pick_dtype(config(), ModelSettings(dtype="float16"), "cpu") == "float16"


@pytest.mark.parametrize(
    "field, value",
    (
        ("dtype", "int8"),
        ("device", "tpu"),
        ("block_size", 0),
        ("kv_cache_bytes", 0),
        ("memory_share", 1.5),
        ("threads", 0),
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 0),
        ("context_tokens_max", 0),
    ),
)
def test_error_names_the_model_setting_out_of_range(field: str, value: Any) -> None:
    with pytest.raises(StartupError, match=field):
        ModelSettings(**{field: value})


def test_model_settings_do_not_import_torch() -> None:
    code = "import sys, trioserve.model.settings; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_gpu_kernels_are_torch_or_triton() -> None:
    with pytest.raises(StartupError, match="gpu_kernels is 'cuda', allowed is one of auto, torch, triton"):
        ModelSettings(gpu_kernels="cuda")
