"""Tests of the spans for requests to a server, to a router with two servers, and to a prefill-decode pair."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.contracts.sampling import SamplingParams
from trioserve.proxy.router_context import RoutingRules
from trioserve.testing.memory_router import open_memory_router, open_scripted_endpoints
from trioserve.testing.memory_server import open_memory_server
from trioserve.testing.scripted_connector import ScriptedConnector

PATH = "/v1/completions"
CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
SECRET = "xyzzy"
SERVER, CLIENT, INTERNAL = 2, 3, 1


def body(**fields: object) -> dict[str, object]:
    return {"prompt": SECRET * 8, "max_tokens": 4, "temperature": 0.5, "ignore_eos": True, **fields}


async def test_request_of_a_server_is_one_span_with_its_phases_as_events(collector, otel, autojump_clock):
    async with open_memory_server(tracer=otel.tracer, step_seconds=1) as server:
        headers = {"traceparent": CALLER, "tracestate": "vendor=1", "x-request-id": "mine"}
        await server.client().post(PATH, body(stop=["plugh"]), headers=headers)
        await server.assert_all_free()
    otel.close()
    served = collector.one(f"POST {PATH}")
    assert (served.kind, served.parent_id, served.trace_id) == (SERVER, CALLER[36:52], CALLER[3:35])
    assert served.state == "vendor=1"
    assert served.attributes["http.response.status_code"] == 200
    assert served.attributes["trioserve.request.id"] == "mine"
    generated = collector.one("text_completion fake", parent=served)
    assert generated.kind == INTERNAL
    assert generated.events == ["queue", "tokenize", "prefill", "first_token", "decode", "free"]
    assert collector.children(generated) == ["queue", "tokenize", "wait", "prefill", "decode"]
    assert generated.attributes | {} == generated.attributes | {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "trioserve",
        "gen_ai.request.model": "fake",
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.usage.input_tokens": len(SECRET) * 8,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.response.finish_reasons": ["length"],
    }
    assert not generated.is_error
    assert SECRET.encode() not in collector.raw
    assert b"plugh" not in collector.raw
    assert collector.paths == ["/v1/traces"]
    assert collector.resource["service.name"] == "trioserve"
    assert otel.counts() == (len(collector.spans), 0, 0)


@pytest.mark.parametrize("steps", [0, 1, 3])
async def test_span_of_a_cancelled_running_request_ends_with_the_events_cancel_and_free(
    collector, otel, steps, autojump_clock
):
    async with open_memory_server(tracer=otel.tracer, step_seconds=1) as server:
        with trio.move_on_after(steps + 0.5):
            async with server.client().ask(PATH, body(max_tokens=50, stream=True)):
                await trio.sleep_forever()
        await wait_all_tasks_blocked()
        await trio.sleep(2)  # The step in flight keeps the blocks until the step ends.
        await server.assert_all_free()
    otel.close()
    generated = collector.one("text_completion fake")
    assert generated.events[-2:] == ["cancel", "free"]
    assert collector.one(f"POST {PATH}").attributes["trioserve.outcome"] == "left"
    assert all(span.ended_at <= generated.ended_at for span in collector.spans if span.parent_id == generated.id)


async def test_span_of_a_cancelled_queued_request_ends_with_the_events_cancel_and_free(collector, otel, autojump_clock):
    async with open_memory_server(tracer=otel.tracer, step_seconds=1, max_num_seqs=1) as server:
        async with server.client().ask(PATH, body(max_tokens=50, stream=True)):
            with trio.move_on_after(2):
                await server.client().post(PATH, body(prompt="waits"))
        await trio.sleep(2)
        await server.assert_all_free()
    otel.close()
    (waited,) = [span for span in collector.spans if span.events and "prefill" not in span.events]
    assert waited.events[0] == "queue"
    assert waited.events[-2:] == ["cancel", "free"]


async def test_refused_request_has_a_span_with_its_error(collector, otel, autojump_clock):
    async with open_memory_server(tracer=otel.tracer, step_seconds=1, max_num_seqs=1, max_queued_requests=0) as server:
        async with server.client().ask(PATH, body(max_tokens=50, stream=True)):
            await server.client().post(PATH, body())
        await trio.sleep(2)
    otel.close()
    refused = [span for span in collector.spans if span.attributes.get("http.response.status_code") == 429]
    assert len(refused) == 1
    assert refused[0].attributes["trioserve.outcome"] == "refused"
    assert collector.children(refused[0]) == []


async def test_requests_to_polled_routes_are_not_traced(collector, otel, autojump_clock):
    async with open_memory_server(tracer=otel.tracer) as server:
        for path in ("/health", "/ready", "/load", "/metrics"):
            await server.client().get(path)
        await server.client().get("/v1/models")
    otel.close()
    assert [span.name for span in collector.spans] == ["GET /v1/models"]


async def test_unsampled_trace_of_a_client_is_continued_but_not_recorded(collector, otel, autojump_clock):
    async with open_memory_server(tracer=otel.tracer) as server:
        await server.client().post(PATH, body(), headers={"traceparent": CALLER[:-1] + "0"})
    otel.close()
    assert collector.spans == []


async def test_engine_without_a_server_is_traced(collector, otel, autojump_clock):
    async with open_memory_server(step_seconds=1) as server:
        server.engine.tracer = otel.tracer
        with pytest.raises(ZeroDivisionError):
            async with server.engine.generate("p", SamplingParams(max_tokens=3)) as stream:
                async for _ in stream:
                    raise ZeroDivisionError
        await trio.sleep(2)
    otel.close()
    generated = collector.one("text_completion fake")
    assert generated.parent_id == ""
    assert generated.events == ["queue", "tokenize", "prefill", "first_token", "decode", "cancel", "free"]


@asynccontextmanager
async def routed(otel, ids: str, engine=None, **options):
    async with AsyncExitStack() as stack:
        servers = {
            id: await stack.enter_async_context(
                open_memory_server(tracer=otel.tracer, step_seconds=1, **(engine or {}))
            )
            for id in ids
        }

        def opener(id: str):
            async def connect():
                return servers[id].connect()

            return connect

        router = await stack.enter_async_context(
            open_memory_router({id: opener(id) for id in ids}, tracer=otel.tracer, models={"fake": "fake"}, **options)
        )
        yield router, servers


async def test_spans_of_a_router_and_its_servers_form_one_trace(collector, otel, autojump_clock):
    async with routed(otel, "ab") as (router, _):

        async def ask(number: int) -> None:
            headers = {"traceparent": CALLER.replace("b7ad", f"b7a{number}")}
            await router.client().post(PATH, body(model="fake"), headers=headers)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, 1)
            nursery.start_soon(ask, 2)
        await router.assert_all_free()
    otel.close()
    assert {span.trace_id for span in collector.spans} == {CALLER[3:35]}
    generated = [span for span in collector.spans if span.name == "text_completion fake"]
    endpoints = set()
    for span in generated:
        served = collector.parent_of(span)
        leg = collector.parent_of(served)
        routing = collector.parent_of(leg)
        assert [one.kind for one in (span, served, leg, routing)] == [INTERNAL, SERVER, CLIENT, SERVER]
        assert collector.children(routing) == ["queue", "POST"]
        assert routing.events == ["first_token", "free"]
        assert routing.parent_id[:3] == "b7a"
        endpoints.add(leg.attributes["trioserve.endpoint"])
    assert endpoints == {"a", "b"}


async def test_disconnect_of_a_routers_client_ends_the_spans_of_router_and_server(collector, otel, autojump_clock):
    async with routed(otel, "a") as (router, servers):
        with trio.move_on_after(3.5):
            async with router.client().ask(PATH, body(model="fake", max_tokens=50, stream=True)):
                await trio.sleep_forever()
        await trio.sleep(2)
        await router.assert_all_free()
        await servers["a"].assert_all_free()
    otel.close()
    (routing,) = [span for span in collector.spans if "POST" in collector.children(span)]
    assert routing.events[-2:] == ["cancel", "free"]
    assert collector.one("text_completion fake").events[-2:] == ["cancel", "free"]


async def test_disaggregated_request_is_one_trace_with_a_span_for_each_stage(collector, otel, autojump_clock):
    engine = {"connector": ScriptedConnector}
    rules = RoutingRules(disaggregated_prompt_tokens_min=1)
    async with routed(otel, "pd", engine, roles={"p": "prefill", "d": "decode"}, rules=rules) as (router, servers):
        asked = body(model="fake", prompt=SECRET * 20, stream=True)
        async with router.client().ask(PATH, asked, headers={"traceparent": CALLER}) as response:
            await trio.sleep(10)
            assert servers["d"].engine.connector.loads
            servers["d"].engine.connector.load_all()
            assert [event async for event in response]
        servers["p"].engine.connector.release_all()
        await router.assert_all_free()
        for server in servers.values():
            await server.assert_all_free()
    otel.close()
    assert {span.trace_id for span in collector.spans} == {CALLER[3:35]}
    routing = next(span for span in collector.spans if span.parent_id == CALLER[36:52])
    assert collector.children(routing) == ["queue", "POST prefill", "queue", "POST decode"]
    events = {}
    for stage in ("prefill", "decode"):
        leg = collector.one(f"POST {stage}")
        served = collector.one(f"POST {PATH}", parent=leg)
        events[stage] = collector.one("text_completion fake", parent=served).events
        assert leg.attributes["trioserve.endpoint"] == stage[0]
    assert events["prefill"] == ["queue", "tokenize", "prefill", "first_token", "decode", "hold", "release", "free"]
    assert events["decode"] == ["queue", "tokenize", "prefill", "first_token", "decode", "free"]


async def test_kv_transfer_params_carry_the_trace_context_through_other_proxies(collector, otel, autojump_clock):
    """A proxy of another project forwards kv_transfer_params, but no traceparent header."""
    async with open_memory_server(tracer=otel.tracer, step_seconds=1, connector=ScriptedConnector) as server:
        held = await server.client().post(PATH, body(max_tokens=1, kv_transfer_params={"do_remote_decode": True}))
        params = (await held.json())["kv_transfer_params"]
        assert params["traceparent"]
        server.engine.connector.release_all()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: server.client().post(PATH, body(prompt="other", kv_transfer_params=params)))
            await trio.sleep(5)
            server.engine.connector.load_all()
    otel.close()
    first, second = (span for span in collector.spans if span.name == "text_completion fake")
    assert first.trace_id == params["traceparent"][3:35]
    assert second.links == [first.trace_id]


async def test_router_forwards_trace_headers_if_tracing_is_off():
    async with open_scripted_endpoints("b") as pair:
        headers = {"traceparent": CALLER, "tracestate": "vendor=1"}
        async with pair.client().ask(PATH, {"model": "fake", "prompt": "p", "stream": True}, headers=headers):
            ask = await pair.ask_of("b")
            assert (ask.headers["traceparent"], ask.headers["tracestate"]) == (CALLER, "vendor=1")
