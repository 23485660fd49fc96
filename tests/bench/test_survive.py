"""Tests of a survival run: its requests, its interruptions, and the comparison of streams."""

from __future__ import annotations

import itertools

import msgspec
import pytest
import trio

from trioserve.bench.server_settings import SurviveSettings
from trioserve.bench.survive_fleet import Cable, Relay
from trioserve.bench.survive_plan import InterruptionKind, StreamFault, content_of, interruptions, requests
from trioserve.contracts.errors import StartupError


def events(*events: object, end: bytes = b"data: [DONE]\n\n") -> bytes:
    return b"".join(b"data: " + msgspec.json.encode(event) + b"\n\n" for event in events) + end


def piece(text: str, *, created: int = 1, **more: object) -> dict[str, object]:
    return {"id": "cmpl-1", "created": created, "choices": [{"index": 0, "text": text, **more}]}


WHOLE = [piece("Hel"), piece("lo"), piece("", finish_reason="stop")]


def test_division_of_a_stream_into_events_is_no_difference():
    expected = content_of(events(*WHOLE))
    other = content_of(b": hello\n\nid: 0:1,2\n" + events(piece("Hello", finish_reason="stop", created=7)))
    assert other.differences(expected) == []


@pytest.mark.parametrize(
    ("other", "part"),
    [
        ([piece("Hel"), piece("lo"), piece("lo"), piece("", finish_reason="stop")], "text"),
        ([piece("Hel"), piece("", finish_reason="stop")], "text"),
        ([*WHOLE[:2], piece("", finish_reason="length")], "finish_reason"),
        ([*WHOLE, piece("", finish_reason="stop")], "finish_reason"),
        ([*WHOLE, {"id": "cmpl-1", "created": 1, "choices": [], "usage": {"completion_tokens": 3}}], "usage"),
        ([{**event, "id": "cmpl-2"} for event in WHOLE], "response_ids"),
        ([piece("Hel", logprobs={"tokens": ["Hel"]}), *WHOLE[1:]], "logprobs"),
    ],
    ids=str,
)
def test_changed_part_of_a_stream_is_a_difference(other, part):
    [found] = content_of(events(*other)).differences(content_of(events(*WHOLE)))
    assert part in found


def test_streamed_tool_call_is_joined_and_its_id_is_compared():
    def call(id: str, *pieces: str) -> bytes:
        deltas = [{"role": "assistant"}, {"tool_calls": [{"index": 0, "id": id, "function": {"name": "f"}}]}]
        deltas += [{"tool_calls": [{"index": 0, "function": {"arguments": one}}]} for one in pieces]
        return events(*({"id": "c", "created": 1, "choices": [{"index": 0, "delta": delta}]} for delta in deltas))

    assert content_of(call("a", "{", "}")).differences(content_of(call("a", "{}"))) == []
    assert content_of(call("a", "{}")).differences(content_of(call("b", "{}")))
    assert content_of(call("a", "{", "{}")).differences(content_of(call("a", "{}")))


def test_log_probabilities_may_differ_by_the_tolerance():
    def heard(logprob: float, token: str = "a") -> bytes:
        return events(piece("a", logprobs={"content": [{"token": token, "logprob": logprob, "top_logprobs": []}]}))

    expected = content_of(heard(-1.5))
    assert content_of(heard(-1.501)).differences(expected, logprob_tolerance=0.01) == []
    assert content_of(heard(-1.501)).differences(expected)
    assert content_of(heard(-1.6)).differences(expected, logprob_tolerance=0.01)
    assert content_of(heard(-1.5, token="b")).differences(expected, logprob_tolerance=0.01)


def test_default_flags_make_log_probabilities_comparable_bit_for_bit():
    assert SurviveSettings().logprob_tolerance == 0
    assert "--batch-invariant" in SurviveSettings().server_flags


@pytest.mark.parametrize(
    "body",
    [
        events(*WHOLE, end=b""),
        events(*WHOLE, end=2 * b"data: [DONE]\n\n"),
        events(*WHOLE, {"error": {"code": "endpoint_lost", "message": "it is gone"}}),
        events(*WHOLE, piece("late", created=2)),
        b"data: {\n\n" + events(*WHOLE),
        events(*WHOLE) + events(*WHOLE),
    ],
)
def test_incomplete_stream_is_a_failure(body):
    with pytest.raises(StreamFault):
        content_of(body)


def test_stream_comment_about_a_resumption_is_not_content():
    body = b": x-trioserve-continued endpoint=b tokens=same\n\n" + events(*WHOLE)
    assert content_of(body).continued == 1
    assert content_of(body).differences(content_of(events(*WHOLE))) == []


def test_seed_determines_requests_and_interruptions():
    def taken(seed: int) -> tuple[object, object]:
        settings = SurviveSettings(seed=seed, requests=300)
        return requests(settings), list(itertools.islice(interruptions(settings), 20))

    assert taken(3) == taken(3)
    assert taken(3) != taken(4)


def test_requests_cover_every_kind_and_name_a_seed():
    asked = requests(SurviveSettings(requests=1000))
    kinds = {kind for request in asked for kind in request.kinds}
    assert kinds == {
        *("chat", "completions", "greedy", "sampled", "tools", "schema", "regex", "stop strings", "logprobs"),
        *("n = 2", "penalties", "min_tokens"),
    }
    for request in asked:
        body = msgspec.json.decode(request.body)
        assert body["stream"]
        assert "seed" in body
    assert len({request.id for request in asked}) == 1000


def test_five_interruptions_contain_every_kind_once():
    planned = interruptions(SurviveSettings())
    for _ in range(10):
        assert {next(planned).kind for _ in range(5)} == set(InterruptionKind)


@pytest.mark.parametrize("values", [{"endpoints": 1}, {"requests": 0}, {"period_seconds": 0}, {"output_tokens": 7}])
def test_survival_run_settings_out_of_range_are_refused(values):
    with pytest.raises(StartupError):
        SurviveSettings(**values)


async def test_relay_cuts_silences_and_restores_connections():
    async def echo(stream: trio.SocketStream) -> None:
        with stream.socket:
            while data := await stream.receive_some():
                await stream.send_all(data)

    async def asked(stream: trio.SocketStream) -> bytes | None:
        try:
            await stream.send_all(b"hello")
            return bytes(await stream.receive_some())
        except trio.BrokenResourceError:
            return None

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(trio.serve_tcp, echo, 0)
        relay = Relay(listeners[0].socket.getsockname()[1])
        await nursery.start(relay.serve)
        with trio.fail_after(10):
            first = await trio.open_tcp_stream("127.0.0.1", relay.port)
            assert await asked(first) == b"hello"
            relay.set_cable(Cable.CUT)
            assert await asked(first) in (b"", None)
            second = await trio.open_tcp_stream("127.0.0.1", relay.port)
            assert await asked(second) in (b"", None)
            relay.set_cable(Cable.WHOLE)
            third = await trio.open_tcp_stream("127.0.0.1", relay.port)
            assert await asked(third) == b"hello"
            relay.set_cable(Cable.SILENT)
            await third.send_all(b"late")
            with trio.move_on_after(0.05) as patience:
                await third.receive_some()
            assert patience.cancelled_caught
            relay.set_cable(Cable.WHOLE)
            assert await third.receive_some() == b"late"
            for stream in (first, second, third):
                await stream.aclose()
        nursery.cancel_scope.cancel()
