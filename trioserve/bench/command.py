"""`python -m trioserve bench`: the measurements, their flags, and the modules that run them.

Each measurement is a command. The flags of a command are the fields of its settings. This file imports neither trio nor
h2, so that a command shows its help at once. Measurements of parts of this program (`bench inside`) import the engine,
which this file must not import. So the caller passes the function that runs them.
"""

from __future__ import annotations

import argparse
import importlib
import shlex
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from trioserve.bench.server_settings import (
    AGENT_ROWS,
    CONNECTORS,
    ROUTER_ROWS,
    AgentBenchSettings,
    DisaggregatedSettings,
    RouterBenchSettings,
    StartupSettings,
    SurviveSettings,
    SwitchSettings,
)
from trioserve.bench.settings import (
    SUITE_ROWS,
    BenchSettings,
    PageBenchSettings,
    SoakSettings,
    StructuredBenchSettings,
    SuiteSettings,
)
from trioserve.contracts.errors import StartupError

__all__ = ["MEASUREMENTS", "Measurement", "main"]

EXIT_NOTHING_NAMED = 1
PROGRAM = "python -m trioserve bench"
INSIDE = "inside"
SEVERAL_ROUTERS = "--routers"


class Flag(NamedTuple):
    """The flag of a settings field.

    Attributes:
        name: name of the flag.
        meaning: description for the help.
        options: options of argparse's add_argument.
        unset: text in the help for a default that is None or empty.
    """

    name: str
    meaning: str
    options: dict[str, Any]
    unset: str = "none"


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement, which is a command of `bench`.

    Attributes:
        name: name of the command.
        meaning: description for the help.
        settings: class of its settings.
        module: module with a function main(settings) that returns the exit code.
        meanings: descriptions by field, for flags with a special meaning in this command.
        more: text below the flags in the help.
    """

    name: str
    meaning: str
    settings: type[msgspec.Struct]
    module: str
    meanings: dict[str, str] = {}
    more: str = ""

    def run(self, arguments: argparse.Namespace) -> int:
        """Run the measurement and return its exit code.

        Args:
            arguments: result of a parser with the flags of this measurement.

        Raises:
            StartupError: a value is out of range. Nothing was sent.
        """
        run: Callable[[msgspec.Struct], int] = importlib.import_module(self.module).main
        return run(self.settings_from(arguments))

    def settings_from(self, arguments: argparse.Namespace) -> msgspec.Struct:
        """Make the settings. Other attributes of the arguments are ignored.

        Args:
            arguments: result of a parser with the flags of this measurement.

        Raises:
            StartupError: a value is out of range.
        """
        return self.settings(**{field: getattr(arguments, field) for field in self.fields()})

    def fields(self) -> dict[str, Any]:
        """Return the defaults of the fields that have a flag, in the order of the help."""
        defaults = {field.name: field.default for field in msgspec.structs.fields(self.settings)}
        return {field: defaults[field] for field in _FLAGS if field in defaults}

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        for field, default in self.fields().items():
            flag = _FLAGS[field]
            meaning = self.meanings.get(field, flag.meaning)
            parser.add_argument(
                flag.name,
                dest=field,
                default=default,
                help=f"{meaning} (default: {_shown(default, flag.unset)})",
                **flag.options,
            )


def main(arguments: Sequence[str], *, run_inside: Callable[[Sequence[str]], int]) -> int:
    """Run the measurement that the first argument names, and return the exit code.

    Args:
        arguments: the command line after `bench`.
        run_inside: runs the command line after `bench inside`.

    Raises:
        StartupError: the command line is wrong.
    """
    if arguments[:1] == [INSIDE]:
        return run_inside(arguments[1:])
    if arguments[:1] == ["router"] and any(word.partition("=")[0] == SEVERAL_ROUTERS for word in arguments):
        # `bench routers` measures only the routers' cores, without sockets.
        return run_inside(["routers", *arguments[1:]])
    parser = bench_parser()
    if not arguments:
        parser.print_help()
        return EXIT_NOTHING_NAMED
    _refuse_flags_first(arguments)
    parsed = parser.parse_args(arguments)
    measurement: Measurement = parsed.measurement
    return measurement.run(parsed)


def bench_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Measure a server from outside, or parts of this program from inside.",
        epilog=f"'{PROGRAM} WHAT --help' shows the flags of one of them.",
    )
    subparsers = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    for measurement in MEASUREMENTS:
        one = subparsers.add_parser(
            measurement.name,
            help=measurement.meaning,
            description=f"{measurement.meaning.capitalize()}.",
            epilog=measurement.more,
        )
        measurement.add_arguments(one)
        one.set_defaults(measurement=measurement)
    subparsers.add_parser(
        INSIDE, help="measure parts of this program in one process: the engine, its steps, the front end"
    )
    return parser


def _refuse_flags_first(arguments: Sequence[str]) -> None:
    """Refuse command lines of former versions, in which a flag selected the measurement."""
    if not arguments[0].startswith("-") or arguments[0] in ("-h", "--help"):
        return
    former = {f"--{measurement.name}": measurement.name for measurement in MEASUREMENTS}
    former["--disaggregated"] = "disagg"
    former |= {f"--{part}": f"{INSIDE} {part}" for part in ("core", "drafts", "frontend", "gap", "served")}
    what = next((former[argument] for argument in arguments if argument in former), MEASUREMENTS[0].name)
    raise StartupError(f"the measurement comes before all flags: bench {what}; 'bench --help' lists the measurements")


def _shown(default: object, unset: str) -> str:
    if isinstance(default, tuple) and default:
        return shlex.join(map(str, default))
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, float):
        return f"{default:g}"
    return unset if default is None or default in ("", ()) else str(default)


def _words(text: str) -> tuple[str, ...]:
    return tuple(shlex.split(text))


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(number) for number in text.split(","))


class _Append(argparse.Action):
    """Collects the values of a flag that may be repeated into a tuple."""

    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: object, option: str | None = None
    ) -> None:
        setattr(namespace, self.dest, (*getattr(namespace, self.dest), values))


_INTEGER: dict[str, Any] = {"type": int, "metavar": "N"}
_NUMBER: dict[str, Any] = {"type": float, "metavar": "X"}

_FLAGS = {
    "url": Flag("--url", "server to measure, with or without /v1", {"metavar": "URL"}),
    "allow_remote": Flag("--allow-remote", "permit a server that is not on this machine", {"action": "store_true"}),
    "peers": Flag(
        "--peer", "another server to measure in turn; may be repeated", {"metavar": "URL", "action": _Append}
    ),
    "peer": Flag(
        "--peer", "another server with models a and b, which loads one on demand; measured in turn", {"metavar": "URL"}
    ),
    "checkouts": Flag(
        "--checkout",
        "another checkout of trioserve to start in turn; may be repeated",
        {"metavar": "FOLDER", "action": _Append},
    ),
    "server_flags": Flag(
        "--flags", "flags of serve in one text, such as --flags='--cpu-kernels torch'", {"type": _words}
    ),
    "memory_at_hand_gib": Flag(
        "--memory-at-hand",
        "memory to allocate and free right before each start, so that a virtual machine already has it from its host",
        {"type": float, "metavar": "GIB"},
    ),
    "cold_path": Flag(
        "--cold",
        "folder or file of the model: it is dropped from memory before each start, and reading it alone is also timed",
        {"metavar": "PATH"},
        unset="files stay in memory if the system keeps them there",
    ),
    "router_flags": Flag(
        "--router-flags", "flags of route in one text, such as --router-flags='--policy session'", {"type": _words}
    ),
    "endpoints": Flag("--endpoints", "servers behind the router", _INTEGER),
    "model": Flag("--model", "name of the model", {"metavar": "NAME"}, unset="the first of /v1/models"),
    "endpoint": Flag("--endpoint", "API to use", {"choices": ["completions", "chat"]}),
    "http": Flag("--http", "HTTP version; 2 is prior knowledge on http://", {"type": int, "choices": [1, 2]}),
    "connections": Flag("--connections", "HTTP/2 connections that share the requests", _INTEGER),
    "schemas": Flag("--schemas", "file or folder of JSON schemas, one request each", {"metavar": "PATH"}, unset="rows"),
    "rows": Flag("--rows", "names of rows, separated by commas", {"type": _names, "metavar": "NAMES"}, unset="all"),
    "clients": Flag("--clients", "clients in all", _INTEGER),
    "turn_seconds": Flag("--turn", "seconds of a turn", {"type": float, "metavar": "S"}),
    "pause_seconds": Flag("--pause", "seconds between two switches", {"type": float, "metavar": "S"}),
    "rounds": Flag("--rounds", "number of measurements", _INTEGER),
    "request_share": Flag(
        "--request-share",
        "share of each row's requests, for slow models; at least --concurrency of them are sent",
        _NUMBER,
    ),
    "mode": Flag(
        "--mode",
        "replay sessions; or compare turns over HTTP and over a websocket; or keep idle websockets open",
        {"choices": ["replay", "turns", "idle"]},
    ),
    "shape": Flag("--shape", "lengths of sessions: small for a model on a CPU", {"choices": ["small", "full"]}),
    "scale": Flag("--scale", "factor of all token counts", _NUMBER),
    "pause_scale": Flag("--pause-scale", "factor of the pauses in which a tool runs", _NUMBER),
    "shares": Flag(
        "--shares",
        "KV pools relative to the working set, separated by commas",
        {"type": _numbers, "metavar": "NUMBERS"},
    ),
    "peer_command": Flag(
        "--peer-command",
        "command that starts another server, which gets --port N; {blocks} and {tokens} are the size of its KV pool",
        {"metavar": "COMMAND"},
    ),
    "concurrency": Flag("--concurrency", "requests in flight", _INTEGER),
    "requests": Flag("--requests", "requests to measure", _INTEGER),
    "period_seconds": Flag("--period", "mean seconds between two interruptions", _NUMBER),
    "logprob_tolerance": Flag(
        "--logprob-tolerance",
        "allowed difference of a log probability; servers without --batch-invariant need more than 0",
        _NUMBER,
    ),
    "rate_per_second": Flag("--rate", "requests/s, random arrivals", _NUMBER, unset="closed loop"),
    "prompt_tokens": Flag("--prompt-tokens", "tokens of each prompt", _INTEGER),
    "long_prompt_tokens": Flag("--long-prompt-tokens", "tokens of the long prompts", _INTEGER),
    "prefix_tokens": Flag("--prefix-tokens", "tokens at the start that all prompts share", _INTEGER),
    "output_tokens": Flag("--output-tokens", "tokens of each response", _INTEGER),
    "prompt_mode": Flag(
        "--prompt-mode",
        "prompts as token ids (exact lengths) or words (one word is about one token); auto: ids if the server accepts "
        "them",
        {"choices": ["auto", "ids", "text"]},
    ),
    "vocab_size": Flag("--vocab-size", "token ids are drawn below this number", _INTEGER),
    "abort_fraction": Flag("--abort-fraction", "share of clients that leave early, 0 to 1", _NUMBER),
    "abort_after_tokens": Flag("--abort-after-tokens", "tokens after which they leave", _INTEGER),
    "temperature": Flag("--temperature", "sampling temperature, 0 is greedy", _NUMBER),
    "ignore_eos": Flag(
        "--ignore-eos",
        "continue after the model's end token, so that lengths are exact",
        {"action": argparse.BooleanOptionalAction},
    ),
    "connector": Flag("--connector", "KV connector", {"choices": CONNECTORS}),
    "threads": Flag("--threads", "threads of the one server; each of the two gets half", _INTEGER),
    "seed": Flag(
        "--seed", "seed of prompts, arrivals and leaving clients", _INTEGER, unset="a different seed each time"
    ),
    "warmup_requests": Flag("--warmup", "requests before the measured ones, same prefix", _INTEGER),
    "timeout_seconds": Flag("--timeout", "seconds after which a request has failed", {"type": float, "metavar": "S"}),
    "api_key": Flag("--api-key", "sent as a bearer token", {"metavar": "KEY"}),
    "log_directory": Flag("--logs", "folder for the logs of the servers", {"metavar": "FOLDER"}),
    "json_path": Flag("--json", "write settings and figures to this file, - is standard output", {"metavar": "FILE"}),
    "markdown_path": Flag("--markdown", "write the table to this file", {"metavar": "FILE"}),
    "label": Flag("--label", "a name for this measurement in its report", {"metavar": "TEXT"}),
}
"""Flags by field, in the order of the help.

