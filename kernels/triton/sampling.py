"""Logits to token ids on the device: greedy, or drawn under temperature, min_p, top_k and top_p. Nothing is sorted.

Probabilities are kept as weights exp((score - best) / temperature), at most 1. A filter's threshold is the largest
number t for which the weights of at least t are still enough: top_k of them, or top_p of the sum. The bits of floats
from 0 to 1 are ordered as the floats are, so that t is found bit by bit, two bits in each pass over the row. The draw
is the race of the reference: between tiles of tokens, then inside the tile that won, by numbers that are a hash of
(seed and position, tile or token).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["best_parts_kernel", "choose_kernel", "choose_tokens"]

PART_TOKENS = 8192  # of a row, scanned by one program for the best score
PART_TOKEN_BLOCK = 2048
# One program walks a whole row, up to 15 times for each filter, so its speed is that of one multiprocessor: as many
# threads as a program may have, each with 8 tokens (16 bytes of half formats) on their way at a time.
TOKEN_BLOCK = 8192
CHOOSE_WARPS = 32
DRAW_TILES = 512

_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = tl.constexpr(0x94D049BB133111EB)
_FIRST_STEP = tl.constexpr(1 << 28)  # the bits of 1.0, 0x3F800000, have two above it
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _allowed(mask, token, inside):
    """Whether a mask has the token's bit."""
    word = tl.load(mask + (token >> 5), mask=inside, other=0)
    return ((word >> (token & 31)) & 1) != 0


@triton.jit
def _best_of_part(
    scores, mask, begin, vocab_size, MASKED: tl.constexpr, PART_TOKENS: tl.constexpr, TOKEN_BLOCK: tl.constexpr
):
    """The best score among the tokens that may be chosen, the lowest id that has it, and the flaws of all scores."""
    lane = tl.arange(0, TOKEN_BLOCK)
    best = tl.full([TOKEN_BLOCK], float("-inf"), tl.float32)
    best_id = begin + lane
    flaw = tl.zeros([TOKEN_BLOCK], tl.int32)
    for start in range(begin, tl.minimum(begin + PART_TOKENS, vocab_size), TOKEN_BLOCK):
        token = start + lane
        inside = token < vocab_size
        score = tl.load(scores + token, mask=inside, other=float("-inf")).to(tl.float32)
        hidden = score == float("-inf")
        flaw |= tl.where(inside & ((score != score) | (score == float("inf"))), 1, 0)
        flaw |= tl.where(inside & hidden, 2, 0)
        better = score > best
        if MASKED:
            better = better & _allowed(mask, token, inside)
        best_id = tl.where(better, token, best_id)
        best = tl.where(better, score, best)
    top = tl.max(best, 0)
    lowest = tl.min(tl.where(best == top, best_id, 2147483647), 0)
    return top, lowest, tl.max(flaw & 1, 0) + tl.max(flaw & 2, 0)


@triton.jit
def best_parts_kernel(
    scores,
    best_scores,
    best_ids,
    flaws,
    masks,
    mask_rows,
    vocab_size,
    score_stride,
    mask_stride,
    HAS_MASKS: tl.constexpr,
    PART_TOKENS: tl.constexpr,
    TOKEN_BLOCK: tl.constexpr,
):
    """Program (row, part): the part's best score, the lowest id that has it, and flaws: 1 NaN or infinity, 2 minus
    infinity. A row without a mask computes what it would without HAS_MASKS."""
    row = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * PART_TOKENS
    scores += row * score_stride
    if HAS_MASKS:
        mask_row = tl.load(mask_rows + row).to(tl.int64)
        mask = masks + mask_row * mask_stride
        if mask_row >= 0:
            top, lowest, flaw = _best_of_part(scores, mask, begin, vocab_size, True, PART_TOKENS, TOKEN_BLOCK)
        else:
            top, lowest, flaw = _best_of_part(scores, mask, begin, vocab_size, False, PART_TOKENS, TOKEN_BLOCK)
    else:
        top, lowest, flaw = _best_of_part(scores, masks, begin, vocab_size, False, PART_TOKENS, TOKEN_BLOCK)
    place = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(best_scores + place, top)
    tl.store(best_ids + place, lowest)
    tl.store(flaws + place, flaw)


@triton.jit
def _weights(scores, mask, token, inside, best, scale, MASKED: tl.constexpr):
    """0 for tokens that may not be chosen."""
    score = tl.load(scores + token, mask=inside, other=float("-inf")).to(tl.float32)
    weight = tl.exp2((score - best) * scale)
    if MASKED:
        weight = tl.where(_allowed(mask, token, inside), weight, 0.0)
    return weight


