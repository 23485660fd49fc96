"""python -m trioserve"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    try:
        from trioserve.cli import run_program
    except KeyboardInterrupt:  # while modules are loaded
        sys.exit(130)
    run_program()
