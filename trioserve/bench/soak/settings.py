"""What a soak is asked to do. Which requests that makes is settled in plan.py, and what is judged in
verdict.py."""

from __future__ import annotations

from trioserve.bench.settings import TargetSettings, check_integer, check_number

__all__ = ["SoakSettings"]


class SoakSettings(TargetSettings, frozen=True, kw_only=True):
    """One soak. Raises StartupError, one sentence, when a value is out of range.

    requests: those among which clients leave; the control's come on top. concurrency: in flight; it must be above the
    server's --max-num-seqs, or nobody waits in the queue. prompt_tokens, long_prompt_tokens and output_tokens are the
    most that is drawn; a long prompt should take the server several steps (--max-num-batched-tokens). warmup_requests:
    of the same kind, before anything is judged; they should fill the server's KV cache once, since its memory is
    resident only from then on. Few tokens, so that 10,000 requests take a small model on two cores a quarter of an
    hour.
    """

    concurrency: int = 32
    requests: int = 10_000
    prompt_tokens: int = 32
    long_prompt_tokens: int = 512
    output_tokens: int = 24
    abort_fraction: float = 0.5
    vocab_size: int = 32_000
    temperature: float = 0.0
    warmup_requests: int = 1000
    timeout_seconds: float = 120.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("--concurrency", self.concurrency, 1, 65_536)
        check_integer("--requests", self.requests, 2, 10_000_000)
        check_integer("--prompt-tokens", self.prompt_tokens, 1, 1_000_000)
        check_integer("--long-prompt-tokens", self.long_prompt_tokens, 1, 1_000_000)
        check_integer("--output-tokens", self.output_tokens, 2, 1_000_000)  # one to hear, one to leave before
        check_integer("--vocab-size", self.vocab_size, 2, 2**31 - 1)
        check_integer("--warmup", self.warmup_requests, 0, 1_000_000)
        check_number("--abort-fraction", self.abort_fraction, 0.0, 1.0)
        check_number("--temperature", self.temperature, 0.0, 100.0)
