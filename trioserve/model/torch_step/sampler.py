"""Sampling from logits in torch: penalties, filters, logprobs. sampling.h follows the same rules.

The order of operations is vLLM's: logit_bias, min_tokens, penalties, mask, temperature, min_p, top_k, top_p. Rules of
speech follow the penalties. They exist only here, because only torch computes models that hear. Logprobs are computed
before all of them. A filter either keeps all tokens of exactly equal probability or drops all of them, so the result
does not depend on the order in which a sort puts equal numbers. Greedy sampling chooses the lowest id among equal
logits. If the mask allows only end tokens, min_tokens has no effect, because a complete response cannot continue.

Random numbers depend only on the request's seed and the token's position. With equal logits, a request gets the same
tokens in any batch and after any preemption. kernels/reference.py describes which inputs change logits. If logits
differ by rounding, the sampling method makes a different token as improbable as possible.

Every token of the vocabulary has its own random number, computed from the request's seed, the position and the token
id. The method chooses the token with the largest combination of probability and random number. This is the Gumbel-max
trick (Maddison, Tarlow, Minka: A* Sampling, arXiv 1411.0030), written as a race of exponential clocks. As in any
correct sampling method, each token is chosen with exactly its probability.

The advantage of this method is stability. Two computations of a distribution may differ slightly, for example by
rounding. They use the same random numbers, and nearly always choose the same token. They choose different tokens with a
probability of at most 2 d / (1 + d), where d is the total variation distance (Daliri, Musco, Suresh: Coupling without
Communication, arXiv 2408.07978). The usual method compares a random number with a running sum of probabilities. There,
a small difference shifts the limits of all later tokens.

The race has two rounds, because random numbers for all 50,000 tokens would take milliseconds. The first round chooses a
tile of tokens by the tiles' sums, and the second round chooses a token of this tile. The bound becomes 6 d: 2 d for the
tiles, whose distance is at most d, and 4 d for the tokens of a tile, where renormalizing may double the distance. In
practice, the most probable tokens are in different tiles, and two rounds are as stable as one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trioserve.contracts.events import TokenLogprob
from trioserve.contracts.guide import TokenMasks
from trioserve.contracts.media import SpeechRules
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.step import ScheduledChunk
from trioserve.model.step_model import (
    NOT_FINITE,
    NOTHING_ALLOWED,
    NOTHING_LEFT,
    Samples,
    counts_output,
    hides_end_tokens,
    is_adjusted,
    is_plain,
)
from trioserve.model.step_rows import MaskArray, allowed_tokens, allows_more_than, masked_rows

__all__ = [
    "DRAW_TILES",
    "draw",
    "draw_word",
    "draw_words",
    "exponentials",
    "signed",
    "finite_rows",
    "follow_speech_rules_",
    "largest_samples",
    "sample",
    "token_logprobs",
]


# Number of tiles. With a vocabulary of 49,152, a tile has 96 tokens. The tile of a token is its id modulo DRAW_TILES,
# because frequent tokens have consecutive ids.
DRAW_TILES = 512

_WORD = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def draw(weights: Tensor, words: Sequence[int]) -> Tensor:
    """Draw one token for each row. The probability of a token is proportional to its weight.

    Args:
        weights: float32 [m, vocab_size], not negative, at least one weight above 0 in each row.
        words: m random words, see draw_word.

    Returns:
        int64 [m], token ids.
    """
    count, vocab_size = weights.shape
    seeds = torch.tensor([signed(word) for word in words], device=weights.device)[:, None]
    tiles = torch.nn.functional.pad(weights, (0, -vocab_size % DRAW_TILES)).view(count, -1, DRAW_TILES)
    tile = _first(tiles.sum(1, dtype=torch.float64), seeds, torch.arange(DRAW_TILES, device=weights.device))
    inside = tiles.gather(2, tile[:, None].expand(-1, tiles.shape[1], -1))[:, :, 0]
    ids = torch.arange(tiles.shape[1], device=weights.device) * DRAW_TILES + tile
    # Tiles use the first DRAW_TILES numbers of the random stream, and tokens use the following numbers.
    return ids.gather(1, _first(inside.double(), seeds, ids + DRAW_TILES))[:, 0]


def draw_word(seed: int, position: int) -> int:
    """Return 64 random bits, which are the initial state of the random stream for one position of a request.

    The result is number `position` of a splitmix64 stream (Steele, Lea, Flood: Fast Splittable Pseudorandom Number
    Generators, OOPSLA 2014). The stream starts at the splitmix64 hash of the seed. Without the hash, two seeds that
    differ by the generator's increment would have the same stream.

    Args:
        seed: seed of the request.
        position: position of the drawn token in its sequence.
    """
    return _mixed(_mixed(seed + _GAMMA) + (position + 1) * _GAMMA)


def draw_words(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return draw_word of many requests at once, as signed numbers.

    Args:
        seeds: uint64 [n].
        positions: int64 [n].

    Returns:
        int64 [n].
    """
    streams = _mixed_array(seeds + np.uint64(_GAMMA))
    words = _mixed_array(streams + (positions + 1).astype(np.uint64) * np.uint64(_GAMMA))
    return words.view(np.int64)


