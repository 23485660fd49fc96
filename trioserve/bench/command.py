"""`python -m trioserve bench`: which measurements there are, their flags, and where each begins.

A measurement is a command of its own. Its flags are the fields of its settings, so it shows and takes those alone.
Importing this file is cheap (no trio, no h2), so that a command line can show its help at once. What measures parts of
this program from inside (`bench inside`) imports the engine, which nothing here may: it is handed in.
"""

from __future__ import annotations

import argparse
import importlib
import shlex
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from trioserve.bench.disagg.settings import CONNECTORS, DisaggregatedSettings
from trioserve.bench.page_settings import PageBenchSettings
from trioserve.bench.router.settings import ROUTER_ROWS, RouterBenchSettings
from trioserve.bench.settings import BenchSettings
from trioserve.bench.soak.settings import SoakSettings
from trioserve.bench.startup_settings import StartupSettings
from trioserve.bench.structured.settings import StructuredBenchSettings
from trioserve.bench.suite_settings import ROWS, SuiteSettings
from trioserve.bench.survive.settings import SurviveSettings
from trioserve.contracts.errors import StartupError

__all__ = ["MEASUREMENTS", "Measurement", "main"]

EXIT_NOTHING_NAMED = 1
PROGRAM = "python -m trioserve bench"
INSIDE = "inside"
SEVERAL_ROUTERS = "--routers"


class Flag(NamedTuple):
    """How a field of some settings is given. unset: what stands in the help where the default is None or empty."""

    name: str
    meaning: str
    options: dict[str, Any]
    unset: str = "none"


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """One of the commands. module: holds main(settings), which returns the exit code. meanings: of flags that mean
    something else here than elsewhere, by field. more: a sentence below the flags."""

    name: str
    meaning: str
    settings: type[msgspec.Struct]
    module: str
    meanings: dict[str, str] = {}
    more: str = ""

    def run(self, arguments: argparse.Namespace) -> int:
        """Raises StartupError for a value that is out of range, before anything is sent."""
        run: Callable[[msgspec.Struct], int] = importlib.import_module(self.module).main
        return run(self.settings_from(arguments))

    def settings_from(self, arguments: argparse.Namespace) -> msgspec.Struct:
        """Of what a parser with add_arguments read; other attributes are not looked at. Raises StartupError."""
        return self.settings(**{field: getattr(arguments, field) for field in self.fields()})

    def fields(self) -> dict[str, Any]:
        """With their defaults, those that have a flag, in the order of the help."""
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
    """Measure what the first argument names; returns the exit code. run_inside: takes what comes after `inside`.
    Raises StartupError."""
    if arguments[:1] == [INSIDE]:
        return run_inside(arguments[1:])
    if arguments[:1] == ["router"] and any(word.partition("=")[0] == SEVERAL_ROUTERS for word in arguments):
        return run_inside(["routers", *arguments[1:]])  # cores of routers, without sockets
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
    subparsers.add_parser(INSIDE, help="parts of this program, in one process: the engine, its steps, the front end")
    return parser


def _refuse_flags_first(arguments: Sequence[str]) -> None:
    """Flags used to say what is measured."""
    if not arguments[0].startswith("-") or arguments[0] in ("-h", "--help"):
        return
    former = {f"--{measurement.name}": measurement.name for measurement in MEASUREMENTS}
    former["--disaggregated"] = "disagg"
    former |= {f"--{part}": f"{INSIDE} {part}" for part in ("core", "drafts", "frontend", "gap", "served")}
    what = next((former[argument] for argument in arguments if argument in former), MEASUREMENTS[0].name)
    raise StartupError(
        f"bench names what it measures before any flag: bench {what}; 'bench --help' lists what there is"
    )


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


