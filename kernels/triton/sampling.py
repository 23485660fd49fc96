"""Samples token ids from logits on the device: greedy, or with temperature, min_p, top_k and top_p, without sorting.

Probabilities are stored as weights exp((score - best) / temperature), which are at most 1. The threshold t of a filter
is the largest weight for which enough weights are at least t: top_k weights, or weights whose sum is the fraction top_p
of the total. Floats from 0 to 1 have the same order as their bits. Therefore, a search narrows an interval of bits:
each pass over the row counts and sums the weights above 4 pivots. The pivots of the first pass are fixed, and serve
top_k and top_p. As soon as at most LIST_TOKENS weights lie in the interval, one pass copies them to a list, and each is
compared with each. Logits of a trained model need these two passes only, flat ones up to four more. Every sum has a
fixed order, so the result is deterministic. The token is drawn by the race that reference.py describes: first between
tiles of tokens, then between the tokens of the winning tile. A random number is a hash of seed, position, and tile or
token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["best_parts_kernel", "choose_kernel", "choose_tokens"]

PART_TOKENS = 8192  # number of tokens of a row that one program searches for the best score
PART_TOKEN_BLOCK = 2048
# One program reads a whole row, so one multiprocessor limits the kernel's speed. The program has the largest possible
# number of threads. Each thread loads 4 tokens at a time: with 8, the sums of a pass would need more than its 64
# registers.
TOKEN_BLOCK = 2048
CHOOSE_WARPS = 16
# Comparing this many weights with each other takes about as long as one pass over a row of 128,000 tokens.
LIST_TOKENS = 512
DRAW_TILES = 512

_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = tl.constexpr(0x94D049BB133111EB)
# Bits of the first pass's pivots: the smallest positive number, 2 ** -16, 2 ** -9 and 2 ** -4. Between the last three,
# a trained model has some hundred tokens, and thresholds are seldom elsewhere.
_PIVOT_0 = tl.constexpr(1)
_PIVOT_1 = tl.constexpr(0x37800000)
_PIVOT_2 = tl.constexpr(0x3B000000)
_PIVOT_3 = tl.constexpr(0x3D800000)
_END = tl.constexpr(0x3F800001)  # bits of the first number above the weight of the best token
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _allowed(mask, is_masked, token, inside):
    """Return True for each token whose bit is set in the mask, and for all tokens of a row without a mask."""
    word = tl.load(mask + (token >> 5), mask=inside & is_masked, other=-1)
    return ((word >> (token & 31)) & 1) != 0


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
    # Program (row, part) writes the part's best score among the allowed tokens, the lowest id with this score, and the
    # flaws of all scores: 1 is NaN or infinity, 2 is minus infinity.
    row = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * PART_TOKENS
    scores += row * score_stride
    if HAS_MASKS:
        mask_row = tl.load(mask_rows + row).to(tl.int64)
        is_masked = mask_row >= 0
        mask = masks + mask_row * mask_stride
    lane = tl.arange(0, TOKEN_BLOCK)
    best = tl.full([TOKEN_BLOCK], float("-inf"), tl.float32)
    best_id = begin + lane
    flaw = tl.zeros([TOKEN_BLOCK], tl.int32)
    # The bounds are constant, because the compiler spills registers in a loop with loaded bounds (sm_120).
    for start in range(0, PART_TOKENS, TOKEN_BLOCK):
        token = begin + start + lane
        inside = token < vocab_size
        score = tl.load(scores + token, mask=inside, other=float("-inf")).to(tl.float32)
        hidden = score == float("-inf")
        flaw |= tl.where((score != score) | (score == float("inf")), 1, 0)
        flaw |= tl.where(inside & hidden, 2, 0)
        better = score > best
        if HAS_MASKS:
            better = better & _allowed(mask, is_masked, token, inside)
        best_id = tl.where(better, token, best_id)
        best = tl.where(better, score, best)
    top = tl.max(best, 0)
    lowest = tl.min(tl.where(best == top, best_id, 2147483647), 0)
    place = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(best_scores + place, top)
    tl.store(best_ids + place, lowest)
    tl.store(flaws + place, tl.max(flaw & 1, 0) + tl.max(flaw & 2, 0))


@triton.jit
def _weights(scores, mask, is_masked, token, inside, best, scale, MASKED: tl.constexpr):
    """Return the weights of tokens. The weight of a masked token is 0."""
    score = tl.load(scores + token, mask=inside, other=float("-inf")).to(tl.float32)
    weight = tl.exp2((score - best) * scale)
    if MASKED:
        weight = tl.where(_allowed(mask, is_masked, token, inside), weight, 0.0)
    return weight


@triton.jit
def _amounts(
    scores,
    mask,
    is_masked,
    vocab_size,
    best,
    scale,
    pivot_0,
    pivot_1,
    pivot_2,
    pivot_3,
    MASKED: tl.constexpr,
    TOKEN_BLOCK: tl.constexpr,
):
    """Count and sum the weights that are at least as large as each pivot, in one pass over the row.

    Args:
        pivot_0: bits of a weight above 0. The other pivots follow in ascending order.

    Returns:
        Four counts, int32, and four sums, float32.
    """
    lane = tl.arange(0, TOKEN_BLOCK)
    # Each lane computes its own sums, so that one reduction per pass is needed instead of one per block.
    count_0 = tl.zeros([TOKEN_BLOCK], tl.int32)
    count_1 = tl.zeros([TOKEN_BLOCK], tl.int32)
    count_2 = tl.zeros([TOKEN_BLOCK], tl.int32)
    count_3 = tl.zeros([TOKEN_BLOCK], tl.int32)
    sum_0 = tl.zeros([TOKEN_BLOCK], tl.float32)
    sum_1 = tl.zeros([TOKEN_BLOCK], tl.float32)
    sum_2 = tl.zeros([TOKEN_BLOCK], tl.float32)
    sum_3 = tl.zeros([TOKEN_BLOCK], tl.float32)
    for start in range(0, vocab_size, TOKEN_BLOCK):
        token = start + lane
        weight = _weights(scores, mask, is_masked, token, token < vocab_size, best, scale, MASKED)
        bits = weight.to(tl.int32, bitcast=True)
        count_0 = tl.where(bits >= pivot_0, count_0 + 1, count_0)
        count_1 = tl.where(bits >= pivot_1, count_1 + 1, count_1)
        count_2 = tl.where(bits >= pivot_2, count_2 + 1, count_2)
        count_3 = tl.where(bits >= pivot_3, count_3 + 1, count_3)
        sum_0 = tl.where(bits >= pivot_0, sum_0 + weight, sum_0)
        sum_1 = tl.where(bits >= pivot_1, sum_1 + weight, sum_1)
        sum_2 = tl.where(bits >= pivot_2, sum_2 + weight, sum_2)
        sum_3 = tl.where(bits >= pivot_3, sum_3 + weight, sum_3)
    return (
        tl.sum(count_0, 0),
        tl.sum(count_1, 0),
        tl.sum(count_2, 0),
        tl.sum(count_3, 0),
        tl.sum(sum_0, 0),
        tl.sum(sum_1, 0),
        tl.sum(sum_2, 0),
        tl.sum(sum_3, 0),
    )


@triton.jit
def _selected(index, value_0, value_1, value_2, value_3, value_4, value_5):
    """Return the scalar with an index from 0 to 5."""
    value = tl.where(index == 1, value_1, value_0)
    value = tl.where(index == 2, value_2, value)
    value = tl.where(index == 3, value_3, value)
    value = tl.where(index == 4, value_4, value)
    return tl.where(index == 5, value_5, value)


@triton.jit
def _threshold(
    scores,
    mask,
    is_masked,
    listed,
    vocab_size,
    best,
    scale,
    min_p,
    top_k,
    top_p,
    MASKED: tl.constexpr,
    TOKEN_BLOCK: tl.constexpr,
    LIST_TOKENS: tl.constexpr,
):
    """Return the smallest weight that min_p, top_k and top_p keep, or 0 if all are kept.

    Args:
        listed: float32 [LIST_TOKENS], memory of this row.
    """
    least = min_p.to(tl.int32, bitcast=True)  # bits of the smallest weight that the filters keep so far
    first_0, first_1, first_2, first_3, first_sum_0, first_sum_1, first_sum_2, first_sum_3 = _amounts(
        scores,
        mask,
        is_masked,
        vocab_size,
        best,
        scale,
        tl.maximum(least, _PIVOT_0),
        tl.maximum(least, _PIVOT_1),
        tl.maximum(least, _PIVOT_2),
        tl.maximum(least, _PIVOT_3),
        MASKED,
        TOKEN_BLOCK,
    )
    left = first_0  # count and sum of the weights that are kept so far
    left_sum = first_sum_0
    is_searched = (top_p < 1.0) & (top_p > 0.0)
    # The first round is that of top_k, the second that of top_p. If fewer weights than top_k are left, all are kept.
    for turn in range(2):
        is_count = turn == 0
        wanted = tl.where(is_count, top_k, top_p * left_sum.to(tl.float64))
        if tl.where(is_count, (top_k > 0) & (top_k < vocab_size) & (left >= top_k), is_searched):
            # Numbers of the interval's ends, with index 0 for its low end and 5 for its high end. No weight is at
            # least the high end that the search begins with.
            low = tl.maximum(least, _PIVOT_0)
            low_count = left
            low_sum = left_sum
            high = tl.full([], _END, tl.int32)
            high_count = tl.zeros([], tl.int32)
            high_sum = tl.zeros([], tl.float32)
            pivot_0 = low
            pivot_1 = tl.maximum(low, _PIVOT_1)
            pivot_2 = tl.maximum(low, _PIVOT_2)
            pivot_3 = tl.maximum(low, _PIVOT_3)
            count_0 = low_count
            count_1 = tl.minimum(first_1, left)
            count_2 = tl.minimum(first_2, left)
            count_3 = tl.minimum(first_3, left)
            sum_0 = low_sum
            sum_1 = tl.minimum(first_sum_1, left_sum)
            sum_2 = tl.minimum(first_sum_2, left_sum)
            sum_3 = tl.minimum(first_sum_3, left_sum)
            is_wide = True
            while is_wide:
                reached_0 = tl.where(is_count, count_0.to(tl.float64), sum_0.to(tl.float64)) >= wanted
                reached_1 = tl.where(is_count, count_1.to(tl.float64), sum_1.to(tl.float64)) >= wanted
                reached_2 = tl.where(is_count, count_2.to(tl.float64), sum_2.to(tl.float64)) >= wanted
                reached_3 = tl.where(is_count, count_3.to(tl.float64), sum_3.to(tl.float64)) >= wanted
                # More weights are at least as large as a lower pivot. Therefore, the number of pivots with enough
                # weights is the index of the new low end.
                index = reached_0.to(tl.int32) + reached_1.to(tl.int32) + reached_2.to(tl.int32)
                index += reached_3.to(tl.int32)
                next_low = _selected(index, low, pivot_0, pivot_1, pivot_2, pivot_3, high)
                high = _selected(index + 1, low, pivot_0, pivot_1, pivot_2, pivot_3, high)
                low = next_low
                next_count = _selected(index, low_count, count_0, count_1, count_2, count_3, high_count)
                high_count = _selected(index + 1, low_count, count_0, count_1, count_2, count_3, high_count)
                low_count = next_count
                next_sum = _selected(index, low_sum, sum_0, sum_1, sum_2, sum_3, high_sum)
                high_sum = _selected(index + 1, low_sum, sum_0, sum_1, sum_2, sum_3, high_sum)
                low_sum = next_sum
                is_wide = (low_count - high_count > LIST_TOKENS) & (high - low > 1)
                if is_wide:
                    step = tl.maximum((high - low) // 5, 1)
                    pivot_0 = low + step
                    pivot_1 = tl.minimum(low + 2 * step, high)
                    pivot_2 = tl.minimum(low + 3 * step, high)
                    pivot_3 = tl.minimum(low + 4 * step, high)
                    count_0, count_1, count_2, count_3, sum_0, sum_1, sum_2, sum_3 = _amounts(
                        scores,
                        mask,
                        is_masked,
                        vocab_size,
                        best,
                        scale,
                        pivot_0,
                        pivot_1,
                        pivot_2,
                        pivot_3,
                        MASKED,
                        TOKEN_BLOCK,
                    )
            least = low
            left = low_count
            left_sum = low_sum
            if high - low > 1:
                # All tokens that top_k may keep fit into the list, unless the first pivots are already too many.
                is_whole = is_count & (low_count <= LIST_TOKENS)
                high = tl.where(is_whole, _END, high)
                high_count = tl.where(is_whole, 0, high_count)
                high_sum = tl.where(is_whole, 0.0, high_sum)
                inside = low_count - high_count
                tl.debug_barrier()  # Another thread may still read the list of the first round.
                # Each lane counts its tokens first. So the list needs one prefix sum, instead of one for each block.
                lane = tl.arange(0, TOKEN_BLOCK)
                lane_count = tl.zeros([TOKEN_BLOCK], tl.int32)
                for start in range(0, vocab_size, TOKEN_BLOCK):
                    token = start + lane
                    weight = _weights(scores, mask, is_masked, token, token < vocab_size, best, scale, MASKED)
                    bits = weight.to(tl.int32, bitcast=True)
                    lane_count = tl.where((bits >= low) & (bits < high), lane_count + 1, lane_count)
                place = tl.cumsum(lane_count, 0) - lane_count
                for start in range(0, vocab_size, TOKEN_BLOCK):
                    token = start + lane
                    weight = _weights(scores, mask, is_masked, token, token < vocab_size, best, scale, MASKED)
                    bits = weight.to(tl.int32, bitcast=True)
                    is_listed = (bits >= low) & (bits < high)
                    tl.store(listed + place, weight, mask=is_listed)
                    place = tl.where(is_listed, place + 1, place)
                tl.debug_barrier()
                lane_of_list = tl.arange(0, LIST_TOKENS)
                is_there = lane_of_list < inside
                weight = tl.load(listed + lane_of_list, mask=is_there, other=0.0)
                count = tl.zeros([LIST_TOKENS], tl.int32)
                total = tl.zeros([LIST_TOKENS], tl.float32)
                for other_lane in range(inside):
                    other = tl.load(listed + other_lane)
                    count += (other >= weight).to(tl.int32)
                    total += tl.where(other >= weight, other, 0.0)
                count += high_count
                total += high_sum
                if is_count:
                    kth = tl.max(tl.where(is_there & (count.to(tl.float64) >= wanted), weight, 0.0), 0)
                    left = tl.max(tl.where(is_there & (weight >= kth), count, 0), 0)
                    left_sum = tl.max(tl.where(is_there & (weight >= kth), total, 0.0), 0)
                    least = kth.to(tl.int32, bitcast=True)
                    wanted = top_p * left_sum.to(tl.float64)
                if is_searched & (is_whole | (not is_count)):
                    is_enough = is_there & (total.to(tl.float64) >= wanted)
                    nucleus = tl.max(tl.where(is_enough, weight, 0.0), 0)
                    least = tl.maximum(least, nucleus.to(tl.int32, bitcast=True))
                    is_searched = False
    return least.to(tl.float32, bitcast=True)


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
    is_masked,
    listed,
    setting,
    word,
    vocab_size,
    best,
    MASKED: tl.constexpr,
    TOKEN_BLOCK: tl.constexpr,
    LIST_TOKENS: tl.constexpr,
    DRAW_TILES: tl.constexpr,
    COLUMN_BLOCK: tl.constexpr,
):
    """Draw a token for a row whose temperature is above 0. `setting` points to the row's parameters."""
    scale = _LOG2_E / tl.load(setting).to(tl.float32)
    top_k = tl.load(setting + 1)
    top_p = tl.load(setting + 2)
    threshold = tl.load(setting + 3).to(tl.float32)  # min_p is the threshold, because the best weight is 1.
    if ((top_k > 0) & (top_k < vocab_size)) | (top_p < 1.0):
        threshold = _threshold(
            scores,
            mask,
            is_masked,
            listed,
            vocab_size,
            best,
            scale,
            threshold,
            top_k,
            top_p,
            MASKED,
            TOKEN_BLOCK,
            LIST_TOKENS,
        )
    tile = tl.arange(0, DRAW_TILES)
    # Each lane computes its own sum, as in _amounts.
    tile_sums = tl.zeros([TOKEN_BLOCK // DRAW_TILES, DRAW_TILES], tl.float64)
    line = tl.arange(0, TOKEN_BLOCK // DRAW_TILES)[:, None] * DRAW_TILES
    for start in range(0, vocab_size, TOKEN_BLOCK):
        token = start + line + tile[None, :]
        weight = _weights(scores, mask, is_masked, token, token < vocab_size, best, scale, MASKED)
        tile_sums += tl.where(weight >= threshold, weight, 0.0).to(tl.float64)
    winner = tl.argmax(tl.sum(tile_sums, 0) / _clocks(word, tile), 0)
    token = tl.arange(0, COLUMN_BLOCK) * DRAW_TILES + winner
    weight = _weights(scores, mask, is_masked, token, token < vocab_size, best, scale, MASKED)
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
    lists,
    vocab_size,
    score_stride,
    mask_stride,
    rows,
    HAS_MASKS: tl.constexpr,
    PARTS: tl.constexpr,
    PART_BLOCK: tl.constexpr,
    TOKEN_BLOCK: tl.constexpr,
    LIST_TOKENS: tl.constexpr,
    DRAW_TILES: tl.constexpr,
    COLUMN_BLOCK: tl.constexpr,
):
    # Program (row) combines the parts, and draws a token if the temperature is above 0.
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
        mask_row = tl.load(mask_rows + row).to(tl.int64) if HAS_MASKS else tl.full([], -1, tl.int64)
        result = _draw(
            scores,
            masks + mask_row * mask_stride,
            mask_row >= 0,
            lists + row * LIST_TOKENS,
            setting,
            word,
            vocab_size,
            best,
            HAS_MASKS,
            TOKEN_BLOCK,
            LIST_TOKENS,
            DRAW_TILES,
            COLUMN_BLOCK,
        )
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
        torch.empty(rows, LIST_TOKENS, dtype=torch.float32, device=scores.device),
        vocab_size,
        scores.stride(0),
        bits.stride(0),
        rows,
        HAS_MASKS=masks is not None,
        PARTS=parts,
        PART_BLOCK=triton.next_power_of_2(parts),
        TOKEN_BLOCK=TOKEN_BLOCK,
        LIST_TOKENS=LIST_TOKENS,
        DRAW_TILES=DRAW_TILES,
        COLUMN_BLOCK=triton.next_power_of_2(triton.cdiv(vocab_size, DRAW_TILES)),
        num_warps=CHOOSE_WARPS,
    )
    return chosen
