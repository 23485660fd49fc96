from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trioserve.contracts.errors import ModelLoadError
from trioserve.model.layer_config import RopeScaling, RotaryConfig
from trioserve.model.loading.checkpoint import open_checkpoint
from trioserve.model.loading.hf_config import model_config_from, read_json_object, sampling_defaults_from
from trioserve.model.model_config import ModelConfig

# a config in the format of transformers 4
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
}


def rotary(config: ModelConfig) -> RotaryConfig:
    assert config.heads.rotary is not None
    return config.heads.rotary


def windows(config: ModelConfig) -> tuple[int | None, ...]:
    return tuple(layer.attention.window for layer in config.layers)


def read(changes: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    config = {name: value for name, value in {**LLAMA, **changes}.items() if value != "absent"}
    return model_config_from(config, generation or {}, dtype_name="bfloat16")


def test_llama_config_of_transformers_4_is_read() -> None:
    config = read({})
    assert (config.family, config.heads.head_dim, config.heads.kv_head_count, config.layer_count) == (
        "llama",
        128,
        8,
        32,
    )
    assert rotary(config).theta == 500000.0
    assert rotary(config).scaling == RopeScaling(
        kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_tokens=8192
    )
    assert config.context_tokens_max == 131072
    assert config.eos_token_ids == (128001, 128008, 128009)
    assert windows(config) == (None,) * 32
    attention = config.heads
    assert (attention.has_bias, attention.has_output_bias, config.layers[0].mlp.has_bias) == (False,) * 3
    assert attention.qk_norm == "none"


def test_rope_parameters_of_transformers_5_are_equivalent() -> None:
    rope = {**LLAMA["rope_scaling"], "rope_theta": 500000.0}
    assert read({"rope_parameters": rope, "rope_scaling": "absent", "rope_theta": "absent"}) == read({})


def test_old_name_of_the_rope_scaling_type_is_read() -> None:
    assert rotary(read({"rope_scaling": {"type": "linear", "factor": 2}})).scaling == RopeScaling(
        kind="linear", factor=2.0, original_context_tokens=131072
    )


def test_rope_of_type_default_has_no_scaling() -> None:
    assert rotary(read({"rope_scaling": {"rope_type": "default"}})).scaling is None
    assert rotary(read({"rope_scaling": None, "rope_theta": "absent"})).theta == 10_000.0


def test_yarn_config_is_read_with_defaults_and_with_all_fields() -> None:
    original = {"original_max_position_embeddings": 32768}
    config = read({"max_position_embeddings": 32768, "rope_scaling": {"type": "yarn", "factor": 4.0, **original}})
    assert config.context_tokens_max == 131072
    assert rotary(config).scaling == RopeScaling(kind="yarn", factor=4.0, original_context_tokens=32768)
    said = {"beta_fast": 16, "beta_slow": 2, "attention_factor": 1.5}
    scaling = rotary(read({"rope_scaling": {"type": "yarn", "factor": 4.0, **original, **said}})).scaling
    assert scaling == RopeScaling(
        kind="yarn", factor=4.0, original_context_tokens=32768, beta_fast=16.0, beta_slow=2.0, attention_factor=1.5
    )


def test_yarn_attention_factor_is_the_ratio_of_the_scales_of_mscale_and_mscale_all_dim() -> None:
    yarn = {"type": "yarn", "factor": 8.0, "mscale": 0.5, "mscale_all_dim": 1.0}
    scaling = rotary(read({"rope_scaling": yarn})).scaling
    assert scaling is not None
    assert scaling.attention_factor == pytest.approx((0.05 * math.log(8) + 1) / (0.1 * math.log(8) + 1))


def test_each_family_has_its_own_biases() -> None:
    def biases(changes: dict[str, Any]) -> tuple[bool, bool, bool]:
        layer = read(changes).layers[0]
        return layer.attention.has_bias, layer.attention.has_output_bias, layer.mlp.has_bias

    assert biases({"attention_bias": True, "mlp_bias": True}) == (True, True, True)
    assert biases({"architectures": ["Qwen2ForCausalLM"]}) == (True, False, False)
    qwen3 = {"architectures": ["Qwen3ForCausalLM"], "attention_bias": False}
    assert biases(qwen3) == (False, False, False)
    assert read(qwen3).heads.qk_norm == "head"


def test_head_dim_may_be_given_missing_or_null() -> None:
    assert read({"head_dim": 64}).heads.head_dim == 64
    assert read({"head_dim": None}).heads.head_dim == 128
    assert read({"architectures": ["Qwen3ForCausalLM"], "hidden_size": 1024}).heads.head_dim == 128


def test_every_layer_of_mistral_has_a_window_unless_it_is_null() -> None:
    mistral = {"architectures": ["MistralForCausalLM"]}
    assert windows(read({**mistral, "sliding_window": 4096})) == (4096,) * 32
    assert windows(read({**mistral, "sliding_window": None})) == (None,) * 32


def test_qwen_has_windows_only_if_enabled_and_after_the_first_layers() -> None:
    qwen = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 4096, "max_window_layers": 30}
    assert windows(read({**qwen, "use_sliding_window": False})) == (None,) * 32
    assert windows(read({**qwen, "use_sliding_window": True})) == (None,) * 30 + (4096,) * 2
    types = ["sliding_attention"] + ["full_attention"] * 31
    assert windows(read({**qwen, "use_sliding_window": True, "layer_types": types})) == (4096,) + (None,) * 31


