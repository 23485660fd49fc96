"""Position of a client in a streamed response, as the `id:` of its events and the `Last-Event-ID` of its next request.

    17~9f3a01bc          one choice, 17 tokens; then the checksum of these tokens
    3!.4~1c09d2aa        two choices, the first has ended
    17+1~9f3a01bc        a second group of events without a new token
    17~9f3a01bc~41       41 is the state of the API at this position
    .                    the end of the response

A position depends only on the tokens, not on their grouping. So a response that is computed again passes through the
same positions, at any router. The checksum (CRC-32) tells whether it is the same response so far. No I/O.
"""

from __future__ import annotations

import re
import zlib

import msgspec

from trioserve.contracts.errors import InvalidRequest

__all__ = ["CHOICES_NUMBERED_MAX", "END", "LAST_EVENT_ID", "Position", "PositionKeeper", "parse_position"]

LAST_EVENT_ID = "last-event-id"
CHOICES_NUMBERED_MAX = 128  # over all choices of one prompt; the id of every event contains the counts of all choices
POSITION_CHARACTERS_MAX = 2048  # enough for these choices with nine digits each, a checksum and a state
CHOICES_MAX = 128 * 128  # of 128 prompts; ids of later choices are ignored
_POSITION = re.compile(r"(\d{1,9}!?(?:\.\d{1,9}!?)*)(?:\+(\d{1,9}))?~([0-9a-f]{8})(?:~([\w-]{1,32}))?", re.ASCII)
_STATE = re.compile(rb"[A-Za-z0-9_-]{1,32}")  # states that fit into an id; other states are left out


class Position(msgspec.Struct, frozen=True):
    """Position in a streamed response.

    Attributes:
        counts: Number of tokens of each choice.
        finished: Whether each choice has ended.
        more: Event groups since the last group with a token or the end of a choice.
        check: Checksum of the tokens.
        state: State of the API. None if there is none or it does not fit into an id.
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
        """True before the first token and before the end of any choice."""
        return not any(self.counts) and not any(self.finished)

    def of_choices(self, count: int) -> Position:
        """Return the position for a number of choices.

        Choices without an event yet get count 0. Choices beyond the number are dropped.

        Args:
            count: Number of choices of the response.
        """
        more = max(0, count - len(self.counts))
        return msgspec.structs.replace(
            self,
            counts=(*self.counts, *(0 for _ in range(more)))[:count],
            finished=(*self.finished, *(False for _ in range(more)))[:count],
        )

    def is_beyond(self, other: Position) -> bool:
        """Return True if a response at this position can no longer reach another position.

        Args:
            other: Position to reach.
        """
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
"""Position after the last event."""


class PositionKeeper:
    """Position of a response that is read, computed from the ids of its groups.

    Endpoints write `<choice>:<token ids>`, with a `!` if the choice has ended, and then a space and the API's state.

    Attributes:
        is_at_end: True after the last event.
    """

    def __init__(self) -> None:
        self.is_at_end = False
        self._counts: list[int] = []
        self._finished: list[bool] = []
        self._checks: list[int] = []
        self._check = 0
        self._state = ""
        self._more = -1  # the first group without a token has position 0

    def note(self, id: bytes) -> None:
        """Record a group of events.

        Args:
            id: Id of the group. An invalid id is ignored.
        """
        progress, _, state = id.partition(b" ")
        if progress == b".":
            self.is_at_end = True
            return
        choice_text, colon, tokens = progress.partition(b":")
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
            # The checksum is not a plain sum: two choices that have changed places are another response.
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
        # Same as str(position), but without making a Position: this runs for every group.
        if len(self._counts) == 1:
            more = f"+{self._more}" if self._more > 0 else ""
            return f"{self._counts[0]}{'!' if self._finished[0] else ''}{more}~{self._check:08x}{self._state}"
        return str(self.position)


def parse_position(text: str) -> Position | str | None:
    """Parse the Last-Event-ID of a client.

    Args:
        text: Value of the header.

    Returns:
        A position, END, or None if the text is empty because the client has received no event.

    Raises:
        InvalidRequest: The text is not an id that a router has sent.
    """
    if text in ("", END):
        return text or None
    match = _POSITION.fullmatch(text) if len(text) <= POSITION_CHARACTERS_MAX else None
    if match is None:
        raise InvalidRequest(
            f"Last-Event-ID is {text[:80]!r}: it must be the unchanged id of the last event that the client received "
            "of this request's stream, or empty if it received none",
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
