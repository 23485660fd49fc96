"""python -m trioserve"""

from __future__ import annotations

from trioserve.cli import run_program

if __name__ == "__main__":
    run_program()
