"""Tests random histories in which an operator pauses, resumes, sleeps and wakes the engine, while requests arrive and
end.
"""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

import pytest
import trio

from tests.engine.test_pausing import Reader, undisturbed
from trioserve.contracts.events import FinishReason
from trioserve.testing.fake_engine import FakeEngine, open_fake_engine

SEEDS = range(40)
PROMPTS = ("a", "two blocks of it", "two blocks of it, and more", "another")
KINDS: list[dict[str, Any]] = [
    {},
    {"overlap_steps": True},
    {"speculative_ngram": 3},
    {"block_count": 33, "max_num_seqs": 3},
]
SECONDS_MAX = 1000.0  # Seconds of Trio's clock. Only a test that hangs takes longer.


class Operator:
    """Performs one operation after the other, and checks that no step begins during a pause. One of four callers is
    cancelled early.
    """

    def __init__(self, fake: FakeEngine, rng: Random) -> None:
        self._fake = fake
        self._rng = rng

    async def work(self) -> None:
        fake, rng = self._fake, self._rng
        for _ in range(8):
            await trio.sleep(rng.uniform(0, 0.15))
            act = rng.choice((fake.pause_generation, fake.pause_generation, self._sleep, fake.wake_up, self._resume))
            if act is fake.pause_generation:
                mode = rng.choice(("abort", "wait", "keep", "keep", "retract"))
                act = partial(fake.pause_generation, mode, clear_cache=rng.random() < 0.3)
            patience = rng.choice((100.0, 100.0, 100.0, rng.uniform(0, 0.05)))
            with trio.move_on_after(patience) as scope:
                await act()
            assert patience < 1 or not scope.cancelled_caught, "it never comes to an end"
            await self._look()
        await fake.wake_up()
        fake.resume_generation()

    async def _sleep(self) -> None:
        await self._fake.sleep(self._rng.choice((1, 2)), self._rng.choice(("abort", "wait", "keep")))

    async def _resume(self) -> None:
        self._fake.resume_generation()

    async def _look(self) -> None:
        """Check that no step begins. No other task resumes the engine during the check."""
        fake = self._fake
        if not fake.is_paused or fake.core.flights:
            return
        core, steps = fake.core, fake.stats().steps_total
        await trio.sleep(self._rng.uniform(0, 0.1))
        assert fake.core is not core or fake.stats().steps_total == steps, "a step began in a pause"


async def read(fake: FakeEngine, reader: Reader, prompt: str, begins: float, stays: float) -> None:
    await trio.sleep(begins)
    with trio.move_on_after(stays):
        await reader.read(fake, prompt)


@pytest.mark.parametrize("seed", SEEDS)
async def test_history_of_pauses_keeps_tokens_right_and_frees_every_block(autojump_clock: object, seed: int) -> None:
    rng = Random(seed)
    options = KINDS[seed % len(KINDS)]
    readers: list[tuple[str, bool, Reader]] = []
    expected = {prompt: await undisturbed(prompt, **options) for prompt in PROMPTS}
    async with open_fake_engine(step_seconds=0.01, opening_seconds=0.05, **options) as fake:
        with trio.fail_after(SECONDS_MAX):
            async with trio.open_nursery() as nursery:
                for _ in range(8):
                    prompt, leaves, reader = rng.choice(PROMPTS), rng.random() < 0.3, Reader()
                    readers.append((prompt, leaves, reader))
                    stays = rng.uniform(0, 0.5) if leaves else 10 * SECONDS_MAX
                    nursery.start_soon(read, fake, reader, prompt, rng.uniform(0, 0.8), stays)
                nursery.start_soon(Operator(fake, rng).work)
        await trio.sleep(1)  # The last request that left may still be in a step.
        assert fake.ready
        fake.assert_all_free()
    for prompt, leaves, reader in readers:
        assert reader.error is None
        assert reader.token_ids == expected[prompt][: len(reader.token_ids)]
        if not leaves:
            assert reader.end in {(FinishReason.LENGTH, None), (FinishReason.ABORT, "paused")}
            assert reader.end[0] is FinishReason.ABORT or len(reader.token_ids) == len(expected[prompt])
