"""Chooses the tokens of launched steps. The host starts all work and does not wait for the device.

The kernels choose a token of every row from its logits. Rows whose logits change are chosen again from the changed
logits. One copy returns tokens, errors and logprobs to the host, and the reader waits for its end. The chosen tokens
also stay on the device, because the next step may begin before the host has received them.

`LogitAdjustments` keeps the state of logit bias, hidden end tokens and penalties on the device between steps. A request
that changes its logits owns a slot. The slot holds the request's bias, its end tokens, and how often each token occurs
in its history. The host sends bias and end tokens once. It sends only those tokens of a history that the device has not
counted yet: the whole history of a request that begins or resumes, and usually no token afterwards. The newest token is
the input of the sampled row, which is on the device already, so the host does not have to know it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trioserve.contracts.guide import TokenMasks
from trioserve.contracts.ids import RequestId
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.step import ScheduledChunk
from trioserve.model.device import new_event
from trioserve.model.step_model import (
    NOT_FINITE,
    NOTHING_ALLOWED,
    NOTHING_LEFT,
    ReadSamples,
    Samples,
    counts_output,
    draw_parameters,
    hides_end_tokens,
    is_adjusted,
)
from trioserve.model.step_rows import MaskedRows, allows_more_than, masked_rows
from trioserve.model.torch_step.formats import Sending
from trioserve.model.torch_step.sampler import draw_words, logprob_rows, read_logprobs
from trioserve_kernels import Kernels
from trioserve_kernels.reference import Flaw

__all__ = ["Adjustment", "DeviceSampler", "LogitAdjustments", "reach_end"]


_Array = npt.NDArray[np.generic]

SLOTS_MIN = 4  # Slots that the first request with a changed logit allocates. More requests double the number.


@dataclass(slots=True)
class _Slot:
    """State of one request on the device.

    Attributes:
        index: index of the slot.
        request: owner.
        counted: number of tokens at the start of the request that the slot has counted.
        has_end_tokens: True if the slot has the request's end tokens.
    """

    index: int
    request: EngineRequest
    counted: int = 0
    has_end_tokens: bool = False


@dataclass(slots=True)
class _Changes:
    """Changes of the slots before a step samples, as indexes of flattened tables.

    Attributes:
        cleared: slots that get a new owner.
        bias_places: indexes of `biases`.
        bias_values: values at these indexes.
        end_places: indexes of `end_tokens`.
        counted: indexes of `counts`, which increase by one for each occurrence.
        later: indexes of the counts of the step's rows, for draft tokens before a row.
        newest: for each slot, the row whose input is the slot's newest token, and an index of `counts` to which the
            token is added.
    """

    cleared: list[int] = field(default_factory=list)
    bias_places: list[int] = field(default_factory=list)
    bias_values: list[float] = field(default_factory=list)
    end_places: list[int] = field(default_factory=list)
    counted: list[npt.NDArray[np.int64]] = field(default_factory=list)
    later: list[int] = field(default_factory=list)
    newest: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Adjustment:
    """Changes of one step's logits. `scores` must be called once, in the order of the steps.

    Attributes:
        rows: int64 [m], sampled rows whose logits change.
    """

    rows: Tensor
    _owner: LogitAdjustments
    _slots: Tensor  # int64 [m]
    _numbers: Tensor  # float32 [4, m, 1]: repetition, frequency and presence penalty, 1 if end tokens are hidden
    _cleared: Tensor | None
    _bias: tuple[Tensor, Tensor] | None
    _end_places: Tensor | None
    _counted: Tensor | None
    _newest: Tensor | None  # int64 [2, n]
    _later: Tensor | None
    _kinds: tuple[bool, bool, bool]  # True if a row has a bias, hides end tokens, or has a penalty

    def scores(self, logits: Tensor, inputs: Tensor) -> Tensor:
        """Update the slots, and return the changed logits.

        The order of operations is that of `sample`. The repetition penalty applies to prompt and output tokens.
        Presence and frequency penalties apply to output tokens.

        Args:
            logits: [n, vocab_size], logits of all sampled rows. They do not change.
            inputs: int64 [n], input token of each sampled row.

        Returns:
            float32 [m, vocab_size].
        """
        owner, (has_bias, hides, has_penalty) = self._owner, self._kinds
        if self._cleared is not None:
            owner.clear(self._cleared)
        scores = logits.index_select(0, self.rows).float()
        if has_bias:
            if self._bias is not None:
                owner.biases.view(-1).index_copy_(0, *self._bias)
            scores += owner.biases.index_select(0, self._slots)
        repetition, frequency, presence, hidden = self._numbers.unbind()
        if hides:
            if self._end_places is not None:
                owner.end_tokens.view(-1).index_fill_(0, self._end_places, 1)
            ends = owner.end_tokens.index_select(0, self._slots) != 0
            scores.masked_fill_(ends & (hidden != 0), float("-inf"))
        if has_penalty:
            everything, output = self._counts(inputs)
            repeated = torch.where(scores > 0, scores / repetition, scores * repetition)
            scores = torch.where(everything > 0, repeated, scores)
            scores -= frequency * output + presence * (output > 0)
        return scores

    def _counts(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Count the new tokens. Return the counts of each row's whole history and of its output, int32 [m, vocab]."""
        table = self._owner.counts.view(-1)
        if self._counted is not None:
            table.index_add_(0, self._counted, torch.ones_like(self._counted, dtype=torch.int32))
        if self._newest is not None:
            rows, bases = self._newest
            places = bases + inputs.index_select(0, rows)
            table.index_add_(0, places, torch.ones_like(places, dtype=torch.int32))
        counts = self._owner.counts.index_select(1, self._slots)
        if self._later is not None:
            counts.view(-1).index_add_(0, self._later, torch.ones_like(self._later, dtype=torch.int32))
        everything, output = counts.unbind()
        return everything, output


