"""Settings of a survival run. plan.py derives the requests and the interruptions from them."""

from __future__ import annotations

import msgspec

from trioserve.bench.settings import check_integer, check_number, check_writable

__all__ = ["SurviveSettings"]


class SurviveSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one run.

    Attributes:
        model: model that each endpoint serves.
        endpoints: number of endpoints.
        concurrency: concurrent requests. The default exceeds the leases of one endpoint (64) and is several times its
            batch, so that many requests have no token yet when an endpoint dies.
        requests: number of requests in each of the two runs.
        output_tokens: maximum tokens of a response.
        period_seconds: mean time between two interruptions.
        seed: seed of requests and interruptions.
        logprob_tolerance: allowed difference of a log probability. In float32 without --batch-invariant 1e-3 is enough.
        timeout_seconds: time in which a response must be complete.
        server_flags: flags of every endpoint. They must make tokens independent of the other requests in the batch.
            Otherwise streams differ for that reason alone.
        router_flags: flags of the router.
        log_directory: directory for the output of all processes. None: the output is dropped.
        json_path: file for the report as JSON, "-" for standard output. None: no file.
        label: text before the title of the report.

    Raises:
        StartupError: a value is out of range.
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
        check_integer("--endpoints", self.endpoints, 2, 16)  # at least one endpoint must remain
        check_integer("--concurrency", self.concurrency, 1, 4096)
        check_integer("--requests", self.requests, 1, 1_000_000)
        check_integer("--output-tokens", self.output_tokens, 8, 100_000)
        check_number("--period", self.period_seconds, 0.05, 86_400.0)
        check_number("--logprob-tolerance", self.logprob_tolerance, 0.0, 100.0)
        check_number("--timeout", self.timeout_seconds, 1.0, 86_400.0)
        check_writable(self.json_path)
