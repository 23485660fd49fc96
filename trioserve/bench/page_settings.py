"""What the measurement of the live page's cost is asked to do."""

from __future__ import annotations

from trioserve.bench.settings import TargetSettings, check_integer

__all__ = ["PageBenchSettings"]


class PageBenchSettings(TargetSettings, frozen=True, kw_only=True):
    """Raises StartupError, one sentence, when a value is out of range. requests: of each measurement, of which a round
    has two: with the page open, and without."""

    rounds: int = 6
    concurrency: int = 32
    requests: int = 128
    prompt_tokens: int = 128
    output_tokens: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("--rounds", self.rounds, 1, 1000)
        check_integer("--concurrency", self.concurrency, 1, 4096)
        check_integer("--requests", self.requests, 1, 1_000_000)
        check_integer("--prompt-tokens", self.prompt_tokens, 1, 1_000_000)
        check_integer("--output-tokens", self.output_tokens, 2, 1_000_000)
