"""Reads the files of draft models (EAGLE-3 heads, prediction layers), and checks that they fit the target model.

An EAGLE-3 head is one layer that reads hidden states of the model that it was trained for. Source:
`LlamaForCausalLMEagle3` (Li, Wei, Zhang, Zhang: EAGLE-3, arXiv 2503.01840). config.json describes a Llama with one
layer. model.safetensors contains fc, midlayer, norm, lm_head and d2t. d2t maps the head's smaller vocabulary to the
target model's: a token id of the head plus its entry in d2t is the token id of the target model.

A prediction layer (multi-token prediction, MTP) is part of the checkpoint of its model. DeepSeek-V3 (arXiv 2412.19437,
2.2) and GLM-4.5 store the prediction layer as model.layers.N, where N is the number of layers. The prediction layer is
like the model's last layer, and has the additional tensors enorm, hnorm, eh_proj and shared_head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from trioserve.contracts.errors import ModelLoadError, StartupError
from trioserve.model.layer_config import MlpConfig
from trioserve.model.loading.checkpoint import Checkpoint, open_checkpoint
from trioserve.model.loading.encoder_directory import opened_encoder
from trioserve.model.loading.fields import Fields
from trioserve.model.loading.hf_config import model_config_from, read_json_object
from trioserve.model.loading.names import TRANSFORMERS, TensorPlace, match_tensors
from trioserve.model.loading.safetensors import EMBEDDING_NAME, FurtherTensor, SafetensorsCheckpoint, stored_tensors
from trioserve.model.loading.stored_tensor import PLAIN_DTYPES, STORAGE_BYTES, StoredTensor, read_plain
from trioserve.model.model_config import ModelConfig
from trioserve.model.number_formats import Dtype, Values, empty_values
from trioserve.model.settings import ModelSettings

__all__ = [
    "DraftSource",
    "EagleCheckpoint",
    "is_eagle",
    "open_eagle",
    "MtpCheckpoint",
    "MtpLayer",
    "check_draft",
    "check_same_tokens",
    "draft_source",
]

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
TAPPED_COUNT = 3
OWN_FIELDS = ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "eagle_config", "norm_before_residual")
WEIGHTS_NAME = "model.safetensors"


@dataclass(frozen=True, slots=True)
class EagleCheckpoint:
    """Files of an EAGLE-3 head.

    Attributes:
        path: the file with the weights.
        config: description of the head's layer, with the vocabulary of the target model.
        vocab_size: number of tokens that the head can propose.
        tapped_layers: layers of the target model whose inputs the head reads. None selects EAGLE-3's default layers.
        norms_residual: True if the residual of attention is the hidden state after the norm, False if it is the hidden
            state before the norm.
    """

    path: Path
    config: ModelConfig
    vocab_size: int
    tapped_layers: tuple[int, ...] | None
    norms_residual: bool

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        """Read all tensors.

        Returns:
            Arrays by tensor name, without the prefix "model.". Integer tensors become int64, other tensors float32.

        Raises:
            ModelLoadError: a tensor is stored in a type that is not supported.
        """
        found: dict[str, npt.NDArray[Any]] = {}
        for name, stored in stored_tensors(self.path.parent, tuple(STORAGE_BYTES)).items():
            name = name.removeprefix("model.")
            if stored.storage == "I64":
                found[name] = stored.bytes().view("<i8").reshape(stored.shape)
            elif stored.storage in PLAIN_DTYPES:
                found[name] = read_plain(stored.path, stored.offset, stored.shape, stored.dtype, "float32")
            elif name != "t2d":  # t2d is the inverse of d2t and not needed.
                raise ModelLoadError(f"{name} in {self.path} is stored as {stored.storage}, which is not supported")
        return found

    def tapped_of(self, layer_count: int) -> tuple[int, ...]:
        """Return the layers of the target model whose inputs the head reads.

        Args:
            layer_count: layers of the target model.

        Raises:
            StartupError: the target model has too few layers.
        """
        layers = self.tapped_layers or (2, layer_count // 2, layer_count - 3)
        if len(set(layers)) != TAPPED_COUNT or not all(0 <= layer < layer_count for layer in layers):
            raise StartupError(
                f"the EAGLE-3 head in {self.path.parent} reads the inputs of layers {', '.join(map(str, layers))}, "
                f"but the model has {layer_count} layers: name the head that was trained for this model"
            )
        return layers


def is_eagle(directory: Path) -> bool:
    """Return True if the directory contains an EAGLE-3 head.

    Args:
        directory: directory with a config.json, or without one.

    Raises:
        ModelLoadError: config.json cannot be read.
    """
    if not (directory / "config.json").is_file():
        return False
    names = read_json_object(directory / "config.json").get("architectures")
    return isinstance(names, list) and any(name in ARCHITECTURES for name in names)


def open_eagle(directory: Path) -> EagleCheckpoint:
    """Open an EAGLE-3 head. Only the file config.json is read.

    Args:
        directory: directory with config.json and model.safetensors.

    Raises:
        ModelLoadError: a file is missing or cannot be read, or the config does not describe an EAGLE-3 head.
    """
    values = read_json_object(directory / "config.json")
    path = directory / WEIGHTS_NAME
    if not path.is_file():
        raise ModelLoadError(f"the EAGLE-3 head in {directory} has no {WEIGHTS_NAME}: download that file")
    fields = Fields(values, "config.json")
    config = model_config_from(
        {**values, "architectures": ["LlamaForCausalLM"], "model_type": "llama"},
        {},
        dtype_name="float32",
        also_read=OWN_FIELDS,
    )
    if config.layer_count != 1 or not isinstance(config.layers[0].mlp, MlpConfig):
        raise ModelLoadError(f"the EAGLE-3 head has {config.layer_count} layers, but must have one")
    eagle = fields.group_or_none("eagle_config")
    tapped = fields.wholes("eagle_aux_hidden_state_layer_ids")
    if eagle is not None:
        tapped = tapped or eagle.wholes("eagle_aux_hidden_state_layer_ids")
    if tapped and len(tapped) != TAPPED_COUNT:
        raise ModelLoadError(f"eagle_aux_hidden_state_layer_ids has {len(tapped)} layers, it must have {TAPPED_COUNT}")
    return EagleCheckpoint(
        path=path,
        config=config,
        vocab_size=fields.whole_or("draft_vocab_size", config.vocab_size),
        tapped_layers=tapped or None,
        norms_residual=fields.flag_or("norm_before_residual", False),
    )


UNUSED_VOCAB_SIZE = 64
"""Vocabulary of the prediction layer as a model. Its embedding and last norm are zeros and are never read."""
BESIDE = ("embed_tokens", "enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head")


class MtpLayer:
    """The prediction layer as a Checkpoint with one layer.

    Args:
        config: description of the target model.
        stored: tensors of the layer, by their names without "model.layers.N.".
        files: files of the checkpoint.

    Raises:
        ModelLoadError: a tensor is missing, unknown, or has the wrong shape.
    """

    vision = None
    encoder = None
    continues_texts = True
    tokenizer_directory = None
    gguf_metadata = None

    def __init__(self, config: ModelConfig, stored: Mapping[str, FurtherTensor], files: tuple[Path, ...]) -> None:
        self.files = files
        self.sampling_defaults: dict[str, float | int] = {}
        self.config: ModelConfig = msgspec.structs.replace(
            config,
            vocab_size=UNUSED_VOCAB_SIZE,
            layers=config.layers[-1:],
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_ids=(),
        )
        self._stored = {f"model.layers.0.{name}": tensor for name, tensor in stored.items()}
        shapes = {name: tensor.shape for name, tensor in self._stored.items()}
        shapes[EMBEDDING_NAME], shapes["model.norm.weight"] = (
            (UNUSED_VOCAB_SIZE, config.hidden_size),
            (config.hidden_size,),
        )
        self._places = match_tensors(
            self.config, shapes, TRANSFORMERS, ignored=lambda name: name.endswith("rotary_emb.inv_freq")
        )
        self.weight_bytes = sum(tensor.byte_count for tensor in self.tensors())

    def tensors(self) -> Iterator[StoredTensor]:
        for name, place in self._places.items():
            tensor = self._stored.get(place.name)
            yield _zeros(name, place.shape) if tensor is None else tensor.stored(name, place)


class MtpCheckpoint:
    """The prediction layer of a checkpoint. Only headers are read until `read` is called.

    Args:
        checkpoint: the target model.

    Attributes:
        config: description of the target model.
        layer: the tensors that an ordinary layer also has, as a checkpoint with one layer.

    Raises:
        StartupError: the checkpoint has no prediction layer.
        ModelLoadError: the layer is incomplete.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        stored = checkpoint.further_tensors() if isinstance(checkpoint, SafetensorsCheckpoint) else {}
        if not stored:
            raise StartupError(
                "the model's own prediction layers (mtp) must provide draft tokens, but its files have none that can "
                "be read: use safetensors whose config.json has num_nextn_predict_layers, or name a draft model"
            )
        self.config: ModelConfig = checkpoint.config
        self._checkpoint = checkpoint
        self._beside = {name: stored.pop(f"{name}.weight") for name in BESIDE if f"{name}.weight" in stored}
        self.layer = MtpLayer(checkpoint.config, stored, checkpoint.files)

    def read(self, name: str, *shape: int) -> npt.NDArray[Any]:
        """Read a tensor that an ordinary layer does not have.

        Args:
            name: name of the tensor without "model.layers.N." and ".weight".
            shape: expected shape.

        Returns:
            The values as float32.

        Raises:
            ModelLoadError: the tensor is missing or has another shape.
        """
        tensor = self._beside.get(name)
        if tensor is None:
            raise ModelLoadError(f"the prediction layer (mtp) has no {name}: download the checkpoint again")
        if tuple(tensor.shape) != shape:
            raise ModelLoadError(
                f"{name} of the prediction layer (mtp) has shape {list(tensor.shape)}, but the config requires "
                f"{list(shape)}"
            )
        return tensor.stored(name, TensorPlace(name, shape)).read("float32")

    def read_or_shared(self, name: str, shared: str, *shape: int) -> npt.NDArray[Any]:
        """Read a tensor of the prediction layer. If it is not stored, read the target model's tensor.

        Args:
            name: name of the prediction layer's tensor, see `read`.
            shared: name of the target model's tensor.
            shape: expected shape of the prediction layer's tensor.

        Returns:
            The values as float32.
        """
        if name in self._beside:
            return self.read(name, *shape)
        return self.read_shared(shared)

    def read_shared(self, name: str) -> npt.NDArray[Any]:
        """Read a tensor of the target model.

        Args:
            name: name of the tensor.

        Returns:
            The values as float32.
        """
        return next(tensor for tensor in self._checkpoint.tensors() if tensor.name == name).read("float32")


