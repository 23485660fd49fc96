"""python -m trioserve"""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """The whole program. Signals are prepared for before the modules are loaded, which takes a moment."""
    try:
        from trioserve.commands.program_end import prepare_program

        prepare_program()
        from trioserve.cli import run_program
    except KeyboardInterrupt:
        sys.exit(130)
    run_program()


if __name__ == "__main__":
    main()
