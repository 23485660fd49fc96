"""Tests that a model with an extreme value in its config is computed as in transformers, or refused by field."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from trioserve.contracts.errors import ModelLoadError
from trioserve.contracts.sampling import SamplingParams
from trioserve.model.loading.checkpoint import open_checkpoint
from trioserve.model.loading.hf_config import model_config_from

ALL_LOGPROBS = SamplingParams(temperature=0.0, prompt_logprobs=0)
PROMPT = [(7 * index + 3) % 300 + 6 for index in range(41)]

COMPUTED: list[tuple[str, dict[str, Any]]] = [
    ("deepseek-v2", {"n_shared_experts": 0}),
    ("deepseek-v3", {"n_shared_experts": 0}),
    ("glm4-moe", {"n_shared_experts": 0}),
    ("glm4-moe-lite", {"n_shared_experts": 0}),
    ("dots1", {"n_shared_experts": 0}),
    ("qwen2-moe", {"shared_expert_intermediate_size": 0}),
    ("qwen3-next", {"shared_expert_intermediate_size": 0}),
    ("granite-hybrid-moe", {"shared_intermediate_size": 0}),
    ("dots1", {"attention_bias": True}),
    ("deepseek-v2-lite", {"n_group": 0, "topk_group": 0}),
    ("minicpm3", {"scale_depth": None}),
    ("minicpm3", {"dim_model_base": None}),
    ("falcon-h1", {"mamba_d_ssm": None}),
    ("falcon-h1", {"mamba_norm_before_gate": None}),
    ("granite-hybrid", {"mamba_conv_bias": None}),
    ("gemma3", {"sliding_window": 1}),
    ("gemma2", {"query_pre_attn_scalar": 1}),
    ("gemma", {"hidden_act": "gelu"}),
    ("gemma", {"hidden_act": "silu"}),
    ("gemma", {"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"}),
    ("gemma2", {"hidden_activation": "gelu"}),
    ("gemma2", {"hidden_activation": "silu", "hidden_act": "gelu"}),
    ("gemma2", {"hidden_act": "gelu"}),
    ("gemma3", {"hidden_activation": "gelu", "hidden_act": "silu"}),
    ("gemma3", {"attn_logit_softcapping": 0.5}),
    ("gemma3", {"final_logit_softcapping": 2.0}),
    ("gemma3n", {"hidden_act": "silu", "final_logit_softcapping": 1.0}),
    ("lfm2", {"conv_L_cache": 2}),
    ("gemma3n", {"altup_num_inputs": 2}),
]
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("deepseek-v3", {"rope_interleave": None}, "rope_interleave in config.json is None"),
    ("moonlight", {"head_dim": 2}, "head_dim in config.json is 2, but it must be 16"),
    ("moonlight", {"n_group": 0}, "the number of groups of experts is 0"),
    ("deepseek-v3", {"topk_group": None}, "topk_group in config.json is None, but it must be 1 to 4"),
    ("dots1", {"topk_group": 0}, "the number of groups for each token is 0"),
    ("gemma2", {"sliding_window": None}, "sliding_window in config.json is None, but it must be a whole number"),
    ("gpt-oss", {"sliding_window": 0}, "sliding_window in config.json is 0, but it must be at least 1"),
    ("llama4", {"attention_chunk_size": None}, "attention_chunk_size in config.json is None"),
    (
        "gemma",
        {"hidden_activation": "gelu"},
        "hidden_activation in config.json is 'gelu', but it must be the same function",
    ),
    ("gemma2", {"hidden_activation": "mish"}, "hidden_activation in config.json is 'mish'; supported are"),
    ("gemma3n", {"hidden_activation": "gelu"}, "hidden_activation in config.json is 'gelu'"),
    ("gemma2", {"attn_logit_softcapping": 0.0}, "attn_logit_softcapping is 0.0, but it must be a positive number"),
    ("lfm2-moe", {"conv_L_cache": 1}, "kernel size is 1, allowed is 2 to 64"),
    ("mamba2", {"conv_kernel": 1}, "kernel size is 1, allowed is 2 to 64"),
    ("bamba", {"mamba_d_conv": 1}, "kernel size is 1, allowed is 2 to 64"),
    ("qwen3-next", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1, allowed is 2 to 64"),
    ("qwen3-next", {"linear_key_head_dim": 1}, "linear_key_head_dim is 1, allowed is 2 to"),
    ("gemma3n", {"altup_num_inputs": 1}, "altup_num_inputs is 1, allowed is 2 to 8"),
    ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention in config.json is 'all'"),
    (
        "gemma4",
        {"per_layer_config": {"1": {"rope_theta": 5}}},
        "has rope_theta for layer 1; supported are head_dim and",
    ),
    ("gemma4", {"per_layer_config": {"1": {"head_dim": 63}}}, "63 dimensions of each head are rotated, but pairs"),
    ("gemma4", {"num_kv_shared_layers": 6}, "num_kv_shared_layers in config.json is 6, but it must be 0 to 5"),
    (
        "gemma4",
        {"rope_parameters": {"full_attention": {"rope_type": "proportional", "rope_theta": 5, "factor": -1.0}}},
        "a rope frequency factor is -1.0, but it must be a positive number",
    ),
    ("hunyuan-moe", {"moe_topk": [1, 2, 3]}, "moe_topk in config.json is [1, 2, 3], but it must be one number, or one"),
    ("hunyuan-moe", {"moe_intermediate_size": 48}, "moe_intermediate_size in config.json is 48, but it must be 96"),
    ("hunyuan-dense", {"use_cla": True}, "use_cla in config.json is True, but it must be false"),
    ("dbrx", {"ffn_config": {"moe_normalize_expert_weights": 2}}, "moe_normalize_expert_weights in ffn_config"),
    (
        "dbrx",
        {"ffn_config": {"ffn_act_fn": {"name": "gelu"}}},
        "name in ffn_act_fn in ffn_config in config.json is 'gelu'",
    ),
    ("mimo-v2-flash", {"v_head_dim": 80}, "v_head_dim is 80, allowed is 1 to 64"),
    ("mimo-v2-flash", {"n_shared_experts": 1}, "n_shared_experts in config.json is 1, but it must be 0 or null"),
    (
        "mimo-v2-flash",
        {"hybrid_layer_pattern": [0, 1]},
        "hybrid_layer_pattern in config.json is [0, 1], but it must be",
    ),
    ("laguna", {"gating": False}, "gating in config.json is False, but it must be true, 'per-head' or"),
    ("laguna", {"attention_bias": True}, "attention_bias in config.json is True, but it must be false"),
    ("laguna", {"num_attention_heads_per_layer": [4]}, "num_attention_heads_per_layer in config.json is"),
    ("axk1", {"q_lora_rank": None}, "q_lora_rank in config.json is None, but it must be a whole number"),
    ("kimi-linear", {"mla_use_nope": False}, "mla_use_nope in config.json is False, but it must be true"),
    ("kimi-linear", {"qk_rope_head_dim": 15}, "qk_rope_head_dim is 15, but it must be even"),
    ("longcat-flash", {"router_bias": True}, "router_bias in config.json is True, but it must be false"),
    ("longcat-flash", {"zero_expert_type": "drop"}, "zero_expert_type in config.json is 'drop'"),
    ("longcat-flash", {"q_lora_rank": None}, "q_lora_rank in config.json is None, but it must be at least 1"),
    ("longcat-flash", {"moe_topk": 9}, "number of experts for each token is 9, allowed is 1 to 8"),
    ("phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok in config.json is 3, but it must be 2"),
    ("olmo", {"clip_qkv": -1.0}, "clip_qkv is -1.0, but it must be a positive number"),
    ("step3p5", {"attention_bias": True}, "attention_bias in text_config in config.json is True"),
    ("step3p5", {"swiglu_limits": [1.0]}, "swiglu_limits in text_config in config.json is [1.0], but it must be"),
    ("step3p5", {"swiglu_limits": [-1.0] * 4}, "a limit of experts (swiglu_limits) is -1.0"),
    ("step3p5", {"moe_layers_enum": "a", "mlp_layer_types": None}, "moe_layers_enum in text_config in config.json is"),
    ("minimax", {"mlp_beta_factor": 0.0}, "a factor of a sum (alpha, beta) is 0.0, but it must be a positive number"),
    ("minimax", {"layer_types": None, "attn_type_list": [0, 1]}, "attn_type_list in config.json is [0, 1]"),
    ("minimax", {"hidden_act": "gelu"}, "hidden_act in config.json is 'gelu'"),
    ("minimax", {"shared_intermediate_size": 8}, "shared_intermediate_size in config.json is 8"),
    ("zamba2", {"use_long_context": True}, "use_long_context in config.json is True, but it must be false"),
    ("zamba2", {"tie_word_embeddings": False}, "tie_word_embeddings in config.json is False, but it must be true"),
    ("zamba2", {"use_shared_attention_adapter": True}, "num_key_value_heads in config.json is 2"),
    ("zamba2", {"layers_block_type": ["hybrid"]}, "layers_block_type in config.json is"),
    ("zamba2", {"adapter_rank": 0}, "adapter_rank is 0, allowed is 1 to"),
    ("mamba2", {"expand": 1e308}, "describe no model that can be computed"),
    ("lfm2", {"block_ffn_dim_multiplier": 1e308}, "describe no model that can be computed"),
    ("minicpm3", {"hidden_size": 0}, "hidden_size is 0, allowed is 1 to"),
]


def _id(case: Any) -> str | None:
    return " ".join(f"{name}={value}" for name, value in case.items()) if isinstance(case, dict) else None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("kind, fields", COMPUTED, ids=_id)
def test_extreme_field_is_computed_as_in_transformers(
    kind: str,
    fields: dict[str, Any],
    cpu_kernels: str,
    tiny_checkpoints: ModuleType,
    step_driver: ModuleType,
    tmp_path: Path,
) -> None:
    from transformers import AutoModelForCausalLM

    tiny_checkpoints.write_checkpoint(tmp_path, kind, fields=fields)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        wanted = model(torch.tensor([PROMPT]), use_cache=False).logits[0].log_softmax(-1)
    if fields.get("hidden_activation") == "gelu":
        cpu_kernels = "auto"  # No native kernel supports this model, so torch computes it.
    runner = step_driver.load_runner(tmp_path, cpu_kernels=cpu_kernels)
    driver = step_driver.StepDriver(runner)
    driver.add("a", PROMPT, ALL_LOGPROBS)
    entries = [entry for count in (20, 1, 20) for entry in driver.step({"a": count}).prompt_logprobs["a"]]
    runner.close()
    found = [float(wanted[row, entry.token_id]) for row, entry in enumerate(entries)]
    assert [entry.logprob for entry in entries] == pytest.approx(found, abs=2e-4)


@pytest.mark.parametrize("bad", [10**9, 10**12, 10**30, -1, 1.5, True, "8", [8] * 4], ids=repr)
@pytest.mark.parametrize("name", ["num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"])
@pytest.mark.parametrize("kind", ["llama", "deepseek-v3", "lfm2", "gemma3n", "falcon-h1"])
def test_excessive_sizes_are_refused_before_any_allocation(
    kind: str, name: str, bad: object, tiny_checkpoint: Callable[..., Path]
) -> None:
    config = json.loads((tiny_checkpoint(kind) / "config.json").read_text())
    tracemalloc.start()
    with pytest.raises(ModelLoadError):
        model_config_from({**config, name: bad}, {}, dtype_name="float32")
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


@pytest.mark.parametrize("kind, fields, said", REFUSED, ids=_id)
def test_error_of_an_extreme_config_value_names_the_field(
    kind: str,
    fields: dict[str, Any],
    said: str,
    tiny_checkpoint: Callable[..., Path],
    tmp_path: Path,
) -> None:
    path = shutil.copytree(tiny_checkpoint(kind), tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    config.get("text_config", config).update(fields)
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError) as caught:
        open_checkpoint(path)
    assert said in str(caught.value)