@triton.jit
def _least_enough(
    scores,
    mask,
    vocab_size,
    best,
    scale,
    threshold,
    wanted,
    COUNTED: tl.constexpr,
    MASKED: tl.constexpr,
    TOKEN_BLOCK: tl.constexpr,
):
    """The largest t for which weights of at least t (and threshold) are enough: `wanted` by number if COUNTED, else by
    sum; 0 if none is."""
    low = tl.full([], 0, tl.int32)
    lane = tl.arange(0, TOKEN_BLOCK)
    step = tl.full([], _FIRST_STEP, tl.int32)
    while step > 0:
        pivot_1 = (low + step).to(tl.float32, bitcast=True)
        pivot_2 = (low + 2 * step).to(tl.float32, bitcast=True)
        pivot_3 = (low + 3 * step).to(tl.float32, bitcast=True)
        # Each lane sums for itself: one reduction a pass instead of one a block.
        reached_1 = tl.zeros([TOKEN_BLOCK], tl.float32)
        reached_2 = tl.zeros([TOKEN_BLOCK], tl.float32)
        reached_3 = tl.zeros([TOKEN_BLOCK], tl.float32)
        for start in range(0, vocab_size, TOKEN_BLOCK):
            token = start + lane
            weight = _weights(scores, mask, token, token < vocab_size, best, scale, MASKED)
            amount = tl.where(weight >= threshold, 1.0 if COUNTED else weight, 0.0)
            reached_1 += tl.where(weight >= pivot_1, amount, 0.0)
            reached_2 += tl.where(weight >= pivot_2, amount, 0.0)
            reached_3 += tl.where(weight >= pivot_3, amount, 0.0)
        enough = (tl.sum(reached_1, 0).to(tl.float64) >= wanted).to(tl.int32)
        enough += (tl.sum(reached_2, 0).to(tl.float64) >= wanted).to(tl.int32)
        enough += (tl.sum(reached_3, 0).to(tl.float64) >= wanted).to(tl.int32)
        # The lower a pivot, the more weights reach it: the number of those that are enough says which is the last.
        low += enough * step
        step = step >> 2
    return low.to(tl.float32, bitcast=True)


