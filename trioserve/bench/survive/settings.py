"""What a survival run is asked to do. Which requests and interruptions that makes is settled in plan.py."""

from __future__ import annotations

import msgspec

from trioserve.bench.settings import check_integer, check_number, check_writable

__all__ = ["SurviveSettings"]


class SurviveSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Raises StartupError, one sentence, when a value is out of range.

    concurrency: requests at a time. More than one endpoint gets (64), and several times what one computes at once,
    so that many have no token yet when an endpoint dies. model: what each endpoint serves. output_tokens: the most
    that a response may have. period_seconds: between two interruptions, on the average. timeout_seconds: in which a
    response has to be whole. server_flags: of every endpoint; they have to make its tokens independent of a
    request's company, or streams differ for that alone. logprob_tolerance: by so much a log probability may differ;
    in float32 without --batch-invariant 1e-3 is enough.
    """

    model: str = "smollm2"
    endpoints: int = 3
    concurrency: int = 96
    requests: int = 1000
    output_tokens: int = 64
    period_seconds: float = 6.0
    seed: int = 0
    logprob_tolerance: float = 0.0
    timeout_seconds: float = 300.0
    server_flags: tuple[str, ...] = ("--batch-invariant",)
    router_flags: tuple[str, ...] = ("--health-interval", "0.5")
    log_directory: str | None = None
    json_path: str | None = None
    label: str = ""

    def __post_init__(self) -> None:
        check_integer("--endpoints", self.endpoints, 2, 16)  # one that is left, at least
        check_integer("--concurrency", self.concurrency, 1, 4096)
        check_integer("--requests", self.requests, 1, 1_000_000)
        check_integer("--output-tokens", self.output_tokens, 8, 100_000)
        check_number("--period", self.period_seconds, 0.05, 86_400.0)
        check_number("--logprob-tolerance", self.logprob_tolerance, 0.0, 100.0)
        check_number("--timeout", self.timeout_seconds, 1.0, 86_400.0)
        check_writable(self.json_path)
