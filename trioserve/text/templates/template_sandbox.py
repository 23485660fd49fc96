"""Limits a chat template: the objects that it can reach, and the amount that it may compute and write.

A template is a program that comes with a model, or with a request if the operator allows that. Jinja's sandbox protects
Python's internals and the messages. Jinja's sandbox does not stop a template that runs forever or fills the memory. So
each rendering has bounds: iterations of loops together with calls, characters processed by any operation, the size of
each value, the size of all values together, and the size of the result. The module template_costs has the cost of each
operation, and template_budget has the bounds.

Jinja compiles templates to Python code. Some operations in this code do not call the environment: loops, joins,
comparisons, slices, keys, and the output of literal text. So this module changes the syntax tree and inserts its own
filters around these operations.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, TypeVar, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from trioserve.text.templates.template_budget import (
    VALUE_CHARACTERS_MAX,
    Budget,
    TemplateTooCostly,
    budget,
    printed_size,
)
from trioserve.text.templates.template_costs import (
    CALL_STEPS,
    FILTERS,
    HTML_CHARACTERS_MAX,
    TESTS,
    Compared,
    charge_call,
    charge_json,
    charge_key,
    charge_operator,
    compared,
    metered_filter,
    metered_test,
    refuse_wide_fields,
    sliced,
)

__all__ = ["TemplateEnvironment", "TemplateTooCostly", "render_within_bounds"]

# Maximum number of syntax nodes of a template. Compiling takes 0.1 ms per node. The largest known templates have about
# 4,000 nodes.
NODES_MAX = 20_000
NODE_CHARACTERS = 32  # Cost of each node in the body of a loop or macro, per iteration or call.
# Maximum number of arguments that are passed with * or **. Python first makes a tuple of these arguments.
SPREAD_ARGUMENTS_MAX = 1024


def render_within_bounds(template: jinja2.Template, arguments: dict[str, Any]) -> str:
    """Render a template within a new budget.

    Args:
        template: The template, compiled by TemplateEnvironment.
        arguments: Variables of the template.

    Raises:
        TemplateTooCostly: A bound is exceeded.
        Exception: Any other error of the template.
    """
    token = budget.set(Budget())
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
        budget.reset(token)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Jinja environment for chat templates of the Hugging Face hub, in which every operation is charged.

    Constants are not folded at compile time, since this computation would not be charged to any budget.
    """

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "**", "%"})

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
        self.filters = {
            name: metered_filter(function, FILTERS[name]) for name, function in self.filters.items() if name in FILTERS
        }
        self.filters |= _OURS
        tests: Any = self.tests  # Jinja annotates the tests as plain functions.
        self.tests = {name: metered_test(function, TESTS[name]) for name, function in tests.items() if name in TESTS}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _Meter().visit(tree)
        tree.set_environment(self)
        return tree

    def call(self, context: Context, callee: Any, /, *args: Any, **kwargs: Any) -> Any:
        spent = budget.get()
        spent.step(CALL_STEPS)
        options = {name: value for name, value in kwargs.items() if name not in _ADDED_BY_COMPILER}
        charge_call(callee, args, options)
        # This is a recursive call of a loop. Its iterations count like the iterations of the outer loop.
        if isinstance(callee, LoopContext):
            args = (_counted(args[0]), *args[1:])
        result = super().call(context, callee, *args, **kwargs)
        spent.hold_value(result)
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        charge_operator(operator, left, right)
        result = super().call_binop(context, operator, left, right)
        budget.get().hold_value(result)
        return result

    def getitem(self, obj: Any, argument: Any) -> Any:
        if not isinstance(argument, str | int):
            charge_key(argument)
        return super().getitem(obj, argument)


class _GenerationBlock(Extension):
    """The block {% generation %}, which marks the assistant's text for training. This class only shows its content."""

    tags = {"generation"}  # noqa: RUF012  # the base class declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


# --- operations that jinja compiles to plain Python -----------------------------------------------------------------

# Each filter name has a space, so no template can use the filter.
_COUNTED = "counted rounds"
_CHARGED = "charged body"
_CONCATENATED = "concatenated operands"
_COMPARED = "compared operand"
_SEARCHED = "searched operand"
_SLICED = "sliced value"
_KEY = "key of a dictionary"
_HELD = "held text"
_SPREAD = "spread arguments"

_Node = TypeVar("_Node", bound=nodes.Node)
_Callable = TypeVar("_Callable", nodes.Call, nodes.Filter, nodes.Test)


