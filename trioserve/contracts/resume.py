"""State of a response that resumes: in another engine, after an engine restart, or as a partial result.

A partial result is the output that a stopped request has delivered, choice by choice.
"""

from __future__ import annotations

import operator
import sys
from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import TypeVar

import msgspec

from trioserve.contracts.arguments import check_count, is_list, refuse, to_bool, to_int, to_str
from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.events import AbortOutcome, FinishReason, TokenLogprob
from trioserve.contracts.sampling import CHOICES_MAX
from trioserve.contracts.weights import WeightVersions

__all__ = ["AbortResult", "Partial", "PartialChoice", "Resume", "SEED_MAX", "SEED_MIN", "digest_of"]


class PartialChoice(msgspec.Struct, frozen=True, kw_only=True):
    """All deltas of one choice joined, including deltas that the reader has not read yet.

    Attributes:
        token_ids: Output tokens.
        logprobs: One entry for each token. None if they were not requested, or not kept.
        weight_versions: See Delta.
        finish_reason: STOP or LENGTH for a complete choice. None if the request failed.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    weight_versions: WeightVersions
    finish_reason: FinishReason | None


class Partial(msgspec.Struct, frozen=True, kw_only=True):
    """Partial result of one request.

    Attributes:
        choices: Ordered by index. Empty choices if the request was still in the queue.
        resume: State to resume all choices with the same request.
    """

    choices: tuple[PartialChoice, ...]
    resume: Resume


class AbortResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of stopping all requests with one id.

    Attributes:
        outcome: Outcome for the id.
        partials: One partial result for each request with this id whose reader has not left, in order of arrival.
            Pooling requests have no partial result.
    """

    outcome: AbortOutcome
    partials: tuple[Partial, ...] = ()


T = TypeVar("T")

DIGEST_BYTES = 16
SEED_MIN, SEED_MAX = -(2**63), 2**64 - 1
_TOKEN_IDS = "a list of lists of token ids (int)"
_LOGPROBS = "a list of lists of TokenLogprob"
_VERSIONS = "a list of lists of pairs: a version (str), and how many tokens it sampled (int, 1 or more)"


class Resume(msgspec.Struct, frozen=True, kw_only=True):
    """The response so far. A client sends it with its otherwise unchanged request. RequestStream.resume_state() returns
    this state.

    The engine computes the known output like a prompt. For token counts, stop conditions and penalties, it treats the
    known output as output. The next tokens are the same as in an uninterrupted response, because a token's randomness
    depends only on the seed and its position.

    Attributes:
        token_ids: Output tokens of each choice, by index, including tokens whose text was not shown.
        finished: For each choice, True if the choice has ended. A choice that has ended gets no more tokens.
        prompt_digest: Digest of the prompt's tokens (digest_of). The engine refuses the request if its prompt has
            another digest. None to skip the check.
        seed: Seed of the response. None for the seed of the sampling parameters, or a new seed if they have none.
        end_thinking: True if the client ended the reasoning (Engine.end_reasoning). If the reasoning is still open, it
            ends with the next token.
        logprobs: Log probabilities of the output tokens of each choice. The response then includes these log
            probabilities. None: only new tokens have log probabilities.
        weight_versions: For each choice, the versions of the weights that sampled its tokens (see Delta). The versions
            of new tokens are appended. None if the versions are not known, or if the weights were never replaced.

    Raises:
        InvalidRequest: a value has a wrong type or is out of range. Names the field.
    """

    token_ids: tuple[tuple[int, ...], ...]
    finished: tuple[bool, ...]
    prompt_digest: str | None = None
    seed: int | None = None
    end_thinking: bool = False
    logprobs: tuple[tuple[TokenLogprob, ...], ...] | None = None
    weight_versions: tuple[WeightVersions, ...] | None = None

    def __post_init__(self) -> None:
        force = msgspec.structs.force_setattr
        force(self, "token_ids", tuple(map(_checked, _items("resume.token_ids", self.token_ids, _TOKEN_IDS))))
        finished = _items("resume.finished", self.finished, "a list of True and False (bool)")
        force(self, "finished", tuple(to_bool("resume.finished", value) for value in finished))
        if len(self.finished) != len(self.token_ids):
            raise InvalidRequest(
                f"resume.finished has {len(self.finished)} entries and resume.token_ids {len(self.token_ids)}: each "
                "has one for every choice",
                param="resume.finished",
            )
        if self.prompt_digest is not None:
            to_str("resume.prompt_digest", self.prompt_digest, "a text (str), or None")
        if self.seed is not None:
            seed = to_int("resume.seed", self.seed, "a whole number (int), or None")
            if not SEED_MIN <= seed <= SEED_MAX:
                raise InvalidRequest(f"resume.seed has {seed.bit_length()} bits, allowed are 64", param="resume.seed")
            force(self, "seed", seed)
        to_bool("resume.end_thinking", self.end_thinking)
        if self.logprobs is not None:
            force(self, "logprobs", tuple(map(_checked_logprobs, self._by_choice("logprobs", self.logprobs))))
            self._check_counts("logprobs", [len(entries) for entries in self.logprobs])
        if self.weight_versions is not None:
            versions = self._by_choice("weight_versions", self.weight_versions)
            force(self, "weight_versions", tuple(map(_checked_versions, versions)))
            counts = [sum(count for _, count in runs) for runs in self.weight_versions]
            given = zip(self.weight_versions, counts, self.token_ids, strict=True)
            self._check_counts("weight_versions", [count if runs else len(ids) for runs, count, ids in given])

    def without_last(self, index: int, count: int, *, has_end: bool) -> Resume:
        """Return a copy without the last tokens of one choice.

        Args:
            index: The choice.
            count: Tokens to remove.
            has_end: True if the removed part includes the end of a finished choice. That choice then counts as
                unfinished.
        """
        kept = len(self.token_ids[index]) - count
        logprobs, versions = self.logprobs, self.weight_versions
        return msgspec.structs.replace(
            self,
            token_ids=_with(self.token_ids, index, self.token_ids[index][:kept]),
            finished=_with(self.finished, index, self.finished[index] and not has_end),
            logprobs=None if logprobs is None else _with(logprobs, index, logprobs[index][:kept]),
            weight_versions=(
                None if versions is None else _with(versions, index, _first_versions(versions[index], kept))
            ),
        )

    def _by_choice(self, name: str, value: object) -> Sequence[object]:
        items = _items(f"resume.{name}", value, "a list with an entry for each choice")
        if len(items) != len(self.token_ids):
            raise InvalidRequest(
                f"resume.{name} has {len(items)} entries and resume.token_ids {len(self.token_ids)}: each has one for "
                "every choice",
                param=f"resume.{name}",
            )
        return items

    def _check_counts(self, name: str, counts: Sequence[int]) -> None:
        for index, (count, token_ids) in enumerate(zip(counts, self.token_ids, strict=True)):
            if count != len(token_ids):
                raise InvalidRequest(
                    f"resume.{name}[{index}] is of {count} tokens and resume.token_ids[{index}] has {len(token_ids)}",
                    param=f"resume.{name}",
                )


