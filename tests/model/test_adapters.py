"""Tests of LoRA adapters: tokens equal those of peft, of merged weights, and of each request alone. The refusal of an
unsupported adapter names the field.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from trioserve.contracts.errors import ModelLoadError
from trioserve.contracts.weights import AdapterId, AdapterRef
from trioserve.model.loading.adapter_directory import allowed_directory, read_adapter
from trioserve.model.loading.checkpoint import open_checkpoint

PROMPT = list(range(5, 42))
STEPS = 8
FAMILIES = [
    *("llama", "llama-biased-64", "llama-padded", "qwen2", "qwen3", "gemma2"),
    *("phi3", "phi", "glm4", "cohere2", "granite", "exaone4", "mixtral", "falcon-h1", "gemma3n", "gemma4"),
]

# peft imports a name from transformers that causes a warning.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")


def peft_model(path: Path, seed: int = 0, **config: Any) -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    if json.loads((path / "config.json").read_text()).get("num_local_experts"):
        config.setdefault("target_modules", ["q_proj", "k_proj", "v_proj", "o_proj"])
    if json.loads((path / "config.json").read_text())["model_type"] in ("falcon_h1", "gemma3n_text"):
        projections = ("q", "k", "v", "o", "gate", "up", "down")
        config.setdefault("target_modules", [f"{name}_proj" for name in projections])
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    model = get_peft_model(base, LoraConfig(**{"r": 8, "lora_alpha": 16, "target_modules": "all-linear", **config}))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def greedy(model: Any, prompt: list[int] = PROMPT, count: int = STEPS) -> list[int]:
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


class Served:
    """A runner with adapters by name."""

    def __init__(self, step_driver: ModuleType, path: Path, **options: Any) -> None:
        self.runner = step_driver.load_runner(path, **options)
        self.driver = step_driver.StepDriver(self.runner)
        self._refs: dict[str, AdapterRef] = {}

    def load(self, name: str, directory: Path) -> None:
        id = AdapterId(len(self._refs) + 1)
        weights = read_adapter(directory, self.runner.config, dtype=self.runner.dtype, rank_max=256)
        self.runner.add_adapter(id, weights)
        self._refs[name] = AdapterRef(id, weights.digest)

    def add(self, name: str, adapter: str | None, prompt: list[int] = PROMPT) -> None:
        self.driver.add(name, prompt)
        if adapter is not None:
            requests = self.driver._requests
            requests[name] = msgspec.structs.replace(requests[name], adapter=self._refs[adapter])

    def tokens(self, name: str, prompt: list[int] = PROMPT) -> list[int]:
        return self.driver.tokens[name][len(prompt) :]


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAMILIES)
def test_adapter_gives_the_tokens_of_peft(
    kind: str, cpu_kernels: str, tiny_checkpoint: Callable[..., Path], step_driver: ModuleType, tmp_path: Path
) -> None:
    path = tiny_checkpoint(kind)
    model = peft_model(path)
    model.save_pretrained(tmp_path)
    served = Served(step_driver, path, cpu_kernels=cpu_kernels)
    served.load("a", tmp_path)
    served.add("with", "a")
    served.add("without", None)
    served.driver.generate(["with", "without"], STEPS)
    assert served.tokens("with") == greedy(model)
    with model.disable_adapter():
        plain = greedy(model)
    assert served.tokens("without") == plain != served.tokens("with")


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        {"r": 16, "target_modules": ["q_proj", "v_proj"]},
        {"r": 5, "lora_alpha": 3, "use_rslora": True},
        {"r": 64, "target_modules": ["down_proj", "k_proj"]},
        {"r": 8, "rank_pattern": {"up_proj": 3, "layers.0.self_attn.q_proj": 24}, "alpha_pattern": {"o_proj": 64}},
        {"r": 8, "layers_to_transform": [1], "target_modules": ["o_proj", "gate_proj"]},
        {"r": 8, "target_modules": r".*layers\.0\..*(k|up)_proj"},
    ],
)
def test_adapter_options_of_peft_give_the_tokens_of_peft(
    config: dict[str, Any],
    cpu_kernels: str,
    tiny_checkpoint: Callable[..., Path],
    step_driver: ModuleType,
    tmp_path: Path,
) -> None:
    path = tiny_checkpoint("llama")
    model = peft_model(path, **config)
    model.save_pretrained(tmp_path)
    served = Served(step_driver, path, cpu_kernels=cpu_kernels)
    served.load("a", tmp_path)
    served.add("with", "a")
    served.driver.generate(["with"], STEPS)
    assert served.tokens("with") == greedy(model)


@pytest.mark.slow
def test_many_adapters_in_one_step_equal_single_adapters_and_merged_weights(
    cpu_kernels: str, tiny_checkpoint: Callable[..., Path], step_driver: ModuleType, tmp_path: Path
) -> None:
    path = tiny_checkpoint("llama")
    served = Served(step_driver, path, cpu_kernels=cpu_kernels)
    expected: dict[str, list[int]] = {}
    for index in range(4):
        model = peft_model(path, seed=index, r=(8, 16, 4, 48)[index])
        model.save_pretrained(tmp_path / f"{index}")
        served.load(f"{index}", tmp_path / f"{index}")
        expected[f"{index}"] = greedy(model.merge_and_unload())
    names = [f"{index}-{copy}" for copy in range(3) for index in range(4)] + ["base"]
    for name in names:
        served.add(name, None if name == "base" else name[0])
    # Prompts in chunks next to decodes, with rows of one adapter far apart.
    served.driver.step({name: 20 + place for place, name in enumerate(names[:7])})
    served.driver.generate(names, 1)
    while served.driver.left(names[0]) != 1 or len(served.tokens(names[0])) < STEPS:
        served.driver.generate(names, 1)
    for name in names[:-1]:
        assert served.tokens(name)[:STEPS] == expected[name[0]], name
    assert len({tuple(served.tokens(name)[:STEPS]) for name in names}) == 5


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_row_with_adapter_has_equal_bits_in_any_batch(
    quantization: str, tiny_checkpoint: Callable[..., Path], step_driver: ModuleType, tmp_path: Path, cpu_kernels: str
) -> None:
    if cpu_kernels == "torch" and quantization != "none":
        pytest.skip("only native kernels compute with quantized weights")
    path = tiny_checkpoint("llama", dtype="bfloat16")
    options = {"dtype": "bfloat16", "quantization": quantization, "batch_invariant": True}
    served = Served(step_driver, path, cpu_kernels=cpu_kernels, **options)
    for index in range(3):
        peft_model(path, seed=index).save_pretrained(tmp_path / f"{index}")
        served.load(f"{index}", tmp_path / f"{index}")
    logprobs = msgspec.structs.replace(step_driver.GREEDY, logprobs=5, prompt_logprobs=5)
    found: dict[str, list[Any]] = {}

    def entries(names: list[str], chunks: list[int]) -> dict[str, Any]:
        for name in names:
            served.add(name, {"base": None}.get(name.split("-")[0], name.split("-")[0]))
            requests = served.driver._requests
            requests[name] = msgspec.structs.replace(requests[name], sampling=logprobs)
        made: dict[str, list[Any]] = {name: [] for name in names}
        for count in chunks:
            result = served.driver.step(dict.fromkeys(names, count))
            for name in names:
                made[name] += result.prompt_logprobs.get(name, ())
        return made

    names = ["0", "1", "2", "base"]
    for name in names:
        found |= entries([name], [37])
    together = entries([f"{name}-{copy}" for copy in range(3) for name in names], [10, 20, 7])
    for name, rows in together.items():
        assert rows == found[name.split("-")[0]], name


@pytest.mark.slow
def test_removed_adapter_fails_only_its_own_request(
    cpu_kernels: str, tiny_checkpoint: Callable[..., Path], step_driver: ModuleType, tmp_path: Path
) -> None:
    path = tiny_checkpoint("llama")
    peft_model(path).save_pretrained(tmp_path)
    served = Served(step_driver, path, cpu_kernels=cpu_kernels)
    served.load("a", tmp_path)
    served.add("with", "a")
    served.add("without", None)
    served.driver.generate(["with", "without"], 2)
    served.runner.remove_adapter(AdapterId(1))
    served.runner.remove_adapter(AdapterId(1))
    result = served.driver.step({"with": 1, "without": 1})
    assert list(result.errors) == ["with"]
    assert "no longer loaded here" in result.errors["with"]
    assert result.token_ids[1] is not None


# --- refused adapters -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint, and an adapter for it."""
    directory = tmp_path_factory.mktemp("adapter")
    peft_model(tiny_checkpoint("llama")).save_pretrained(directory)
    return tiny_checkpoint("llama"), directory


