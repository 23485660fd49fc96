"""How far a chat template may go: what it can reach, and how much it may compute and write.

A template is a program that comes with a model, or with a request where the operator allows that. Jinja's sandbox
keeps it away from Python's internals and from changing the messages; it does not keep it from running for ever or from
filling the memory. Bounded here, for each rendering: rounds of loops and calls together, characters handled, the size
of any one value, and the size of the result. Not bounded are comparisons and searches within these sizes.
"""

from __future__ import annotations

import contextvars
import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sized
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

__all__ = ["TemplateEnvironment", "TemplateTooCostly", "render_within_bounds"]

STEPS_MAX = 500_000  # rounds of loops; a chat of a thousand messages takes a tenth of it, all of it a second or two
CALL_STEPS = 4  # a call or a filter, which take longer than an empty round
CHARACTERS_MAX = 256_000_000  # read or written by operators, filters, calls and prints: below a second of copying
VALUE_CHARACTERS_MAX = 16_000_000  # of one value, and of the result: four million tokens, more than any context
INTEGER_BITS_MAX = 4096
JSON_INDENT_MAX = 16


class TemplateTooCostly(jinja2.TemplateError):
    """A template went beyond one of the bounds above."""


class _Budget:
    """What one rendering may still use."""

    __slots__ = ("_characters_left", "_steps_left")

    def __init__(self) -> None:
        self._steps_left = STEPS_MAX
        self._characters_left = CHARACTERS_MAX

    def step(self, count: int = 1) -> None:
        self._steps_left -= count
        if self._steps_left < 0:
            raise TemplateTooCostly(f"it takes more than {STEPS_MAX:,} rounds of loops and calls")

    def spend(self, characters: int) -> None:
        self._characters_left -= characters
        if characters > VALUE_CHARACTERS_MAX:
            raise TemplateTooCostly(f"it makes a value of more than {VALUE_CHARACTERS_MAX:,} characters")
        if self._characters_left < 0:
            raise TemplateTooCostly(f"it handles more than {CHARACTERS_MAX:,} characters")


_budget: contextvars.ContextVar[_Budget] = contextvars.ContextVar("template_budget")


def render_within_bounds(template: jinja2.Template, arguments: dict[str, Any]) -> str:
    """The template's text. Raises TemplateTooCostly beyond the bounds, and whatever else the template raises."""
    token = _budget.set(_Budget())
    try:
        pieces = []
        character_count = 0
        for piece in template.generate(arguments):
            pieces.append(piece)
            character_count += len(piece)
            if character_count > VALUE_CHARACTERS_MAX:
                raise TemplateTooCostly(f"its text has more than {VALUE_CHARACTERS_MAX:,} characters")
        return "".join(pieces)
    finally:
        _budget.reset(token)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The language that chat templates on the Hugging Face hub are written in, metered.

    Constants are not folded when a template is compiled: that would compute outside of any rendering's bounds.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            extensions=[loopcontrols, _GenerationBlock],
            finalize=_printable,
        )
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.filters["tojson"] = _tojson
        self.filters = {name: _metered_filter(name, function) for name, function in self.filters.items()}
        self.filters[_COUNTED] = _counted
        self.filters[_CONCATENATED] = _concatenated

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _Meter().visit(tree)
        tree.set_environment(self)
        return tree

    def call(self, context: Context, callee: Any, /, *args: Any, **kwargs: Any) -> Any:
        budget = _budget.get()
        budget.step(CALL_STEPS)
        if isinstance(callee, LoopContext):  # a recursive loop goes down: its rounds count like the outer ones
            args = (_counted(args[0], 0), *args[1:])
        original = getattr(callee, "__wrapped__", callee)
        receiver = getattr(original, "__self__", None)
        options = {name: value for name, value in kwargs.items() if name not in _ADDED_BY_COMPILER}
        if isinstance(receiver, str):
            _charge_text_operation(getattr(original, "__name__", ""), receiver, args, options)
        else:
            budget.spend(sum(map(_length, args)) + sum(map(_length, options.values())))
        result = super().call(context, callee, *args, **kwargs)
        budget.spend(_length(result))
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _charge_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)


class _GenerationBlock(Extension):
    """{% generation %} marks the assistant's text for training; here it only shows its content."""

    tags = {"generation"}  # noqa: RUF012  # the base class declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


# --- loops and joins: the tree is changed so that they pass through a filter of ours --------------------------------

_COUNTED = "counted rounds"  # with a space: no template can name it
_CONCATENATED = "concatenated operands"


