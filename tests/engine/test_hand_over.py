"""Tests of requests that are handed over to another engine. The last delta follows all delivered tokens, and the KV is
held and released once.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.events import AbortOutcome, FinishReason, HandOverOutcome
from trioserve.contracts.output import Delta
from trioserve.contracts.sampling import SamplingParams
from trioserve.engine.request_stream import RequestStream
from trioserve.testing.fake_engine import FakeEngine, open_fake_engine
from trioserve.testing.memory_server import open_memory_server
from trioserve.testing.scripted_connector import ScriptedConnector

PROMPT = "a prompt of some blocks"
LONG = SamplingParams(max_tokens=40, temperature=1.0, seed=3)


async def rest_of(stream: RequestStream) -> list[Delta]:
    return [delta async for delta in stream]


def handed_over(fake: FakeEngine, request_id: str = "r") -> HandOverOutcome:
    return fake.hand_over(request_id)[request_id]


@pytest.mark.parametrize("in_step", [False, True])
@pytest.mark.parametrize("options", [{}, {"overlap_steps": True}], ids=str)
async def test_blocks_of_a_handed_over_request_outlive_its_scope_until_released_once(autojump_clock, in_step, options):
    async with open_fake_engine(connector=ScriptedConnector, step_seconds=0.01, **options) as fake:
        async with fake.generate(PROMPT, LONG, request_id="r", resumable=True) as stream:
            await trio.sleep(0.045 if in_step else 0.04)
            assert handed_over(fake) is HandOverOutcome.HANDED_OVER
            assert handed_over(fake) is HandOverOutcome.HANDED_OVER, "it is on its way"
            *_, last = await rest_of(stream)
            assert last.finish_reason is FinishReason.HANDED_OVER
            assert last.kv_transfer is not None
            assert last.kv_transfer.do_remote_prefill
            assert last.kv_transfer.remote_request_id in fake.connector.sends
            told = sum(len(tokens) for tokens in stream.resume_state().token_ids)
        assert fake.stats().blocks_held > 0
        [send] = fake.connector.sends.values()
        assert len(send.tokens) >= len(PROMPT) + told - 1, "all that was told is there, but for the last token"
        assert fake.connector.calls["request_aborted_after_finish"] == 0
        fake.connector.release_all()
        await wait_all_tasks_blocked()
        fake.assert_all_free()
        fake.connector.check()


async def test_hold_of_a_handed_over_request_ends_at_its_timeout_if_no_engine_reads(autojump_clock):
    async with open_fake_engine(connector=ScriptedConnector, step_seconds=0.01, kv_hold_timeout=7.0) as fake:
        async with fake.generate(PROMPT, LONG, request_id="r", resumable=True) as stream:
            await trio.sleep(0.04)
            handed_over(fake)
            await rest_of(stream)
        await trio.sleep(6.5)
        assert fake.stats().blocks_held > 0
        await trio.sleep(1.0)
        assert fake.stats().blocks_held == 0
        fake.assert_all_free()


async def test_abort_by_id_ends_the_hold_of_a_handed_over_request(autojump_clock):
    async with open_fake_engine(connector=ScriptedConnector, step_seconds=0.01) as fake:
        async with fake.generate(PROMPT, LONG, request_id="r", resumable=True) as stream:
            await trio.sleep(0.04)
            handed_over(fake)
            await rest_of(stream)
        assert fake.abort("r") == {"r": AbortOutcome.ALREADY_FINISHED}
        assert fake.connector.calls["request_aborted_after_finish"] == 1
        fake.connector.release_all()
        await wait_all_tasks_blocked()
        fake.assert_all_free()


async def test_hand_over_without_a_connector_ends_the_request_without_a_hold(autojump_clock):
    async with open_fake_engine(step_seconds=0.01) as fake:
        async with fake.generate(PROMPT, LONG, request_id="r", resumable=True) as stream:
            await trio.sleep(0.045)
            assert handed_over(fake) is HandOverOutcome.HANDED_OVER
            *_, last = await rest_of(stream)
            assert (last.finish_reason, last.kv_transfer) == (FinishReason.HANDED_OVER, None)
            state = stream.resume_state()
            assert state.finished == (False,)
        fake.assert_all_free()
        async with fake.generate(PROMPT, LONG, resume=state) as stream:
            resumed = [token for delta in await rest_of(stream) for token in delta.token_ids]
        async with fake.generate(PROMPT, LONG) as stream:
            whole = [token for delta in await rest_of(stream) for token in delta.token_ids]
        assert [*state.token_ids[0], *resumed] == whole


async def test_last_delta_of_one_choice_reports_the_hand_over_for_all_choices(autojump_clock):
    sampling = SamplingParams(max_tokens=40, temperature=1.0, seed=3, n=3)
    async with open_fake_engine(connector=ScriptedConnector, step_seconds=0.01) as fake:
        async with fake.generate(PROMPT, sampling, request_id="r", resumable=True) as stream:
            await trio.sleep(0.045)
            handed_over(fake)
            deltas = await rest_of(stream)
            ends = [(delta.index, delta.finish_reason) for delta in deltas if delta.finish_reason is not None]
            assert ends == [(0, FinishReason.HANDED_OVER)]
        assert len(fake.connector.sends) == 1
        fake.connector.release_all()
        await wait_all_tasks_blocked()
        fake.assert_all_free()


async def test_hold_of_a_hand_over_ends_if_the_reader_leaves_before_the_last_delta(autojump_clock):
    async with open_fake_engine(connector=ScriptedConnector, step_seconds=0.01) as fake:
        async with fake.generate(PROMPT, LONG, request_id="r", resumable=True):
            await trio.sleep(0.045)
            handed_over(fake)
        await trio.sleep(0.1)
        assert all(send.is_aborted for send in fake.connector.sends.values())
        fake.connector.release_all()
        await wait_all_tasks_blocked()
        fake.assert_all_free()


async def test_requests_that_cannot_be_resumed_are_not_handed_over(autojump_clock):
    async with open_fake_engine(step_seconds=0.01, max_num_seqs=1) as fake:
        assert handed_over(fake) is HandOverOutcome.UNKNOWN
        async with fake.generate(PROMPT, LONG, request_id="r", owner="mine"):
            await trio.sleep(0.045)
            assert handed_over(fake) is HandOverOutcome.NOT_POSSIBLE, "not made resumable"
            assert fake.hand_over("r", owner="yours") == {"r": HandOverOutcome.UNKNOWN}
            with pytest.raises(InvalidRequest):
                fake.hand_over([1])
        await trio.sleep(0.1)
        fake.assert_all_free()


async def test_request_is_handed_over_without_kv_if_the_engine_breaks(autojump_clock):
    sampling = SamplingParams(max_tokens=40, temperature=1.0, seed=3, n=3)
    async with open_fake_engine(connector=ScriptedConnector, step_seconds=0.01, engine_restarts=1) as fake:
        async with fake.generate(PROMPT, sampling, request_id="r", resumable=True) as stream:
            await trio.sleep(0.045)
            handed_over(fake)
            fake.break_next_step()
            *_, last = await rest_of(stream)
            assert (last.finish_reason, last.kv_transfer) == (FinishReason.HANDED_OVER, None)
        await wait_all_tasks_blocked()
        fake.assert_all_free()


async def groups_of(server: Any, body: dict[str, object]) -> tuple[int, dict[str, str], list[str]]:
    response = await server.client().post(
        "/v1/chat/completions", body, headers={"x-request-id": "r/1", "x-trioserve-resumable": "1"}
    )
    return response.status, response.headers, (await response.read()).decode().split("\n\n")


async def test_request_with_several_prompts_is_handed_over_without_kv(autojump_clock):
    body = {"prompt": [PROMPT, "another one of some blocks"], "max_tokens": 60, "stream": True, "seed": 1}
    async with open_memory_server(connector=ScriptedConnector, step_seconds=0.01, block_count=200) as server:
        asked = {"x-request-id": "r", "x-trioserve-resumable": "1"}
        async with server.client().ask("/v1/completions", body, headers=asked) as response:
            await trio.sleep(0.155)
            assert (await server.client().post("/v1/requests/r/hand-over", {})).status == 200
            *_, last, _ = (await response.read()).split(b"\n\n")
        assert last == b'data: {"object":"hand_over","kv_transfer_params":null}\nid: >'
        server.engine.connector.release_all()
        await wait_all_tasks_blocked()
        assert all(send.is_aborted for send in server.engine.connector.sends.values())
        server.engine.assert_all_free()


async def test_http_stream_ends_with_a_group_that_reports_the_hand_over(autojump_clock):
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 60, "stream": True, "seed": 1}
    async with open_memory_server(
        connector=ScriptedConnector, step_seconds=0.01, block_count=200, max_model_len=400
    ) as server:
        found: list[tuple[int, dict[str, str], list[str]]] = []
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                found.append(await groups_of(server, body))

            nursery.start_soon(ask)
            await trio.sleep(0.155)
            response = await server.client().post("/v1/requests/r%2F1/hand-over", {})
            assert response.status == 200, await response.read()
            assert await response.json() == {"id": "r/1", "object": "request.hand_over", "result": "handed_over"}
        [(status, _, groups)] = found
        assert status == 200
        assert groups[-1] == ""
        event, id_line = groups[-2].split("\n")
        assert id_line == "id: >"
        said = json.loads(event.removeprefix("data: "))
        assert said["object"] == "hand_over"
        assert said["kv_transfer_params"]["do_remote_prefill"]
        assert "[DONE]" not in "".join(groups)
        assert server.engine.stats().blocks_held > 0
        response = await server.client().post("/v1/requests/r%2F1/hand-over", {})
        assert response.status == 404
        server.engine.connector.release_all()
        await wait_all_tasks_blocked()
        server.engine.assert_all_free()


@pytest.mark.parametrize("in_step", [False, True])
@pytest.mark.parametrize("options", [{}, {"overlap_steps": True}], ids=str)
async def test_abort_all_hands_over_resumable_requests(autojump_clock, in_step, options):
    """abort_all is called twice, as by a server that has its own router. The second call has no effect."""
    async with (
        open_fake_engine(connector=ScriptedConnector, step_seconds=0.01, **options) as fake,
        fake.generate(PROMPT, LONG, request_id="r", resumable=True) as stream,
        fake.generate("another one", LONG, request_id="s") as other,
        fake.generate(PROMPT, LONG, request_id="t", resumable=True) as before,
    ):
        await trio.sleep(0.045 if in_step else 0.04)
        handed_over(fake, "t")
        fake.drain()
        for _ in range(2):
            fake.abort_all("it leaves", hands_over=True)
        ends = [(await rest_of(each))[-1] for each in (stream, other, before)]
        reasons = [end.finish_reason for end in ends]
        assert reasons == [FinishReason.HANDED_OVER, FinishReason.ABORT, FinishReason.HANDED_OVER]
        assert ends[1].message == "it leaves"
        params = [end.kv_transfer.remote_request_id for end in ends if end.kv_transfer is not None]
        assert sorted(params) == sorted(fake.connector.sends)
        assert fake.stats().blocks_used == 0
        held = {block for id in fake.connector.sends for block in fake.core.hold_of(id).blocks}
        assert fake.stats().blocks_held == len(held) >= 7
        fake.abort_all("it leaves", hands_over=True)
        assert not any(send.is_aborted for send in fake.connector.sends.values())
        fake.connector.release_all()
        await wait_all_tasks_blocked()
        assert fake.stats().blocks_held == 0
    fake.connector.check()


async def test_closed_engine_holds_no_blocks(autojump_clock):
    async with open_fake_engine(connector=ScriptedConnector, step_seconds=0.01) as fake:
        async with fake.generate(PROMPT, LONG, request_id="r", resumable=True) as stream:
            await trio.sleep(0.04)
            fake.abort_all("it leaves", hands_over=True)
            await rest_of(stream)
        assert fake.stats().blocks_held > 0
        fake.abort_all("it is over")
        assert all(send.is_aborted for send in fake.connector.sends.values())
        fake.connector.release_all()
        await wait_all_tasks_blocked()
        fake.assert_all_free()


@pytest.mark.parametrize("options", [{}, {"connector": ScriptedConnector, "step_timeout": 0.5}], ids=["alone", "hung"])
async def test_abort_all_aborts_requests_without_a_connector_or_in_a_hanging_step(autojump_clock, options):
    """Without a connector, a hand-over has no advantage over an abort. During a hanging step, it would be reported too
    late.
    """
    async with (
        open_fake_engine(step_seconds=0.01, **options) as fake,
        fake.generate(PROMPT, LONG, resumable=True) as stream,
    ):
        await trio.sleep(0.04)
        if options:
            async with fake.held_step():
                await trio.sleep(1)
                fake.abort_all("it leaves", hands_over=True)
        else:
            fake.abort_all("it leaves", hands_over=True)
        last = (await rest_of(stream))[-1]
        assert (last.finish_reason, last.stop_reason) == (FinishReason.ABORT, "server_stopping")
    fake.assert_all_free()
