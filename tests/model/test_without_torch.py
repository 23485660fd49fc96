"""On the native path torch is never imported, whatever is asked: that takes seconds at the start, and 200 MiB."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from trioserve_kernels.native import NoNativeKernels, load_library

PROGRAM = """
import sys

import msgspec
import trio
import trioserve

SAMPLINGS = (
    trioserve.SamplingParams(temperature=0.0),
    trioserve.SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01),
    trioserve.SamplingParams(temperature=0.0, logprobs=3, prompt_logprobs=2),
    trioserve.SamplingParams(temperature=1.0, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3),
    trioserve.SamplingParams(temperature=0.5, logit_bias={7: 3.0}, min_tokens=3, n=2, stop=("zz",)),
)
CHAT = trioserve.ChatPrompt(messages=[{"role": "user", "content": "hello"}])


async def main() -> None:
    answered = 0
    for path in sys.argv[1:]:
        async with trioserve.open_engine(path, device="cpu", cpu_kernels="native", kv_cache_memory=0.01) as engine:
            for prompt in ("the other", [5, 6, 7, 8], CHAT):
                for sampling in SAMPLINGS:
                    async with engine.generate(prompt, msgspec.structs.replace(sampling, max_tokens=6)) as response:
                        answered += len([delta async for delta in response]) > 0
            assert engine.metrics.expose()
    assert "torch" not in sys.modules
    print(answered)


trio.run(main)
"""


@pytest.mark.slow
def test_a_native_engine_answers_every_kind_of_request_without_torch(
    tiny_checkpoint: Callable[..., Path], tiny_gguf: Callable[..., Path]
) -> None:
    try:
        load_library()
    except NoNativeKernels as error:
        pytest.skip(f"no native kernels: {error}")
    paths = [
        tiny_checkpoint("llama", dtype="bfloat16"),
        tiny_checkpoint("llama-biased", dtype="float16"),
        tiny_checkpoint("qwen3"),
        tiny_gguf("llama3-rope", "Q4_0"),
    ]
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, paths)], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == [str(15 * len(paths))]
