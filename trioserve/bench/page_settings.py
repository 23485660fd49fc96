"""Settings of the measurement of the live page."""

from __future__ import annotations

from trioserve.bench.settings import TargetSettings, check_integer

__all__ = ["PageBenchSettings"]


class PageBenchSettings(TargetSettings, frozen=True, kw_only=True):
    """Settings of the measurement of the live page. Raises StartupError if a value is out of range.

    Attributes:
        rounds: number of rounds. Each has one measurement with the page and one without.
        concurrency: requests in flight.
        requests: requests of each measurement.
        prompt_tokens: tokens of each prompt.
        output_tokens: tokens of each response.
    """

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
