"""Settings of the measurements of a running server, with checks that run before anything is sent."""

from __future__ import annotations

import argparse
import ipaddress
import math
import os
import urllib.parse
from typing import Any, Literal

import msgspec

from trioserve.contracts.errors import StartupError

__all__ = [
    "SUITE_ROWS",
    "BenchSettings",
    "PageBenchSettings",
    "SoakSettings",
    "StructuredBenchSettings",
    "SuiteRow",
    "SuiteSettings",
    "Target",
    "TargetSettings",
    "at_least_one",
    "check_api_key",
    "check_integer",
    "check_number",
    "check_permitted",
    "check_writable",
]

TOKENS_MAX = 10_000_000  # The limit is above any context. It prevents bodies of gigabytes after a typing error.
IN_FLIGHT_MAX = 65_536  # Each request in flight has one task, and over HTTP/1.1 one socket.


class Target(msgspec.Struct, frozen=True):
    """Address of the server.

    Attributes:
        scheme: "http" or "https".
        host: name or address.
        port: TCP port.
        path_prefix: part of every path before /v1, without a slash at its end.
    """

    scheme: Literal["http", "https"]
    host: str
    port: int
    path_prefix: str

    @property
    def authority(self) -> str:
        """Value of the Host or :authority header. It has no port if the port is the default of the scheme."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.scheme == "https" else 80) else f"{host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """True if the address is a loopback address of this machine. Names are not looked up, except localhost."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost" or self.host.endswith(".localhost")

    @classmethod
    def from_url(cls, url: str) -> Target:
        """Parse a URL. A final /v1, as in the base URL of OpenAI's clients, is removed.

        Args:
            url: URL of the server.

        Raises:
            StartupError: the URL is not valid.
        """
        shape = "give it as http://HOST:PORT or https://HOST:PORT"
        try:
            parts = urllib.parse.urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise StartupError(f"--url {url!r} cannot be read ({error}): {shape}") from error
        host = parts.hostname
        if parts.scheme not in ("http", "https") or not host:
            raise StartupError(f"--url is {url!r}, allowed are http and https with a host: {shape}")
        if parts.username is not None or parts.query or parts.fragment:
            raise StartupError(f"--url is {url!r}, a user, a query and a fragment are not allowed: {shape}")
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        scheme: Literal["http", "https"] = "https" if parts.scheme == "https" else "http"
        return cls(scheme, host, port or (443 if scheme == "https" else 80), prefix.rstrip("/"))


class TargetSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of every measurement of a running server. Raises StartupError if a value is out of range.

    Attributes:
        url: URL of the server.
        model: name of the model. None: the first model of the server.
        seed: seed of all random choices.
        timeout_seconds: seconds after which a request has failed.
        api_key: sent as a bearer token.
        json_path: file for the JSON report. "-": standard output.
        label: name of the measurement in its report.
        allow_remote: permits a server on another machine.
    """

    url: str = "http://127.0.0.1:8000"
    model: str | None = None
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
        check_number("--timeout", self.timeout_seconds, 0.001, 86_400.0)
        check_api_key(self.api_key)
        check_writable(self.json_path)


class BenchSettings(TargetSettings, frozen=True, kw_only=True):
    """Settings of one measurement. Raises StartupError if a value is out of range, or if two values contradict each
    other.

    Attributes:
        endpoint: API to use.
        http: HTTP version.
        connections: HTTP/2 connections that share the requests.
        concurrency: requests in flight in a closed loop.
        requests: number of measured requests.
        prompt_tokens: tokens of each prompt, with the prefix.
        output_tokens: tokens of each response.
        prefix_tokens: tokens at the beginning that all prompts share.
        rate_per_second: rate of random arrivals (Poisson), however many requests are in flight. None: closed loop, in
            which the next request starts when another one ends.
        abort_fraction: share of the clients that leave early, 0 to 1.
        abort_after_tokens: tokens after which these clients leave.
        prompt_mode: prompts as token ids or as words. "auto": as token ids if the server accepts them.
        vocab_size: token ids are drawn below this number.
        temperature: sampling temperature.
        ignore_eos: if True, responses continue after the model's end token.
        warmup_requests: requests before the measured ones.
    """

    endpoint: Literal["chat", "completions"] = "completions"
    http: Literal[1, 2] = 1
    connections: int = 1
    concurrency: int = 8
    requests: int = 64
    prompt_tokens: int = 128
    output_tokens: int = 128
    prefix_tokens: int = 0
    rate_per_second: float | None = None
    abort_fraction: float = 0.0
    abort_after_tokens: int = 8
    prompt_mode: Literal["auto", "ids", "text"] = "auto"
    vocab_size: int = 32_000
    temperature: float = 0.0
    ignore_eos: bool = True
    warmup_requests: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("--connections", self.connections, 1, 1024)
        check_integer("--concurrency", self.concurrency, 1, IN_FLIGHT_MAX)
        check_integer("--requests", self.requests, 1, 10_000_000)
        check_integer("--prompt-tokens", self.prompt_tokens, 1, TOKENS_MAX)
        check_integer("--output-tokens", self.output_tokens, 1, TOKENS_MAX)
        check_integer("--prefix-tokens", self.prefix_tokens, 0, self.prompt_tokens)
        check_integer("--abort-after-tokens", self.abort_after_tokens, 1, TOKENS_MAX)
        check_integer("--vocab-size", self.vocab_size, 2, 2**31 - 1)
        check_integer("--warmup", self.warmup_requests, 0, 1_000_000)
        check_number("--abort-fraction", self.abort_fraction, 0.0, 1.0)
        check_number("--temperature", self.temperature, 0.0, 100.0)
        if self.rate_per_second is not None:
            check_number("--rate", self.rate_per_second, 0.0001, 1_000_000.0)
        if self.http == 1 and self.connections != 1:
            raise StartupError(
                f"--connections is {self.connections} with --http 1, which opens one for each request in flight: "
                "leave it out, or use --http 2"
            )
        if self.endpoint == "chat" and self.prompt_mode == "ids":
            raise StartupError("--prompt-mode ids needs --endpoint completions: chat messages are text")
        if self.abort_fraction > 0.0 and self.abort_after_tokens >= self.output_tokens:
            raise StartupError(
                f"--abort-after-tokens is {self.abort_after_tokens}, but a response has only {self.output_tokens}: "
                "it must be below --output-tokens"
            )


def check_permitted(target: Target, url: str, *, allow_remote: bool) -> None:
    if not target.is_loopback and not allow_remote:
        raise StartupError(
            f"--url {url} is not this machine, and bench puts load on the server: "
            "add --allow-remote if you may put load on that server"
        )


def check_api_key(api_key: str | None) -> None:
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise StartupError("--api-key has characters that an HTTP header cannot carry: printable ASCII is allowed")


def at_least_one(text: str) -> int:
    """Parse a positive integer. argparse turns errors into a sentence that names the flag.

    Args:
        text: value of the flag.
    """
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}, the minimum is 1")
    return value


def check_integer(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise StartupError(f"{name} is {value}, allowed is {low} to {high}")


def check_number(name: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise StartupError(f"{name} is {value}, allowed is {low:g} to {high:g}")


def check_writable(path: str | None) -> None:
    """Check that a report can be written, before the measurement. Otherwise its figures could be lost at the end.

    Args:
        path: the file. None and "-" (standard output) are always writable.

    Raises:
        StartupError: the file cannot be written.
    """
    if path in (None, "-"):
        return
    assert path is not None
    folder = os.path.dirname(path) or "."
    target = path if os.path.exists(path) else folder
    if os.path.isdir(path) or not os.path.isdir(folder) or not os.access(target, os.W_OK):
        raise StartupError(f"--json {path} cannot be written: name a file in an existing folder that you may write to")


class SuiteRow(msgspec.Struct, frozen=True, kw_only=True):
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

    def with_share(self, share: float) -> SuiteRow:
        """Return this row with a share of its requests, but with at least as many as run at the same time.

        Args:
            share: share of the requests, above 0 and at most 1.
        """
        requests = self.load["requests"]
        fewer = max(min(requests, self.load["concurrency"]), math.ceil(requests * share))
        return msgspec.structs.replace(self, load={**self.load, "requests": fewer})


SUITE_ROWS = (
    SuiteRow(
        name="a",
        meaning="1 at a time, 128 in / 128 out",
        load={"concurrency": 1, "requests": 6, "prompt_tokens": 128, "output_tokens": 128, "warmup_requests": 1},
        is_decode=True,
    ),
    SuiteRow(
        name="b",
        meaning="16 at a time, 128 / 128",
        load={"concurrency": 16, "requests": 64, "prompt_tokens": 128, "output_tokens": 128, "warmup_requests": 1},
        is_decode=True,
    ),
    SuiteRow(
        name="c",
        meaning="64 at a time, 128 / 64",
        load={"concurrency": 64, "requests": 192, "prompt_tokens": 128, "output_tokens": 64, "warmup_requests": 1},
        is_decode=True,
    ),
    SuiteRow(
        name="d",
        meaning="4 at a time, 1,500 / 32",
        load={"concurrency": 4, "requests": 16, "prompt_tokens": 1500, "output_tokens": 32, "warmup_requests": 1},
    ),
    SuiteRow(
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
    SuiteRow(
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
    SuiteRow(
        name="o1",
        meaning="1 at a time, 10 / 1",
        load={"concurrency": 1, "requests": 200, "prompt_tokens": 10, "output_tokens": 1, "warmup_requests": 5},
        counts_requests=True,
    ),
    SuiteRow(
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
    def chosen_rows(self) -> tuple[SuiteRow, ...]:
        return tuple(row.with_share(self.request_share) for row in SUITE_ROWS if not self.rows or row.name in self.rows)

    def __post_init__(self) -> None:
        for url in (self.url, *self.peers):
            check_permitted(Target.from_url(url), url, allow_remote=self.allow_remote)
        names = [row.name for row in SUITE_ROWS]
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
        # A client that disconnects receives one token, and disconnects before the last token.
        check_integer("--output-tokens", self.output_tokens, 2, 1_000_000)
        check_integer("--vocab-size", self.vocab_size, 2, 2**31 - 1)
        check_integer("--warmup", self.warmup_requests, 0, 1_000_000)
        check_number("--abort-fraction", self.abort_fraction, 0.0, 1.0)
        check_number("--temperature", self.temperature, 0.0, 100.0)


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
