"""Tests `kv_transfer_params` in bodies and responses, with vLLM's fields and positions."""

from __future__ import annotations

from contextlib import asynccontextmanager

import msgspec
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.api.openai import response_types as responses
from trioserve.contracts.request import KVTransferParams
from trioserve.testing.fake_engine import open_fake_engine
from trioserve.testing.scripted_connector import ScriptedConnector

HOLD = {"do_remote_decode": True}
LOAD = {"do_remote_prefill": True}


@asynccontextmanager
async def opened(make_api, **options):
    async with open_fake_engine(connector=ScriptedConnector, **options) as fake:
        api = make_api()
        api.engine = fake
        yield api, fake
        fake.connector.release_all()
        await wait_all_tasks_blocked()
        fake.assert_all_free()


@pytest.mark.parametrize(
    ("ask", "kind"), [("chat", responses.ChatCompletion), ("complete", responses.Completion)], ids=["chat", "text"]
)
async def test_a_whole_response_has_kv_transfer_params_at_the_top_level(ask, kind, make_api, autojump_clock):
    async with opened(make_api) as (api, fake):
        exchange = await getattr(api, ask)(max_tokens=1, kv_transfer_params=HOLD)
        response = msgspec.json.decode(exchange.data, type=kind)
        [request_id] = fake.connector.sends
        assert response.kv_transfer_params == KVTransferParams(do_remote_prefill=True, remote_request_id=request_id)
        assert exchange.json()["kv_transfer_params"] == {"do_remote_prefill": True, "remote_request_id": request_id}


@pytest.mark.parametrize(
    ("ask", "kind"), [("chat", responses.ChatCompletionChunk), ("complete", responses.Completion)], ids=["chat", "text"]
)
async def test_a_stream_has_kv_transfer_params_with_the_finish_reason(ask, kind, make_api, autojump_clock):
    async with opened(make_api, kv_hold_timeout=3.0) as (api, _):
        exchange = await getattr(api, ask)(
            max_tokens=3, kv_transfer_params=HOLD, stream=True, stream_options={"include_usage": True}
        )
        *chunks, done = exchange.events()
        assert done == "[DONE]"
        for chunk in chunks:
            read = msgspec.convert(chunk, kind)
            ends = any(choice.finish_reason is not None for choice in read.choices)
            assert isinstance(read.kv_transfer_params, KVTransferParams) == ends
        assert trio.current_time() == pytest.approx(3.0)  # The server sent [DONE] after the held blocks were released.


@pytest.mark.parametrize("ask", ["chat", "complete"])
@pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": False}, {"a_field_of_tomorrow": 1}])
async def test_response_has_kv_transfer_params_only_if_the_request_has_them(ask, params, make_api, autojump_clock):
    async with opened(make_api) as (api, fake):
        exchange = await getattr(api, ask)(max_tokens=1, kv_transfer_params=params)
        assert "kv_transfer_params" not in exchange.json()
        assert not fake.connector.sends


async def test_params_of_a_prefill_response_are_accepted_unchanged(make_api, autojump_clock):
    given = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "e",
        "remote_request_id": "cmpl-1",
        "remote_block_ids": [[3, 4], [5]],
        "remote_host": "10.0.0.1",
        "remote_port": 5600,
        "tp_size": 1,
    }
    async with opened(make_api) as (api, fake), trio.open_nursery() as nursery:
        nursery.start_soon(lambda: api.complete(max_tokens=1, kv_transfer_params=given))
        await wait_all_tasks_blocked()
        [load] = fake.connector.loads.values()
        assert load.request.kv_transfer == KVTransferParams(
            do_remote_prefill=True,
            remote_engine_id="e",
            remote_request_id="cmpl-1",
            remote_block_ids=((3, 4), (5,)),
            remote_host="10.0.0.1",
            remote_port=5600,
        )
        fake.connector.load_all()


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"kv_transfer_params": HOLD, "n": 2}, "n", "must be 1"),
        ({"kv_transfer_params": HOLD, "prompt": ["a", "b"]}, "kv_transfer_params", "one by one"),
        ({"kv_transfer_params": {"remote_port": "a"}}, "kv_transfer_params.remote_port", "int"),
        ({"kv_transfer_params": 7}, "kv_transfer_params", "object"),
    ],
)
async def test_invalid_kv_transfer_params_are_refused(fields, param, says, make_api, autojump_clock):
    async with opened(make_api) as (api, _):
        exchange = await api.complete(**fields)
        assert exchange.status == 400
        assert exchange.json()["error"]["param"] == param
        assert says in exchange.json()["error"]["message"]


@pytest.mark.parametrize("params", [HOLD, LOAD])
async def test_a_server_without_a_connector_refuses_kv_transfer_params(params, make_api, autojump_clock):
    async with open_fake_engine() as fake:
        api = make_api()
        api.engine = fake
        exchange = await api.complete(kv_transfer_params=params)
        assert (exchange.status, exchange.json()["error"]["param"]) == (400, "kv_transfer_params")
        assert "--kv-transfer-config" in exchange.json()["error"]["message"]


async def test_load_report_of_an_engine_with_a_connector_has_its_role(make_api, autojump_clock):
    async with opened(make_api, role="prefill") as (api, _):
        assert (await api.context("GET", "/load")).json()["role"] == "prefill"
    async with open_fake_engine() as fake:
        api = make_api()
        api.engine = fake
        assert "role" not in (await api.context("GET", "/load")).json()


async def test_a_client_that_leaves_during_the_response_releases_held_blocks(make_api, autojump_clock):
    """Without the response, no other engine can know how to fetch the blocks."""
    async with opened(make_api) as (api, fake), trio.open_nursery() as nursery:
        body = {"prompt": "x", "max_tokens": 1, "kv_transfer_params": HOLD}
        exchange = api.exchange("POST", "/v1/completions", body)
        exchange.gate = trio.Event()
        nursery.start_soon(api.app, exchange)
        await exchange.head_sent.wait()
        await wait_all_tasks_blocked()
        assert fake.stats().blocks_held > 0
        nursery.cancel_scope.cancel()
    assert fake.connector.calls["request_aborted_after_finish"] == 1
