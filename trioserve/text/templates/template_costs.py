"""Charges the cost of each operator, method, filter and test of a template before it runs.

Templates can use only the methods, filters and tests in the tables of this module. A method or filter of unknown cost
would have no bound.
"""

from __future__ import annotations

import functools
import math
import re
import string
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jinja2.runtime import LoopContext

from trioserve.text.templates.template_budget import (
    INTEGER_BITS_MAX,
    ITEM_CHARACTERS,
    TemplateTooCostly,
    budget,
    json_size,
    length,
    printed_size,
)

__all__ = [
    "CALL_STEPS",
    "Compared",
    "charge_call",
    "charge_key",
    "charge_operator",
    "compared",
    "metered_filter",
    "metered_test",
    "FILTERS",
    "HTML_CHARACTERS_MAX",
    "TESTS",
    "refuse_wide_fields",
    "sliced",
]

# A call or a filter is charged as several steps, since it takes longer than an empty iteration of a loop.
CALL_STEPS = 4
TEXT_BYTES = 80  # Memory of a short text in a list.
# Cost of a key other than a text or a small integer. Such keys can be chosen so that all hashes collide.
ODD_KEY_CHARACTERS = 16_384
# Longest text for filters with regular expressions, some of which take quadratic time.
SLOW_FILTER_CHARACTERS_MAX = 16_384
JSON_INDENT_MAX = 16
SHORT_TEXT_CHARACTERS = 256
HTML_CHARACTERS_MAX = 5  # Maximum number of characters that replace one character if it is escaped as HTML.


# --- operators ------------------------------------------------------------------------------------------------------


def charge_operator(operator: str, left: Any, right: Any) -> None:
    """Charge an arithmetic operator.

    Args:
        operator: The operator, such as "+".
        left: The left operand.
        right: The right operand.

    Raises:
        TemplateTooCostly: The result would be too large, or the budget is used up.
    """
    spent = budget.get()
    if isinstance(left, int | float) and isinstance(right, int | float):
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
            if bits > INTEGER_BITS_MAX:
                raise TemplateTooCostly(f"it makes a number of more than {INTEGER_BITS_MAX:,} bits")
    elif operator == "*":
        factors = (left, right) if isinstance(right, int) else (right, left)
        if isinstance(factors[1], int):
            spent.make(_copied_characters(factors[0]) * max(0, factors[1]))
    elif operator == "%" and isinstance(left, str):
        spent.make(_percent_size(left, right) * _escape_factor(left))
    else:
        size = _copied_characters(left) + _copied_characters(right)
        spent.make(size * max(_escape_factor(left), _escape_factor(right)))


def _escape_factor(value: object) -> int:
    return HTML_CHARACTERS_MAX if hasattr(value, "__html__") else 1


def _copied_characters(value: object) -> int:
    """Return the cost of copying a value: the characters of a text, or a fixed number per item of a list."""
    return len(value) if isinstance(value, str) else ITEM_CHARACTERS // 4 * length(value)


