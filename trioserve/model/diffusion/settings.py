"""How a model that makes pictures is run. Checked here, without torch."""

from __future__ import annotations

import msgspec

from trioserve.contracts.errors import StartupError
from trioserve.model.settings import DeviceName, DtypeName, ModelSettings

__all__ = ["ImageModelSettings"]


class ImageModelSettings(msgspec.Struct, frozen=True, kw_only=True):
    """dtype: auto is the checkpoint's own, but float32 for float16 on a CPU, which is slow at it. Only in float32 a
    picture has the same bytes whatever else is computed. device: auto is CUDA where there is one. threads: of computing
    on the CPU; None takes torch's default, one per core. slot_count: latent slots of both kinds together. Raises
    StartupError, naming the field."""

    dtype: DtypeName = "auto"
    device: DeviceName = "auto"
    threads: int | None = None
    slot_count: int = 8

    def __post_init__(self) -> None:
        self.placing()
        if self.slot_count < 1:
            raise StartupError(f"slot_count is {self.slot_count}, it must be at least 1")

    def placing(self) -> ModelSettings:
        """What of it concerns any model."""
        return ModelSettings(dtype=self.dtype, device=self.device, threads=self.threads)
