"""What the metadata and the tensors of a GGUF file say about a model. Keys are those of ggml's docs/gguf.md."""

from __future__ import annotations

import math

from trioserve.contracts.errors import ModelLoadError
from trioserve.model.loading.fields import Fields
from trioserve.model.loading.gguf import GgufFile, read_float32s
from trioserve.model.model_config import Architecture, Dtype, ModelConfig, RopeScaling

__all__ = ["ROPE_FACTORS_NAME", "model_config_from", "sampling_defaults_from"]

ROPE_FACTORS_NAME = "rope_freqs.weight"
FREQUENCY_FACTORS_MAX = 2**16  # head_dim / 2 of them; read before head_dim is checked

# Mistral comes as "llama", Llama's biases show as tensors.
_ARCHITECTURES: tuple[Architecture, ...] = ("llama", "qwen2", "qwen3")
_END_TOKEN_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def model_config_from(file: GgufFile) -> ModelConfig:
    """Dimensions from the keys of the file's architecture; ties and biases from which tensors are there."""
    fields = Fields(file.metadata, "the file's metadata")
    name = fields.text_or("general.architecture", None)
    matching = [architecture for architecture in _ARCHITECTURES if architecture == name]
    if not matching:
        raise ModelLoadError(
            f"the model's architecture is {name or 'not named in the file'}; supported are {', '.join(_ARCHITECTURES)}"
        )
    architecture = matching[0]
    if fields.whole_or(f"{architecture}.expert_count", 0):
        raise ModelLoadError("the model is a mixture of experts, which is not supported; take a dense one")
    hidden_size = fields.whole(f"{architecture}.embedding_length")
    layer_count = fields.whole(f"{architecture}.block_count")
    head_count = _same_for_all_layers(fields, f"{architecture}.attention.head_count")
    if head_count is None or head_count < 1:
        raise fields.wrong(f"{architecture}.attention.head_count", "at least 1")
    kv_head_count = _same_for_all_layers(fields, f"{architecture}.attention.head_count_kv")
    context_tokens_max = fields.whole(f"{architecture}.context_length")
    rope_scaling = _rope_scaling(file, fields, architecture, context_tokens_max)
    window = fields.whole_or(f"{architecture}.attention.sliding_window", 0) or None
    return ModelConfig(
        architecture=architecture,
        vocab_size=_vocab_size(file, fields),
        hidden_size=hidden_size,
        intermediate_size=_same_for_all_layers(fields, f"{architecture}.feed_forward_length") or 0,
        layer_count=layer_count,
        head_count=head_count,
        kv_head_count=head_count if kv_head_count is None else kv_head_count,
        head_dim=_head_dim(fields, architecture, hidden_size // head_count),
        context_tokens_max=rope_scaling.context_tokens(context_tokens_max) if rope_scaling else context_tokens_max,
        rms_norm_eps=fields.number(f"{architecture}.attention.layer_norm_rms_epsilon"),
        rope_theta=fields.number_or(f"{architecture}.rope.freq_base", 10_000.0),
        rope_scaling=rope_scaling,
        tie_word_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        attention_output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        qk_norm=architecture == "qwen3",
        # ModelConfig refuses an absurd layer_count; here it must only not become an absurd tuple.
        sliding_windows=(window,) * min(max(layer_count, 0), 2**16),
        bos_token_id=fields.whole_or("tokenizer.ggml.bos_token_id", None),
        eos_token_ids=_end_token_ids(fields),
        dtype_name=_dtype_name(file),
    )


def sampling_defaults_from(metadata: dict[str, object]) -> dict[str, float | int]:
    """What the model's makers recommend, under our names."""
    fields = Fields(metadata, "the file's metadata")
    defaults: dict[str, float | int] = {}
    for name, key in (
        ("temperature", "temp"),
        ("top_p", "top_p"),
        ("min_p", "min_p"),
        ("repetition_penalty", "penalty_repeat"),
    ):
        if (number := fields.number_or(f"general.sampling.{key}", None)) is not None:
            defaults[name] = number
    if (top_k := fields.whole_or("general.sampling.top_k", None)) is not None:
        defaults["top_k"] = top_k
    return defaults


def _same_for_all_layers(fields: Fields, key: str) -> int | None:
    """Some keys hold one number, or one for each layer."""
    values = set(fields.wholes(key))
    if len(values) > 1:
        raise ModelLoadError(f"{key} differs from layer to layer, which is not supported")
    return values.pop() if values else None


def _head_dim(fields: Fields, architecture: Architecture, default: int) -> int:
    key_length = fields.whole_or(f"{architecture}.attention.key_length", None)
    rotated = fields.whole_or(f"{architecture}.rope.dimension_count", None)
    head_dim = key_length if key_length is not None else rotated if rotated is not None else default
    if rotated is not None and rotated != head_dim:
        raise ModelLoadError(
            f"the model rotates {rotated} of {head_dim} dimensions of each head; supported is rotating all of them"
        )
    value_length = fields.whole_or(f"{architecture}.attention.value_length", head_dim)
    if value_length != head_dim:
        raise ModelLoadError(
            f"the model's keys have {head_dim} dimensions and its values {value_length}; supported are equal ones"
        )
    return head_dim


def _vocab_size(file: GgufFile, fields: Fields) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelLoadError("the file has no token_embd.weight: it is incomplete or holds no language model")
    token_count = len(fields.strings_or("tokenizer.ggml.tokens", []))
    if token_count > embedding.shape[0]:
        raise ModelLoadError(
            f"the file's tokenizer has {token_count} tokens, but the embedding only {embedding.shape[0]} rows: "
            "the file is damaged"
        )
    return embedding.shape[0]


def _end_token_ids(fields: Fields) -> tuple[int, ...]:
    ids = (fields.whole_or(f"tokenizer.ggml.{key}", None) for key in _END_TOKEN_KEYS)
    return tuple(dict.fromkeys(token_id for token_id in ids if token_id is not None))


def _dtype_name(file: GgufFile) -> Dtype:
    storages = {tensor.storage.name for tensor in file.tensors.values() if len(tensor.shape) > 1}
    dtypes: dict[frozenset[str], Dtype] = {frozenset({"F32"}): "float32", frozenset({"F16"}): "float16"}
    return dtypes.get(frozenset(storages), "bfloat16")


def _rope_scaling(
    file: GgufFile, fields: Fields, architecture: Architecture, context_tokens: int
) -> RopeScaling | None:
    factors = _frequency_factors(file)
    if factors is not None:
        return RopeScaling(kind="llama3", factor=max(factors), frequency_factors=factors)
    key = f"{architecture}.rope.scaling"
    factor = fields.number_or(f"{key}.factor", None)
    kind = fields.text_or(f"{key}.type", "none")
    if kind == "none":
        # Before there was a type, there was only this.
        linear_factor = fields.number_or(f"{architecture}.rope.scale_linear", 1.0)
        return RopeScaling(kind="linear", factor=linear_factor) if linear_factor != 1.0 else None
    if factor is None:
        raise ModelLoadError(f"the file's metadata lacks {key}.factor, which {key}.type {kind!r} needs")
    if kind == "linear":
        return RopeScaling(kind="linear", factor=factor)
    if kind != "yarn":
        raise ModelLoadError(f"the model's rope scaling is {kind!r}; supported are none, linear and yarn")
    attention_factor = fields.number_or(f"{key}.attn_factor", None)
    if attention_factor is not None and factor > 1.0:
        # ggml multiplies it with what YaRN prescribes; in ModelConfig it is the product.
        attention_factor *= 0.1 * math.log(factor) + 1.0
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_context_tokens=fields.whole_or(f"{key}.original_context_length", context_tokens),
        attention_factor=attention_factor,
        beta_fast=fields.number_or(f"{key}.yarn_beta_fast", 32.0),
        beta_slow=fields.number_or(f"{key}.yarn_beta_slow", 1.0),
    )


def _frequency_factors(file: GgufFile) -> tuple[float, ...] | None:
    """llama3 scaling comes as a tensor: what each inverse frequency is divided by."""
    tensor = file.tensors.get(ROPE_FACTORS_NAME)
    if tensor is None:
        return None
    if tensor.storage.name != "F32" or tensor.value_count > FREQUENCY_FACTORS_MAX:
        raise ModelLoadError(
            f"{ROPE_FACTORS_NAME} has {tensor.value_count} values of type {tensor.storage.name}, but it must have one "
            "F32 value for each pair of a head's dimensions: the file is damaged"
        )
    return read_float32s(tensor, file.path)
