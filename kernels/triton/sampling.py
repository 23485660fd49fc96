"""Samples token ids from logits on the device: greedy, or with temperature, min_p, top_k and top_p, without sorting.

Probabilities are stored as weights exp((score - best) / temperature), which are at most 1. The threshold t of a filter
is the largest number for which enough weights are at least t: top_k weights, or weights whose sum is the fraction top_p
of the total. Floats from 0 to 1 have the same order as their bits. Therefore, t is found bit by bit, two bits in each
pass over the row. The token is drawn by the race that reference.py describes: first between tiles of tokens, then
between the tokens of the winning tile. A random number is a hash of seed, position, and tile or token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["best_parts_kernel", "choose_kernel", "choose_tokens"]

PART_TOKENS = 8192  # number of tokens of a row that one program searches for the best score
PART_TOKEN_BLOCK = 2048
# One program reads a whole row up to 15 times for each filter, so one multiprocessor limits the kernel's speed. The
# program has the largest possible number of threads. Each thread loads 8 tokens (16 bytes of 16-bit scores) at a time.
TOKEN_BLOCK = 8192
CHOOSE_WARPS = 32
DRAW_TILES = 512

_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = tl.constexpr(0x94D049BB133111EB)
_FIRST_STEP = tl.constexpr(1 << 28)  # This step covers the two highest bits of 1.0, which is 0x3F800000.
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _allowed(mask, token, inside):
    """Return True for each token whose bit is set in the mask."""
    word = tl.load(mask + (token >> 5), mask=inside, other=0)
    return ((word >> (token & 31)) & 1) != 0


@triton.jit
def _best_of_part(
    scores, mask, begin, vocab_size, MASKED: tl.constexpr, PART_TOKENS: tl.constexpr, TOKEN_BLOCK: tl.constexpr
):
    """Return the best score among the allowed tokens, the lowest id that has it, and the flaws of all scores."""
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
    # Program (row, part) writes the part's best score, the lowest id with this score, and flaws: 1 is NaN or infinity,
    # 2 is minus infinity. A row without a mask uses the same code as a launch without masks, so its bits are equal.
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
    """Return the weights of tokens. The weight of a masked token is 0."""
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
    """Return the largest number t for which enough weights are at least t and `threshold`, or 0 if there is no such t.

    The weights are enough if their number (with COUNTED) or their sum is at least `wanted`.
    """
    low = tl.full([], 0, tl.int32)
    lane = tl.arange(0, TOKEN_BLOCK)
    step = tl.full([], _FIRST_STEP, tl.int32)
    while step > 0:
        pivot_1 = (low + step).to(tl.float32, bitcast=True)
        pivot_2 = (low + 2 * step).to(tl.float32, bitcast=True)
        pivot_3 = (low + 3 * step).to(tl.float32, bitcast=True)
        # Each lane computes its own sum, so that one reduction per pass is needed instead of one per block.
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
        # More weights are at least as large as a lower pivot. Therefore, the number of pivots with enough weights is
        # the index of the largest one.
        low += enough * step
        step = step >> 2
    return low.to(tl.float32, bitcast=True)


@triton.jit
def _clocks(word, index):
    """Return exponentially distributed numbers, float64, from number `index` of the splitmix64 stream of `word`."""
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
    """Draw a token for a row whose temperature is above 0. `setting` points to the row's parameters."""
    scale = _LOG2_E / tl.load(setting).to(tl.float32)
    top_k = tl.load(setting + 1)
    top_p = tl.load(setting + 2)
    threshold = tl.load(setting + 3).to(tl.float32)  # min_p is the threshold, because the best weight is 1.
    if (top_k > 0) & (top_k < vocab_size):
        # Counting for top_k ignores min_p. The maximum of both thresholds is correct, because tokens that min_p drops
        # have lower weights than all other tokens.
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
    # Each lane computes its own sum, as in _least_enough.
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
    # Tiles use the first DRAW_TILES numbers of the stream, and tokens use later numbers.
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
    # Program (row) combines the parts, and draws a token if the temperature is above 0. A row without a mask uses the
    # same code as a launch without masks, so its bits are equal.
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
    # Separate allocations are always aligned to 16 bytes. With one common allocation, the second half would be aligned
    # only for some numbers of rows, and Triton would compile the kernel twice.
    best_ids = torch.empty(rows, parts, dtype=torch.int32, device=scores.device)
    flaws = torch.empty_like(best_ids)
    chosen = torch.empty(2, rows, dtype=torch.int64, device=scores.device)
    # Without masks, the arguments are arbitrary integer tensors, which the kernel does not read.
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
