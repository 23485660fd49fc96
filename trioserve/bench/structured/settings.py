"""What a measurement of structured output is asked to do: its values and the checks before anything is sent."""

from __future__ import annotations

import os

from trioserve.bench.settings import TargetSettings, check_integer, check_number
from trioserve.contracts.errors import StartupError

__all__ = ["StructuredBenchSettings"]


class StructuredBenchSettings(TargetSettings, frozen=True, kw_only=True):
    """Raises StartupError, one sentence, when a value is out of range.

    requests: of each row in each round. output_tokens: of each response, at most. schemas: a file or a folder of JSON
    schemas, each of which is asked for once, instead of the rows.
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
            raise StartupError(f"--schemas {self.schemas} is not there: name a file or a folder of JSON schemas")
