"""Computes a hidden state of several streams, and inputs of layers, in torch, see StreamsConfig."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from trioserve.model.layer_config import Activation
from trioserve.model.model_config import ModelConfig, StreamsConfig
from trioserve.model.torch_step.formats import TensorSlot
from trioserve.model.torch_step.layers import Embedding, Linear, MakeLinear, Norm
from trioserve_kernels import Kernels

__all__ = ["LayerStreams", "Streams", "StreamsOfStep"]

LEAST_SQUARE = 1e-5  # Smallest mean square of a stream, which avoids a division by 0 when the stream is scaled.


class StreamsOfStep:
    """Streams of one step.

    Args:
        values: one tensor [T, hidden_size] for each stream, changed in place.
        inputs: [T, layers, input_size], inputs of each layer.
    """

    def __init__(self, values: list[Tensor], inputs: Tensor) -> None:
        self.values = values
        self.inputs = inputs


class Streams:
    """Creates the streams of a step before the first layer, and combines the streams after the last layer."""

    def __init__(
        self,
        config: ModelConfig,
        streams: StreamsConfig,
        kernels: Kernels,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        hidden, inputs = config.hidden_size, config.layer_count * streams.input_size

        def linear(outputs: int, name: str) -> Linear:
            return Linear(hidden, {name: outputs}, bias=False, dtype=dtype, device=device, kernels=kernels)

        self._config, self._streams, self._kernels = config, streams, kernels
        self._embedding = Embedding(streams.input_vocab_size, inputs, dtype=dtype, device=device)
        # The scale is rounded to the dtype, as in the reference implementation.
        self._embedding_scale = torch.tensor(streams.input_size**0.5, dtype=dtype).item()
        self._projection = linear(inputs, "layer_inputs.proj")
        self._norm = Norm("layer_inputs.norm", streams.input_size, config, kernels, dtype=dtype, device=device)
        self._ins = [linear(hidden, f"streams.{index}.in_proj") for index in range(streams.count - 1)]
        self._outs = [linear(hidden, f"streams.{index}.out_proj") for index in range(streams.count - 1)]

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self._projection, *self._ins, *self._outs

    def slots(self) -> Iterator[TensorSlot]:
        weight = self._embedding.weight
        yield TensorSlot("layer_inputs.embed.weight", tuple(weight.shape), weight.dtype, weight.copy_)
        yield from self._norm.slots()
        for linear in self.linears:
            yield from linear.slots()

    def begin(self, hidden: Tensor, token_ids: Tensor) -> StreamsOfStep:
        """Create the streams of a step.

        Args:
            hidden: [T, hidden_size], embeddings of the tokens. They become the first stream.
            token_ids: int64 [T].
        """
        size, layers = self._streams.input_size, self._config.layer_count
        projected = self._projection(hidden).mul_(self._config.hidden_size**-0.5).view(-1, layers, size)
        table_ids = torch.where(token_ids < self._streams.input_vocab_size, token_ids, 0)
        own = self._embedding(table_ids).mul_(self._embedding_scale).view(-1, layers, size)
        inputs = (self._norm(projected) + own).mul_(0.5**0.5)
        magnitude = _mean_square(hidden).sqrt()
        return StreamsOfStep([hidden, *(_scaled_to(linear(hidden), magnitude) for linear in self._ins)], inputs)

    def combine(self, streams: StreamsOfStep) -> Tensor:
        """Combine the streams after the last layer.

        Args:
            streams: streams of the step.

        Returns:
            [T, hidden_size].
        """
        first, *others = streams.values
        if not others:
            return first
        magnitude = _mean_square(first).sqrt()
        total = first.clone()
        for linear, values in zip(self._outs, others, strict=True):
            total += _scaled_to(linear(values), magnitude)
        return total.div_(self._streams.count)


class LayerStreams:
    """Predicts all residual streams before a layer, and corrects these predictions after the layer."""

    def __init__(
        self,
        index: int,
        config: ModelConfig,
        streams: StreamsConfig,
        activation: Activation,
        kernels: Kernels,
        linear: MakeLinear,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        hidden, count, size = config.hidden_size, streams.count, streams.input_size

        def norm(module: str) -> Norm:
            return Norm(f"layers.{index}.{module}", hidden, config, kernels, dtype=dtype, device=device)

        self._index, self._streams, self._activation = index, streams, activation
        self._kernels = kernels
        self._input_norm = norm("input_norm")
        self._gate = linear(hidden, False, input_gate=size)
        self._projection = linear(size, False, input_proj=hidden)
        self._mixture: _Mixture | None = None
        if count > 1:
            self._mixture = _Mixture(index, hidden, count, norm("stream_router_norm"), linear, dtype, device)

    @property
    def linears(self) -> tuple[Linear, ...]:
        own = (self._gate, self._projection)
        return own if self._mixture is None else (*self._mixture.linears, *own)

    def slots(self) -> Iterator[TensorSlot]:
        parts: tuple[Norm | Linear, ...] = (self._input_norm, *self.linears)
        for part in parts:
            yield from part.slots()
        if self._mixture is not None:
            yield from self._mixture.slots()

    def predict(self, streams: StreamsOfStep) -> Tensor:
        """Predict all streams.

        Args:
            streams: streams of the step, which are replaced by the prediction.

        Returns:
            [T, hidden_size], input of the layer. The layer may change the tensor.
        """
        old, count, mixture = streams.values, self._streams.count, self._mixture
        if mixture is None:
            return old[0]
        shares = mixture.prediction(mixture.routed(old[self._streams.active])).view(-1, count, count, 1)
        new = []
        for stream, values in enumerate(old):
            total = old[0] * shares[:, stream, 0]
            for index in range(1, count):
                total += old[index] * shares[:, stream, index]
            new.append(total.add_(values))
        streams.values = new
        return new[self._streams.active].clone()

    def correct(self, streams: StreamsOfStep, computed: Tensor) -> None:
        """Correct all streams by the layer's result, and add the layer's input.

        Args:
            streams: streams of the step, changed in place.
            computed: [T, hidden_size], result of the layer. It is the only stream if there is one.
        """
        active, values, mixture = self._streams.active, streams.values, self._mixture
        read = computed
        if mixture is not None:
            shares = mixture.correction(mixture.routed(computed)) + 1.0
            went = computed - values[active]
            for stream, each in enumerate(values):
                each.addcmul_(went, shares[:, stream, None])
            read = values[active] * mixture.scale if self._streams.has_scale else values[active]
        inputs = streams.inputs[:, self._index]
        gated = self._kernels.activate_and_mul(torch.cat((self._gate(read), inputs), -1), self._activation)
        given = self._input_norm(self._projection(gated))
        for each in values if mixture is None else values[1:]:
            each += given


class _Mixture:
    """Weights of one layer by which streams are mixed."""

    def __init__(
        self,
        index: int,
        hidden: int,
        count: int,
        router_norm: Norm,
        linear: MakeLinear,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._router_norm, self._router_scale = router_norm, 1.0 / hidden
        self._router = linear(hidden, False, stream_router=count)
        self.prediction = linear(count, False, stream_prediction=count * count)
        self.correction = linear(count, False, stream_correction=count)
        self.scale = torch.empty(hidden, dtype=dtype, device=device)
        self._name = f"layers.{index}.streams.scale"
        self.linears = (self._router, self.prediction, self.correction)

    def slots(self) -> Iterator[TensorSlot]:
        yield from self._router_norm.slots()
        yield TensorSlot(self._name, tuple(self.scale.shape), self.scale.dtype, self.scale.copy_)

    def routed(self, values: Tensor) -> Tensor:
        """Return the router's output for each row, [T, count]. The output determines how streams are mixed."""
        products = self._router(self._router_norm(values).mul_(self._router_scale))
        # The position of a number in a tensor can change torch's result slightly. In float64, the later rounding
        # removes this difference, so the result of a row does not depend on the batch.
        return products.double().tanh().to(values.dtype)


def _mean_square(values: Tensor) -> Tensor:
    """Return the mean square of each row, [T, 1]. Its bits do not depend on the other rows."""
    return values.double().square().mean(-1, keepdim=True).to(values.dtype)


def _scaled_to(values: Tensor, magnitude: Tensor) -> Tensor:
    """Scale each row to a magnitude, in place."""
    own = _mean_square(values).clamp_min_(LEAST_SQUARE).sqrt_()
    return values.mul_(magnitude).div_(own)
