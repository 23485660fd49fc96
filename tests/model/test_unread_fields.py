"""Tests that a warning names a field of config.json that no code reads, unless the field is known to change nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from trioserve.contracts.errors import ModelLoadError
from trioserve.model.drafts.checkpoints import open_eagle
from trioserve.model.loading.checkpoint import open_checkpoint
from trioserve.model.loading.encoder_directory import opened_encoder
from trioserve.model.loading.hf_config import model_config_from

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "vocab_size": 320,
}
QWEN_MOE: dict[str, Any] = {
    **LLAMA,
    "architectures": ["Qwen2MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "norm_topk_prob": False,
}
GEMMA: dict[str, Any] = {
    **LLAMA,
    "head_dim": 32,
    "sliding_window": 8,
    "query_pre_attn_scalar": 24,
}


def read(config: dict[str, Any]) -> None:
    model_config_from(config, {}, dtype_name="float32")


@pytest.mark.parametrize(
    "fields, named",
    [
        ({"rms_norm_epsilon": 1e-3}, "has 1 fields that .*: rms_norm_epsilon$"),
        ({"attention_bais": False, "rope_tetha": 5e5}, "has 2 fields that .*: attention_bais, rope_tetha$"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "factr": 4.0}}, ": rope_parameters.factr$"),
        ({"mlp_bias": True, "use_bias": True}, ": use_bias$"),
        ({"a\nb" + "c" * 100: 1}, ": a\\?b" + "c" * 77 + "$"),
        ({f"f{number:03}": 1 for number in range(500)}, "has 500 fields that .*, f009$"),
        ({"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": {"factor": 2.0}}, ": rope_scaling$"),
    ],
    ids=["misspelled", "two", "in a group", "bias", "line break", "many", "beside its successor"],
)
def test_warning_names_an_unread_config_field(
    fields: dict[str, Any], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    read(LLAMA | fields)
    (message,) = caplog.messages
    assert message.startswith("config.json has ")
    assert re.search(named, message), message


def test_unread_fields_of_text_and_image_parts_are_named(caplog: pytest.LogCaptureFixture) -> None:
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": {**GEMMA, "model_type": "gemma3_text", "layer_tipes": []},
        "vision_config": {"hidden_size": 8},
        "image_token_index": 3,
        "boi_token_index": 4,
        "mm_tokens_per_image": 4,
        "tie_word_embedding": False,
    }
    read(config)
    (message,) = caplog.messages
    assert message.endswith("computes: text_config.layer_tipes, tie_word_embedding")


@pytest.mark.parametrize(
    "config",
    [
        {**LLAMA, "attention_bias": False, "use_cache": True, "torch_dtype": "bfloat16", "rope_scaling": None},
        {**LLAMA, "is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"dtype": "q4"}},
        {**LLAMA, "attention_dropout": 0.1, "resid_pdrop": 0.1, "_name_or_path": "a", "unsloth_fixed": True},
        {**LLAMA, "num_nextn_predict_layers": 1, "mtp_share": True, "task_specific_params": {"a": {"b": 1}}},
        {**LLAMA, "rope_scaling": {"type": "dynamic", "rope_type": "dynamic", "factor": 2.0}},
        {**QWEN_MOE, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28},
        {**GEMMA, "architectures": ["Gemma2ForCausalLM"], "cache_implementation": "hybrid", "hidden_act": "silu"},
    ],
    ids=["usual", "SmolLM2", "training", "further layers", "dynamic", "windows off", "Gemma 2"],
)
def test_warning_does_not_name_harmless_config_fields(config: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    read(config)
    assert not caplog.messages


def test_field_that_changes_the_computation_is_refused_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ModelLoadError, match=r"rope_interleaved in config\.json is True"):
        read({**LLAMA, "rope_interleaved": True})
    assert not caplog.messages


def rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    described = json.loads(path.read_text())
    change(described)
    path.write_text(json.dumps(described))


@pytest.mark.parametrize("kind", ["BertModel", "XLMRobertaForSequenceClassification", "ModernBertModel", "GteModel"])
def test_unread_fields_of_an_encoder_are_named(
    kind: str, tiny_encoders: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny_encoders.write_encoder(tmp_path, kind)
    opened_encoder(tmp_path)
    assert not caplog.messages
    rewrite(tmp_path / "config.json", lambda described: described.update(layer_norm_epsilon=1e-3))
    opened_encoder(tmp_path)
    assert caplog.messages[0].endswith(": layer_norm_epsilon")
    rewrite(tmp_path / "config.json", lambda described: described.update(is_decoder=True))
    with pytest.raises(ModelLoadError, match=r"is_decoder in config\.json is True"):
        opened_encoder(tmp_path)


@pytest.mark.parametrize("kind", ["smolvlm", "idefics3"])
def test_unread_fields_of_the_image_part_are_named(
    kind: str, tiny_vision: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny_vision.write_checkpoint(tmp_path, kind)
    open_checkpoint(tmp_path)
    assert not caplog.messages
    rewrite(tmp_path / "config.json", lambda described: described["vision_config"].update(layer_norm_epsilon=1e-3))
    open_checkpoint(tmp_path)
    (message,) = caplog.messages
    assert message.startswith("vision_config in config.json has 1 fields")
    assert message.endswith(": layer_norm_epsilon")


def test_fields_of_an_eagle_head_are_read(
    tiny_eagle: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    open_eagle(tiny_eagle.write_eagle(tmp_path / "head", norm_before_residual=True))
    assert not caplog.messages
