"""What a flag of a measurement takes."""

from __future__ import annotations

import argparse

__all__ = ["at_least_one"]


def at_least_one(text: str) -> int:
    """For argparse, which turns ValueError and this into a sentence that names the flag."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}, it must be at least 1")
    return value
