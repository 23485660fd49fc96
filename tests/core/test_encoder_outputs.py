"""Tests of encoder outputs. Random histories respect the limits and the order of claims, and faulty variants are
detected.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from trioserve.contracts.errors import InvalidRequest
from trioserve.core.encoder_outputs import EncoderOutputs, OutputClaim

BYTES_MAX = 10
NAMES = [bytes([index]) for index in range(8)]
SIZES = dict(zip(NAMES, (1, 2, 3, 4, 5, 2, 1, 7), strict=True))


def play(seed: int, make: Callable[[int], EncoderOutputs] = EncoderOutputs, events: int = 120) -> None:
    """Claim, encode and release outputs in random order, and compare the states with a simple model."""
    rng = random.Random(seed)
    outputs = make(BYTES_MAX)
    granted_order: list[OutputClaim] = []
    came: list[OutputClaim] = []
    live: list[OutputClaim] = []
    there: set[bytes] = set()  # Outputs that were claimed and encoded.
    for _ in range(events):
        choice = rng.random()
        if choice < 0.4:
            wanted = {name: SIZES[name] for name in rng.sample(NAMES, rng.randrange(1, 4))}
            box: list[OutputClaim] = []
            if sum(wanted.values()) > BYTES_MAX:
                with pytest.raises(InvalidRequest):
                    outputs.claim(wanted, lambda: None)
                continue
            claim = outputs.claim(wanted, lambda box=box: granted_order.append(box[0]))
            box.append(claim)
            came.append(claim)
            live.append(claim)
            if claim.is_granted:
                granted_order.append(claim)
        elif choice < 0.7 and live:
            claim = rng.choice(live)
            name = rng.choice(list(claim.wanted))
            outputs.put(name, name * 3)
            if claim.is_granted:
                there.add(name)
        elif live:
            claim = live.pop(rng.randrange(len(live)))
            # Outputs that no granted claim contains any more may be evicted.
            there &= {name for other in live if other.is_granted for name in other.wanted}
            outputs.release(claim)
            if rng.random() < 0.2:
                outputs.put(rng.choice(list(claim.wanted)), b"late")
        outputs.check()
        claimed = {name for claim in live if claim.is_granted for name in claim.wanted}
        assert outputs.claimed_bytes == sum(SIZES[name] for name in claimed), "the count of claims is wrong"
        for claim in live:
            for name in claim.wanted:
                values = outputs.values(name)
                if claim.is_granted and name in there:
                    assert values in (name * 3, b"late"), "a claimed output was evicted"
        waiting = [claim for claim in live if not claim.is_granted]
        assert outputs.waiting_count == len(waiting)
        order = [came.index(claim) for claim in granted_order]
        assert order == sorted(order), "a claim in the line was passed over"
        if waiting:
            new = sum(SIZES[name] for name in waiting[0].wanted if name not in claimed)
            assert outputs.claimed_bytes + new > BYTES_MAX, "the first claim in line fits, but waits"
    for claim in live[::-1]:
        outputs.release(claim)
    outputs.check()
    assert outputs.claimed_bytes == outputs.waiting_count == 0


@pytest.mark.parametrize("seed", range(60))
def test_random_histories_of_encoder_outputs_keep_the_rules(seed: int) -> None:
    play(seed)


class _KeepsExpected(EncoderOutputs):
    """A faulty variant that keeps expected outputs without claims."""

    def _release_output(self, name: bytes) -> None:
        output = self._outputs[name]
        if output.claim_count > 1 or output.values is not None:
            super()._release_output(name)
        else:
            output.claim_count = 0


class _ForgetsTheQueue(EncoderOutputs):
    """A faulty variant that grants no waiting claim after a release."""

    def release(self, claim: OutputClaim) -> None:
        line, self._queue = self._queue, type(self._queue)([claim] if claim in self._queue else ())
        super().release(claim)
        self._queue = type(line)(other for other in line if other is not claim)


class _EvictsUsed(EncoderOutputs):
    """A faulty variant that evicts outputs in use."""

    def _grant(self, claim: OutputClaim) -> bool:
        for name, output in list(self._outputs.items()):
            if name not in claim.wanted and self.bytes_total + sum(claim.wanted.values()) > self.bytes_max:
                self.bytes_total -= output.byte_count
                self._cached_bytes -= output.byte_count if name in self._cached else 0
                self._cached.pop(name, None)
                del self._outputs[name]
        return super()._grant(claim)


class _PassesOver(EncoderOutputs):
    """A faulty variant that grants a small claim before earlier claims in the queue."""

    def claim(self, wanted: dict[bytes, int], on_granted: Callable[[], None]) -> OutputClaim:
        line, self._queue = self._queue, type(self._queue)()
        claim = super().claim(wanted, on_granted)
        self._queue = line + self._queue
        return claim


class _NoBound(EncoderOutputs):
    """A faulty variant that ignores the limit of bytes."""

    def _grant(self, claim: OutputClaim) -> bool:
        self.bytes_max, bytes_max = 1000, self.bytes_max
        try:
            return super()._grant(claim)
        finally:
            self.bytes_max = bytes_max


@pytest.mark.parametrize("wrong", [_KeepsExpected, _ForgetsTheQueue, _EvictsUsed, _PassesOver, _NoBound])
def test_faulty_variant_of_the_encoder_outputs_is_detected(wrong: type[EncoderOutputs]) -> None:
    with pytest.raises((AssertionError, KeyError)):
        for seed in range(60):
            play(seed, wrong)


def test_second_release_of_an_encoder_output_claim_is_refused() -> None:
    outputs = EncoderOutputs(BYTES_MAX)
    claim = outputs.claim({b"a": 3}, lambda: None)
    outputs.release(claim)
    with pytest.raises(AssertionError, match="twice"):
        outputs.release(claim)