def exponentials(seeds: Tensor, indices: Tensor) -> Tensor:
    """Return exponentially distributed random numbers above 0.

    Each number is -log(u). u is computed from number `index` of the splitmix64 stream that starts at the seed: the
    upper 52 bits plus one half, divided by 2**52. So u is neither 0 nor 1.

    Args:
        seeds: int64, words in two's complement.
        indices: int64, broadcastable with seeds.

    Returns:
        float64, in the broadcast shape.
    """
    state = seeds + (indices + 1) * signed(_GAMMA)  # int64 arithmetic wraps at 64 bits, as splitmix64 requires.
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        state = (state ^ _shifted(state, shift)) * signed(multiplier)
    state = state ^ _shifted(state, 31)
    return -((_shifted(state, 12).double() + 0.5) / 2**52).log()


def _first(weights: Tensor, seeds: Tensor, indices: Tensor) -> Tensor:
    """Return the index of the exponential clock that rings first, int64 [m, 1]. A clock's rate is its weight, so a
    clock with the weight 0 never rings.
    """
    return (weights / exponentials(seeds, indices)).argmax(-1, keepdim=True)


def _mixed(state: int) -> int:
    """Return splitmix64's output for a state. Arithmetic wraps at 64 bits."""
    state &= _WORD
    state = (state ^ (state >> 30)) * _MULTIPLIERS[0] & _WORD
    state = (state ^ (state >> 27)) * _MULTIPLIERS[1] & _WORD
    return state ^ (state >> 31)


