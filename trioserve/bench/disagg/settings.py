"""Settings of the comparison of a prefill/decode pair with one server."""

from __future__ import annotations

import msgspec

from trioserve.bench.settings import check_integer, check_number, check_writable
from trioserve.contracts.errors import StartupError

__all__ = ["CONNECTORS", "DisaggregatedSettings"]

CONNECTORS = ("tcp", "nixl")


class DisaggregatedSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the comparison. Raises StartupError if a value is out of range.

    Attributes:
        connector: KV connector of the pair.
        concurrency: streams that decode all the time.
        output_tokens: tokens of each response of a stream.
        prompt_tokens: tokens of each prompt of a stream.
        requests: long prompts that arrive meanwhile, with few tokens of output.
        rate_per_second: long prompts per second, at random times.
        long_prompt_tokens: tokens of each long prompt.
        threads: threads of the one server. Each server of the pair gets half of them, so that both have the same cores.
        rounds: number of rounds of each, in turn.
        seed: seed of prompts and arrivals.
        timeout_seconds: seconds after which a request has failed.
        server_flags: other flags of every `serve`.
        json_path: file for the JSON report. "-": standard output.
        label: name of the measurement.
    """

    connector: str = "tcp"
    concurrency: int = 4
    output_tokens: int = 128
    prompt_tokens: int = 32
    requests: int = 16
    rate_per_second: float = 1.0
    long_prompt_tokens: int = 1500
    threads: int = 2
    rounds: int = 2
    seed: int = 0
    timeout_seconds: float = 300.0
    server_flags: tuple[str, ...] = ()
    json_path: str | None = None
    label: str = ""

    def __post_init__(self) -> None:
        if self.connector not in CONNECTORS:
            raise StartupError(f'--connector is "{self.connector}", allowed are {", ".join(CONNECTORS)}')
        check_integer("--concurrency", self.concurrency, 1, 1000)
        check_integer("--output-tokens", self.output_tokens, 2, 100_000)
        check_integer("--prompt-tokens", self.prompt_tokens, 1, 100_000)
        check_integer("--requests", self.requests, 1, 10_000)
        check_number("--rate", self.rate_per_second, 0.001, 1000.0)
        check_integer("--long-prompt-tokens", self.long_prompt_tokens, 32, 1_000_000)
        check_integer("--threads", self.threads, 2, 1024)
        check_integer("--rounds", self.rounds, 1, 100)
        check_integer("--seed", self.seed, 0, 2**31 - 1)
        check_number("--timeout", self.timeout_seconds, 0.001, 86_400.0)
        check_writable(self.json_path)
