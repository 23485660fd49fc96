"""What is known of a response that began elsewhere, or in an engine that broke, and is to go on from there."""

from __future__ import annotations

import operator
import sys
from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b

import msgspec

from trioserve.contracts.arguments import check_count, is_list, refuse, to_bool, to_int, to_str
from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.sampling import CHOICES_MAX

__all__ = ["SEED_MAX", "SEED_MIN", "Resume", "digest_of"]

DIGEST_BYTES = 16
SEED_MIN, SEED_MAX = -(2**63), 2**64 - 1
_TOKEN_IDS = "a list of lists of token ids (int)"


class Resume(msgspec.Struct, frozen=True, kw_only=True):
    """The response so far, for a request that is otherwise the same. RequestStream.resume_state() gives one.

    Known output is computed as a prompt is. But it counts, stops and penalizes as output, and what follows is sampled
    as if nothing had happened: a token's randomness is a function of the seed and its place.

    token_ids: of each of the n choices, in the order of their indices, all tokens so far, also those whose text was not
        shown. finished: of each choice, whether it has ended; nothing more comes of it.
    prompt_digest: of the prompt's tokens (digest_of): where the prompt turns out to be another one the request is
        refused, since its continuation would be another text. None: nobody looks.
    seed: that of the response. None: sampling's own, or a new one.
    end_thinking: its thoughts were ended by hand (Engine.end_thoughts): one that goes on ends with the next token.
    Raises InvalidRequest, naming the field, when a value is of another type or out of range.
    """

    token_ids: tuple[tuple[int, ...], ...]
    finished: tuple[bool, ...]
    prompt_digest: str | None = None
    seed: int | None = None
    end_thinking: bool = False

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


def digest_of(token_ids: Sequence[int], images: Iterable[bytes] = ()) -> str:
    """The name of a prompt: 32 hexadecimal digits, the same for the same tokens and images, in any process. images: the
    name of each."""
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
        checked = tuple(map(operator.index, token_ids))  # type: ignore[arg-type]  # that is the question
    except TypeError:
        refuse("resume.token_ids", token_ids, _TOKEN_IDS, verb="holds")
    if checked and min(checked) < 0:
        raise InvalidRequest(f"resume.token_ids holds {min(checked)}, allowed is 0 or more", param="resume.token_ids")
    return checked
