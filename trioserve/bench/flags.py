"""The flags of bench, whichever way it measures.

Importing this file is cheap (no trio, no h2), so that a command line can show its help at once.
"""

from __future__ import annotations

import argparse
import shlex

import msgspec

from trioserve.bench.disaggregated_settings import CONNECTORS, DisaggregatedSettings
from trioserve.bench.router_settings import ROUTER_ROWS, RouterBenchSettings
from trioserve.bench.settings import BenchSettings
from trioserve.bench.soak_settings import SoakSettings
from trioserve.bench.startup_settings import StartupSettings
from trioserve.bench.suite_settings import ROWS, SuiteSettings
from trioserve.contracts.errors import StartupError

__all__ = ["add_arguments", "settings_from"]

_FLAGS = {
    "url": "--url",
    "allow_remote": "--allow-remote",
    "model": "--model",
    "endpoint": "--endpoint",
    "http": "--http",
    "connections": "--connections",
    "concurrency": "--concurrency",
    "requests": "--requests",
    "rate_per_second": "--rate",
    "prompt_tokens": "--prompt-tokens",
    "long_prompt_tokens": "--long-prompt-tokens",
    "prefix_tokens": "--prefix-tokens",
    "output_tokens": "--output-tokens",
    "prompt_mode": "--prompt-mode",
    "vocab_size": "--vocab-size",
    "abort_fraction": "--abort-fraction",
    "abort_after_tokens": "--abort-after-tokens",
    "temperature": "--temperature",
    "ignore_eos": "--ignore-eos",
    "seed": "--seed",
    "warmup_requests": "--warmup",
    "timeout_seconds": "--timeout",
    "api_key": "--api-key",
    "json_path": "--json",
    "markdown_path": "--markdown",
    "peers": "--peer",
    "rows": "--rows",
    "rounds": "--rounds",
    "label": "--label",
    "checkouts": "--checkout",
    "server_flags": "--flags",
    "connector": "--connector",
    "threads": "--threads",
}
"""The flag of each setting. Some belong to one kind of measurement alone."""

Settings = BenchSettings | DisaggregatedSettings | RouterBenchSettings | SoakSettings | SuiteSettings | StartupSettings

_MODES: dict[str, type[Settings]] = {
    "soak": SoakSettings,
    "suite": SuiteSettings,
    "startup": StartupSettings,
    "router": RouterBenchSettings,
    "disaggregated": DisaggregatedSettings,
}
_KINDS = {"a plain bench": BenchSettings, **{f"--{name}": kind for name, kind in _MODES.items()}}


