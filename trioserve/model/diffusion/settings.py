"""Settings of an image model, checked without importing torch."""

from __future__ import annotations

import msgspec

from trioserve.contracts.errors import StartupError
from trioserve.model.settings import DeviceName, DtypeName, ModelSettings

__all__ = ["ImageModelSettings"]


class ImageModelSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of an image model.

    Attributes:
        dtype: "auto" is the checkpoint's dtype, or float32 for a float16 checkpoint on a CPU, where float16 is slow.
            Only in float32 are the bytes of an image independent of other requests.
        device: "auto" is CUDA if there is a GPU.
        threads: CPU threads for computing. None is torch's default, one per core.
        slot_count: latent slots, both for computing and for keeping, at least 1.

    Raises:
        StartupError: a value is not allowed. The error names the field.
    """

    dtype: DtypeName = "auto"
    device: DeviceName = "auto"
    threads: int | None = None
    slot_count: int = 8

    def __post_init__(self) -> None:
        self.placing()
        if self.slot_count < 1:
            raise StartupError(f"slot_count is {self.slot_count}, but must be at least 1")

    def placing(self) -> ModelSettings:
        """Return the settings that text models have as well."""
        return ModelSettings(dtype=self.dtype, device=self.device, threads=self.threads)
