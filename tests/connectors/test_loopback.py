"""Tests of the loopback connector besides the contract: its hub, its reports of active readers, and its holds."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

import msgspec
import pytest
import trio

from trioserve.connectors.loopback import LoopbackConnector, make_connector
from trioserve.contracts.errors import StartupError
from trioserve.contracts.events import FinishReason
from trioserve.contracts.ids import BlockIndex, RequestId
from trioserve.contracts.kv_transfer import (
    ConnectorSetup,
    HoldKind,
    Loaded,
    LoadFailed,
    Released,
    StillRead,
    TransferEvent,
)
from trioserve.contracts.request import KVTransferParams
from trioserve.testing.connector_conformance.side import SMALL_LAYOUT, MemoryPages, is_same, kv_of, make_request

TOKENS = tuple(range(20))  # The prompt fills five blocks.
WANTED = KVTransferParams(do_remote_decode=True)


class SlowPages(MemoryPages):
    """Cache whose writes take a number of seconds of a manual clock."""

    def __init__(self, clock: trio.testing.MockClock, seconds: float) -> None:
        super().__init__(32)
        self._clock, self._seconds = clock, seconds

    def write(self, layer: int, block: BlockIndex, start: int, content: memoryview) -> None:
        super().write(layer, block, start, content)
        self._clock.jump(self._seconds)


def setup(name: str, pages: MemoryPages | None = None, options: Mapping[str, object] | None = None) -> ConnectorSetup:
    pages = pages or MemoryPages(32)
    return ConnectorSetup(engine_id=name, role="both", pages=pages, options=options or {}, wake=lambda: None)


@asynccontextmanager
async def running(*setups: ConnectorSetup) -> AsyncIterator[list[LoopbackConnector]]:
    connectors = [make_connector(each) for each in setups]
    async with trio.open_nursery() as nursery:
        for connector in connectors:
            await nursery.start(connector.run)
        yield connectors
        nursery.cancel_scope.cancel()


def hold(connector: LoopbackConnector, name: str = "a", blocks: tuple[int, ...] = (0, 1, 2, 3, 4)) -> KVTransferParams:
    connector.pages.fill(blocks, 1)
    assert connector.request_finished(make_request(name, TOKENS, WANTED), blocks, TOKENS, FinishReason.LENGTH)
    params = connector.transfer_params(RequestId(name))
    assert params is not None
    return params


async def reports_of(
    connector: LoopbackConnector, until: Callable[[TransferEvent], bool] = lambda event: True
) -> list[TransferEvent]:
    seen: list[TransferEvent] = []
    while not any(until(event) for event in seen):
        await trio.testing.wait_all_tasks_blocked()
        seen += connector.progress()
    return seen


async def test_transfer_params_describe_the_hold_of_a_request():
    async with running(setup("p")) as (sender,):
        params = hold(sender)
        assert params == KVTransferParams(
            do_remote_prefill=True,
            remote_engine_id="p",
            remote_request_id="a",
            remote_block_ids=(0, 1, 2, 3, 4),
            remote_block_size=4,
            remote_num_tokens=20,
        )
        assert sender.transfer_params(RequestId("b")) is None


@pytest.mark.parametrize(
    ("params", "tokens", "reason", "holds"),
    [
        (WANTED, TOKENS, FinishReason.LENGTH, True),
        (WANTED, TOKENS, FinishReason.STOP, True),
        (WANTED, TOKENS, FinishReason.ABORT, False),
        (WANTED, TOKENS, FinishReason.DEADLINE, False),
        (WANTED, TOKENS, FinishReason.ERROR, False),
        (WANTED, (), FinishReason.LENGTH, False),
        (None, TOKENS, FinishReason.LENGTH, False),
        (KVTransferParams(), TOKENS, FinishReason.LENGTH, False),
    ],
)
async def test_blocks_are_held_if_the_request_asks_and_ends_normally(params, tokens, reason, holds):
    async with running(setup("p")) as (sender,):
        blocks = tuple(range(-(-len(tokens) // 4)))
        assert sender.request_finished(make_request("a", TOKENS, params), blocks, tokens, reason) is holds


async def test_engines_of_different_hubs_do_not_find_each_other():
    async with running(setup("p"), setup("d", options={"hub": "another"})) as (sender, reader):
        request = make_request("b", TOKENS, hold(sender))
        reader.start_load(request, (9, 10, 11, 12, 13), 0, 19)
        assert list(reader.progress()) == [LoadFailed("b", "the hub another has no engine p")]
        assert list(sender.progress()) == []


async def test_engine_id_is_unique_in_a_hub():
    async with running(setup("p")):
        with pytest.raises(StartupError, match="the hub default already has an engine p"):
            await make_connector(setup("p")).run(task_status=trio.TASK_STATUS_IGNORED)


async def test_hub_belongs_to_one_trio_program_and_forgets_ended_engines():
    async with running(setup("p")):
        pass
    async with running(setup("p")) as (sender,):
        assert hold(sender).remote_engine_id == "p"


async def test_kv_of_another_prompt_is_not_read():
    async with running(setup("p"), setup("d")) as (sender, reader):
        request = make_request("b", (*TOKENS[:-2], 99, 99), hold(sender))
        reader.start_load(request, (9, 10, 11, 12, 13), 0, 19)
        assert list(reader.progress()) == [LoadFailed("b", "a has another prompt")]
        assert list(sender.progress()) == [Released("a")], "no other reader is left"


async def test_load_of_more_tokens_than_held_fails():
    async with running(setup("p"), setup("d")) as (sender, reader):
        params = msgspec.structs.replace(hold(sender), remote_num_tokens=1000)
        request = make_request("b", (*TOKENS, 20, 21, 22), params)
        assert reader.num_matched_tokens(request, 0) == 23
        reader.start_load(request, (9, 10, 11, 12, 13, 14), 0, 22)
        assert isinstance(next(iter(reader.progress())), LoadFailed)


async def test_reader_extends_the_hold_while_it_waits_and_reads(autojump_clock):
    slow = SlowPages(autojump_clock, 0.75)  # A write of a block with two layers takes 1.5 s.
    async with running(setup("p"), setup("d", slow)) as (sender, reader):
        for index, name in enumerate(("a", "b")):
            params = hold(sender, name, tuple(range(index * 5, index * 5 + 5)))
            request = make_request(f"{name}-there", TOKENS, params)
            reader.start_load(request, tuple(range(20 + index * 5, 25 + index * 5)), 0, 19)
        signs: list[tuple[float, str]] = []
        released: dict[str, float] = {}
        while len(released) < 2:
            for event in sender.progress():
                if isinstance(event, StillRead):
                    signs.append((trio.current_time(), event.request_id))
                else:
                    released[event.request_id] = trio.current_time()
            await trio.lowlevel.checkpoint()
        assert abs(released["a"] - released["b"]) >= 4.5, "the loads run one after the other, 7.5 seconds each"
        for name in ("a", "b"):
            moments = [0.0, *(moment for moment, of in signs if of == name), released[name]]
            assert max(after - before for before, after in itertools.pairwise(moments)) < 10.0


async def test_repeated_reader_reports_do_not_accumulate(autojump_clock):
    async with running(setup("p"), setup("d", SlowPages(autojump_clock, 60.0))) as (sender, reader):
        reader.start_load(make_request("b", TOKENS, hold(sender)), (9, 10, 11, 12, 13), 0, 19)
        await reports_of(reader)
        assert list(sender.progress()) == [StillRead("a"), Released("a")]


@pytest.mark.parametrize("change", [{"block_size": 3}, {"block_size": 8, "dtype": "bfloat16"}, {"dtype": "float16"}])
async def test_blocks_and_dtype_are_converted_for_the_reader(change):
    there = MemoryPages(32, msgspec.structs.replace(SMALL_LAYOUT, **change))
    async with running(setup("p"), setup("d", there)) as (sender, reader):
        request, size = make_request("b", TOKENS, hold(sender)), there.layout.block_size
        reader.start_load(request, (9, 10, 11, 12, 13, 14, 15), size, 19 - size)
        assert Loaded("b", 19 - size) in await reports_of(reader)
        positions = range(size, 19)
        expected = kv_of(sender.pages, (0, 1, 2, 3, 4), positions)
        assert is_same(kv_of(there, (9, 10, 11, 12, 13, 14, 15), positions), expected, there.layout.dtype, "float32")
        assert any(byte for layer in expected for token in layer for byte in token)


async def test_transfer_counts_include_both_sides():
    async with running(setup("p"), setup("d")) as (sender, reader):
        reader.start_load(make_request("b", TOKENS, hold(sender)), (9, 10, 11, 12, 13), 0, 18)
        assert await reports_of(reader) == [Loaded("b", 18)]
        byte_count = 18 * 2 * sender.pages.layout.token_bytes
        assert reader.counts()["blocks_received_total"] == sender.counts()["blocks_sent_total"] == 5
        assert reader.counts()["bytes_received_total"] == sender.counts()["bytes_sent_total"] == byte_count
        assert (reader.counts()["loads_completed_total"], sender.counts()["sends_completed_total"]) == (1, 1)


async def test_every_end_of_a_transfer_is_counted_once():
    async with running(setup("p"), setup("d")) as (sender, reader):
        there = (9, 10, 11, 12, 13)
        hold(sender, "a")
        sender.request_aborted_after_finish(RequestId("a"))
        hold(sender, "b")
        sender.hold_expired(RequestId("b"), HoldKind.SEND)
        reader.request_finished(make_request("c-there", TOKENS, hold(sender, "c")), (), (), FinishReason.ABORT)
        request = make_request("d-there", TOKENS, hold(sender, "d"))
        reader.start_load(request, there, 0, 19)
        reader.load_abandoned(request.id)
        reader.start_load(request, there, 0, 19)  # This load fails, because the hold has ended.
        sends = {
            name: sender.counts()[f"sends_{name}_total"] for name in ("completed", "unwanted", "aborted", "expired")
        }
        assert sends == {"completed": 0, "unwanted": 2, "aborted": 1, "expired": 1}
        loads = {name: reader.counts()[f"loads_{name}_total"] for name in ("completed", "failed", "abandoned")}
        assert loads == {"completed": 0, "failed": 1, "abandoned": 1}


async def test_unwritable_cache_fails_one_load():
    class Broken(MemoryPages):
        def write(self, layer: int, block: BlockIndex, start: int, content: memoryview) -> None:
            raise OSError("the device is gone")

    async with running(setup("p"), setup("d", Broken(32))) as (sender, reader):
        reader.start_load(make_request("b", TOKENS, hold(sender)), (9, 10, 11, 12, 13), 0, 19)
        assert await reports_of(reader) == [LoadFailed("b", "copying a block raised OSError: the device is gone")]
        assert Released("a") in list(sender.progress())
