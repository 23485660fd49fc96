"""Lists the supported model families. To add a family, write one file in this folder and one line in this list."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from trioserve.contracts.errors import ModelLoadError
from trioserve.model.families.afmoe import AFMOE, LAGUNA, STEP35
from trioserve.model.families.alibi import BLOOM, MPT
from trioserve.model.families.cohere import COHERE, COHERE2, COHERE2_MOE
from trioserve.model.families.deepseek import (
    AXK1,
    DEEPSEEK,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    DOTS1,
    GLM4_MOE_LITE,
    GLM_MOE_DSA,
    KIMI_LINEAR,
    KIMI_LINEAR_SAVED,
    LONGCAT_FLASH,
    MINICPM,
    MINICPM3,
    SARVAM_MLA,
)
from trioserve.model.families.encoder_decoders import BART, MBART, MT5, T5, T5_GATED, WHISPER
from trioserve.model.families.exaone import EXAONE, EXAONE4, EXAONE_MOE
from trioserve.model.families.falcon_h1 import FALCON_H1
from trioserve.model.families.family import Family
from trioserve.model.families.gemma import GEMMA, GEMMA2, GEMMA3, GEMMA3N
from trioserve.model.families.gemma4 import GEMMA4, GEMMA4_UNIFIED
from trioserve.model.families.glm import GLM, GLM4, GLM4_MOE, GLM4V, GLM4V_MOE, GLM_OCR, SOLAR_OPEN
from trioserve.model.families.gpt2 import CODEGEN, FALCON, FALCON_GROUPED, GPT2, GPT_BIGCODE, GPTJ, OPT
from trioserve.model.families.gpt_neox import (
    APERTUS,
    ARCEE,
    GPT_NEOX,
    JAIS2,
    NEMOTRON,
    PERSIMMON,
    PHI,
    STABLELM,
    STARCODER2,
)
from trioserve.model.families.gpt_oss import GPT_OSS
from trioserve.model.families.granite import GRANITE, GRANITE_HYBRID, GRANITE_MOE, HYPERCLOVAX
from trioserve.model.families.hunyuan import HUNYUAN_DENSE, HUNYUAN_MOE, HY_V3
from trioserve.model.families.lfm2 import LFM2, LFM2_MOE
from trioserve.model.families.llama import (
    CWM,
    ERNIE45,
    ERNIE45_MOE,
    HELIUM,
    INTERNLM3,
    LLAMA,
    PADDLEOCR_VL,
    SEED_OSS,
    SMOLLM3,
)
from trioserve.model.families.llama4 import LLAMA4
from trioserve.model.families.mamba import FALCON_MAMBA, JAMBA, MAMBA
from trioserve.model.families.mamba2 import BAMBA, MAMBA2, ZAMBA2
from trioserve.model.families.mimo import MIMO_V2_FLASH
from trioserve.model.families.mistral import MINISTRAL3, MISTRAL
from trioserve.model.families.mixtral import DBRX, MINIMAX, MINIMAX_01, MINIMAX_M2, MIXTRAL
from trioserve.model.families.nemotron_h import NEMOTRON_H
from trioserve.model.families.olmo import FLEX_OLMO, OLMO, OLMO2, OLMO3, OLMO_HYBRID, OLMO_HYBRID_SAVED, OLMOE
from trioserve.model.families.phi import PHI3, PHIMOE
from trioserve.model.families.qwen import (
    MELLUM,
    QWEN2,
    QWEN2_MOE,
    QWEN2_VL,
    QWEN3,
    QWEN3_MOE,
    QWEN3_OMNI_MOE,
    QWEN3_VL,
    QWEN3_VL_MOE,
    QWEN3_VL_MOE_SAVED,
    QWEN25_OMNI,
    QWEN25_VL,
)
from trioserve.model.families.qwen_next import QWEN3_NEXT, QWEN35, QWEN35_MOE
from trioserve.model.families.remote_code import (
    BAICHUAN,
    BAILING_MOE,
    BAILING_MOE_V2,
    CHATGLM,
    INTERNLM2,
    ORION,
    QWEN,
    SARVAM_MOE,
    TELEFLM,
)

__all__ = [
    "FAMILIES",
    "LANGUAGE_PARTS",
    "family_named",
    "family_of_class",
    "family_of_gguf",
    "family_of_model_type",
    "is_model_type",
]

FAMILIES: tuple[Family, ...] = (
    LLAMA,
    MISTRAL,
    MINISTRAL3,
    QWEN2,
    QWEN3,
    GEMMA,
    GEMMA2,
    GEMMA3,
    GEMMA3N,
    GEMMA4,
    GEMMA4_UNIFIED,
    PHI3,
    PHIMOE,
    OLMO,
    OLMO2,
    OLMO3,
    SMOLLM3,
    GRANITE,
    GLM,
    GLM4,
    COHERE,
    COHERE2,
    EXAONE,
    EXAONE4,
    ERNIE45,
    SEED_OSS,
    HELIUM,
    INTERNLM3,
    HYPERCLOVAX,
    CWM,
    GPT_NEOX,
    PHI,
    STARCODER2,
    STABLELM,
    NEMOTRON,
    ARCEE,
    PERSIMMON,
    APERTUS,
    GPT2,
    GPT_BIGCODE,
    OPT,
    GPTJ,
    CODEGEN,
    FALCON,
    FALCON_GROUPED,
    BLOOM,
    MPT,
    MIXTRAL,
    DBRX,
    MIMO_V2_FLASH,
    QWEN2_MOE,
    QWEN3_MOE,
    OLMOE,
    GRANITE_MOE,
    GRANITE_HYBRID,
    BAMBA,
    ZAMBA2,
    FALCON_H1,
    MAMBA2,
    MAMBA,
    FALCON_MAMBA,
    JAMBA,
    NEMOTRON_H,
    OLMO_HYBRID,
    OLMO_HYBRID_SAVED,
    QWEN3_NEXT,
    QWEN35,
    QWEN35_MOE,
    LFM2,
    LFM2_MOE,
    GLM4_MOE,
    MINIMAX,
    MINIMAX_01,
    MINIMAX_M2,
    ERNIE45_MOE,
    EXAONE_MOE,
    COHERE2_MOE,
    AFMOE,
    LAGUNA,
    STEP35,
    FLEX_OLMO,
    HUNYUAN_DENSE,
    HUNYUAN_MOE,
    HY_V3,
    MELLUM,
    GLM4V,
    GLM4V_MOE,
    GLM_OCR,
    PADDLEOCR_VL,
    QWEN2_VL,
    QWEN25_OMNI,
    QWEN3_OMNI_MOE,
    QWEN25_VL,
    QWEN3_VL,
    QWEN3_VL_MOE,
    QWEN3_VL_MOE_SAVED,
    SOLAR_OPEN,
    DOTS1,
    GPT_OSS,
    LLAMA4,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    GLM4_MOE_LITE,
    AXK1,
    MINICPM3,
    DEEPSEEK_V32,
    GLM_MOE_DSA,
    KIMI_LINEAR,
    KIMI_LINEAR_SAVED,
    LONGCAT_FLASH,
    SARVAM_MLA,
    DEEPSEEK,
    MINICPM,
    JAIS2,
    BAICHUAN,
    BAILING_MOE,
    BAILING_MOE_V2,
    CHATGLM,
    INTERNLM2,
    ORION,
    QWEN,
    SARVAM_MOE,
    TELEFLM,
    WHISPER,
    BART,
    MBART,
    T5,
    T5_GATED,
    MT5,
)


class LanguagePart(NamedTuple):
    """Part of a model that also reads images or sounds: a language model of any family, which the config names.

    Attributes:
        field: field of config.json that describes the part. None: config.json has the part's fields itself.
        model_type: type of the part if the config does not contain it.
    """

    field: str | None
    model_type: str


LANGUAGE_PARTS: dict[str, LanguagePart] = {
    **{
        f"{name}ForConditionalGeneration": LanguagePart("text_config", model_type)
        for name, model_type in {
            "AudioFlamingo3": "qwen2",
            "AyaVision": "cohere2",
            "Bee": "qwen3",
            "Blip2": "opt",
            "Cohere2Vision": "cohere2",
            "Eagle2_5_VL": "qwen2",
            "Exaone4_5_": "exaone4",
            "GlmAsr": "llama",
            "GraniteSpeech": "granite",
            "HyperCLOVAXVisionV2": "hyperclovax",
            "InternS1": "qwen3",
            "InternVL": "qwen2",
            "KimiK25": "deepseek_v3",
            "KimiVL": "deepseek_v3",
            "Lfm2Vl": "lfm2",
            "LightOnOCR": "qwen3",
            "LightOnOcr": "qwen3",
            "Llava": "llama",
            "LlavaNext": "llama",
            "LlavaNextVideo": "llama",
            "LlavaOnevision": "qwen2",
            "Mantis": "llama",
            "MiniCPMV4_6": "qwen3_5_text",
            "MusicFlamingo": "qwen2",
            "OpenCUA": "qwen2",
            "QianfanOCR": "qwen3",
            "Qwen2Audio": "qwen2",
            "Qwen3ASR": "qwen3",
            "R": "qwen3",
            "Tarsier": "llama",
            "Voxtral": "llama",
        }.items()
    },
    "FuyuForCausalLM": LanguagePart("text_config", "persimmon"),
    "HCXVisionForCausalLM": LanguagePart("text_config", "llama"),
    "HCXVisionV2ForCausalLM": LanguagePart("text_config", "hyperclovax"),
    # Classes of the checkpoints' authors. transformers does not have them.
    "DeepseekVLV2ForCausalLM": LanguagePart("language_config", "deepseek_v2"),
    "H2OVLChatModel": LanguagePart("llm_config", "mistral"),
    "InternVLChatModel": LanguagePart("llm_config", "internlm2"),
    "Llama_Nemotron_Nano_VL": LanguagePart("llm_config", "llama"),
    "NemotronH_Nano_VL_V2": LanguagePart("llm_config", "nemotron_h"),
    "NVLM_D": LanguagePart("llm_config", "qwen2"),
    "Ovis": LanguagePart("llm_config", "qwen2"),
    "Ovis2_5": LanguagePart("llm_config", "qwen3"),
    "SkyworkR1VChatModel": LanguagePart("llm_config", "qwen2"),
    "DotsOCRForCausalLM": LanguagePart(None, "qwen2"),
    "GLM4VForCausalLM": LanguagePart(None, "chatglm"),
    "KeyeForConditionalGeneration": LanguagePart(None, "qwen3"),
    "KeyeVL1_5ForConditionalGeneration": LanguagePart(None, "qwen3"),
    "Phi3VForCausalLM": LanguagePart(None, "phi3"),
    "QwenVLForConditionalGeneration": LanguagePart(None, "qwen"),
}
"""Classes of models whose language model may be of any family. A family's `with_images` names those of one family."""


