"""Parser of a streamed response that can resume at another endpoint. It gets bytes and performs no I/O.

An endpoint that can resume streams ends each group of events with an event that has an id. The id contains the new
tokens of the group. The router forwards only complete groups. So the ids describe exactly what the client has, and the
next endpoint resumes from them.

    id: 0:12,7        two more tokens of choice 0
    id: 0:12! 41      one more token, which ends the choice; 41 is state of the API, returned to the next endpoint
    id: >             the endpoint hands over the request; this event is for the router
    id: .             the stream is complete
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

import msgspec

from trioserve.api.streams.cursors import GROUP_ID
from trioserve.contracts.errors import EndpointLost
from trioserve.proxy.streams.client_events import EVENT_BYTES_MAX, EventSplitter, is_comment

__all__ = ["RESUME_BYTES_MAX", "ContinuedStream", "WhyNot", "field_values"]

# The limit is a number of bytes. An endpoint sends a digest, a seed and a time, and the next endpoint gets these
# values.
RESUME_BYTES_MAX = 4096
_EVENT_END = b"\n\n"
_ID_LINE = b"\nid: "
_ID = re.compile(rb"^id:[ ]?([^\n]*)\n", re.MULTILINE)
_OVER = b"."
_HANDED_OVER = b">"


class WhyNot:
    """Reasons why a stream cannot resume at another endpoint, as words for metrics."""

    NOT_RESUMABLE = "not_resumable"  # The endpoint does not report which tokens the client has.
    BYTES = "bytes_max"  # The ids need more memory than allowed.
    MALFORMED = "malformed"  # An id is invalid.


class ContinuedStream:
    """Parser and memory of one streamed response, over all endpoints that it comes from.

    Args:
        choice_count: Number of choices, over all prompts.
        bytes_max: Limit of kept ids in bytes. A longer stream is forwarded, but cannot resume.
        shows_ids: Whether the client gets the ids.
        known: Part of the response that the client has from an earlier request, as the field `resume` of its body.

    Attributes:
        is_answered: True if the current endpoint has sent more than comments.
        is_over: True if the last group of the stream was forwarded.
        failure: Error event that ends the stream. It is not forwarded. Empty without an error.
        failure_code: Code of that error.
        handed_over: JSON for the next endpoint, if the endpoint hands over the request. Otherwise None.
    """

    def __init__(
        self, *, choice_count: int, bytes_max: int, shows_ids: bool = False, known: bytes | None = None
    ) -> None:
        self.is_answered = False
        self.is_over = False
        self.failure: bytes = b""
        self.failure_code: str | None = None
        self.handed_over: bytes | None = None
        self._choice_count = choice_count
        self._bytes_max = bytes_max
        self._shows_ids = shows_ids
        self._splitter = EventSplitter()
        self._group = bytearray()
        self._log = bytearray()
        self._resume_values: dict[str, msgspec.Raw] | None = None
        self._has_groups = False
        # True if the parser keeps the ids of the stream and the last group of events is complete.
        self._is_between = False
        self._has_begun = False
        # Values before the last call of `feed` or `end`, so that the call can be undone.
        self._bytes_before, self._was_answered = 0, False
        self._why_not: str | None = None
        self._known = b"" if known is None else _known_ids(known, choice_count)

    def set_known(self, resume: bytes) -> None:
        """Set the part of the response that the client received from another router. Must be called before `begin`.

        Args:
            resume: Field `resume` of a request body, as JSON.
        """
        self._known = _known_ids(resume, self._choice_count)

    def begin(self, resume_values: str | None) -> None:
        """Prepare for the stream of the next endpoint.

        Args:
            resume_values: Header with the values that the next endpoint needs to resume. None: the endpoint does not
                send groups, and all of its events are forwarded.
        """
        self._splitter, self._group = EventSplitter(), bytearray()
        self.failure, self.failure_code, self.handed_over = b"", None, None
        self._has_groups = resume_values is not None
        self._is_between = False
        self._resume_values = None
        self._has_begun = self._has_begun or self.is_answered
        self.is_answered = False
        if not self._has_begun:  # No earlier endpoint has sent anything but comments, so the kept ids start again.
            self._why_not, self._log = None, bytearray(self._known)
        if resume_values is not None and len(resume_values) <= RESUME_BYTES_MAX:
            with suppress(msgspec.DecodeError):
                self._resume_values = msgspec.json.decode(resume_values, type=dict[str, msgspec.Raw])
        if self._resume_values is None:
            self._abandon(WhyNot.MALFORMED if self._has_groups else WhyNot.NOT_RESUMABLE)
        self._is_between = self._why_not is None

    def feed(self, piece: bytes) -> bytes:
        """Add bytes and return the events for the client.

        Args:
            piece: Bytes that follow the previous piece.

        Returns:
            Complete groups. If the endpoint does not send groups, complete events.

        Raises:
            EndpointLost: An event or group is longer than EVENT_BYTES_MAX.
        """
        self._bytes_before, self._was_answered = len(self._log), self.is_answered
        if self._is_between and piece.endswith(_EVENT_END):
            # Nearly all pieces are one event that is a whole group, with its id on the last line. Counting lines is the
            # cheapest method to recognize such a piece.
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
                    self._abandon(WhyNot.BYTES)
                return piece if self._shows_ids else piece[: begin - 4] + b"\n"
        events = self._splitter.feed(piece)
        if self._has_groups:
            events = self._whole_groups(events)
            self._is_between = self._why_not is None and not (self.is_over or self._group or self._splitter.holds_any)
        else:
            self.is_answered = self.is_answered or not is_comment(events)
        return events

    def undo_feed(self) -> None:
        """Undo the last call of `feed` or `end`, because the router does not forward the result."""
        del self._log[self._bytes_before :]
        self.is_over, self.is_answered = False, self._was_answered

    def end(self) -> bytes:
        """Finish the response. After that, `is_complete` is True if the response is complete.

        Returns:
            Remaining bytes for the client.
        """
        self._bytes_before, self._was_answered = len(self._log), self.is_answered
        rest = b"" if self._has_groups and not self.is_over else self._splitter.rest
        self._splitter = EventSplitter()
        self.is_answered = self.is_answered or not is_comment(rest)
        return rest

    @property
    def is_complete(self) -> bool:
        """True if a response that ends now is complete, as far as the parser can know."""
        return self.is_over if self._has_groups else self.is_answered

    @property
    def why_not(self) -> str | None:
        """Reason why the stream cannot resume, in one word. None if the stream can resume."""
        return self._why_not

    @property
    def kept_bytes(self) -> int:
        return len(self._log)

    def token_count(self) -> int:
        """Return the number of tokens that the client has, over all choices."""
        return sum(map(len, (self._read() or ([], [], None))[0]))

    def resume_field(self) -> dict[str, object] | None:
        """Return the field `resume` for the next endpoint, or None if the stream cannot resume (see `why_not`)."""
        if self._resume_values is None or self._why_not is not None:
            return None
        read = self._read()
        if read is None:
            self._abandon(WhyNot.MALFORMED)
            return None
        token_ids, finished, state = read
        fields: dict[str, object] = {**self._resume_values, "token_ids": token_ids, "finished": finished}
        if state is not None:
            fields["state"] = state
        return fields

    # --- private methods ---

    def _whole_groups(self, events: bytes) -> bytes:
        if self._group and self._why_not != WhyNot.MALFORMED and _ID.search(events) is None and not _error_code(events):
            # The new events belong to a group that is not complete. The earlier events of the group are not searched
            # again.
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
                self._abandon(WhyNot.MALFORMED)  # The server ends its lines in a way that this parser does not support.
                break
            if match[1] == _HANDED_OVER:
                before = events.rfind(b"\n\n", position, match.start())
                event_begin = position if before < 0 else before + 2
                pieces.append(events[position:event_begin])
                self.handed_over = _data(events[event_begin:end])
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
                self._abandon(WhyNot.BYTES)

    def _abandon(self, why_not: str) -> None:
        self._why_not = self._why_not or why_not
        self._is_between = False
        self._log = bytearray()

    def _read(self) -> tuple[list[list[int]], list[bool], str | None] | None:
        """Parse the kept ids.

        Returns:
            Token ids by choice, the end of each choice, and the last state. None if an id is invalid.
        """
        token_ids: list[list[int]] = [[] for _ in range(self._choice_count)]
        finished = [False] * self._choice_count
        state: bytes | None = None
        for id in self._log.splitlines():
            match = GROUP_ID.fullmatch(id)
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
    """Turn the field `resume` into lines in the format of kept ids."""
    try:
        resume = msgspec.json.decode(known, type=_Resume)
    except msgspec.DecodeError:
        return b""  # The endpoint reports the error to the client.
    state = "" if resume.state is None else f" {resume.state}"
    ended = [*resume.finished, *(False for _ in resume.token_ids)]
    ids = [
        f"{choice}:{','.join(map(str, token_ids))}{'!' * ended[choice]}{state}\n"
        for choice, token_ids in enumerate(resume.token_ids[:choice_count])
    ]
    return "".join(ids).encode()


class _Failed(msgspec.Struct):
    """Response object with an error."""

    error: dict[str, Any] | None = None


class _Event(msgspec.Struct):
    """Event that can end a stream with an error. The event is an error itself, or contains a failed response."""

    error: dict[str, Any] | None = None
    response: _Failed | None = None


def field_values(events: bytes, name: bytes) -> list[bytes]:
    """Return the values of all fields with a name.

    Args:
        events: Complete events.
        name: Name of the field.
    """
    lines = (line.partition(b":") for line in events.splitlines() if line.startswith(name))
    return [value.removeprefix(b" ") for key, _, value in lines if key == name]


def _data(event: bytes) -> bytes:
    return b"\n".join(field_values(event, b"data"))


def _error_code(events: bytes) -> str | None:
    """Return the code of the first error among events, or its type if it has no code. None if there is no error."""
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
