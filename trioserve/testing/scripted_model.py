"""Fake models whose output a test determines: a text, a function of the prompt or of the token ids, or a preferred text
that the model writes as far as a grammar allows it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

from trioserve.contracts.request import EngineRequest
from trioserve.contracts.step import ScheduledChunk, StepPlan
from trioserve.testing.byte_tokenizer import BYTE_VOCAB_SIZE, END_TOKEN_ID
from trioserve.testing.fake_executor import FakeExecutor, FakeModel

__all__ = ["NextToken", "PreferringModel", "Response", "UncheckedExecutor", "answering", "following"]

Response = str | Callable[[str], str]
"""The text of every response, or a function from the prompt's text to it. A chat's prompt is its rendered template."""

NextToken = Callable[[Sequence[int]], int]
"""Function from the token ids of prompt and output so far to the next token id.

It must depend on nothing else, since a preempted request is computed again.
"""

PROMPTS_MAX = 1024  # The responses of so many prompts are remembered. So a function is called only once per prompt.


def answering(response: Response) -> FakeModel:
    """Return a model that writes a text in UTF-8, one token per byte, and then the end token.

    Args:
        response: the text, or a function that returns the text for a prompt.
    """

    @lru_cache(maxsize=PROMPTS_MAX)
    def response_bytes(prompt_token_ids: tuple[int, ...]) -> bytes:
        if isinstance(response, str):
            return response.encode()
        return response(
            bytes(token_id for token_id in prompt_token_ids if token_id < 256).decode(errors="replace")
        ).encode()

    def choose(request: EngineRequest, tokens: Sequence[int]) -> int:
        text = response_bytes(request.prompt_token_ids)
        position = len(tokens) - len(request.prompt_token_ids)
        return text[position] if position < len(text) else END_TOKEN_ID

    return _ScriptedModel(choose)


def following(next_token: NextToken) -> FakeModel:
    """Return a model that chooses each token with a function.

    Args:
        next_token: the function. If its result is not a token id, the engine has a fault.
    """

    def choose(request: EngineRequest, tokens: Sequence[int]) -> int:
        token_id = next_token(tokens)
        assert 0 <= token_id < BYTE_VOCAB_SIZE, (
            f"next_token returned {token_id}, allowed are 0 to {BYTE_VOCAB_SIZE - 1}"
        )
        return token_id

    return _ScriptedModel(choose)


class _ScriptedModel(FakeModel):
    """A model that ignores all sampling parameters except parameters that end a response."""

    def __init__(self, choose: Callable[[EngineRequest, Sequence[int]], int]) -> None:
        super().__init__(vocab_size=BYTE_VOCAB_SIZE)
        self._choose = choose

    def next_token_id(self, request: EngineRequest, tokens: Sequence[int], digest: int) -> int:
        return self._choose(request, tokens)


REQUESTS_KEPT_MAX = 256  # The texts of so many requests are remembered. For older requests, the drafts are made again.
SPACE = b" \n\t\r"
# Tokens that end a value, an object or an array come first, and tokens that begin an array or an object come last. So
# the output ends soon.
OUTSIDE_TEXTS = b'}],:"tfn1234567890-{[ \n'
INSIDE_TEXTS = b'"aeinorstlcdu1024-.:/ @ATZx'
FILLING = b"text"
REASONING_MARKS = ((b"<think>", b"</think>"), (b"[THINK]", b"[/THINK]"))


class PreferringModel(FakeModel):
    """A model with preferred texts. Without a grammar, it writes the first preferred text.

    Args:
        drafts: returns the preferred texts for a prompt, best first.
    """

    def __init__(self, drafts: Callable[[str], Sequence[str]]) -> None:
        super().__init__(vocab_size=BYTE_VOCAB_SIZE)
        self._drafts_of = drafts
        self._drafts: OrderedDict[str, tuple[bytes, ...]] = OrderedDict()

    def next_token_id(self, request: EngineRequest, tokens: Sequence[int], digest: int) -> int:
        return self.chosen_token_id(request, tokens, digest, None) or 0

    def chosen_token_id(
        self, request: EngineRequest, tokens: Sequence[int], digest: int, is_allowed: Callable[[int], bool] | None
    ) -> int | None:
        """Return the most preferred token that is allowed, or None if no token is allowed.

        Args:
            request: the request.
            tokens: prompt and output so far.
            digest: ignored.
            is_allowed: returns True for an allowed token id. None allows all ids.
        """
        written = bytes(token_id for token_id in tokens[len(request.prompt_token_ids) :] if token_id < 256)
        for token_id in self._by_preference(request, written):
            if is_allowed is None or is_allowed(token_id):
                return token_id
        return None

    def _by_preference(self, request: EngineRequest, written: bytes) -> Iterator[int]:
        """Yield every token, the most preferred token first."""
        for draft in self._drafts_for(request):
            if draft.startswith(written):
                yield draft[len(written)] if len(written) < len(draft) else END_TOKEN_ID
        for begin, end in REASONING_MARKS:
            _before, opening, reasoning = written.rpartition(begin)
            if opening and end not in reasoning:  # The grammar forced the model to begin reasoning, so end it.
                yield from _rest_of(end, reasoning)
            written = written.rpartition(end)[2]
        for draft in self._drafts_for(request):
            yield from _beside(draft, written)
        is_inside, text = _open_text(written)
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
    """An executor that does not check the content of KV blocks.

    With a prompt of 50,000 tokens, the check takes longer than a client waits.
    """

    def _check_plan(self, plan: StepPlan, chunks: object) -> None:
        pass

    def _write(self, chunk: ScheduledChunk) -> None:
        pass

    def _spoil(self, chunk: ScheduledChunk) -> None:
        pass

    def _read(self, chunk: ScheduledChunk) -> list[int]:
        # Log probabilities depend on this result. With this executor, they depend only on the previous token.
        return [*chunk.tokens[: chunk.start + chunk.count], *chunk.draft]


def _rest_of(text: bytes, written: bytes) -> Iterator[int]:
    """Yield the next byte of a text, if the output so far is a prefix of the text."""
    for length in range(len(text) - 1, -1, -1):
        if written.endswith(text[:length]):
            yield text[length]
            return


def _beside(draft: bytes, written: bytes) -> Iterator[int]:
    """Yield the next byte of a draft, if the output so far is a prefix of the draft, except for white space.

    A grammar may require other white space between the same words.
    """
    position = 0
    for byte in written.translate(None, SPACE):
        while position < len(draft) and draft[position] in SPACE:
            position += 1
        if position == len(draft) or draft[position] != byte:
            return
        position += 1
    while position < len(draft) and draft[position] in SPACE:
        if written[-1:] not in (b" ", b"\n"):
            yield draft[position]
        position += 1
    yield draft[position] if position < len(draft) else END_TOKEN_ID


def _open_text(written: bytes) -> tuple[bool, bytes]:
    """Return True and the string so far if the output ends inside of quotation marks. Otherwise, return False and an
    empty text.
    """
    is_inside, begin, position = False, 0, 0
    while position < len(written):
        if is_inside and written[position] == ord("\\"):
            position += 1
        elif written[position] == ord('"'):
            is_inside, begin = not is_inside, position + 1
        position += 1
    return is_inside, written[begin:] if is_inside else b""