@triton.jit
def _clocks(word, index):
    """Exponentially distributed numbers, float64: number `index` of the splitmix64 stream that starts at `word`."""
    state = word + (index.to(tl.uint64) + 1) * _GAMMA
    state = (state ^ (state >> 30)) * _MULTIPLIER_1
    state = (state ^ (state >> 27)) * _MULTIPLIER_2
    state = state ^ (state >> 31)
    return -tl.log(((state >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16)


@triton.jit
def _draw(
    scores,
    mask,
    setting,
    word,
    vocab_size,
    best,
    MASKED: tl.constexpr,
    TOKEN_BLOCK: tl.constexpr,
    DRAW_TILES: tl.constexpr,
    COLUMN_BLOCK: tl.constexpr,
):
    """A token of a row that has a temperature. setting: its parameters."""
    scale = _LOG2_E / tl.load(setting).to(tl.float32)
    top_k = tl.load(setting + 1)
    top_p = tl.load(setting + 2)
    threshold = tl.load(setting + 3).to(tl.float32)  # min_p, since the best weight is 1
    if (top_k > 0) & (top_k < vocab_size):
        # Counted among all: what min_p has dropped is less than what it keeps, so its threshold just stays.
        kth = _least_enough(scores, mask, vocab_size, best, scale, 0.0, top_k, True, MASKED, TOKEN_BLOCK)
        threshold = tl.maximum(threshold, kth)
    if top_p < 1.0:
        sums = tl.zeros([TOKEN_BLOCK], tl.float32)
        for start in range(0, vocab_size, TOKEN_BLOCK):
            token = start + tl.arange(0, TOKEN_BLOCK)
            weight = _weights(scores, mask, token, token < vocab_size, best, scale, MASKED)
            sums += tl.where(weight >= threshold, weight, 0.0)
        left = tl.sum(sums, 0).to(tl.float64)
        nucleus = _least_enough(
            scores, mask, vocab_size, best, scale, threshold, top_p * left, False, MASKED, TOKEN_BLOCK
        )
        threshold = tl.maximum(threshold, nucleus)
    tile = tl.arange(0, DRAW_TILES)
    # Each thread sums for itself, as above.
    tile_sums = tl.zeros([TOKEN_BLOCK // DRAW_TILES, DRAW_TILES], tl.float64)
    line = tl.arange(0, TOKEN_BLOCK // DRAW_TILES)[:, None] * DRAW_TILES
    for start in range(0, vocab_size, TOKEN_BLOCK):
        token = start + line + tile[None, :]
        weight = _weights(scores, mask, token, token < vocab_size, best, scale, MASKED)
        tile_sums += tl.where(weight >= threshold, weight, 0.0).to(tl.float64)
    winner = tl.argmax(tl.sum(tile_sums, 0) / _clocks(word, tile), 0)
    token = tl.arange(0, COLUMN_BLOCK) * DRAW_TILES + winner
    weight = _weights(scores, mask, token, token < vocab_size, best, scale, MASKED)
    weight = tl.where((weight >= threshold) & (token < vocab_size), weight, 0.0).to(tl.float64)
    # The tiles have taken the first numbers of the stream, so a token's comes that much later.
    column = tl.argmax(weight / _clocks(word, token + DRAW_TILES), 0)
    return (column * DRAW_TILES + winner).to(tl.int64)


@triton.jit(do_not_specialize=["rows"])
def choose_kernel(
    chosen,
    scores,
    best_scores,
    best_ids,
    flaws,
    masks,
    mask_rows,
    parameters,
    words,
    vocab_size,
    score_stride,
    mask_stride,
    rows,
    HAS_MASKS: tl.constexpr,
    PARTS: tl.constexpr,
    PART_BLOCK: tl.constexpr,
    TOKEN_BLOCK: tl.constexpr,
    DRAW_TILES: tl.constexpr,
    COLUMN_BLOCK: tl.constexpr,
):
    """Program (row): joins the parts; draws if the row has a temperature. A row without a mask computes what it would
    without HAS_MASKS."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PART_BLOCK)
    place = row * PARTS + part
    part_best = tl.load(best_scores + place, mask=part < PARTS, other=float("-inf"))
    part_id = tl.load(best_ids + place, mask=part < PARTS, other=2147483647)
    part_flaws = tl.load(flaws + place, mask=part < PARTS, other=0)
    best = tl.max(part_best, 0)
    best_id = tl.min(tl.where(part_best == best, part_id, 2147483647), 0)
    flaw = tl.max(part_flaws & 1, 0) + tl.max(part_flaws & 2, 0)
    flaw += tl.where(best == float("-inf"), 4, 0)
    tl.store(chosen + rows + row, flaw.to(tl.int64))
    result = best_id.to(tl.int64)
    setting = parameters + row * 4
    if (tl.load(setting) > 0) & ((flaw & 5) == 0):
        scores += row * score_stride
        word = tl.load(words + row).to(tl.uint64, bitcast=True)
        if HAS_MASKS:
            mask_row = tl.load(mask_rows + row).to(tl.int64)
            mask = masks + mask_row * mask_stride
            if mask_row >= 0:
                result = _draw(
                    scores, mask, setting, word, vocab_size, best, True, TOKEN_BLOCK, DRAW_TILES, COLUMN_BLOCK
                )
            else:
                result = _draw(
                    scores, mask, setting, word, vocab_size, best, False, TOKEN_BLOCK, DRAW_TILES, COLUMN_BLOCK
                )
        else:
            result = _draw(scores, masks, setting, word, vocab_size, best, False, TOKEN_BLOCK, DRAW_TILES, COLUMN_BLOCK)
    tl.store(chosen + row, result)


def choose_tokens(
    scores: Tensor, parameters: Tensor, words: Tensor, masks: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    rows, vocab_size = scores.shape
    assert scores.stride(1) == 1
    assert parameters.is_contiguous()
    parts = triton.cdiv(vocab_size, PART_TOKENS)
    best_scores = torch.empty(rows, parts, dtype=torch.float32, device=scores.device)
    # Each an allocation of its own: the second half of one would begin at a multiple of 16 bytes or not, by the number
    # of rows, and Triton compiles for either.
    best_ids = torch.empty(rows, parts, dtype=torch.int32, device=scores.device)
    flaws = torch.empty_like(best_ids)
    chosen = torch.empty(2, rows, dtype=torch.int64, device=scores.device)
    # Without masks any integers stand in their place; they are not read.
    bits, mask_rows = (best_ids, best_ids) if masks is None else masks
    assert bits.stride(1) == 1
    best_parts_kernel[(rows, parts)](
        scores,
        best_scores,
        best_ids,
        flaws,
        bits,
        mask_rows,
        vocab_size,
        scores.stride(0),
        bits.stride(0),
        HAS_MASKS=masks is not None,
        PART_TOKENS=PART_TOKENS,
        TOKEN_BLOCK=PART_TOKEN_BLOCK,
        num_warps=8,
    )
    choose_kernel[(rows,)](
        chosen,
        scores,
        best_scores,
        best_ids,
        flaws,
        bits,
        mask_rows,
        parameters,
        words,
        vocab_size,
        scores.stride(0),
        bits.stride(0),
        rows,
        HAS_MASKS=masks is not None,
        PARTS=parts,
        PART_BLOCK=triton.next_power_of_2(parts),
        TOKEN_BLOCK=TOKEN_BLOCK,
        DRAW_TILES=DRAW_TILES,
        COLUMN_BLOCK=triton.next_power_of_2(triton.cdiv(vocab_size, DRAW_TILES)),
        num_warps=CHOOSE_WARPS,
    )
    return chosen
