"""Passes the sampling parameters of each sampled row to the native kernels, and reads the tokens that they choose."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

from trioserve.contracts.events import TokenLogprob
from trioserve.contracts.guide import BITS, TokenMasks, mask_words
from trioserve.contracts.step import ScheduledChunk
from trioserve.model.step_model import (
    NOT_FINITE,
    NOTHING_ALLOWED,
    NOTHING_LEFT,
    Samples,
    counts_output,
    hides_end_tokens,
    is_largest_wanted,
)
from trioserve_kernels.native import (
    FLAW_NOT_FINITE,
    FLAW_NOTHING_ALLOWED,
    FLAW_NOTHING_LEFT,
    NO_FLAW,
    int32_array,
    start_of,
)
from trioserve_kernels.structs import SamplingStruct, StepStruct

__all__ = ["NativeSamplings", "token_logprob"]

ERRORS = {
    FLAW_NOT_FINITE: NOT_FINITE,
    FLAW_NOTHING_LEFT: NOTHING_LEFT,
    FLAW_NOTHING_ALLOWED: NOTHING_ALLOWED,
}


class NativeSamplings:
    """Sampled rows of a step, in order, and arrays for the kernels' results.

    Args:
        chunks: one for each sampled row, see sampled_rows.
        vocab_size: tokens in the vocabulary.
        masks: token masks of chunks with a mask_row. This object keeps them alive until the kernels have finished.
    """

    def __init__(self, chunks: Sequence[ScheduledChunk], vocab_size: int, masks: TokenMasks | None = None) -> None:
        assert masks is None or masks.words_per_row >= mask_words(vocab_size), "masks of another vocabulary"
        self._masks = masks
        self._ids: list[int] = []
        self._biases: list[float] = []
        self._structs = (SamplingStruct * len(chunks))()
        self._top_counts: dict[int, int] = {}
        for row, chunk in enumerate(chunks):
            if not is_largest_wanted(chunk):
                struct = self._structs[row] = self._struct(chunk, vocab_size)
                if struct.wants_logprobs:
                    self._top_counts[row] = struct.top_count
            if chunk.mask_row is not None:
                self._structs[row].mask = self._mask_address(chunk.mask_row)
                self._structs[row].needs_logits = 1
        self._top_count_max = max(self._top_counts.values(), default=0)
        self._id_array, self._bias_array = int32_array(self._ids), array("f", self._biases)
        self._next_ids = int32_array((0,)) * len(chunks)
        self._flaws = int32_array((0,)) * len(chunks)
        self._logprobs = array("f", (0,)) * (len(chunks) * (1 + self._top_count_max))
        self._top_ids = int32_array((0,)) * (len(chunks) * self._top_count_max)

    def put_into(self, step: StepStruct) -> None:
        """Write addresses of this object's arrays into a step.

        Args:
            step: description that the kernels read. NativeSamplings must exist until the step has ended.
        """
        step.samplings = ctypes.addressof(self._structs)
        step.sampling_ids, step.sampling_biases = start_of(self._id_array), start_of(self._bias_array)
        step.next_ids, step.flaws = start_of(self._next_ids), start_of(self._flaws)
        step.logprobs, step.top_ids = start_of(self._logprobs), start_of(self._top_ids)
        step.top_count_max = self._top_count_max
        step.masks_filled = None if self._masks is None else self._masks.filled_address

    def samples(self) -> Samples:
        """Return the tokens that the kernels chose."""
        token_ids, flaws = self._next_ids.tolist(), self._flaws.tolist()
        errors = {row: ERRORS[flaw] for row, flaw in enumerate(flaws) if flaw != NO_FLAW}
        logprobs = {row: self._logprob(row, token_ids[row]) for row in self._top_counts if row not in errors}
        return Samples([None if row in errors else token for row, token in enumerate(token_ids)], logprobs, errors)

    def _mask_address(self, mask_row: int) -> int:
        masks = self._masks
        assert masks is not None, "a row refers to a mask, but the plan has none"
        assert 0 <= mask_row < masks.row_count
        return masks.address + mask_row * masks.words_per_row * (BITS // 8)

    def _logprob(self, row: int, token_id: int) -> TokenLogprob:
        first, top_first = row * (1 + self._top_count_max), row * self._top_count_max
        logprobs = self._logprobs[first : first + 1 + self._top_count_max]
        top_ids = self._top_ids[top_first : top_first + self._top_counts[row]]
        return token_logprob(token_id, logprobs.tolist(), top_ids.tolist())

    def _struct(self, chunk: ScheduledChunk, vocab_size: int) -> SamplingStruct:
        request, sampling = chunk.request, chunk.request.sampling
        known, prompt_count = chunk.start + chunk.count, len(request.prompt_token_ids)
        ids_first, biases_first = len(self._ids), len(self._biases)
        bias = sampling.logit_bias or {}
        hidden = request.stop_token_ids if hides_end_tokens(chunk) else frozenset()
        seen: Sequence[int] = ()
        if sampling.repetition_penalty != 1.0:
            seen = chunk.tokens[:known]
        elif counts_output(sampling):
            seen = chunk.tokens[prompt_count:known]
        self._ids.extend(bias)
        self._biases.extend(bias.values())
        self._ids.extend(hidden)
        self._ids.extend(seen)
        return SamplingStruct(
            seed=request.seed,
            top_p=sampling.top_p,
            position=known,
            temperature=sampling.temperature,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            top_k=max(0, min(sampling.top_k, vocab_size)),
            ids_first=ids_first,
            biases_first=biases_first,
            bias_count=len(bias),
            hidden_count=len(hidden),
            seen_count=len(seen),
            output_count=min(len(seen), known - prompt_count),
            top_count=min(sampling.logprobs or 0, vocab_size),
            wants_logprobs=sampling.logprobs is not None,
            needs_logits=1,
        )


def token_logprob(token_id: int, logprobs: list[float], top_ids: list[int]) -> TokenLogprob:
    """Return the logprobs of one row.

    Args:
        token_id: chosen token.
        logprobs: logprob of the chosen token, then of each token in top_ids. Later numbers are ignored.
        top_ids: most probable tokens, most probable first.
    """
    return TokenLogprob(token_id, logprobs[0], tuple(zip(top_ids, logprobs[1:], strict=False)))
