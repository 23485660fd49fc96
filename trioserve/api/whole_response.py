"""Bounds the size of whole responses, and encodes large responses piece by piece, so that the event loop is not
blocked.

The size is estimated from the request, before computation starts. Every API asks for tokens with
RequestContext.generate and for vectors with RequestContext.embed. Both check the size with ResponseBound. Most
responses stay below their estimate, so ResponseBudget counts the bytes of all responses as they grow.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec
import trio

from trioserve.api.response import encoded_value
from trioserve.contracts.errors import InvalidRequest, Overloaded
from trioserve.contracts.output import Delta
from trioserve.contracts.sampling import SamplingParams
from trioserve.http.limits import RESPONSE_BYTES_MAX, RESPONSES_BYTES_MAX

__all__ = ["PLAIN", "LargeJson", "ResponseBound", "ResponseBudget", "ResponseShape"]

# The constants below estimate the bytes of JSON for usual texts. Each is about a quarter above the measured size.
TEXT_TOKEN_BYTES = 6
TOKEN_ID_BYTES = 8
LOGPROB_BYTES = 80  # One alternative token has a text, bytes and a log probability.
NUMBER_BYTES = 22  # One number of a vector may have all digits of a double.
BASE64_NUMBER_BYTES = 6  # One float32 has 4 bytes, which base64 expands to almost 6 characters.
VECTOR_BYTES = 64  # The JSON around one vector has about this size.
CAPPED_TOKENS_MIN = 256  # If fewer tokens per choice fit, a request without max_tokens is refused.

# Between two checkpoints, at most this number of alternatives is encoded, which takes a few milliseconds.
PIECE_ITEMS = 2000
PIECE_NUMBERS = 20_000  # Between two checkpoints, at most this number of values of vectors is encoded.
PIECE_BYTES = 256 * 1024  # One write to the client has about this size.
SMALL_ITEMS_MAX = 4000  # A list up to this size is encoded together with the rest of the response.
# A response up to this size, about 10,000 tokens of text, is not counted. The number of connections bounds the sum of
# such responses.
SMALL_RESPONSE_BYTES = 64 * 1024

T = TypeVar("T")
R = TypeVar("R")
Columns = TypeVar("Columns", bound=msgspec.Struct)


class ResponseShape(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of a request, besides its sampling, that make its response larger.

    Attributes:
        is_streamed: True: output is sent piece by piece, so only the size of one event counts.
        prompt_count: prompts of the request.
        prompt_copies: how often the response repeats each prompt and its log probabilities.
        has_prompt_text: True: the response repeats the prompt's text.
        has_token_ids: True: the response has the token ids of prompt and output.
    """

    is_streamed: bool = False
    prompt_count: int = 1
    prompt_copies: int = 1
    has_prompt_text: bool = False
    has_token_ids: bool = False


PLAIN = ResponseShape()


class ResponseBudget:
    """Counts the bytes of JSON that the whole responses of all clients hold.

    Python objects of log probabilities take about as much memory again until the response is sent.

    Args:
        bytes_max: limit of all responses together.
    """

    def __init__(self, bytes_max: int = RESPONSES_BYTES_MAX) -> None:
        self.bytes_max = bytes_max
        self.bytes_held = 0

    def add(self, byte_count: int) -> None:
        """Count bytes.

        Args:
            byte_count: bytes of JSON.

        Raises:
            Overloaded: the bytes exceed the limit. They are not counted then.
        """
        if self.bytes_held + byte_count > self.bytes_max:
            raise Overloaded(
                f"large responses of all clients hold {self.bytes_held:,} bytes, and this one needs {byte_count:,} "
                f"more: allowed are {self.bytes_max:,} (--max-responses-bytes). Try again shortly, ask for fewer log "
                "probabilities, choices or inputs, or set stream",
                reason="responses",
                retry_after_seconds=1.0,
            )
        self.bytes_held += byte_count


