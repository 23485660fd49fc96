"""Tests of the limits in the engine's settings."""

from __future__ import annotations

import pytest

from trioserve.contracts.errors import StartupError
from trioserve.engine.settings import EngineSettings


@pytest.mark.parametrize(
    "setting",
    [
        {"waiting_requests_max": -1},
        {"drain_seconds_max": -0.5},
        {"drain_seconds_max": float("inf")},
        {"drain_seconds_max": float("nan")},
        {"grace_seconds_max": -1},
        {"grace_seconds_max": 86_401},
    ],
)
def test_error_names_the_engine_setting_out_of_range(setting):
    with pytest.raises(StartupError, match=next(iter(setting))):
        EngineSettings(**setting)


def test_zero_is_allowed_for_queue_limits_and_times():
    EngineSettings(waiting_requests_max=0, drain_seconds_max=0, grace_seconds_max=0)
