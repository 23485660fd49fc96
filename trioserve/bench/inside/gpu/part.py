"""A running part of the GPU measurement: its device, the time it has left, and its figures."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch

from trioserve.model.device import DeviceType

__all__ = ["Part"]


class Part:
    """One part of the measurement. Every figure is printed and stored at once, so that a time limit loses none.

    Args:
        name: name of the part, stored with every figure.
        device: "cpu" is only for a test of the measurement.
        seconds_max: after this time, the part begins no further case.
        results: file to which one line of JSON is added for each row. None: rows are only printed.

    Attributes:
        wrong_count: results that differ too much from the reference.
        was_cut_off: True if some cases were not measured because the time was over.
    """

    def __init__(self, name: str, device: DeviceType, seconds_max: float, results: Path | None = None) -> None:
        self.name, self.device = name, device
        self.wrong_count = 0
        self.was_cut_off = False
        self._results = results
        self._ends_at = time.monotonic() + seconds_max

    @property
    def is_gpu(self) -> bool:
        return self.device == "cuda"

    def has_time(self) -> bool:
        """Return True if another case may begin. Otherwise, the part is marked as cut off."""
        if time.monotonic() < self._ends_at:
            return True
        if not self.was_cut_off:
            self.was_cut_off = True
            self.put("time is over", note="the other cases of this part were not measured")
        return False

    def put(self, what: str, **figures: Any) -> None:
        """Print and store one row.

        Args:
            what: the thing that was measured.
            **figures: values by name. A name ends in its unit.
        """
        shown = (
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in figures.items()
        )
        print(f"{what:45} {'  '.join(shown)}", flush=True)
        if self._results is not None:
            with self._results.open("a") as file:
                file.write(json.dumps({"part": self.name, "what": what, **figures}) + "\n")

    def compare(self, what: str, error: float, tolerance: float) -> None:
        """Report the error of a result, and count it if it is too large or not a number.

        Args:
            what: the result.
            error: difference from the reference.
            tolerance: largest allowed error.
        """
        is_right = error <= tolerance  # False for NaN.
        self.wrong_count += not is_right
        self.put(what, error=error, allowed=tolerance, verdict="right" if is_right else "WRONG")

    def wait(self) -> None:
        """Wait until the device has finished all work."""
        if self.is_gpu:
            torch.cuda.synchronize()

    def numbers(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Return normally distributed random numbers on the device.

        Args:
            *shape: shape of the tensor.
            dtype: number format.
        """
        return torch.randn(*shape, device=self.device, dtype=dtype)
