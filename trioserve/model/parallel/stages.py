"""A model cut between its layers into stages, which compute one after the other: which layers each has, and the
checkpoint as it sees it.

Each has a run of layers, the first one also the embedding, and the last one the last norm and the head. A head that is
the embedding is in both.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from msgspec.structs import replace

from trioserve.contracts.errors import StartupError
from trioserve.model.adapter_weights import AdapterWeights
from trioserve.model.loading.checkpoint import Checkpoint
from trioserve.model.loading.stored_tensor import StoredTensor
from trioserve.model.loading.vision_part import VisionPart
from trioserve.model.model_config import AttentionConfig, LayerConfig, ModelConfig, StagePart
from trioserve.model.number_formats import Float32Array
from trioserve.model.parallel.cuts import Run, Runs

__all__ = [
    "Handover",
    "NoNeighbours",
    "StageCheckpoint",
    "cache_shares",
    "stage_adapter",
    "stage_config",
    "stage_configs",
    "stage_runs",
]

EMBEDDING, HEAD = ("embed",), ("norm", "lm_head")  # beginnings of names


class Handover(Protocol):
    """Connection of a stage to the stages before and after it.

    Only the thread that computes uses it, once per step, in the order of the steps. If a neighbour is gone, a call may
    block for ever or raise. The process that started the stages ends all of them in that case.
    """

    def receive(self, row_count: int, hidden_size: int) -> Float32Array | None:
        """Wait for the hidden states of a step from the stage before.

        Args:
            row_count: rows of the step.
            hidden_size: values per row.

        Returns:
            [row_count, hidden_size], or None if the step is abandoned and must not be computed here either.
        """
        ...

    def send(self, hidden: Float32Array | None) -> None:
        """Give the hidden states of a step to the stage after this one. May block until it accepts them.

        Args:
            hidden: C-contiguous [row_count, hidden_size], or None if the step is abandoned.
        """
        ...


class NoNeighbours:
    """Handover for steps that one stage computes alone, such as warm-up. Received hidden states are zeros."""

    def receive(self, row_count: int, hidden_size: int) -> Float32Array | None:
        return np.zeros((row_count, hidden_size), dtype=np.float32)

    def send(self, hidden: Float32Array | None) -> None:
        pass


class StageCheckpoint:
    """A Checkpoint of some of the layers, which are counted from 0 in here."""

    def __init__(self, checkpoint: Checkpoint, stage: int, stage_count: int) -> None:
        """checkpoint: of the whole model. Raises StartupError if it cannot be cut so."""
        runs = stage_runs(checkpoint, stage_count)
        self._checkpoint = checkpoint
        self._run = runs[stage]
        self.config: ModelConfig = stage_config(checkpoint.config, self._run)
        self.files: tuple[Path, ...] = checkpoint.files
        self.weight_bytes: int = sum(tensor.byte_count for tensor in self.tensors())
        self.tokenizer_directory: Path | None = checkpoint.tokenizer_directory
        self.gguf_metadata: Mapping[str, object] | None = checkpoint.gguf_metadata
        self.continues_texts: bool = checkpoint.continues_texts
        self.vision: VisionPart | None = checkpoint.vision
        self.sampling_defaults: Mapping[str, float | int] = checkpoint.sampling_defaults

    def tensors(self) -> Iterator[StoredTensor]:
        return self.part_of(self._checkpoint.tensors())

    def part_of(self, tensors: Iterable[StoredTensor]) -> Iterator[StoredTensor]:
        """Of those of a whole model like this one, what would be in here."""
        for tensor in tensors:
            name = self.own_name(tensor.name)
            if name is not None:
                yield tensor._replace(name=name)

    def own_name(self, name: str) -> str | None:
        """What a tensor of the whole model, or a matrix, is called in here; None: another stage has it."""
        path = name.split(".")
        if path[0] == "layers":
            index = int(path[1]) - self._run[0]
            return ".".join(("layers", str(index), *path[2:])) if 0 <= index < self._run[1] else None
        is_tied = self.config.tie_word_embeddings
        in_first, in_last = path[0] in EMBEDDING, path[0] in HEAD or (path[0] in EMBEDDING and is_tied)
        assert in_first or in_last, f"nobody said which stage has {name}"
        return name if (in_first and self.config.has_embedding) or (in_last and self.config.has_head) else None


def stage_adapter(whole: AdapterWeights, checkpoint: StageCheckpoint) -> AdapterWeights:
    """What of a LoRA adapter belongs to the stage's layers."""
    named = ((checkpoint.own_name(name), matrix) for name, matrix in whole.matrices.items())
    return AdapterWeights(whole.digest, whole.dtype, {name: matrix for name, matrix in named if name is not None})


