"""Tiny EAGLE-3 heads with random weights, and a plain reference without a KV cache.

Source of the reference: the code that the paper's authors published.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

__all__ = ["DRAFT_VOCAB_SIZE", "PlainHead", "write_eagle"]

VOCAB_SIZE = 320
DRAFT_VOCAB_SIZE = 200
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "draft_vocab_size": DRAFT_VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
}


def write_eagle(directory: Path, *, seed: int = 0, own_embedding: bool = False, **changes: Any) -> Path:
    config = {**CONFIG, **changes}
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    size, middle, head_dim = config["hidden_size"], config["intermediate_size"], 16
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    vocab = config.get("draft_vocab_size", VOCAB_SIZE)
    shapes = {
        "fc.weight": (size, 3 * 64),
        "midlayer.self_attn.q_proj.weight": (queries, 2 * size),
        "midlayer.self_attn.k_proj.weight": (keys, 2 * size),
        "midlayer.self_attn.v_proj.weight": (keys, 2 * size),
        "midlayer.self_attn.o_proj.weight": (size, queries),
        "midlayer.mlp.gate_proj.weight": (middle, size),
        "midlayer.mlp.up_proj.weight": (middle, size),
        "midlayer.mlp.down_proj.weight": (size, middle),
        "midlayer.hidden_norm.weight": (size,),
        "midlayer.input_layernorm.weight": (size,),
        "midlayer.post_attention_layernorm.weight": (size,),
        "norm.weight": (size,),
        "lm_head.weight": (vocab, size),
    }
    if own_embedding:
        shapes["embed_tokens.weight"] = (VOCAB_SIZE, size)
    tensors = {
        name: torch.randn(shape, generator=generator) * (0.1 if len(shape) == 2 else 0.2) + (len(shape) == 1)
        for name, shape in shapes.items()
    }
    if vocab != VOCAB_SIZE:
        known = torch.randperm(VOCAB_SIZE, generator=generator)[:vocab].sort().values
        tensors["d2t"] = known - torch.arange(vocab)
        tensors["t2d"] = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
        tensors["t2d"][known] = True
    save_file(tensors, directory / "model.safetensors")
    return directory


class PlainHead:
    def __init__(self, directory: Path, embedding: Tensor) -> None:
        self.config = json.loads((directory / "config.json").read_text())
        self.weights = load_file(directory / "model.safetensors")
        self.embedding = self.weights.get("embed_tokens.weight", embedding)

    def proposed(self, tokens: list[int], tapped: Tensor, count: int) -> list[int]:
        """Return the `count` most likely tokens after `tokens`.

        Args:
            tokens: tokens so far.
            tapped: inputs of the tapped layers, float32 [len(tokens) - 1, 3 * hidden_size].
            count: number of draft tokens.
        """
        tokens = list(tokens)
        hidden = list(tapped @ self.weights["fc.weight"].T)
        for _ in range(count):
            rows = self._layer(tokens[1:], torch.stack(hidden))
            logits = self._norm(rows[-1], "norm") @ self.weights["lm_head.weight"].T
            best = int(logits.argmax())
            tokens.append(best + int(self.weights["d2t"][best]) if "d2t" in self.weights else best)
            hidden.append(rows[-1])
        return tokens[len(tokens) - count :]

    def _norm(self, rows: Tensor, name: str) -> Tensor:
        rows = rows * (rows.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]).rsqrt()
        return rows * self.weights[f"{name}.weight"]

    def _layer(self, tokens: list[int], hidden: Tensor) -> Tensor:
        embedded = self._norm(self.embedding[torch.tensor(tokens)], "midlayer.input_layernorm")
        normed = self._norm(hidden, "midlayer.hidden_norm")
        both = torch.cat((embedded, normed), -1)
        heads, kv_heads, dim = self.config["num_attention_heads"], self.config["num_key_value_heads"], 16

        def project(part: str, count: int) -> Tensor:
            return (both @ self.weights[f"midlayer.self_attn.{part}_proj.weight"].T).view(len(tokens), count, dim)

        queries, keys = self._rotated(project("q", heads)), self._rotated(project("k", kv_heads))
        values = project("v", kv_heads)
        rows = []
        for row in range(len(tokens)):
            parts = []
            for head in range(heads):
                kv = head * kv_heads // heads
                scores = keys[: row + 1, kv] @ queries[row, head] / dim**0.5
                parts.append(scores.softmax(-1) @ values[: row + 1, kv])
            rows.append(torch.cat(parts))
        residual = normed if self.config.get("norm_before_residual") else hidden
        out = residual + torch.stack(rows) @ self.weights["midlayer.self_attn.o_proj.weight"].T
        normed = self._norm(out, "midlayer.post_attention_layernorm")
        gate, up = (normed @ self.weights[f"midlayer.mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        return out + (torch.nn.functional.silu(gate) * up) @ self.weights["midlayer.mlp.down_proj.weight"].T

    def _rotated(self, heads: Tensor) -> Tensor:
        dim = heads.shape[-1]
        angles = torch.arange(heads.shape[0])[:, None] * self.config["rope_theta"] ** (-torch.arange(0, dim, 2) / dim)
        cos, sin = (torch.cat((part, part), -1)[:, None] for part in (angles.cos(), angles.sin()))
        half = torch.cat((-heads[..., dim // 2 :], heads[..., : dim // 2]), -1)
        return heads * cos + half * sin
