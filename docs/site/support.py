"""The support matrix: which code computes which kind of model with which option. The code's own checks are asked.

Each cell builds the model, or calls the function that refuses an option, with a small description of a model. No
weights are read. Only the loading of the C++ library and the selection of a GPU are replaced.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import trioserve
from trioserve.assemble_images import open_image_engine
from trioserve.contracts.errors import ModelLoadError, StartupError
from trioserve.model import loaded_models
from trioserve.model.drafts.checkpoints import check_draft
from trioserve.model.encoder_runner import EncoderRunner
from trioserve.model.loading.hf_config import model_config_from
from trioserve.model.model_config import ModelConfig
from trioserve.model.parallel.shares import share_of
from trioserve.model.settings import ModelSettings
from trioserve.model.torch_step import step_model as torch_step_model

__all__ = ["support_rows"]

PRODUCT = Path(trioserve.__file__).parent

SMALL: dict[str, object] = json.loads(
    """
    {
      "model_type": "llama", "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
      "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
      "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": false
    }
    """
)
LATENT: dict[str, object] = json.loads(
    """
    {
      "model_type": "deepseek_v2", "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
      "v_head_dim": 32, "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 3,
      "n_shared_experts": 1, "moe_intermediate_size": 48, "n_group": 1, "topk_group": 1, "norm_topk_prob": false,
      "routed_scaling_factor": 1.75, "first_k_dense_replace": 1, "q_lora_rank": null, "topk_method": "greedy"
    }
    """
)
HYBRID: dict[str, object] = json.loads(
    """
    {
      "model_type": "granitemoehybrid", "mamba_n_heads": 6, "mamba_d_head": 32, "mamba_expand": 3,
      "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_chunk_size": 8, "num_local_experts": 0,
      "layer_types": ["mamba", "attention"], "shared_intermediate_size": 96
    }
    """
)
DECODERS: dict[str, dict[str, object]] = {
    "dense": SMALL,
    "mixture of experts": {**SMALL, "model_type": "olmoe", "num_experts": 8, "num_experts_per_tok": 3},
    "latent attention": {**SMALL, **LATENT},
    "recurrent layers": {**SMALL, **HYBRID},
}
COMPUTING: dict[str, dict[str, Any]] = {
    "CPU: native kernels": {"device": "cpu", "cpu_kernels": "native"},
    "CPU: torch": {"device": "cpu", "cpu_kernels": "torch"},
    "GPU: torch": {"device": "cuda", "gpu_kernels": "torch"},
    "GPU: Triton": {"device": "cuda", "gpu_kernels": "triton"},
}
KEEPS_NO_KV = EncoderRunner.kv_cache_bytes == 0
OPTIONS: dict[str, dict[str, Any]] = {
    "computes the model": {},
    "`--batch-invariant`": {"batch_invariant": True},
    "`--kv-cache-dtype int8`": {"kv_cache_dtype": "int8"},
    "`--quantization int8`": {"quantization": "int8"},
}


def support_rows() -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the head and the rows of the matrix: an option and the computing code, then a cell for each model kind."""
    models = {kind: _config(fields) for kind, fields in DECODERS.items()}
    rows = []
    for option, changes in OPTIONS.items():
        for where, place in COMPUTING.items():
            cells = [_is_allowed(_build, model, {**place, **changes}) for model in models.values()]
            cells.append(
                _is_allowed(_load_encoder, {**place, **changes}) and not ("kv_cache_dtype" in changes and KEEPS_NO_KV)
            )
            # Plain torch computes an image model, which has no option of its own for that.
            cells.append(where.endswith("torch") and all(_has_parameter(name) for name in changes))
            rows.append((option, where, *map(_shown, cells)))
    for option, check, words, parameter in (
        ("`--kv-transfer-config`", _transfer, "an encoder has no KV to exchange", "kv_transfer_config"),
        ("`--tensor-parallel-size 2`", _share, "an encoder runs in one process", "tensor_parallel_size"),
        ("as a draft model", _draft, "is an encoder, which generates no tokens", "speculative_model"),
    ):
        cells = [_is_allowed(check, model) for model in models.values()]
        cells += [not _is_refused_with(words), _has_parameter(parameter)]
        rows.append((option, "all of them", *map(_shown, cells)))
    return ("option", "computed by", *models, "encoder", "image model"), rows


def _config(fields: dict[str, object]) -> ModelConfig:
    return model_config_from(fields, {}, dtype_name="bfloat16")


def _is_allowed(check: Callable[..., object], *arguments: object) -> bool:
    try:
        check(*arguments)
    except (StartupError, ModelLoadError):
        return False
    return True


def _shown(is_allowed: bool) -> str:
    return "yes" if is_allowed else "no"


def _build(config: ModelConfig, options: dict[str, Any]) -> None:
    """Build the model as the engine does, with weights that are not read. Raises StartupError if that is refused."""
    settings = ModelSettings(**options)
    described: Any = types.SimpleNamespace(config=config, tensors=lambda: iter(()))
    dtype = "bfloat16"
    with _without_hardware():
        loaded_models._make_model(
            described, settings, dtype, "cuda" if settings.device == "cuda" else "cpu", lambda what, seconds: None, None
        )


@contextlib.contextmanager
def _without_hardware() -> Iterator[None]:
    """Let models be built that this machine could not compute. Products of this processor are not tried either."""
    real = torch_step_model.TorchStepModel

    def build_on_cpu(config: ModelConfig, settings: ModelSettings, *, device: Any, **more: Any) -> Any:
        kernels = torch_step_model._kernels(config, settings, device)
        return real(config, settings, device="cpu", kernels=kernels, **more)

    with (
        mock.patch.object(loaded_models, "load_library"),
        mock.patch.object(loaded_models, "NativeModel"),
        mock.patch.object(torch_step_model, "TorchStepModel", build_on_cpu),
        mock.patch.object(torch_step_model, "_check_places"),
        mock.patch.object(torch_step_model, "why_not_triton", return_value=None),
    ):
        yield


def _load_encoder(options: dict[str, Any]) -> None:
    """Load an encoder up to the first use of its files."""
    settings = ModelSettings(**options)
    if settings.gpu_kernels == "triton":
        raise StartupError("an encoder ignores gpu_kernels: plain torch computes it")
    stopped: Any = None  # has no config, so loading ends after the checks of options
    with contextlib.suppress(AttributeError):
        EncoderRunner.load(stopped, settings)


def _share(config: ModelConfig) -> None:
    share_of(config, 0, 2)


def _transfer(config: ModelConfig) -> None:
    if config.state_bytes and _is_refused_with(
        "have a state in addition to their KV, which connectors do not transfer"
    ):
        raise StartupError("refused where the connector is made")


def _draft(config: ModelConfig) -> None:
    check_draft(config, config, "it")


def _is_refused_with(words: str) -> bool:
    """Return True if the code has a message with these words, where a check needs the files of a model."""
    return any(words in path.read_text(encoding="utf-8") for path in PRODUCT.rglob("*.py"))


def _has_parameter(name: str) -> bool:
    return name in inspect.signature(open_image_engine).parameters