class _Append(argparse.Action):
    """Gathers a flag that may be repeated into a tuple."""

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
        "taken and let go again right before each start, so that a virtual machine need not ask its host for it then",
        {"type": float, "metavar": "GIB"},
    ),
    "cold_path": Flag(
        "--cold",
        "folder or file of the model: dropped from memory before each start, and its reading alone is timed, too",
        {"metavar": "PATH"},
        unset="it is found where the system keeps it",
    ),
    "router_flags": Flag(
        "--router-flags", "flags of route in one text, such as --router-flags='--policy session'", {"type": _words}
    ),
    "endpoints": Flag("--endpoints", "servers behind the router", _INTEGER),
    "model": Flag("--model", "model name to ask for", {"metavar": "NAME"}, unset="the first of /v1/models"),
    "endpoint": Flag("--endpoint", "API to use", {"choices": ["completions", "chat"]}),
    "http": Flag("--http", "HTTP version; 2 is prior knowledge on http://", {"type": int, "choices": [1, 2]}),
    "connections": Flag("--connections", "HTTP/2 connections that share the requests", _INTEGER),
    "schemas": Flag(
        "--schemas", "file or folder of JSON schemas, each to be asked for once", {"metavar": "PATH"}, unset="rows"
    ),
    "rows": Flag("--rows", "names of rows, separated by commas", {"type": _names, "metavar": "NAMES"}, unset="all"),
    "rounds": Flag("--rounds", "how often each is measured", _INTEGER),
    "request_share": Flag(
        "--request-share", "share of each row's requests, for slow models; as many at least as run at a time", _NUMBER
    ),
    "concurrency": Flag("--concurrency", "requests in flight", _INTEGER),
    "requests": Flag("--requests", "requests to measure", _INTEGER),
    "period_seconds": Flag("--period", "seconds between two interruptions, on the average", _NUMBER),
    "logprob_tolerance": Flag(
        "--logprob-tolerance",
        "by so much a log probability may differ; servers without --batch-invariant need more than 0",
        _NUMBER,
    ),
    "rate_per_second": Flag("--rate", "requests/s, random arrivals", _NUMBER, unset="closed loop"),
    "prompt_tokens": Flag("--prompt-tokens", "tokens of each prompt", _INTEGER),
    "long_prompt_tokens": Flag("--long-prompt-tokens", "tokens of the long prompts", _INTEGER),
    "prefix_tokens": Flag("--prefix-tokens", "tokens at the start that all prompts share", _INTEGER),
    "output_tokens": Flag("--output-tokens", "tokens of each response", _INTEGER),
    "prompt_mode": Flag(
        "--prompt-mode",
        "prompts as token ids (exact lengths) or words (one word is about one token); auto: ids where the server takes "
        "them",
        {"choices": ["auto", "ids", "text"]},
    ),
    "vocab_size": Flag("--vocab-size", "token ids are drawn below this number", _INTEGER),
    "abort_fraction": Flag("--abort-fraction", "share of clients that leave early, 0 to 1", _NUMBER),
    "abort_after_tokens": Flag("--abort-after-tokens", "tokens after which they leave", _INTEGER),
    "temperature": Flag("--temperature", "sampling temperature, 0 is greedy", _NUMBER),
    "ignore_eos": Flag(
        "--ignore-eos",
        "go on past the model's end token, so that lengths hold",
        {"action": argparse.BooleanOptionalAction},
    ),
    "connector": Flag("--connector", "what carries KV", {"choices": CONNECTORS}),
    "threads": Flag("--threads", "threads of the one server; each of the two gets half", _INTEGER),
    "seed": Flag("--seed", "seed of prompts, arrivals and who leaves", _INTEGER, unset="another each time"),
    "warmup_requests": Flag("--warmup", "requests before the measured ones, same prefix", _INTEGER),
    "timeout_seconds": Flag("--timeout", "seconds after which a request has failed", {"type": float, "metavar": "S"}),
    "api_key": Flag("--api-key", "sent as a bearer token", {"metavar": "KEY"}),
    "log_directory": Flag("--logs", "folder for what the servers write to their logs", {"metavar": "FOLDER"}),
    "json_path": Flag("--json", "write settings and figures to this file, - is standard output", {"metavar": "FILE"}),
    "markdown_path": Flag("--markdown", "write the table to this file", {"metavar": "FILE"}),
    "label": Flag("--label", "a name for this measurement in its report", {"metavar": "TEXT"}),
}
"""By field, in the order of the help. A setting without a flag is the same in every measurement, so that figures can be
compared."""

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
        meaning=f"measure the rows of a fixed table, {', '.join(row.name for row in ROWS)}",
        settings=SuiteSettings,
        module="trioserve.bench.suite",
    ),
    Measurement(
        name="soak",
        meaning="judge a trioserve server while half of its clients leave: what stays behind, what the others feel",
        settings=SoakSettings,
        module="trioserve.bench.soak.run",
        meanings={
            "prompt_tokens": "tokens of a short prompt, at most",
            "long_prompt_tokens": "tokens of a long prompt, at most",
            "output_tokens": "tokens of a response, at most",
            "warmup_requests": "requests before anything is judged",
        },
    ),
    Measurement(
        name="router",
        meaning="start trioserve route before fake endpoints: what it adds to requests, how it holds bursts back",
        settings=RouterBenchSettings,
        module="trioserve.bench.router.run",
        meanings={
            "server_flags": "flags of route in one text, such as --flags='--policy session'",
            "rows": f"names of rows, of {', '.join(ROUTER_ROWS)}, separated by commas",
            "requests": "requests to measure in each round",
            "output_tokens": "events of a response that is streamed",
            "seed": "seed of the bursts' arrivals",
        },
        more=f"With {SEVERAL_ROUTERS} N it is something else: the cores of so many routers before many endpoints, in "
        f"simulated time; '{PROGRAM} {INSIDE} routers --help' shows the flags of that.",
    ),
    Measurement(
        name="disagg",
        meaning="start a prefill and a decode server, and one with the same cores: what long prompts do to "
        "streams that decode meanwhile, how fast KV travels",
        settings=DisaggregatedSettings,
        module="trioserve.bench.disagg.run",
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
        name="structured",
        meaning="ask for free text and for JSON by schema in turn: what masks cost, what forced tokens are worth, or "
        "whether each of a set of schemas gets a valid response",
        settings=StructuredBenchSettings,
        module="trioserve.bench.structured.run",
        meanings={
            "requests": "requests of each row in each round",
            "output_tokens": "tokens of each response, at most",
            "seed": "seed of what is drawn",
        },
    ),
    Measurement(
        name="survive",
        meaning="start endpoints and a router, and judge whether every stream is whole and the same while endpoints "
        "are killed, stopped, cut off and drained",
        settings=SurviveSettings,
        module="trioserve.bench.survive.run",
        meanings={
            "server_flags": "flags of every serve in one text; they have to make its tokens independent of a request's "
            "company",
            "model": "what every endpoint serves",
            "requests": "streams, each of them twice: undisturbed, and disturbed",
            "concurrency": "streams at a time",
            "output_tokens": "tokens of a response, at most",
            "seed": "seed of what is asked, and of what happens when",
        },
    ),
    Measurement(
        name="page",
        meaning="send the same load with the live page open and without it, in turn: what it costs",
        settings=PageBenchSettings,
        module="trioserve.bench.page",
        meanings={
            "requests": "requests of each measurement, of which a round has two",
            "rounds": "how often both are measured",
        },
    ),
    Measurement(
        name="startup",
        meaning="start trioserve serve again and again: seconds from the command to ready, and the memory then",
        settings=StartupSettings,
        module="trioserve.bench.startup",
        meanings={
            "rounds": "how often each is started",
            "timeout_seconds": "seconds after which a start has failed",
        },
    ),
)
