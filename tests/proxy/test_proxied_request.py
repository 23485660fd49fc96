"""Tests a request through the router: the request to the endpoint, the response to the client, and the release of all
resources after a cancel.
"""

from __future__ import annotations

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.api.caller import AccessRules
from trioserve.api.openai.request_types import decode_body
from trioserve.proxy.routed_body import RoutedBody
from trioserve.proxy.router_context import RoutingRules
from trioserve.testing.memory_router import SELDOM_SECONDS

CHAT = "/v1/completions"


def body(**fields: object) -> dict[str, object]:
    return {"model": "fake", "prompt": "hello", "max_tokens": 5, **fields}


@pytest.mark.slow
async def test_router_forwards_a_whole_response(open_setup):
    async with open_setup(engine={"response": "good morning"}) as setup:
        response = await setup.client().post(CHAT, body(max_tokens=20))
        assert response.status == 200
        assert (await response.json())["choices"][0]["text"] == "good morning"
        assert response.headers["x-trioserve-endpoint"] in "ab"
        await setup.assert_all_free()


async def test_router_forwards_a_streamed_response(open_setup):
    async with (
        open_setup(engine={"response": "good morning"}) as setup,
        setup.client().ask(CHAT, body(max_tokens=20, stream=True), headers={"x-request-id": "mine"}) as response,
    ):
        text = "".join([event["choices"][0]["text"] async for event in response])
        assert text == "good morning"
        assert response.headers["x-request-id"] == "mine"
        assert response.body.endswith(b"data: [DONE]\n\n")


async def test_refusal_of_the_endpoint_is_forwarded(open_setup):
    async with open_setup() as setup:
        response = await setup.client().post(CHAT, body(temperature=-1))
        assert response.status == 400
        assert (await response.json())["error"]["param"] == "temperature"
        await setup.assert_all_free()


async def test_unknown_model_is_refused_with_a_list_of_models(open_setup):
    async with open_setup(aliases={"nice": "fake"}) as setup:
        response = await setup.client().post(CHAT, body(model="other"))
        assert response.status == 404
        assert "served are: fake, nice" in (await response.json())["error"]["message"]


async def test_request_without_model_is_refused_until_an_endpoint_lists_its_models(open_setup, autojump_clock):
    nameless = {"prompt": "hello", "max_tokens": 5}
    async with open_setup("a") as setup:
        client = setup.client()
        setup.unreachable.add("a")
        setup.router.fleet.drain("a")
        await wait_all_tasks_blocked()
        # The status is 404, because there is no endpoint at all.
        assert (await client.post(CHAT, nameless)).status == 404
        assert (await client.post("/endpoints", {"url": "http://a", "id": "a"})).status == 201
        early = await client.post(CHAT, nameless)
        assert (early.status, early.headers["x-trioserve-reason"]) == (503, "no_endpoint")
        assert early.headers["retry-after"] == "1"
        setup.unreachable.clear()
        await trio.sleep(2 * SELDOM_SECONDS)
        assert (await setup.client().post(CHAT, nameless)).status == 200
        await setup.assert_all_free()


async def test_alias_is_replaced_by_the_endpoints_model_name(open_setup):
    async with open_setup(aliases={"nice": "fake"}) as setup:
        response = await setup.client().post(CHAT, body(model="nice"))
        assert response.status == 200
        listed = await (await setup.client().get("/v1/models")).json()
        assert [model["id"] for model in listed["data"]] == ["fake", "nice"]