def settings_from(arguments: argparse.Namespace) -> Settings:
    """The settings from what a parser with add_arguments read; other attributes are not looked at. Raises StartupError,
    also for a flag that this kind of measurement does not know."""
    modes = [name for name in _MODES if getattr(arguments, name)]
    if len(modes) > 1:
        raise StartupError(f"--{modes[0]} and --{modes[1]} are two kinds of measurement: give one of them")
    kind: type[Settings] = _MODES[modes[0]] if modes else BenchSettings
    given = {field: value for field in _FLAGS if (value := getattr(arguments, field)) is not None}
    for field in given:
        if field not in kind.__struct_fields__:
            others = [name for name, other in _KINDS.items() if field in other.__struct_fields__]
            raise StartupError(
                f"{_FLAGS[field]} does not go with this kind of measurement, only with: {', '.join(others)}"
            )
    return kind(**given)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares every flag of a measurement; settings_from reads them back. A flag that is not given is None, since its
    default depends on the kind of measurement."""
    plain = {field.name: field.default for field in msgspec.structs.fields(BenchSettings)}
    soak = {field.name: field.default for field in msgspec.structs.fields(SoakSettings)}
    suite = {field.name: field.default for field in msgspec.structs.fields(SuiteSettings)}

    startup = {field.name: field.default for field in msgspec.structs.fields(StartupSettings)}
    router = {field.name: field.default for field in msgspec.structs.fields(RouterBenchSettings)}
    pair = {field.name: field.default for field in msgspec.structs.fields(DisaggregatedSettings)}

    def flag(field: str, help_text: str, **options: object) -> None:
        default = plain.get(field, soak.get(field, suite.get(field, pair.get(field))))
        shown = str(default)
        for name, others in (("startup", startup), ("soak", soak), ("router", router), ("disaggregated", pair)):
            if others.get(field, default) != default:
                shown += f", with --{name} {others[field]}"
        keywords: dict[str, object] = {"dest": field, "default": None, **options}
        keywords["help"] = help_text.replace("DEFAULT", shown)
        parser.add_argument(_FLAGS[field], **keywords)  # type: ignore[arg-type]  # argparse types each on its own

    parser.add_argument(
        "--soak",
        action="store_true",
        help="judge a trioserve server while half of its clients leave: what is left behind, and what the others feel "
        "(default: off)",
    )
    parser.add_argument(
        "--suite",
        action="store_true",
        help=f"measure the rows of a fixed table, {', '.join(row.name for row in ROWS)} (default: off)",
    )
    parser.add_argument(
        "--startup",
        action="store_true",
        help="start trioserve serve again and again: seconds from the command until it is ready, and its memory then "
        "(default: off)",
    )
    parser.add_argument(
        "--router",
        action="store_true",
        help="start trioserve route before pretended endpoints: the time it adds, its requests/s and processor time, "
        "and how it holds bursts back (default: off)",
    )
    parser.add_argument(
        "--disaggregated",
        action="store_true",
        help="start a prefill/decode pair and one server with the same cores: what long prompts do to streams that "
        "decode meanwhile, and how fast KV travels (default: off)",
    )
    flag(
        "checkouts",
        "with --startup, another checkout of trioserve to start in turn; may be repeated (default none)",
        metavar="FOLDER",
        action=_Append,
    )
    flag(
        "server_flags",
        "with --startup, flags of serve in one text, such as --flags='--cpu-kernels torch'; with --router, flags of "
        "route; with --disaggregated, of every serve (default none)",
        type=_words,
    )
    flag(
        "peers",
        "with --suite, another server to measure in turn; may be repeated (default none)",
        metavar="URL",
        action=_Append,
    )
    flag(
        "rows",
        f"with --suite, names of rows, separated by commas; with --router, of {', '.join(ROUTER_ROWS)} (default all)",
        type=_names,
    )
    flag(
        "rounds",
        "with --suite, --startup, --router or --disaggregated, how often each is measured (default DEFAULT)",
        type=int,
    )
    flag("markdown_path", "with --suite, write the table to this file (default none)")
    flag("url", "server to measure, with or without /v1 (default DEFAULT)")
    flag("allow_remote", "permit a server that is not on this machine (off)", action="store_true")
    flag("model", "model name to ask for (default: the first of /v1/models)")
    flag("endpoint", "API to use (default DEFAULT)", choices=["completions", "chat"])
    flag(
        "http",
        "HTTP version; 2 is prior knowledge on http:// (default DEFAULT)",
        type=int,
        choices=[1, 2],
    )
    flag("connections", "HTTP/2 connections that share the requests (default DEFAULT)", type=int)
    flag("concurrency", "requests in flight, unless --rate is given (default DEFAULT)", type=int)
    flag("requests", "requests to measure; with --router, in each round (default DEFAULT)", type=int)
    flag("rate_per_second", "requests/s, random arrivals (default: closed loop)", type=float)
    flag(
        "prompt_tokens",
        "tokens of each prompt, prefix included; with --soak, of a short one at most (default DEFAULT)",
        type=int,
    )
    flag(
        "long_prompt_tokens",
        "tokens of the long prompts; with --soak, at most (default DEFAULT)",
        type=int,
    )
    flag("connector", "with --disaggregated, what carries KV (default DEFAULT)", choices=CONNECTORS)
    flag(
        "threads",
        "with --disaggregated, threads of the one server; each of the pair gets half (default DEFAULT)",
        type=int,
    )
    flag("prefix_tokens", "tokens at the start that all prompts share (default DEFAULT)", type=int)
    flag("output_tokens", "tokens of each answer; with --soak, at most (default DEFAULT)", type=int)
    flag(
        "prompt_mode",
        "prompts as token ids (exact lengths) or words (one word is about one token); auto: ids where the server "
        "takes them (default DEFAULT)",
        choices=["auto", "ids", "text"],
    )
    flag("vocab_size", "token ids are drawn below this number (default DEFAULT)", type=int)
    flag(
        "abort_fraction",
        "share of clients that leave early, 0 to 1 (default DEFAULT)",
        type=float,
    )
    flag("abort_after_tokens", "tokens after which they leave (default DEFAULT)", type=int)
    flag("temperature", "sampling temperature, 0 is greedy (default DEFAULT)", type=float)
    flag(
        "ignore_eos",
        "go on past the model's end token, so that lengths hold (default on)",
        action=argparse.BooleanOptionalAction,
    )
    flag("seed", "seed of prompts, arrivals and who leaves (default DEFAULT, with --suite another each time)", type=int)
    flag("warmup_requests", "requests before the measured ones, same prefix (default DEFAULT)", type=int)
    flag("timeout_seconds", "seconds after which a request has failed (default DEFAULT)", type=float)
    flag("api_key", "sent as a bearer token (default none)")
    flag("json_path", "write settings and figures to this file, - is standard output (default none)")
    flag("label", "a name for this measurement in its report (default none)")


def _words(text: str) -> tuple[str, ...]:
    return tuple(shlex.split(text))


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


class _Append(argparse.Action):
    """Gathers a flag that may be repeated into a tuple."""

    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: object, option: str | None = None
    ) -> None:
        setattr(namespace, self.dest, (*(getattr(namespace, self.dest) or ()), values))
