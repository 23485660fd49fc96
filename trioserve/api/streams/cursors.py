"""Cursors record how much of a streamed response a client has received. They occur in headers, event ids and the field
`resume`.

A resumable response groups its events. A group is all events that one delta makes, and its last line is an id:

    id: 0:12,7        the client has received the tokens 12 and 7 of choice 0, and tokens before them without an event
    id: 0:12!         and with this group the choice has ended
    id: 0:12 41       41 is state of the API
    id: .             the group of usage and [DONE]: nothing is left to resume

A client that collects these ids sends them back as `resume` in a body. A router with peers replaces each id by a
position, so that the last id is enough. The client sends it back as `Last-Event-ID`:

    17~9f3a01bc       one choice, 17 tokens; then the checksum of these tokens
    3!.4~1c09d2aa     two choices, the first has ended
    17+1~9f3a01bc     a second group of events without a new token
    17~9f3a01bc~41    41 is the state of the API at this position
    .                 the end of the response

A position depends only on the tokens, not on their grouping. So a response that is computed again passes through the
same positions, at any router. The checksum (CRC-32) shows whether the repeated response has the same tokens up to this
position. The module does no I/O.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from typing import Annotated

import msgspec

from trioserve.api.generation import is_partial
from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.events import TokenLogprob
from trioserve.contracts.output import Delta
from trioserve.contracts.resume import Resume

__all__ = [
    "CHOICES_NUMBERED_MAX",
    "DETACH_HEADER",
    "END",
    "FINGERPRINT_HEADER",
    "GROUP_ID",
    "KEEP_HEADER",
    "KEPT_HEADER",
    "LAST_EVENT_ID",
    "LOGPROB_MIN",
    "RESUMABLE_HEADER",
    "RESUME_HEADER",
    "SEED_HEADER",
    "GroupIds",
    "Position",
    "PositionKeeper",
    "ResumeBody",
    "parse_position",
    "resume_body",
    "shown_logprobs",
]

RESUMABLE_HEADER = "x-trioserve-resumable"
"""Request header: "1" asks for a stream with group ids."""
RESUME_HEADER = "x-trioserve-resume"
"""Response header: what `resume` needs besides the ids, as JSON."""
FINGERPRINT_HEADER = "x-trioserve-fingerprint"
"""Response header: identifies the computation. Servers with equal fingerprints compute equal tokens."""
SEED_HEADER = "x-trioserve-seed"
"""Seed that a router chooses for a request without one. Every router chooses the same seed for the same request."""
KEEP_HEADER = "x-trioserve-keep"
"""Request header of a router: name under which the endpoint keeps the stream."""
KEPT_HEADER = "x-trioserve-kept"
"""Response header: seconds that the stream continues without a reader, and the number of this reader."""
DETACH_HEADER = "x-detach-timeout"
"""Request header: seconds that the stream continues without a reader. Its events have numbers instead of group ids."""
LAST_EVENT_ID = "last-event-id"

GROUP_ID = re.compile(rb"(\d{1,9}):((?:\d{1,9}(?:,\d{1,9})*)?)(!?)(?: ([^\r\n]*))?")
"""Id of a group: choice, token ids, "!" if the choice has ended, and state of the API."""
LAST_ID = b"id: .\n\n"


class GroupIds:
    """Adds an `id:` line to the events of each delta of one response. The events of one delta are a group."""

    def __init__(self) -> None:
        self._pending: dict[int, list[int]] = {}  # For each choice, the tokens that have made no event yet.

    def begin(self, events: bytes, state: bytes) -> bytes:
        """Return events that precede all tokens, with an `id:` line.

        Args:
            state: state of the API.
        """
        return b"%bid: 0: %b\n\n" % (events[:-1], state)

    def group(self, events: bytes, choice_index: int, delta: Delta, state: bytes = b"") -> bytes:
        """Return the events of one delta, with an `id:` line that has the delta's tokens.

        Args:
            events: all events of the delta. Empty: the next call for this choice also writes the tokens of this delta.
            choice_index: index of the choice, from 0.
            delta: output of the choice.
            state: state of the API, with a space before it. Empty: none.

        Returns:
            The events with the `id:` line. Empty if there are no events.
        """
        token_ids: Sequence[int] = delta.token_ids
        if not events:
            self._pending.setdefault(choice_index, []).extend(token_ids)
            return b""
        if self._pending and (pending := self._pending.pop(choice_index, None)):
            token_ids = (*pending, *token_ids)
        if len(token_ids) == 1 and delta.finish_reason is None:  # Nearly all deltas satisfy this condition.
            return events[:-1] + b"id: %d:%d" % (choice_index, token_ids[0]) + state + b"\n\n"
        ids = b",".join([b"%d" % token_id for token_id in token_ids])
        end = b"" if delta.finish_reason is None or is_partial(delta.finish_reason) else b"!"
        return b"%bid: %d:%b%b%b\n\n" % (events[:-1], choice_index, ids, end, state)

    def last(self, events: bytes) -> bytes:
        """Return the last events of the response, with the `id:` line that says that nothing is left to resume.

        Args:
            events: the last events.
        """
        return events[:-1] + LAST_ID


LOGPROB_MIN = -9999.0  # OpenAI's API sends this value for an impossible token.

# The time is limited to numbers that all JSON parsers read, because every event of the response repeats it.
UnixSeconds = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class ResumeBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Output of a response that the client has received.

    Attributes:
        token_ids: all tokens of each choice that the client has, in the order of the choices' indices.
        finished: for each choice, whether it has ended.
        prompt_digest: digest of the prompt, from the head of the response.
        seed: seed of the response, from its head.
        created: Unix time at which the response began, from its head.
        id: id of the response, from its head.
        state: state of the API in the last `id:` line that has one.
        end_thinking: true if the reasoning was ended by request.
        logprobs: for each choice, the log probabilities of its tokens.
        weight_versions: for each choice, pairs of a weight version and the number of tokens that it sampled.
    """

    token_ids: list[list[int]]
    finished: list[bool]
    prompt_digest: str | None = None
    seed: int | None = None
    created: UnixSeconds | None = None
    id: str | None = None
    state: str | None = None
    end_thinking: bool = False
    logprobs: list[list[TokenLogprob]] | None = None
    weight_versions: list[list[tuple[str, int]]] | None = None


