"""Opens the part of a checkpoint that reads images or hears sounds: its config, its preparation of files, and its
tensors. The checkpoint's language model is read like any other model.

An image encoder is a transformer over the patches of a tile. A projection converts its output to rows with the hidden
size of the language model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

from trioserve.contracts.errors import ModelLoadError
from trioserve.contracts.media import SoundProcessing
from trioserve.model.loading.encoder_part import read_audio_flamingo, read_qwen2_audio, read_voxtral
from trioserve.model.loading.fields import Fields
from trioserve.model.loading.names import TensorPlace
from trioserve.model.loading.stored_tensor import PLAIN_DTYPES, FileTensor, StoredTensor
from trioserve.model.model_config import ModelConfig
from trioserve.model.vision.cohere import read_aya, read_cohere2
from trioserve.model.vision.family import UnknownEncoder, VisionConfig
from trioserve.model.vision.gemma3 import read_gemma3
from trioserve.model.vision.glm_vl import read_glm4v, read_glm_ocr
from trioserve.model.vision.idefics3 import read_idefics3
from trioserve.model.vision.internvl import read_internvl, read_qianfan
from trioserve.model.vision.llava import read_llava, read_next, read_onevision
from trioserve.model.vision.paddleocr import read_paddleocr
from trioserve.model.vision.pixtral import read_lighton, read_mistral3
from trioserve.model.vision.qwen_vl import (
    read_exaone,
    read_hyperclova,
    read_qwen2_5_vl,
    read_qwen2_vl,
    read_qwen3_5,
    read_qwen3_vl,
)
from trioserve.vision.families.registry import ImageProcessing

__all__ = ["MEDIA_FAMILIES", "VisionPart"]

_Read: TypeAlias = Callable[[Path, Fields, ModelConfig], tuple[VisionConfig, ImageProcessing | SoundProcessing]]
MEDIA_FAMILIES: dict[str, _Read] = {
    "AudioFlamingo3ForConditionalGeneration": read_audio_flamingo,
    "AyaVisionForConditionalGeneration": read_aya,
    "Cohere2VisionForConditionalGeneration": read_cohere2,
    "Exaone4_5_ForConditionalGeneration": read_exaone,
    "Gemma3ForConditionalGeneration": read_gemma3,
    "Glm46VForConditionalGeneration": read_glm4v,
    "Glm4vForConditionalGeneration": read_glm4v,
    "Glm4vMoeForConditionalGeneration": read_glm4v,
    "GlmOcrForConditionalGeneration": read_glm_ocr,
    "HCXVisionV2ForCausalLM": read_hyperclova,
    "HyperCLOVAXVisionV2ForConditionalGeneration": read_hyperclova,
    "Idefics3ForConditionalGeneration": read_idefics3,
    "InternVLForConditionalGeneration": read_internvl,
    "LightOnOCRForConditionalGeneration": read_lighton,
    "LightOnOcrForConditionalGeneration": read_lighton,
    "LlavaForConditionalGeneration": read_llava,
    "LlavaNextForConditionalGeneration": read_next,
    "LlavaNextVideoForConditionalGeneration": read_next,
    "LlavaOnevisionForConditionalGeneration": read_onevision,
    "Mistral3ForConditionalGeneration": read_mistral3,
    "PaddleOCRVLForConditionalGeneration": read_paddleocr,
    "Qwen2AudioForConditionalGeneration": read_qwen2_audio,
    "QianfanOCRForConditionalGeneration": read_qianfan,
    "Qwen2VLForConditionalGeneration": read_qwen2_vl,
    "Qwen2_5_VLForConditionalGeneration": read_qwen2_5_vl,
    "Qwen3VLForConditionalGeneration": read_qwen3_vl,
    "Qwen3_5ForConditionalGeneration": read_qwen3_5,
    "Qwen3_5MoeForConditionalGeneration": read_qwen3_5,
    "Qwen3VLMoeForConditionalGeneration": read_qwen3_vl,
    "SmolVLMForConditionalGeneration": read_idefics3,
    "VoxtralForConditionalGeneration": read_voxtral,
}
"""Classes in config.json whose image or sound part is supported. Of other classes only the text part is served."""

# Prefixes of names in files, in the versions of transformers.
_ROOTS = ("model.", "")
_TOWERS = ("vision_model.", "vision_tower.vision_model.", "vision_tower.", "visual.vision_model.")


class VisionPart:
    """Opened encoder of a checkpoint's images or sounds. Opening reads only small files.

    Args:
        directory: checkpoint directory.
        config: content of config.json.
        name: class of the model, a key of MEDIA_FAMILIES.
        texts: config of the language model.
        stored: every tensor of the checkpoint, by its name in the files. None: the weights are not on this machine.

    Raises:
        UnknownEncoder: the encoder is of a kind that is not supported, or is quantized.
        ModelLoadError: files are damaged, or tensors and config do not match.
    """

    def __init__(
        self,
        directory: Path,
        config: Mapping[str, object],
        name: str,
        texts: ModelConfig,
        stored: Mapping[str, FileTensor] | None,
    ) -> None:
        self.config, self.processing = MEDIA_FAMILIES[name](directory, Fields(config, "config.json"), texts)
        processing, kind = self.processing, "image"
        if isinstance(processing, SoundProcessing):
            token_id, kind = processing.audio_token_id, "audio"
        else:
            token_id = processing.image_token_id
        if not 0 <= token_id < texts.vocab_size:
            raise ModelLoadError(
                f"{kind}_token_id in config.json is {token_id}, but the vocabulary has "
                f"{texts.vocab_size} tokens: the checkpoint's config is damaged"
            )
        self._stored: dict[str, FileTensor] = {}
        if stored is not None:
            self._stored = _placed(stored, self.config)
            _check_layers(stored, self.config)
        self.files = tuple(dict.fromkeys(tensor.path for tensor in self._stored.values()))
        self.weight_bytes = sum(tensor.byte_count for tensor in self._stored.values())

    def tensors(self) -> Iterator[StoredTensor]:
        """Yield every tensor, with the names of VisionConfig.shapes."""
        for name, tensor in self._stored.items():
            yield tensor.stored(name, TensorPlace(name, tensor.shape))


def _file_names(name: str, config: VisionConfig) -> list[str]:
    for ours, theirs in config.names:
        name = name.replace(ours, theirs)
    inner = name.removeprefix(_TOWERS[0])
    names = [name] if inner == name else [tower + inner for tower in _TOWERS]
    return [root + one for one in names for root in _ROOTS]


def _placed(stored: Mapping[str, FileTensor], config: VisionConfig) -> dict[str, FileTensor]:
    placed = {}
    for name, shape in config.shapes().items():
        tensor = next((stored[theirs] for theirs in _file_names(name, config) if theirs in stored), None)
        if tensor is None:
            raise ModelLoadError(f"the weights lack {name} of the image part: the checkpoint is incomplete")
        if tensor.shape != shape:
            raise ModelLoadError(f"{name} has shape {list(tensor.shape)}; the config asks for {list(shape)}")
        if tensor.storage not in PLAIN_DTYPES:
            raise UnknownEncoder(f"{name} is {tensor.storage}, not {' or '.join(PLAIN_DTYPES)}")
        placed[name] = tensor
    return placed


def _check_layers(stored: Mapping[str, FileTensor], config: VisionConfig) -> None:
    """Raise ModelLoadError if the files have more layers than the config. All other unused tensors are ignored."""
    layers = config.layers_prefix
    known = {theirs for name in config.shapes() if name.startswith(layers) for theirs in _file_names(name, config)}
    prefixes = tuple(_file_names(layers, config))
    ignored = tuple(f"{prefix}{layer}." for prefix in prefixes for layer in config.layers_ignored)
    for name in stored:
        if name.startswith(prefixes) and name not in known and not name.startswith(ignored):
            raise ModelLoadError(
                f"the weights hold {name[:80]}, which the vision_config does not have: weights and config do not "
                "belong to the same model"
            )
