"""A streamed response that can go on at another server, and one that began at another one.

Whoever asks for it with a header gets a head that holds what the continuation needs to know besides the tokens, and the
tokens themselves in the `id:` lines of the events: each group of events, which is what one delta makes, ends with one.

    id: 0:12,7        the client has these tokens more of choice 0; tokens that made no event come with the next group
    id: 0:12!         and with this group the choice has ended
    id: 0:12 41       41 is a state of the API's own
    id: .             the group of usage and [DONE]: there is nothing to go on with

The same request with `resume` in its body then goes on behind the last group that arrived. Everything that a client
sees is a function of the request, its id, and what the head held: so it is the same at every server.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

import msgspec
import trio

from trioserve.api.generation import is_cut_off
from trioserve.api.resume_body import ResumeBody, resume_body
from trioserve.api.sse import encode
from trioserve.contracts.errors import InvalidRequest, ResumeMismatch
from trioserve.contracts.output import Delta
from trioserve.contracts.resume import SEED_MAX, SEED_MIN, Resume
from trioserve.contracts.sampling import SamplingParams

if TYPE_CHECKING:
    from trioserve.api.request_context import RequestContext
    from trioserve.engine.request_stream import RequestStream

__all__ = ["GroupIds", "Resumption", "skip_known"]

RESUMABLE_HEADER = "x-trioserve-resumable"
RESUME_HEADER = "x-trioserve-resume"
FINGERPRINT_HEADER = "x-trioserve-fingerprint"
SEED_HEADER = "x-trioserve-seed"
"""The seed of a request that names none, chosen by a router: another router that has the same request chooses the
same."""
SERVER_STOPPING = "server_stopping"
DETACH_HEADER = "x-detach-timeout"  # such a stream has ids of its own, and survives its client in its own way

SEEDS_DRAWN = 1 << 53  # of one that is drawn: readers of JSON that know floats only do not change it
SEED_STRIDE = 0xD1B54A32D192ED03  # the seeds of a request's prompts lie far apart, and far from those of its choices
SKIPPED_MAX = 256  # deltas at a time: about two milliseconds
LAST_ID = b"id: .\n\n"


class Resumption:
    """Of one request. body: its field. is_streamed: whether the response is. prompt_count: as many streams it has.

    is_asked: the response is to be one that can go on elsewhere. gives_partial: one that is cut off says what there is,
    and how it goes on. repeats: a stream that goes on behind such an end says all of it once more.
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
        """Raises InvalidRequest."""
        self._repeats = repeats
        self.gives_partial = gives_partial
        self.is_streamed = is_streamed
        headers = context.exchange.headers
        self.is_asked = is_streamed and headers.get(RESUMABLE_HEADER) == "1" and headers.get(DETACH_HEADER) is None
        self.body = body
        self._context = context
        self._sampling = sampling
        self._prompt_count = prompt_count
        self._created = body.created if body is not None and body.created is not None else None
        self._seed = self._first_seed()
        self._call_counts: Counter[int] = Counter()
        if body is not None:
            self._check(body, is_streamed=is_streamed)

    @property
    def is_on(self) -> bool:
        """Whether the response is another one than without all this."""
        return self.is_asked or self.body is not None or self.gives_partial

    @property
    def is_resumable(self) -> bool:
        """Whether its client is shown nothing that it would be shown once more behind what it has."""
        return self.is_asked or (self.gives_partial and self.is_streamed and not self._repeats)

    def is_partial(self, delta: Delta) -> bool:
        """Whether an end by another's hand is one that the client wants to have what there is with. Where the server
        leaves, whoever can go on elsewhere is told so, as ever."""
        leaves = self.is_asked and delta.stop_reason == SERVER_STOPPING
        return self.gives_partial and is_cut_off(delta.finish_reason) and not leaves

    @property
    def created(self) -> int:
        """When the response began."""
        if self._created is None:
            self._created = self._context.clock_and_ids.unix_seconds()
        return self._created

    def seeded(self, sampling: SamplingParams, prompt_index: int = 0) -> SamplingParams:
        """With the seed that this prompt's continuation will have, too."""
        if not self.is_on or sampling.seed is not None:
            return sampling
        return msgspec.structs.replace(sampling, seed=self._seed_of(prompt_index))

    def resume(self, prompt_index: int = 0) -> Resume | None:
        """What is known of this prompt's response. Raises InvalidRequest."""
        body = self.body
        if body is None:
            return None
        n = self._sampling.n
        own = slice(prompt_index * n, (prompt_index + 1) * n)
        return Resume(
            token_ids=body.token_ids[own],  # type: ignore[arg-type]  # it makes tuples of them
            finished=body.finished[own],  # type: ignore[arg-type]
            prompt_digest=body.prompt_digest if self._prompt_count == 1 else None,
            seed=self._seed_of(prompt_index),
            end_thinking=body.end_thinking,
            logprobs=None if body.logprobs is None else body.logprobs[own],  # type: ignore[arg-type]
            weight_versions=None if body.weight_versions is None else body.weight_versions[own],  # type: ignore[arg-type]
        )

    def behind(self, streams: Sequence[RequestStream]) -> ResumeBody:
        """What there is of a response that was cut off, to be sent back as `resume`: all of it was read."""
        digest = None if any(stream.prompt_digest is None for stream in streams) else _digest(streams)
        states = [stream.resume_state() for stream in streams]
        return resume_body(states, prompt_digest=digest, seed=self._seed, created=self.created)

    def check(self, streams: Sequence[RequestStream]) -> None:
        """To be called when all of them are entered. Raises ResumeMismatch where the prompts are others."""
        wanted = None if self.body is None else self.body.prompt_digest
        if self._prompt_count > 1 and wanted is not None and wanted != _digest(streams):
            raise ResumeMismatch(
                f"the response began behind prompts whose digest is {wanted}, and here it is {_digest(streams)}: its "
                "continuation would be another text. Send the request without resume",
                param="resume.prompt_digest",
            )

    @property
    def state(self) -> str | None:
        """That of the last group that the client has, where the response goes on."""
        return None if self.body is None else self.body.state

    def headers(self, streams: Sequence[RequestStream], **more: object) -> tuple[tuple[str, str], ...]:
        """Of the head of the response, where it was asked for. streams: all of them, entered. more: what the API wants
        to be told again, or has another value of."""
        if not self.is_asked:
            return ()
        known = {"prompt_digest": _digest(streams), "seed": self._seed, "created": self.created, **more}
        headers = [(RESUME_HEADER, encode(known).decode())]
        adapter = None if self._context.adapter is None else streams[0].adapter_digest
        fingerprint = self._context.engine.model.fingerprint_with(adapter)
        if fingerprint is not None:
            headers.append((FINGERPRINT_HEADER, fingerprint))
        return tuple(headers)

    def new_ids(self) -> Callable[[int], str] | None:
        """Of the calls of each choice; None where they may be any."""
        return self._new_id if self.is_on else None

    def group_ids(self) -> GroupIds | None:
        """None where nobody asked for them."""
        return GroupIds() if self.is_asked else None

    def _new_id(self, choice_index: int) -> str:
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
        """Prompts share a seed that the client has given, as ever; drawn ones are their own."""
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
                    f"resume.{param} has {entries} entries and the request {count} choices: there is one for each "
                    "choice, those of the first prompt first",
                    param=f"resume.{param}",
                )
        if not is_streamed and self._sampling.logprobs is not None and body.logprobs is None:
            raise InvalidRequest(
                "resume is set without the log probabilities of the tokens that are known: they cannot be part of a "
                "whole response. Leave logprobs out, or set stream, or send resume.logprobs",
                param="logprobs",
            )


