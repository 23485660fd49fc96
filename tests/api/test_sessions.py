"""Tests of sessions that HTTP clients name: which requests share one, how long it lasts, and who may end it."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.api.turn.chat_turn import TurnRequest
from trioserve.contracts.deadlines import NO_DEADLINES
from trioserve.contracts.request import RETENTION_IDLE_SECONDS_MAX
from trioserve.contracts.sampling import SamplingParams
from trioserve.testing.memory_server import MemoryServer, open_memory_server

from .conftest import MemoryExchange

CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
HI = [{"role": "user", "content": "Hi"}]
OPTIONS: dict[str, Any] = {"response": "Hello!", "max_model_len": 2048, "block_count": 1024}
KEYS: dict[str, Any] = {"api_keys": ("one", "two"), "admin_api_key": "admin"}
MARK = {"type": "ephemeral"}
HOUR = {"type": "ephemeral", "ttl": "1h"}


def headers(key: str | None = None, session: str | None = None, **more: str) -> dict[str, str]:
    fields = {} if key is None else {"authorization": f"Bearer {key}"}
    return {**fields, **({} if session is None else {"x-session-id": session}), **more}


async def post(server: MemoryServer, path: str, body: dict[str, Any], **more: Any) -> Any:
    response = await server.client().post(path, {"model": "fake", **body}, headers=headers(**more))
    assert response.status == 200, response.body
    return response


def names(server: MemoryServer) -> list[str]:
    return [session.name for session in server.engine.sessions]


async def delete(server: MemoryServer, name: str, key: str | None = None, **more: str) -> int:
    async with server.client().ask(f"/v1/sessions/{name}", method="DELETE", headers=headers(key, **more)) as response:
        return int(await response.head())


@pytest.mark.parametrize(
    ("path", "body", "session"),
    [
        (CHAT, {"messages": HI}, "by-header"),
        ("/v1/completions", {"prompt": "Hi"}, "by-header"),
        (RESPONSES, {"input": "Hi"}, "by-header"),
        (MESSAGES, {"messages": HI, "max_tokens": 9}, "by-header"),
        ("/api/chat", {"messages": HI, "stream": False}, "by-header"),
        (CHAT, {"messages": HI, "prompt_cache_key": "by-key"}, None),
        ("/v1/completions", {"prompt": "Hi", "prompt_cache_key": "by-key"}, None),
        (RESPONSES, {"input": "Hi", "prompt_cache_key": "by-key"}, None),
        (CHAT, {"messages": HI, "prompt_cache_key": "by-key"}, "by-header"),
    ],
)
async def test_request_names_its_session(path: str, body: dict[str, Any], session: str | None) -> None:
    async with open_memory_server(**OPTIONS) as server:
        for _ in range(2):
            response = await post(server, path, body, session=session)
            assert "x-trioserve-ignored" not in response.headers
        [live] = server.engine.sessions
        assert (live.name, live.turn_count, live.turns) == (session or "by-key", 2, [])
        await server.assert_all_free()


async def test_request_without_a_name_has_no_session() -> None:
    async with open_memory_server(**OPTIONS) as server:
        await post(server, CHAT, {"messages": HI, "prompt_cache_retention": "in_memory"})
        assert names(server) == []


@pytest.mark.parametrize(
    ("path", "body", "seconds"),
    [
        (CHAT, {"messages": HI, "prompt_cache_retention": "24h"}, RETENTION_IDLE_SECONDS_MAX),
        (RESPONSES, {"input": "Hi", "prompt_cache_retention": "24h"}, RETENTION_IDLE_SECONDS_MAX),
        (MESSAGES, {"messages": HI, "cache_control": MARK}, 300),
        (MESSAGES, {"messages": HI, "system": [{"type": "text", "text": "S", "cache_control": HOUR}]}, 3600),
        (MESSAGES, {"messages": HI, "tools": [{"name": "t", "input_schema": {}, "cache_control": MARK}]}, 300),
        (
            MESSAGES,
            {
                "cache_control": MARK,
                "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": HOUR}]}],
            },
            3600,
        ),
    ],
)
async def test_conversation_that_asks_for_retention_gets_one_session(
    path: str, body: dict[str, Any], seconds: float
) -> None:
    async with open_memory_server(**OPTIONS) as server:
        more = {"max_tokens": 9} if path == MESSAGES else {}
        await post(server, path, {**body, **more})
        [live] = server.engine.sessions
        assert live.retention.idle_seconds == seconds
        if path != RESPONSES:  # The next turn repeats the beginning of the conversation.
            said = [*body["messages"], {"role": "assistant", "content": "A"}, {"role": "user", "content": "B"}]
            await post(server, path, {**body, **more, "messages": said})
            assert live.turn_count == 2
        await post(server, CHAT, {"messages": [{"role": "user", "content": "New"}], "prompt_cache_retention": "24h"})
        assert len(names(server)) == 2


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": HI, "prompt_cache_retention": "48h"}, "prompt_cache_retention"),
        (CHAT, {"messages": HI, "prompt_cache_key": "k" * 513}, "prompt_cache_key"),
        (RESPONSES, {"input": "Hi", "prompt_cache_key": "k" * 513}, "prompt_cache_key"),
        (MESSAGES, {"messages": HI, "max_tokens": 9, "cache_control": {"type": "ephemeral", "ttl": "2h"}}, None),
    ],
)
async def test_invalid_field_is_refused(path: str, body: dict[str, Any], param: str | None) -> None:
    async with open_memory_server(**OPTIONS) as server:
        response = await server.client().post(path, {"model": "fake", **body})
        assert response.status == 400
        if param is not None:
            assert (await response.json())["error"]["param"] == param
        assert names(server) == []


async def test_session_header_has_a_limit() -> None:
    async with open_memory_server(**OPTIONS) as server:
        response = await server.client().post(CHAT, {"messages": HI}, headers=headers(session="s" * 513))
        assert (response.status, (await response.json())["error"]["param"]) == (400, "X-Session-Id")


async def test_refused_request_opens_no_session() -> None:
    async with open_memory_server(**OPTIONS) as server:
        server.engine.drain()
        response = await server.client().post(CHAT, {"messages": HI}, headers=headers(session="mine"))
        assert response.status == 503
        assert names(server) == []


# --- who sees and ends sessions ---


async def test_callers_have_their_own_sessions() -> None:
    async with open_memory_server(**OPTIONS, **KEYS) as server:
        for key in ("one", "two"):
            await post(server, CHAT, {"messages": HI}, key=key, session="mine")
        assert names(server) == ["mine", "mine"]

        async def listed(key: str) -> list[str]:
            response = await server.client().get("/v1/sessions", headers=headers(key))
            return [session["id"] for session in (await response.json())["data"]]

        assert await listed("one") == ["mine"]
        assert await listed("admin") == ["mine", "mine"]
        assert await delete(server, "mine", "one") == 200
        assert await listed("one") == []
        assert await listed("two") == ["mine"]
        assert await delete(server, "mine", "one") == 404
        await post(server, CHAT, {"messages": HI}, key="one", session="mine")
        assert await delete(server, "mine", "admin") == 200
        assert names(server) == []


async def test_tenants_of_a_server_without_keys_have_their_own_sessions() -> None:
    async with open_memory_server(**OPTIONS) as server:
        for tenant in ("a", "b"):
            body = {"model": "fake", "messages": HI}
            fields = headers(session="mine", **{"x-tenant-id": tenant})
            assert (await server.client().post(CHAT, body, headers=fields)).status == 200
        assert await delete(server, "mine") == 404
        assert await delete(server, "mine", **{"x-tenant-id": "a"}) == 200
        assert names(server) == ["mine"]


async def test_name_of_a_session_may_have_any_characters() -> None:
    async with open_memory_server(**OPTIONS) as server:
        await post(server, CHAT, {"messages": HI}, session="user 1/chat")
        assert await delete(server, "user%201/chat") == 200


async def test_session_describes_its_turns(autojump_clock: trio.testing.MockClock) -> None:
    async with open_memory_server(**OPTIONS, session_idle_seconds=60) as server:
        await post(server, CHAT, {"messages": [{"role": "user", "content": "x" * 100}]}, session="mine")
        await trio.sleep(2)
        retained_count = server.engine.stats().blocks_retained
        assert retained_count > 100 // server.engine.core.settings.block_size
        [shown] = (await (await server.client().get("/v1/sessions")).json())["data"]
        with server.engine.live_feed.watching():
            stats = server.engine.live_feed.snapshot(None).stats
        assert (stats["sessions"], stats["retained_blocks"]) == (1, shown["blocks"])
        assert shown == {
            "id": "mine",
            "object": "session",
            "turns": 1,
            "running": 0,
            "age_seconds": pytest.approx(2, abs=0.1),
            "idle_seconds": pytest.approx(2, abs=0.1),
            "idle_seconds_max": 60.0,
            "retention_seconds": 300.0,
            "blocks": retained_count,
        }
        await trio.sleep(60)
        assert names(server) == []


async def test_deleting_a_session_aborts_its_running_turn() -> None:
    async with open_memory_server(**OPTIONS, paused=True) as server, trio.open_nursery() as nursery:
        bodies: list[bytes] = []

        async def turn() -> None:
            body = {"model": "fake", "messages": HI, "stream": True}
            async with server.client().ask(CHAT, body, headers=headers(session="mine")) as response:
                bodies.append(await response.read())

        nursery.start_soon(turn)
        await wait_all_tasks_blocked()
        await server.engine.step(3)
        assert server.engine.stats().blocks_used > 0
        assert await delete(server, "mine") == 200
        await wait_all_tasks_blocked()
        assert server.engine.stats().blocks_used == 0
        assert b"the session of this request was ended" in bodies[0]
        await server.assert_all_free()


async def test_requests_of_a_connection_are_turns_of_its_session() -> None:
    async with open_memory_server(**OPTIONS) as server:
        context = server.app.new_context(MemoryExchange("GET", RESPONSES, b"", [("x-session-id", "other")]))
        body = TurnRequest(messages=HI, sampling=SamplingParams(), retention_seconds=900)
        with context.connection_session() as session:
            for _ in range(2):
                async with context.generate("Hi", SamplingParams(max_tokens=1), body, NO_DEADLINES) as stream:
                    assert [delta.finish_reason async for delta in stream]
            assert (session.turn_count, session.retention.idle_seconds) == (2, 900)
            assert (session.idle_seconds, names(server)) == (None, [session.name])
        assert session.is_ended
        assert names(server) == []
        await server.assert_all_free()


async def test_client_that_leaves_ends_its_turn_and_keeps_its_session() -> None:
    async with open_memory_server(**OPTIONS, paused=True) as server:
        body = {"model": "fake", "messages": HI, "stream": True}
        async with server.client().ask(CHAT, body, headers=headers(session="mine")) as response:
            await wait_all_tasks_blocked()
            await server.engine.step(3)
            await response.head()
        await wait_all_tasks_blocked()
        [live] = server.engine.sessions
        assert (live.name, live.turns, live.turn_count) == ("mine", [], 1)
        await server.assert_all_free()


async def hint(server: MemoryServer, name: str, body: dict[str, Any], key: str | None = None) -> Any:
    return await server.client().post(f"/v1/sessions/{name}", body, headers=headers(key))


async def test_hint_extends_the_preference_of_the_callers_session(autojump_clock: trio.testing.MockClock) -> None:
    async with open_memory_server(**OPTIONS, **KEYS) as server:
        await post(server, CHAT, {"messages": HI}, key="one", session="agent/7")
        core, [live] = server.engine.current_core, server.engine.sessions
        await trio.sleep(200)
        response = await hint(server, "agent/7", {"returns_in_seconds": 60}, "one")
        assert (response.status, (await response.json())["id"]) == (200, "agent/7")
        kept = core.sessions.get(live.id)
        assert kept is not None
        assert kept.expires_at == pytest.approx(trio.current_time() + 60 + 300)
        assert (await hint(server, "agent/7", {"returns_in_seconds": 60}, "two")).status == 404
        assert (await hint(server, "nobody", {"returns_in_seconds": 60}, "one")).status == 404
        for wrong in ({}, {"returns_in_seconds": -1}, {"returns_in_seconds": "soon"}):
            assert (await hint(server, "agent/7", wrong, "one")).status == 400
