"""Tests that logits and tokens equal those of transformers, for any chunks of a prompt and in any batch.

Everything is float32, so only the order of sums differs. Logits of the tiny models have a size of 1 to 10, and the
observed difference is about 1e-5. The tolerance allows for sums on other machines.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
import torch

from trioserve.contracts.errors import StartupError
from trioserve.contracts.sampling import SamplingParams
from trioserve.model.layer_config import RopeScaling, RotaryConfig
from trioserve.model.loading.checkpoint import open_checkpoint
from trioserve.model.torch_step.layers import RotaryAngles

LOGPROB_TOLERANCE = 2e-4
KINDS = (
    "llama",
    "llama-tied",
    "llama-biased",
    "llama-biased-64",
    "llama3-rope",
    "llama-padded",
    "llama-linear-rope",
    "llama-wide",
    "mistral",
    "qwen2",
    "qwen2-yarn",
    "qwen2-sliding",
    "qwen3",
    "ministral",
    "gemma",
    "gemma2",
    "gemma3",
    "gemma3n",
    "gemma3n-biased",
    "gemma4",
    "gemma4-inputs",
    "gemma4-unified",
    "gemma4-moe",
    "hunyuan-dense",
    "hunyuan-moe",
    "olmo-clipped",
    "phimoe",
    "mimo-v2-flash",
    "longcat-flash",
    "axk1",
    "laguna",
    "laguna-elements",
    "kimi-linear",
    "kimi-linear-lora",
    "dbrx",
    "phi3",
    "phi3-part",
    "phi3-longrope",
    "olmo",
    "olmo2",
    "olmo3",
    "smollm3",
    "granite",
    "glm",
    "glm4",
    "cohere",
    "cohere-normed",
    "cohere2",
    "exaone",
    "exaone4",
    "internlm3",
    "ernie4_5",
    "seed_oss",
    "helium",
    "hyperclovax",
    "cwm",
    "gpt-neox",
    "gpt-neox-serial",
    "phi",
    "phi-normed",
    "starcoder2",
    "stablelm",
    "stablelm-parallel",
    "stablelm-normed",
    "nemotron",
    "arcee",
    "jais2",
    "persimmon",
    "apertus",
    "gpt2",
    "gpt2-scaled",
    "gpt-bigcode",
    "gpt-bigcode-heads",
    "opt",
    "opt-bare",
    "gptj",
    "codegen",
    "falcon",
    "falcon-serial",
    "falcon-alibi",
    "bloom",
    "bloom-odd",
    "mpt",
    "falcon-grouped",
    "falcon-grouped-one-norm",
    "gemma3-images",
    "mistral3-images",
    "mixtral",
    "qwen2-moe",
    "qwen3-moe",
    "olmoe",
    "granite-moe",
    "lfm2",
    "lfm2-biased",
    "lfm2-moe",
    "granite-hybrid",
    "granite-hybrid-moe",
    "granite-hybrid-unturned-moe",
    "falcon-h1",
    "falcon-h1-biased",
    "falcon-h1-unnormed",
    "mamba2",
    "mamba",
    "mamba-biased",
    "falcon-mamba",
    "jamba",
    "jamba-dense",
    "olmo-hybrid",
    "olmo-hybrid-unturned",
    "nemotron-h",
    "nemotron-h-steps",
    "nemotron-h-moe",
    "ministral3",
    "ministral3-images",
    "step3p5",
    "minimax",
    "minimax-windowed",
    "minimax-m2",
    "glm4v",
    "glm4v-moe",
    "glm-ocr",
    "qwen2-vl",
    "qwen2.5-vl",
    "qwen3-vl",
    "qwen3-vl-moe",
    "solar-open",
    "flex-olmo",
    "afmoe",
    "granite-moe-shared",
    "hy-v3",
    "mellum",
    "ernie4_5-moe",
    "ernie4_5-moe-plain",
    "exaone-moe",
    "exaone-moe-mixed",
    "cohere2-moe",
    "cohere2-moe-sigmoid",
    "qwen3-next",
    "qwen3-next-biased",
    "qwen3.5",
    "qwen3.5-moe",
    "zamba2",
    "zamba2-adapted",
    "bamba",
    "glm4-moe",
    "dots1",
    "gpt-oss",
    "deepseek-v2",
    "deepseek-v2-lite",
    "deepseek-v3",
    "moonlight",
    "glm4-moe-lite",
    "deepseek-v3.2",
    "glm-moe-dsa",
    "minicpm3",
    "llama4",
    "llama4-images",
    "llama4-long",
)
TORCH_KINDS = ("deepseek-v3.2", "glm-moe-dsa", "zamba2", "zamba2-adapted", "minimax", "minimax-windowed", "step3p5")
"""Kinds that the native kernels do not compute."""
TORCH_REASONS = "indexer|share a transformer block|are weighted|have a limit"
VOCAB_SIZE = 320


class Expected:
    """Results of transformers."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

        config = json.loads((path / "config.json").read_text())
        sees_images = "text_config" in config
        auto: Any = AutoModelForImageTextToText if sees_images else AutoModelForCausalLM
        # In transformers 5.24, the eager attention of Falcon adds ALiBi twice.
        implementation = "sdpa" if config.get("alibi") else "eager"
        self._model: Any = auto.from_pretrained(path, dtype=torch.float32, attn_implementation=implementation)
        if config["model_type"] == "llama4":  # The complete Llama 4 of transformers fails for texts without images.
            self._model = self._model.language_model

    def logprobs(self, tokens: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return self._model(torch.tensor([tokens]), use_cache=False).logits[0].log_softmax(-1)

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logprobs(tokens)[-1].argmax()))
        return tokens[len(prompt) :]


