"""Types of command line flags."""

from __future__ import annotations

import argparse

__all__ = ["at_least_one"]


def at_least_one(text: str) -> int:
    """Parse a positive integer. argparse turns errors into a sentence that names the flag.

    Args:
        text: value of the flag.
    """
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}, the minimum is 1")
    return value
