"""How far into a streamed response a client is: what stands in the `id:` lines that it gets, and in the `Last-Event-ID`
with which it comes back, at whichever router.

    17~9f3a01bc          one choice, 17 tokens; the check is of these tokens
    3!.4~1c09d2aa        two choices, the first has ended
    17+1~9f3a01bc        a second group of events without a new token
    17~9f3a01bc~41       and 41 is the state of the API's own that the endpoint has told there
    .                    the end: there is nothing more

A position is a function of the tokens, not of their way: a response that is computed once more passes through the same
ones. The check (CRC-32) tells whether it is the same response so far. Pure.
"""

from __future__ import annotations

import re
import zlib

import msgspec

from trioserve.contracts.errors import InvalidRequest

__all__ = ["CHOICES_NUMBERED_MAX", "END", "LAST_EVENT_ID", "Position", "PositionKeeper", "parse_position"]

LAST_EVENT_ID = "last-event-id"
CHOICES_NUMBERED_MAX = 128  # all of one prompt; every event has the counts of all choices in its id
POSITION_CHARACTERS_MAX = 2048  # so many choices of nine digits each, a check and a state
CHOICES_MAX = 128 * 128  # of 128 prompts; an id that names a later one says nothing
_POSITION = re.compile(r"(\d{1,9}!?(?:\.\d{1,9}!?)*)(?:\+(\d{1,9}))?~([0-9a-f]{8})(?:~([\w-]{1,32}))?", re.ASCII)
_STATE = re.compile(rb"[A-Za-z0-9_-]{1,32}")  # what fits into an id; another one is left out


class Position(msgspec.Struct, frozen=True):
    """counts: tokens of each choice. finished: of each, whether it has ended. more: groups of events since the last
    one that brought any of that. check: of the tokens. state: of the API's own; None: there is none, or it is not told.
    """

    counts: tuple[int, ...]
    finished: tuple[bool, ...]
    more: int
    check: int
    state: str | None = None

    def __str__(self) -> str:
        choices = ".".join(
            f"{count}{'!' if is_finished else ''}"
            for count, is_finished in zip(self.counts, self.finished, strict=True)
        )
        more = f"+{self.more}" if self.more else ""
        return f"{choices}{more}~{self.check:08x}{'' if self.state is None else f'~{self.state}'}"

    @property
    def is_empty(self) -> bool:
        """No token and no end of a choice has come."""
        return not any(self.counts) and not any(self.finished)

    def of_choices(self, count: int) -> Position:
        """The same of a response with so many choices, of which some may have told nothing yet. Those that it does not
        have are not looked at."""
        more = max(0, count - len(self.counts))
        return msgspec.structs.replace(
            self,
            counts=(*self.counts, *(0 for _ in range(more)))[:count],
            finished=(*self.finished, *(False for _ in range(more)))[:count],
        )

    def is_beyond(self, other: Position) -> bool:
        """Whether a response that is here will not come to the other one any more."""
        if self == other:
            return False
        mine = [*zip(self.counts, self.finished, strict=True)]
        theirs = [*zip(other.counts, other.finished, strict=True)]
        if len(mine) > len(theirs):
            return True
        if any(here > there for here, there in zip(mine, theirs, strict=False)):
            return True
        return mine == theirs and (self.more > other.more or self.check != other.check)


END = "."
"""The position behind the last event."""


class PositionKeeper:
    """Follows one response by the ids of its groups, as endpoints write them: `<choice>:<token ids>`, with a `!` if the
    choice has ended, and behind a space what is the endpoint's own."""

    def __init__(self) -> None:
        self.is_at_end = False
        self._counts: list[int] = []
        self._finished: list[bool] = []
        self._checks: list[int] = []
        self._check = 0
        self._state = ""
        self._more = -1  # the first group without a token is the position 0

    def note(self, id: bytes) -> None:
        """A group that ended with this id. One that is of another form says nothing."""
        told, _, state = id.partition(b" ")
        if told == b".":
            self.is_at_end = True
            return
        choice_text, colon, tokens = told.partition(b":")
        if not colon or not choice_text.isdigit() or len(choice_text) > 9 or int(choice_text) >= CHOICES_MAX:
            return
        choice = int(choice_text)
        while len(self._counts) <= choice:
            self._checks.append(zlib.crc32(b"%d:" % len(self._checks)))
            self._counts.append(0)
            self._finished.append(False)
        ends = tokens.endswith(b"!")
        if ends:
            self._finished[choice] = True
            tokens = tokens[:-1]
        if tokens:
            before = self._checks[choice]
            after = self._checks[choice] = zlib.crc32(tokens + b",", before)
            # Not their sum: two choices that have changed places are another response.
            self._check = (self._check + (after - before) * (2 * choice + 1)) % 2**32
            self._counts[choice] += tokens.count(b",") + 1
        self._more = 0 if tokens or ends else self._more + 1
        if state:
            self._state = f"~{state.decode()}" if _STATE.fullmatch(state) else ""

    @property
    def position(self) -> Position:
        return Position(
            tuple(self._counts), tuple(self._finished), max(0, self._more), self._check, self._state[1:] or None
        )

    def __str__(self) -> str:
        if self.is_at_end:
            return END
        # As str(position), without the value between: it is written for every group.
        if len(self._counts) == 1:
            more = f"+{self._more}" if self._more > 0 else ""
            return f"{self._counts[0]}{'!' if self._finished[0] else ''}{more}~{self._check:08x}{self._state}"
        return str(self.position)


def parse_position(text: str) -> Position | str | None:
    """What a client sends as Last-Event-ID: a position, END, or None where it has got nothing (an empty one). Raises
    InvalidRequest for what no router has given it."""
    if text in ("", END):
        return text or None
    match = _POSITION.fullmatch(text) if len(text) <= POSITION_CHARACTERS_MAX else None
    if match is None:
        raise InvalidRequest(
            f"Last-Event-ID is {text[:80]!r}: it is to be the id of the last event that came of this request's stream, "
            "as it came, or empty if none did",
            param="Last-Event-ID",
        )
    choices = match[1].split(".")
    return Position(
        tuple(int(choice.rstrip("!")) for choice in choices),
        tuple(choice.endswith("!") for choice in choices),
        int(match[2] or 0),
        int(match[3], 16),
        match[4],
    )