class ResponseBound:
    """Bounds the whole response of one request.

    Args:
        bytes_max: a response whose estimate is larger is refused.
        budget: counts the bytes of all responses of the server. None: a new budget of `bytes_max`.
    """

    def __init__(self, bytes_max: int = RESPONSE_BYTES_MAX, budget: ResponseBudget | None = None) -> None:
        self.bytes_max = bytes_max
        self._budget = budget or ResponseBudget(bytes_max)
        self._byte_count = 0  # The size of the response so far.
        self._counted = 0  # The number of bytes of `_byte_count` that the budget counts.

    def take(self, delta: Delta) -> None:
        """Count output that is kept until the response is complete.

        Args:
            delta: new output.

        Raises:
            Overloaded: the budget is used up.
        """
        self._hold(len(delta.text) + TOKEN_ID_BYTES * len(delta.token_ids) + LOGPROB_BYTES * delta.alternative_count)

    def release(self) -> None:
        """Remove the response's bytes from the budget. Repeated calls have no effect."""
        self._budget.bytes_held -= self._counted
        self._byte_count = self._counted = 0

    def _hold(self, byte_count: int) -> None:
        self._byte_count += byte_count
        if self._byte_count > SMALL_RESPONSE_BYTES:
            self._budget.add(self._byte_count - self._counted)
            self._counted = self._byte_count

    def bounded(
        self, sampling: SamplingParams, shape: ResponseShape, *, tokens_max: int, default_tokens_max: int | None
    ) -> SamplingParams:
        """Check the size of the output that a request asks for.

        Args:
            sampling: sampling parameters of the request.
            shape: properties of the response that make it larger.
            tokens_max: length of the model's context, in tokens.
            default_tokens_max: max_tokens of a request that sets none. None: up to the end of the context.

        Returns:
            The sampling parameters. If the request sets no max_tokens or allows a lower value, and the longest output
            is too large, max_tokens is the largest number that fits.

        Raises:
            InvalidRequest: the response could be too large.
        """
        if shape.is_streamed:
            return sampling
        token_bytes = TEXT_TOKEN_BYTES + TOKEN_ID_BYTES * shape.has_token_ids
        factors = f"{TEXT_TOKEN_BYTES} bytes of text"
        if shape.has_token_ids:
            factors += f" + {TOKEN_ID_BYTES} of its id"
        if sampling.logprobs is not None:
            token_bytes += LOGPROB_BYTES * (sampling.logprobs + 1)
            factors += f" + {LOGPROB_BYTES} x ({sampling.logprobs} logprobs + 1)"
        sequence_count = sampling.n * shape.prompt_count
        asked = tokens_max if sampling.max_tokens is None else min(sampling.max_tokens, tokens_max)
        byte_count = sequence_count * asked * token_bytes
        if byte_count <= self.bytes_max:
            return sampling
        fitting = self.bytes_max // (sequence_count * token_bytes)
        has_no_own = sampling.max_tokens in (None, default_tokens_max) or sampling.clamp_max_tokens
        if has_no_own and fitting >= CAPPED_TOKENS_MIN:
            return msgspec.structs.replace(sampling, max_tokens=fitting, clamp_max_tokens=True)
        raise self._refused(
            byte_count,
            f"{shape.prompt_count} prompts x {sampling.n} choices x {asked} tokens x ({factors})",
            "max_tokens",
            "ask for fewer choices, tokens, prompts or log probabilities at a time, or set stream",
        )

    def check_prompts(self, sampling: SamplingParams, shape: ResponseShape, token_count: int) -> None:
        """Check and count the prompts that the response repeats.

        Args:
            sampling: sampling parameters of the request.
            shape: properties of the response that make it larger.
            token_count: tokens of all prompts together.

        Raises:
            InvalidRequest: the repeated prompts are too large.
            Overloaded: the budget is used up.
        """
        copies = 1 if shape.is_streamed else shape.prompt_copies  # One event of a stream repeats one prompt.
        token_bytes = TEXT_TOKEN_BYTES * shape.has_prompt_text + TOKEN_ID_BYTES * shape.has_token_ids
        factors = f"{token_bytes} bytes of text and id"
        if sampling.prompt_logprobs is not None:
            token_bytes += LOGPROB_BYTES * (sampling.prompt_logprobs + 1)
            factors += f" + {LOGPROB_BYTES} x ({sampling.prompt_logprobs} prompt_logprobs + 1)"
        byte_count = copies * token_count * token_bytes
        if byte_count > self.bytes_max:
            raise self._refused(
                byte_count,
                f"{copies} copies of {token_count} prompt tokens x ({factors})",
                "prompt",
                "send fewer or shorter prompts at a time, or ask for fewer choices or log probabilities",
            )
        self._hold(byte_count)

    def check_vectors(self, count: int, dimensions: int, *, is_base64: bool) -> None:
        """Check and count the vectors of a response.

        Args:
            count: number of vectors.
            dimensions: numbers of each vector.
            is_base64: True: base64. False: JSON numbers.

        Raises:
            InvalidRequest: the vectors are too large.
            Overloaded: the budget is used up.
        """
        number_bytes = BASE64_NUMBER_BYTES if is_base64 else NUMBER_BYTES
        byte_count = count * (VECTOR_BYTES + dimensions * number_bytes)
        if byte_count > self.bytes_max:
            raise self._refused(
                byte_count,
                f"{count} inputs x {dimensions} numbers x {number_bytes} bytes",
                "input",
                "send fewer inputs at a time" + ("" if is_base64 else ', or ask for encoding_format "base64"'),
            )
        self._hold(byte_count)

    def check_text(self, byte_count: int, what: str, param: str) -> None:
        """Check and count a text of a response.

        Args:
            byte_count: bytes of the text.
            what: how the size was estimated, for the error message.
            param: field that the error names.

        Raises:
            InvalidRequest: the text is too large.
            Overloaded: the budget is used up.
        """
        if byte_count > self.bytes_max:
            raise self._refused(byte_count, what, param, "send less at a time")
        self._hold(byte_count)

    def _refused(self, byte_count: int, factors: str, param: str, advice: str) -> InvalidRequest:
        return InvalidRequest(
            f"the response could have about {byte_count:,} bytes ({factors}), allowed are {self.bytes_max:,}: "
            f"{advice}. --max-response-bytes sets it",
            param=param,
        )