def read_changed(
    saved: tuple[Path, Path], place: Path, config: dict[str, Any] | None = None, tensors: Any = None, rank_max: int = 64
) -> Any:
    checkpoint, directory = saved
    shutil.copytree(directory, place)
    if config is not None:
        described = json.loads((place / "adapter_config.json").read_text())
        (place / "adapter_config.json").write_text(json.dumps({**described, **config}))
    if tensors is not None:
        file = place / "adapter_model.safetensors"
        save_file(tensors(load_file(file)), file)
    return read_adapter(place, open_checkpoint(checkpoint).config, dtype="float32", rank_max=rank_max)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"use_dora": True}, "use_dora in adapter_config.json is True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save in adapter_config.json"),
        ({"bias": "all"}, "bias in adapter_config.json"),
        ({"lora_bias": True}, "lora_bias"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens"),
        ({"something_new": 3}, "something_new"),
        ({"peft_type": "IA3"}, "peft_type"),
        ({"r": 4}, "have rank 8, and adapter_config.json says 4"),
        ({"r": "8"}, "must be a whole number"),
        ({"lora_alpha": "x"}, "lora_alpha"),
        ({"lora_alpha": 1e400}, "finite"),
        ({"alpha_pattern": {"(a+)+$": 2}}, "regular expressions are not evaluated"),
        ({"alpha_pattern": {"q_proj": "x"}}, "which is no number"),
        ({"rank_pattern": {"q_proj": 9}}, "says 9"),
    ],
)
def test_error_of_an_unsupported_adapter_says_what_is_wrong(
    saved: tuple[Path, Path], tmp_path: Path, config: dict[str, Any], words: str
) -> None:
    with pytest.raises(ModelLoadError, match=words.replace("(", r"\(")):
        read_changed(saved, tmp_path / "a", config)