@pytest.mark.parametrize("http", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_during_decode_frees_everything_at_both_ends(open_setup, http, stream):
    """Scenarios S28, S29, S31 and S47 of tests/README.md: streamed and whole responses use the same cancel scope."""
    async with open_setup("a", engine={"paused": True}) as setup:
        engine = setup.servers["a"].engine
        free = engine.stats().blocks_free
        async with setup.client(http=http).ask(CHAT, body(max_tokens=50, stream=stream)):
            await engine.step(3)
            assert engine.stats().blocks_free < free
            assert setup.leases() == {"a": 1}
        await wait_all_tasks_blocked()
        assert setup.leases() == {"a": 0}
        assert engine.stats().blocks_used == 0
        await setup.assert_all_free()


async def test_request_of_a_client_that_leaves_the_queue_is_never_sent(open_setup):
    """Scenarios S32 and S37 of tests/README.md: a request whose client left the queue uses no endpoint."""
    async with open_setup("a", engine={"paused": True}, leases_max=1) as setup:
        async with setup.client().ask(CHAT, body()):
            await wait_all_tasks_blocked()
            async with setup.client().ask(CHAT, body()):
                await wait_all_tasks_blocked()
                assert setup.router.dispatch.core.stats().waiting == 1
            await wait_all_tasks_blocked()
            assert setup.router.dispatch.core.stats().waiting == 0
            assert len(setup.servers["a"].engine.live_requests()) == 1
        await setup.assert_all_free()


async def test_client_that_leaves_during_connect_returns_its_lease(open_setup, autojump_clock):
    async with open_setup("a") as setup:
        never = trio.Event()

        async def connect():
            await never.wait()

        remote = setup.router.fleet.remote("a")
        remote.close()
        remote._open_stream = connect
        async with setup.client().ask(CHAT, body()):
            await wait_all_tasks_blocked()
            assert setup.leases() == {"a": 1}
        await setup.assert_all_free()


async def test_unreachable_endpoint_is_replaced(open_setup):
    async with open_setup() as setup:
        first = (await setup.client().post(CHAT, body())).headers["x-trioserve-endpoint"]
        setup.router.fleet.remote(first).close()
        setup.unreachable.add(first)
        response = await setup.client().post(CHAT, body())
        assert response.status == 200
        assert response.headers["x-trioserve-endpoint"] != first
        assert setup.router.dispatch.core.stats().retries_total == 1
        await setup.assert_all_free()


async def test_client_gets_an_error_if_no_endpoint_can_be_reached(open_setup, autojump_clock):
    async with open_setup() as setup:
        for id in "ab":
            setup.router.fleet.remote(id).close()
            setup.unreachable.add(id)
        response = await setup.client().post(CHAT, body())
        assert trio.current_time() >= 30, "an accepted request waits until an endpoint returns"
        assert response.status == 503
        assert response.headers["x-trioserve-reason"] == "endpoint_lost"
        assert int(response.headers["retry-after"]) >= 1
        for id in "ab":
            setup.router.dispatch.note_health(id, False, hangs=True, is_hung=True)
        again = await setup.client().post(CHAT, body())
        assert again.status == 503
        assert again.headers["x-trioserve-reason"] == "no_endpoint"
        assert int(again.headers["retry-after"]) >= 1
        await setup.assert_all_free()


@pytest.mark.parametrize("stream", [True, False])
async def test_all_requests_without_output_are_retried_after_their_endpoint_dies(open_setup, stream):
    """There are more requests than the retry budget allows retries."""
    engine = {"paused": True, "response": "abc", "max_queued_requests": 100}
    async with open_setup(engine=engine, leases_max=100, waiting_depth_max=100) as setup:
        statuses = []

        async def ask() -> None:
            async with setup.client().ask(CHAT, body(stream=stream)) as response:
                await response.read()
                statuses.append(response.status)

        async with trio.open_nursery() as nursery:
            for _ in range(90):
                nursery.start_soon(ask)
            await wait_all_tasks_blocked()
            assert min(setup.leases().values()) > 30
            setup.unreachable.add("a")
            await setup.servers["a"].hang_up()
            await wait_all_tasks_blocked()
            setup.servers["b"].engine.resume()
        assert statuses == [200] * 90
        await setup.assert_all_free()


@pytest.mark.parametrize("stream", [True, False])
async def test_requests_wait_until_an_endpoint_returns(open_setup, autojump_clock, stream):
    async with open_setup(engine={"paused": True, "response": "abc"}) as setup:
        statuses = []

        async def ask() -> None:
            async with setup.client().ask(CHAT, body(stream=stream)) as response:
                await response.read()
                statuses.append(response.status)

        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(ask)
            await wait_all_tasks_blocked()
            for id in "ab":
                setup.unreachable.add(id)
                await setup.servers[id].hang_up()
            await trio.sleep(20)
            assert statuses == []
            setup.unreachable.clear()
            setup.servers["b"].engine.resume()
            setup.router.dispatch.note_health("b", True, hangs=False)
        assert statuses == [200] * 8
        await setup.assert_all_free()


@pytest.mark.parametrize(("fields", "seconds"), [({"queue_timeout": 3.0}, 2.5), ({}, 100)])
async def test_time_at_a_lost_endpoint_does_not_count_as_queue_time(open_setup, autojump_clock, fields, seconds):
    async with open_setup(engine={"paused": True, "response": "abc"}, queue_seconds_max=60) as setup:
        async with setup.client().ask(CHAT, body(**fields)) as response:
            await trio.sleep(seconds)
            [first] = [id for id, count in setup.leases().items() if count]
            other = "b" if first == "a" else "a"
            setup.servers[other].engine.resume()
            await setup.servers[first].hang_up()
            await response.read()
            assert response.status == 200
        await setup.assert_all_free()


async def test_client_does_not_notice_an_endpoint_that_breaks_before_the_first_token(open_setup, autojump_clock):
    async with open_setup(engine={"paused": True, "response": "abc"}) as setup:
        async with setup.client().ask(CHAT, body(stream=True)) as response:
            await trio.sleep(5)
            [first] = [id for id, count in setup.leases().items() if count]
            other = "b" if first == "a" else "a"
            await setup.servers[first].hang_up()
            await wait_all_tasks_blocked()
            assert setup.leases() == {first: 0, other: 1}
            setup.servers[other].engine.resume()
            text = "".join([event["choices"][0]["text"] async for event in response])
        assert text == "abc"
        await setup.assert_all_free()


@pytest.mark.parametrize("tokens", [1, 2, 3])
async def test_stream_resumes_after_its_endpoint_breaks(open_setup, tokens):
    async with open_setup(engine={"paused": True, "response": "abc"}) as setup:
        async with setup.client().ask(CHAT, body(stream=True)) as response:
            await wait_all_tasks_blocked()
            [first] = [id for id, count in setup.leases().items() if count]
            other = "b" if first == "a" else "a"
            await setup.servers[first].engine.step(tokens)
            await setup.servers[first].hang_up()
            setup.servers[other].engine.resume()
            events = [event async for event in response]
        assert "".join(event["choices"][0]["text"] for event in events) == "abc"
        assert response.body.endswith(b"[DONE]\n\n")
        assert setup.router.dispatch.core.stats().retries_total == 0
        setup.servers[first].engine.resume()
        await setup.assert_all_free()


async def test_whole_response_is_computed_again_at_another_endpoint(open_setup, autojump_clock):
    async with open_setup(engine={"paused": True, "response": "abc"}) as setup:
        async with setup.client().ask(CHAT, body(max_tokens=3)) as response:
            await trio.sleep(5)
            [first] = [id for id, count in setup.leases().items() if count]
            other = "b" if first == "a" else "a"
            await setup.servers[first].engine.step(2)
            await setup.servers[first].hang_up()
            setup.servers[other].engine.resume()
            assert (await response.json())["choices"][0]["text"] == "abc"
            assert response.headers["x-trioserve-endpoint"] == other
        assert setup.router.dispatch.core.stats().retries_total == 1
        setup.servers[first].engine.resume()
        await setup.assert_all_free()


async def test_broken_stream_ends_with_an_error_if_resuming_is_disabled(open_setup):
    async with open_setup(
        engine={"paused": True, "response": "abc"}, rules=RoutingRules(continuation_bytes_max=0)
    ) as setup:
        async with setup.client().ask(CHAT, body(stream=True)) as response:
            await wait_all_tasks_blocked()
            [first] = [id for id, count in setup.leases().items() if count]
            await setup.servers[first].engine.step(2)
            await setup.servers[first].hang_up()
            events = [event async for event in response]
        assert events[-1]["error"]["code"] == "endpoint_lost"
        assert b"[DONE]" not in response.body
        await setup.assert_all_free()


async def test_broken_engine_ends_streams_with_an_error_and_other_requests_change_endpoint(open_setup):
    async with open_setup("a", engine={"max_queued_requests": 0, "max_num_seqs": 1, "paused": True}) as setup:
        # The endpoint itself refuses the request. The client gets this 429 if no other endpoint can serve the request.
        async with setup.client().ask(CHAT, body()):
            await wait_all_tasks_blocked()
            response = await setup.client().post(CHAT, body())
            assert response.status == 429
            assert response.headers["x-trioserve-reason"] == "queue_full"
        await setup.assert_all_free()


async def test_queue_deadline_gives_status_504(open_setup, autojump_clock):
    async with open_setup("a", engine={"paused": True}, leases_max=1) as setup, setup.client().ask(CHAT, body()):
        await wait_all_tasks_blocked()
        response = await setup.client().post(CHAT, body(queue_timeout=2))
        assert response.status == 504
        assert response.headers["x-trioserve-reason"] == "queue_timeout"
        assert trio.current_time() == pytest.approx(2, abs=0.01)


async def test_endpoint_gets_the_remaining_deadline(open_setup, autojump_clock):
    async with open_setup("a", engine={"paused": True}, leases_max=1) as setup:
        async with (
            setup.client().ask(CHAT, body(max_tokens=1)) as holder,
            setup.client().ask(CHAT, body(timeout=10, stream=True)) as response,
        ):
            await trio.sleep(4)
            await setup.servers["a"].engine.step()
            await holder.read()
            await wait_all_tasks_blocked()
            [request] = setup.servers["a"].engine.requests
            assert request.deadlines.timeout == pytest.approx(6, abs=0.1)
            await setup.servers["a"].engine.step()
            events = [event async for event in response]
        assert events[-1]["error"]["code"] == "timeout"
        assert trio.current_time() == pytest.approx(10, abs=0.1)
        await setup.assert_all_free()


async def test_requests_leave_a_hanging_endpoint_when_its_checks_fail(open_setup, autojump_clock):
    """Scenario S30 of tests/README.md: a dead endpoint does not block requests at other endpoints."""
    from trioserve.proxy.endpoint_watch import WatchSettings

    watch = WatchSettings(health_seconds=1, load_seconds=1, response_seconds_max=1, listens=False)
    async with open_setup(watch=watch, failures_max=2, engine={"response": "abc", "step_seconds": 0.01}) as setup:
        hanging = trio.Event()
        remote = setup.router.fleet.remote("a")

        class Silent(trio.abc.Stream):
            async def send_all(self, data):
                await trio.lowlevel.checkpoint()

            async def wait_send_all_might_not_block(self):
                await trio.lowlevel.checkpoint()

            async def receive_some(self, max_bytes=None):
                await hanging.wait()

            async def aclose(self):
                await trio.lowlevel.checkpoint()

        async def connect():
            return Silent()

        remote.close()
        remote._open_stream = connect
        with trio.fail_after(30):
            responses = [await setup.client().post(CHAT, body()) for _ in range(4)]
        assert [response.status for response in responses] == [200] * 4
        await setup.assert_all_free()


async def test_drain_refuses_queued_requests_and_finishes_running_ones(open_setup):
    async with open_setup("a", engine={"paused": True, "response": "abc"}, leases_max=1) as setup:
        async with setup.client().ask(CHAT, body()) as running, setup.client().ask(CHAT, body()) as waiting:
            await wait_all_tasks_blocked()
            setup.router.drain()
            assert await waiting.head() == 503
            setup.servers["a"].engine.resume()
            assert (await running.json())["choices"][0]["text"] == "abc"
        await setup.assert_all_free()


async def test_pinned_request_goes_to_its_endpoint(open_setup):
    async with open_setup() as setup:
        for id in "abab":
            response = await setup.client().post(f"{CHAT}?id={id}", body())
            assert response.headers["x-trioserve-endpoint"] == id
        response = await setup.client().post(f"{CHAT}?id=c", body())
        assert (response.status, response.headers["x-trioserve-reason"]) == (503, "no_endpoint")


async def test_endpoints_are_listed_added_and_drained_at_run_time(open_setup):
    async with open_setup(engine={"paused": True, "response": "abc"}) as setup:
        client = setup.client(http=2)
        async with client.ask(f"{CHAT}?id=a", body()) as running:
            await wait_all_tasks_blocked()
            async with client.ask("/endpoints/a", method="DELETE") as drained:
                assert await drained.json() == {"id": "a", "object": "endpoint", "draining": True}
            listed = (await (await client.get("/endpoints")).json())["data"]
            assert {each["id"]: each["health"] for each in listed} == {"a": "draining", "b": "healthy"}
            setup.servers["a"].engine.resume()
            assert (await running.json())["choices"][0]["text"] == "abc"
        listed = (await (await client.get("/endpoints")).json())["data"]
        assert [each["id"] for each in listed] == ["b"]
        added = await client.post("/endpoints", {"url": "http://a", "id": "a"})
        assert added.status == 201
        await wait_all_tasks_blocked()
        assert (await client.post(f"{CHAT}?id=a", body())).status == 200
        twice = await client.post("/endpoints", {"url": "http://a", "id": "a"})
        assert twice.status == 400
        unknown = await client.post("/endpoints", {"url": "nothing"})
        assert unknown.status == 400
        async with client.ask("/endpoints/none", method="DELETE") as none:
            assert await none.head() == 404


async def test_managing_endpoints_needs_the_admin_key(open_setup):
    async with open_setup(api_keys=("user",), admin_api_key="admin") as setup:
        user = setup.client(headers={"authorization": "Bearer user"})
        assert (await user.post("/endpoints", {"url": "http://a"})).status == 403
        assert (await user.get("/endpoints")).status == 200
        admin = setup.client(headers={"authorization": "Bearer admin"})
        async with admin.ask("/endpoints/a", method="DELETE") as response:
            assert await response.head() == 200
        assert (await setup.client().get("/endpoints")).status == 401


async def test_ready_page_reports_whether_an_endpoint_accepts_requests(open_setup):
    async with open_setup("a") as setup:
        client = setup.client()
        assert (await client.get("/ready")).status == 200
        setup.router.fleet.drain("a")
        response = await client.get("/ready")
        assert (response.status, (await response.json())["reason"]) == (503, "no_endpoint")


async def test_router_metrics_have_the_prefixes_of_vllm_and_trioserve(open_setup, autojump_clock):
    async with open_setup("a", engine={"paused": True}, leases_max=1, queue_requests_max=1) as setup:
        client = setup.client(http=2)
        async with client.ask(CHAT, body()) as running, client.ask(CHAT, body()) as waiting:
            await trio.sleep(3)
            assert (await client.post(CHAT, body())).status == 429
            page = (await client.get("/metrics")).body.decode()
            for prefix in ("trioserve_router:", "vllm_router:"):
                assert f"\n{prefix}queued_requests 1.0\n" in page
                assert f'\n{prefix}rejections_total{{reason="queue_full"}} 1.0\n' in page
                assert f'\n{prefix}endpoint_leases{{endpoint="a"}} 1.0\n' in page
                assert f'\n{prefix}endpoint_healthy{{endpoint="a"}} 1.0\n' in page
            assert "num_requests_running" not in page  # The page lacks this metric, because a router has no engine.
            setup.servers["a"].engine.resume()
            await running.read()
            await waiting.read()
        page = (await client.get("/metrics")).body.decode()
        assert "\ntrioserve_router:admissions_total 2.0\n" in page
        assert "\ntrioserve_router:queue_wait_seconds_sum 3.0\n" in page
        assert "\ntrioserve_router:queued_requests 0.0\n" in page


@pytest.mark.parametrize(("policy", "is_named"), [("prefix_aware", True), ("least_loaded", False)])
async def test_prefix_names_are_computed_only_for_policies_that_use_them(open_setup, monkeypatch, policy, is_named):
    async with open_setup(policy=policy) as setup:
        sent = []
        monkeypatch.setattr(
            setup.router.dispatch.core.policy, "note_sent", lambda request, endpoint: sent.append(request.prefix)
        )
        # The prompt is too long for this server. The prefix names are computed before the server refuses it.
        await setup.client().post(CHAT, body(prompt="a long beginning " * 10))
        assert [bool(prefix) for prefix in sent] == [is_named]


async def test_full_tokenizer_queue_of_one_key_does_not_mark_the_endpoint_busy(open_pair):
    """If the router treated the endpoint as busy, one caller could stop all requests to the endpoint."""
    async with open_pair("w1") as routed:
        async with routed.client().ask("/tokenize", {"model": "fake", "prompt": "x"}) as response:
            ask = await routed.ask_of("w1")
            ask.refuse(429, "overloaded", headers={"x-trioserve-reason": "text_queue_full", "retry-after": "9"})
            assert await response.head() == 429
            assert response.headers["x-trioserve-reason"] == "text_queue_full"
            assert response.headers["retry-after"] == "9"
        async with routed.client().ask("/v1/completions", {"model": "fake", "prompt": "x"}) as response:
            ask = await routed.ask_of("w1")
            ask.respond({"choices": []})
            assert await response.head() == 200
        await routed.assert_all_free()


@pytest.mark.parametrize("prompts", [1, 100])
async def test_too_many_choices_are_refused_before_the_queue(open_setup, prompts):
    async with open_setup("a") as setup:
        asked = {"model": "fake", "prompt": ["x"] * prompts, "n": 300 // prompts, "max_tokens": 1}
        response = await setup.client().post("/v1/completions", asked)
        assert response.status == 400
        error = (await response.json())["error"]
        assert error["param"] == "n"
        assert "asks for 300 responses (n times the number of prompts), allowed are 1 to 256" in error["message"]
        await setup.assert_all_free()


@pytest.mark.parametrize(
    ("prompt", "count"),
    [
        (b'"a"', 1),
        (b"[]", 1),
        (b"[1, 2]", 1),
        (b'["a", "b"]', 2),
        (b"[[1], [2], [3]]", 3),
        (b"[" + b" \n" * 100 + b'"a", "b"]', 2),
        (b"[" + b"\t" * 100 + b"[1], [2]]", 2),
        (b"[" + b" " * 100 + b"1, 2]", 1),
    ],
)
def test_prompts_are_counted_in_any_json_layout(prompt, count):
    assert decode_body(b'{"prompt": ' + prompt + b"}", RoutedBody).prompt_count == count


@pytest.mark.parametrize("headers", [{}, {"origin": "https://chat.example", "sec-fetch-site": "cross-site"}])
async def test_router_reaches_engines_by_any_host_name_and_checks_web_pages_itself(open_setup, headers):
    """Router and engine have no API keys. Other machines can reach both. The engine has no list of its host names."""
    strangers = AccessRules(host_names=(), operates_without_key=False)
    own = AccessRules(host_names=("memory",), page_origins=("https://chat.example",), operates_without_key=False)
    async with open_setup("a", engine={"access": strangers}, access=own) as setup:
        client = setup.client(headers=headers)
        response = await client.post("/v1/completions", {"prompt": "x", "max_tokens": 2})
        assert response.status == 200
        aborted = await client.post("/v1/requests/abort", {"ids": ["unknown"], "return_partial": True})
        assert aborted.status == 200
        await setup.assert_all_free()
