"""The rows of the suite, and the settings of a measurement of them."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from trioserve.bench.settings import (
    Target,
    check_api_key,
    check_integer,
    check_number,
    check_permitted,
    check_writable,
)
from trioserve.contracts.errors import StartupError

__all__ = ["ROWS", "Row", "SuiteSettings"]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One load, which is always the same.

    Attributes:
        name: name of the row.
        meaning: description of the load.
        load: settings of bench that differ from its defaults.
        is_decode: True if nearly all of the time is decoding, so that the bound of reading weights and KV applies.
        counts_requests: True if the figure is requests/s, since each response has one token.
    """

    name: str
    meaning: str
    load: dict[str, Any]
    is_decode: bool = False
    counts_requests: bool = False

    def with_share(self, share: float) -> Row:
        """Return this row with a share of its requests, but with at least as many as run at the same time.

        Args:
            share: share of the requests, above 0 and at most 1.
        """
        requests = self.load["requests"]
        fewer = max(min(requests, self.load["concurrency"]), math.ceil(requests * share))
        return msgspec.structs.replace(self, load={**self.load, "requests": fewer})


ROWS = (
    Row(
        name="a",
        meaning="1 at a time, 128 in / 128 out",
        load={"concurrency": 1, "requests": 6, "prompt_tokens": 128, "output_tokens": 128, "warmup_requests": 1},
        is_decode=True,
    ),
    Row(
        name="b",
        meaning="16 at a time, 128 / 128",
        load={"concurrency": 16, "requests": 64, "prompt_tokens": 128, "output_tokens": 128, "warmup_requests": 1},
        is_decode=True,
    ),
    Row(
        name="c",
        meaning="64 at a time, 128 / 64",
        load={"concurrency": 64, "requests": 192, "prompt_tokens": 128, "output_tokens": 64, "warmup_requests": 1},
        is_decode=True,
    ),
    Row(
        name="d",
        meaning="4 at a time, 1,500 / 32",
        load={"concurrency": 4, "requests": 16, "prompt_tokens": 1500, "output_tokens": 32, "warmup_requests": 1},
    ),
    Row(
        name="e",
        meaning="16 at a time, 1,000 shared + 20 / 32",
        load={
            "concurrency": 16,
            "requests": 96,
            "prompt_tokens": 1020,
            "prefix_tokens": 1000,
            "output_tokens": 32,
            "warmup_requests": 1,
        },
    ),
    Row(
        name="f",
        meaning="as b, half of the clients leave after 8 tokens",
        load={
            "concurrency": 16,
            "requests": 96,
            "prompt_tokens": 128,
            "output_tokens": 128,
            "abort_fraction": 0.5,
            "abort_after_tokens": 8,
            "warmup_requests": 1,
        },
    ),
    Row(
        name="o1",
        meaning="1 at a time, 10 / 1",
        load={"concurrency": 1, "requests": 200, "prompt_tokens": 10, "output_tokens": 1, "warmup_requests": 5},
        counts_requests=True,
    ),
    Row(
        name="o32",
        meaning="32 at a time, 10 / 1",
        load={"concurrency": 32, "requests": 1500, "prompt_tokens": 10, "output_tokens": 1, "warmup_requests": 5},
        counts_requests=True,
    ),
)


class SuiteSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one suite. Raises StartupError if a value is out of range.

    Attributes:
        url: the first server.
        peers: other servers. Each row is measured at all servers in turn, so that a noisy machine affects all of them.
        rows: names of rows. Empty: all rows.
        rounds: number of measurements of each row.
        request_share: share of each row's requests that is sent, 0.001 to 1. At least as many as run at the same time
            are sent.
        vocab_size: token ids are drawn below this number.
        seed: seed of the prompts. None: a new seed each time, so that no prompt is in a prefix cache from the last
            suite.
        timeout_seconds: seconds after which a request has failed.
        api_key: sent as a bearer token.
        json_path: file for the JSON report. "-": standard output.
        markdown_path: file for the table.
        label: name of the measurement.
        allow_remote: permits servers on other machines.
    """

    url: str = "http://127.0.0.1:8000"
    peers: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    rounds: int = 1
    request_share: float = 1.0
    vocab_size: int = 32_000
    seed: int | None = None
    timeout_seconds: float = 600.0
    api_key: str | None = None
    json_path: str | None = None
    markdown_path: str | None = None
    label: str = ""
    allow_remote: bool = False

    @property
    def chosen_rows(self) -> tuple[Row, ...]:
        return tuple(row.with_share(self.request_share) for row in ROWS if not self.rows or row.name in self.rows)

    def __post_init__(self) -> None:
        for url in (self.url, *self.peers):
            check_permitted(Target.from_url(url), url, allow_remote=self.allow_remote)
        names = [row.name for row in ROWS]
        for name in self.rows:
            if name not in names:
                raise StartupError(f"--rows has {name!r}, allowed are: {', '.join(names)}")
        check_integer("--rounds", self.rounds, 1, 100)
        check_number("--request-share", self.request_share, 0.001, 1.0)
        check_integer("--vocab-size", self.vocab_size, 2, 2**31 - 1)
        if self.seed is not None:
            check_integer("--seed", self.seed, 0, 2**31 - 1)
        check_number("--timeout", self.timeout_seconds, 0.001, 86_400.0)
        check_api_key(self.api_key)
        check_writable(self.json_path)
        check_writable(self.markdown_path)
