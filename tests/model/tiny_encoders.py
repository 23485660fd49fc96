"""Tiny random encoders as transformers saves them, with a WordPiece tokenizer of a few words.

Biases and norms are random, too, so that a forgotten one shows up.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["KINDS", "WORDS", "write_encoder"]

WORDS = ("the", "sun", "is", "shining", "rain", "##s", "cats", "and", "dogs", "##ing", "a", "b", ",", ".")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
KINDS = (
    "BertModel",
    "BertForSequenceClassification",
    "BertForTokenClassification",
    "ErnieModel",
    "ErnieForSequenceClassification",
    "RobertaForMaskedLM",
    "RobertaModel",
    "XLMRobertaForSequenceClassification",
    "GteModel",
    "GteForSequenceClassification",
    "JinaEmbeddingsV3Model",
    "NomicBertModel",
    "NomicBertForSequenceClassification",
    "ModernBertModel",
    "ModernBertForMaskedLM",
    "ModernBertForSequenceClassification",
    "ModernBertForTokenClassification",
)


def write_encoder(directory: Path, kind: str, **changes: Any) -> None:
    """Save an encoder.

    Args:
        kind: class of transformers.
        changes: fields of the config that differ.
    """
    import torch
    import transformers

    fields: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 40,
        "type_vocab_size": 1 if "Roberta" in kind or "Jina" in kind else 2,
        "pad_token_id": 1 if "Roberta" in kind else 0,
        "layer_norm_eps": 1e-5,
    }
    if "ModernBert" in kind:
        fields |= {"num_hidden_layers": 4, "local_attention": 8, "pad_token_id": 0, "norm_eps": 1e-5}
        fields |= {"bos_token_id": 2, "cls_token_id": 2, "eos_token_id": 3, "sep_token_id": 3}
        del fields["type_vocab_size"], fields["layer_norm_eps"]
    if "Ernie" in kind:
        fields |= {"use_task_id": True, "task_type_vocab_size": 3}
    if "Classification" in kind:
        fields["num_labels"] = 5 if "Token" in kind else 1
    torch.manual_seed(1)
    model_class = getattr(transformers, kind)
    model = model_class(model_class.config_class(**(fields | changes)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory)
    write_tokenizer(directory)


def write_tokenizer(directory: Path) -> None:
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

    vocabulary = {word: index for index, word in enumerate((*SPECIAL, *WORDS))}
    backend = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(list(SPECIAL))
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
    )
    backend.enable_truncation(8)  # truncation that is saved in a tokenizer must not shorten a server's prompts
    backend.save(str(directory / "tokenizer.json"))
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    (directory / "tokenizer_config.json").write_text(json.dumps(names))