class LargeJson:
    """A JSON value whose large lists are encoded piece by piece, with checkpoints in between.

    `add` encodes a list and returns a placeholder for it. `pieces` returns the bytes of the whole value.
    """

    def __init__(self) -> None:
        self._mark = secrets.token_hex(16).encode()  # The mark is secret, so that no text of a response can contain it.
        self._lists: list[list[bytes]] = []
        self.byte_count = 0  # The number of bytes of the lists, without the pieces that `pieces` has returned.

    @property
    def is_empty(self) -> bool:
        """True if no list was added, so the value may be encoded at once."""
        return not self._lists

    async def add(
        self, items: Sequence[T], written: Callable[[Sequence[T]], list[R]], *, item_weight: int = 1
    ) -> list[R]:
        """Encode a list.

        Args:
            items: items of the list.
            written: converts a slice of the items into JSON values.
            item_weight: values inside each item.

        Returns:
            The converted list if it is small, otherwise a placeholder.
        """
        if len(items) * item_weight <= SMALL_ITEMS_MAX:
            return written(items)
        step = max(1, PIECE_ITEMS // item_weight)
        made: list[bytes] = []
        for begin in range(0, len(items), step):
            made.append((b"," if made else b"[") + msgspec.json.encode(written(items[begin : begin + step]))[1:-1])
            await trio.lowlevel.checkpoint()
        placed: list[R] = self._placed([*made, b"]"])
        return placed

    async def add_columns(
        self, items: Sequence[T], written: Callable[[Sequence[T]], Columns], *, item_weight: int = 1
    ) -> Columns:
        """Encode an object of lists of equal length.

        Args:
            items: items of the lists.
            written: converts a slice of the items into an object with the same slice of each list.
            item_weight: values inside each item.

        Returns:
            The object if its lists are small, otherwise an object with a placeholder for each list.
        """
        if len(items) * item_weight <= SMALL_ITEMS_MAX:
            return written(items)
        step = max(1, PIECE_ITEMS // item_weight)
        columns: dict[str, list[bytes]] = {}
        for begin in range(0, len(items), step):
            part = written(items[begin : begin + step])
            for name, values in msgspec.structs.asdict(part).items():
                made = columns.setdefault(name, [])
                made.append((b"," if made else b"[") + msgspec.json.encode(values)[1:-1])
            await trio.lowlevel.checkpoint()
        return type(part)(**{name: self._placed([*made, b"]"]) for name, made in columns.items()})

    async def add_one_by_one(self, items: Iterable[tuple[int, Callable[[], R]]]) -> list[R]:
        """Encode a list whose items are made and encoded one by one.

        Args:
            items: for each item, the count of its numbers, and a function that returns the item.

        Returns:
            The encoded list if it is small, otherwise a placeholder.
        """
        made: list[bytes] = []
        weight = byte_count = 0
        for item_weight, written in items:
            made.append((b"," if made else b"[") + msgspec.json.encode(written()))
            byte_count += len(made[-1])
            weight += item_weight
            if weight >= PIECE_NUMBERS:
                weight = 0
                await trio.lowlevel.checkpoint()
        made.append(b"]" if made else b"[]")
        encoded: list[R] = encoded_value(b"".join(made)) if byte_count <= PIECE_BYTES else self._placed(made)
        return encoded

    async def add_text(self, text: str) -> str:
        """Encode a text.

        Args:
            text: any text.

        Returns:
            The text itself if it is small, otherwise a placeholder.
        """
        if len(text) <= PIECE_BYTES:
            return text
        made = [b'"']
        for begin in range(0, len(text), PIECE_BYTES):
            made.append(msgspec.json.encode(text[begin : begin + PIECE_BYTES])[1:-1])
            await trio.lowlevel.checkpoint()
        placed: str = self._placed([*made, b'"'])
        return placed

    def _placed(self, made: list[bytes]) -> Any:
        """Keep an encoded list, and return its placeholder, which only an encoder can read."""
        self._lists.append(made)
        self.byte_count += sum(map(len, made))
        return encoded_value(b'"%b-%d"' % (self._mark, len(self._lists) - 1))

    def pieces(self, value: object) -> Iterator[bytes]:
        """Yield the bytes of a value, in pieces of about PIECE_BYTES. Call this method only once, because it frees the
        lists.

        Args:
            value: the value, with placeholders for large lists.
        """
        held: list[bytes] = []
        size = 0
        for part in self._parts(msgspec.json.encode(value)):
            held.append(part)
            size += len(part)
            if size >= PIECE_BYTES:
                yield b"".join(held)
                held, size = [], 0
        yield b"".join(held)

    def _parts(self, encoded: bytes) -> Iterator[bytes]:
        begin, *rest = encoded.split(b'"%b-' % self._mark)
        yield begin
        for part in rest:
            index, _, text = part.partition(b'"')
            made = self._lists[int(index)]
            made.reverse()
            while made:
                piece = made.pop()
                self.byte_count -= len(piece)
                yield piece
            yield text
