"""Tests that the conformance suite finds broken connectors. Each connector of this file violates one rule."""

from __future__ import annotations

import msgspec
import pytest
import trio

from trioserve.connectors.loopback import LoopbackConnector, Offer, Reading
from trioserve.connectors.loopback import make_connector as make_loopback
from trioserve.contracts.events import FinishReason
from trioserve.contracts.kv_transfer import ConnectorSetup, HoldKind, Loaded, LoadFailed, Released
from trioserve.testing.connector_conformance import ConnectorConformance, PairConformance
from trioserve.testing.scripted_connector import NoConnector


class TestLoopback(PairConformance):
    factory = staticmethod(make_loopback)


class TestNone(ConnectorConformance):
    @staticmethod
    def factory(setup: ConnectorSetup) -> NoConnector:
        return NoConnector()

    test_unknown_option_of_a_connector_is_refused = None  # This connector accepts no options.


@pytest.mark.parametrize("suite", [TestLoopback, TestNone])
def test_connector_that_only_sees_aborts_ends_each_request(suite):
    """Scenario S06 of tests/README.md: the connector learns of the end of every request, also of requests that never
    ran.
    """
    suite().test_connector_accepts_the_end_of_requests_that_it_never_saw()


# --- connectors that violate a rule ---


class ReleasesTooEarly(LoopbackConnector):
    def note_reader(self, offer: Offer) -> None:
        self._report(Released(offer.request_id))


class ReleasesNever(LoopbackConnector):
    def release(self, offer: Offer) -> None:
        pass


class BelievesWhatItReads(LoopbackConnector):
    def release(self, offer: Offer) -> None:
        if offer.request_id in self._offers:
            super().release(offer)

    def copy_next(self, reading: Reading) -> bool:
        if reading.is_over:
            return False
        reading.offer.is_valid, was_valid = True, reading.offer.is_valid
        goes_on = super().copy_next(reading)
        reading.offer.is_valid = was_valid
        return goes_on


class IgnoresTheEndOfASend(LoopbackConnector):
    def hold_expired(self, request_id, kind) -> None:
        if kind is HoldKind.LOAD:
            super().hold_expired(request_id, kind)


class TalksOfASendThatExpired(LoopbackConnector):
    def _forget(self, request_id, kinds) -> None:
        if Released not in kinds:
            super()._forget(request_id, kinds)


class TalksOfALoadThatExpired(LoopbackConnector):
    def _forget(self, request_id, kinds) -> None:
        if LoadFailed not in kinds:
            super()._forget(request_id, kinds)


class WritesOn(LoopbackConnector):
    """Reports the end of an abandoned load, although its task continues."""

    def end(self, reading: Reading, event: Loaded | LoadFailed | None) -> None:
        super().end(reading, event)
        reading.is_over = False

    async def _read(self, reading: Reading) -> None:
        with trio.CancelScope(shield=True):
            while reading.offer.is_valid is not None and reading.block_count * 4 < reading.token_count:
                self._copy_block(reading)
                await trio.lowlevel.checkpoint()
        if reading.request_id in self._readings:
            self.end(reading, Loaded(reading.request_id, reading.token_count))


class WritesAfterTheEnd(LoopbackConnector):
    def end(self, reading: Reading, event: Loaded | LoadFailed | None) -> None:
        super().end(reading, event)
        if self._nursery is not None:
            self._nursery.start_soon(self._write_late, reading)

    async def _write_late(self, reading: Reading) -> None:
        await trio.sleep(1)
        self.pages.write(0, reading.block_table[0], 0, memoryview(b"late"))


class AbandonsInSilence(LoopbackConnector):
    def load_abandoned(self, request_id) -> None:
        reading = self._readings.get(request_id)
        if reading is not None:
            self.end(reading, None)


class AbandonsTwice(LoopbackConnector):
    def load_abandoned(self, request_id) -> None:
        super().load_abandoned(request_id)
        self._report(LoadFailed(request_id, "twice"))


class WritesWholeBlocks(LoopbackConnector):
    def _copy_block(self, reading: Reading) -> None:
        asked, reading.token_count = reading.token_count, 1000
        try:
            super()._copy_block(reading)
        finally:
            reading.token_count = asked


