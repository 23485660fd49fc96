"""Tests the splitter of server-sent events. The pieces that it gets may end anywhere."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trioserve.contracts.errors import EndpointLost
from trioserve.contracts.image_generation import ImageRequestLimits
from trioserve.proxy.streams import client_events
from trioserve.proxy.streams.client_events import EventSplitter, is_comment

ENDS = ("\n\n", "\r\n\r\n", "\r\r", "\n\r\n", "\r\n\n", "\r\n\r")
LINES = st.sampled_from(["data: x", "data: y\r\ndata: z", ": ping", "id: 1\nevent: e\rdata", "data: \u2028é"])


@given(events=st.lists(st.tuples(LINES, st.sampled_from(ENDS)), max_size=6), data=st.data())
def test_splitter_returns_whole_events_for_pieces_that_end_anywhere(events, data):
    stream = "".join(line + end for line, end in events).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    whole, came = EventSplitter(), b""
    for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        events_now = whole.feed(stream[begin:end])
        came += events_now
        assert events_now == b"" or came.endswith((b"\n\n", b"\r\r", b"\n\r", b"\r\n\n", b"\n\r\n"))
    assert came + whole.rest == stream
    assert whole.rest in (b"", b"\n"), "only an LF after a CR that ended the event may be left"


def test_event_splitter_keeps_an_incomplete_event_back():
    whole = EventSplitter()
    assert whole.feed(b"data: 1") == b""
    assert whole.feed(b"\n") == b""
    assert whole.feed(b"\ndata: 2\n\ndata: 3") == b"data: 1\n\ndata: 2\n\n"
    assert whole.rest == b"data: 3"


def test_line_without_a_following_empty_line_is_not_an_event():
    whole = EventSplitter()
    assert whole.feed(b"data: 1\r\n") == b""
    assert whole.feed(b"data: 2\r\n") == b""
    assert whole.feed(b"\r\n") == b"data: 1\r\ndata: 2\r\n\r\n"


def test_too_long_event_counts_as_a_lost_endpoint(monkeypatch):
    monkeypatch.setattr(client_events, "EVENT_BYTES_MAX", 10)
    whole = EventSplitter()
    assert whole.feed(b"x" * 20 + b"\n\n" + b"y" * 10) == b"x" * 20 + b"\n\n"
    with pytest.raises(EndpointLost, match="more than 10 bytes"):
        whole.feed(b"y")


def test_event_can_contain_the_largest_image():
    """The image is noise, which no format compresses, in base64."""
    pixels = ImageRequestLimits().pixels_max
    whole = EventSplitter()
    assert whole.feed(b'data: {"b64_json": "') == b""
    assert whole.feed(bytes(4 * pixels + 100_000)) == b""
    assert whole.feed(b"\n\n").endswith(b"\n\n")


@pytest.mark.parametrize(
    "events, expected",
    [(b"", True), (b"\n", True), (b": a\r\n\r\n", True), (b":\r\r: b\n\n", True), (b": a\n\ndata: 1\n\n", False)],
)
def test_event_splitter_recognizes_comments(events, expected):
    assert is_comment(events) is expected