class LogitAdjustments:
    """Slots of the requests that change their logits.

    A request without a row in a step loses its slot. If it samples again, for example after a preemption, the host
    sends its history again. Each table exists once a request needs it.

    Args:
        vocab_size: tokens in the vocabulary.
        device: device of the tables.

    Attributes:
        biases: float32 [slots, vocab_size].
        end_tokens: uint8 [slots, vocab_size], 1 for a token that ends the request.
        counts: int32 [2, slots, vocab_size], how often each token occurs in prompt and output, and in the output.

    Cost:
        At most 13 bytes per token of the vocabulary and slot, and twice as many slots as such requests in one step.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._slots: dict[RequestId, _Slot] = {}
        self._free: list[int] = []
        self._slot_count = 0
        self.biases = self._table(torch.float32, 1)[0]
        self.end_tokens = self._table(torch.uint8, 1)[0]
        self.counts = self._table(torch.int32, 2)

    def begin(self, chunks: Sequence[ScheduledChunk], masked: MaskedRows | None, sending: Sending) -> Adjustment | None:
        """Plan the changes of one step.

        Args:
            chunks: chunks of the sampled rows, see sampled_rows.
            masked: masks of the sampled rows.
            sending: transfer to which the arrays are added. The result can be used after `sending.send`.

        Returns:
            The changes, or None if no row changes its logits.
        """
        rows = [row for row, chunk in enumerate(chunks) if is_adjusted(chunk)]
        ids = {chunks[row].request.id for row in rows}
        for request_id in self._slots.keys() - ids:
            self._free.append(self._slots.pop(request_id).index)
        if not rows:
            return None
        self._grow(len(ids))
        changes = _Changes()
        slots: list[int] = []
        numbers = np.zeros((4, len(rows), 1), dtype=np.float32)
        begun: dict[RequestId, ScheduledChunk] = {}
        has_bias = has_penalty = False
        for place, row in enumerate(rows):
            chunk = chunks[row]
            request, sampling = chunk.request, chunk.request.sampling
            is_first = request.id not in begun
            slot = self._slot(chunk, changes) if is_first else self._slots[request.id]
            first = begun.setdefault(request.id, chunk)
            slots.append(slot.index)
            hides = hides_end_tokens(chunk) and self._may_hide(chunk, None if masked is None else masked.of(row))
            numbers[:, place, 0] = (
                sampling.repetition_penalty,
                sampling.frequency_penalty,
                sampling.presence_penalty,
                hides,
            )
            has_bias |= bool(sampling.logit_bias)
            if hides and not slot.has_end_tokens:
                slot.has_end_tokens = True
                base = slot.index * self._vocab_size
                # A client's stop tokens may be outside of this vocabulary. Such tokens cannot be sampled.
                changes.end_places += (base + token for token in request.stop_token_ids if token < self._vocab_size)
            if _is_counted(request):
                has_penalty = True
                if is_first:
                    self._count(slot, chunk, row, changes)
                else:
                    self._count_later(first, chunk, place, len(rows), changes)
        hides_any = bool(numbers[3].any())
        self._allocate(has_bias=has_bias, hides=hides_any, has_penalty=has_penalty)
        return Adjustment(
            rows=sending.add(np.array(rows, dtype=np.int64)),
            _owner=self,
            _slots=sending.add(np.array(slots, dtype=np.int64)),
            _numbers=sending.add(numbers),
            _cleared=_sent(np.array(changes.cleared, dtype=np.int64), sending),
            _bias=(
                sending.add(np.array(changes.bias_places, dtype=np.int64)),
                sending.add(np.array(changes.bias_values, dtype=np.float32)),
            )
            if changes.bias_places
            else None,
            _end_places=_sent(np.array(changes.end_places, dtype=np.int64), sending),
            _counted=_sent(np.concatenate(changes.counted), sending) if changes.counted else None,
            _newest=_sent(np.array(changes.newest, dtype=np.int64).T.copy(), sending),
            _later=_sent(np.array(changes.later, dtype=np.int64), sending),
            _kinds=(has_bias, hides_any, has_penalty),
        )

    def clear(self, slots: Tensor) -> None:
        """Empty slots.

        Args:
            slots: int64 [n].
        """
        for dimension, table in ((0, self.biases), (0, self.end_tokens), (1, self.counts)):
            if table.shape[dimension]:
                table.index_fill_(dimension, slots, 0)

    def _slot(self, chunk: ScheduledChunk, changes: _Changes) -> _Slot:
        """Return the slot of a request. A slot that does not fit the request's history starts empty."""
        request = chunk.request
        slot = self._slots.get(request.id)
        if slot is not None and slot.request is request and slot.counted < chunk.start + chunk.count:
            return slot
        slot = _Slot(self._free.pop() if slot is None else slot.index, request)
        self._slots[request.id] = slot
        changes.cleared.append(slot.index)
        base = slot.index * self._vocab_size
        for token, bias in (request.sampling.logit_bias or {}).items():
            changes.bias_places.append(base + token)
            changes.bias_values.append(bias)
        return slot

    def _may_hide(self, chunk: ScheduledChunk, mask: npt.NDArray[np.uint32] | None) -> bool:
        return mask is None or allows_more_than(mask, chunk.request.stop_token_ids, self._vocab_size)

    def _count(self, slot: _Slot, chunk: ScheduledChunk, row: int, changes: _Changes) -> None:
        """Count the tokens up to the row's input, which is on the device."""
        newest = chunk.start + chunk.count - 1
        prompt_count = len(chunk.request.prompt_token_ids)
        base = slot.index * self._vocab_size
        output_base = (self._slot_count + slot.index) * self._vocab_size
        if slot.counted < newest:
            tokens = np.array(chunk.tokens[slot.counted : newest], dtype=np.int64)
            output = tokens[max(0, prompt_count - slot.counted) :]
            changes.counted += [base + tokens, output_base + output]
        changes.newest.append((row, base))
        if newest >= prompt_count:
            changes.newest.append((row, output_base))
        slot.counted = newest + 1

    def _count_later(
        self, first: ScheduledChunk, chunk: ScheduledChunk, place: int, row_count: int, changes: _Changes
    ) -> None:
        """Count the draft tokens up to a later row of a request, for this row only."""
        known = first.start + first.count
        for token in chunk.tokens[known : chunk.start + chunk.count]:
            changes.later.append(place * self._vocab_size + token)
            changes.later.append((row_count + place) * self._vocab_size + token)

    def _grow(self, count: int) -> None:
        """Add slots until `count` requests can have one."""
        missing = count - len(self._slots) - len(self._free)
        if missing <= 0:
            return
        before = self._slot_count
        self._slot_count = max(SLOTS_MIN, 2 * before, before + missing)
        self._free.extend(range(before, self._slot_count))

    def _allocate(self, *, has_bias: bool, hides: bool, has_penalty: bool) -> None:
        """Make every table that exists or is needed as long as there are slots."""
        if has_bias or len(self.biases):
            self.biases = self._longer(self.biases[None])[0]
        if hides or len(self.end_tokens):
            self.end_tokens = self._longer(self.end_tokens[None])[0]
        if has_penalty or self.counts.shape[1]:
            self.counts = self._longer(self.counts)

    def _longer(self, table: Tensor) -> Tensor:
        if table.shape[1] == self._slot_count:
            return table
        longer = self._table(table.dtype, len(table))
        longer[:, : table.shape[1]] = table
        return longer

    def _table(self, dtype: torch.dtype, count: int) -> Tensor:
        return torch.zeros(count, self._slot_count, self._vocab_size, dtype=dtype, device=self._device)


def _is_counted(request: EngineRequest) -> bool:
    return request.sampling.repetition_penalty != 1.0 or counts_output(request.sampling)


def _sent(values: _Array, sending: Sending) -> Tensor | None:
    return sending.add(values) if values.size else None


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
