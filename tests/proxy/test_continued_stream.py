"""Tests the parser of resumable streams: the events that the router forwards, and the tokens from which another
endpoint resumes.
"""

from __future__ import annotations

import itertools
import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trioserve.contracts.errors import EndpointLost
from trioserve.proxy.streams.client_events import EVENT_BYTES_MAX
from trioserve.proxy.streams.continued_stream import ContinuedStream, WhyNot

TOLD = '{"prompt_digest": "d", "seed": 7}'
COMMENT = b": keep-alive\n\n"
END = b"id: .\ndata: [DONE]\n\n"


def stream(**options) -> ContinuedStream:
    made = ContinuedStream(**{"choice_count": 1, "bytes_max": 100_000, **options})
    made.begin(TOLD)
    return made


def event(text: str, *, id: str | None = None, id_first: bool = True) -> bytes:
    data = f"data: {json.dumps({'id': 'cmpl-1', 'text': text})}\n".encode()
    if id is None:
        return data + b"\n"
    line = f"id: {id}\n".encode()
    return (line + data if id_first else data + line) + b"\n"


def without_ids(data: bytes) -> bytes:
    return b"".join(line for line in data.splitlines(keepends=True) if not line.startswith(b"id: "))


TEXTS = st.text(alphabet='a\n"é\u2028: id:error', max_size=6)


@st.composite
def groups(draw) -> list[tuple[bytes, int, list[int], bool]]:
    """Return event groups of two choices, with comments between the groups.

    Each group has its bytes, its choice, its token ids, and True if it ends the choice.
    """
    made = []
    for _ in range(draw(st.integers(1, 6))):
        choice = draw(st.integers(0, 1))
        token_ids = draw(st.lists(st.integers(0, 200_000), max_size=3))
        ends = draw(st.booleans())
        id = f"{choice}:{','.join(map(str, token_ids))}{'!' * ends}"
        events = [event(text) for text in draw(st.lists(TEXTS, max_size=2))]
        comments = COMMENT * draw(st.integers(0, 1))
        last = b"event: delta\n" * draw(st.integers(0, 1)) + event(draw(TEXTS), id=id, id_first=draw(st.booleans()))
        made.append((comments + b"".join(events) + last, choice, token_ids, ends))
    return made


@given(groups=groups(), data=st.data(), shows_ids=st.booleans())
def test_stream_that_ends_at_any_byte_gives_whole_groups_and_a_matching_resume_field(groups, data, shows_ids):
    said = b"".join(group for group, *_ in groups) + END
    stop = data.draw(st.integers(0, len(said)))
    cuts = sorted({0, stop, *data.draw(st.lists(st.integers(0, stop), max_size=6))})
    kept = stream(choice_count=2, shows_ids=shows_ids)
    sent = b"".join(kept.feed(said[begin:end]) for begin, end in itertools.pairwise(cuts))

    count = next(n for n in range(len(groups), -1, -1) if len(b"".join(group for group, *_ in groups[:n])) <= stop)
    whole = b"".join(group for group, *_ in groups[:count])
    is_over = stop == len(said)
    # The parser may forward a comment between two groups at once.
    expected = whole + END * is_over
    shown = expected if shows_ids else without_ids(expected)
    assert sent in (shown, shown + COMMENT)
    assert kept.is_over == is_over
    if not is_over:
        token_ids, finished = [[], []], [False, False]
        for _, choice, new, ends in groups[:count]:
            token_ids[choice] += new
            finished[choice] = finished[choice] or ends
        assert _plain(kept.resume_field()) == {
            "prompt_digest": "d",
            "seed": 7,
            "token_ids": token_ids,
            "finished": finished,
        }
        assert kept.token_count() == sum(map(len, token_ids))


def _plain(field):
    return json.loads(msgspec.json.encode(field))


@given(groups=groups(), data=st.data())
def test_client_gets_each_group_once_from_two_endpoints_in_a_row(groups, data):
    """The request to the second endpoint contains the last complete group. The second endpoint begins after it."""
    said = [group for group, *_ in groups]
    stop = data.draw(st.integers(0, len(b"".join(said))))
    kept = stream(choice_count=2)
    sent = kept.feed(b"".join(said)[:stop])
    count = next(n for n in range(len(said), -1, -1) if len(b"".join(said[:n])) <= stop)
    kept.begin(TOLD)
    sent += kept.feed(b"".join(said[count:]) + END)
    assert sent.replace(COMMENT, b"") == without_ids(b"".join(said) + END).replace(COMMENT, b"")
    assert kept.is_over
    if any(new for _, _, new, _ in groups):
        assert kept.token_count() == sum(len(new) for _, _, new, _ in groups)