def _zeros(name: str, shape: tuple[int, ...]) -> StoredTensor:
    def read(dtype: Dtype) -> Values:
        return np.zeros_like(empty_values(shape, dtype))

    return StoredTensor(name, shape, "float32", read, lambda: b"")


class TokenNames(Protocol):
    vocab_size: int

    def token_text(self, token_id: int) -> str: ...


def check_draft(config: ModelConfig, draft: ModelConfig, name: str) -> None:
    """Check that a draft model can propose tokens for a model.

    Args:
        config: description of the target model.
        draft: description of the draft model.
        name: name of the draft model for error texts.

    Raises:
        StartupError: the vocabularies differ in size, the draft model has layers with a state, or a model has an
            encoder.
    """
    if config.cross is not None or draft.cross is not None:
        raise StartupError(
            "draft models and prediction layers do not attend to an encoder's rows: leave out the draft model, or take "
            "draft tokens from the text (--speculative-ngram)"
        )
    if draft.state_bytes:
        raise StartupError(
            f"the draft model {name} has layers that keep a state, which cannot be undone after a rejected token: "
            "name another draft model"
        )
    if draft.vocab_size != config.vocab_size:
        raise StartupError(
            f"the draft model {name} has a vocabulary of {draft.vocab_size} tokens, but the model has one of "
            f"{config.vocab_size}: name a draft model with the same tokenizer"
        )


