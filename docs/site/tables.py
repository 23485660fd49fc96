"""The parts of docs/ that are made from code: options, metrics, names to describe.

Names are looked up, not written down, so that a file that moves takes its page along.
"""

from __future__ import annotations

import importlib
import re
import typing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from trioserve.api.error_responses import TABLE as ERRORS
from trioserve.config import Config, RouteConfig, ServerConfig
from trioserve.metrics.catalogue import CATALOGUE, Metric, Question

__all__ = ["TABLES", "alert_table", "described", "error_table", "metric_table", "option_table"]

ALERTS = Path(__file__).parents[2] / "examples" / "observability" / "prometheus" / "rules" / "alerts.yml"

ENGINE_MEMBERS = (
    *("model", "ready", "generate", "abort", "live_requests", "encode", "decode", "stats", "load", "drain"),
    *("abort_all", "wait_until_idle", "wait_all_free"),
)
STREAM_MEMBERS = (
    *("id", "prompt_token_ids", "completion_token_count", "is_finished", "is_held", "wait_until_begun"),
    *("wait_until_released", "keep_hold"),
)
"""Of the classes that open_engine gives; what else they have is for the rooms around them."""


def option_table(kind: type[ServerConfig]) -> str:
    """The options that `kind` adds to the class it inherits from: flag, meaning, what it takes and its default."""
    bases = [base for base in kind.__mro__[1:] if base in (ServerConfig, RouteConfig)]
    inherited = {field.name for base in bases for field in _fields(base)}
    hints = typing.get_type_hints(kind, include_extras=True)
    rows = []
    for field in _fields(kind):
        if field.name in inherited:
            continue
        meaning, _, default_words = hints[field.name].__metadata__[-1].description.partition("; default: ")
        default = default_words or _default(field.default)
        rows.append((f"`--{field.name.replace('_', '-')}`", meaning, _takes(hints[field.name]), default))
    return _table(("flag", "meaning", "takes", "default"), rows)


def metric_table(part: str) -> str:
    """The metrics that this part of the program counts, by the question that they answer."""
    rows = []
    for question in Question:
        asked = question.value
        for metric in CATALOGUE:
            if metric.part == part and metric.question is question:
                names = "<br>".join(f"`{name}`" for name in (metric.full_name, *metric.aliases))
                rows.append((asked, names, metric.kind, metric.unit, metric.meaning + _labels(metric)))
                asked = ""  # said once for all that follow
    return _table(("question", "name", "kind", "unit", "meaning"), rows)


def alert_table() -> str:
    """The alerts of examples/observability: what each says, and what is to be done."""
    import yaml

    rows = []
    for group in yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]:
        for rule in group["rules"]:
            says, action = (
                re.sub(r"\{\{ \$labels\.(\w+) \}\}", r"*\1*", rule["annotations"][name])
                for name in ("summary", "action")
            )
            rows.append((rule["alert"], rule["labels"]["severity"], says, action))
    return _table(("alert", "severity", "says", "what to do"), rows)


def error_table() -> str:
    """Return the table of error codes, by status. docs/reference/http-api.md contains this table."""
    rows = sorted(ERRORS.items(), key=lambda row: row[1].status or 1000)
    return _table(
        ("status", "`code`", "when", "what to do"),
        (
            (str(kind.status or "-"), "none" if code is None else f"`{code}`", kind.when, kind.advice)
            for code, kind in rows
        ),
    )


def described(module_name: str) -> str:
    """What mkdocstrings is to describe: every public name of a module that loads them when they are used."""
    module = importlib.import_module(module_name)
    names = [name for name in module.__all__ if not name.startswith("__")]
    return _described(*(getattr(module, name) for name in names))


def _described_engine() -> str:
    """Engine and RequestStream: what open_engine and generate give, though nobody imports these names."""
    from trioserve.assemble import open_engine

    engine = typing.get_args(typing.get_type_hints(open_engine.__wrapped__)["return"])[0]
    stream = typing.get_type_hints(engine.generate)["return"]
    return _described(engine, members=ENGINE_MEMBERS) + "\n\n" + _described(stream, members=STREAM_MEMBERS)


def _described_asyncio() -> str:
    from trioserve.asyncio import Engine, PooledStream, RequestStream, cancel_on_disconnect

    streams = _described(RequestStream, members=STREAM_MEMBERS) + "\n\n" + _described(PooledStream)
    return "\n\n".join([_described(cancel_on_disconnect), _described(Engine), streams])


def _described_application() -> str:
    from trioserve.asgi import AsgiApplication

    return _described(AsgiApplication, members=("engine", "lifespan"))


def _described(*values: Any, members: tuple[str, ...] = ()) -> str:
    options = f"\n    options:\n      members: [{', '.join(members)}]" if members else ""
    return "\n\n".join(f"::: {value.__module__}.{value.__qualname__}{options}" for value in values)


def _fields(kind: type[ServerConfig]) -> tuple[msgspec.structs.FieldInfo, ...]:
    return msgspec.structs.fields(kind)


def _labels(metric: Metric) -> str:
    shown = []
    for label in metric.labels:
        values = f": {', '.join(label.values)}" if label.values else ""
        shown.append(f"`{label.name}`{values}")
    return f" *Labels:* {'; '.join(shown)}." if shown else ""


def _default(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"`{value}`" if value not in (None, (), msgspec.NODEFAULT) else "none"


def _takes(hint: Any) -> str:
    """A field's type and range in words."""
    if typing.get_origin(hint) is Annotated:
        bounds = [_bounds(meta) for meta in hint.__metadata__]
        return " ".join(filter(None, [_takes(hint.__origin__), *bounds]))
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return ", ".join(f"`{choice}`" for choice in arguments)
    if typing.get_origin(hint) is tuple:
        return "texts"
    if type(None) in arguments:
        return _takes(next(kind for kind in arguments if kind is not type(None)))
    if arguments:
        return " or ".join(dict.fromkeys(_takes(kind) for kind in arguments))
    return {int: "number", float: "number", bool: "on or off", str: "text"}.get(hint, "table")


def _bounds(meta: Any) -> str:
    low, above, high = meta.ge, meta.gt, meta.le
    words = [
        f"from {low:g}" if low is not None else "",
        f"above {above:g}" if above is not None else "",
        f"to {high:,}" if high is not None else "",
    ]
    return " ".join(filter(None, words))


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


TABLES: dict[str, Callable[[], str]] = {
    "options-of-every-server": lambda: option_table(ServerConfig),
    "options-of-a-router": lambda: option_table(RouteConfig),
    "options-of-an-engine": lambda: option_table(Config),
    "alerts": alert_table,
    "metrics-of-the-engine": lambda: metric_table("engine"),
    "metrics-of-the-front-end": lambda: metric_table("frontend"),
    "metrics-of-the-router": lambda: metric_table("router"),
    "metrics-of-pictures": lambda: metric_table("images"),
    "names-of-trioserve": lambda: described("trioserve"),
    "names-of-the-kit": lambda: described("trioserve.testing"),
    "names-of-the-engine": _described_engine,
    "names-of-asyncio": _described_asyncio,
    "names-of-the-application": _described_application,
}
"""By the name with which a page asks for them."""


if __name__ == "__main__":
    print(error_table())
