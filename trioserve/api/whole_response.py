"""Whole responses: how large one may become, and how a large one is encoded and sent without holding up the event loop.

The size is estimated from the request, before anything is computed. Every API asks for its tokens with
RequestContext.generate and for its vectors with RequestContext.embed, and these two ask ResponseBound. What all whole
responses hold together is counted as it grows (ResponseBudget), since most responses are shorter than they may be.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import msgspec
import trio

from trioserve.contracts.errors import InvalidRequest, Overloaded
from trioserve.contracts.output import Delta
from trioserve.contracts.sampling import SamplingParams
from trioserve.http.limits import RESPONSE_BYTES_MAX, RESPONSES_BYTES_MAX

__all__ = ["PLAIN", "LargeJson", "ResponseBound", "ResponseBudget", "ResponseShape"]

# Bytes of JSON. Estimates, for usual texts; each is about a quarter more than what was measured.
TEXT_TOKEN_BYTES = 6
TOKEN_ID_BYTES = 8
LOGPROB_BYTES = 80  # of one alternative: its text, its bytes and its number
NUMBER_BYTES = 22  # of a vector, written with all digits of a double
BASE64_NUMBER_BYTES = 6  # 4 bytes of a float32, as base64
VECTOR_BYTES = 64  # what stands around a vector
CAPPED_TOKENS_MIN = 256  # a request without max_tokens gets at least as many for each choice, or is refused

PIECE_ITEMS = 2000  # alternatives that are encoded at a time, in a few milliseconds
PIECE_NUMBERS = 20_000  # of vectors, that are encoded at a time
PIECE_BYTES = 256 * 1024  # that are sent at a time
SMALL_ITEMS_MAX = 4000  # as many are encoded together with the rest of the response
SMALL_RESPONSE_BYTES = 64 * 1024  # not counted: about 10,000 tokens of text, and connections are bounded

T = TypeVar("T")


class ResponseShape(msgspec.Struct, frozen=True, kw_only=True):
    """What a request asks for that makes its response larger, beside its sampling.

    Args:
        is_streamed: Output leaves piece by piece, so only what stands in one event counts.
        prompt_count: Prompts of the request.
        prompt_copies: How often each prompt and its log probabilities are in the response.
        has_prompt_text: The response repeats the prompt's text.
        has_token_ids: The response has token ids, of prompt and output.
    """

    is_streamed: bool = False
    prompt_count: int = 1
    prompt_copies: int = 1
    has_prompt_text: bool = False
    has_token_ids: bool = False


PLAIN = ResponseShape()


class ResponseBudget:
    """Counts the bytes of JSON that the whole responses of all clients hold, up to `bytes_max`.

    Python's objects of a log probability take about as much again until the response is sent.
    """

    def __init__(self, bytes_max: int = RESPONSES_BYTES_MAX) -> None:
        self.bytes_max = bytes_max
        self.bytes_held = 0

    def add(self, byte_count: int) -> None:
        """Count bytes. Raises Overloaded if they do not fit, and does not count them then."""
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

    A response that could have more than `bytes_max` bytes is refused. What a response holds counts in the budget.

    Args:
        budget: Of all responses of the server.
    """

    def __init__(self, bytes_max: int = RESPONSE_BYTES_MAX, budget: ResponseBudget | None = None) -> None:
        self.bytes_max = bytes_max
        self._budget = budget or ResponseBudget(bytes_max)
        self._byte_count = 0  # of the response so far
        self._counted = 0  # of them, in the budget

    def take(self, delta: Delta) -> None:
        """Count output that is kept until the response is complete. Raises Overloaded if the budget is used up."""
        self._hold(len(delta.text) + TOKEN_ID_BYTES * len(delta.token_ids) + LOGPROB_BYTES * delta.alternative_count)

    def release(self) -> None:
        """The response was sent, or is given up. Harmless when repeated."""
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
        """Check the output that a request asks for.

        Args:
            sampling: As the request has it.
            tokens_max: Of the model's context.
            default_tokens_max: max_tokens of a request that names none.

        Returns:
            The sampling. A request that names no max_tokens, or clamps them, and whose longest output would be too
            large, gets the max_tokens that fit.

        Raises:
            InvalidRequest: The response could be too large.
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
        """Check and count what the response repeats of its prompts. Raises InvalidRequest if that is too large.

        Args:
            token_count: Of all prompts together.
        """
        copies = 1 if shape.is_streamed else shape.prompt_copies  # one event has one of them
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
        """Check and count the vectors that a request asks for. Raises InvalidRequest if they are too large."""
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
        """Check and count a text that a response repeats or makes. Raises InvalidRequest if it is too large."""
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
    """A JSON value whose large lists are encoded piece by piece, with turns for other tasks in between.

    `add` returns what stands in the place of a list in the value, and `pieces` gives the whole value's bytes.
    """

    def __init__(self) -> None:
        self._mark = secrets.token_hex(16).encode()  # nobody can write it into a text of the response
        self._lists: list[list[bytes]] = []
        self.byte_count = 0  # of these lists, without what `pieces` gave away

    @property
    def is_empty(self) -> bool:
        """Whether nothing was added, so that the value may be encoded at once."""
        return not self._lists

    async def add(
        self, items: Sequence[T], written: Callable[[Sequence[T]], list[object]], *, item_weight: int = 1
    ) -> object:
        """Encode a list.

        Args:
            written: Makes JSON values of a slice of the items.
            item_weight: Values inside of one item.

        Returns:
            The list itself if it is small, or else what stands for it.
        """
        if len(items) * item_weight <= SMALL_ITEMS_MAX:
            return written(items)
        step = max(1, PIECE_ITEMS // item_weight)
        encoder = msgspec.json.Encoder()
        made: list[bytes] = []
        for begin in range(0, len(items), step):
            made.append((b"," if made else b"[") + encoder.encode(written(items[begin : begin + step]))[1:-1])
            await trio.lowlevel.checkpoint()
        return self._placed([*made, b"]"])

    async def add_columns(
        self, items: Sequence[T], written: Callable[[Sequence[T]], dict[str, object]], *, item_weight: int = 1
    ) -> dict[str, object]:
        """Encode an object of lists of equal length. The arguments are those of `add`."""
        if len(items) * item_weight <= SMALL_ITEMS_MAX:
            return written(items)
        step = max(1, PIECE_ITEMS // item_weight)
        columns: dict[str, list[bytes]] = {}
        for begin in range(0, len(items), step):
            for name, values in written(items[begin : begin + step]).items():
                made = columns.setdefault(name, [])
                made.append((b"," if made else b"[") + msgspec.json.encode(values)[1:-1])
            await trio.lowlevel.checkpoint()
        return {name: self._placed([*made, b"]"]) for name, made in columns.items()}

    async def add_encoded(self, items: Iterable[tuple[int, Callable[[], bytes]]]) -> msgspec.Raw:
        """Encode a list whose items are encoded by functions. Each comes with the count of its numbers."""
        made: list[bytes] = []
        weight = byte_count = 0
        for item_weight, written in items:
            made.append((b"," if made else b"[") + written())
            byte_count += len(made[-1])
            weight += item_weight
            if weight >= PIECE_NUMBERS:
                weight = 0
                await trio.lowlevel.checkpoint()
        made.append(b"]" if made else b"[]")
        return msgspec.Raw(b"".join(made)) if byte_count <= PIECE_BYTES else self._placed(made)

    async def add_text(self, text: str) -> object:
        """Encode a text."""
        if len(text) <= PIECE_BYTES:
            return text
        made = [b'"']
        for begin in range(0, len(text), PIECE_BYTES):
            made.append(msgspec.json.encode(text[begin : begin + PIECE_BYTES])[1:-1])
            await trio.lowlevel.checkpoint()
        return self._placed([*made, b'"'])

    def _placed(self, made: list[bytes]) -> msgspec.Raw:
        self._lists.append(made)
        self.byte_count += sum(map(len, made))
        return msgspec.Raw(b'"%b-%d"' % (self._mark, len(self._lists) - 1))

    def pieces(self, value: object) -> Iterator[bytes]:
        """The bytes of `value`, in pieces of about PIECE_BYTES. Every piece is given away once."""
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
