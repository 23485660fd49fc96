"""Reads a LoRA adapter that peft saved, and compares it with its config and the model.

adapter_config.json describes the adapter, and adapter_model.safetensors has two factors for each matrix. If a field
requires a computation that is not supported, the error names the field. Files are untrusted until they are compared
with the model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np

from trioserve.contracts.errors import ModelLoadError
from trioserve.model.layer_config import AttentionConfig
from trioserve.model.loading.fields import Fields
from trioserve.model.loading.hf_config import read_json_object
from trioserve.model.loading.names import TRANSFORMERS, TensorPlace, tensor_places
from trioserve.model.loading.safetensors import tensors_in_file
from trioserve.model.loading.stored_tensor import PLAIN_DTYPES, AdapterMatrix, AdapterWeights, FileTensor, read_plain
from trioserve.model.model_config import ModelConfig
from trioserve.model.number_formats import Dtype, Float32Array, are_finite, convert, empty_values

__all__ = ["CONFIG_NAME", "WEIGHTS_NAME", "allowed_directory", "read_adapter"]

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
DIGEST_BYTES = 16
PATTERNS_MAX = 4096  # Limit of keys in rank_pattern and alpha_pattern. Real files have one key for each matrix.
MLP_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", *MLP_PROJECTIONS)

# Fields that may change the computation, each with the values that do not change it.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "bias": ("none",),
    "fan_in_fan_out": (False,),
    "use_dora": (False,),
    "use_qalora": (False,),
    "lora_bias": (False,),
    "modules_to_save": ([],),
    "target_parameters": ([],),
    "trainable_token_indices": ([], {}),
    "layer_replication": ([],),
    # With other values, training begins by changing the model's own weights. When peft has reverted this change, it
    # writes true.
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}
# Fields that this module reads, and fields that only describe the training.
NOTES = (
    *("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules"),
    *("exclude_modules", "layers_to_transform", "layers_pattern", "lora_dropout", "inference_mode", "task_type"),
    *("auto_mapping", "base_model_name_or_path", "revision", "peft_version", "runtime_config", "megatron_core"),
    *("eva_config", "corda_config", "loftq_config", "lora_ga_config", "qalora_group_size", "ensure_weight_tying"),
)
_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<factor>[AB])(?:\.default)?\.weight")
_PREFIXES = ("base_model.model.", "base_model.", "")
_LAYERS = re.compile(r"(?:^|.*\.)(?P<layer>layers\.\d+\..+)")
_PLAIN_KEY = re.compile(r"\^?[\w.]+\$?")


class _Factors(NamedTuple):
    """The two LoRA factors of one matrix.

    Attributes:
        a: [rank, inputs].
        b: [outputs, rank].
    """

    a: FileTensor
    b: FileTensor

    @property
    def rank(self) -> int:
        return self.a.shape[0]


def read_adapter(directory: Path, config: ModelConfig, *, dtype: Dtype, rank_max: int) -> AdapterWeights:
    """Read an adapter.

    Args:
        directory: directory that peft has saved.
        config: model.
        dtype: number format of the result.
        rank_max: largest allowed rank.

    Raises:
        ModelLoadError: files are missing or damaged, or the adapter does not fit the model.
    """
    if config.cross is not None:
        raise ModelLoadError("adapters of models with an encoder are not supported: leave the adapter out")
    for name in (CONFIG_NAME, WEIGHTS_NAME):
        if not (directory / name).is_file():
            raise ModelLoadError(f"{directory} has no {name}: name a directory that peft has saved, with safetensors")
    fields = _Config(Fields(read_json_object(directory / CONFIG_NAME), CONFIG_NAME), rank_max)
    factors = _factors(tensors_in_file(directory / WEIGHTS_NAME, tuple(PLAIN_DTYPES)))
    places, shapes = tensor_places(config, TRANSFORMERS)
    modules = {name.removesuffix(".weight"): shape for name, shape in shapes.items() if len(shape) == 2}
    found = dict(_matched(factors, modules))
    for module, pair in found.items():
        _check_shapes(module, pair, modules[module], fields)
    _check_complete(found, places, config, fields)
    digest = blake2b(digest_size=DIGEST_BYTES)
    matrices: dict[str, AdapterMatrix] = {}
    for name, place in places.items():
        module = place.name.removesuffix(".weight")
        if module not in found:
            continue
        pair, scale = found[module], fields.scale(module, found[module].rank)
        for tensor in pair:
            digest.update(f"{name} {tensor.shape} {tensor.storage} {scale!r}\0".encode())
            digest.update(tensor.bytes().data)
        matrix = _read(pair, place, scale, dtype)
        if not all(map(are_finite, matrix)):  # In a step of fixed shape, NaN would reach rows without this adapter.
            raise ModelLoadError(
                f"numbers in the factors of {module} are infinite or NaN in {dtype}: train the adapter again, or use "
                "--dtype float32 if the numbers are too large"
            )
        matrices[name.removesuffix(".weight")] = matrix
    return AdapterWeights(digest.hexdigest(), dtype, matrices)


def allowed_directory(directory: Path, allowed: Sequence[Path]) -> Path:
    """Return a directory with all links resolved.

    Args:
        directory: directory from a request.
        allowed: directories of which one must contain the directory. Empty: any directory is allowed.

    Raises:
        ModelLoadError: the directory does not exist or is not allowed.
    """
    try:
        resolved = directory.resolve(strict=True)
        roots = [root.resolve() for root in allowed]
    except (OSError, RuntimeError, ValueError):
        resolved, roots = None, []
    if resolved is None or (allowed and not any(resolved.is_relative_to(root) for root in roots)):
        within = f" in {', '.join(map(str, allowed))}, where adapters may lie (--allowed-lora-path)" if allowed else ""
        raise ModelLoadError(f"there is no directory {str(directory)[:200]!r}{within}")
    return resolved


class _Config:
    """Checked content of adapter_config.json.

    Raises:
        ModelLoadError: a field requires a computation that is not supported.
    """

    def __init__(self, fields: Fields, rank_max: int) -> None:
        if fields.text_or("peft_type", "LORA") != "LORA":
            raise ModelLoadError(f"peft_type in {fields.source} is {fields.shown('peft_type')}, only LORA is served")
        for name, neutral in NEUTRAL.items():
            if name in fields and not fields.is_one_of(name, neutral):
                raise ModelLoadError(
                    f"{name} in {fields.source} is {fields.shown(name)}, which is not supported: an adapter here is "
                    "pairs of low-rank matrices for attention and MLP projections, and nothing else"
                )
        for name in fields.names:
            if name not in NEUTRAL and name not in NOTES and not fields.is_one_of(name, (None, False, [], {}, "", 0)):
                raise ModelLoadError(
                    f"{name} in {fields.source} is {fields.shown(name)}, and its effect is unknown here: it is a "
                    "variant that is not supported"
                )
        self.rank = fields.whole("r")
        self.rank_max = rank_max
        self._alpha = fields.number_or("lora_alpha", 8.0)
        self._is_rank_stabilized = fields.flag_or("use_rslora", False)
        self._ranks = _pattern(fields, "rank_pattern")
        self._alphas = _pattern(fields, "alpha_pattern")
        self.targets: frozenset[str] | None = None
        """Names of modules, or ends of names, that must have factors. None: unknown."""
        if not any(name in fields for name in ("layers_to_transform", "exclude_modules")):
            targets = fields.strings_or_text("target_modules")
            if targets == "all-linear":
                self.targets = frozenset("*")
            elif not isinstance(targets, str) and all(re.fullmatch(r"[\w.]+", name) for name in targets):
                self.targets = frozenset(targets)

    def rank_of(self, module: str) -> int:
        return int(self._ranks.get(_key_of(module, self._ranks), self.rank))

    def scale(self, module: str, rank: int) -> float:
        alpha = float(self._alphas.get(_key_of(module, self._alphas), self._alpha))
        scale = alpha / math.sqrt(rank) if self._is_rank_stabilized else alpha / rank
        if not math.isfinite(scale):
            raise ModelLoadError(f"lora_alpha for {module} is {alpha}: it must be a finite number")
        return scale


def _pattern(fields: Fields, name: str) -> dict[str, float]:
    found = fields.object_or_none(name) or {}
    if len(found) > PATTERNS_MAX:
        raise ModelLoadError(f"{name} in {fields.source} has {len(found)} entries, allowed are {PATTERNS_MAX}")
    for key, value in found.items():
        if not _PLAIN_KEY.fullmatch(key):
            raise ModelLoadError(
                f"{name} in {fields.source} has the key {key[:80]!r}: regular expressions are not evaluated here, "
                "write the names of modules"
            )
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelLoadError(f"{name} in {fields.source} maps {key[:80]} to {value!r}, which is no number")
    return {key.strip("^$"): float(value) for key, value in found.items() if isinstance(value, int | float)}


def _key_of(module: str, pattern: Mapping[str, float]) -> str:
    """Return the key that is the module's name, else the first key with which the name ends, else ""."""
    if module in pattern:
        return module
    return next((key for key in pattern if module.endswith(f".{key}")), "")