def check_same_tokens(tokenizer: TokenNames, draft: TokenNames, name: str) -> None:
    """Compare the texts of all tokens. The comparison takes some hundredths of a second.

    Args:
        tokenizer: tokenizer of the target model.
        draft: tokenizer of the draft model.
        name: name of the draft model for error texts.

    Raises:
        StartupError: a token differs. The error names the first token that differs.
    """
    for token_id in range(min(tokenizer.vocab_size, draft.vocab_size)):
        ours, theirs = tokenizer.token_text(token_id), draft.token_text(token_id)
        if ours != theirs:
            raise StartupError(
                f"token {token_id} is {ours!r} for the model and {theirs!r} for the draft model {name}: name a draft "
                "model with the same tokenizer"
            )


@dataclass(frozen=True, slots=True)
class DraftSource:
    """Opened draft model that is not loaded yet.

    Attributes:
        name: name for messages.
        settings: settings of the draft model.
        token_count: largest number of draft tokens of a request in one step.
    """

    name: str
    checkpoint: Checkpoint | EagleCheckpoint | MtpCheckpoint
    settings: ModelSettings
    token_count: int

    @property
    def kind(self) -> Literal["model", "head"]:
        return "head" if isinstance(self.checkpoint, EagleCheckpoint | MtpCheckpoint) else "model"

    @property
    def context_tokens_max(self) -> int | None:
        """Longest context in tokens. None for a head, which supports every context of its target model."""
        is_head = isinstance(self.checkpoint, EagleCheckpoint | MtpCheckpoint)
        return None if is_head else self.checkpoint.config.context_tokens_max


def draft_source(
    name: str, path: Path | None, checkpoint: Checkpoint, settings: ModelSettings, token_count: int
) -> DraftSource:
    """Open a draft model and check that it fits the target model. Only headers of the files are read.

    Args:
        name: name for error texts and logs.
        path: directory or file of the draft model. None selects the target model's own prediction layer (MTP).
        checkpoint: the target model.
        settings: settings of the draft model.
        token_count: largest number of draft tokens of a request in one step.

    Raises:
        ModelLoadError: a file cannot be read.
        StartupError: the draft model does not fit the target model.
    """
    if path is None:
        return DraftSource(name, MtpCheckpoint(checkpoint), settings, token_count)
    if is_eagle(path):
        eagle = open_eagle(path)
        check_draft(checkpoint.config, eagle.config, name)
        return DraftSource(name, eagle, settings, token_count)
    if opened_encoder(path) is not None:
        raise StartupError(f"the draft model {name} is an encoder, which generates no tokens: name a decoder model")
    draft = open_checkpoint(path)
    check_draft(checkpoint.config, draft.config, name)
    return DraftSource(name, draft, settings, token_count)