class _Meter(NodeTransformer):
    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        literal_characters = sum(len(text.data) for text in node.find_all(nodes.TemplateData))
        cost = nodes.Const(literal_characters, lineno=node.lineno)
        node.iter = nodes.Filter(node.iter, _COUNTED, [cost], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        operands = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(operands, _CONCATENATED, [], [], None, None, lineno=node.lineno)


def _counted(items: Iterable[Any], literal_characters: int) -> Iterator[Any]:
    budget = _budget.get()
    for item in items:
        budget.step()
        budget.spend(literal_characters)
        yield item


def _concatenated(operands: list[Any]) -> str:
    _budget.get().spend(sum(map(_printed_size, operands)))
    return "".join(map(str, operands))


_ADDED_BY_COMPILER = ("_block_vars", "_loop_vars")  # jinja gives every call in a loop the variables around it


# --- what a value costs ---------------------------------------------------------------------------------------------


def _length(value: object) -> int:
    return len(value) if isinstance(value, Sized) else 1


def _printed_size(value: object) -> int:
    """About how many characters str(value) has. A value that holds the same list many times is counted many times, as
    it would be printed, so the count stops at the bound."""
    if isinstance(value, str):
        return len(value)
    size = 0
    waiting = [value]
    while waiting and size <= VALUE_CHARACTERS_MAX:
        item = waiting.pop()
        if isinstance(item, str):
            size += len(item)
        elif isinstance(item, list | tuple):
            waiting.extend(item)
        elif isinstance(item, dict):
            waiting.extend(item.keys())
            waiting.extend(item.values())
        elif isinstance(item, Namespace):
            raise TemplateTooCostly("it prints a namespace, whose size is not known")
        size += 8
    return size


@jinja2.pass_eval_context  # makes it depend on the rendering, so that constants are not printed at compile time
def _printable(_context: nodes.EvalContext, value: Any) -> Any:
    _budget.get().spend(_printed_size(value))
    return value


def _charge_operator(operator: str, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
        if bits > INTEGER_BITS_MAX:
            raise TemplateTooCostly(f"it makes a number of more than {INTEGER_BITS_MAX:,} bits")
    elif operator == "*":
        factors = (left, right) if isinstance(right, int) else (right, left)
        if isinstance(factors[1], int):
            _budget.get().spend(_length(factors[0]) * max(0, factors[1]))
    elif operator == "%" and isinstance(left, str):
        _refuse_wide_fields(left)
        _budget.get().spend(len(left) + _printed_size(right) * max(1, left.count("%")))
    else:
        _budget.get().spend(_length(left) + _length(right))


# --- filters and methods of texts -----------------------------------------------------------------------------------

# These hand items on or pick some; the others may print or compare what they are given.
_ITEM_FILTERS = frozenset(
    ("attr", "batch", "count", "d", "default", "first", "items", "last", "length", "list", "map", "reject")
) | frozenset(("rejectattr", "reverse", "select", "selectattr", "slice"))
# These make more than they are given: as much as their numbers say, or each with each.
_PADDING = frozenset(
    ("batch", "center", "expandtabs", "indent", "ljust", "rjust", "round", "slice", "truncate", "wordwrap", "zfill")
)
_MULTIPLYING = frozenset(("expandtabs", "indent", "join", "replace"))
_WIDE_PERCENT_FIELD = re.compile(r"%[^A-Za-z%]*(?:\*|\d{5})")
_WIDE_BRACE_FIELD = re.compile(r"\{[^{}]*:[^{}]*(?:\{|\d{5})")


def _metered_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    # The first parameter may be the environment or a context; functools.wraps keeps the mark that says so.
    value_index = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def filter_within_bounds(*args: Any, **kwargs: Any) -> Any:
        budget = _budget.get()
        budget.step(CALL_STEPS)
        value, rest = args[value_index], args[value_index + 1 :]
        if name in _ITEM_FILTERS:
            budget.spend(_length(value))
            _charge_padding(name, 1, rest, kwargs)
        else:
            _charge_text_operation(name, value, rest, kwargs)
        result = function(*args, **kwargs)
        if isinstance(result, Iterator):
            result = list(result)  # computed here, where it is counted, and with a length for what comes next
        budget.spend(_length(result))
        return result

    return filter_within_bounds


def _charge_text_operation(name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    budget = _budget.get()
    sizes = [_printed_size(argument) for argument in (*args, *kwargs.values())]
    size = _printed_size(value)
    budget.spend(size + sum(sizes))
    if name in _MULTIPLYING:
        budget.spend((_length(value) + 1) * max(sizes, default=0) + max(map(_length, args), default=0) * size)
    if name in ("format", "format_map") and isinstance(value, str):
        _refuse_wide_fields(value)
        budget.spend(sum(sizes) * max(1, value.count("{") + value.count("%")))
    _charge_padding(name, size, args, kwargs)


def _charge_padding(name: str, size: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if name in _PADDING:
        width = max((abs(number) for number in (*args, *kwargs.values()) if isinstance(number, int)), default=0)
        _budget.get().spend(width * (size if name in _MULTIPLYING else 1))


def _refuse_wide_fields(text: str) -> None:
    if _WIDE_PERCENT_FIELD.search(text) or _WIDE_BRACE_FIELD.search(text):
        raise TemplateTooCostly("it formats a field whose width has five digits or is not written out")


# --- functions that templates expect --------------------------------------------------------------------------------


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateRuntimeError(str(message))


def _strftime_now(form: str) -> str:
    _refuse_wide_fields(form)
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it stands in prompts: unlike jinja's own filter, without escapes for HTML."""
    if isinstance(indent, int) and indent > JSON_INDENT_MAX:
        raise TemplateTooCostly(f"it indents JSON by more than {JSON_INDENT_MAX}")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
