"""An end to what a network computes when nobody waits for it any more: between two of its blocks."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from trioserve.contracts.step import IsAbandoned, never_abandoned

__all__ = ["Abandoned", "Abandoning"]


class Abandoned(Exception):
    """Nobody waits for this step any more."""


class Abandoning:
    """Looks before each block of these networks. Raises Abandoned out of whatever is computed with them."""

    def __init__(self, networks: Iterable[torch.nn.Module]) -> None:
        self._is_abandoned = never_abandoned
        for network in networks:
            for module in network.modules():
                if isinstance(module, torch.nn.ModuleList):
                    for block in filter(None, module):  # diffusers has None where there is no attention
                        block.register_forward_pre_hook(self._look)

    def begin(self, is_abandoned: IsAbandoned) -> None:
        """Of which step is computed from now on."""
        self._is_abandoned = is_abandoned

    def check(self) -> None:
        """Raises Abandoned if that is so."""
        if self._is_abandoned():
            raise Abandoned

    def _look(self, *_: object) -> None:
        self.check()