def _without(name: str) -> Any:
    return lambda tensors: {key: value for key, value in tensors.items() if name not in key}


def _with(**more: torch.Tensor) -> Any:
    return lambda tensors: {**tensors, **{name.replace("__", "."): value for name, value in more.items()}}


def _renamed(old: str, new: str) -> Any:
    return lambda tensors: {key.replace(old, new): value for key, value in tensors.items()}


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        (lambda tensors: {}, "holds nothing"),
        (_without("layers.1.self_attn.q_proj"), "lacks the factors of model.layers.1.self_attn.q_proj"),
        (_without("layers.1.self_attn.q_proj.lora_B"), "lora_A of .* alone"),
        (_with(base_model__model__model__embed_tokens__lora_embedding_A=torch.zeros(8, 320)), "no factor"),
        (_with(base_model__model__lm_head__weight=torch.zeros(320, 64)), "no factor of a projection"),
        (_renamed("layers.1.", "layers.7."), "cannot have an adapter here"),
        (_renamed("model.layers.1.self_attn.q_proj", "lm_head"), "cannot have an adapter here"),
        (_renamed("layers.1.mlp.", "layers.1.mlp.experts.0."), "cannot have an adapter here"),
        (_renamed("model.model.layers.1.", "model.visual.layers.1."), "cannot have an adapter here"),
        (lambda tensors: {key: value[:, :-1].contiguous() for key, value in tensors.items()}, "made for another model"),
        (lambda tensors: {key: value[0].contiguous() for key, value in tensors.items()}, "made for another model"),
    ],
)
def test_adapter_of_another_model_is_refused(
    saved: tuple[Path, Path], tmp_path: Path, tensors: Any, words: str
) -> None:
    with pytest.raises(ModelLoadError, match=words):
        read_changed(saved, tmp_path / "a", tensors=tensors)