def test_end_tokens_in_both_config_files_count_once() -> None:
    assert read({"eos_token_id": 2}, {"eos_token_id": [4, 2]}).eos_token_ids == (4, 2)
    assert read({"eos_token_id": None}).eos_token_ids == ()


@pytest.mark.parametrize(
    "changes, said",
    [
        (
            {"architectures": ["RwkvForCausalLM"]},
            "architecture is RwkvForCausalLM; supported are LlamaForCausalLM, ",
        ),
        ({"architectures": None, "model_type": "xlnet"}, "architecture is xlnet; supported are"),
        ({"architectures": None, "model_type": None}, "not named in config.json"),
        ({"architectures": "LlamaForCausalLM"}, "must be a list of strings"),
        ({"hidden_size": "absent"}, "config.json lacks hidden_size"),
        ({"hidden_size": "4096"}, "hidden_size in config.json is '4096', but it must be a whole number"),
        ({"hidden_size": True}, "hidden_size in config.json is True"),
        ({"hidden_size": 10**400}, "hidden_size in config.json is 1000"),
        ({"num_attention_heads": 0}, "must be at least 1"),
        ({"num_hidden_layers": 10**9}, "layer_count is 1000000000"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps in config.json is 'small', but it must be a number"),
        ({"rms_norm_eps": 10**400}, "a number of ordinary size"),
        ({"tie_word_embeddings": 1}, "must be true or false"),
        ({"hidden_act": "gelu"}, "hidden_act in config.json is 'gelu'; supported is silu"),
        ({"rope_scaling": {"type": "mrope", "factor": 2.0}}, "'mrope'; supported are default, linear, dynamic, llama3"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling in config.json lacks factor"),
        ({"rope_scaling": "linear"}, "must be an object"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": 0}}, "truncate"),
        ({"partial_rotary_factor": 0.5, "rope_scaling": None}, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"eos_token_id": ["</s>"]}, "a whole number or a list of them"),
        (
            {"architectures": ["MistralForCausalLM"], "sliding_window": 8, "layer_types": ["linear_attention"] * 32},
            "'linear_attention'; supported are full_attention and sliding_attention",
        ),
    ],
)
def test_unsupported_config_is_refused_by_field(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        read(changes)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_only_sampling_defaults_that_the_config_names_are_returned() -> None:
    named = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": None, "eos_token_id": 2}
    assert sampling_defaults_from(named) == {"temperature": 0.6, "top_p": 0.9, "top_k": 20}
    assert sampling_defaults_from({"repetition_penalty": 1.05}) == {"repetition_penalty": 1.05}


def test_do_sample_false_means_greedy() -> None:
    assert sampling_defaults_from({"do_sample": False, "temperature": 0.6, "top_k": 5}) == {"temperature": 0.0}
    assert sampling_defaults_from({"do_sample": False, "repetition_penalty": 1.1})["repetition_penalty"] == 1.1


def test_max_new_tokens_becomes_max_tokens() -> None:
    assert sampling_defaults_from({"max_new_tokens": 12}) == {"max_tokens": 12}


@pytest.mark.parametrize(
    "content, said",
    [
        (b"{", "not valid JSON"),
        (b"[1]", "must hold a JSON object"),
        (b"\xff\xfe\xfa", "not valid JSON"),
        (b"[" * 99_999, "not valid JSON"),
    ],
)
def test_broken_config_json_is_refused_with_one_sentence(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelLoadError, match=said):
        read_json_object(tmp_path / "config.json")


def test_configs_of_all_families_that_transformers_saves_are_read(
    tiny_checkpoints: Any, tiny_checkpoint: Callable[..., Path]
) -> None:
    import transformers

    for kind, (architecture, _) in tiny_checkpoints.KINDS.items():
        theirs = transformers.AutoConfig.from_pretrained(tiny_checkpoint(kind))
        ours = open_checkpoint(tiny_checkpoint(kind)).config
        assert ours.family == architecture
        assert ours.heads.head_dim == getattr(theirs, "head_dim", None) or 16
        assert ours.layer_count == theirs.num_hidden_layers
        assert ours.tie_word_embeddings == theirs.tie_word_embeddings
        scaling = rotary(ours).scaling
        assert rotary(ours).theta == theirs.rope_parameters["rope_theta"]
        assert (scaling.kind if scaling else "default") == theirs.rope_parameters["rope_type"]
        assert ours.eos_token_ids == (2, 4)
        assert ours.bos_token_id == 1
    assert windows(open_checkpoint(tiny_checkpoint("mistral")).config) == (8, 8)
    assert windows(open_checkpoint(tiny_checkpoint("qwen2-sliding")).config) == (None, 8, 8)
    assert windows(open_checkpoint(tiny_checkpoint("qwen2")).config) == (None, None)


def test_checkpoint_has_sampling_defaults_and_tokenizer(tiny_checkpoint: Callable[..., Path]) -> None:
    directory = tiny_checkpoint("llama")
    checkpoint = open_checkpoint(directory)
    assert checkpoint.sampling_defaults == {"temperature": 0.7, "top_k": 20, "top_p": 0.8}
    assert checkpoint.tokenizer_directory == directory
    assert checkpoint.gguf_metadata is None


def test_generation_config_may_be_missing(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(tiny_checkpoint("llama"), directory)
    (directory / "generation_config.json").unlink()
    checkpoint = open_checkpoint(directory)
    assert checkpoint.sampling_defaults == {}
    assert checkpoint.config.eos_token_ids == (json.loads((directory / "config.json").read_text())["eos_token_id"],)