class _Meter(NodeTransformer):
    """Inserts a filter around each operation that has a cost.

    The body of a loop or macro begins with a charge for all its nodes, executed or not. A node that calls nothing is
    cheap, but a template may have thousands of such nodes.
    """

    def __init__(self) -> None:
        self._cost = 0  # Cost of the nodes visited so far.
        self._node_count = 0

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        self._cost += NODE_CHARACTERS
        self._node_count += 1
        if self._node_count > NODES_MAX:
            raise TemplateTooCostly(f"it has more than {NODES_MAX:,} names, constants, operators and statements")
        if isinstance(node, nodes.TemplateData):
            self._cost += len(node.data)
        return super().visit(node, *args, **kwargs)

    def visit_For(self, node: nodes.For) -> nodes.For:
        self._charge_body(node, node.body)
        node.iter = _through(_COUNTED, node.iter)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:
        return self._charge_body(node, node.body)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.CallBlock:
        return self._charge_body(node, node.body)

    def visit_Block(self, node: nodes.Block) -> nodes.Block:
        return self._charge_body(node, node.body)

    def _charge_body(self, node: _Node, body: list[nodes.Node]) -> _Node:
        before = self._cost
        self.generic_visit(node)
        cost = nodes.Const(self._cost - before, lineno=node.lineno)
        nothing = nodes.Const(None, lineno=node.lineno)
        body.insert(0, nodes.ExprStmt(_through(_CHARGED, nothing, cost), lineno=node.lineno))
        return node

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.AssignBlock:
        self.generic_visit(node)
        # Jinja applies a filter without a value to the text of the block.
        node.filter = nodes.Filter(node.filter, _HELD, [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        return _through(_CONCATENATED, nodes.List(node.nodes, lineno=node.lineno))

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:
        self.generic_visit(node)
        node.expr = _through(_COMPARED, node.expr)
        for operand in node.ops:
            operand.expr = _through(_SEARCHED if operand.op in ("in", "notin") else _COMPARED, operand.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        bounds = [
            part or nodes.Const(None, lineno=node.lineno) for part in (node.arg.start, node.arg.stop, node.arg.step)
        ]
        return _through(_SLICED, nodes.Const(None, lineno=node.lineno), node.node, *bounds)

    def visit_Pair(self, node: nodes.Pair) -> nodes.Pair:
        self.generic_visit(node)
        if not (isinstance(node.key, nodes.Const) and isinstance(node.key.value, str)):
            node.key = _through(_KEY, node.key)
        return node

    def visit_Call(self, node: nodes.Call) -> nodes.Call:
        return self._bound_arguments(node)

    def visit_Filter(self, node: nodes.Filter) -> nodes.Filter:
        return self._bound_arguments(node)

    def visit_Test(self, node: nodes.Test) -> nodes.Test:
        return self._bound_arguments(node)

    def _bound_arguments(self, node: _Callable) -> _Callable:
        self.generic_visit(node)
        if node.dyn_args is not None:
            node.dyn_args = _through(_SPREAD, node.dyn_args)
        if node.dyn_kwargs is not None:
            node.dyn_kwargs = _through(_SPREAD, node.dyn_kwargs)
        return node


def _through(name: str, value: nodes.Node, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(cast(nodes.Expr, value), name, list(args), [], None, None, lineno=value.lineno)


def _counted(items: Iterable[Any]) -> Iterator[Any]:
    spent = budget.get()
    for item in items:
        spent.step()
        yield item


def _charged(_: None, characters: int) -> None:
    budget.get().spend(characters)


def _concatenated(operands: list[Any]) -> str:
    budget.get().make(sum(map(printed_size, operands)))
    return _held("".join(map(str, operands)))


def _held(text: str) -> str:
    budget.get().hold_value(text)
    return text


def _spread(arguments: Any) -> Any:
    if isinstance(arguments, Mapping):
        kept: Any = dict(arguments) if len(arguments) <= SPREAD_ARGUMENTS_MAX else None
    else:
        kept = [item for item, _ in zip(arguments, range(SPREAD_ARGUMENTS_MAX + 1), strict=False)]
    if kept is None or len(kept) > SPREAD_ARGUMENTS_MAX:
        raise TemplateTooCostly(f"it makes a call with more than {SPREAD_ARGUMENTS_MAX:,} arguments")
    return kept


_OURS: dict[str, Callable[..., Any]] = {
    _COUNTED: _counted,
    _CHARGED: _charged,
    _CONCATENATED: _concatenated,
    _COMPARED: compared,
    _SEARCHED: Compared,
    _SLICED: sliced,
    _KEY: charge_key,
    _HELD: _held,
    _SPREAD: _spread,
}

_ADDED_BY_COMPILER = ("_block_vars", "_loop_vars")  # Jinja passes the loop's variables to every call within a loop.


@jinja2.pass_eval_context  # With this decorator, jinja does not print constants at compile time.
def _printable(context: nodes.EvalContext, value: Any) -> Any:
    is_text = isinstance(value, str)
    size = len(value) if is_text else printed_size(value)
    if context.autoescape:
        size *= HTML_CHARACTERS_MAX
    spent = budget.get()
    spent.make(size)
    spent.hold(sys.getsizeof(value) if is_text else size)
    return value


# --- functions that templates expect --------------------------------------------------------------------------------


def _raise_exception(message: object) -> None:
    budget.get().make(printed_size(message))
    raise jinja2.TemplateRuntimeError(str(message))


def _strftime_now(form: str) -> str:
    refuse_wide_fields(form)
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return a value as JSON without the HTML escapes that jinja's own filter would write."""
    charge_json(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
