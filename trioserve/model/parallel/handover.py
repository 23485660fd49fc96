"""What the stages of a model hand on in a step: the hidden state of each row, or that the step is abandoned."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from trioserve.model.number_formats import Float32Array

__all__ = ["Handover", "NoNeighbours"]


class Handover(Protocol):
    """A stage's way to the one before it and to the one behind it. Used by the thread that computes, alone: once for
    each step that is computed, in the order of the steps. Where the other one is gone, a call may wait for ever, or
    raise: whoever started the stages ends all of them then."""

    def receive(self, row_count: int, hidden_size: int) -> Float32Array | None:
        """Waits for what the stage before has made of the step's rows: [row_count, hidden_size]. None: the step is
        abandoned, and is not to be computed here either."""
        ...

    def send(self, hidden: Float32Array | None) -> None:
        """hidden: for the stage behind, C-contiguous; None: the step is abandoned. May wait until that one takes it."""
        ...


class NoNeighbours:
    """For steps that a stage computes for itself: what came before is zeros."""

    def receive(self, row_count: int, hidden_size: int) -> Float32Array | None:
        return np.zeros((row_count, hidden_size), dtype=np.float32)

    def send(self, hidden: Float32Array | None) -> None:
        pass
