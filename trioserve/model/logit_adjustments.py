"""Logit bias, hidden end tokens and penalties of launched steps. Their state stays on the device between steps.

A request that changes its logits owns a slot. The slot holds the request's bias, its end tokens, and how often each
token occurs in its history. The host sends bias and end tokens once. It sends only those tokens of a history that the
device has not counted yet: the whole history of a request that begins or resumes, and usually no token afterwards. The
newest token is the input of the sampled row, which is on the device already, so the host does not have to know it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trioserve.contracts.ids import RequestId
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.step import ScheduledChunk
from trioserve.model.step_model import counts_output, hides_end_tokens, is_adjusted
from trioserve.model.step_rows import MaskedRows, allows_more_than
from trioserve.model.torch_formats import Sending

__all__ = ["Adjustment", "LogitAdjustments"]

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
