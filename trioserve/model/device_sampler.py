"""Chooses the tokens of launched steps. The host starts all work and does not wait for the device.

The kernels choose a token of every row from its logits. Rows whose logits change are chosen again from the changed
logits. One copy returns tokens, errors and logprobs to the host, and the reader waits for its end. The chosen tokens
also stay on the device, because the next step may begin before the host has received them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from trioserve.contracts.guide import TokenMasks
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.step import ScheduledChunk
from trioserve.model.gpu import new_event
from trioserve.model.logit_adjustments import LogitAdjustments
from trioserve.model.sampler import draw_words, logprob_rows, read_logprobs
from trioserve.model.step_model import (
    NOT_FINITE,
    NOTHING_ALLOWED,
    NOTHING_LEFT,
    ReadSamples,
    Samples,
    draw_parameters,
)
from trioserve.model.step_rows import MaskedRows, masked_rows
from trioserve.model.torch_formats import Sending
from trioserve_kernels import Kernels
from trioserve_kernels.reference import Flaw

__all__ = ["DeviceSampler", "reach_end"]


class DeviceSampler:
    """Samples the rows of steps with fused kernels.

    Args:
        kernels: fused kernels.
        vocab_size: tokens in the vocabulary.
        kept_ids: int64 [n], ids that the last step chose, on the device. Ids of further rows are not kept.
    """

    def __init__(self, kernels: Kernels, vocab_size: int, kept_ids: Tensor) -> None:
        self._kernels = kernels
        self._vocab_size = vocab_size
        self._kept_ids = kept_ids
        self._device = kept_ids.device
        self._adjustments = LogitAdjustments(vocab_size, self._device)
        # From one step to the next, most requests keep their row. The parameters of such rows are not sent again.
        self._requests: list[EngineRequest] = []
        self._seeds = np.empty(0, dtype=np.uint64)
        self._parameters = torch.empty(0, 4, dtype=torch.float64, device=self._device)

    def launch(
        self,
        logits: Tensor,
        chunks: Sequence[ScheduledChunk],
        inputs: Callable[[], Tensor],
        masks: TokenMasks | None = None,
    ) -> ReadSamples:
        """Start to choose the next token of every row. If there are masks, wait for them.

        The order of operations and the random numbers are those of `sample`.

        Args:
            logits: [n, vocab_size] in any floating dtype. They do not change.
            chunks: one chunk for each row, at least one, see sampled_rows.
            inputs: returns the input token of each row, int64 [n]. Called only if a row needs its history.
            masks: masks of chunks with a mask_row.
        """
        masked = masked_rows(chunks, masks, self._vocab_size)
        sending = Sending(self._device)
        parameters, words = self._randomness(chunks, sending)
        mask_tensors = None
        if masked is not None:
            mask_tensors = sending.add(masked.bits.view(np.int32)), sending.add(masked.places)
        adjustment = self._adjustments.begin(chunks, masked, sending)
        tops = {
            row: chunk.request.sampling.logprobs
            for row, chunk in enumerate(chunks)
            if chunk.request.sampling.logprobs is not None
        }
        logprob_places = sending.add(np.array(list(tops), dtype=np.int64)) if tops else None
        sending.send()
        chosen = self._kernels.choose_tokens(logits, parameters, words, mask_tensors)
        if adjustment is not None:
            scores = adjustment.scores(logits, inputs())
            self._choose_again_(chosen, adjustment.rows, scores, parameters, words, mask_tensors)
        kept = min(len(chunks), len(self._kept_ids))
        # A row with an error has an arbitrary id of the vocabulary. The next step's result for its request is dropped.
        self._kept_ids[:kept].copy_(chosen[0, :kept])
        results = [chosen.view(-1)]
        if logprob_places is not None:
            ids = chosen[0].index_select(0, logprob_places)
            rows = logprob_rows(logits.index_select(0, logprob_places), ids, max(tops.values()))
            results.append(rows.view(torch.int64).view(-1))
        return _reader(_fetch(torch.cat(results)), len(chunks), tops, masked)

    def _randomness(self, chunks: Sequence[ScheduledChunk], sending: Sending) -> tuple[Tensor, Tensor]:
        """Return parameters and words of the rows, as choose_tokens accepts them."""
        requests = [chunk.request for chunk in chunks]
        if len(requests) != len(self._requests) or any(
            one is not other for one, other in zip(requests, self._requests, strict=True)
        ):
            self._requests = requests
            self._seeds = np.array([request.seed for request in requests], dtype=np.uint64)
            parameters = [draw_parameters(request.sampling) for request in requests]
            self._parameters = sending.add(np.array(parameters, dtype=np.float64))
        positions = np.array([chunk.start + chunk.count for chunk in chunks], dtype=np.int64)
        return self._parameters, sending.add(draw_words(self._seeds, positions))

    def _choose_again_(
        self,
        chosen: Tensor,
        rows: Tensor,
        scores: Tensor,
        parameters: Tensor,
        words: Tensor,
        masks: tuple[Tensor, Tensor] | None,
    ) -> None:
        """Replace the tokens of the rows whose logits changed.

        In changed logits, minus infinity may mean a hidden token. Therefore, flaws of the numbers are those of the
        unchanged logits.
        """
        again = self._kernels.choose_tokens(
            scores,
            parameters.index_select(0, rows),
            words.index_select(0, rows),
            None if masks is None else (masks[0], masks[1].index_select(0, rows)),
        )
        given = chosen[1].index_select(0, rows) & int(Flaw.NO_NUMBER | Flaw.HIDDEN)
        again[1] = given | again[1] & int(Flaw.ALL_HIDDEN)
        chosen.index_copy_(1, rows, again)


def reach_end(result: Tensor) -> ReadSamples:
    """Return the samples of a step that samples no row. The reader waits until the device has computed the result.

    Args:
        result: any tensor that the step computes, not empty.
    """
    fetch = _fetch(result.view(-1)[:1])

    def read() -> Samples:
        fetch()
        return Samples([])

    return read


def _fetch(values: Tensor) -> Callable[[], Tensor]:
    """Start to copy a tensor to the host, and return a function that waits for the copy."""
    is_cuda = values.device.type == "cuda"
    there = torch.empty(values.shape, dtype=values.dtype, pin_memory=is_cuda)
    there.copy_(values, non_blocking=True)
    arrived = new_event() if is_cuda else None
    if arrived is not None:
        arrived.record()

    def wait() -> Tensor:
        if arrived is not None:
            arrived.synchronize()
        return there

    return wait


def _reader(fetch: Callable[[], Tensor], count: int, tops: Mapping[int, int], masked: MaskedRows | None) -> ReadSamples:
    """Return a function that waits for a step's results.

    Args:
        fetch: waits for int64 [2 * count + m]: tokens and flaws of the rows, then the bits of logprob_rows.
        count: number of rows.
        tops: number of alternatives with logprobs, by row.
        masked: masks of the step.
    """

    def read() -> Samples:
        found = fetch()
        ids, flaws = found[: 2 * count].view(2, count).tolist()
        errors: dict[int, str] = {}
        for row, flaw in enumerate(flaws):
            if flaw & (Flaw.NO_NUMBER | Flaw.HIDDEN):
                errors[row] = NOT_FINITE
            elif flaw & Flaw.ALL_HIDDEN:
                errors[row] = NOTHING_ALLOWED if masked is not None and row in masked.rows else NOTHING_LEFT
        samples = Samples([None if row in errors else token for row, token in enumerate(ids)], errors=errors)
        if tops:
            rows = found[2 * count :].view(torch.float64).view(len(tops), -1).tolist()
            entries = read_logprobs(rows, [ids[row] for row in tops], list(tops.values()))
            samples.logprobs = {row: entry for row, entry in zip(tops, entries, strict=True) if row not in errors}
        return samples

    return read
