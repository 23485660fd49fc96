"""A model that says one of some texts as far as it may, and ends soon where it may not: the mask of a grammar wins."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

from trioserve.contracts.request import EngineRequest
from trioserve.contracts.step import ScheduledChunk, StepPlan
from trioserve.testing.byte_tokenizer import BYTE_VOCAB_SIZE, END_TOKEN_ID
from trioserve.testing.fake_executor import FakeExecutor, FakeModel

__all__ = ["PreferringModel", "UncheckedExecutor"]

REQUESTS_KEPT_MAX = 256  # whose drafts are remembered; those of the oldest are made again
SPACE = b" \n\t\r"
# What ends a value, an object or an array first, and what begins one last; so whatever is written is over soon.
OUTSIDE_TEXTS = b'}],:"tfn1234567890-{[ \n'
INSIDE_TEXTS = b'"aeinorstlcdu1024-.:/ @ATZx'
FILLING = b"text"
THOUGHTS = ((b"<think>", b"</think>"), (b"[THINK]", b"[/THINK]"))


class PreferringModel(FakeModel):
    """drafts: what it would say to a prompt's text, the best first. Without a grammar it says the first."""

    def __init__(self, drafts: Callable[[str], Sequence[str]]) -> None:
        super().__init__(vocab_size=BYTE_VOCAB_SIZE)
        self._drafts_of = drafts
        self._drafts: OrderedDict[str, tuple[bytes, ...]] = OrderedDict()

    def next_token_id(self, request: EngineRequest, tokens: Sequence[int], digest: int) -> int:
        return self.chosen_token_id(request, tokens, digest, None) or 0

    def chosen_token_id(
        self, request: EngineRequest, tokens: Sequence[int], digest: int, is_allowed: Callable[[int], bool] | None
    ) -> int | None:
        """The preferred one of those that may come next. None: there is none."""
        said = bytes(token_id for token_id in tokens[len(request.prompt_token_ids) :] if token_id < 256)
        for token_id in self._wishes(request, said):
            if is_allowed is None or is_allowed(token_id):
                return token_id
        return None

    def _wishes(self, request: EngineRequest, said: bytes) -> Iterator[int]:
        """Every token, the best first."""
        for draft in self._drafts_for(request):
            if draft.startswith(said):
                yield draft[len(said)] if len(said) < len(draft) else END_TOKEN_ID
        for begin, end in THOUGHTS:
            _before, opening, thought = said.rpartition(begin)
            if opening and end not in thought:  # one that a grammar had it begin
                yield from _rest_of(end, thought)
            said = said.rpartition(end)[2]
        for draft in self._drafts_for(request):
            yield from _beside(draft, said)
        is_inside, text = _open_text(said)
        if is_inside:
            if len(text) < len(FILLING) and FILLING.startswith(text):
                yield FILLING[len(text)]
            yield from INSIDE_TEXTS
        yield END_TOKEN_ID
        yield from OUTSIDE_TEXTS
        yield from range(256)

    def _drafts_for(self, request: EngineRequest) -> tuple[bytes, ...]:
        if request.id not in self._drafts:
            prompt = bytes(token_id for token_id in request.prompt_token_ids if token_id < 256)
            self._drafts[request.id] = tuple(
                draft.encode() for draft in self._drafts_of(prompt.decode(errors="replace"))
            )
            if len(self._drafts) > REQUESTS_KEPT_MAX:
                self._drafts.popitem(last=False)
        return self._drafts[request.id]


class UncheckedExecutor(FakeExecutor):
    """One that does not look whether every block holds what its reader expects: of a prompt of 50,000 tokens that takes
    longer than a client's patience."""

    def _check_plan(self, plan: StepPlan, chunks: object) -> None:
        pass

    def _write(self, chunk: ScheduledChunk) -> None:
        pass

    def _spoil(self, chunk: ScheduledChunk) -> None:
        pass

    def _read(self, chunk: ScheduledChunk) -> list[int]:
        # Log probabilities depend on these: here on the token before, and no more.
        return [*chunk.tokens[: chunk.start + chunk.count], *chunk.draft]


def _rest_of(text: bytes, said: bytes) -> Iterator[int]:
    """The next byte of a text, of which the beginning may have been said."""
    for length in range(len(text) - 1, -1, -1):
        if said.endswith(text[:length]):
            yield text[length]
            return


def _beside(draft: bytes, said: bytes) -> Iterator[int]:
    """What comes next in the draft if what was said is its beginning but for white space: a grammar may want more or
    less of that between the same words."""
    place = 0
    for byte in said.translate(None, SPACE):
        while place < len(draft) and draft[place] in SPACE:
            place += 1
        if place == len(draft) or draft[place] != byte:
            return
        place += 1
    while place < len(draft) and draft[place] in SPACE:
        if said[-1:] not in (b" ", b"\n"):
            yield draft[place]
        place += 1
    yield draft[place] if place < len(draft) else END_TOKEN_ID


def _open_text(said: bytes) -> tuple[bool, bytes]:
    """Whether a text in quotation marks is open at the end, and what is in it so far."""
    is_inside, begin, position = False, 0, 0
    while position < len(said):
        if is_inside and said[position] == ord("\\"):
            position += 1
        elif said[position] == ord('"'):
            is_inside, begin = not is_inside, position + 1
        position += 1
    return is_inside, said[begin:] if is_inside else b""