def _factors(stored: Mapping[str, FileTensor]) -> dict[str, _Factors]:
    """Pair the factors A and B of each module, by the module's name in the file."""
    parts: dict[str, dict[str, FileTensor]] = {}
    for name, tensor in stored.items():
        match = _FACTOR.fullmatch(name)
        if match is None:
            raise ModelLoadError(
                f"{WEIGHTS_NAME} holds {name[:120]}, which is no factor of a projection: embeddings, biases, "
                "magnitudes (DoRA) and whole modules are not supported in an adapter"
            )
        pair = parts.setdefault(match["module"], {})
        if match["factor"] in pair:
            raise ModelLoadError(f"{WEIGHTS_NAME} has lora_{match['factor']} of {match['module'][:120]} twice")
        pair[match["factor"]] = tensor
    if not parts:
        raise ModelLoadError(f"{WEIGHTS_NAME} holds nothing: save the adapter again")
    for module, pair in parts.items():
        if len(pair) != 2:
            raise ModelLoadError(
                f"{WEIGHTS_NAME} has lora_{next(iter(pair))} of {module[:120]} alone: save the adapter again"
            )
    return {module: _Factors(pair["A"], pair["B"]) for module, pair in parts.items()}


def _matched(factors: Mapping[str, _Factors], modules: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, _Factors]]:
    """Yield each pair of factors with the module's name in a checkpoint of the model."""
    by_layer = {match["layer"]: name for name in modules if (match := _LAYERS.fullmatch(name))}
    taken: set[str] = set()
    for written, pair in factors.items():
        module = next(written.removeprefix(prefix) for prefix in _PREFIXES if written.startswith(prefix))
        if module not in modules:  # In a model that reads images, names of layers have a different prefix.
            match = _LAYERS.fullmatch(module)
            is_elsewhere = re.search(r"vision|visual|image|audio", module) is not None
            module = by_layer.get(match["layer"], module) if match and not is_elsewhere else module
        if module not in modules or not _LAYERS.fullmatch(module) or ".experts." in module:
            raise ModelLoadError(
                f"{WEIGHTS_NAME} has factors for {written[:120]}, which cannot have an adapter here: only projections "
                "of attention and of MLPs can, not embeddings, the head, or mixtures of experts; or it was made for "
                "another model"
            )
        if module in taken:
            raise ModelLoadError(f"{WEIGHTS_NAME} has factors for {module[:120]} twice")
        taken.add(module)
        yield module, pair


