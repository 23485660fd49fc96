"""Reads how a quantized safetensors checkpoint stores its weights, from quantization_config in config.json.

Supported methods are awq, gptq, compressed-tensors, fp8, fbgemm_fp8 and mxfp4. The names of the stored tensors show
which matrices are quantized. The config's lists of excluded modules contain the same information, and are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from trioserve.contracts.errors import ModelLoadError
from trioserve.model.loading.fields import Fields

__all__ = ["StorageScheme", "storage_scheme"]

Layout = Literal["awq", "gptq", "packed", "bytes", "mxfp4"]

GROUP_SIZE_MAX = 2**20  # No matrix has so many inputs. A damaged field must not cause a loop of a billion steps.


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageScheme:
    """Storage of quantized matrices.

    Layouts:
        awq, gptq: words of 32 bits, [inputs, outputs].
        packed: words of 32 bits, [outputs, inputs], of compressed-tensors.
        bytes: one byte for each number.
        mxfp4: experts of gpt-oss, see quantized_matrix.py. The other fields do not apply.

    Attributes:
        is_float: numbers are FP8 e4m3.
        bits: bits of a number.
        group_size: number of inputs of an output that share one scale. None: all inputs.
        is_symmetric: zero points are 2**(bits - 1).
        has_order: the matrix has an additional tensor with the group of each input.
        zero_offset: number that is added to stored zero points.
        blocks: number of outputs and inputs that share one FP8 scale. None: there are no such blocks.
    """

    layout: Layout
    is_float: bool = False
    bits: int = 8
    group_size: int | None = None
    is_symmetric: bool = True
    has_order: bool = False
    zero_offset: int = 0
    blocks: tuple[int, int] | None = None


def storage_scheme(config: Mapping[str, object]) -> StorageScheme:
    """Read the storage of quantized matrices.

    Args:
        config: content of quantization_config.

    Raises:
        ModelLoadError: the storage is not supported. The message names the field.
    """
    fields = Fields(config, "quantization_config of config.json")
    method = fields.text_or("quant_method", None)
    if method not in _METHODS:
        raise _unsupported(fields, "quant_method", tuple(_METHODS))
    for name in ("modules_to_not_convert", "ignored_layers", "ignore"):
        fields.strings_or(name, None)
    return _METHODS[method](fields)


def _awq(fields: Fields) -> StorageScheme:
    bits_field = "bits" if "bits" in fields else "w_bit"
    _expect(fields, bits_field, (4,))
    _expect(fields, "zero_point", (True,), default=True)
    for name in ("version", "checkpoint_format", "format"):
        _expect(fields, name, ("gemm", "GEMM"), default="gemm")
    _expect(fields, "pack_dtype", ("int32",), default="int32")
    _empty(fields, "dynamic")
    group_size = _group_size(fields, "group_size" if "group_size" in fields else "q_group_size")
    return StorageScheme(layout="awq", bits=4, group_size=group_size, is_symmetric=False)


def _gptq(fields: Fields) -> StorageScheme:
    _expect(fields, "bits", (4, 8))
    for name in ("checkpoint_format", "format"):
        _expect(fields, name, ("gptq", "gptq_v2"), default="gptq")
    _expect(fields, "pack_dtype", ("int32",), default="int32")
    _expect(fields, "is_marlin_format", (False,), default=False)
    _empty(fields, "dynamic")
    written = fields.text_or("checkpoint_format", None) or fields.text_or("format", "gptq")
    return StorageScheme(
        layout="gptq",
        bits=fields.whole("bits"),
        group_size=_group_size(fields, "group_size"),
        is_symmetric=fields.flag_or("sym", True),
        has_order=fields.flag_or("desc_act", False),
        zero_offset=1 if written == "gptq" else 0,
    )


def _compressed_tensors(fields: Fields) -> StorageScheme:
    _expect(fields, "quantization_status", ("compressed",), default="compressed")
    formats = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
    _expect(fields, "format", formats)
    _empty(fields, "transform_config")
    if (sparsity := fields.group_or_none("sparsity_config")) is not None:
        _expect(sparsity, "format", ("dense",), default="dense")
    groups = fields.object_or_none("config_groups")
    if not groups:
        raise fields.wrong("config_groups", "an object with at least one group")
    schemes: dict[str, StorageScheme] = {}
    for name, value in groups.items():
        source = f"config_groups.{name} of {fields.source}"
        if not isinstance(value, dict):
            raise ModelLoadError(f"{source} must be an object")
        group = Fields(value, source)
        written = fields.text_or("format", "")
        _expect(group, "format", (written,), default=written)
        weights = group.group_or_none("weights")
        if weights is None:
            raise group.wrong("weights", "an object that says how weights are quantized")
        schemes[name] = _compressed_weights(weights, is_packed=written == "pack-quantized")
    if len(set(schemes.values())) > 1:
        raise ModelLoadError(
            f"config_groups in {fields.source} quantizes weights in {len(set(schemes.values()))} ways; supported is one"
        )
    return next(iter(schemes.values()))


def _compressed_weights(weights: Fields, *, is_packed: bool) -> StorageScheme:
    _expect(weights, "dynamic", (False,), default=False)
    _expect(weights, "type", ("int",) if is_packed else ("int", "float"), default="int")
    if weights.text_or("type", "int") == "float":
        _expect(weights, "num_bits", (8,))
        _expect(weights, "symmetric", (True,), default=True)
        _expect(weights, "strategy", ("tensor", "channel", "block"))
        is_block = weights.text_or("strategy", None) == "block"
        blocks = _blocks(weights, "block_structure") if is_block else None
        return StorageScheme(layout="bytes", is_float=True, blocks=blocks)
    _expect(weights, "num_bits", (4, 8) if is_packed else (8,))
    _expect(weights, "strategy", ("group", "channel") if is_packed else ("group", "channel", "tensor"))
    if weights.text_or("strategy", None) == "tensor":
        _expect(weights, "symmetric", (True,), default=True)
    _expect(weights, "actorder", ("weight", "static", "group", "dynamic", True, False), default=None)
    return StorageScheme(
        layout="packed" if is_packed else "bytes",
        bits=weights.whole("num_bits"),
        group_size=_group_size(weights, "group_size") if weights.text_or("strategy", None) == "group" else None,
        is_symmetric=weights.flag_or("symmetric", True),
        has_order=any(weights.is_one_of("actorder", (value,)) for value in ("group", "dynamic", True)),
    )


def _fp8(fields: Fields) -> StorageScheme:
    _expect(fields, "fmt", ("e4m3", "float8_e4m3fn"), default="e4m3")
    _expect(fields, "is_checkpoint_fp8_serialized", (True,), default=True)
    _expect(fields, "expert_dtype", ("fp8",), default="fp8")
    return StorageScheme(layout="bytes", is_float=True, blocks=_blocks(fields, "weight_block_size"))


def _fbgemm_fp8(fields: Fields) -> StorageScheme:
    return StorageScheme(layout="bytes", is_float=True)


def _mxfp4(fields: Fields) -> StorageScheme:
    return StorageScheme(layout="mxfp4", is_float=True, bits=4)


_METHODS: dict[str | None, Callable[[Fields], StorageScheme]] = {
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm_fp8,
    "mxfp4": _mxfp4,
}


def _expect(fields: Fields, name: str, allowed: tuple[object, ...], **default: object) -> None:
    """Check that a field has an allowed value. The field may be missing only if a default is given."""
    if name not in fields and "default" in default:
        return
    if not fields.is_one_of(name, allowed):
        raise _unsupported(fields, name, allowed)


def _empty(fields: Fields, name: str) -> None:
    if name in fields and not fields.is_one_of(name, ({}, [])):
        raise ModelLoadError(f"{name} in {fields.source} is {fields.shown(name)}; supported is leaving it out")


def _group_size(fields: Fields, name: str) -> int | None:
    size = fields.whole(name)
    if size == -1:
        return None
    if not 1 <= size <= GROUP_SIZE_MAX:
        raise fields.wrong(name, "a number of inputs, or -1 for all")
    return size


def _blocks(fields: Fields, name: str) -> tuple[int, int] | None:
    sizes = fields.wholes(name)
    if not sizes:
        return None
    if len(sizes) != 2 or not all(1 <= size <= GROUP_SIZE_MAX for size in sizes):
        raise fields.wrong(name, "the outputs and inputs of a block")
    return sizes[0], sizes[1]


def _unsupported(fields: Fields, name: str, allowed: tuple[object, ...]) -> ModelLoadError:
    wanted = ", ".join(str(value).lower() if isinstance(value, bool) else str(value) for value in allowed)
    found = f"is {fields.shown(name)}" if name in fields else "is missing"
    return ModelLoadError(
        f"{name} in {fields.source} {found}; supported is {wanted}: use another quantized checkpoint, the original "
        "or a GGUF file"
    )
