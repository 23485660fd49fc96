"""Tests that a stream becomes events wherever it is divided, and that events become times, tokens and outcomes."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trioserve.bench.load import (
    EVENT_BYTES_MAX,
    EventParser,
    EventTooLong,
    PlannedRequest,
    ResponseReader,
    Tally,
    excerpt,
)
from trioserve.bench.report import Outcome

line_texts = st.text(alphabet="ab:{} é", max_size=6)
events_of_lines = st.lists(st.lists(line_texts, min_size=1, max_size=3), max_size=5)


@given(events_of_lines, st.sampled_from(["\n", "\r\n", "\r"]), st.lists(st.integers(0, 200)), st.booleans())
def test_events_do_not_depend_on_how_the_stream_is_divided(events, line_end, cuts, with_noise):
    noise = f": comment{line_end}event: x{line_end}" if with_noise else ""
    blocks = [noise + "".join(f"data: {line}{line_end}" for line in lines) + line_end for lines in events]
    stream = "".join(blocks).encode()
    borders = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    parser = EventParser()
    heard = [event for start, end in itertools.pairwise(borders) for event in parser.feed(stream[start:end])]
    assert heard == ["\n".join(lines).encode() for lines in events]


@pytest.mark.parametrize(
    "stream, events",
    [
        (b"data:no space\n\n", [b"no space"]),
        (b"data:  two\n\n", [b" two"]),
        (b": keep-alive\n\ndata: a\n\n", [b"a"]),
        (b"\n\n\n\ndata: a\n\n\n\n\ndata: b\n\n", [b"a", b"b"]),
        (b"data\n\n", [b""]),
        (b"database: x\n\n", []),
        (b"data: a\r\n\r\ndata: b\r\n\r\n", [b"a", b"b"]),
        (b"data: a\r\ndata: b\r\n\r\n", [b"a\nb"]),
        (b"data: unfinished\n", []),
    ],
)
def test_parsed_events_follow_the_specification_of_event_streams(stream, events):
    for size in (1, 2, len(stream)):
        parser = EventParser()
        assert [event for i in range(0, len(stream), size) for event in parser.feed(stream[i : i + size])] == events


def test_stream_that_ends_inside_an_event_is_refused():
    parser = EventParser()
    with pytest.raises(EventTooLong):
        parser.feed(b"data: " + bytes(EVENT_BYTES_MAX))


class Heard:
    """A reader that gets a response as lists of pairs of seconds and a chunk."""

    def __init__(self, *, abort_after_tokens: int | None = None, status: int = 200) -> None:
        planned = PlannedRequest(
            index=0, arrival_seconds=None, body=b"", prompt_token_count=5, abort_after_tokens=abort_after_tokens
        )
        self.tally = Tally()
        self.reader = ResponseReader(planned, started_at=100.0, tally=self.tally)
        self.reader.head(status)

    def tell(self, seconds: float, chunk: object) -> bool:
        data = chunk if isinstance(chunk, bytes) else json.dumps(chunk).encode()
        return self.reader.body(b"data: " + data + b"\n\n", 100.0 + seconds)


def text(content: str, **more: object) -> dict[str, object]:
    return {"choices": [{"index": 0, "text": content, **more}]}


def test_times_begin_at_the_start_and_gaps_are_between_chunks_with_tokens():
    heard = Heard()
    heard.tell(0.5, text("a"))
    heard.tell(0.75, text(""))  # This chunk has no text, so it ends no gap.
    heard.tell(1.0, text("b"))
    heard.tell(3.0, text("c", finish_reason="length"))
    heard.tell(3.25, {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 4}})
    assert heard.tell(3.5, b"[DONE]")
    one = heard.reader.measurement(None, is_over=True)
    assert one.outcome is Outcome.COMPLETED
    assert (one.ttft_seconds, list(one.gaps_seconds), one.e2e_seconds) == (0.5, [0.5, 2.0], 3.5)
    assert (one.prompt_tokens, one.output_tokens, one.counted_by_usage) == (5, 4, True)
    assert heard.tally.output_tokens == 3


@pytest.mark.parametrize(
    "choice, carries",
    [
        ({"delta": {"role": "assistant", "content": ""}}, False),
        ({"delta": {"content": None}, "finish_reason": "stop"}, False),
        ({"delta": {"content": "a"}}, True),
        ({"delta": {"reasoning_content": "a"}}, True),
        ({"delta": {"reasoning": "a"}}, True),
        ({"delta": {"tool_calls": [{"index": 0}]}}, True),
        ({"text": "a", "logprobs": None}, True),
        ({"text": "", "token_ids": [7]}, True),
        ({"text": "", "token_ids": []}, False),
    ],
)
def test_ttft_is_the_time_of_the_first_chunk_with_a_token(choice, carries):
    heard = Heard()
    heard.tell(0.5, {"choices": [choice]})
    assert (heard.reader.measurement(None, is_over=False).ttft_seconds == 0.5) is carries


def test_tokens_without_usage_are_counted_by_chunks_or_ids():
    heard = Heard()
    heard.tell(1, text("a"))
    heard.tell(2, text("bcd", token_ids=[1, 2, 3]))
    heard.tell(3, b"[DONE]")
    one = heard.reader.measurement(None, is_over=True)
    assert (one.output_tokens, one.counted_by_usage, one.prompt_tokens) == (4, False, 5)


def test_cached_prompt_tokens_come_from_the_usage():
    heard = Heard()
    usage = {"prompt_tokens": 5, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 4}}
    heard.tell(1, {**text("a", finish_reason="stop"), "usage": usage})
    assert heard.reader.measurement(None, is_over=True).cached_prompt_tokens == 4


def test_client_leaves_at_its_planned_token():
    heard = Heard(abort_after_tokens=2)
    assert heard.tell(1, text("a"))
    assert not heard.tell(2, text("b"))
    one = heard.reader.measurement(None, is_over=True)
    assert (one.outcome, one.output_tokens, one.ttft_seconds, one.e2e_seconds) == (Outcome.ABORTED, 2, 1.0, None)


@pytest.mark.parametrize(
    "chunks, name, said",
    [
        ([{"error": {"message": "engine broke", "code": 500}}], "answer error", "engine broke"),
        ([b"{not json"], "answer unreadable", "cannot be read"),
        ([b'{"choices": [{"text": "\xff"}]}'], "answer unreadable", "cannot be read"),
        ([{"choices": 3}], "answer unreadable", "cannot be read"),
        ([text("a")], "answer incomplete", "without [DONE]"),
        ([text("a", finish_reason="abort"), b"[DONE]"], "answer abort", "finish_reason abort"),
        ([], "answer incomplete", "without [DONE]"),
    ],
)
def test_response_other_than_requested_is_a_failure(chunks, name, said):
    heard = Heard()
    for chunk in chunks:
        heard.tell(1, chunk)
    one = heard.reader.measurement(None, is_over=True)
    assert one.outcome is Outcome.FAILED
    assert one.failure is not None
    assert one.failure.name == name
    assert said in one.failure.message


def test_refusal_of_a_request_is_counted_by_status_with_the_servers_message():
    heard = Heard(status=503)
    heard.reader.body(b'{"error": {"message": "queue ', 101.0)
    heard.reader.body(b'is full"}}', 102.0)
    failure = heard.reader.measurement(None, is_over=True).failure
    assert failure is not None
    assert (failure.name, failure.message) == ("status 503", "status 503: queue is full")


def test_interrupted_request_is_neither_failed_nor_completed():
    heard = Heard()
    heard.tell(1, text("a"))
    one = heard.reader.measurement(None, is_over=False)
    assert (one.outcome, one.failure, one.output_tokens) == (Outcome.INTERRUPTED, None, 1)


@pytest.mark.parametrize(
    "body, said",
    [
        (b'{"error": {"message": "no\\nway"}}', "no way"),
        (b'{"error": "plain"}', "plain"),
        (b'{"message": "old vLLM"}', "old vLLM"),
        (b"<h1>Bad  Gateway</h1>", "<h1>Bad Gateway</h1>"),
        (b"", "an empty body"),
        (b"\xff" * 3, "\ufffd" * 3),
        (b"x" * 500, "x" * 200 + " ..."),
    ],
)
def test_excerpt_of_a_response_is_one_short_line(body, said):
    assert excerpt(body) == said
