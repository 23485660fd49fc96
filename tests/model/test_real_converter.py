"""Tests that files of llama.cpp's own converter are read like the tiny checkpoints that were converted.

TRIOSERVE_LLAMA_CPP names a checkout of llama.cpp. Without it all tests are skipped: the converter is not on PyPI, and
changes often.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from trioserve.contracts.sampling import SamplingParams
from trioserve.model.loading.checkpoint import open_checkpoint
from trioserve.text.tokenizer import Tokenizer

LLAMA_CPP = os.environ.get("TRIOSERVE_LLAMA_CPP")
# Kinds are left out if their files lack what the tiny checkpoints set: a window (Mistral, Qwen2, sections of Llama 4),
# a scale (Gemma 2), unnormalized weights of experts (LFM2).
KINDS = (
    *("llama", "llama-tied", "llama-biased-64", "llama3-rope", "llama-padded", "llama-linear-rope", "llama-wide"),
    *("qwen2", "qwen2-yarn", "qwen3", "gemma", "gemma3n", "phi3", "phi3-part", "olmo2", "olmo3", "smollm3", "granite"),
    *("glm4", "cohere", "cohere-normed", "exaone4", "internlm3", "ministral3", "ernie4_5", "seed_oss"),
    *("mixtral", "qwen3-moe", "olmoe", "granite-moe", "glm4-moe", "minimax-m2", "dots1", "gpt-oss", "llama4-long"),
    *("deepseek-v2", "deepseek-v2-lite", "deepseek-v3", "moonlight", "minicpm3"),
    *("lfm2", "granite-hybrid", "falcon-h1", "falcon-h1-unnormed", "qwen3-next", "qwen3.5", "qwen3.5-moe"),
)
# tokenizer.ggml.pre that the converter writes for real models, by the beginning of the kind's name; "gpt-2" for others
PRE_TOKENIZERS = {
    "llama-": "llama-bpe", "llama3": "llama-bpe", "llama4": "llama4", "qwen2": "qwen2", "qwen3-": "qwen2",
    "qwen3.5": "qwen35", "phi3": "dbrx", "olmo2": "dbrx", "olmo3": "dbrx", "olmoe": "olmo", "smollm3": "smaug-bpe",
    "granite": "refact", "glm4": "glm4", "cohere": "command-r", "exaone4": "exaone4", "seed_oss": "seed-coder",
    "minimax": "minimax-m2", "dots1": "qwen2", "gpt-oss": "gpt-4o", "deepseek-v2": "deepseek-llm",
    "deepseek-v3": "deepseek-v3", "moonlight": "kimi-k2", "lfm2": "lfm2", "falcon-h1": "falcon-h1",
}  # fmt: skip
# The converter does not know the tokenizers of tiny checkpoints, so it gets the names of the real ones. Layers that
# predict further tokens are missing.
CONVERT = """
import sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/gguf-py"]
import convert_hf_to_gguf as converter
from conversion import base
base.TextModel.get_vocab_base_pre = lambda self, tokenizer: pre_tokenizer
found = converter.get_model_class
def with_plain_vocabulary(*arguments, **options):
    model = found(*arguments, **options)
    for part in (model, *(part for part in vars(model).values() if isinstance(part, type))):
        part.set_vocab = lambda self: self._set_vocab_gpt2()
    model.no_mtp = True
    return model
converter.get_model_class = with_plain_vocabulary
pre_tokenizer = sys.argv[4]
sys.argv = ["convert", sys.argv[2], "--outfile", sys.argv[3], "--outtype", "f32"]
converter.main()
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(LLAMA_CPP is None, reason="TRIOSERVE_LLAMA_CPP names no checkout of llama.cpp"),
]


def as_published(directory: Path, copy: Path) -> None:
    """Return the config with fields that the authors' configs have, and that transformers omits or renames."""
    for file in directory.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] == "deepseek_v3":
        config["scoring_func"] = "sigmoid"
    if config["model_type"] == "minimax_m2":
        config["rotary_dim"] = int(config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"])
    if config["model_type"] == "granitemoehybrid":
        names = {"full_attention": "attention", "linear_attention": "mamba"}
        config["layer_types"] = [names[kind] for kind in config["layer_types"]]
    (copy / "config.json").write_text(json.dumps(config), encoding="utf-8")


def logprobs_of(step_driver: ModuleType, path: Path) -> torch.Tensor:
    driver = step_driver.StepDriver(step_driver.load_runner(path, cpu_kernels="torch"))
    prompt = [(7 * position + 5) % 300 + 5 for position in range(40)]
    driver.add("p", prompt, SamplingParams(temperature=0.0, prompt_logprobs=0))
    return torch.tensor([entry.logprob for entry in driver.step({"p": 40}).prompt_logprobs["p"]])


@pytest.mark.parametrize("kind", KINDS)
def test_converted_file_equals_its_directory(
    kind: str, tiny_checkpoint: Callable[..., Path], step_driver: ModuleType, tmp_path: Path
) -> None:
    as_published(tiny_checkpoint(kind), tmp_path)
    path = tmp_path / "model.gguf"
    pre_tokenizer = next((name for begin, name in PRE_TOKENIZERS.items() if kind.startswith(begin)), "gpt-2")
    command = [sys.executable, "-c", CONVERT, str(LLAMA_CPP), str(tmp_path), str(path), pre_tokenizer]
    converted = subprocess.run(command, capture_output=True, text=True, check=False)
    assert converted.returncode == 0, converted.stderr
    metadata = open_checkpoint(path).gguf_metadata
    assert metadata is not None
    assert metadata["tokenizer.ggml.pre"] == pre_tokenizer
    Tokenizer.from_gguf(metadata)
    expected = logprobs_of(step_driver, tiny_checkpoint(kind))
    torch.testing.assert_close(logprobs_of(step_driver, path), expected, atol=1e-4, rtol=0)
