"""What every test process needs before torch is imported."""

from __future__ import annotations

import os

# Threads of torch that wait for each other give a busy core back soon: on two cores with parallel work, tests would
# otherwise take several times as long. The server sets the same.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
