"""What every test process needs before torch and any test is imported."""

from __future__ import annotations

import os

import hypothesis

# Threads of torch that wait for each other give a busy core back soon: on two cores with parallel work, tests would
# otherwise take several times as long. The server sets the same.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# How long an example takes says how busy the machine is.
hypothesis.settings.register_profile("untimed", hypothesis.settings.default, deadline=None)
hypothesis.settings.load_profile("untimed")
