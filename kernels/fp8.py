"""FP8 weights (e4m3) for torch, with a scale for each row, and their product with inputs that are rounded to FP8.

Each row of the inputs gets a scale from its own largest number, so the other rows of a step do not change its result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["FP8_LARGEST", "Fp8Weight", "fp8_linear", "fp8_rows", "fp8_weight_of_blocks", "join_fp8", "why_not_fp8"]

FP8_LARGEST = 448.0  # largest number of e4m3
SCALE_BYTES = 4
SIZE_UNIT = 16  # The numbers of inputs and of outputs must be multiples of this one on a GPU.
CAPABILITY_MIN = (8, 9)  # Ada and newer GPUs multiply FP8 numbers.


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """A weight.

    Attributes:
        codes: float8_e4m3fn [outputs, inputs].
        scales: float32 [outputs]. A number is code * scale.
    """

    codes: Tensor
    scales: Tensor

    @property
    def byte_count(self) -> int:
        return int(self.codes.nbytes + self.scales.nbytes)

    @staticmethod
    def fits(inputs: int, outputs: int) -> bool:
        """Return True if a weight of this size can be multiplied.

        Args:
            inputs: number of inputs.
            outputs: number of outputs.
        """
        return inputs % SIZE_UNIT == 0 and outputs % SIZE_UNIT == 0

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """Return all numbers, [outputs, inputs].

        Args:
            dtype: dtype of the result.
        """
        return (self.codes.float() * self.scales[:, None]).to(dtype)


def fp8_weight_of_blocks(blocks: Tensor) -> Fp8Weight:
    """Create a weight from the rows of a file.

    Args:
        blocks: uint8 [outputs, 4 + inputs]. A row has its scale in float32, then its codes.
    """
    scales = blocks[:, :SCALE_BYTES].contiguous().view(torch.float32)
    return Fp8Weight(blocks[:, SCALE_BYTES:].contiguous().view(torch.float8_e4m3fn), scales[:, 0].contiguous())


def join_fp8(parts: list[Fp8Weight]) -> Fp8Weight:
    """Concatenate weights along their outputs.

    Args:
        parts: weights with equal numbers of inputs.
    """
    # torch concatenates no FP8 numbers on all devices.
    codes = torch.cat([part.codes.view(torch.uint8) for part in parts]).view(torch.float8_e4m3fn)
    return Fp8Weight(codes, torch.cat([part.scales for part in parts]))


def fp8_rows(values: Tensor) -> tuple[Tensor, Tensor]:
    """Round rows to FP8.

    Args:
        values: [n, inputs].

    Returns:
        Codes, float8_e4m3fn [n, inputs], and scales, float32 [n, 1]. A number is about code * scale.
    """
    scales = values.abs().amax(-1, keepdim=True).float().mul_(1 / FP8_LARGEST)
    scales.clamp_(min=torch.finfo(torch.float32).tiny)  # A row of zeros stays a row of zeros.
    return (values / scales).to(torch.float8_e4m3fn), scales


def fp8_linear(
    values: Tensor,
    weight: Fp8Weight,
    bias: Tensor | None = None,
    rounded: Callable[[Tensor], tuple[Tensor, Tensor]] = fp8_rows,
) -> Tensor:
    """Multiply rows with a weight. The rows are rounded to FP8 before.

    Args:
        values: [n, inputs], in bfloat16.
        weight: weight with `outputs` rows.
        bias: [outputs], or None.
        rounded: fp8_rows of the kernels.

    Returns:
        [n, outputs] in the dtype of `values`. A row that contains infinity or NaN is NaN.
    """
    codes, scales = rounded(values)
    product: Tensor = torch._scaled_mm(
        codes, weight.codes.t(), scale_a=scales, scale_b=weight.scales[None], out_dtype=values.dtype
    )
    return product if bias is None else product.add_(bias)


def why_not_fp8(device: torch.device) -> str | None:
    """Return the reason why a device cannot multiply FP8 weights, as the end of a sentence. None: it can.

    Args:
        device: device that computes.
    """
    if device.type == "cuda" and (found := torch.cuda.get_device_capability(device)) < CAPABILITY_MIN:
        return f"this GPU has compute capability {found[0]}.{found[1]}, and FP8 products need 8.9"
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(5, 64, generator=generator).to(torch.bfloat16).to(device)
    codes = torch.randn(32, 64, generator=generator).to(torch.float8_e4m3fn).to(device)
    weight = Fp8Weight(codes, torch.rand(32, generator=generator).to(device))
    wanted = values.float() @ weight.numbers(torch.float32).t()
    try:
        got = fp8_linear(values, weight).float()
    except (RuntimeError, ValueError) as error:
        return f"torch's FP8 product fails: {str(error).partition(chr(10))[0]}"
    # Rounding a row to FP8 changes its product by 2 to 4 % of its size (root mean square).
    if not bool((got - wanted).norm() < 0.1 * wanted.norm()):
        return "torch's FP8 product gives a wrong result"
    return None