def make_prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB_SIZE) for _ in range(length)]


def check_prompt_logprobs(driver: Any, expected: Expected, name: str, prompt: list[int], chunks: list[int]) -> None:
    """Compare the logprobs of each prompt token and its 20 best alternatives, and those of the first sampled token."""
    entries = []
    for count in chunks:
        result = driver.step({name: count})
        assert not result.errors
        entries.extend(result.prompt_logprobs[name])
    entries.append(result.logprobs[name])
    wanted = expected.logprobs(prompt)
    following = [*prompt[1:], driver.tokens[name][-1]]
    assert [entry.token_id for entry in entries] == following
    for row, entry in enumerate(entries):
        assert entry.logprob == pytest.approx(float(wanted[row, entry.token_id]), abs=LOGPROB_TOLERANCE)
        for token, logprob in entry.top:
            assert logprob == pytest.approx(float(wanted[row, token]), abs=LOGPROB_TOLERANCE)
        assert [logprob for _, logprob in entry.top] == pytest.approx(
            wanted[row].topk(20).values.tolist(), abs=LOGPROB_TOLERANCE
        )


ALL_LOGPROBS = SamplingParams(temperature=0.0, logprobs=20, prompt_logprobs=20)


def test_every_tiny_checkpoint_kind_is_compared(tiny_checkpoints: ModuleType) -> None:
    assert set(KINDS) == {*tiny_checkpoints.KINDS, *tiny_checkpoints.FAMILY_KINDS}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_greedy_tokens_equal_those_of_transformers(
    kind: str, cpu_kernels: str, tiny_checkpoint: Callable[..., Path], step_driver: ModuleType
) -> None:
    path = tiny_checkpoint(kind)
    if cpu_kernels == "native" and kind in TORCH_KINDS:
        with pytest.raises(StartupError, match=TORCH_REASONS):
            step_driver.load_runner(path, cpu_kernels=cpu_kernels)
        return
    expected = Expected(path)
    runner = step_driver.load_runner(path, cpu_kernels=cpu_kernels)
    driver = step_driver.StepDriver(runner)

    prompt = make_prompt(37)
    driver.add("whole", prompt, ALL_LOGPROBS)
    check_prompt_logprobs(driver, expected, "whole", prompt, [37])
    driver.add("uneven", prompt, ALL_LOGPROBS)
    check_prompt_logprobs(driver, expected, "uneven", prompt, [5, 1, 11, 2, 1, 16, 1])

    # Prompts of different lengths in one batch. The fourth prompt comes in chunks while the others already decode.
    prompts = {"a": make_prompt(3, 1), "b": make_prompt(29, 2), "c": make_prompt(1, 3), "d": make_prompt(23, 4)}
    for name, tokens in prompts.items():
        driver.add(name, tokens)
    driver.step({"d": 7, "a": 3, "b": 29})
    driver.step({"a": 1, "d": 9, "c": 1, "b": 1})
    driver.step({"c": 1, "b": 1, "d": 7, "a": 1})
    for _ in range(5):
        driver.step({"d": 1, "a": 1, "c": 1, "b": 1})
    for name, tokens in prompts.items():
        output = driver.tokens[name][len(tokens) :]
        assert output == expected.greedy(tokens, len(output)), name