def stage_configs(checkpoint: Checkpoint, stage_count: int) -> tuple[ModelConfig, ...]:
    """Of each stage; of one, the whole model's. Raises StartupError if it cannot be cut so."""
    if stage_count == 1:
        return (checkpoint.config,)
    return tuple(stage_config(checkpoint.config, run) for run in stage_runs(checkpoint, stage_count))


def cache_shares(stages: Sequence[ModelConfig]) -> tuple[float, ...]:
    """How much of the memory for KV and states each of them should have, so that all can keep as much."""
    kinds = [
        [sum(entry.size for entry in stage.kv_entries if entry is not None) for stage in stages],
        [stage.state_bytes for stage in stages],
    ]
    kept = [sizes for sizes in kinds if any(sizes)]
    return tuple(sum(sizes[stage] / sum(sizes) for sizes in kept) / len(kept) for stage in range(len(stages)))


def stage_config(config: ModelConfig, run: Run) -> ModelConfig:
    """Of a stage with these layers of the model."""
    first, count = run
    return replace(
        config,
        layers=tuple(_moved(layer, first) for layer in config.layers[first : first + count]),
        stage=StagePart(first_layer=first, has_embedding=first == 0, has_head=first + count == config.layer_count),
    )


def _moved(layer: LayerConfig, first: int) -> LayerConfig:
    attention = layer.attention
    if not isinstance(attention, AttentionConfig) or attention.kv_from is None:
        return layer
    return replace(layer, attention=replace(attention, kv_from=attention.kv_from - first))


def stage_runs(checkpoint: Checkpoint, stage_count: int) -> Runs:
    """The layers of each stage, so that their weights are as even as they get: the sum of the squares of their sizes is
    the least. Layers that see another one's keys and values are in its stage. Raises StartupError if there is no way.
    """
    config = checkpoint.config
    if config.streams is not None:
        raise StartupError(
            f"{stage_count} stages are to share a model whose hidden state has several streams, which go through all "
            "of its layers: take one stage, and divide layers instead (--tensor-parallel-size)"
        )
    cuts = [0, *(index for index in range(1, config.layer_count) if _can_cut(config, index)), config.layer_count]
    if stage_count > len(cuts) - 1:
        shared = "" if len(cuts) > config.layer_count else ", some of which share keys and values"
        raise StartupError(
            f"{stage_count} stages are to share {config.layer_count} layers{shared}, which give {len(cuts) - 1} at "
            "most: take fewer, and divide layers besides (--tensor-parallel-size)"
        )
    ends = _even_ends(cuts, [0, *itertools.accumulate(_layer_sizes(checkpoint))], stage_count)
    return tuple((first, end - first) for first, end in itertools.pairwise((0, *ends)))


def _even_ends(cuts: Sequence[int], sums: Sequence[int], stage_count: int) -> list[int]:
    """Which of the cuts end stages, the last of all among them. sums: of the sizes of all layers before each."""
    # For so many stages up to a cut: the least sum of squares, and where they end.
    best: dict[int, tuple[int, list[int]]] = {0: (0, [])}
    for _ in range(stage_count):
        best = {
            end: min(
                (squares + (sums[end] - sums[first]) ** 2, [*ends, end])
                for first, (squares, ends) in best.items()
                if first < end
            )
            for end in cuts
            if end > min(best)
        }
    return best[cuts[-1]][1]


def _can_cut(config: ModelConfig, index: int) -> bool:
    """Before this layer."""
    return all(source >= index for source in config.kv_layers[index:])


def _layer_sizes(checkpoint: Checkpoint) -> Sequence[int]:
    """Numbers in the weights of each layer, with those of embedding and head where they are."""
    config = checkpoint.config
    sizes = [0] * config.layer_count
    for tensor in checkpoint.tensors():
        path = tensor.name.split(".")
        size = math.prod(tensor.shape)
        if path[0] == "layers":
            sizes[int(path[1])] += size
        if path[0] in EMBEDDING:
            sizes[0] += size
        if path[0] in HEAD or (path[0] in EMBEDDING and config.tie_word_embeddings):
            sizes[-1] += size
    return sizes
