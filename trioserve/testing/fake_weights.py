"""Weights and options of fake engines. The weights are a number that changes every token. A sleep frees no memory.

Seeds of requests are equal in every run.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Generic, TypeVar

import trio

from trioserve.contracts.errors import InvalidRequest, ModelLoadError, StartupError
from trioserve.contracts.weights import BroadcastWeights, ReplacementState, SharedWeights, WeightGroup, WeightSource
from trioserve.testing.fake_executor import FakeExecutor

__all__ = ["FakeCacheRelease", "FakeWeightTarget", "next_own_seed", "options_named"]


PartsT = TypeVar("PartsT")


class FakeCacheRelease(Generic[PartsT]):
    """Frees no memory when the engine sleeps, because the engine has no weights.

    Args:
        make_again: creates the parts of the engine when it wakes up.
    """

    def __init__(self, make_again: Callable[[], Awaitable[PartsT]]) -> None:
        self._make_again = make_again

    async def release_cache(self) -> None:
        await trio.lowlevel.checkpoint()

    async def limit_blocks(self, count: int) -> None:
        await trio.lowlevel.checkpoint()

    async def rebuild_parts(self) -> PartsT:
        return await self._make_again()


class FakeWeightTarget:
    """A WeightTarget of an engine without weights. Each source has different weights. A source with "missing" in its
    name is refused.

    Attributes:
        seconds: seconds that a write of new weights takes.
        breaks: if True, the next replacement fails after a part of the weights was written.
        groups: names of the joined groups.
    """

    def __init__(self) -> None:
        self._number = 0
        self._executor: FakeExecutor | None = None
        self.seconds = 0.0
        self.breaks = False
        self.groups: set[str] = set()

    def attach(self, executor: FakeExecutor) -> None:
        """Make an executor compute with the current weights. They stay the same after a restart of the engine.

        Args:
            executor: executor of the restarted engine.
        """
        self._executor = executor
        executor.use_weights(self._number)

    async def check(self, source: WeightSource) -> _FakeReplacement:
        await trio.lowlevel.checkpoint()
        if isinstance(source, BroadcastWeights):
            source = f"sent {source.names}"
        name = source.name if isinstance(source, SharedWeights) else source
        if "missing" in name:
            raise InvalidRequest(f"cannot load {name}: names with 'missing' are refused", param="model_path")
        return _FakeReplacement(self, zlib.crc32(name.encode()))

    async def join_group(self, group: WeightGroup) -> None:
        """Join a group at once. All other members count as present."""
        await trio.lowlevel.checkpoint()
        self.groups.add(group.group_name)

    async def leave_group(self, name: str) -> None:
        await trio.lowlevel.checkpoint()
        if name not in self.groups:
            raise InvalidRequest(f"no group {name} was joined", param="group_name")
        self.groups.remove(name)

    def write(self, number: int) -> None:
        assert self._executor is not None, "weights were written before an executor was attached"
        self._number = number
        self._executor.use_weights(number)


class _FakeReplacement:
    def __init__(self, place: FakeWeightTarget, number: int) -> None:
        self._place = place
        self._number = number
        self.state = ReplacementState.CHECKED

    async def replace(self) -> None:
        self.state = ReplacementState.BEGUN
        breaks, self._place.breaks = self._place.breaks, False
        with trio.CancelScope(shield=True):  # A real write runs in a thread, so a cancel must not interrupt this wait.
            await trio.sleep(self._place.seconds)
        if breaks:
            raise ModelLoadError("a test made this replacement fail")
        self._place.write(self._number)
        self.state = ReplacementState.WHOLE
        await trio.lowlevel.checkpoint_if_cancelled()


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


_COUNTS: trio.lowlevel.RunVar[count[int]] = trio.lowlevel.RunVar("trioserve.testing.fake_weights")


def next_own_seed() -> int:
    """Return a number that no other engine of this Trio run has, so that two engines draw different seeds."""
    try:
        counter = _COUNTS.get()
    except LookupError:
        _COUNTS.set(counter := count())
    return next(counter)
