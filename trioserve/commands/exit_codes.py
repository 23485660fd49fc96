"""How a command ends, for shells and scripts."""

from __future__ import annotations

__all__ = ["EXIT_FAILED", "EXIT_INTERRUPTED"]

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130  # what shells show for Ctrl-C
