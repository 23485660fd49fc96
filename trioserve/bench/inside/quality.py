"""Measures how rounding affects a model's responses, relative to float32 with the same file.

    python -m trioserve.bench.inside.quality [--model smollm2] [--tokens 4096]

It measures each number format of weights, with and without batch-invariant kernels, and each number format of KV. The
text is Python's language reference from its interpreter (pydoc_data): every installation has it, and it is equal for
one version of Python. The model reads the text in pieces of 512 tokens, each as a separate prompt. The output has the
perplexity, how often the most probable token equals float32's, and the root mean square difference of the logprobs of
the text's tokens.
"""

from __future__ import annotations

import argparse
import math
import platform
import sys
from typing import NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from trioserve.contracts.ids import RequestId
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.step import ScheduledChunk, StateSpan, StepPlan
from trioserve.model.loading.checkpoint import Checkpoint, open_checkpoint
from trioserve.model.loading.default_model import resolve_model
from trioserve.model.runner import ModelRunner
from trioserve.model.settings import KvCacheDtypeName, ModelSettings
from trioserve.text.tokenizer import Tokenizer

__all__ = ["main"]

PIECE_TOKENS = 512
# These topics contain prose rather than grammar tables.
TOPICS = ("objects", "execmodel", "import", "class", "exceptions", "with", "try", "types")


class _Judged(NamedTuple):
    """Results for each token of the text, except for the first token of each piece.

    Attributes:
        logprobs: logprob of the text's token.
        best: the most probable token.
    """

    logprobs: npt.NDArray[np.float64]
    best: list[int]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m trioserve.bench.inside.quality", description="Measure what rounding costs."
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=4096)
    arguments = parser.parse_args()
    checkpoint = open_checkpoint(resolve_model(arguments.model))
    pieces = _pieces(checkpoint, arguments.tokens)
    print(
        f"{arguments.model}, {sum(map(len, pieces))} tokens of the language reference of Python "
        f"{platform.python_version()}, in pieces of {PIECE_TOKENS}"
    )
    variants = [ModelSettings(device="cpu", dtype="float32", cpu_kernels="torch")]
    variants.append(ModelSettings(device="cpu", dtype="bfloat16", cpu_kernels="torch"))
    names = ("none", *(("file",) if any(tensor.block_type for tensor in checkpoint.tensors()) else ()), "int8", "int4")
    variants += [
        ModelSettings(
            device="cpu", dtype="bfloat16", cpu_kernels="native", quantization=name, batch_invariant=batch_invariant
        )
        for name in names
        for batch_invariant in (False, True)
    ]
    for kept in get_args(KvCacheDtypeName)[1:]:
        variants.append(
            ModelSettings(
                device="cpu", dtype="bfloat16", cpu_kernels="native", quantization="none", kv_cache_dtype=kept
            )
        )
    exact: _Judged | None = None
    for settings in variants:
        given = _judged(checkpoint, settings, pieces)
        exact = exact or given
        agreeing = sum(one == other for one, other in zip(given.best, exact.best, strict=True)) / len(exact.best)
        print(
            f"{settings.cpu_kernels:6} {settings.dtype:8} {settings.quantization:4}  "
            f"{'' if settings.kv_cache_dtype == 'auto' else 'KV ' + settings.kv_cache_dtype:7}  "
            f"{'batch-invariant' if settings.batch_invariant else '':15}  "
            f"perplexity {math.exp(-given.logprobs.mean()):.3f}  same first choice {100 * agreeing:.2f} %  "
            f"logprobs off by {math.sqrt(np.square(given.logprobs - exact.logprobs).mean()):.4f}",
            flush=True,
        )
    return 0


def _pieces(checkpoint: Checkpoint, token_count: int) -> list[tuple[int, ...]]:
    from pydoc_data.topics import topics

    if checkpoint.gguf_metadata is not None:
        tokenizer = Tokenizer.from_gguf(checkpoint.gguf_metadata)
    else:
        assert checkpoint.tokenizer_directory is not None
        tokenizer = Tokenizer.from_directory(checkpoint.tokenizer_directory)
    tokens = tokenizer.encode("\n".join(topics[name] for name in TOPICS))[:token_count]
    return [tuple(tokens[start : start + PIECE_TOKENS]) for start in range(0, len(tokens), PIECE_TOKENS)]


def _judged(checkpoint: Checkpoint, settings: ModelSettings, pieces: list[tuple[int, ...]]) -> _Judged:
    runner = ModelRunner.load(checkpoint, settings)
    try:
        width = -(-PIECE_TOKENS // runner.block_size)
        runner.allocate_kv(width)
        logprobs: list[float] = []
        best: list[int] = []
        for piece in pieces:
            request = EngineRequest(
                id=RequestId("text"),
                prompt_token_ids=piece,
                sampling=SamplingParams(temperature=0.0, prompt_logprobs=1),
                output_tokens_max=1,
                stop_token_ids=frozenset(),
                seed=0,
            )
            states = (StateSpan(len(piece), None, 0),) if runner.state_slot_count else ()
            chunk = ScheduledChunk(request, piece, 0, len(piece), range(width), False, states=states)
            result = runner.execute(StepPlan(0, (chunk,), len(piece)))
            assert result is not None, "a step that is not abandoned has a result"
            for entry in result.prompt_logprobs[request.id]:
                logprobs.append(entry.logprob)
                best.append(max(entry.top, key=lambda candidate: candidate[1])[0])
        return _Judged(np.array(logprobs), best)
    finally:
        runner.close()


if __name__ == "__main__":
    sys.exit(main())
