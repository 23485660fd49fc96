"""Parts of docs/ that are generated from code: tables of options, metrics, errors and names, and the Python reference.

`python docs/site/tables.py` writes the tables into the pages, between `<!-- generated: NAME -->` and `<!-- end -->`. A
test compares them. The site also fills in `<!-- described: NAME -->` with the docstrings of the named classes.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import inspect
import io
import json
import re
import tokenize
import typing
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

import trioserve
from trioserve.api.error_responses import CODES as ERROR_CODES
from trioserve.api.error_responses import TABLE as ERRORS
from trioserve.api.images.image_routes import OPERATIONS as IMAGE_OPERATIONS
from trioserve.api.route_table import Operation
from trioserve.api.routes import OPERATIONS
from trioserve.assemble import EngineParameters
from trioserve.assemble_images import ImageEngineParameters
from trioserve.config import Config
from trioserve.contracts import errors
from trioserve.metrics.metric import Metric, Question
from trioserve.metrics.registry import CATALOGUE
from trioserve.model.families.family import Family
from trioserve.model.families.registry import FAMILIES, LANGUAGE_PARTS
from trioserve.model.loading.encoder_directory import ENCODER_CLASSES
from trioserve.model.vision.part import MEDIA_FAMILIES
from trioserve.options.option import in_python, options_of
from trioserve.options.router import RouterOptions
from trioserve.options.server import ServerOptions
from trioserve.proxy.router_app import OPERATIONS as ROUTER_OPERATIONS

__all__ = ["DESCRIBED", "TABLES", "option_table", "with_tables"]

DOCS = Path(__file__).parents[1]
GENERATED = re.compile(r"^(<!-- generated: ([a-z-]+) -->\n).*?^(<!-- end -->)$", re.MULTILINE | re.DOTALL)

ALERTS = Path(__file__).parents[2] / "examples" / "observability" / "prometheus" / "rules" / "alerts.yml"

PRODUCT = Path(trioserve.__file__).parent
REFUSALS = ("Overloaded", "Draining", "StepOverdue", "EngineReopening", "NoEndpoint")

SERVED = ("served", "served for texts only", "not yet")

ENGINE_MEMBERS = (
    *("model", "ready", "generate", "abort", "live_requests", "encode", "decode", "stats", "load", "drain"),
    *("abort_all", "wait_until_idle", "wait_all_free"),
)
STREAM_MEMBERS = (
    *("id", "prompt_token_ids", "completion_token_count", "is_finished", "is_held", "wait_until_begun"),
    *("wait_until_released", "keep_hold"),
)
"""Members of the classes that open_engine and generate return. Their other members are for the packages around them."""


def with_tables(text: str) -> str:
    """Return the text of a page with its tables generated again.

    Args:
        text: Markdown with markers.

    Raises:
        KeyError: a marker names no table.
    """
    return GENERATED.sub(lambda found: f"{found[1]}\n{TABLES[found[2]]()}\n\n{found[3]}", text)


def option_table(kind: type, without: type | None = None) -> str:
    """Return a table of options.

    Args:
        kind: a class of options.
        without: class whose options another table has.
    """
    elsewhere = {} if without is None else options_of(without)
    rows = []
    for name, option in options_of(kind).items():
        if name not in elsewhere:
            meaning, _, default_words = option.description.partition("; default: ")
            default = default_words or _default(option.default)
            rows.append((f"`{option.flag}`<br>`{option.variable}`", meaning, _takes(option.hint), default))
    return _table(("flag and variable", "meaning", "takes", "default"), rows)


def parameter_table(kind: type) -> str:
    """Return a table of the parameters of a function that opens an engine.

    Args:
        kind: the class of options that are the parameters.
    """
    rows = []
    for name, option in options_of(kind).items():
        meaning, _, default = in_python(option.description).partition("; default: ")
        if not default and option.default is not dataclasses.MISSING:
            default = _default(option.default)
        rows.append((f"`{name}`", meaning, _takes(option.hint), default))
    return _table(("parameter", "meaning", "takes", "default"), rows)


def metric_table(part: str) -> str:
    """Return a table of the metrics of one part of the program, by the question that they answer.

    Args:
        part: name of the part, as in the catalogue.
    """
    rows = []
    for question in Question:
        asked = question.value
        for metric in CATALOGUE:
            if metric.part == part and metric.question is question:
                names = "<br>".join(f"`{name}`" for name in (metric.full_name, *metric.aliases))
                rows.append((asked, names, metric.kind, metric.unit, metric.meaning + _labels(metric)))
                asked = ""  # said once for all that follow
    return _table(("question", "name", "kind", "unit", "meaning"), rows)


def endpoint_table(section: str) -> str:
    """Return a table of HTTP operations, with the key that each one needs.

    Args:
        section: key of ENDPOINT_SECTIONS.
    """
    rows: dict[str, tuple[str, str, str, str]] = {}
    for operation in operations():
        if _section(operation) == section:
            effect = operation.summary[0].lower() + operation.summary[1:]
            # Another path of the same operation, such as /rerank, gets no row of its own.
            place = f"{operation.method} {effect} {_key(operation)}"
            paths = f"{rows[place][0]}, `{operation.path}`" if place in rows else f"`{operation.path}`"
            rows[place] = (paths, operation.method, effect, _key(operation))
    return _table(("endpoint", "method", "effect", "key"), rows.values())


ENDPOINT_SECTIONS: dict[str, tuple[str, ...]] = {
    "text": ("/v1/chat/", "/v1/completions", "/v1/responses", "/v1/messages", "/api/"),
    "images": ("/v1/images/",),
    "scores": ("/v1/embeddings", "/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score", "/v1/decisions"),
    "stored": (
        *("/v1/responses/{", "/v1/files", "/v1/batches", "/v1/messages/batches", "/v1/streams/", "/v1/kept_streams/"),
    ),
    "models": ("/v1/models", "/v1/load_lora", "/v1/unload_lora", "/tokenize", "/detokenize", "/tokenizer_info"),
    "requests": ("/v1/requests", "/abort_"),
    "control": (
        *(
            "/pause",
            "/resume",
            "/is_paused",
            "/continue_",
            "/sleep",
            "/wake_up",
            "/is_sleeping",
            "/reset_",
            "/flush_",
            "/kv_cache",
        ),
        *("/update_weights", "/init_weights", "/destroy_weights", "/get_", "/weight_info"),
    ),
    "observation": (
        *("/health", "/ready", "/load", "/kv_events", "/metrics", "/debug/", "/ui/", "/version", "/openapi.json", "/"),
    ),
    "router": ("/endpoints", "/peers", "/peer", "/router"),
}
"""How the paths of each section of the HTTP reference begin. The longest beginning decides."""

_KEYS = {
    "/load": "none; any with `--load-needs-key`",
    "/kv_events": "admin; any for `?load=only`",
    "/metrics": "none; admin with `--metrics-need-key`",
}
"""Keys that depend on an option or on the query."""


def operations() -> list[Operation[Any]]:
    """Return each operation of the servers for text and images, and of the router, once."""
    return [*{(each.method, each.path): each for each in (*OPERATIONS, *IMAGE_OPERATIONS, *ROUTER_OPERATIONS)}.values()]


def _section(operation: Operation[Any]) -> str:
    begins = {begin: section for section, begins in ENDPOINT_SECTIONS.items() for begin in begins}
    longest = max((begin for begin in begins if operation.path.startswith(begin)), key=len)
    return begins[longest]


def _key(operation: Operation[Any]) -> str:
    if operation.path in _KEYS:
        return _KEYS[operation.path]
    return "admin" if operation.admin_action else "any" if operation.needs_key else "none"


def alert_table() -> str:
    """Return a table of the alerts of examples/observability, with the action for each."""
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
    """Return a table of the error codes, by status."""
    rows = sorted(ERRORS.items(), key=lambda row: row[1].status or 1000)
    return _table(
        ("status", "`code`", "when", "what to do"),
        (
            (str(kind.status or "-"), "none" if code is None else f"`{code}`", kind.when, kind.advice)
            for code, kind in rows
        ),
    )


def exception_table() -> str:
    """Return a table of the exceptions, with causes and remedies from their docstrings."""
    rows = []
    for kind in vars(errors).values():
        if not (isinstance(kind, type) and issubclass(kind, errors.TrioserveError)):
            continue
        remedy = re.search(r"^Remedy: (.+(?:\n.+)*)", inspect.getdoc(kind) or "", re.MULTILINE)
        assert remedy is not None, f"{kind.__name__} has no remedy"
        codes = [f"`{code}`" if code else "none" for each, code in ERROR_CODES if issubclass(kind, each)]
        base = kind.__base__.__name__ if kind.__base__ is not Exception else "Exception"
        module = "trioserve" if kind.__name__ in trioserve.__all__ else errors.__name__
        name = f"`{module}.{kind.__name__}`<br>a kind of `{base}`"
        rows.append((name, codes[0] if codes else "-", _meaning(kind), " ".join(remedy[1].split())))
    return _table(("exception", "HTTP `code`", "cause", "remedy"), rows)


def refusal_table() -> str:
    """Return a table of the reasons of refused requests, with the server's messages from the code."""
    found: dict[str, dict[str, None]] = {}
    for path in sorted(PRODUCT.rglob("*.py")):
        if path.relative_to(PRODUCT).parts[0] in ("simulation", "testing", "bench"):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        texts = _texts(tree)
        for call in ast.walk(tree):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in REFUSALS):
                continue
            [reason] = (_text(word.value, texts) for word in call.keywords if word.arg == "reason")
            message = _text(call.args[0], texts) if call.args else "..."
            if re.search(r"\w", message):
                found.setdefault(reason, {})[message] = None
    rows = [(f"`{reason}`", "<br>".join(messages)) for reason, messages in sorted(found.items())]
    return _table(("`X-Trioserve-Reason`", "message"), rows)


