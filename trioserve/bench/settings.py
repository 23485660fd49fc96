"""What a measurement is asked to do: its flags, their units and defaults, and the checks before anything is sent.

Importing this file is cheap (no trio, no h2), so that a command line can show its help at once.
"""

from __future__ import annotations

import argparse
import ipaddress
import math
import os
import urllib.parse
from typing import Literal

import msgspec

from trioserve.contracts.errors import StartupError

__all__ = ["BenchSettings", "Target", "add_arguments"]

TOKENS_MAX = 10_000_000  # far above any context; a slip of the keyboard should not become a body of gigabytes
IN_FLIGHT_MAX = 65_536  # one task and, on HTTP/1.1, one socket each


class Target(msgspec.Struct, frozen=True):
    """Where the requests go. path_prefix: what stands before /v1 in every path, without a slash at its end."""

    scheme: Literal["http", "https"]
    host: str
    port: int
    path_prefix: str

    @property
    def authority(self) -> str:
        """The Host or :authority header: the port is left out when it is the scheme's own."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.scheme == "https" else 80) else f"{host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether the address itself says that it is this machine; names are not looked up."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost" or self.host.endswith(".localhost")

    @classmethod
    def from_url(cls, url: str) -> Target:
        """Raises StartupError. A final /v1, as in the base URL of OpenAI's clients, is taken off."""
        shape = "give it as http://HOST:PORT or https://HOST:PORT"
        try:
            parts = urllib.parse.urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise StartupError(f"--url {url!r} cannot be read ({error}): {shape}") from error
        host = parts.hostname
        if parts.scheme not in ("http", "https") or not host:
            raise StartupError(f"--url is {url!r}, only http and https with a host are possible: {shape}")
        if parts.username is not None or parts.query or parts.fragment:
            raise StartupError(f"--url is {url!r}, a user, a query or a fragment has no place in it: {shape}")
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        scheme: Literal["http", "https"] = "https" if parts.scheme == "https" else "http"
        return cls(scheme, host, port or (443 if scheme == "https" else 80), prefix.rstrip("/"))


class BenchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement. Raises StartupError, one sentence, when a value is out of range or two do not go together.

    rate_per_second None: closed loop, the next request starts when one of concurrency ends. Otherwise requests arrive
    at random (Poisson) at this rate, however many are in flight. prompt_tokens includes prefix_tokens, the beginning
    that all prompts share. json_path "-" is standard output.
    """

    url: str = "http://127.0.0.1:8000"
    model: str | None = None
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
    seed: int = 0
    temperature: float = 0.0
    ignore_eos: bool = True
    warmup_requests: int = 0
    timeout_seconds: float = 600.0
    api_key: str | None = None
    json_path: str | None = None
    label: str = ""
    allow_remote: bool = False

    @property
    def target(self) -> Target:
        return Target.from_url(self.url)

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> BenchSettings:
        """The settings from what a parser with add_arguments read; other attributes are not looked at."""
        return cls(**{name: getattr(arguments, name) for name in cls.__struct_fields__})

    def __post_init__(self) -> None:
        if not self.target.is_loopback and not self.allow_remote:
            raise StartupError(
                f"--url {self.url} is not this machine, and bench puts load on what it measures: "
                "add --allow-remote if that server is yours to load"
            )
        _check_integer("--connections", self.connections, 1, 1024)
        _check_integer("--concurrency", self.concurrency, 1, IN_FLIGHT_MAX)
        _check_integer("--requests", self.requests, 1, 10_000_000)
        _check_integer("--prompt-tokens", self.prompt_tokens, 1, TOKENS_MAX)
        _check_integer("--output-tokens", self.output_tokens, 1, TOKENS_MAX)
        _check_integer("--prefix-tokens", self.prefix_tokens, 0, self.prompt_tokens)
        _check_integer("--abort-after-tokens", self.abort_after_tokens, 1, TOKENS_MAX)
        _check_integer("--vocab-size", self.vocab_size, 2, 2**31 - 1)
        _check_integer("--warmup", self.warmup_requests, 0, 1_000_000)
        _check_number("--abort-fraction", self.abort_fraction, 0.0, 1.0)
        _check_number("--temperature", self.temperature, 0.0, 100.0)
        _check_number("--timeout", self.timeout_seconds, 0.001, 86_400.0)
        if self.rate_per_second is not None:
            _check_number("--rate", self.rate_per_second, 0.0001, 1_000_000.0)
        if self.http == 1 and self.connections != 1:
            raise StartupError(
                f"--connections is {self.connections} with --http 1, which opens one for each request in flight: "
                "leave it out, or use --http 2"
            )
        if self.endpoint == "chat" and self.prompt_mode == "ids":
            raise StartupError("--prompt-mode ids needs --endpoint completions: chat messages are text")
        if self.abort_fraction > 0.0 and self.abort_after_tokens >= self.output_tokens:
            raise StartupError(
                f"--abort-after-tokens is {self.abort_after_tokens}, but an answer has only {self.output_tokens}: "
                "it must be below --output-tokens"
            )
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise StartupError("--api-key has characters that an HTTP header cannot carry: printable ASCII is allowed")
        if self.json_path not in (None, "-"):
            _check_writable(str(self.json_path))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares every flag of a measurement; BenchSettings.from_arguments reads them back."""
    defaults = {field.name: field.default for field in msgspec.structs.fields(BenchSettings)}

    def flag(name: str, field: str, help_text: str, **options: object) -> None:
        keywords: dict[str, object] = {"dest": field, "default": defaults[field], "help": help_text, **options}
        parser.add_argument(name, **keywords)  # type: ignore[arg-type]  # argparse types each keyword on its own

    flag("--url", "url", "server to measure, with or without /v1 (default %(default)s)")
    flag("--allow-remote", "allow_remote", "permit a server that is not on this machine (off)", action="store_true")
    flag("--model", "model", "model name to ask for (default: the first of /v1/models)")
    flag("--endpoint", "endpoint", "API to use (default %(default)s)", choices=["completions", "chat"])
    flag(
        "--http",
        "http",
        "HTTP version; 2 is prior knowledge on http:// (default %(default)s)",
        type=int,
        choices=[1, 2],
    )
    flag("--connections", "connections", "HTTP/2 connections that share the requests (default %(default)s)", type=int)
    flag("--concurrency", "concurrency", "requests in flight, unless --rate is given (default %(default)s)", type=int)
    flag("--requests", "requests", "requests to measure (default %(default)s)", type=int)
    flag("--rate", "rate_per_second", "requests/s, random arrivals (default: closed loop)", type=float)
    flag("--prompt-tokens", "prompt_tokens", "tokens of each prompt, prefix included (default %(default)s)", type=int)
    flag(
        "--prefix-tokens", "prefix_tokens", "tokens at the start that all prompts share (default %(default)s)", type=int
    )
    flag("--output-tokens", "output_tokens", "tokens of each answer (default %(default)s)", type=int)
    flag(
        "--prompt-mode",
        "prompt_mode",
        "prompts as token ids (exact lengths) or words (one word is about one token); auto: ids where the server "
        "takes them (default %(default)s)",
        choices=["auto", "ids", "text"],
    )
    flag("--vocab-size", "vocab_size", "token ids are drawn below this number (default %(default)s)", type=int)
    flag(
        "--abort-fraction",
        "abort_fraction",
        "share of clients that leave early, 0 to 1 (default %(default)s)",
        type=float,
    )
    flag("--abort-after-tokens", "abort_after_tokens", "tokens after which they leave (default %(default)s)", type=int)
    flag("--temperature", "temperature", "sampling temperature, 0 is greedy (default %(default)s)", type=float)
    flag(
        "--ignore-eos",
        "ignore_eos",
        "go on past the model's end token, so that lengths hold (default on)",
        action=argparse.BooleanOptionalAction,
    )
    flag("--seed", "seed", "seed of prompts, arrivals and who leaves (default %(default)s)", type=int)
    flag(
        "--warmup", "warmup_requests", "requests before the measured ones, same prefix (default %(default)s)", type=int
    )
    flag("--timeout", "timeout_seconds", "seconds after which a request has failed (default %(default)s)", type=float)
    flag("--api-key", "api_key", "sent as a bearer token (default none)")
    flag("--json", "json_path", "write settings and figures to this file, - is standard output (default none)")
    flag("--label", "label", "a name for this measurement in its report (default none)")


def _check_integer(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise StartupError(f"{name} is {value}, allowed is {low} to {high}")


def _check_number(name: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise StartupError(f"{name} is {value}, allowed is {low:g} to {high:g}")


def _check_writable(path: str) -> None:
    """Looked at before the measurement, since afterwards its figures would be lost."""
    folder = os.path.dirname(path) or "."
    target = path if os.path.exists(path) else folder
    if os.path.isdir(path) or not os.path.isdir(folder) or not os.access(target, os.W_OK):
        raise StartupError(f"--json {path} cannot be written: name a file in a folder that exists and is yours")
