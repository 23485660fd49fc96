"""python -m trioserve"""

from __future__ import annotations

import sys

from trioserve.cli import main

if __name__ == "__main__":
    sys.exit(main())
