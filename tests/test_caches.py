"""Lists every cache of the product, with the reason why one API key cannot learn about another key from its timing.

The tests find caches in the source by what the code does: a function that looks up a key of a mapping, stores a value
under it and returns the value. They also find decorators of functools, OrderedDict, and usual names of mappings.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from trioserve.contracts.ids import root_hash
from trioserve.contracts.prompt import ChatPrompt
from trioserve.contracts.structured_output import SchemaKind, StructuredOutput
from trioserve.engine.image_encoding import output_name
from trioserve.proxy.routed_body import prefix_of
from trioserve.testing.fake_engine import byte_form_compiler
from trioserve.text.stop_strings import StopStringFinder
from trioserve.text.templates import chat_template
from trioserve.text.templates.chat_template import ChatTemplate

PRODUCT = Path(__file__).parent.parent / "trioserve"
OF_TESTS = {"testing", "simulation", "bench"}
DECORATORS = {"lru_cache", "cache", "cached_property"}
NAMES = re.compile(
    r"_?(cache|cached|memo|memoized|kept|known|seen|remembered|holders|forms|grammars|programs|outputs)$"
)
MAPPINGS = re.compile(r"\b(dict|OrderedDict|WeakValueDictionary|WeakKeyDictionary|defaultdict)\b")

SALTED = "its keys hold the cache salt"
OWNED = "an entry is asked for by its owner alone"
OF_REQUEST = "it lives and dies with one request"
OF_SERVER = "no request decides what is in it"
NOT_A_CACHE = "it holds what is under way, or bookkeeping; an entry that is missing is not computed"

CACHES = {
    ("model/device.py", "_warn_once"): OF_SERVER,
    ("model/torch_step/device_sampler.py", "_slots"): OF_REQUEST,
    ("model/random_checkpoint.py", "_quantiles"): OF_SERVER,
    ("model/torch_step/formats.py", "_host"): OF_SERVER,
    ("model/torch_step/formats.py", "buffers"): OF_SERVER,
    ("audio/log_mel.py", "mel_filters"): OF_SERVER,
    ("text/grammar_compiler.py", "_grammars"): SALTED,
    ("text/stop_strings.py", "_automaton"): SALTED,
    ("core/encoder_outputs.py", "_outputs"): SALTED,
    ("core/encoder_outputs.py", "_cached"): SALTED,
    ("core/prefix_cache.py", "_by_hash"): SALTED,
    ("router/residency.py", "_holders"): SALTED,
    ("connectors/host/store.py", "_kept"): SALTED,
    ("connectors/host/store.py", "_sizes"): SALTED,
    ("text/templates/chat_template.py", "_programs"): "of the model alone, those of requests are compiled each time",
    ("text/templates/chat_template.py", "support"): "of a program, as above",
    ("text/templates/chat_template.py", "_environment"): OF_SERVER,
    ("proxy/peers/processes.py", "_objects"): OWNED,
    ("admission/dispatch.py", "_positions"): "positions of all waiting requests, counted once a second",
    ("admission/dispatch.py", "_owners"): OWNED,
    ("engine/live_feed.py", "_ended"): OWNED,
    ("proxy/router_feed.py", "_seen"): OWNED,
    ("text/stop_strings.py", "_rows"): OF_REQUEST,
    ("core/model_drafts.py", "_seen"): "how often steps of a size were timed",
    ("connectors/host/policy.py", "_chains"): OF_REQUEST,
    ("router/model_endpoints.py", "_all"): OF_REQUEST,
    ("options/option.py", "_OPTIONS"): OF_SERVER,
    ("model/loading/fields.py", "_groups"): OF_SERVER,
    ("router/policies.py", "_orders"): OF_SERVER,
    ("router/peer_shares.py", "_computed"): OF_SERVER,
    ("api/page.py", "_snapshots"): OWNED,
    ("api/responses/stored_responses.py", "_listed"): OWNED,
    ("api/page.py", "_changes"): OWNED,  # The keys of this cache are snapshots, which have one owner.
    ("text/restraints.py", "_schemas"): OF_REQUEST,
    ("text/json_keys.py", "_doubtful"): "of the tokenizer alone: its keys are the few positions within a JSON text",
    ("model/diffusion/solvers.py", "_schedules"): "numbers of steps and image sizes, which are no secrets",
    ("text/schema_keywords.py", "_byte_library"): OF_SERVER,
    ("trio_tools/interpreter.py", "connections_within"): OF_SERVER,
    ("api/routes.py", "_openapi_json"): OF_SERVER,
    ("trio_tools/media_fetcher.py", "_trusted_certificates"): OF_SERVER,
    ("api/request_context.py", "_heard_at"): OF_SERVER,
    ("commands/ray_watch.py", "_known"): OF_SERVER,
    ("core/block_holds.py", "_holds"): NOT_A_CACHE,
    ("connectors/nixl.py", "_names"): NOT_A_CACHE,
    ("connectors/stream/reader.py", "_peers"): NOT_A_CACHE,
    ("engine/live_feed.py", "_watched"): NOT_A_CACHE,
    ("engine/open_request.py", "_given"): NOT_A_CACHE,
    ("metrics/metric.py", "_children"): NOT_A_CACHE,
    ("router/policies.py", "_last"): NOT_A_CACHE,
    ("router/queues.py", "models"): NOT_A_CACHE,
    ("core/block_holds.py", "_ended"): NOT_A_CACHE,
    ("core/eviction_order.py", "_kept"): NOT_A_CACHE,
    ("core/eviction_order.py", "_recent"): NOT_A_CACHE,
    ("core/prefetches.py", "_last_turns"): NOT_A_CACHE,
    ("core/prefetches.py", "continuing"): NOT_A_CACHE,
    ("core/sessions.py", "_sessions"): NOT_A_CACHE,
    ("engine/sessions.py", "_logs"): OWNED,
    ("core/sessions.py", "_shares"): NOT_A_CACHE,
    ("core/transfers.py", "_pending"): NOT_A_CACHE,
    ("core/steps_in_flight.py", "_finished_ids"): NOT_A_CACHE,
    ("core/waiting_queue.py", "_queues"): NOT_A_CACHE,
    ("trio_tools/fair_slots.py", "_waiting"): NOT_A_CACHE,
    ("ranks/group.py", "_orders"): NOT_A_CACHE,
    ("router/queues.py", "_lines"): NOT_A_CACHE,
    ("router/queues.py", "tenants"): NOT_A_CACHE,
    ("ranks/messages.py", "_sampling"): "decoding an entry takes 0.1 ms at most, inside of a step that all share",
    ("http/http2/protocol.py", "_name_part"): "names of headers of responses, each in less than a microsecond",
    ("http/exchange.py", "_date"): OF_SERVER,
    ("api/images/image_routes.py", "_openapi_json"): OF_SERVER,
}


def found_caches() -> Iterator[tuple[str, str]]:
    for path in sorted(PRODUCT.rglob("*.py")):
        room = path.relative_to(PRODUCT)
        if room.parts[0] in OF_TESTS:
            continue
        for name in caches_in(ast.parse(path.read_text())):
            yield room.as_posix(), name


def caches_in(tree: ast.Module) -> set[str]:
    """Return the names of the caches in a module."""
    names = set()
    for node in ast.walk(tree):
        names.add(_cache_name(node))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names |= _filled_mappings(node)
    return names - {None}


def _filled_mappings(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Return the attributes and globals in which a function looks up a value, stores it if missing, and returns it."""
    looked_up, stored, returned = set(), {}, set()
    parameters = {argument.arg for argument in ast.walk(function.args) if isinstance(argument, ast.arg)}
    own = {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    for node in ast.walk(function):
        match node:
            case ast.Return(value=ast.Call(func=ast.Attribute(value=mapping, attr="setdefault"))):
                looked_up.add(_target(mapping))
                stored[_target(mapping)] = returned  # The value is stored and returned in one statement.
                returned.add(_target(mapping))
            case ast.Call(func=ast.Attribute(value=mapping, attr="get")):
                looked_up.add(_target(mapping))
            case ast.Compare(ops=[ast.In() | ast.NotIn()], comparators=[mapping]):
                looked_up.add(_target(mapping))
            case ast.Subscript(value=mapping, ctx=ast.Load()):
                looked_up.add(_target(mapping))
            case ast.Assign(targets=targets, value=value):
                names = {part.id for part in (*targets, *ast.walk(value)) if isinstance(part, ast.Name)}
                for target in targets:
                    if isinstance(target, ast.Subscript):
                        stored.setdefault(_target(target.value), set()).update(names, {_target(target.value)})
            case ast.Return(value=ast.Name(id=name)):
                returned.add(name)
            case ast.Return(value=ast.Subscript(value=mapping)):
                returned.add(_target(mapping))
    return {name for name in looked_up - own - parameters if stored.get(name, set()) & returned}


def _cache_name(node: ast.AST) -> str | None:
    """Return the name of the cache that a statement or function creates, or None if it creates no cache."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return node.name if any(_is_decorator(decorator) for decorator in node.decorator_list) else None
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        target, made = node.targets[0], node.value
        calls = (part.func for part in ast.walk(made) if isinstance(part, ast.Call))
        return _target(target) if any(map(_is_decorator, calls)) else None
    if isinstance(node, ast.AnnAssign):
        name, kind = _target(node.target), ast.unparse(node.annotation)
        is_kept = isinstance(node.target, ast.Attribute) or node.col_offset == 0
        if is_kept and ("OrderedDict" in kind or (NAMES.match(name) and MAPPINGS.search(kind))):
            return name
    return None


def _target(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else ast.unparse(node)


def _is_decorator(node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        node = node.func
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name in DECORATORS


def test_every_cache_is_listed_with_the_reason_why_its_timing_leaks_nothing() -> None:
    found = set(found_caches())
    assert found - CACHES.keys() == set(), "say in CACHES whose entries a request can hit"
    assert CACHES.keys() - found == set(), "it was renamed or moved: correct its line; or it is no cache any more"


@pytest.mark.parametrize(
    "body",
    [
        """
        found = self._rows.get(key)
        if found is None:
            found = self._rows[key] = compute(key)
        return found
        """,
        """
        if key not in self._rows:
            self._rows[key] = compute(key)
        return self._rows[key]
        """,
        """
        try:
            return self._rows[key]
        except KeyError:
            row = compute(key)
            self._rows[key] = row
            return row
        """,
        "return self._rows.setdefault(key, compute(key))",
    ],
)
def test_cache_in_source_code_is_found_by_the_lookups_of_its_function(body: str) -> None:
    function = "def rows_of(self, key):\n" + textwrap.indent(textwrap.dedent(body), "    ")
    assert caches_in(ast.parse(function)) == {"_rows"}


SCHEMA = StructuredOutput(kind=SchemaKind.JSON_SCHEMA, source='{"type": "boolean"}')


def test_compiled_schema_is_cached_per_cache_salt() -> None:
    compiler = byte_form_compiler()
    first = compiler.compile(SCHEMA, "a")
    assert compiler.find(SCHEMA, "a") is first
    assert compiler.find(SCHEMA, "b") is None
    assert compiler.find(SCHEMA) is None
    assert compiler.compile(SCHEMA, "b") is not first


def test_compiled_schema_without_a_salt_is_shared() -> None:
    compiler = byte_form_compiler()
    assert compiler.compile(SCHEMA) is compiler.compile(SCHEMA)


def test_stop_string_automaton_is_cached_per_cache_salt() -> None:
    finders = [StopStringFinder(["END", "."], salt) for salt in ("a", "b", None, "a")]
    assert finders[0]._automaton is finders[3]._automaton
    assert len({id(finder._automaton) for finder in finders}) == 3


def test_names_of_cached_images_blocks_and_prefixes_differ_by_salt() -> None:
    salts = ("a", "b", None)
    assert len({output_name(b"digest of an image", salt) for salt in salts}) == 3
    assert len({root_hash(salt) for salt in salts}) == 3
    body = b'{"messages":[{"role":"user","content":"' + b"x" * 4096 + b'"}]}'
    assert len({prefix_of(body, "model", salt) for salt in salts}) == 3


def test_chat_template_of_a_request_is_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    program = chat_template._Program

    class Program(program):  # type: ignore[valid-type, misc]
        def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
            compiled.append(source)
            super().__init__(source, special_tokens)

    monkeypatch.setattr(chat_template, "_Program", Program)
    template = ChatTemplate("model {{ messages[0].content }}", bos_token=None, eos_token=None)
    messages = [{"role": "user", "content": "x"}]
    for own in (None, None, "own {{ messages[0].content }}", "own {{ messages[0].content }}"):
        template.render(ChatPrompt(messages=messages, chat_template=own))
    assert [source.split()[0] for source in compiled] == ["model", "own", "own"]