def family_named(name: str) -> Family:
    """Return the family with this name.

    Args:
        name: `ModelConfig.family`.
    """
    return next(family for family in FAMILIES if family.name == name)


def family_of_class(name: str, text_type: str | None = None) -> Family:
    """Return the family of a class of transformers.

    Args:
        name: an entry of config.json's `architectures`.
        text_type: `model_type` of the language model of a vision model. It selects one of several possible families.
            If it matches none of these families, the result is the first family.

    Raises:
        ModelLoadError: the class is not supported.
    """
    found = [family for family in FAMILIES if name in (*family.classes, *family.headless_classes, *family.with_images)]
    if not found:
        raise _unknown(name, _classes())
    return next((family for family in found if family.model_type == text_type), found[0])


def family_of_model_type(name: str | None) -> Family:
    """Return the family of a model_type, for a config.json without `architectures`.

    Args:
        name: config.json's `model_type`, or None if it is missing.

    Raises:
        ModelLoadError: the type is not supported.
    """
    for family in FAMILIES:
        if name == family.model_type:
            return family
    raise _unknown(name or "not named in config.json", _classes())


def is_model_type(name: str) -> bool:
    """Return True if a supported family has this model_type.

    Args:
        name: value of model_type in a config.
    """
    return any(name == family.model_type for family in FAMILIES)


def family_of_gguf(name: str | None) -> Family:
    """Return the first family in the list that uses an architecture of llama.cpp.

    Args:
        name: the file's general.architecture, or None if it is missing.

    Raises:
        ModelLoadError: the architecture is not supported.
    """
    for family in FAMILIES:
        if family.gguf is not None and name in family.gguf.architectures:
            return family
    known = (family.gguf.architectures for family in FAMILIES if family.gguf is not None)
    supported = dict.fromkeys(architecture for architectures in known for architecture in architectures)
    raise _unknown(name or "not named in the file", supported)


def _classes() -> Iterable[str]:
    own = (name for family in FAMILIES for name in (*family.classes, *family.with_images))
    return (*own, *LANGUAGE_PARTS)


def _unknown(found: str, supported: Iterable[str]) -> ModelLoadError:
    return ModelLoadError(f"the model's architecture is {found}; supported are {', '.join(supported)}")