class ReadsFromTheFirstBlock(LoopbackConnector):
    def _copy_block(self, reading: Reading) -> None:
        blocks, size = reading.offer.blocks, self.pages.layout.block_size
        reading.offer.blocks = blocks[:1] * (reading.start // size) + blocks
        try:
            super()._copy_block(reading)
        finally:
            reading.offer.blocks = blocks


class WakesNobody(LoopbackConnector):
    def _report(self, event) -> None:
        self._events.append(event)


class TellsTwice(LoopbackConnector):
    def progress(self):
        return tuple(self._events)


class IgnoresAborts(LoopbackConnector):
    def request_aborted_after_finish(self, request_id) -> None:
        pass


class MatchesWithAPromise(LoopbackConnector):
    def num_matched_tokens(self, request, computed_count) -> int:
        count = super().num_matched_tokens(request, computed_count)
        if count > 0:
            connection, offer = self._find(request.kv_transfer)
            if offer is not None:
                connection.release(offer)
        return count


class AssertsOnAborts(LoopbackConnector):
    """Scenario S06 of tests/README.md: raises at the abort of a request that the connector does not know."""

    def request_finished(self, request, block_table, tokens, reason) -> bool:
        assert reason is not FinishReason.ABORT or block_table, f"{request.id} is unknown"
        return super().request_finished(request, block_table, tokens, reason)


class WaitsForSomebodyWhoIsGone(LoopbackConnector):
    def _report(self, event) -> None:
        if not (isinstance(event, LoadFailed) and "has no engine" in event.message):
            super()._report(event)


class LooksAtNoLayout(LoopbackConnector):
    def _objection(self, params, connection, offer, tokens):
        message = super()._objection(params, connection, offer, tokens)
        return None if message is not None and message.startswith("its KV ") else message


class LoadsMoreThanAsked(LoopbackConnector):
    def _report(self, event) -> None:
        is_loaded = isinstance(event, Loaded)
        super()._report(Loaded(event.request_id, event.token_count + 1) if is_loaded else event)


class LeavesATask(LoopbackConnector):
    async def run(self, *, task_status) -> None:
        trio.lowlevel.spawn_system_task(trio.sleep_forever)
        await super().run(task_status=task_status)


class TakesAnyOption(LoopbackConnector):
    def __init__(self, setup: ConnectorSetup) -> None:
        super().__init__(msgspec.structs.replace(setup, options={}))


def failures_of(factory) -> dict[str, Exception]:
    class Suite(PairConformance):
        pass

    Suite.factory = staticmethod(factory)
    failures = {}
    for name in dir(Suite):
        if name.startswith("test_"):
            try:
                getattr(Suite(), name)()
            except Exception as error:
                failures[name] = error
    return failures


BROKEN = {
    ReleasesTooEarly: "test_load_writes_the_held_kv_and_no_other_block",
    ReleasesNever: "test_send_ends_once_after_it_was_read",
    BelievesWhatItReads: "test_hold_that_expires_at_any_moment_transfers_no_bytes_of_other_requests",
    IgnoresTheEndOfASend: "test_load_of_blocks_that_are_no_longer_held_fails",
    TalksOfASendThatExpired: "test_connector_reports_nothing_about_an_expired_hold",
    TalksOfALoadThatExpired: "test_load_that_expires_at_any_moment_writes_and_reports_nothing_afterwards",
    WritesOn: "test_load_that_is_abandoned_at_any_moment_ends_once",
    WritesAfterTheEnd: "test_load_that_expires_after_it_was_abandoned_writes_nothing_afterwards",
    AbandonsInSilence: "test_load_that_is_abandoned_at_any_moment_ends_once",
    AbandonsTwice: "test_load_that_is_abandoned_at_any_moment_ends_once",
    WritesWholeBlocks: "test_load_writes_the_held_kv_and_no_other_block",
    ReadsFromTheFirstBlock: "test_load_writes_the_held_kv_and_no_other_block",
    WakesNobody: "test_send_ends_once_after_it_was_read",
    TellsTwice: "test_send_ends_once_after_it_was_read",
    IgnoresAborts: "test_abort_after_the_end_of_a_request_releases_its_blocks_once",
    MatchesWithAPromise: "test_matching_a_prompt_has_no_effect",
    AssertsOnAborts: "test_connector_accepts_the_end_of_requests_that_it_never_saw",
    WaitsForSomebodyWhoIsGone: "test_load_from_a_sender_that_has_ended_fails_in_time",
    LooksAtNoLayout: "test_kv_of_another_model_is_refused",
    LoadsMoreThanAsked: "test_load_writes_the_held_kv_and_no_other_block",
    LeavesATask: "test_progress_returns_each_event_once",
    TakesAnyOption: "test_unknown_option_of_a_connector_is_refused",
}


@pytest.mark.slow
@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_broken_connector_fails_the_conformance_suite(broken):
    failures = failures_of(broken)
    assert BROKEN[broken] in failures, f"not found, only {failures}"


@pytest.mark.slow
def test_correct_connector_passes_the_conformance_suite():
    assert failures_of(make_loopback) == {}