def _mixed_array(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply _mixed to each element."""
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        state = (state ^ (state >> np.uint64(shift))) * np.uint64(multiplier)
    return state ^ (state >> np.uint64(31))


def signed(word: int) -> int:
    """Return the int64 that has the same bits as an unsigned word.

    Args:
        word: 0 to 2**64 - 1.
    """
    return word - 2**64 if word >= 2**63 else word


def _shifted(state: Tensor, count: int) -> Tensor:
    """Shift right by `count` bits and fill with zeros. torch's shift operator fills with the sign bit."""
    return (state >> count) & ((1 << (64 - count)) - 1)


# Number of most probable tokens that are sorted per row. Sorting a whole row takes 1.5 ms, and almost every top_k and
# top_p needs fewer tokens.
SORTED_CANDIDATES = 256
SUMMED_TOGETHER = 512
CANDIDATES_GROWTH = 16  # If 256 tokens are not enough for a row, 4,096 tokens are sorted, then all tokens.


def sample(
    logits: Tensor,
    chunks: Sequence[ScheduledChunk],
    masks: TokenMasks | None = None,
) -> Samples:
    """Choose the next token of every row, operator by operator. The function waits for the device.

    Args:
        logits: [n, vocab_size] in any floating dtype. The function does not change them.
        chunks: one chunk for each row, at least one, see sampled_rows. logit_bias must contain only tokens of the
            vocabulary.
        masks: masks of chunks with a mask_row. The function waits for them.
    """
    masked = masked_rows(chunks, masks, logits.shape[1])
    finite = finite_rows(logits)
    if all(is_plain(chunk) for chunk in chunks):
        return largest_samples(logits.max(-1).indices, finite)
    errors = {row: NOT_FINITE for row, good in enumerate(finite.tolist()) if not good}
    scores = logits.float()
    if scores is logits or errors:
        scores = torch.where(finite[:, None], scores, 0.0)
    with_logprobs = [
        row for row, chunk in enumerate(chunks) if chunk.request.sampling.logprobs is not None and row not in errors
    ]
    raw = scores[with_logprobs] if with_logprobs else None  # A copy of the unchanged logits.
    for row, chunk in enumerate(chunks):
        if row not in errors:
            _adjust_(scores[row], chunk, None if masked is None else masked.of(row))
    if masked is not None:
        for row, allowed in zip(masked.rows, allowed_tokens(masked.bits, scores.shape[1]), strict=True):
            if not allowed.any():
                errors.setdefault(row, NOTHING_ALLOWED)
            scores[row].masked_fill_(torch.from_numpy(~allowed).to(scores.device), float("-inf"))
    best, token_ids = scores.max(-1)
    drawn = [row for row, chunk in enumerate(chunks) if chunk.request.sampling.temperature > 0 and row not in errors]
    if drawn:
        token_ids[drawn] = _draw(scores[drawn], [chunks[row] for row in drawn])
    ids = token_ids.tolist()
    for row, empty in enumerate((best == float("-inf")).tolist()):
        if empty:
            errors.setdefault(row, NOTHING_LEFT)
    samples = Samples([None if row in errors else token for row, token in enumerate(ids)], errors=errors)
    if raw is not None:
        chosen = [ids[row] for row in with_logprobs]
        tops = [chunks[row].request.sampling.logprobs or 0 for row in with_logprobs]
        samples.logprobs = {
            row: entry
            for row, entry in zip(with_logprobs, token_logprobs(raw, chosen, tops), strict=True)
            if row not in errors
        }
    return samples


def largest_samples(token_ids: Tensor, finite: Tensor) -> Samples:
    """Return the samples of rows whose chunks all satisfy is_plain.

    Args:
        token_ids: int64 [n], tokens with the largest logit.
        finite: bool [n], False for a row with NaN or infinity.
    """
    ids, finite_list = torch.stack((token_ids, finite.to(torch.int64))).tolist()
    return Samples(
        [token if good else None for token, good in zip(ids, finite_list, strict=True)],
        errors={row: NOT_FINITE for row, good in enumerate(finite_list) if not good},
    )


def finite_rows(logits: Tensor) -> Tensor:
    """Return True for each row without NaN and infinity.

    Args:
        logits: [n, vocab_size].

    Returns:
        bool [n].
    """
    finite = logits.sum(-1, dtype=torch.float32).isfinite()
    if bool(finite.all()):
        return finite
    return logits.isfinite().all(-1)


def token_logprobs(logits: Tensor, token_ids: Sequence[int], tops: Sequence[int]) -> list[TokenLogprob]:
    """Return the natural logarithm of the probability of each row's token, and of the row's most probable tokens.

    Args:
        logits: [n, vocab_size], finite.
        token_ids: token of each row.
        tops: number of most probable tokens for each row, 0 or more. Values above vocab_size mean vocab_size.
    """
    chosen = torch.tensor(token_ids, device=logits.device)
    return read_logprobs(logprob_rows(logits, chosen, max(tops)).tolist(), token_ids, tops)


def logprob_rows(logits: Tensor, token_ids: Tensor, top: int) -> Tensor:
    """Compute logprobs on the device, for `read_logprobs`.

    Args:
        logits: [n, vocab_size], finite.
        token_ids: int64 [n], token of each row.
        top: number of most probable tokens, 0 or more. Values above vocab_size mean vocab_size.

    Returns:
        float64 [n, 1 + 2 * top]: logprob of the row's token, then logprobs and ids of the most probable tokens.
    """
    # On a GPU, the order of torch's sum depends on the address of a row. Padding makes each row start at a multiple of
    # 64 bytes, so the order is equal for all rows.
    gap = -logits.shape[1] % 16 if logits.device.type == "cuda" else 0
    logprobs = torch.nn.functional.pad(logits.float(), (0, gap), value=float("-inf")).log_softmax(-1)
    best = logprobs.topk(min(top, logits.shape[-1]), -1)
    chosen = logprobs.gather(1, token_ids[:, None])
    return torch.cat((chosen.double(), best.values.double(), best.indices.double()), -1)


def read_logprobs(rows: list[list[float]], token_ids: Sequence[int], tops: Sequence[int]) -> list[TokenLogprob]:
    """Return the logprobs of each row.

    Args:
        rows: result of logprob_rows, on the host.
        token_ids: token of each row.
        tops: number of most probable tokens for each row.
    """
    found: list[TokenLogprob] = []
    for row, token_id, top in zip(rows, token_ids, tops, strict=True):
        count = len(row) // 2
        values, ids = row[1 : 1 + count], map(int, row[1 + count :])
        best = tuple(zip(ids, values, strict=True))[:top]
        found.append(TokenLogprob(token_id, row[0], best))
    return found


def _adjust_(scores: Tensor, chunk: ScheduledChunk, mask: MaskArray | None) -> None:
    """Apply logit_bias, min_tokens, penalties and rules of speech to one row, in place. A mask is applied later.

    The repetition penalty applies to prompt and output tokens. Presence and frequency penalties apply to output tokens.

    Args:
        scores: floating dtype [vocab_size].
    """
    if not is_adjusted(chunk):
        return
    request, sampling = chunk.request, chunk.request.sampling
    vocab_size, device = scores.shape[0], scores.device
    if sampling.logit_bias:
        ids = torch.tensor(list(sampling.logit_bias), device=device)
        scores[ids] += torch.tensor(list(sampling.logit_bias.values()), dtype=scores.dtype, device=device)
    stops = request.stop_token_ids
    if hides_end_tokens(chunk) and (mask is None or allows_more_than(mask, stops, vocab_size)):
        # A client's stop tokens may be outside of this vocabulary. Such tokens cannot be sampled.
        hidden = [token for token in stops if token < vocab_size]
        scores[torch.tensor(hidden, dtype=torch.int64, device=device)] = float("-inf")
    known = chunk.start + chunk.count
    if sampling.repetition_penalty != 1.0:
        seen = torch.tensor(list(chunk.tokens[:known]), device=device)
        values = scores[seen]
        scores[seen] = torch.where(
            values > 0, values / sampling.repetition_penalty, values * sampling.repetition_penalty
        )
    if counts_output(sampling):
        output = list(chunk.tokens[len(request.prompt_token_ids) : known])
        counts = torch.bincount(torch.tensor(output, dtype=torch.int64, device=device), minlength=vocab_size)
        scores -= sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)
    if sampling.speech is not None:
        follow_speech_rules_(scores, sampling.speech, chunk.tokens[len(request.prompt_token_ids) : known])