def sliced(_: None, value: Any, start: Any, stop: Any, step: Any) -> Any:
    """Return value[start:stop:step], after charging its cost.

    Args:
        _: Always None, the value of the filter that calls this function.
        value: The value to slice.
        start: First index, or None.
        stop: End index, or None.
        step: Distance of the indices, or None.

    Raises:
        TemplateTooCostly: The budget is used up.
    """
    if isinstance(value, str | list | tuple):
        indices = range(*slice(start, stop, step).indices(len(value)))
        budget.get().make(len(indices) * (1 if isinstance(value, str) else ITEM_CHARACTERS // 4))
    result = value[start:stop:step]
    budget.get().hold_value(result)
    return result


class Compared:
    """Operand of a comparison or of `in`. The comparison is charged as soon as its other operand is known.

    Args:
        value: Value of the operand.
    """

    __slots__ = ("value",)
    __hash__ = None  # type: ignore[assignment] # exists only for one comparison

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> Any:
        return self.value == _met(self.value, other, is_equality=True)

    def __ne__(self, other: object) -> Any:
        return self.value != _met(self.value, other, is_equality=True)

    def __lt__(self, other: object) -> Any:
        return self.value < _met(self.value, other)

    def __le__(self, other: object) -> Any:
        return self.value <= _met(self.value, other)

    def __gt__(self, other: object) -> Any:
        return self.value > _met(self.value, other)

    def __ge__(self, other: object) -> Any:
        return self.value >= _met(self.value, other)

    def __contains__(self, item: object) -> bool:
        item = item.value if isinstance(item, Compared) else item
        charge_search(item, self.value)
        return item in self.value


def compared(value: Any) -> Any:
    """Wrap a value in Compared, unless comparing the value costs nothing.

    Args:
        value: Operand of a comparison.
    """
    if value is None or (isinstance(value, str) and len(value) <= SHORT_TEXT_CHARACTERS):
        return value
    return value if isinstance(value, int | float) else Compared(value)


def _met(value: Any, other: Any, *, is_equality: bool = False) -> Any:
    if isinstance(other, Compared):
        other = other.value
    _charge_comparison(value, other, is_equality=is_equality)
    return other


def _charge_comparison(left: Any, right: Any, *, is_equality: bool) -> None:
    if isinstance(left, str) or isinstance(right, str):
        budget.get().spend(min(length(left), length(right)))
    elif not (is_equality and length(left) != length(right)):
        budget.get().spend(printed_size(left) + printed_size(right))


def charge_search(item: Any, container: Any) -> None:
    """Charge a search for an item in a container.

    Args:
        container: A text, dictionary, list or other container.

    Raises:
        TemplateTooCostly: The budget is used up.
    """
    if isinstance(container, str):
        budget.get().spend(_search_size(container, item))
    elif isinstance(container, dict) or type(container) is type({}.keys()):
        charge_key(item)
    else:
        # The searched item is compared with each item of the container. Each comparison costs at most the size of the
        # smaller item, so small items are cheap.
        budget.get().spend(
            ITEM_CHARACTERS // 2 * length(container)
            if item is None or isinstance(item, int | float)
            else printed_size(container) + printed_size(item)
        )


def _search_size(text: str, sought: object) -> int:
    # At each position, Python may compare all characters of a short search text. Python uses a linear algorithm only
    # for long search texts.
    return (len(text) + 1) * (1 + min(length(sought), 256) // 8)


def charge_key(key: Any) -> Any:
    """Charge the use of a value as a dictionary key, and return the value.

    Raises:
        TemplateTooCostly: The key is a tuple that contains a tuple, which Python hashes without checking its stack.
            Also raised if the budget is used up.
    """
    if isinstance(key, str) or key is None or (isinstance(key, int) and -(2**60) < key < 2**60):
        return key
    if isinstance(key, tuple):
        if any(isinstance(item, tuple) for item in key):
            raise TemplateTooCostly("it makes a key of tuples in a tuple")
        budget.get().spend(ITEM_CHARACTERS * len(key))
    budget.get().spend(ODD_KEY_CHARACTERS)
    return key


# --- texts with fields ----------------------------------------------------------------------------------------------

_PERCENT_FIELD = re.compile(r"[-+ #0]*(\*|\d*)(?:\.(\*|\d*))?[hlL]?(.?)", re.DOTALL)
FIELD_CHARACTERS = 400  # Longest printed number without a width. It is a float without exponent.
_WIDTH_REFUSED = "it formats a field whose width has five digits or more, or is not a literal number"


def _percent_size(text: str, values: Any) -> int:
    """Return an upper bound of the length of text % values."""
    field_count = text.count("%")
    budget.get().step(field_count)
    values_size = printed_size(values if isinstance(values, tuple) else (values,))
    # Fields can use a named value several times, but any other value only once.
    size = len(text) + values_size * (field_count if isinstance(values, Mapping) else 1)
    start = text.find("%")
    while start >= 0:
        position = start + 1
        if text[position : position + 1] == "(":
            position = _after_parentheses(text, position)
        field = _PERCENT_FIELD.match(text, position)
        assert field is not None, "every part of the expression may be empty"
        for digits in (field[1], field[2] or ""):
            if digits == "*" or len(digits) > 4:
                raise TemplateTooCostly(_WIDTH_REFUSED)
            size += int(digits or 0)
        size += FIELD_CHARACTERS if field[3] in "eEfFgG" else 0
        if field[3] in "arsc":
            size += 10 * values_size if field[3] in "ar" else 0
        start = text.find("%", max(field.end(), start + 1))
    return size


def _after_parentheses(text: str, position: int) -> int:
    depth = 0
    for match in re.compile(r"[()]").finditer(text, position):
        depth += 1 if match[0] == "(" else -1
        if not depth:
            return match.end()
    return len(text)


def _brace_size(text: str, values: Any) -> int:
    """Return an upper bound of the length of text.format(*values)."""
    budget.get().step(text.count("{"))
    values_size = printed_size(values)
    size = len(text)
    for _, name, field_format, conversion in string.Formatter().parse(text):
        if name is None:
            continue
        field_format = field_format or ""
        if "{" in field_format or re.search(r"\d{5}", field_format):
            raise TemplateTooCostly(_WIDTH_REFUSED)
        size += sum(map(int, re.findall(r"\d+", field_format))) + FIELD_CHARACTERS + 4 * values_size
        if conversion in ("a", "r"):
            size += 10 * values_size
    return size


def refuse_wide_fields(date_format: str) -> None:
    """Refuse a date format with a field width. No honest template needs a field width.

    Args:
        date_format: Format for strftime.

    Raises:
        TemplateTooCostly: The format has a width, or more than 1,024 characters.
    """
    if len(date_format) > 1024 or re.search(r"%[^A-Za-z%]*\d", date_format):
        raise TemplateTooCostly("it formats a date with a width, or with more than 1,024 characters")


# --- methods --------------------------------------------------------------------------------------------------------


def _only_reads(text: str, given: tuple[Any, ...]) -> None:
    budget.get().spend(len(text) + sum(map(printed_size, given)))


def _rewrites(text: str, given: tuple[Any, ...]) -> None:
    budget.get().make(3 * len(text))  # Changing the letter case can turn one character into three.


def _searches(text: str, given: tuple[Any, ...]) -> None:
    budget.get().spend(_search_size(text, given[0] if given else ""))


def _strips(text: str, given: tuple[Any, ...]) -> None:
    budget.get().make(len(text))
    budget.get().spend(len(text) * (length(given[0]) if given and isinstance(given[0], str) else 1))


def _pads(text: str, given: tuple[Any, ...]) -> None:
    budget.get().make(len(text) + max((number for number in given if isinstance(number, int)), default=0))


def _expands_tabs(text: str, given: tuple[Any, ...]) -> None:
    size = given[0] if given and isinstance(given[0], int) else 8
    budget.get().make(len(text) + text.count("\t") * max(0, size))


def _joins(text: str, given: tuple[Any, ...]) -> None:
    items = given[0] if given else ()
    if isinstance(items, str):
        budget.get().hold(TEXT_BYTES * len(items))
    budget.get().make(len(text) * length(items) + printed_size(items))


def _replaces(text: str, given: tuple[Any, ...]) -> None:
    old, new = (*given[:2], "", "")[:2]
    if not isinstance(old, str) or not isinstance(new, str):
        old, new = "", "x" * max(printed_size(old), printed_size(new))
    budget.get().spend(_search_size(text, old))
    budget.get().make(len(text) + text.count(old) * len(new))


_SPACES = tuple(character for character in map(chr, range(0x3001)) if character.isspace())
_LINE_ENDS = ("\n", "\r", "\v", "\f", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029")


def _splits(text: str, given: tuple[Any, ...]) -> None:
    separator = given[0] if given else None
    if isinstance(separator, str) and separator:
        budget.get().spend(_search_size(text, separator))
        piece_count = text.count(separator) + 1
    else:
        budget.get().spend(8 * len(text))
        piece_count = min(sum(map(text.count, _SPACES)), len(text) // 2) + 1
    budget.get().hold(TEXT_BYTES * piece_count + 4 * len(text))


def _splits_lines(text: str, given: tuple[Any, ...]) -> None:
    budget.get().spend(4 * len(text))
    budget.get().hold(TEXT_BYTES * _line_count(text) + 4 * len(text))


def _line_count(text: str) -> int:
    return sum(map(text.count, _LINE_ENDS)) + 1


_TEXT_METHODS: dict[str, Callable[[str, tuple[Any, ...]], None]] = {
    **dict.fromkeys(("startswith", "endswith", "removeprefix", "removesuffix"), _only_reads),
    **dict.fromkeys(
        ("isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric"), _only_reads
    ),
    **dict.fromkeys(("isprintable", "isspace", "istitle", "isupper"), _only_reads),
    **dict.fromkeys(("capitalize", "casefold", "lower", "swapcase", "title", "upper"), _rewrites),
    **dict.fromkeys(("count", "find", "index", "partition", "rfind", "rindex", "rpartition"), _searches),
    **dict.fromkeys(("lstrip", "rstrip", "strip"), _strips),
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _pads),
    **dict.fromkeys(("rsplit", "split"), _splits),
    "expandtabs": _expands_tabs,
    "format": lambda text, given: budget.get().make(_brace_size(text, given)),
    "format_map": lambda text, given: budget.get().make(_brace_size(text, given)),
    "join": _joins,
    "replace": _replaces,
    "splitlines": _splits_lines,
}


def _charge_items(value: Any, given: tuple[Any, ...]) -> None:
    budget.get().spend(printed_size(value) + sum(map(printed_size, given)))


def _charge_lookup(value: Any, given: tuple[Any, ...]) -> None:
    if given:
        charge_key(given[0])


def _charge_nothing(value: Any, given: tuple[Any, ...]) -> None:
    pass


def _charge_copy(value: Any, given: tuple[Any, ...]) -> None:
    budget.get().make(ITEM_CHARACTERS * length(value))


_OTHER_METHODS: dict[tuple[type, str], Callable[[Any, tuple[Any, ...]], None]] = {
    (dict, "get"): _charge_lookup,
    (dict, "keys"): _charge_nothing,
    (dict, "values"): _charge_nothing,
    (dict, "items"): _charge_nothing,
    (dict, "copy"): _charge_copy,
    (list, "copy"): _charge_copy,
    (list, "count"): _charge_items,
    (list, "index"): _charge_items,
    (tuple, "count"): _charge_items,
    (tuple, "index"): _charge_items,
    (int, "bit_length"): _charge_nothing,
    (float, "is_integer"): _charge_nothing,
}


def charge_call(callee: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> None:
    """Charge a call of a function or method.

    Args:
        callee: The function or method.
        args: Positional arguments.
        options: Keyword arguments.

    Raises:
        TemplateTooCostly: A method of a Python type whose cost is not known, or the budget is used up.
    """
    original = getattr(callee, "__wrapped__", callee)
    receiver = getattr(original, "__self__", None)
    name = getattr(original, "__name__", "")
    given = (*args, *options.values())
    if isinstance(receiver, str):
        charge = _TEXT_METHODS.get(name)
        if charge is None:
            raise TemplateTooCostly(f"it calls str.{name}, whose cost is not known")
        charge(receiver, given)
        if _escape_factor(receiver) > 1:
            budget.get().make(HTML_CHARACTERS_MAX * sum(map(printed_size, given)))
    elif isinstance(original, types.BuiltinFunctionType | types.MethodDescriptorType):
        kind = type(receiver)
        charge_other = _OTHER_METHODS.get((kind, name))
        if charge_other is None:
            raise TemplateTooCostly(f"it calls {kind.__name__}.{name}, whose cost is not known")
        charge_other(receiver, given)
    elif callee is dict:
        _charge_pairs(args)
    elif isinstance(receiver, LoopContext):
        budget.get().spend(sum(map(printed_size, given)))  # The method loop.changed compares its arguments.
    else:
        budget.get().spend(sum(map(length, given)))


def _charge_pairs(args: tuple[Any, ...]) -> None:
    for pairs in args:
        budget.get().make(2 * ITEM_CHARACTERS * length(pairs))
        if not isinstance(pairs, dict):
            for pair in pairs:
                if isinstance(pair, list | tuple) and pair:
                    charge_key(pair[0])


# --- filters --------------------------------------------------------------------------------------------------------


def metered_filter(function: Callable[..., Any], charge: Callable[..., None]) -> Callable[..., Any]:
    """Return a filter that is charged before it runs.

    Args:
        function: The filter.
        charge: Charges a call. Its arguments are the value, and a tuple of all other arguments.
    """
    # The first parameter may be the environment or a context. Jinja marks such a filter with this attribute, which
    # functools.wraps keeps.
    value_index = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def filter_within_bounds(*args: Any, **kwargs: Any) -> Any:
        spent = budget.get()
        spent.step(CALL_STEPS)
        charge(args[value_index], (*args[value_index + 1 :], *kwargs.values()))
        result = function(*args, **kwargs)
        if isinstance(result, Iterator):
            # The items are computed now, within the budget. The next filter also needs their number.
            result = list(result)
        spent.hold_value(result)
        return result

    return filter_within_bounds


def _item_filter(value: Any, given: tuple[Any, ...]) -> None:
    """Charge a filter that returns all items or some items of its value."""
    item_count = length(value)
    # A filter's argument may be an attribute, a path of attributes, or several paths. One lookup takes as long as an
    # iteration of a loop: a missing key raises an exception, and then the sandbox checks whether a template may read
    # such an attribute.
    lookup_count = sum(1 + text.count(".") + text.count(",") if isinstance(text, str) else 1 for text in given)
    budget.get().step(item_count * lookup_count)
    budget.get().spend(ITEM_CHARACTERS // 4 * item_count)
    budget.get().hold((TEXT_BYTES if isinstance(value, str | Mapping) else 8) * item_count)


def _choosing_filter(value: Any, given: tuple[Any, ...]) -> None:
    """Charge a filter that selects items by an attribute.

    Its further arguments are arguments of the test for each item.
    """
    _item_filter(value, given[:1])


def _grouping_filter(value: Any, given: tuple[Any, ...]) -> None:
    _item_filter(value, ())
    _item_filter("", ())
    group_count = max((abs(number) for number in given if isinstance(number, int)), default=0)
    budget.get().make(group_count)
    budget.get().hold(2 * TEXT_BYTES * (min(group_count, 2**32) + length(value)))


def _comparing_filter(value: Any, given: tuple[Any, ...]) -> None:
    item_count = length(value)
    _item_filter(value, given)
    given_size = sum(map(printed_size, given))
    size = printed_size(value) + item_count * given_size
    budget.get().make(size)
    budget.get().spend(size * (1 + math.ceil(math.log2(item_count + 1))))
    # The filter makes one sort key per item and attribute, and converts texts in sort keys to lower case.
    budget.get().hold(TEXT_BYTES * item_count * (1 + given_size // 2) + 4 * size)


def _group_by_filter(value: Any, given: tuple[Any, ...]) -> None:
    _comparing_filter(value, given)
    # The filter looks up the attribute two more times: to separate the groups, and to name the groups.
    for _ in range(2):
        _item_filter(value, given)


def _unique_filter(value: Any, given: tuple[Any, ...]) -> None:
    _comparing_filter(value, given)
    for item in value if not isinstance(value, str) else ():
        charge_key(item)
    if any(isinstance(text, str) for text in given):  # Any value within the items may become a key.
        waiting = [value]
        while waiting:
            item = waiting.pop()
            if isinstance(item, tuple):
                charge_key(item)
            if isinstance(item, list | tuple | dict):
                waiting.extend(item.values() if isinstance(item, dict) else item)


def _sum_filter(value: Any, given: tuple[Any, ...]) -> None:
    _item_filter(value, given)
    if not all(isinstance(item, int | float) for item in (*given, *(value if isinstance(value, list) else ()))):
        # If the items are lists, each addition copies the sum so far.
        size = printed_size(value) + sum(map(printed_size, given))
        budget.get().make(size)
        budget.get().spend(size * length(value))


def _join_filter(value: Any, given: tuple[Any, ...]) -> None:
    _item_filter(value, given)
    budget.get().make(printed_size(value) + length(value) * max(map(printed_size, given), default=0))
    budget.get().hold(TEXT_BYTES * length(value))


def _text_filter(charge: Callable[[str, tuple[Any, ...]], None]) -> Callable[[Any, tuple[Any, ...]], None]:
    """Return a function that charges a filter. The filter applies a method of texts to the printed value.

    Args:
        charge: Charge of the method.
    """

    def charge_text(value: Any, given: tuple[Any, ...]) -> None:
        if not isinstance(value, str):
            size = printed_size(value)
            budget.get().make(size)
            value = str(value)
        charge(value, given)

    return charge_text


def _escapes(text: str, given: tuple[Any, ...]) -> None:
    budget.get().make(len(text) + 4 * sum(map(text.count, "&<>'\"")))


def _indents(text: str, given: tuple[Any, ...]) -> None:
    widths = [number if isinstance(number, int) else length(number) for number in given]
    _splits_lines(text, ())
    budget.get().make(len(text) + (_line_count(text) + 1) * (4 + max(map(abs, widths), default=0)))


def _truncates(text: str, given: tuple[Any, ...]) -> None:
    budget.get().make(len(text) + sum(map(printed_size, given)))


def _rounds(value: Any, given: tuple[Any, ...]) -> None:
    if any(isinstance(number, int) and abs(number) > INTEGER_BITS_MAX // 4 for number in given):
        raise TemplateTooCostly(f"it makes a number of more than {INTEGER_BITS_MAX:,} bits")


def _slow_filter(value: Any, given: tuple[Any, ...]) -> None:
    size = printed_size(value)
    given_size = sum(map(printed_size, given))
    if size + given_size > SLOW_FILTER_CHARACTERS_MAX:
        raise TemplateTooCostly(
            f"it makes a filter work on {size + given_size:,} characters, of which it takes "
            f"{SLOW_FILTER_CHARACTERS_MAX:,} at most"
        )
    budget.get().make((size + 1) * (12 + given_size))
    budget.get().spend(size * size // 2)
    budget.get().hold(TEXT_BYTES * size)


def _json_filter(value: Any, given: tuple[Any, ...]) -> None:
    """Charge nothing, since the filter _tojson in the module template_sandbox charges itself.

    There, the arguments have names.
    """


FILTERS: dict[str, Callable[[Any, tuple[Any, ...]], None]] = {
    **dict.fromkeys(("abs", "attr", "count", "d", "default", "first", "last", "length", "random"), _charge_nothing),
    **dict.fromkeys(("items", "list", "map", "reverse"), _item_filter),
    **dict.fromkeys(("reject", "select"), lambda value, given: _item_filter(value, ())),
    **dict.fromkeys(("rejectattr", "selectattr"), _choosing_filter),
    **dict.fromkeys(("batch", "slice"), _grouping_filter),
    **dict.fromkeys(("dictsort", "max", "min", "sort"), _comparing_filter),
    **dict.fromkeys(("capitalize", "lower", "upper"), _text_filter(_rewrites)),
    **dict.fromkeys(("e", "escape", "forceescape"), _text_filter(_escapes)),
    **dict.fromkeys(("safe", "string"), _text_filter(_only_reads)),
    **dict.fromkeys(("float", "int"), _text_filter(_only_reads)),
    **dict.fromkeys(("filesizeformat", "pprint", "striptags", "title", "urlencode", "urlize"), _slow_filter),
    **dict.fromkeys(("wordcount", "wordwrap", "xmlattr"), _slow_filter),
    "center": _text_filter(_pads),
    # Fields may use named values several times. This charge does not know whether the values have names, so it assumes
    # so.
    "format": _text_filter(lambda text, given: budget.get().make(_percent_size(text, dict(enumerate(given))))),
    "groupby": _group_by_filter,
    "indent": _text_filter(_indents),
    "join": _join_filter,
    "replace": _text_filter(_replaces),
    "round": _rounds,
    "sum": _sum_filter,
    "tojson": _json_filter,
    "trim": _text_filter(_strips),
    "truncate": _text_filter(_truncates),
    "unique": _unique_filter,
}


def charge_json(value: Any, *, ensure_ascii: bool, indent: object, separators: object) -> None:
    """Charge the conversion of a value to JSON. The arguments are those of json.dumps.

    Args:
        ensure_ascii: True if characters other than ASCII are escaped.
        indent: Number of spaces, text of one indentation, or None.
        separators: Pair of separators, or None.

    Raises:
        TemplateTooCostly: The indentation or the separators are too long, or the budget is used up.
    """
    width = 0 if indent is None else indent if isinstance(indent, int) else length(indent)
    if width > JSON_INDENT_MAX:
        raise TemplateTooCostly(f"it indents JSON by more than {JSON_INDENT_MAX}")
    if separators is not None and printed_size(separators) > SHORT_TEXT_CHARACTERS:
        raise TemplateTooCostly("it makes JSON with long separators")
    size = json_size(value, escapes_all=ensure_ascii)
    if indent is not None:
        size += size // ITEM_CHARACTERS * JSON_INDENT_MAX * _depth(value)
    budget.get().make(size)


def _depth(value: Any) -> int:
    """Return how deeply the lists and dictionaries in a value are nested. The size of the value must be bounded."""
    depth = 0
    level = [value]
    while level:
        depth += 1
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list | tuple)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return depth


# --- tests ----------------------------------------------------------------------------------------------------------


def metered_test(function: Callable[..., Any], charge: Callable[..., None]) -> Callable[..., Any]:
    """Return a test of Jinja whose cost is charged before it runs.

    Args:
        function: The test.
        charge: Charges a call. Its arguments are the value, and a tuple of all other arguments.
    """
    value_index = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def test_within_bounds(*args: Any, **kwargs: Any) -> Any:
        charge(args[value_index], (*args[value_index + 1 :], *kwargs.values()))
        return function(*args, **kwargs)

    return test_within_bounds


def _test_of_two(value: Any, given: tuple[Any, ...]) -> None:
    for other in given:
        if compared(value) is not value or compared(other) is not other:
            _charge_comparison(value, other, is_equality=False)


def _test_in(value: Any, given: tuple[Any, ...]) -> None:
    for container in given:
        charge_search(value, container)


def _test_of_text(value: Any, given: tuple[Any, ...]) -> None:
    budget.get().make(printed_size(value))


def _test_name(value: Any, given: tuple[Any, ...]) -> None:
    charge_key(value)


TESTS: dict[str, Callable[[Any, tuple[Any, ...]], None]] = {
    **dict.fromkeys(
        ("boolean", "callable", "defined", "divisibleby", "escaped", "even", "false", "float", "integer", "iterable"),
        _charge_nothing,
    ),
    **dict.fromkeys(("mapping", "none", "number", "odd", "sameas", "sequence", "string", "true"), _charge_nothing),
    "undefined": _charge_nothing,
    **dict.fromkeys(("!=", "<", "<=", "==", ">", ">=", "eq", "equalto", "ge", "greaterthan", "gt"), _test_of_two),
    **dict.fromkeys(("le", "lessthan", "lt", "ne"), _test_of_two),
    **dict.fromkeys(("filter", "test"), _test_name),
    "in": _test_in,
    "lower": _test_of_text,
    "upper": _test_of_text,
}
