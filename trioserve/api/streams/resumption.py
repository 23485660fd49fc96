"""Resumable streamed responses: a response may begin at one server and continue at another.

A client requests a resumable response with a header. The head of the response then contains everything that the
continuation needs besides the tokens. The tokens are in the `id:` lines of the events (see cursors).

The same request with `resume` in its body continues after the last group that arrived. Everything that a client sees
depends only on the request, its id, and the fields in the head. So the output is the same at every server.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

import msgspec
import trio

from trioserve.api.generation import is_partial
from trioserve.api.sse import encode
from trioserve.api.streams.cursors import (
    DETACH_HEADER,
    FINGERPRINT_HEADER,
    RESUMABLE_HEADER,
    RESUME_HEADER,
    SEED_HEADER,
    GroupIds,
    ResumeBody,
    resume_body,
)
from trioserve.contracts.errors import InvalidRequest, ResumeMismatch
from trioserve.contracts.output import Delta
from trioserve.contracts.resume import SEED_MAX, SEED_MIN, Resume
from trioserve.contracts.sampling import SamplingParams

if TYPE_CHECKING:
    from trioserve.api.request_context import RequestContext
    from trioserve.engine.request_stream import RequestStream

__all__ = ["Resumption", "skip_known"]

SERVER_STOPPING = "server_stopping"

# Drawn seeds are below this number, so that JSON readers that only have floats read them exactly.
SEEDS_DRAWN = 1 << 53
# The stride keeps the seeds of prompts far apart from each other, and far from the seeds of choices.
SEED_STRIDE = 0xD1B54A32D192ED03
SKIPPED_MAX = 256  # After this number of deltas, which takes about two milliseconds, other tasks run.


class Resumption:
    """State of one request whose response may be resumed later, or resumes an earlier response.

    Args:
        context: the request.
        body: field `resume` of the request. None: the response begins here.
        sampling: sampling parameters of the request.
        is_streamed: True: the response is a stream.
        prompt_count: prompts of the request, each with its own stream.
        gives_partial: True: an aborted response ends with its partial result.
        repeats: True: a resumed stream first sends the known output again.

    Attributes:
        is_asked: True if the request asks for a stream that can continue at another server.
        is_on: True if the request is resumable, resumes a response, or asks for partial results.
        is_resumable: True if the response may be resumed without showing output to the client twice.
        created: Unix time at which the response began.

    Raises:
        InvalidRequest: `resume` or the seed header has a bad value.
    """

    def __init__(
        self,
        context: RequestContext,
        body: ResumeBody | None,
        sampling: SamplingParams,
        *,
        is_streamed: bool,
        prompt_count: int = 1,
        gives_partial: bool = False,
        repeats: bool = False,
    ) -> None:
        self.gives_partial = gives_partial
        self.is_streamed = is_streamed
        headers = context.exchange.headers
        self.is_asked = is_streamed and headers.get(RESUMABLE_HEADER) == "1" and headers.get(DETACH_HEADER) is None
        self.is_on = self.is_asked or body is not None or gives_partial
        self.is_resumable = self.is_asked or (gives_partial and is_streamed and not repeats)
        self.body = body
        self._context = context
        self._sampling = sampling
        self._prompt_count = prompt_count
        known = None if body is None else body.created
        self.created = context.clock_and_ids.unix_seconds() if known is None else known
        self._seed = self._first_seed() if self.is_on else sampling.seed or 0
        self._call_counts: Counter[int] = Counter()
        if body is not None:
            self._check(body, is_streamed=is_streamed)

    def is_partial(self, delta: Delta) -> bool:
        """Return True if the choice ends with a partial result instead of an error.

        At a shutdown of the server, a client that can resume elsewhere gets the error.

        Args:
            delta: last delta of a choice.
        """
        leaves = self.is_asked and delta.stop_reason == SERVER_STOPPING
        return self.gives_partial and is_partial(delta.finish_reason) and not leaves

    def seeded(self, sampling: SamplingParams, prompt_index: int = 0) -> SamplingParams:
        """Set the seed that a continuation of this prompt's response will use too.

        Args:
            sampling: sampling parameters of the request. A seed that the client set is kept.
        """
        if not self.is_on or sampling.seed is not None:
            return sampling
        return msgspec.structs.replace(sampling, seed=self._seed_of(prompt_index))

    def resume(self, prompt_index: int = 0) -> Resume | None:
        """Return the known output of this prompt's response.

        Returns:
            The known output, or None if the response begins here.

        Raises:
            InvalidRequest: `resume` has a bad value.
        """
        body = self.body
        if body is None:
            return None
        n = self._sampling.n
        own = slice(prompt_index * n, (prompt_index + 1) * n)
        return Resume(
            token_ids=body.token_ids[own],  # type: ignore[arg-type]  # Resume converts lists to tuples
            finished=body.finished[own],  # type: ignore[arg-type]
            prompt_digest=body.prompt_digest if self._prompt_count == 1 else None,
            seed=self._seed_of(prompt_index),
            end_thinking=body.end_thinking,
            logprobs=None if body.logprobs is None else body.logprobs[own],  # type: ignore[arg-type]
            weight_versions=None if body.weight_versions is None else body.weight_versions[own],  # type: ignore[arg-type]
        )

    def behind(self, streams: Sequence[RequestStream]) -> ResumeBody:
        """Return the partial result of an aborted response, which the client may send back as `resume`.

        Args:
            streams: engine requests, read to their end.
        """
        digest = None if any(stream.prompt_digest is None for stream in streams) else _digest(streams)
        states = [stream.resume_state() for stream in streams]
        return resume_body(states, prompt_digest=digest, seed=self._seed, created=self.created)

    def check(self, streams: Sequence[RequestStream]) -> None:
        """Check that several prompts are the same as at the beginning of the response.

        Args:
            streams: engine requests, all entered.

        Raises:
            ResumeMismatch: the prompts differ.
        """
        wanted = None if self.body is None else self.body.prompt_digest
        if self._prompt_count > 1 and wanted is not None and wanted != _digest(streams):
            raise ResumeMismatch(
                f"the response began with prompts whose digest is {wanted}, and here it is {_digest(streams)}: the "
                "continuation would not fit. Send the request without resume",
                param="resume.prompt_digest",
            )

    @property
    def state(self) -> str | None:
        """State of the API in the last group that the client has. None: no such state."""
        return None if self.body is None else self.body.state

    def headers(self, streams: Sequence[RequestStream], **more: object) -> tuple[tuple[str, str], ...]:
        """Make the header fields of the head, if the request asks for a resumable response.

        Args:
            streams: engine requests, all entered.
            more: fields that the API needs in `resume`, or that replace the fields of this method.
        """
        if not self.is_asked:
            return ()
        known = {"prompt_digest": _digest(streams), "seed": self._seed, "created": self.created, **more}
        headers = [(RESUME_HEADER, encode(known).decode())]
        adapter = None if self._context.adapter is None else streams[0].adapter_digest
        fingerprint = self._context.engine.model.fingerprint_with(adapter)
        if fingerprint is not None:
            headers.append((FINGERPRINT_HEADER, fingerprint))
        return tuple(headers)

    def group_ids(self) -> GroupIds | None:
        """Return the writer of `id:` lines, or None if the request does not ask for them."""
        return GroupIds() if self.is_asked else None

    def new_id(self, choice_index: int) -> str:
        """Return a new id for a tool call. Another server makes the same id for the same call.

        Args:
            choice_index: index of the choice, from 0.
        """
        count = self._call_counts[choice_index]
        self._call_counts[choice_index] += 1
        place = f"{self._context.request_id}/{self._seed}/{choice_index}/{count}"
        return blake2b(place.encode(), digest_size=16).hexdigest()

    def _first_seed(self) -> int:
        if self.body is not None and self.body.seed is not None:
            return self.body.seed
        if self._sampling.seed is not None or not (self.is_asked or self.gives_partial):
            return self._sampling.seed or 0
        chosen = self._context.exchange.headers.get(SEED_HEADER)
        if chosen is not None:
            if not (chosen.isdecimal() and len(chosen) <= 20):
                raise InvalidRequest(
                    f"X-Trioserve-Seed is {chosen[:40]!r}, allowed is a whole number of up to 20 digits",
                    param="X-Trioserve-Seed",
                )
            return int(chosen) % SEEDS_DRAWN
        drawn = blake2b(self._context.clock_and_ids.new_request_id().encode(), digest_size=8).digest()
        return int.from_bytes(drawn) % SEEDS_DRAWN

    def _seed_of(self, prompt_index: int) -> int:
        """Return the seed of a prompt. If the client set a seed, all prompts have this seed. Otherwise a different seed
        is drawn for each prompt.
        """
        if self._sampling.seed is not None or prompt_index == 0:
            return self._seed
        return (self._seed + prompt_index * SEED_STRIDE) % 2**64

    def _check(self, body: ResumeBody, *, is_streamed: bool) -> None:
        count = self._prompt_count * self._sampling.n
        if body.seed is not None and not SEED_MIN <= body.seed <= SEED_MAX:
            raise InvalidRequest(f"resume.seed has {body.seed.bit_length()} bits, allowed are 64", param="resume.seed")
        for param, entries in (("token_ids", len(body.token_ids)), ("finished", len(body.finished))):
            if entries != count:
                raise InvalidRequest(
                    f"resume.{param} has {entries} entries and the request {count} choices: send one entry for each "
                    "choice, first all choices of the first prompt",
                    param=f"resume.{param}",
                )
        if not is_streamed and self._sampling.logprobs is not None and body.logprobs is None:
            raise InvalidRequest(
                "resume has no log probabilities of its tokens, and a whole response with logprobs needs them: "
                "leave logprobs out, set stream, or send resume.logprobs",
                param="logprobs",
            )


async def skip_known(streams: Sequence[RequestStream], skip: Callable[[int, Delta], object]) -> None:
    """Pass the known output of resumed streams to `skip`, which must not send this output again. Call this function
    once.

    Args:
        streams: engine requests.
        skip: receives the index of the stream and the delta.
    """
    for stream_index, stream in enumerate(streams):
        for place, delta in enumerate(stream.known, start=1):
            skip(stream_index, delta)
            if place % SKIPPED_MAX == 0:
                await trio.lowlevel.checkpoint()
        stream.forget_known()


def _digest(streams: Sequence[RequestStream]) -> str:
    """Return the digest of one prompt, or a digest of the digests of several prompts."""
    digests = [stream.prompt_digest or "" for stream in streams]
    return digests[0] if len(digests) == 1 else blake2b("/".join(digests).encode(), digest_size=16).hexdigest()