def _texts(tree: ast.AST) -> dict[str, ast.expr]:
    """Return the expressions that are assigned to names in a file."""
    return {
        target.id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _text(value: ast.expr, texts: dict[str, ast.expr]) -> str:
    """Return a text of the code, with three dots for the parts that are known only when the program runs."""
    if isinstance(value, ast.Constant):
        return str(value.value)
    if isinstance(value, ast.JoinedStr):
        return "".join(_text(part, {}) for part in value.values)
    if isinstance(value, ast.BinOp):
        return _text(value.left, texts) + _text(value.right, texts)
    if isinstance(value, ast.Name) and value.id in texts:
        return _text(texts[value.id], {})
    return "..."


def support_table() -> str:
    """Return the support matrix, for which torch is loaded."""
    spec = importlib.util.spec_from_file_location("docs_support", Path(__file__).with_name("support.py"))
    assert spec is not None
    assert spec.loader is not None
    support = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(support)
    return _table(*support.support_rows())


def vllm_table(kind: str) -> str:
    """Return a table of the model classes that vLLM serves, and whether trioserve serves them.

    Args:
        kind: "count" for the numbers, or a kind of classes in vllm_models.json.
    """
    listed: dict[str, Any] = json.loads(Path(__file__).with_name("vllm_models.json").read_text(encoding="utf-8"))
    kinds = {"text": "text", "multimodal": "images, audio or video", "pooling": "embeddings, scores"}
    if kind != "count":
        return _table(("class", "trioserve"), [(f"`{name}`", _served(name)) for name in listed[kind]])
    states = {name: [_served(found) for found in listed[name]] for name in kinds}
    rows = [
        (words, *(str(states[name].count(state)) for state in SERVED), str(len(states[name])))
        for name, words in kinds.items()
    ]
    table = _table(("classes for", *SERVED, "all"), rows)
    return f"The classes are those of `{listed['source']}` in vLLM's {listed['version']}.\n\n{table}"


def _served(name: str) -> str:
    """Return the entry of SERVED for a class of config.json's `architectures`."""
    whole, texts, none = SERVED
    if name in (*MEDIA_FAMILIES, *ENCODER_CLASSES):
        return whole
    for family in FAMILIES:
        if name in (*family.classes, *family.headless_classes):
            return whole
        if name in family.with_images:
            return texts
    return texts if name in LANGUAGE_PARTS else none


def family_size_table() -> str:
    """Return a table of the code lines of each file of families, without comments, docstrings and empty lines."""
    rows, line_count, family_count = [], 0, 0
    for path in sorted((PRODUCT / "model" / "families").glob("*.py")):
        module = importlib.import_module(f"trioserve.model.families.{path.stem}")
        names = [name for name in getattr(module, "__all__", ()) if isinstance(getattr(module, name), Family)]
        if not names:
            continue
        lines = _code_line_count(path.read_text(encoding="utf-8"))
        rows.append((f"`{path.name}`", str(len(names)), str(lines), str(round(lines / len(names)))))
        line_count, family_count = line_count + lines, family_count + len(names)
    rows.append(("all", str(family_count), str(line_count), str(round(line_count / family_count))))
    return _table(("file", "families", "lines", "lines per family"), rows)


def _code_line_count(source: str) -> int:
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in skipped:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and node.end_lineno is not None:
            lines.difference_update(range(node.lineno, node.end_lineno + 1))
    return len(lines)


def name_table(module_name: str) -> str:
    """Return a table of the public names of a module, with the first sentence of each docstring.

    Args:
        module_name: a module that loads its names at their first use.
    """
    module = importlib.import_module(module_name)
    return _table(("name", "meaning"), [(f"`{name}`", _meaning(getattr(module, name))) for name in _public(module)])


def _member_table(*kinds: tuple[type, tuple[str, ...]]) -> str:
    rows = []
    for kind, members in kinds:
        attributes = dict(re.findall(r"^ {4}(\w+): (.+(?:\n {5,}.+)*)", inspect.getdoc(kind) or "", re.MULTILINE))
        for name in members:
            meaning = attributes[name] if name in attributes else _meaning(getattr(kind, name))
            rows.append((f"`{kind.__name__}.{name}`", " ".join(meaning.split())))
    return _table(("name", "meaning"), rows)


def _meaning(value: object) -> str:
    """Return the first paragraph of a docstring in one line. Empty for values without a docstring of their own."""
    has_docstring = callable(value) or isinstance(value, property)
    return " ".join((inspect.getdoc(value) or "" if has_docstring else "").partition("\n\n")[0].split())


def _public(module: ModuleType) -> list[str]:
    return [name for name in module.__all__ if not name.startswith("__")]


def _described_module(module_name: str) -> str:
    module = importlib.import_module(module_name)
    return _described(*(getattr(module, name) for name in _public(module)))


def _engine_classes() -> tuple[tuple[type, tuple[str, ...]], ...]:
    from trioserve.engine.engine import Engine
    from trioserve.engine.request_stream import RequestStream

    return (Engine, ENGINE_MEMBERS), (RequestStream, STREAM_MEMBERS)


def _described_engine() -> str:
    return "\n\n".join(_described(kind, members=members) for kind, members in _engine_classes())


def _described_asyncio() -> str:
    from trioserve.asyncio import Engine, Engines, PoolingStream, RequestStream, cancel_on_disconnect

    streams = _described(RequestStream, members=STREAM_MEMBERS) + "\n\n" + _described(PoolingStream)
    engines = _described(Engine, members=ENGINE_MEMBERS) + "\n\n" + _described(Engines)
    return "\n\n".join((engines, streams, _described(cancel_on_disconnect)))


def _described_application() -> str:
    from trioserve.asgi import AsgiApplication

    return _described(AsgiApplication, members=("engine", "lifespan"))


def _described(*values: Any, members: tuple[str, ...] = ()) -> str:
    options = f"\n    options:\n      members: [{', '.join(members)}]" if members else ""
    return "\n\n".join(f"::: {value.__module__}.{value.__qualname__}{options}" for value in values)


def _labels(metric: Metric) -> str:
    shown = []
    for label in metric.labels:
        values = f": {', '.join(label.values)}" if label.values else ""
        shown.append(f"`{label.name}`{values}")
    return f" *Labels:* {'; '.join(shown)}." if shown else ""


def _default(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"`{value}`" if value not in (None, ()) else "none"


def _takes(hint: Any) -> str:
    """A field's type and range in words."""
    if typing.get_origin(hint) is Annotated:
        bounds = [_bounds(meta) for meta in hint.__metadata__]
        return " ".join(filter(None, [_takes(hint.__origin__), *bounds]))
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return ", ".join(f"`{choice}`" for choice in arguments)
    if typing.get_origin(hint) is Callable:
        return "function"
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
    "options-of-every-server": lambda: option_table(ServerOptions),
    "options-of-a-router": lambda: option_table(RouterOptions, ServerOptions),
    "options-of-an-engine": lambda: option_table(Config, RouterOptions),
    "parameters-of-open-engine": lambda: parameter_table(EngineParameters),
    "parameters-of-open-image-engine": lambda: parameter_table(ImageEngineParameters),
    "alerts": alert_table,
    **{f"endpoints-of-{section}": partial(endpoint_table, section) for section in ENDPOINT_SECTIONS},
    "metrics-of-the-engine": lambda: metric_table("engine"),
    "metrics-of-the-front-end": lambda: metric_table("frontend"),
    "metrics-of-the-router": lambda: metric_table("router"),
    "metrics-of-pictures": lambda: metric_table("images"),
    "error-codes": error_table,
    "exceptions": exception_table,
    "refusals": refusal_table,
    "support": support_table,
    "family-sizes": family_size_table,
    "vllm-counts": lambda: vllm_table("count"),
    **{f"vllm-{kind}": partial(vllm_table, kind) for kind in ("text", "multimodal", "pooling")},
    "names-of-trioserve": lambda: name_table("trioserve"),
    "names-of-the-kit": lambda: name_table("trioserve.testing"),
    "names-of-the-engine": lambda: _member_table(*_engine_classes()),
}
"""Tables by the name in a page's marker."""

DESCRIBED: dict[str, Callable[[], str]] = {
    "trioserve": lambda: _described_module("trioserve"),
    "testing": lambda: _described_module("trioserve.testing"),
    "engine": _described_engine,
    "asyncio": _described_asyncio,
    "application": _described_application,
}
"""Directives for mkdocstrings by the name in a page's marker."""


if __name__ == "__main__":
    for page in sorted(DOCS.rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        if with_tables(text) != text:
            page.write_text(with_tables(text), encoding="utf-8")
            print(f"wrote {page.relative_to(DOCS)}")