def test_resume_field_has_the_last_state_unchanged():
    kept = stream()
    kept.feed(event("a", id="0:1 41") + event("b", id="0:2"))
    assert kept.resume_field()["state"] == "41"


def test_stream_with_too_many_ids_is_forwarded_but_cannot_resume():
    kept = stream(bytes_max=20)
    for token in range(10):
        assert kept.feed(event("x", id=f"0:{token}")) == event("x")
    assert (kept.why_not, kept.kept_bytes, kept.resume_field()) == (WhyNot.BYTES, 0, None)
    assert kept.feed(END) == without_ids(END)
    assert kept.is_over


@pytest.mark.parametrize("id", ["0", "x:1", "1:5", "0:1,", "0:-1", "0:1 a\rb", "0:1!!"])
def test_stream_with_an_invalid_id_is_still_forwarded(id):
    kept = stream()
    assert kept.feed(event("x", id=id) + event("y", id="0:3"))
    assert kept.resume_field() is None
    assert kept.why_not == WhyNot.MALFORMED
    assert kept.feed(event("z", id="0:4")) == event("z")


@pytest.mark.parametrize("told", ["", "[]", "{", '"x"', "{" + " " * 5000 + "}"])
def test_stream_with_an_invalid_resume_header_cannot_resume(told):
    kept = ContinuedStream(choice_count=1, bytes_max=1000)
    kept.begin(told)
    assert kept.feed(event("x", id="0:1")) == event("x")
    assert kept.why_not == WhyNot.MALFORMED


def test_stream_without_resume_header_is_forwarded_unchanged():
    kept = ContinuedStream(choice_count=1, bytes_max=1000)
    kept.begin(None)
    assert kept.feed(event("x", id="0:1") + event("y") + b"data: half") == event("x", id="0:1") + event("y")
    assert kept.end() == b"data: half"
    assert kept.why_not == WhyNot.NOT_RESUMABLE


@pytest.mark.parametrize(
    ("error", "code"),
    [
        ({"error": {"message": "m", "type": "server_error", "param": None, "code": "engine_fault"}}, "engine_fault"),
        ({"type": "error", "error": {"type": "api_error", "message": "m"}}, "api_error"),
        ({"type": "response.failed", "response": {"error": {"code": "draining", "message": "m"}}}, "draining"),
    ],
)
@pytest.mark.parametrize("before", [b"", event("a", id="0:1"), event("half of a group")])
def test_error_event_is_kept_and_not_forwarded(error, code, before):
    kept = stream()
    sent = kept.feed(before + b"event: error\ndata: " + json.dumps(error).encode() + b"\n\n")
    assert sent == (b"" if b"half" in before else without_ids(before))
    assert kept.failure_code == code
    assert json.dumps(error).encode() in kept.failure


def test_text_that_looks_like_an_error_is_forwarded():
    kept = stream()
    begun = b'data: {"type": "response.created", "response": {"id": "resp_1", "error": null}}\n\n'
    assert kept.feed(begun) == b""
    assert kept.failure_code is None
    assert kept.feed(event('"error"', id="0:1")) == begun + event('"error"')


@pytest.mark.parametrize("params", ["null", '{"do_remote_prefill": true}'])
def test_hand_over_event_has_the_parameters_for_the_next_endpoint(params):
    kept = stream()
    given = f'data: {{"object":"hand_over","kv_transfer_params":{params}}}\nid: >\n\n'.encode()
    assert kept.feed(event("a", id="0:1") + given) == event("a")
    assert json.loads(kept.handed_over)["kv_transfer_params"] == json.loads(params)
    assert kept.resume_field()["token_ids"] == [[1]]


def test_group_without_end_counts_as_a_lost_endpoint():
    kept = stream()
    with pytest.raises(EndpointLost, match="without an id"):
        for _ in range(EVENT_BYTES_MAX // 1_000_000 + 1):
            kept.feed(b"data: " + b"x" * 1_000_000 + b"\n\n")


def test_tokens_from_an_earlier_request_are_in_the_resume_field():
    known = {"token_ids": [[1, 2], []], "finished": [False, True], "seed": 3, "state": "9"}
    kept = ContinuedStream(choice_count=2, bytes_max=1000, known=json.dumps(known).encode())
    kept.begin(TOLD)
    kept.feed(event("x", id="0:3"))
    field = _plain(kept.resume_field())
    assert (field["token_ids"], field["finished"], field["state"]) == ([[1, 2, 3], []], [False, True], "9")


def test_second_endpoint_can_send_groups_if_the_first_sent_no_event():
    kept = ContinuedStream(choice_count=1, bytes_max=1000)
    kept.begin(None)
    kept.begin(TOLD)
    assert kept.feed(event("x", id="0:1")) == event("x")
    assert kept.resume_field()["token_ids"] == [[1]]
