"""Building blocks of models in torch: linear layers, norms, embedding, rotary angles. decoder.py combines them."""

from __future__ import annotations

import functools
import math
import platform
from collections.abc import Callable, Collection, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from trioserve.model.layer_config import AttentionConfig, RotaryConfig, Temperature
from trioserve.model.loading.stored_tensor import FP8_ROWS
from trioserve.model.model_config import ModelConfig, RankPart, RelativePositions
from trioserve.model.parallel.collectives import Collectives
from trioserve.model.parallel.shares import vocab_runs
from trioserve.model.torch_step.adapters import AdapterRows
from trioserve.model.torch_step.formats import TensorSlot
from trioserve.model.torch_step.rotary import rotary_frequencies
from trioserve_kernels import Kernels, reference
from trioserve_kernels.four_bits import FourBitWeight, join, weight_of_blocks
from trioserve_kernels.fp8 import Fp8Weight, fp8_linear, fp8_rows, fp8_weight_of_blocks, join_fp8

__all__ = [
    "RankVocabulary",
    "Angles",
    "Embedding",
    "HeadNorms",
    "Linear",
    "MakeLinear",
    "Norm",
    "RelativeBiases",
    "RotaryAngles",
    "Sinks",
    "temperature_factors",
]


class RankVocabulary:
    """Exchanges logits between ranks. All ranks must make the same calls in the same order.

    Args:
        part: description of this rank's shard of the model.
        vocab_size: tokens of the whole vocabulary.
        collectives: connection to the other ranks.
    """

    def __init__(self, part: RankPart, vocab_size: int, collectives: Collectives) -> None:
        self._runs = vocab_runs(vocab_size, part.size)
        self._first = part.vocab_first
        self._collectives = collectives

    def logits(self, own: Tensor) -> Tensor:
        """Collect the logits of all tokens.

        Args:
            own: [n, vocab_count], logits of this rank's tokens.

        Returns:
            [n, vocab_size].
        """
        # All ranks must send the same size. The first rank has the most tokens.
        padded = functional.pad(own, (0, self._runs[0][1] - own.shape[1]))
        gathered: Tensor = self._collectives.gather(padded.contiguous())
        return torch.cat([logits[:, :count] for logits, (_, count) in zip(gathered, self._runs, strict=True)], -1)

    def largest(self, own: Tensor) -> tuple[Tensor, Tensor]:
        """Find the token with the largest logit in each row. The ranks exchange fewer bytes than for `logits`.

        Args:
            own: [n, vocab_count], logits of this rank's tokens.

        Returns:
            Two tensors. int64 [n] has the token of each row. If several logits are equal, it is the token with the
            smallest number. bool [n] is True for each row whose logits are all finite.
        """
        best = own.max(-1)
        finite = own.isfinite().all(-1)
        # float32 represents logits of every dtype exactly, and also token numbers below 2**24.
        found = torch.stack((best.values.float(), (best.indices + self._first).float(), finite.float()), -1)
        values, ids, are_finite = self._collectives.gather(found).unbind(-1)
        rank = values.argmax(0)
        return ids.gather(0, rank[None])[0].to(torch.int64), are_finite.bool().all(0)


# A table for contexts of 131,072 tokens, heads of 128 numbers and a 16-bit dtype has this size.
ANGLE_TABLE_BYTES_MAX = 2**26