class GroupIds:
    """Of one response: what each group of events says in its `id:` line."""

    def __init__(self) -> None:
        self._untold: dict[int, list[int]] = {}  # tokens that made no event yet

    def begin(self, events: bytes, state: bytes) -> bytes:
        """These events, which come before any token, as a group. state: the API's own."""
        return b"%bid: 0: %b\n\n" % (events[:-1], state)

    def group(self, events: bytes, choice_index: int, delta: Delta, state: bytes = b"") -> bytes:
        """These events, which are all that this delta of the choice has made, as a group. Nothing where there are none.
        state: the API's own, with a space before it."""
        token_ids: Sequence[int] = delta.token_ids
        if not events:
            self._untold.setdefault(choice_index, []).extend(token_ids)
            return b""
        if self._untold and (untold := self._untold.pop(choice_index, None)):
            token_ids = (*untold, *token_ids)
        if len(token_ids) == 1 and delta.finish_reason is None:  # what nearly all of them are
            return events[:-1] + b"id: %d:%d" % (choice_index, token_ids[0]) + state + b"\n\n"
        ids = b",".join([b"%d" % token_id for token_id in token_ids])
        end = b"" if delta.finish_reason is None or is_cut_off(delta.finish_reason) else b"!"
        return b"%bid: %d:%b%b%b\n\n" % (events[:-1], choice_index, ids, end, state)

    def last(self, events: bytes) -> bytes:
        """The group that closes the response."""
        return events[:-1] + LAST_ID


async def skip_known(streams: Sequence[RequestStream], skip: Callable[[int, Delta], object]) -> None:
    """Give `skip` what the client has already: as if it had just come, and without showing it. The event loop gets its
    turns meanwhile. To be called once."""
    for stream_index, stream in enumerate(streams):
        for place, delta in enumerate(stream.known, start=1):
            skip(stream_index, delta)
            if place % SKIPPED_MAX == 0:
                await trio.lowlevel.checkpoint()
        stream.forget_known()


def _digest(streams: Sequence[RequestStream]) -> str:
    """Of all prompts; of one its own."""
    digests = [stream.prompt_digest or "" for stream in streams]
    return digests[0] if len(digests) == 1 else blake2b("/".join(digests).encode(), digest_size=16).hexdigest()
