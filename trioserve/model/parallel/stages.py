"""Pipeline parallelism: divides a model's layers into stages, which compute one after the other.

Each stage has consecutive layers. The first stage also has the embedding, and the last stage has the final norm and the
head. If the embedding is also the head, both stages have it.
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
from trioserve.model.layer_config import AttentionConfig, LatentAttentionConfig, LayerConfig
from trioserve.model.loading.checkpoint import Checkpoint
from trioserve.model.loading.encoder_part import EncoderPart
from trioserve.model.loading.stored_tensor import AdapterWeights, StoredTensor
from trioserve.model.model_config import ModelConfig, StagePart
from trioserve.model.number_formats import Float32Array
from trioserve.model.parallel.shares import Run, Runs
from trioserve.model.vision.part import VisionPart

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

EMBEDDING, HEAD = ("embed", "positions", "embed_norm"), ("norm", "lm_head")  # Names of tensors, up to the first dot.


class Handover(Protocol):
    """Connection of a stage to the previous and the next stage.

    Only the thread that computes uses the connection, once per step, in the order of the steps. If another stage is
    lost, a call may block forever or raise an exception. The process that started the stages then ends all of them.
    """

    def receive(self, row_count: int, hidden_size: int) -> Float32Array | None:
        """Wait for the hidden states of a step from the previous stage.

        Args:
            row_count: rows of the step.
            hidden_size: values per row.

        Returns:
            [row_count, hidden_size], or None if the step is abandoned. This stage must then not compute the step.
        """
        ...

    def send(self, hidden: Float32Array | None) -> None:
        """Send the hidden states of a step to the next stage. May block until that stage accepts them.

        Args:
            hidden: C-contiguous [row_count, hidden_size], or None if the step is abandoned.
        """
        ...


class NoNeighbours:
    """Handover for steps that one stage computes alone, such as warm-up. It receives zeros as hidden states."""

    def receive(self, row_count: int, hidden_size: int) -> Float32Array | None:
        return np.zeros((row_count, hidden_size), dtype=np.float32)

    def send(self, hidden: Float32Array | None) -> None:
        pass


class StageCheckpoint:
    """The Checkpoint of one stage. Its layers are numbered from 0.

    Args:
        checkpoint: the whole model.
        stage: number of the stage.
        stage_count: number of stages.

    Raises:
        StartupError: the model cannot be divided into so many stages.
    """

    def __init__(self, checkpoint: Checkpoint, stage: int, stage_count: int) -> None:
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
        self.encoder: EncoderPart | None = None  # Models with an encoder are not divided.
        if self.vision is not None:
            _check_deep_layers(self.vision.processing.embedding_size // self.config.hidden_size - 1, runs[0][1])
        self.sampling_defaults: Mapping[str, float | int] = checkpoint.sampling_defaults

    def tensors(self) -> Iterator[StoredTensor]:
        return self.part_of(self._checkpoint.tensors())

    def part_of(self, tensors: Iterable[StoredTensor]) -> Iterator[StoredTensor]:
        """Yield this stage's tensors of another whole model. Both models must have equal shapes.

        Args:
            tensors: tensors of the whole model.
        """
        for tensor in tensors:
            name = self.own_name(tensor.name)
            if name is not None:
                yield tensor._replace(name=name)

    def own_name(self, name: str) -> str | None:
        """Return the name of a tensor or matrix in this stage. None: another stage has the tensor.

        Args:
            name: name in the whole model.
        """
        path = name.split(".")
        if path[0] == "layers":
            index = int(path[1]) - self._run[0]
            return ".".join(("layers", str(index), *path[2:])) if 0 <= index < self._run[1] else None
        is_tied = self.config.tie_word_embeddings
        in_first, in_last = path[0] in EMBEDDING, path[0] in HEAD or (path[0] == "embed" and is_tied)
        assert in_first or in_last, f"no stage is defined for {name}"
        return name if (in_first and self.config.has_embedding) or (in_last and self.config.has_head) else None


def _check_deep_layers(deep_count: int, layer_count: int) -> None:
    """Check that the first stage has the first `deep_count` layers, because only this stage gets the images.

    Image features are added to the outputs of these layers (DeepStack).
    """
    if deep_count > layer_count:
        raise StartupError(
            f"images change the outputs of the first {deep_count} layers, but the first stage has only {layer_count} "
            "layers: lower --pipeline-parallel-size"
        )


def stage_adapter(whole: AdapterWeights, checkpoint: StageCheckpoint) -> AdapterWeights:
    """Select the matrices of an adapter that belong to a stage.

    Args:
        whole: the adapter of the whole model.
        checkpoint: the stage's part of the base model.
    """
    named = ((checkpoint.own_name(name), matrix) for name, matrix in whole.matrices.items())
    own = {name: matrix for name, matrix in named if name is not None}
    return AdapterWeights(whole.digest, whole.dtype, own, whole.rank_max)


def stage_configs(checkpoint: Checkpoint, stage_count: int) -> tuple[ModelConfig, ...]:
    """Return the config of each stage.

    Args:
        checkpoint: the whole model.
        stage_count: number of stages. 1: the result is the config of the whole model.

    Raises:
        StartupError: the model cannot be divided into so many stages.
    """
    if stage_count == 1:
        return (checkpoint.config,)
    return tuple(stage_config(checkpoint.config, run) for run in stage_runs(checkpoint, stage_count))


def cache_shares(stages: Sequence[ModelConfig]) -> tuple[float, ...]:
    """Return the fraction of the memory for KV and states that each stage needs to store equally many tokens.

    Args:
        stages: the config of each stage.

    Returns:
        Fractions whose sum is 1. A fraction is the mean of the stage's fractions of the KV bytes and the state bytes.
    """
    kinds = [
        [sum(entry.size for entry in stage.kv_entries if entry is not None) for stage in stages],
        [stage.state_bytes for stage in stages],
    ]
    kept = [sizes for sizes in kinds if any(sizes)]
    return tuple(sum(sizes[stage] / sum(sizes) for sizes in kept) / len(kept) for stage in range(len(stages)))


def stage_config(config: ModelConfig, run: Run) -> ModelConfig:
    """Return the config of a stage.

    Args:
        config: the whole model.
        run: layers of the stage.
    """
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
    """Divide the layers among stages such that the sum of the squares of the stages' sizes is minimal.

    A layer that uses the keys and values, the shortcut or the selected tokens of another layer is in the same stage as
    the other layer.

    Args:
        checkpoint: the whole model.
        stage_count: number of stages.

    Returns:
        The layers of each stage.

    Raises:
        StartupError: the model cannot be divided into so many stages.
    """
    config = checkpoint.config
    if any(layer.block is not None for layer in config.layers):
        raise StartupError(f"{stage_count} stages cannot share a model whose layers share a block: use one stage")
    if config.streams is not None:
        raise StartupError(
            f"{stage_count} stages cannot share a model whose hidden state has several streams, or whose layers have "
            "inputs of their own: use one stage, and divide each layer instead (--tensor-parallel-size)"
        )
    cuts = [0, *(index for index in range(1, config.layer_count) if _can_cut(config, index)), config.layer_count]
    if stage_count > len(cuts) - 1:
        shared = "" if len(cuts) > config.layer_count else ", some of which use results of others"
        raise StartupError(
            f"{stage_count} stages cannot share {config.layer_count} layers{shared}: {len(cuts) - 1} stages are "
            "possible. Use fewer stages, and divide each layer too (--tensor-parallel-size)"
        )
    ends = _even_ends(cuts, [0, *itertools.accumulate(_layer_sizes(checkpoint))], stage_count)
    return tuple((first, end - first) for first, end in itertools.pairwise((0, *ends)))


def _even_ends(cuts: Sequence[int], sums: Sequence[int], stage_count: int) -> list[int]:
    """Choose the layers at which stages end, including the end of the last stage, by dynamic programming.

    Args:
        cuts: layers before which a cut is possible, including 0 and the number of layers.
        sums: for each layer, the sum of the sizes of all previous layers.
        stage_count: number of stages.
    """
    # For each cut at which the last stage so far may end: the smallest sum of squares, and the ends of all stages so
    # far.
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
    """Return True if a cut before a layer separates no layer from keys and values, a shortcut or selected tokens that
    it uses.
    """
    attention = config.layers[index].attention
    if isinstance(attention, LatentAttentionConfig) and attention.has_selected_tokens:
        return False
    return config.layers[index - 1].shortcut is None and all(source >= index for source in config.kv_layers[index:])


def _layer_sizes(checkpoint: Checkpoint) -> Sequence[int]:
    """Count the weights of each layer. The first layer includes the embedding, and the last layer the head."""
    config = checkpoint.config
    sizes = [0] * config.layer_count
    for tensor in checkpoint.tensors():
        path = tensor.name.split(".")
        size = math.prod(tensor.shape)
        if path[0] == "layers":
            sizes[int(path[1])] += size
        if path[0] in EMBEDDING:
            sizes[0] += size
        if path[0] in HEAD or (path[0] == "embed" and config.tie_word_embeddings):
            sizes[-1] += size
    return sizes
