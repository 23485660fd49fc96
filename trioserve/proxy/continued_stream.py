"""What a client has of one streamed response, over all of the endpoints that it comes from. Told bytes; waits for
nothing.

An endpoint that can go on where another one stopped ends each group of events with one that has an id: the tokens that
a client has more with this group. Only whole groups are passed on. So what a client has is always all up to an id, and
what the ids have said is what another endpoint is to go on from.

    id: 0:12,7        two tokens more of the choice 0
    id: 0:12! 41      one more, with which that choice ends; 41 is a state of the API's own, given back as it came
    id: >             the endpoint gives the request away, and this event is for the router
    id: .             there is nothing to go on with after this
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

import msgspec

from trioserve.contracts.errors import EndpointLost
from trioserve.proxy.event_splitter import EVENT_BYTES_MAX, EventSplitter, is_comment

__all__ = ["RESUME_BYTES_MAX", "ContinuedStream", "WhyNot", "field_values"]

RESUME_BYTES_MAX = 4096  # what an endpoint wants to be told again: a digest, a seed, a time
_EVENT_END = b"\n\n"
_ID_LINE = b"\nid: "
_ID = re.compile(rb"^id:[ ]?([^\n]*)\n", re.MULTILINE)
_OVER = b"."
_GIVEN_AWAY = b">"
_TOKENS = re.compile(rb"(\d{1,9}):((?:\d{1,9}(?:,\d{1,9})*)?)(!?)(?: ([^\r\n]*))?")


class WhyNot:
    """Why a stream cannot go on elsewhere, in a word."""

    NOT_RESUMABLE = "not_resumable"  # its endpoint has no way to tell what its client has
    BYTES = "bytes_max"  # there are more ids than may be kept
    MALFORMED = "malformed"  # an id says something that nobody can read


class ContinuedStream:
    """choice_count: of the response, over all of its prompts. bytes_max: of ids that are kept; a stream with more goes
    on as it comes, and cannot be continued. shows_ids: the client gets the ids, too. known: what the client had before,
    from another request, as the field `resume` of its body says it.

    is_answered: the endpoint at hand has begun: something of it was passed on that is no comment. is_over: so was the
    last group. failure: an event with an error, which is not passed on, and its code. given_away: the endpoint gives
    the request to another one, and this is what it says to that one.
    """

    def __init__(
        self, *, choice_count: int, bytes_max: int, shows_ids: bool = False, known: bytes | None = None
    ) -> None:
        self.is_answered = False
        self.is_over = False
        self.failure: bytes = b""
        self.failure_code: str | None = None
        self.given_away: bytes | None = None
        self._choice_count = choice_count
        self._bytes_max = bytes_max
        self._shows_ids = shows_ids
        self._splitter = EventSplitter()
        self._group = bytearray()
        self._log = bytearray()
        self._told: dict[str, msgspec.Raw] | None = None
        self._has_groups = False
        self._is_between = False  # two groups, of a stream whose ids are kept
        self._has_begun = False
        self._why_not: str | None = None
        self._known = b"" if known is None else _known_ids(known, choice_count)

    def know(self, resume: bytes) -> None:
        """What the client has from another router, as the field `resume` says it. To be called before `begin`."""
        self._known = _known_ids(resume, self._choice_count)

    def begin(self, told: str | None) -> None:
        """The head of a response is here. told: what the endpoint wants to be told again if this is to go on elsewhere;
        None: it makes no groups, and all that comes is passed on."""
        self._splitter, self._group = EventSplitter(), bytearray()
        self.failure, self.failure_code, self.given_away = b"", None, None
        self._has_groups = told is not None
        self._is_between = False
        self._told = None
        self._has_begun = self._has_begun or self.is_answered
        self.is_answered = False
        if not self._has_begun:  # an earlier endpoint may have said nothing
            self._why_not, self._log = None, bytearray(self._known)
        if told is not None and len(told) <= RESUME_BYTES_MAX:
            with suppress(msgspec.DecodeError):
                self._told = msgspec.json.decode(told, type=dict[str, msgspec.Raw])
        if self._told is None:
            self._give_up(WhyNot.MALFORMED if self._has_groups else WhyNot.NOT_RESUMABLE)
        self._is_between = self._why_not is None

    def feed(self, piece: bytes) -> bytes:
        """What may be passed on now. Raises EndpointLost for an event or a group of more than EVENT_BYTES_MAX."""
        if self._is_between and piece.endswith(_EVENT_END):
            # What nearly all of them look like: one event, which is a group, its id on the last line. Other ways to
            # know that it is one cost several times as much as counting its lines.
            line_count = piece.count(b"\n")
            begin = piece.rfind(_ID_LINE) + 5
            if (
                begin > 4
                and 48 <= piece[begin] < 58  # a digit
                and (line_count == 3 or (line_count == 4 and piece.find(b"\n", begin) == len(piece) - 2))
            ):
                self.is_answered = True
                log = self._log
                log += piece[begin:-1]
                if len(log) > self._bytes_max:
                    self._give_up(WhyNot.BYTES)
                return piece if self._shows_ids else piece[: begin - 4] + b"\n"
        events = self._splitter.feed(piece)
        if self._has_groups:
            events = self._whole_groups(events)
            self._is_between = self._why_not is None and not (self.is_over or self._group or self._splitter.holds_any)
        else:
            self.is_answered = self.is_answered or not is_comment(events)
        return events

    def take_back(self, kept_bytes: int, *, was_answered: bool) -> None:
        """Forget what the last `feed` noted, since none of it is passed on.

        Args:
            kept_bytes: of this stream before that feed.
            was_answered: is_answered before that feed.
        """
        del self._log[kept_bytes:]
        self.is_over, self.is_answered = False, was_answered

    def end(self) -> bytes:
        """The response has ended. What is left of it, if that is to be passed on; see `is_complete`."""
        rest = b"" if self._has_groups and not self.is_over else self._splitter.rest
        self._splitter = EventSplitter()
        self.is_answered = self.is_answered or not is_comment(rest)
        return rest

    @property
    def is_complete(self) -> bool:
        """Whether a response that ends now is whole, so far as that can be told."""
        return self.is_over if self._has_groups else self.is_answered

    @property
    def why_not(self) -> str | None:
        """Why it cannot go on elsewhere; None if it can."""
        return self._why_not

    @property
    def kept_bytes(self) -> int:
        return len(self._log)

    def token_count(self) -> int:
        """Tokens that its client has, of all choices."""
        return sum(map(len, (self._read() or ([], [], None))[0]))

    def resume_field(self) -> dict[str, object] | None:
        """What the next endpoint is to be told. None if nobody can tell that, see `why_not`."""
        if self._told is None or self._why_not is not None:
            return None
        read = self._read()
        if read is None:
            self._give_up(WhyNot.MALFORMED)
            return None
        token_ids, finished, state = read
        fields: dict[str, object] = {**self._told, "token_ids": token_ids, "finished": finished}
        if state is not None:
            fields["state"] = state
        return fields

    # --- inside ---

    def _whole_groups(self, events: bytes) -> bytes:
        if self._group and self._why_not != WhyNot.MALFORMED and _ID.search(events) is None and not _error_code(events):
            # Still the same group, which is not read again for each of its events.
            self._group += events
            self._check_group()
            return b""
        events = bytes(self._group) + events
        self._group.clear()
        if self.is_over:
            return events
        pieces = []
        position = 0
        for match in _ID.finditer(events):
            end = events.find(b"\n\n", match.end() - 1) + 2
            if end < 2:
                self._give_up(WhyNot.MALFORMED)  # its lines end in another way
                break
            if match[1] == _GIVEN_AWAY:
                before = events.rfind(b"\n\n", position, match.start())
                event_begin = position if before < 0 else before + 2
                pieces.append(events[position:event_begin])
                self.given_away = _data(events[event_begin:end])
            else:
                self._note(match[1])
                pieces += (events[position : match.start()], match[0] * self._shows_ids, events[match.end() : end])
            position = end
        rest = events[position:]
        if self.is_over or is_comment(rest):
            pieces.append(rest)
        elif (code := _error_code(rest)) is not None:
            self.failure, self.failure_code = rest, code
        elif self._why_not == WhyNot.MALFORMED:
            pieces.append(rest)
        else:
            self._group += rest
            self._check_group()
        return b"".join(pieces)

    def _check_group(self) -> None:
        if len(self._group) > EVENT_BYTES_MAX:
            raise EndpointLost(f"the endpoint sent events of more than {EVENT_BYTES_MAX} bytes without an id")

    def _note(self, id: bytes) -> None:
        self.is_answered = True
        if id == _OVER:
            self.is_over = True
        elif self._why_not is None:
            self._log += id
            self._log += b"\n"
            if len(self._log) > self._bytes_max:
                self._give_up(WhyNot.BYTES)

    def _give_up(self, why_not: str) -> None:
        self._why_not = self._why_not or why_not
        self._is_between = False
        self._log = bytearray()

    def _read(self) -> tuple[list[list[int]], list[bool], str | None] | None:
        """Token ids and whether it has ended, by choice, and the last state. None if the ids say something else."""
        token_ids: list[list[int]] = [[] for _ in range(self._choice_count)]
        finished = [False] * self._choice_count
        state: bytes | None = None
        for id in self._log.splitlines():
            match = _TOKENS.fullmatch(id)
            if match is None or int(match[1]) >= self._choice_count:
                return None
            choice = int(match[1])
            if match[2]:
                token_ids[choice] += map(int, match[2].split(b","))
            finished[choice] = finished[choice] or bool(match[3])
            state = state if match[4] is None else match[4]
        try:
            return token_ids, finished, None if state is None else bytes(state).decode()
        except UnicodeDecodeError:
            return None


class _Resume(msgspec.Struct):
    token_ids: list[list[int]] = []
    finished: list[bool] = []
    state: str | None = None


def _known_ids(known: bytes, choice_count: int) -> bytes:
    """As ids say it."""
    try:
        resume = msgspec.json.decode(known, type=_Resume)
    except msgspec.DecodeError:
        return b""  # the endpoint says what is wrong with it
    state = "" if resume.state is None else f" {resume.state}"
    ended = [*resume.finished, *(False for _ in resume.token_ids)]
    ids = [
        f"{choice}:{','.join(map(str, token_ids))}{'!' * ended[choice]}{state}\n"
        for choice, token_ids in enumerate(resume.token_ids[:choice_count])
    ]
    return "".join(ids).encode()


class _Failed(msgspec.Struct):
    """Of a response object."""

    error: dict[str, Any] | None = None


class _Event(msgspec.Struct):
    """How the APIs say that a stream breaks off: an error of its own, or a response that failed."""

    error: dict[str, Any] | None = None
    response: _Failed | None = None


def field_values(events: bytes, name: bytes) -> list[bytes]:
    """The values of all fields of this name in events, as lines."""
    lines = (line.partition(b":") for line in events.splitlines() if line.startswith(name))
    return [value.removeprefix(b" ") for key, _, value in lines if key == name]


def _data(event: bytes) -> bytes:
    return b"\n".join(field_values(event, b"data"))


def _error_code(events: bytes) -> str | None:
    """Of the first error among these events: its code, or where the API has none its type. None: there is no error."""
    if b'"error"' not in events:
        return None
    for data in field_values(events, b"data"):
        try:
            event = msgspec.json.decode(data, type=_Event)
        except msgspec.DecodeError:
            continue
        error = event.error or (event.response.error if event.response is not None else None)
        if error is not None:
            return str(error.get("code") or error.get("type"))
    return None
