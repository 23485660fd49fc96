"""Settings of a measurement of structured output."""

from __future__ import annotations

import os

from trioserve.bench.settings import TargetSettings, check_integer, check_number
from trioserve.contracts.errors import StartupError

__all__ = ["StructuredBenchSettings"]


class StructuredBenchSettings(TargetSettings, frozen=True, kw_only=True):
    """Settings of a measurement of structured output. Raises StartupError if a value is out of range.

    Attributes:
        schemas: file or folder of JSON schemas, one request each. None: the rows are measured.
        rounds: number of measurements of each row.
        concurrency: requests in flight.
        requests: requests of each row in each round.
        output_tokens: maximum tokens of each response.
        temperature: sampling temperature.
    """

    schemas: str | None = None
    rounds: int = 5
    concurrency: int = 16
    requests: int = 16
    output_tokens: int = 128
    temperature: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("--rounds", self.rounds, 1, 1000)
        check_integer("--concurrency", self.concurrency, 1, 4096)
        check_integer("--requests", self.requests, 1, 1_000_000)
        check_integer("--output-tokens", self.output_tokens, 2, 1_000_000)
        check_number("--temperature", self.temperature, 0.0, 2.0)
        if self.schemas is not None and not os.path.exists(self.schemas):
            raise StartupError(f"--schemas {self.schemas} does not exist: name a file or a folder of JSON schemas")
