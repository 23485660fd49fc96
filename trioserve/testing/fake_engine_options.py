"""Helpers for the options of all fake engines: names in error messages, and seeds that are equal in every run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

import trio

from trioserve.contracts.errors import StartupError

__all__ = ["next_own_seed", "options_named"]

OPTION_OF = {
    "context_tokens_max": "max_model_len",
    "step_tokens_max": "max_num_batched_tokens",
    "step_seconds_max": "step_timeout",
    "restarts_max": "engine_restarts",
    "waiting_requests_max": "max_queued_requests",
    "waiting_prompt_tokens_max": "max_queued_tokens",
    "waiting_seconds_max": "max_queue_wait",
    "draft_tokens_max": "speculative_ngram",
    "state_slot_count": "state_slots",
    "snapshot_slot_count": "snapshot_slots",
    "hold_seconds_max": "kv_hold_timeout",
    "remote_kv_seconds_max": "kv_load_timeout",
    "held_share_max": "kv_held_share",
    "load_failure_policy": "kv_load_failure_policy",
    "slot_count": "max_num_seqs",
    "kept_slot_count": "kept_slots",
}
"""The kit's option for each field of the engine's settings."""

_SETTING = re.compile(rf"\b({'|'.join(OPTION_OF)})\b")
_FLAG = re.compile(r"--([a-z][a-z-]*)")


@contextmanager
def options_named() -> Iterator[None]:
    """Replace flags and names of settings in a StartupError by the names of the test kit's options."""
    try:
        yield
    except StartupError as error:
        message = _SETTING.sub(lambda found: OPTION_OF[found[0]], str(error))
        message = _FLAG.sub(lambda found: found[1].replace("-", "_"), message)
        raise StartupError(message.replace("give the KV cache more memory", "raise block_count")) from None


_COUNTS: trio.lowlevel.RunVar[count[int]] = trio.lowlevel.RunVar("trioserve.testing.fake_engine_options")


def next_own_seed() -> int:
    """Return a number that no other engine of this Trio run has, so that two engines draw different seeds."""
    try:
        counter = _COUNTS.get()
    except LookupError:
        _COUNTS.set(counter := count())
    return next(counter)