class Linear:
    """Linear layer y = x W^T + b. One product computes several projections of an input and concatenates their outputs.

    On an x86 CPU whose oneDNN supports the dtype, W is stored in oneDNN's packed order. The time of a decode step is
    mainly the time of reading W, and packed weights reduce it by a sixth. torch.compile uses the same operators when it
    freezes weights. If torch does not have these operators, W is stored in plain order.

    Args:
        inputs: number of input features.
        outputs: number of output features of each projection, by its name, in the order of the outputs.
        bias: the layer has biases.
        dtype: number format of weights, inputs and outputs.
        device: device of the weights.
        kernels: kernels that multiply. None selects the products of torch.
        unbiased: names of projections that have no bias in a layer with biases.
        block_type: block type of all projections in the checkpoint, if W stays in 4 bits (four_bits.py) or in FP8
            (fp8.py). None: W has the dtype.

    Attributes:
        parts: number of outputs of each projection, by its name.
    """

    def __init__(
        self,
        inputs: int,
        outputs: Mapping[str, int],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels | None = None,
        unbiased: Collection[str] = (),
        block_type: str | None = None,
    ) -> None:
        self._unbiased = unbiased
        self._block_type = block_type
        self._fp8_rows = fp8_rows if kernels is None else kernels.fp8_rows
        self._four_bit_linear = reference.four_bit_linear if kernels is None else kernels.four_bit_linear
        self._four_bit_parts: dict[str, FourBitWeight] = {}
        self._fp8_parts: dict[str, Fp8Weight] = {}
        self._blocks: FourBitWeight | Fp8Weight | None = None
        self._linear = reference.linear if kernels is None else kernels.linear
        self.inputs = inputs
        self.parts = dict(outputs)
        self._dtype = dtype
        self._device = device
        self._weight: Tensor | None = None
        self._packed = False
        self._bias = torch.zeros(sum(outputs.values()), dtype=dtype, device=device) if bias else None
        self._missing = set(outputs)

    @property
    def outputs(self) -> int:
        return sum(self.parts.values())

    @property
    def saved_bytes(self) -> int:
        """Bytes by which W in 4 bits or FP8 is smaller than W in the dtype."""
        if self._blocks is None:
            return 0
        return self.outputs * self.inputs * self._dtype.itemsize - self._blocks.byte_count

    def slots(self) -> Iterator[TensorSlot]:
        first = 0
        for name, size in self.parts.items():
            fill = functools.partial(self._fill, name, first)
            slot = TensorSlot(f"{name}.weight", (size, self.inputs), self._dtype, fill)
            if self._block_type is not None:
                fill_blocks = functools.partial(self._fill_blocks, self._block_type, name)
                slot = slot._replace(block_type=self._block_type, fill_blocks=fill_blocks)
            yield slot
            if self._bias is not None and name not in self._unbiased:
                yield TensorSlot(f"{name}.bias", (size,), self._dtype, self._bias[first : first + size].copy_)
            first += size

    def take(self, weight: Tensor) -> None:
        """Use a tensor as the whole weight.

        Args:
            weight: [out, in], in the layer's dtype and on its device. The caller must not change it afterwards.
        """
        self._packed = _can_pack(weight)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, None) if self._packed else weight

    def __call__(self, values: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        """Multiply inputs with the weight.

        Args:
            values: [n, in].
            adapters: rows that use an adapter. The adapter's product is added to the result of these rows.

        Returns:
            [n, out].
        """
        if isinstance(self._blocks, Fp8Weight):
            outputs = fp8_linear(values, self._blocks, self._bias, self._fp8_rows)
        elif self._blocks is not None:
            outputs = self._four_bit_linear(values, self._blocks, self._bias)
        else:
            assert self._weight is not None, "a linear layer was called before its weight was loaded"
            product = _packed_product if self._packed else functional.linear
            outputs = self._linear(values, self._weight, self._bias, product)
        if adapters is not None:
            adapters.add_(outputs, values, self.parts)
        return outputs

    def _fill_blocks(self, block_type: str, name: str, blocks: Tensor) -> None:
        """Store the blocks of one projection. The weight is complete after the last projection."""
        blocks = blocks.to(self._device)
        if block_type == FP8_ROWS:
            self._fp8_parts[name] = fp8_weight_of_blocks(blocks)
        else:
            self._four_bit_parts[name] = weight_of_blocks(block_type, blocks)
        self._missing.discard(name)
        if self._missing:
            return
        if block_type == FP8_ROWS:
            self._blocks = join_fp8([self._fp8_parts.pop(each) for each in self.parts])
        else:
            self._blocks = join([self._four_bit_parts.pop(each) for each in self.parts])

    def _fill(self, name: str, first: int, tensor: Tensor) -> None:
        """Copy the rows of one projection. The weight is complete after the last projection.

        A call after the last projection starts to replace the old weight. All projections must then be copied again.
        """
        if not self._missing:
            self._missing = set(self.parts)
            if self._packed:
                self._weight = None  # The old weight is packed, but the new weight is copied in plain order.
        if self._weight is None:
            # The weight is not allocated before its first tensor is read. If the file has the same order of tensors,
            # only one unpacked weight exists at a time.
            rows = sum(self.parts.values())
            self._weight = torch.empty(rows, self.inputs, dtype=self._dtype, device=self._device)
        self._weight[first : first + self.parts[name]].copy_(tensor)
        self._missing.discard(name)
        if not self._missing:
            self.take(self._weight)


Angles = tuple[Tensor, Tensor]
"""Cosines and sines of a step's rows, see RotaryAngles."""
MakeLinear = Callable[..., Linear]
"""Makes a Linear from its inputs, has_bias, and the output count of each projection by name. Optionally, `unbiased`."""


class Embedding:
    """Embedding table, or the rows of the table that belong to this rank.

    Args:
        rows: number of tokens in the table.
        columns: numbers of one embedding.
        dtype: number format of the table.
        device: device of the table.
        first: token of the first row, if the table has only the rows of this rank. None: every token has a row.
    """

    def __init__(
        self, rows: int, columns: int, *, dtype: torch.dtype, device: torch.device, first: int | None = None
    ) -> None:
        self._first = first
        self.weight = torch.empty(rows, columns, dtype=dtype, device=device)

    def slots(self, *, tied: Linear | None) -> Iterator[TensorSlot]:
        """Yield the loading slot of the table.

        Args:
            tied: output projection that uses the table as its weight.
        """

        def fill(tensor: Tensor) -> None:
            self.weight.copy_(tensor)
            if tied is not None:
                tied.take(self.weight)

        yield TensorSlot("embed.weight", tuple(self.weight.shape), self.weight.dtype, fill)

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Return the embeddings of tokens.

        Args:
            token_ids: int64 [n].

        Returns:
            [n, columns], a copy that may be changed. Tokens without a row have zeros.
        """
        if self._first is None:
            return functional.embedding(token_ids, self.weight)
        places = token_ids - self._first
        is_foreign = (places < 0) | (places >= self.weight.shape[0])
        rows = functional.embedding(places.masked_fill(is_foreign, 0), self.weight)
        return rows.masked_fill_(is_foreign[:, None], 0.0)


class Norm:
    """RMS norm or LayerNorm, as the model's config selects.

    Args:
        name: name of weight and bias, without ".weight".
        size: number of values that are normalized together.
        config: model that defines the type of norm and epsilon.
        kernels: kernels that compute the norm.
        dtype: number format of the weight.
        device: device of the weight.
        eps: epsilon of the norm. None is the model's epsilon.
    """

    def __init__(
        self,
        name: str,
        size: int,
        config: ModelConfig,
        kernels: Kernels,
        *,
        dtype: torch.dtype,
        device: torch.device,
        eps: float | None = None,
    ) -> None:
        self._name = name
        self._kernels = kernels
        self._kind, self._eps = config.norm, config.norm_eps if eps is None else eps
        self.weight = torch.ones(size, dtype=dtype, device=device)
        self._bias = torch.empty_like(self.weight) if config.norm == "layer_biased" else None

    def slots(self) -> Iterator[TensorSlot]:
        for kind, values in (("weight", self.weight), ("bias", self._bias)):
            if values is not None and self._kind != "layer_bare":
                yield TensorSlot(f"{self._name}.{kind}", tuple(values.shape), values.dtype, values.copy_)

    def __call__(self, values: Tensor) -> Tensor:
        """Normalize each row.

        Args:
            values: [..., size].

        Returns:
            [..., size].
        """
        if self._kind != "rms":
            return functional.layer_norm(values, self.weight.shape, self.weight, self._bias, self._eps)
        return self._kernels.rms_norm(values, self.weight, self._eps)

    def of_sum(self, hidden: Tensor, product: Tensor | None) -> Tensor:
        """Add a product to the hidden state in place, and return the norm of the sum.

        Args:
            hidden: [n, size], which is overwritten.
            product: [n, size], or None to add nothing.

        Returns:
            [n, size].
        """
        if self._kind == "rms":
            return self._kernels.add_rms_norm_(hidden, product, self.weight, self._eps)
        return self(hidden if product is None else hidden.add_(product))


class HeadNorms:
    """Norms of queries and keys before they are rotated, of each head or of all heads of a row together.

    Norms of single heads have the type of the model's norms: RMS norm or LayerNorm.

    Args:
        layer: name of the layer.
        attention: attention of the layer.
        config: model.
        kernels: kernels that compute the norms.
        dtype: number format of the weights.
        device: device of the weights.
    """

    def __init__(
        self,
        layer: str,
        attention: AttentionConfig,
        config: ModelConfig,
        kernels: Kernels,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        assert config.norm == "rms" or attention.qk_norm != "row", "LayerNorm is supported for single heads only"
        self._kernels = kernels
        self._kind, self._eps = config.norm, config.norm_eps
        self._is_by_head, self._is_shared = attention.qk_norm != "row", attention.qk_norm == "head"
        self._has_weights = attention.qk_norm != "unit"
        self._head_dim, self._query_size = attention.head_dim, attention.query_size
        self._size = attention.query_size + (attention.key_size if attention.kv_from is None else 0)
        # Each normalized number has its own weight in this tensor, so one operation scales the queries and the keys.
        self._weights = torch.empty(self._size, dtype=dtype, device=device)
        has_bias = config.norm == "layer_biased" and attention.qk_norm == "head"
        self._biases = torch.empty_like(self._weights) if has_bias else None
        self._places: dict[str, Tensor] = {}
        if attention.qk_norm == "each":
            for part, weights in zip("qk", torch.split(self._weights, attention.query_size), strict=False):
                for head, row in enumerate(weights.view(-1, attention.head_dim)):
                    self._places[f"{layer}.heads.{head}.{part}_norm.weight"] = row
            return
        for kind, values in (("weight", self._weights), ("bias", self._biases)):
            if values is not None:
                self._places[f"{layer}.q_norm.{kind}"] = values[: self._query_size]
                if attention.kv_from is None:
                    self._places[f"{layer}.k_norm.{kind}"] = values[self._query_size :]

    def slots(self) -> Iterator[TensorSlot]:
        for name, place in self._places.items() if self._has_weights else ():
            rows = place.view(-1, self._head_dim) if self._is_shared else place
            yield TensorSlot(name, tuple(rows.shape[-1:]), place.dtype, rows.copy_)

    @property
    def in_rotation(self) -> tuple[Tensor, float] | None:
        """Weight and eps for rotary_and_store_kv_. None if that kernel cannot compute this norm."""
        return (self._weights, self._eps) if self._is_by_head and self._has_weights and self._kind == "rms" else None

    def __call__(self, qkv: Tensor) -> None:
        """Normalize queries and keys in place.

        Args:
            qkv: [T, (H + 2 K) * D] for H query heads and K key heads of D numbers.
        """
        heads = qkv[:, : self._size]
        if self._is_by_head:
            by_head = heads.view(qkv.shape[0], -1, self._head_dim)
            if self._kind != "rms":
                normed = functional.layer_norm(by_head, (self._head_dim,), None, None, self._eps)
            else:
                normed = self._kernels.rms_norm(by_head, None, self._eps)
            if not self._has_weights:
                by_head.copy_(normed)
                return
            torch.mul(normed, self._weights.view(-1, self._head_dim), out=by_head)
            if self._biases is not None:
                by_head.add_(self._biases.view(-1, self._head_dim))
            return
        for part in (slice(0, self._query_size), slice(self._query_size, None)):
            heads[:, part] = self._kernels.rms_norm(heads[:, part].contiguous(), self._weights[part], self._eps)


class Sinks:
    """Attention sinks of one layer: for each head, a number that is an additional score of the head's softmax.

    Args:
        layer: name of the layer.
        attention: attention of the layer.
        device: device of the numbers.
    """

    def __init__(self, layer: str, attention: AttentionConfig, *, device: torch.device) -> None:
        self._name = f"{layer}.sinks.weight"
        self.values = torch.empty(attention.head_count, dtype=torch.float32, device=device)

    def slots(self) -> Iterator[TensorSlot]:
        yield TensorSlot(self._name, tuple(self.values.shape), self.values.dtype, self.values.copy_)


class RotaryAngles:
    """Cosine and sine of every position's angles (RoFormer, arXiv 2104.09864), with the config's scaling.

    If a table of all positions needs little memory, the values are read from this table. A decode step on a GPU then
    needs two small kernels instead of eight.

    Args:
        rotary: rotary config of some layers. None: angles are 0.
        head_dim: rotated numbers of a head, see turned_dim.
        config: model, for its longest context.
        dtype: number format of the results.
        device: device of the table.
    """

    def __init__(
        self,
        rotary: RotaryConfig | None,
        head_dim: int,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        plain, magnitudes = (torch.from_numpy(part) for part in rotary_frequencies(rotary, head_dim))
        self._dtype = dtype
        # The angles of both halves of a head are equal. The sine is negated for the first half, see the kernels'
        # rotary_.
        self._frequencies = torch.cat((plain, plain)).to(device)
        self._magnitudes = torch.cat((magnitudes, magnitudes)).to(device)
        self._signs = torch.cat((-magnitudes, magnitudes)).to(device)
        axes = None if rotary is None else rotary.axes
        self._axes = None
        if axes is not None:
            axes += (0,) * (head_dim // 2 - len(axes))  # The angle of these pairs is 0.
            self._axes = torch.tensor(axes + axes, device=device)
        self._table: tuple[Tensor, Tensor] | None = None
        if 2 * config.context_tokens_max * head_dim * dtype.itemsize <= ANGLE_TABLE_BYTES_MAX:
            self._table = self._computed(torch.arange(config.context_tokens_max, device=device)[:, None, None])

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and sine for some positions.

        Args:
            positions: int64 [T], below the model's longest context. With axes (see RotaryConfig), also [3, T].

        Returns:
            Two tensors [T, 1, head_dim]. The first half of sine is negated.
        """
        if positions.dim() == 2:
            assert self._axes is not None, "the model has no positions in a grid"
            return self._computed(positions.index_select(0, self._axes).T[:, None])
        if self._table is None:
            return self._computed(positions[:, None, None])
        cos, sin = self._table
        return cos.index_select(0, positions), sin.index_select(0, positions)

    def _computed(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Compute cosine and sine.

        Args:
            positions: int64 [T, 1, 1], or [T, 1, head_dim] with a position for each number of a head.
        """
        angles = positions.to(torch.float32) * self._frequencies
        if angles.device.type == "cpu":
            # torch's cosine of a number depends slightly on the number's position in a vector. numpy computes in
            # float64, and rounding the result removes such differences.
            exact = angles.numpy().astype(np.float64)
            cos, sin = (torch.from_numpy(function(exact).astype(np.float32)) for function in (np.cos, np.sin))
            return (cos * self._magnitudes).to(self._dtype), (sin * self._signs).to(self._dtype)
        return (angles.cos() * self._magnitudes).to(self._dtype), (angles.sin() * self._signs).to(self._dtype)


class RelativeBiases:
    """Biases of attention scores by distance, see RelativePositions.

    Args:
        name: name of the table of biases, without ".weight".
        relative: buckets of distances.
        head_count: number of heads.
        is_causal: True: a query attends only to keys up to its own. False: half of the buckets are for later keys.
        dtype: number format of the table.
        device: device of the table.
    """

    def __init__(
        self,
        name: str,
        relative: RelativePositions,
        head_count: int,
        *,
        is_causal: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._name, self._relative, self._is_causal = name, relative, is_causal
        self._table = torch.empty(relative.bucket_count, head_count, dtype=dtype, device=device)

    def slots(self) -> Iterator[TensorSlot]:
        yield TensorSlot(f"{self._name}.weight", tuple(self._table.shape), self._table.dtype, self._table.copy_)

    def masks(self, positions: Tensor, key_count: int) -> Tensor:
        """Return masks that add the biases to scores. Keys that a query does not attend to have minus infinity.

        Args:
            positions: int64 [n], positions of the queries.
            key_count: number of keys, whose positions count from 0.

        Returns:
            [n, heads, key_count] in the table's dtype.
        """
        distances = positions[:, None] - torch.arange(key_count, device=positions.device)
        found = self._table[self._buckets(distances)].permute(0, 2, 1)
        return found.masked_fill(distances[:, None] < 0, -torch.inf) if self._is_causal else found

    def _buckets(self, distances: Tensor) -> Tensor:
        count = self._relative.bucket_count if self._is_causal else self._relative.bucket_count // 2
        exact_count = count // 2
        lengths = distances.clamp(min=0) if self._is_causal else distances.abs()
        # The steps of the formula are those of the original, because their rounding decides the bucket of a length.
        logarithms = torch.log(lengths.clamp(min=1).float() / exact_count) / math.log(
            self._relative.distance_max / exact_count
        )
        far = (exact_count + (logarithms * (count - exact_count)).long()).clamp(max=count - 1)
        buckets = torch.where(lengths < exact_count, lengths, far)
        return buckets if self._is_causal else buckets + (distances < 0) * count


def temperature_factors(positions: Tensor, temperature: Temperature) -> Tensor:
    """Return the factors of queries at some positions.

    Args:
        positions: int64 [T].
        temperature: parameters of the factor.

    Returns:
        float32 [T].
    """
    # The position of a number in a tensor can change torch's result slightly. In float64, the later rounding removes
    # this difference, so the result of a row does not depend on the batch.
    steps = ((positions + temperature.first) // temperature.interval).double()
    return (steps.log1p() * temperature.scale + 1.0).float()


def _packed_product(values: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(values, weight, bias, "none", [], "")
    return product


def _can_pack(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or platform.machine() not in ("x86_64", "AMD64"):
        return False
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]  # torch has no annotations here
        return False
    operators = torch.ops.mkldnn
    if not (hasattr(operators, "_reorder_linear_weight") and hasattr(operators, "_linear_pointwise")):
        return False
    if weight.dtype == torch.bfloat16:
        return bool(operators._is_mkldnn_bf16_supported())
    if weight.dtype == torch.float16:
        return bool(operators._is_mkldnn_fp16_supported())
    return weight.dtype == torch.float32
