"""The program `python -m trioserve`."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the program. Signal handling is prepared first, because the import of the modules takes a moment."""
    try:
        from trioserve.commands.program_end import prepare_program

        prepare_program()
        from trioserve.cli import run_program
    except KeyboardInterrupt:
        sys.exit(130)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("trioserve"):
            raise
        sys.exit(
            f"trioserve: {error.name} is not installed in {sys.executable}: in a checkout, activate its environment "
            "with `. .venv/bin/activate`, or install trioserve into this Python"
        )
    run_program()


if __name__ == "__main__":
    main()