@pytest.mark.parametrize(
    "scaling, fields",
    (
        ({"rope_type": "linear", "factor": 4.0}, {"kind": "linear", "factor": 4.0}),
        (
            {
                "rope_type": "llama3",
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            {"kind": "llama3", "factor": 32.0, "original_context_tokens": 8192},
        ),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768},
            {"kind": "yarn", "factor": 4.0, "original_context_tokens": 32_768},
        ),
        (
            {
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 4096,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "attention_factor": 1.5,
            },
            {
                "kind": "yarn",
                "factor": 8.0,
                "original_context_tokens": 4096,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "attention_factor": 1.5,
            },
        ),
        (
            {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
            {"kind": "yarn", "factor": 32.0, "original_context_tokens": 4096, "rounds_ends": False},
        ),
    ),
    ids=("linear", "llama3", "yarn", "yarn with its own numbers", "yarn with ends that are not rounded"),
)
def test_rotary_scaling_of_real_sizes_equals_transformers(
    scaling: dict[str, Any], fields: dict[str, Any], tiny_checkpoint: Callable[..., Path]
) -> None:
    """Tiny heads do not test the rounded ends of the blend. These are the sizes of Llama 3.2 and Qwen 2.5."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    theirs = LlamaConfig(
        hidden_size=1024,
        num_attention_heads=8,
        max_position_embeddings=131_072,
        rope_parameters={"rope_theta": 500_000.0, **scaling},
    )
    frequencies, magnitude = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](theirs, torch.device("cpu"))
    rotary = RotaryConfig(theta=500_000.0, rotated_dims=128, scaling=RopeScaling(**fields))
    tiny = open_checkpoint(tiny_checkpoint("llama")).config
    attention = msgspec.structs.replace(tiny.heads, head_dim=128, rotary=rotary)
    layer = msgspec.structs.replace(tiny.layers[0], attention=attention)
    config = msgspec.structs.replace(tiny, layers=(layer,), context_tokens_max=8_192)
    positions = torch.tensor([0, 1, 100, 5_000])
    cos, sin = RotaryAngles(rotary, 128, config, dtype=torch.float32, device=torch.device("cpu")).cos_sin(positions)
    angles = positions[:, None].double() * frequencies.double()
    # The last bit of a float32 frequency, times 5,000 tokens, changes an angle by 3e-4.
    torch.testing.assert_close(cos[:, 0], (angles.cos() * magnitude).float().repeat(1, 2), atol=1e-3, rtol=0)
    signed = torch.cat((-angles.sin(), angles.sin()), -1) * magnitude
    torch.testing.assert_close(sin[:, 0], signed.float(), atol=1e-3, rtol=0)


@pytest.mark.parametrize("served, length", ((32, 29), (None, 37)))
def test_longrope_uses_the_factors_for_the_served_context(
    served: int | None,
    length: int,
    cpu_kernels: str,
    tiny_checkpoint: Callable[..., Path],
    step_driver: ModuleType,
    tmp_path: Path,
) -> None:
    """transformers chooses by the length of the text: short factors up to 32 tokens, long factors beyond."""
    path = shutil.copytree(tiny_checkpoint("phi3-longrope"), tmp_path / "model")
    fields = json.loads((path / "config.json").read_text())
    fields["original_max_position_embeddings"] = 32
    fields["rope_parameters"]["original_max_position_embeddings"] = 32
    del fields["rope_parameters"]["factor"]
    (path / "config.json").write_text(json.dumps(fields))
    prompt = make_prompt(length)
    driver = step_driver.StepDriver(step_driver.load_runner(path, cpu_kernels=cpu_kernels, context_tokens_max=served))
    driver.add("whole", prompt, ALL_LOGPROBS)
    check_prompt_logprobs(driver, Expected(path), "whole", prompt, [length])
    driver.add("uneven", prompt, ALL_LOGPROBS)
    check_prompt_logprobs(driver, Expected(path), "uneven", prompt, [5, 11, 1, length - 17])


def test_decoding_token_by_token_gives_the_prompts_logprobs(
    cpu_kernels: str, tiny_checkpoint: Callable[..., Path], step_driver: ModuleType
) -> None:
    path = tiny_checkpoint("qwen3")
    prompt = make_prompt(21, 9)
    driver = step_driver.StepDriver(step_driver.load_runner(path, cpu_kernels=cpu_kernels))
    driver.add("a", prompt, ALL_LOGPROBS)
    check_prompt_logprobs(driver, Expected(path), "a", prompt, [1] * 21)


@pytest.mark.slow
def test_contexts_longer_than_an_attention_part_equal_transformers(
    cpu_kernels: str, tiny_checkpoint: Callable[..., Path], step_driver: ModuleType
) -> None:
    """The attention of a chunk is computed in parts of 256 rows. Decodes of different lengths form several groups."""
    path = tiny_checkpoint("llama")
    expected = Expected(path)
    driver = step_driver.StepDriver(step_driver.load_runner(path, cpu_kernels=cpu_kernels))
    long, short = make_prompt(450, 5), make_prompt(9, 6)
    driver.add("long", long, ALL_LOGPROBS)
    check_prompt_logprobs(driver, expected, "long", long, [20, 430])
    driver.add("short", short)
    driver.step({"short": 9})
    for _ in range(3):
        driver.step({"short": 1, "long": 1})
    assert driver.tokens["long"][450:] == expected.greedy(long, 4)
    assert driver.tokens["short"][9:] == expected.greedy(short, 4)


@pytest.mark.slow
def test_prompt_chunk_across_several_sections_equals_transformers(
    cpu_kernels: str, tiny_checkpoint: Callable[..., Path], step_driver: ModuleType, tmp_path: Path
) -> None:
    """Sections are longer than one packed piece. A chunk begins in one section and ends two sections later, and decodes
    run on both sides of a border.
    """
    path = shutil.copytree(tiny_checkpoint("llama4"), tmp_path / "model")
    fields = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**fields, "attention_chunk_size": 200}))
    expected = Expected(path)
    driver = step_driver.StepDriver(step_driver.load_runner(path, cpu_kernels=cpu_kernels))
    prompt, other = make_prompt(450, 5), make_prompt(198, 6)
    driver.add("long", prompt, ALL_LOGPROBS)
    check_prompt_logprobs(driver, expected, "long", prompt, [20, 430])
    driver.add("border", other)
    driver.step({"border": 198})
    for _ in range(3):
        driver.step({"border": 1, "long": 1})
    assert driver.tokens["long"][450:] == expected.greedy(prompt, 4)
    assert driver.tokens["border"][198:] == expected.greedy(other, 4)


def test_block_size_must_divide_sections(
    cpu_kernels: str, tiny_checkpoint: Callable[..., Path], step_driver: ModuleType
) -> None:
    with pytest.raises(StartupError, match="block_size is 3, but this model's attention has sections of 20"):
        step_driver.load_runner(tiny_checkpoint("llama4"), cpu_kernels=cpu_kernels, block_size=3)


def test_preempted_request_continues_with_equal_tokens(
    cpu_kernels: str, tiny_checkpoint: Callable[..., Path], step_driver: ModuleType
) -> None:
    path = tiny_checkpoint("mistral")
    prompt = make_prompt(13, 7)
    driver = step_driver.StepDriver(step_driver.load_runner(path, cpu_kernels=cpu_kernels))
    driver.add("a", prompt)
    driver.generate(["a"], 4)
    driver.forget("a")
    driver.generate(["a"], 5)
    assert driver.tokens["a"][13:] == Expected(path).greedy(prompt, 9)


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_16_bit_formats_are_close_to_float32(
    dtype: str, cpu_kernels: str, tiny_checkpoint: Callable[..., Path], step_driver: ModuleType
) -> None:
    """In two layers, mantissas of 8 bits (bfloat16) change logprobs by a few hundredths, and mantissas of 11 bits
    (float16) by a few thousandths.
    """
    if dtype == "float16" and cpu_kernels == "native":
        pytest.skip("the native kernels leave float16 to torch")
    path = tiny_checkpoint("llama", dtype=dtype)
    prompt = make_prompt(33)
    wanted = Expected(path).logprobs(prompt)
    driver = step_driver.StepDriver(step_driver.load_runner(path, dtype=dtype, cpu_kernels=cpu_kernels))
    driver.add("a", prompt, ALL_LOGPROBS)
    entries = [*driver.step({"a": 20}).prompt_logprobs["a"], *driver.step({"a": 13}).prompt_logprobs["a"]]
    tolerance = 0.25 if dtype == "bfloat16" else 0.03
    for row, entry in enumerate(entries):
        assert entry.logprob == pytest.approx(float(wanted[row, entry.token_id]), abs=tolerance)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ("llama3-rope", "mistral", "qwen2", "qwen3"))
def test_cuda_gives_the_tokens_of_the_cpu(
    kind: str, tiny_checkpoint: Callable[..., Path], step_driver: ModuleType
) -> None:
    path = tiny_checkpoint(kind)
    prompts = {"a": make_prompt(3, 1), "b": make_prompt(29, 2), "c": make_prompt(64, 3)}
    tokens = []
    for device in ("cpu", "cuda"):
        driver = step_driver.StepDriver(step_driver.load_runner(path, device=device))
        for name, prompt in prompts.items():
            driver.add(name, prompt)
        driver.step({"b": 11, "c": 64})
        driver.generate(["a", "b", "c"], 6)
        tokens.append(driver.tokens)
    assert tokens[0] == tokens[1]
