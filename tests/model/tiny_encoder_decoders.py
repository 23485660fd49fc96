"""Tiny random checkpoints of BART, mBART, T5 and mT5, as transformers saves them, with a tokenizer of bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["END", "KINDS", "START", "VOCAB_SIZE", "model_of", "write_checkpoint"]

BYTE_COUNT = 256
END = BYTE_COUNT  # Token after each text. The decoder of BART begins with it, too.
START = BYTE_COUNT + 1
VOCAB_SIZE = BYTE_COUNT + 9
_BART = {
    "d_model": 32,
    "encoder_layers": 3,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 40,
    "max_position_embeddings": 60,
}
# A head has more numbers than the hidden state has for it, and the encoder has more layers than the decoder.
_T5 = {"d_model": 32, "d_kv": 12, "d_ff": 40, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 4}


class Kind(NamedTuple):
    """One checkpoint.

    Attributes:
        model: prefix of the classes in transformers.
        fields: fields of config.json.
        has_head: the head has weights of its own.
        has_logits_bias: final_logits_bias is not zero.
    """

    model: str
    fields: dict[str, Any]
    has_head: bool = False
    has_logits_bias: bool = False


KINDS = {
    "bart": Kind("Bart", _BART),
    "bart-unusual": Kind(
        "Bart", {**_BART, "activation_function": "relu", "scale_embedding": True}, has_logits_bias=True
    ),
    "mbart": Kind("MBart", {**_BART, "scale_embedding": True, "decoder_start_token_id": END}),
    "t5": Kind("T5", {**_T5, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20}),
    "t5-1.1": Kind("T5", {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}, has_head=True),
    "t5-silu": Kind("T5", {**_T5, "feed_forward_proj": "gated-silu", "n_positions": 60, "layer_norm_epsilon": 0.1}),
    "mt5": Kind("MT5", _T5, has_head=True),
}


def write_checkpoint(directory: Path, name: str, **fields: Any) -> None:
    """Save a checkpoint.

    Args:
        name: entry of KINDS.
        fields: further fields of config.json.
    """
    import torch
    import transformers

    kind = KINDS[name]
    usual = {"vocab_size": VOCAB_SIZE, "eos_token_id": END, "pad_token_id": START, "bos_token_id": START}
    if "T5" in kind.model:
        usual["decoder_start_token_id"] = START
    else:
        usual |= {"decoder_start_token_id": END, "forced_eos_token_id": None}
    config = getattr(transformers, f"{kind.model}Config")(**{**usual, **kind.fields, **fields})
    model = getattr(transformers, f"{kind.model}ForConditionalGeneration")(config)
    generator = torch.Generator().manual_seed(20_261_130)
    if kind.has_head:
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            size = 1.0 if "embed_positions" in parameter_name or "relative" in parameter_name else 0.3
            parameter.normal_(0.0, size, generator=generator)
            if parameter_name.endswith("norm.weight"):
                parameter.add_(1.0)
        if kind.has_logits_bias:
            model.final_logits_bias.normal_(0.0, 0.5, generator=generator)
    model.generation_config.max_length = None
    model.save_pretrained(directory)
    _tokenizer().save(str(directory / "tokenizer.json"))
    named = {"eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(named))


def model_of(directory: Path, name: str) -> Any:
    """Return the model of transformers."""
    import torch
    import transformers

    model_class = getattr(transformers, f"{KINDS[name].model}ForConditionalGeneration")
    return model_class.from_pretrained(directory, dtype=torch.float32).eval()


def _tokenizer() -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(sign, special=True, normalized=False) for sign in ("</s>", "<pad>")])
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", END)])
    return tokenizer
