"""What the measurement of the live page's cost is asked to do."""

from __future__ import annotations

import msgspec

from trioserve.bench.settings import (
    Target,
    check_api_key,
    check_integer,
    check_number,
    check_permitted,
    check_writable,
)

__all__ = ["PageBenchSettings"]


class PageBenchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Raises StartupError, one sentence, when a value is out of range. requests: of each measurement, of which a round
    has two: with the page open, and without."""

    url: str = "http://127.0.0.1:8000"
    model: str | None = None
    rounds: int = 6
    concurrency: int = 32
    requests: int = 128
    prompt_tokens: int = 128
    output_tokens: int = 128
    seed: int = 0
    timeout_seconds: float = 600.0
    api_key: str | None = None
    json_path: str | None = None
    label: str = ""
    allow_remote: bool = False

    @property
    def target(self) -> Target:
        return Target.from_url(self.url)

    def __post_init__(self) -> None:
        check_permitted(self.target, self.url, allow_remote=self.allow_remote)
        check_integer("--rounds", self.rounds, 1, 1000)
        check_integer("--concurrency", self.concurrency, 1, 4096)
        check_integer("--requests", self.requests, 1, 1_000_000)
        check_integer("--prompt-tokens", self.prompt_tokens, 1, 1_000_000)
        check_integer("--output-tokens", self.output_tokens, 2, 1_000_000)
        check_number("--timeout", self.timeout_seconds, 0.001, 86_400.0)
        check_api_key(self.api_key)
        check_writable(self.json_path)