A setting without a flag is equal in every measurement, so that figures can be compared.
"""

MEASUREMENTS = (
    Measurement(
        name="load",
        meaning="send requests to any OpenAI-compatible server and time the responses",
        settings=BenchSettings,
        module="trioserve.bench.run",
        meanings={
            "concurrency": "requests in flight, unless --rate is given",
            "prompt_tokens": "tokens of each prompt, prefix included",
        },
    ),
    Measurement(
        name="suite",
        meaning=f"measure the rows of a fixed table, {', '.join(row.name for row in SUITE_ROWS)}",
        settings=SuiteSettings,
        module="trioserve.bench.suite",
    ),
    Measurement(
        name="soak",
        meaning="judge a trioserve server while half of its clients leave: leftovers, latency of the others",
        settings=SoakSettings,
        module="trioserve.bench.soak",
        meanings={
            "prompt_tokens": "tokens of a short prompt, at most",
            "long_prompt_tokens": "tokens of a long prompt, at most",
            "output_tokens": "tokens of a response, at most",
            "warmup_requests": "requests before the judged ones",
        },
    ),
    Measurement(
        name="router",
        meaning="start trioserve route in front of fake endpoints: added latency, CPU time, behaviour in bursts",
        settings=RouterBenchSettings,
        module="trioserve.bench.router.run",
        meanings={
            "server_flags": "flags of route in one text, such as --flags='--policy session'",
            "rows": f"names of rows, of {', '.join(ROUTER_ROWS)}, separated by commas",
            "requests": "requests to measure in each round",
            "output_tokens": "events of a response that is streamed",
            "seed": "seed of the bursts' arrivals",
        },
        more=f"{SEVERAL_ROUTERS} N runs another measurement: the cores of N routers with many endpoints, in simulated "
        f"time. '{PROGRAM} {INSIDE} routers --help' shows its flags.",
    ),
    Measurement(
        name="disagg",
        meaning="compare a prefill/decode pair with one server on the same cores: latency of streams while long "
        "prompts are computed, speed of KV transfers",
        settings=DisaggregatedSettings,
        module="trioserve.bench.disagg",
        meanings={
            "server_flags": "flags of every serve in one text, such as --flags='--cpu-kernels torch'",
            "concurrency": "streams that decode all the time",
            "output_tokens": "tokens of each of their responses",
            "prompt_tokens": "tokens of each of their prompts",
            "requests": "long prompts that arrive meanwhile",
            "rate_per_second": "long prompts/s, random arrivals",
        },
    ),
    Measurement(
        name="agents",
        meaning="replay sessions of agents that call tools, with KV pools smaller than their contexts: session "
        "retention, plain recency, stored responses, another server",
        settings=AgentBenchSettings,
        module="trioserve.bench.agents.run",
        meanings={
            "server_flags": "flags of every serve in one text, such as --flags='--threads 1'",
            "model": "model of every server",
            "rows": f"names of rows, of {', '.join(AGENT_ROWS)}, separated by commas",
            "rounds": "sessions of each agent, one after another; with --mode turns, of each way",
            "connections": "idle websockets",
            "concurrency": "agents at the same time",
            "seed": "seed of the sessions",
        },
        more=f"'{PROGRAM} {INSIDE} agents' replays sessions of full size in simulated time, without a model.",
    ),
    Measurement(
        name="structured",
        meaning="request free text and JSON by schema in turn: cost of token masks, gain of forced tokens; or check "
        "that each of a set of schemas gets a valid response",
        settings=StructuredBenchSettings,
        module="trioserve.bench.structured",
        meanings={
            "requests": "requests of each row in each round",
            "output_tokens": "tokens of each response, at most",
            "seed": "seed of the requests",
        },
    ),
    Measurement(
        name="survive",
        meaning="start endpoints and a router, and check that every stream is complete and unchanged while endpoints "
        "are killed, stopped, disconnected and drained",
        settings=SurviveSettings,
        module="trioserve.bench.survive",
        meanings={
            "server_flags": "flags of every serve in one text; they must make tokens independent of the other requests "
            "of a step",
            "model": "model of every endpoint",
            "requests": "number of streams; each runs twice, with and without interruptions",
            "concurrency": "streams at a time",
            "output_tokens": "tokens of a response, at most",
            "seed": "seed of requests and interruptions",
        },
    ),
    Measurement(
        name="page",
        meaning="measure the cost of the live page: send the same load with the page open and without it, in turn",
        settings=PageBenchSettings,
        module="trioserve.bench.page",
        meanings={
            "requests": "requests of each measurement; a round has two",
            "rounds": "number of rounds",
        },
    ),
    Measurement(
        name="startup",
        meaning="start trioserve serve several times: seconds from the command to ready, and memory",
        settings=StartupSettings,
        module="trioserve.bench.startup",
        meanings={
            "rounds": "number of starts of each version",
            "timeout_seconds": "seconds after which a start has failed",
        },
    ),
    Measurement(
        name="switches",
        meaning="start a server with two models and memory for one: seconds of a switch, lost requests, memory left",
        settings=SwitchSettings,
        module="trioserve.bench.switches",
        meanings={
            "model": "model that both names have",
            "rounds": "number of rounds; each loads both models once",
            "clients": "clients of the storm, of which half leave at a random time",
            "rate_per_second": "clients of the storm that start per second",
            "output_tokens": "tokens of a response of the storm",
            "turn_seconds": "--model-turn of the server",
            "seed": "seed of the storm",
            "timeout_seconds": "seconds after which the start of the server has failed",
        },
    ),
)