def follow_speech_rules_(scores: Tensor, rules: SpeechRules, output: Sequence[int]) -> None:
    """Set the scores of tokens that a transcript must not have next to -inf, in place.

    The rules and their order are those of transformers' processors of logits for Whisper.

    Args:
        scores: floating dtype [vocab_size].
        rules: rules of the transcript.
        output: tokens of the transcript so far.
    """
    barred = [*rules.suppressed_ids, *(() if output else rules.begin_suppressed_ids)]
    if barred:
        scores[torch.tensor(barred, device=scores.device)] = float("-inf")
    if not rules.has_timestamps:
        return
    first = rules.timestamp_first_id
    scores[rules.no_timestamps_id] = float("-inf")
    ends_with_time = bool(output) and output[-1] >= first
    is_pair = ends_with_time and (len(output) < 2 or output[-2] >= first)
    if is_pair:  # A text begins.
        scores[first:] = float("-inf")
    elif ends_with_time:  # A text has ended, so the next one begins, or the transcript ends.
        scores[: rules.end_id] = float("-inf")
    times = [token for token in output if token >= first]
    if times:  # Times do not decrease. Only the end of a text and the beginning of the next may be equal.
        scores[first : times[-1] + (0 if ends_with_time and not is_pair else 1)] = float("-inf")
    if not output:
        scores[:first] = float("-inf")
        if rules.first_timestamp_max is not None:
            scores[first + rules.first_timestamp_max + 1 :] = float("-inf")
    # The logarithm of a sum of probabilities, and the largest logarithm: both lack the same constant.
    if scores[first:].logsumexp(-1) > scores[:first].max():
        scores[:first] = float("-inf")