def resume_body(
    states: Sequence[Resume], *, prompt_digest: str | None, seed: int | None, created: int | None = None
) -> ResumeBody:
    """Merge the states of all prompts of a request into one `resume`.

    Args:
        states: state of each prompt's response.
        prompt_digest: digest of all prompts. None: unknown.
        seed: seed of the response. None: none.
        created: Unix time at which the response began. None: unknown.
    """
    has_logprobs = all(state.logprobs is not None for state in states)
    has_versions = any(state.weight_versions for state in states)
    return ResumeBody(
        token_ids=[list(token_ids) for state in states for token_ids in state.token_ids],
        finished=[is_finished for state in states for is_finished in state.finished],
        prompt_digest=prompt_digest,
        seed=seed,
        created=created,
        end_thinking=any(state.end_thinking for state in states),
        logprobs=[shown_logprobs(of_choice) for state in states for of_choice in state.logprobs or ()]
        if has_logprobs
        else None,
        weight_versions=[
            list(runs) for state in states for runs in state.weight_versions or ((),) * len(state.token_ids)
        ]
        if has_versions
        else None,
    )


def shown_logprobs(entries: Sequence[TokenLogprob]) -> list[TokenLogprob]:
    """Replace infinite log probabilities, which JSON cannot express.

    Args:
        entries: log probabilities of tokens. An impossible token has minus infinity.
    """
    return [_finite(entry) for entry in entries]


def _finite(entry: TokenLogprob) -> TokenLogprob:
    if entry.logprob > LOGPROB_MIN and (not entry.top or entry.top[-1][1] > LOGPROB_MIN):
        return entry
    top = tuple((token_id, max(value, LOGPROB_MIN)) for token_id, value in entry.top)
    return TokenLogprob(entry.token_id, max(entry.logprob, LOGPROB_MIN), top)


# The limit counts all choices of one prompt, because the id of every event contains the counts of all choices.
CHOICES_NUMBERED_MAX = 128
POSITION_CHARACTERS_MAX = 2048  # The limit is enough for these choices with nine digits each, a checksum and a state.
CHOICES_MAX = 128 * 128  # The limit is enough for 128 prompts. The ids of later choices are ignored.
_POSITION = re.compile(r"(\d{1,9}!?(?:\.\d{1,9}!?)*)(?:\+(\d{1,9}))?~([0-9a-f]{8})(?:~([\w-]{1,32}))?", re.ASCII)
# A state that does not match the pattern does not fit into an id, and is left out.
_STATE = re.compile(rb"[A-Za-z0-9_-]{1,32}")


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
    """Computes the position of a reader in a response from the `id:` lines that the reader has received.

    Endpoints write `<choice>:<token ids>` in these lines, with a `!` if the choice has ended, and then a space and the
    API's state.

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
        # The value is incremented for each `id:` line without a token, so that the first such line has position 0.
        self._more = -1

    def note(self, id: bytes) -> None:
        """Record the next `id:` line.

        Args:
            id: Value of the line. An invalid value is ignored.
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
            # The checksum is not a plain sum, because two responses with exchanged choices must have different
            # checksums.
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
        # The result equals str(position). No Position is created, because this code runs for every group.
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
