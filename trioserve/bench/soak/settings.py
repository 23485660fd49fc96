"""Settings of a soak. plan.py turns them into requests, and verdict.py into claims."""

from __future__ import annotations

from trioserve.bench.settings import TargetSettings, check_integer, check_number

__all__ = ["SoakSettings"]


class SoakSettings(TargetSettings, frozen=True, kw_only=True):
    """Settings of one soak. Raises StartupError if a value is out of range.

    The defaults use few tokens, so that 10,000 requests take a small model on two cores a quarter of an hour.

    Attributes:
        concurrency: requests in flight. It must be above the server's --max-num-seqs, otherwise no request waits in the
            queue.
        requests: requests of the slices in which clients leave. Those of the control come in addition.
        prompt_tokens: maximum tokens of a short prompt.
        long_prompt_tokens: maximum tokens of a long prompt. It should take the server several steps
            (--max-num-batched-tokens).
        output_tokens: maximum tokens of a response.
        abort_fraction: share of the clients that leave, 0 to 1.
        vocab_size: token ids are drawn below this number.
        temperature: sampling temperature.
        warmup_requests: requests of the same kind before the judged ones. They should fill the server's KV cache once,
            since its memory becomes resident only then.
        timeout_seconds: seconds after which a request has failed.
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
        # one token to receive, and one to leave before
        check_integer("--output-tokens", self.output_tokens, 2, 1_000_000)
        check_integer("--vocab-size", self.vocab_size, 2, 2**31 - 1)
        check_integer("--warmup", self.warmup_requests, 0, 1_000_000)
        check_number("--abort-fraction", self.abort_fraction, 0.0, 1.0)
        check_number("--temperature", self.temperature, 0.0, 100.0)