def _check_shapes(module: str, pair: _Factors, shape: tuple[int, ...], config: _Config) -> None:
    outputs, inputs = shape
    a, b = pair.a.shape, pair.b.shape
    if len(a) != 2 or len(b) != 2 or a[0] < 1 or a != (b[1], inputs) or b[0] != outputs:
        raise ModelLoadError(
            f"{module} is {list(shape)} in this model, and the adapter's factors for it are {list(a)} and {list(b)}: "
            "it was made for another model"
        )
    if pair.rank > config.rank_max:
        raise ModelLoadError(f"the rank of {module} is {pair.rank}, and --max-lora-rank is {config.rank_max}: raise it")
    if pair.rank != config.rank_of(module):
        raise ModelLoadError(
            f"the factors of {module} have rank {pair.rank}, and {CONFIG_NAME} says {config.rank_of(module)}: save the "
            "adapter again"
        )


def _check_complete(
    found: Mapping[str, _Factors], places: Mapping[str, TensorPlace], model: ModelConfig, config: _Config
) -> None:
    """Raise ModelLoadError for factors of a module that cannot have an adapter, and for missing factors of a target."""
    for name, place in places.items():
        module = place.name.removesuffix(".weight")
        if module in found and not _can_be_adapted(name, model):
            raise ModelLoadError(f"{WEIGHTS_NAME} has factors for {module}, which cannot have an adapter here")
        is_projection = name.startswith("layers.") and name.count(".") == 3 and name.endswith("_proj.weight")
        if config.targets is None or not is_projection or module in found:
            continue
        parts = module.split(".")
        if not config.targets.isdisjoint({"*", *(".".join(parts[first:]) for first in range(len(parts)))}):
            raise ModelLoadError(
                f"{WEIGHTS_NAME} lacks the factors of {module}, which target_modules in {CONFIG_NAME} names: save the "
                "adapter again"
            )


def _can_be_adapted(name: str, model: ModelConfig) -> bool:
    """Return True if the tensor `name`, which is a name of loading/names.py, can have an adapter."""
    layers, index, *path = name.split(".")
    if layers != "layers" or len(path) != 2 or path[0] not in PROJECTIONS:
        return False
    has_heads = isinstance(model.layers[int(index)].attention, AttentionConfig)
    return has_heads or path[0] in MLP_PROJECTIONS


def _read(pair: _Factors, place: TensorPlace, scale: float, dtype: Dtype) -> AdapterMatrix:
    """Read the factors. In the result, the scale is a part of b, and b's rows have the order of the model's matrix."""
    rows = place.shape[0]
    part = pair.b.part(place.first_row, (rows, pair.rank))
    read = cast(Float32Array, read_plain(part.path, part.offset, part.shape, part.dtype, "float32"))
    b = place.multiplied(place.ordered(read))
    scaled = empty_values((rows, pair.rank), dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        convert(np.multiply(b, np.float32(scale), dtype=np.float32), scaled)
    return AdapterMatrix(read_plain(pair.a.path, pair.a.offset, pair.a.shape, pair.a.dtype, dtype), scaled)