def _draw(scores: Tensor, chunks: Sequence[ScheduledChunk]) -> Tensor:
    """Draw one token per row.

    Args:
        scores: float32 [m, vocab_size], which may be overwritten.

    Returns:
        int64 [m].
    """
    samplings = [chunk.request.sampling for chunk in chunks]
    temperatures = torch.tensor([sampling.temperature for sampling in samplings], device=scores.device)
    probabilities = scores.div_(temperatures[:, None]).softmax(-1)
    thresholds = _thresholds(probabilities, samplings)
    if thresholds is not None:
        probabilities = torch.where(probabilities >= thresholds[:, None], probabilities, 0.0)
    return draw(probabilities, [draw_word(chunk.request.seed, chunk.start + chunk.count) for chunk in chunks])


def _thresholds(probabilities: Tensor, samplings: Sequence[SamplingParams]) -> Tensor | None:
    """Return the smallest probability that min_p, top_k and top_p allow in each row.

    Returns:
        float32 [m], or None if all tokens are kept.
    """
    vocab_size, device = probabilities.shape[-1], probabilities.device
    top_k = [sampling.top_k if 0 < sampling.top_k < vocab_size else vocab_size for sampling in samplings]
    sorted_rows = [row for row, sampling in enumerate(samplings) if top_k[row] < vocab_size or sampling.top_p < 1.0]
    if not sorted_rows and all(sampling.min_p == 0 for sampling in samplings):
        return None
    min_p = torch.tensor([sampling.min_p for sampling in samplings], device=device)
    thresholds = probabilities.max(-1).values * min_p
    if sorted_rows:
        rows = torch.tensor(sorted_rows, device=device)
        kept = torch.tensor([top_k[row] for row in sorted_rows], device=device)
        top_p = torch.tensor([samplings[row].top_p for row in sorted_rows], dtype=torch.float64, device=device)
        candidates = max([SORTED_CANDIDATES, *(k for k in top_k if k < vocab_size)])
        thresholds[rows] = _sorted_thresholds(
            probabilities[rows], thresholds[rows], kept, top_p, min(candidates, vocab_size)
        )
    return thresholds


def _sorted_thresholds(
    probabilities: Tensor, thresholds: Tensor, top_k: Tensor, top_p: Tensor, candidates: int
) -> Tensor:
    """Raise each row's threshold to its top_k-th probability, then to the smallest probability of its nucleus.

    The nucleus is the smallest set of most probable tokens whose total probability is at least top_p of the remaining
    probability (arXiv 1904.09751).

    Args:
        probabilities: float32 [m, vocab_size].
        thresholds: float32 [m].
        top_k: int64 [m].
        top_p: float64 [m].
        candidates: number of most probable tokens to sort. It is not less than any top_k below vocab_size. Rows with a
            larger nucleus are sorted again with more tokens.

    Returns:
        float32 [m].
    """
    vocab_size = probabilities.shape[-1]
    best = probabilities.topk(candidates, -1).values
    limited = top_k < vocab_size
    kth = best.gather(1, (top_k - 1).clamp(max=candidates - 1)[:, None])[:, 0]
    thresholds = torch.where(limited, torch.maximum(thresholds, kth), thresholds)
    left = _row_sums(torch.where(probabilities >= thresholds[:, None], probabilities, 0.0))
    wanted = (top_p * left)[:, None]
    best_left = torch.where(best >= thresholds[:, None], best, 0.0)
    running = best_left.cumsum(-1, dtype=torch.float64)
    in_nucleus = (running - best_left < wanted) & (best_left > 0)
    last = (in_nucleus.sum(-1, keepdim=True) - 1).clamp(min=0)
    nucleus = torch.where(top_p < 1.0, best.gather(1, last)[:, 0], 0.0)
    raised = torch.maximum(thresholds, nucleus)
    unfinished = (top_p < 1.0) & in_nucleus[:, -1] & (running[:, -1:] < wanted)[:, 0]
    if candidates < vocab_size and bool(unfinished.any()):
        rows = unfinished.nonzero()[:, 0]
        raised[rows] = _sorted_thresholds(
            probabilities[rows],
            thresholds[rows],
            top_k[rows],
            top_p[rows],
            min(candidates * CANDIDATES_GROWTH, vocab_size),
        )
    return raised


def _row_sums(values: Tensor) -> Tensor:
    """Sum each row of [n, m] in an order that depends only on m. torch would divide a single long sum between threads.

    Returns:
        float64 [n].
    """
    padded = torch.nn.functional.pad(values, (0, -values.shape[1] % SUMMED_TOGETHER))
    return padded.view(values.shape[0], -1, SUMMED_TOGETHER).sum(1, dtype=torch.float64).sum(-1)