def digest_of(token_ids: Sequence[int], images: Iterable[bytes] = ()) -> str:
    """Return the digest of a prompt: 32 hexadecimal digits, equal in every process.

    Args:
        token_ids: Tokens of the prompt.
        images: Digest of each image.
    """
    ids = array("I", token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return blake2b(ids.tobytes() + b"".join(images), digest_size=DIGEST_BYTES).hexdigest()


def _items(param: str, value: object, allowed: str) -> Sequence[object]:
    if not is_list(value):
        refuse(param, value, allowed)
    check_count(param, value, CHOICES_MAX)
    return value


def _checked(token_ids: object) -> tuple[int, ...]:
    if not is_list(token_ids):
        refuse("resume.token_ids", token_ids, _TOKEN_IDS, verb="holds")
    try:
        checked = tuple(map(operator.index, token_ids))  # type: ignore[arg-type]  # checked by operator.index
    except TypeError:
        refuse("resume.token_ids", token_ids, _TOKEN_IDS, verb="holds")
    if checked and min(checked) < 0:
        raise InvalidRequest(f"resume.token_ids holds {min(checked)}, allowed is 0 or more", param="resume.token_ids")
    return checked


def _with(items: tuple[T, ...], index: int, item: T) -> tuple[T, ...]:
    return (*items[:index], item, *items[index + 1 :])


def _checked_logprobs(entries: object) -> tuple[TokenLogprob, ...]:
    if not is_list(entries):
        refuse("resume.logprobs", entries, _LOGPROBS, verb="holds")
    wrong = next((entry for entry in entries if not isinstance(entry, TokenLogprob)), None)
    if wrong is not None:
        refuse("resume.logprobs", wrong, _LOGPROBS, verb="holds")
    return tuple(entries)  # type: ignore[arg-type]  # checked above


def _checked_versions(runs: object) -> WeightVersions:
    if not is_list(runs):
        refuse("resume.weight_versions", runs, _VERSIONS, verb="holds")
    checked = []
    for run in runs:
        if not (is_list(run) and len(run) == 2):
            refuse("resume.weight_versions", run, _VERSIONS, verb="holds")
        version, count = run
        if not (isinstance(version, str) and type(count) is int and count > 0):
            refuse("resume.weight_versions", run, _VERSIONS, verb="holds")
        checked.append((version, count))
    return tuple(checked)


def _first_versions(runs: WeightVersions, count: int) -> WeightVersions:
    """Return the versions of the first `count` tokens."""
    first = []
    for version, own_count in runs:
        if count > 0:
            first.append((version, min(count, own_count)))
        count -= own_count
    return tuple(first)