def test_adapter_with_a_rank_above_the_limit_is_refused(saved: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"rank of .* is 8, and --max-lora-rank is 7"):
        read_changed(saved, tmp_path / "a", rank_max=7)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 3e38])
def test_adapter_with_numbers_that_are_not_finite_is_refused(
    saved: tuple[Path, Path], tmp_path: Path, value: float
) -> None:
    def changed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        next(tensor for name, tensor in tensors.items() if "lora_B" in name)[1, 2] = value
        return tensors

    with pytest.raises(ModelLoadError, match=r"numbers in the factors of .* are infinite or NaN in float32"):
        read_changed(saved, tmp_path / "a", tensors=changed)


def test_adapter_file_with_any_damaged_byte_is_refused_or_works(saved: tuple[Path, Path], tmp_path: Path) -> None:
    checkpoint, directory = saved
    config = open_checkpoint(checkpoint).config
    shutil.copytree(directory, tmp_path / "a")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        file = tmp_path / "a" / name
        whole = file.read_bytes()
        for cut in {0, 1, 7, 9, 60, len(whole) // 2, len(whole) - 1}:
            file.write_bytes(whole[:cut])
            with pytest.raises(ModelLoadError):
                read_adapter(tmp_path / "a", config, dtype="float32", rank_max=64)
        rng = np.random.default_rng(0)
        for _ in range(60):
            changed = bytearray(whole)
            changed[rng.integers(min(len(whole), 600))] ^= 1 << rng.integers(8)
            file.write_bytes(bytes(changed))
            with contextlib.suppress(ModelLoadError):
                read_adapter(tmp_path / "a", config, dtype="float32", rank_max=64)
        file.unlink()
        with pytest.raises(ModelLoadError, match=f"has no {name}"):
            read_adapter(tmp_path / "a", config, dtype="float32", rank_max=64)
        file.write_bytes(whole)


def test_adapter_digest_depends_on_the_content(saved: tuple[Path, Path], tmp_path: Path) -> None:
    plain = read_changed(saved, tmp_path / "a")
    assert read_changed(saved, tmp_path / "b", {"lora_dropout": 0.5}).digest == plain.digest
    assert read_changed(saved, tmp_path / "c", {"lora_alpha": 17}).digest != plain.digest

    def one_bit(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        next(iter(tensors.values())).view(torch.int32)[0, 0] ^= 1
        return tensors

    assert read_changed(saved, tmp_path / "d", tensors=one_bit).digest != plain.digest


def test_adapter_directory_that_is_not_allowed_is_reported_as_missing(tmp_path: Path) -> None:
    allowed, outside = tmp_path / "in", tmp_path / "out"
    allowed.mkdir()
    outside.mkdir()
    (allowed / "good").mkdir()
    (allowed / "link").symlink_to(outside)
    assert allowed_directory(allowed / "good", [allowed]) == (allowed / "good").resolve()
    assert allowed_directory(outside, []) == outside.resolve()
    for path in (outside, allowed / "link", allowed / ".." / "out", allowed / "none", Path("a\0b")):
        with pytest.raises(ModelLoadError, match="there is no directory"):
            allowed_directory(path, [allowed])
