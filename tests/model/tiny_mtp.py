"""Tiny checkpoints with a prediction layer (MTP), and a plain reference without a KV cache.

The reference loads the prediction layer as an ordinary layer of transformers, which itself skips such layers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

__all__ = ["PlainMtp", "write_mtp"]


def write_mtp(plain: Path, directory: Path, *, is_shared: bool = False, is_always_right: bool = False) -> Path:
    """Write a checkpoint with a prediction layer, and in `directory`/reference a checkpoint for PlainMtp.

    Args:
        plain: checkpoint without a prediction layer.
        directory: destination.
        is_shared: True if embedding and output projection are the model's own, and are not stored twice.
        is_always_right: True to make all layers add nothing. Then the next token depends on the last one only, and
            the prediction layer computes the same token as the model.
    """
    config = json.loads((plain / "config.json").read_text())
    tensors = load_file(plain / "model.safetensors")
    count, size, vocab = config["num_hidden_layers"], config["hidden_size"], config["vocab_size"]
    last, further = f"model.layers.{count - 1}.", f"model.layers.{count}."
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    layer = {
        name.replace(last, further): tensor + 0.05 * random(*tensor.shape).to(tensor.dtype)
        for name, tensor in tensors.items()
        if name.startswith(last)
    }
    beside = {f"{name}.weight": 1 + 0.2 * random(size) for name in ("enorm", "hnorm", "shared_head.norm")}
    beside["eh_proj.weight"] = 0.1 * random(size, 2 * size)
    if not is_shared:
        beside["embed_tokens.weight"] = 0.2 * random(vocab, size)
        beside["shared_head.head.weight"] = 0.2 * random(vocab, size)
    if is_always_right:
        beside = {"enorm.weight": torch.ones(size), "hnorm.weight": torch.ones(size)}
        beside["shared_head.norm.weight"] = tensors["model.norm.weight"].clone()
        beside["eh_proj.weight"] = torch.cat((torch.eye(size), torch.zeros(size, size)), -1)
        for part in (tensors, layer):
            part |= {name: torch.zeros_like(part[name]) for name in part if "o_proj" in name or "down_proj" in name}
    for name, more, changes in (
        (directory, beside, {"num_nextn_predict_layers": 1}),
        (directory / "reference", {}, {"num_hidden_layers": count + 1, "num_nextn_predict_layers": 0}),
    ):
        name.mkdir(exist_ok=True)
        (name / "config.json").write_text(json.dumps({**config, **changes}))
        every = {**tensors, **layer, **{f"{further}{each}": tensor for each, tensor in more.items()}}
        save_file(every, name / "model.safetensors", metadata={"format": "pt"})
    for file in plain.glob("tokenizer*.json"):
        (directory / file.name).write_bytes(file.read_bytes())
    return directory


class PlainMtp:
    """Reference that recomputes all rows for each draft token.

    Args:
        directory: destination of `write_mtp`.
    """

    def __init__(self, directory: Path) -> None:
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            directory / "reference", dtype=torch.float32
        ).eval()
        self.model.config.num_hidden_layers -= 1
        count = self.model.config.num_hidden_layers
        further = f"model.layers.{count}."
        stored = load_file(directory / "model.safetensors")
        self.beside = {name.removeprefix(further): tensor for name, tensor in stored.items() if further in name}
        self.layer = self.model.model.layers[count]
        self.embedding = self.beside.get("embed_tokens.weight", stored["model.embed_tokens.weight"])
        self.head = self.beside.get("shared_head.head.weight", stored["lm_head.weight"])

    @torch.inference_mode()
    def proposed(self, tokens: list[int], count: int) -> list[int]:
        """Return the `count` most likely tokens after `tokens`."""
        tokens = list(tokens)
        hidden = list(self.model.model(torch.tensor([tokens[:-1]]), use_cache=False).last_hidden_state[0])
        for _ in range(count):
            both = (self._norm(self.embedding[torch.tensor(tokens[1:])], "enorm"), self._norm(hidden, "hnorm"))
            row = self._computed(torch.cat(both, -1) @ self.beside["eh_proj.weight"].T)[-1]
            tokens.append(int((self._norm([row], "shared_head.norm") @ self.head.T).argmax()))
            hidden.append(row)
        return tokens[len(tokens) - count :]

    def _norm(self, rows: Any, name: str) -> Tensor:
        rows = rows if isinstance(rows, Tensor) else torch.stack(rows)
        rows = rows * (rows.pow(2).mean(-1, keepdim=True) + self.model.config.rms_norm_eps).rsqrt()
        return rows * self.beside[f"{name}.weight"]

    def _computed(self, rows: Tensor) -> Tensor:
        count = len(rows)
        positions = torch.arange(count)[None]
        seen = torch.full((count, count), float("-inf")).triu(1)[None, None]
        result = self.layer(
            rows[None],
            attention_mask=seen,
            position_ids=positions,
            position_embeddings=self.model.model.rotary_emb(rows[None], positions),
        )
        return (result[0] if isinstance(result, tuple) else result)[0]
