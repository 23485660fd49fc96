"""Tests that a template beyond its bounds fails only its request, after a short time and with little memory."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.prompt import ChatPrompt
from trioserve.text.templates.chat_template import ChatTemplate

pytestmark = pytest.mark.slow

# Memory of all values that a template may keep, plus the largest value with the widest characters.
MEMORY_BYTES_MAX = 260_000_000

DOUBLED_LIST = "{% set ns = namespace(x=['a']) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"


def render(source: str) -> str:
    return ChatTemplate(source, bos_token=None, eos_token=None).render(
        ChatPrompt(messages=[{"role": "user", "content": "hi"}])
    )


@pytest.fixture(autouse=True)
def _bounded_memory() -> Iterator[None]:
    """Limit the memory.

    Beyond the limit, a template fails with MemoryError, and the test fails because of its message.
    """
    in_use_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (in_use_bytes + MEMORY_BYTES_MAX, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.slow
@pytest.mark.parametrize("source", [
    "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    "{% for a in range(100000) recursive %}{{ loop(range(100000)) }}{% endfor %}",
    "{% for a in [1, 2] recursive %}{% if loop.depth < 60 %}{{ loop([1, 2]) }}{% endif %}{% endfor %}",
    "{% macro f(n) %}{% if n > 0 %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "{% set x %}{% for i in range(100000) %}" + "y" * 10000 + "{% endfor %}{% endset %}",
    "{% set x = ['a' * 1000000] * 15 %}{% for i in range(100000) %}{% set y = x | sort %}{% endfor %}",
    "{% for i in range(100000) %}{% set x = 'a' * 10000000 ~ 'b' %}{% endfor %}",
])  # fmt: skip
def test_a_template_with_endless_work_is_refused(source: str) -> None:
    with pytest.raises(InvalidRequest, match=r"it runs more|it handles more|it makes values|recursion"):
        render(source)


@pytest.mark.slow
@pytest.mark.parametrize("source", [
    "{{ 'a' * 10**10 }}",
    "{% set x = 10**10 * 'a' %}",
    "{{ [1] * 10**9 }}",
    "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    DOUBLED_LIST + "{{ ns.x }}",
    DOUBLED_LIST + "{{ ns.x | tojson }}",
    DOUBLED_LIST + "{{ ns.x | string }}",
    DOUBLED_LIST + "{{ ns.x | pprint }}",
    DOUBLED_LIST + "{{ ns.x ~ '' }}",
    DOUBLED_LIST + "{{ '%s' % ns.x }}",
    DOUBLED_LIST + "{{ '%s' | format(ns.x) }}",
    DOUBLED_LIST + "{{ '{}'.format(ns.x) }}",
    DOUBLED_LIST + "{{ [ns.x] | join }}",
    DOUBLED_LIST + "{{ [[ns.x]] | map('string') | join }}",
    "{{ 'a'.center(10**9) }}",
    "{{ 'a' | center(10**9) }}",
    "{{ 'a'.ljust(10**9) }}",
    "{{ 'a'.zfill(10**9) }}",
    "{{ 'a\t'.expandtabs(10**9) }}",
    "{{ ('a\n' * 30000) | indent(30000) }}",
    "{{ ('a' * 100000).replace('', 'b' * 100000) }}",
    "{{ ('a' * 100000) | replace('a', 'b' * 100000) }}",
    "{{ range(100000) | join('x' * 100000) }}",
    "{{ ('x' * 100000).join(range(90000) | map('string')) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (10**9, 1) }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ '{:>1000000000}'.format(1) }}",
    "{{ '{:>{}}'.format(1, 10**9) }}",
    "{{ strftime_now('%1000000000d') }}",
    "{{ [1] | batch(10**9, 1) }}",
    "{{ [1] | slice(10**9) }}",
    "{{ 1.5 | round(10**9, 'ceil') }}",
    "{{ [1] | tojson(indent=10**9) }}",
    "{{ 2 ** 10 ** 10 }}{{ (10 ** 1000) ** 1000 }}",
    "{% set ns = namespace(x=2) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}",
    "{% set ns = namespace() %}{% set ns.x = [ns] %}{{ ns.x }}",
])  # fmt: skip
def test_a_value_that_would_fill_the_memory_is_refused(source: str) -> None:
    with pytest.raises(InvalidRequest, match=r"it makes|it formats|it indents|it prints|it handles"):
        render(source)


LOOP, END = "{% for i in range(90000) %}", "{% endfor %}"
BIG_LIST, BIG_TEXT = "{% set big = range(99999) | list %}", "{% set big = 'ab' * 4000000 %}"
TWO_DOUBLED = (
    "{% set ns = namespace(x=['a'], y=['a']) %}"
    "{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}"
)
DEEP_TUPLE = "{% set ns = namespace(x=('a',)) %}{% for i in range(90000) %}{% set ns.x = (ns.x,) %}{% endfor %}"

HOSTILE = {
    # These fields have widths of four digits. Each single field is allowed, but not all fields together.
    "width x fields": ("{% set x = ('%(a)9999d' * 20000) % {'a': 1} %}", "it makes a value"),
    "five digits behind a name": ("{% set x = '%(a)1000000000d' % {'a': 1} %}", "it formats"),
    "five digits behind parentheses in a name": ("{% set x = '%((a))1000000000d' % {'(a)': 1} %}", "it formats"),
    "precision x fields": ("{% set x = ('%.9999f' * 20000) % ((1.5,) * 20000) %}", "it makes a value"),
    "escapes x fields": ("{% set x = ('%(a)a' * 1000) % {'a': 'ü' * 100000} %}", "it makes a value"),
    "width x fields in braces": ("{% set x = ('{0:9999}' * 20000).format('x') %}", "it makes a value"),
    "a brace in a field's name": ("{% set x = '{0[{]:9999999}'.format({'{': 'x'}) %}", "it formats"),
    "width x fields of a date": ("{% set x = strftime_now('%9999d' * 20000) %}", "it formats a date"),
    "width x fields in a filter": ("{% set x = ('%9999s' * 5000) | format(*['x'] * 1000) %}", "it makes a value"),
    # These templates search and compare values.
    "in a list": (BIG_LIST + LOOP + "{% if -1 in big %}{% endif %}" + END, "it handles"),
    "in a text": (BIG_TEXT + LOOP + "{% if 'bb' in big %}{% endif %}" + END, "it handles"),
    "not in a text": (BIG_TEXT + LOOP + "{% if 'bb' not in big %}{% endif %}" + END, "it handles"),
    "in, for which each place is tried": (
        "{% set big = 'a' * 4000000 %}{% set n = 'b' ~ 'a' * 99 %}" + LOOP + "{{ n in big }}" + END, "it handles"),
    "is in": (BIG_LIST + LOOP + "{% if -1 is in big %}{% endif %}" + END, "it handles"),
    "select in": (BIG_LIST + "{{ range(90000) | map('string') | select('in', big) | list }}", "it handles"),
    "equal lists": (BIG_LIST + "{% set b = range(99999) | list %}" + LOOP + "{{ b == big }}" + END, "it handles"),
    "equal texts": (BIG_TEXT + "{% set b = 'ab' * 4000000 %}" + LOOP + "{{ b == big }}" + END, "it handles"),
    "a chain of comparisons": (
        BIG_TEXT + "{% set b = 'ab' * 4000000 %}" + LOOP + "{{ '' < b <= big <= b }}" + END, "it handles"),
    "equal lists in lists": (TWO_DOUBLED + "{{ ns.x == ns.y }}", "it makes a value"),
    "is eq": (TWO_DOUBLED + "{{ ns.x is eq(ns.y) }}", "it makes a value"),
    "index": (TWO_DOUBLED + "{{ [ns.x].index(ns.y) }}", "it makes a value"),
    "loop.changed": (
        BIG_LIST + "{% set b = range(99999) | list %}" + LOOP + "{{ loop.changed(b if i is odd else big) }}" + END,
        "it handles"),
    "is upper": ("{% set x = 'a' * 15000000 %}" + LOOP + "{{ x is upper }}" + END, "it handles"),
    # Keys.
    "deep tuple as a key": (DEEP_TUPLE + "{{ {ns.x: 1} }}", "tuples in a tuple"),
    "deep tuple looked up": (DEEP_TUPLE + "{{ {}[ns.x] }}{{ {}.get(ns.x) }}", "tuples in a tuple"),
    "deep tuple in keys": (DEEP_TUPLE + "{{ ns.x in {} }}", "tuples in a tuple"),
    "deep tuple in dict()": (DEEP_TUPLE + "{{ dict([(ns.x, 1)]) }}", "tuples in a tuple"),
    "deep tuple in unique": (DEEP_TUPLE + "{{ [ns.x] | unique | list }}", "tuples in a tuple"),
    "deep tuple as an attribute": (
        DEEP_TUPLE + "{{ [{'a': ns.x}] | unique(attribute='a') | list }}", "tuples in a tuple"),
    "colliding keys": (
        LOOP + "{% set x = {" + ",".join(f"{factor * (2**61 - 1)}: 1" for factor in range(1, 3000)) + "} %}" + END,
        "it handles"),
    # Copies.
    "slices of a text": (BIG_TEXT + LOOP + "{% set x = big[1:] %}" + END, "it makes values|it handles"),
    "slices of a list": (BIG_LIST + LOOP + "{% set x = big[1:] %}" + END, "it makes values|it handles"),
    "replace": (BIG_TEXT + LOOP + "{% set x = big.replace('b', 'c') %}" + END, "it makes values|it handles"),
    "list multiplication": (LOOP + "{% set x = [1] * 1000000 %}" + END, "it makes values|it handles"),
    "a sum of lists": ("{% set x = ([[1] * 1000] * 10000) | sum(start=[]) %}", "it makes a value"),
    "values that are kept": (
        "{% set ns = namespace(x=[]) %}" + LOOP + "{% set ns.x = ns.x + ['a' * 15000000] %}" + END, "it makes values"),
    "wide values that are kept": (
        "{% set ns = namespace(x=[]) %}" + LOOP + "{% set ns.x = ns.x + ['🦆' * 1000000] %}" + END, "it makes values"),
    "blocks that are kept": (
        "{% set ns = namespace(x=[]) %}" + LOOP + "{% set y %}" + "z" * 200000 + "{% endset %}"
        "{% set ns.x = ns.x + [y] %}" + END, "it makes values"),
    "a block of large prints": (
        "{% set b = 'a' * 15000000 %}{% set y %}" + LOOP + "{{ b }}" + END + "{% endset %}", "it makes values"),
    "a macro of large prints": (
        "{% set b = 'a' * 15000000 %}{% macro f() %}" + LOOP + "{{ b }}" + END + "{% endmacro %}{% set y = f() %}",
        "it makes values"),
    "keys less keys": (
        "{% set d = dict(range(90000) | map('string') | batch(2)) %}" + LOOP + "{% set x = d.keys() - d.keys() %}"
        + END, "it handles"),
    # These templates split texts.
    "list of a text": ("{% set x = ('ā' * 15000000) | list %}", "it makes values"),
    "length of a loop over a text": ("{% for c in 'ā' * 15000000 %}{{ loop.length }}{% endfor %}", "it runs"),
    "split": ("{% set x = ('a ' * 7000000).split() %}", "it makes values"),
    "split at commas": ("{% set x = ('a,' * 7000000).split(',') %}", "it makes values"),
    "splitlines": ("{% set x = ('\n' * 15000000).splitlines() %}", "it makes values"),
    "spread arguments": ("{{ dict(*('ā' * 15000000)) }}", "1,024 arguments"),
    "many slices": ("{% set x = [1] | slice(15000000) %}", "it makes values"),
    "many attributes": ("{% set x = range(99999) | sort(attribute='" + "a," * 1000 + "a') %}", "it runs"),
    "a long path of attributes": (
        "{% set x = range(9999) | map(attribute='" + "real." * 900 + "real') | list %}", "it runs"),
    "a long path to choose by": (
        "{% set x = range(9999) | selectattr('" + "real." * 900 + "real') | list %}", "it runs"),
    "numbers that no item has": (
        "{% for i in range(1000) %}{% set x = range(9999) | map(attribute=0) | list %}{% endfor %}", "it runs"),
    "groups of many": (
        "{% for i in range(1000) %}{% set x = range(9999) | groupby('real') %}{% endfor %}", "it runs"),
    # Printing.
    "large numbers in a list": ("{% set x = [2**4000] * 400000 %}{{ x }}", "it makes a"),
    "escapes in a list": ("{{ ['\x01' * 4000000] }}", "it makes a value"),
    "names of macros": (
        "{% macro " + "f" * 90000 + "() %}{% endmacro %}{% set x = [" + "f" * 90000 + "] * 10000 %}{{ x }}",
        "it makes a value"),
    "views": ("{% set d = {'a': 'x' * 1000000} %}{{ [d.items()] * 100 }}", "it makes a value"),
    "HTML": ("{% set x = ('<' * 15000000) | escape %}", "it makes a value"),
    "HTML by itself": ("{% autoescape true %}{{ '<' * 15000000 }}{% endautoescape %}", "it makes a value"),
    "HTML on meeting": ("{% set x = ('<' | safe) + '<' * 10000000 %}", "it makes a value"),
    "a printed reason": (DOUBLED_LIST + "{{ raise_exception(ns.x) }}", "it makes a value"),
    "JSON, indented deeply": (
        "{% set ns = namespace(x=[1] * 5000) %}{% for i in range(400) %}{% set ns.x = [ns.x] %}{% endfor %}"
        "{{ ns.x | tojson(indent=16) }}", "it makes a value"),
    "JSON, indented by a text": ("{{ [1, 2] | tojson(indent='x' * 10000000) }}", "it indents"),
    "JSON, separated": ("{{ range(99999) | list | tojson(separators=('x' * 100000, 'y')) }}", "long separators"),
    "JSON, escaped": ("{{ ('🦆' * 2000000) | tojson(ensure_ascii=true) }}", "it makes a value"),
    # These templates use filters with regular expressions, methods of unknown cost, or large numbers.
    "wordwrap": ("{% set x = ('a' * 1000000) | wordwrap(1) %}", "16,384 at most"),
    "wordwrap with a long break": ("{{ ('a' * 10000) | wordwrap(1, wrapstring='x' * 6000) }}", "it makes a value"),
    "urlize": (LOOP + "{% set x = ('a.' * 8000) | urlize %}" + END, "it handles"),
    "strip": ("{% set x = ('a' * 1000000).strip('b' * 1000000 ~ 'a') %}", "it handles"),
    "to_bytes": ("{{ (5).to_bytes(10**9) }}", "it calls int.to_bytes"),
    "encode": ("{{ 'a'.encode().center(10**9) }}", "it calls str.encode"),
    "translate": ("{{ ('a' * 1000000).translate({97: 'b' * 1000000}) }}", "it calls str.translate"),
    "fromkeys": ("{% set x = dict.fromkeys(range(90000)) %}", "it calls type.fromkeys"),
    "int of another base": ("{% set x = ('v' * 1000000) | int(0, 32) %}", "it makes a number"),
    "round": ("{{ 1.5 | round(1000000, 'ceil') }}", "it makes a number"),
    # These templates have large bodies. An iteration or a call costs as much as all nodes in its body.
    "a long body": (LOOP + "{% set x = 1 %}" * 4000 + END, "it handles"),
    "a long list": (LOOP + "{% set x = [" + "1," * 15000 + "] %}" + END, "it handles"),
    "a long macro": (
        "{% macro f() %}" + "{% set x = 1 %}" * 4000 + "{% endmacro %}" + LOOP + "{{ f() }}" + END, "it handles"),
    "a block in itself": ("{% block b %}{{ self.b() }}{{ self.b() }}{% endblock %}", "recursion"),
    "a long template": ("{% set x = 1 %}" * 15000, "it has more than 20,000"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("source", "said"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_template_is_refused(source: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        render(source)


def test_a_rendered_text_longer_than_any_context_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="its text has more than 16,000,000 characters"):
        render("{% for i in range(2000) %}{{ 'a' * 10000 }}{% endfor %}")


def test_a_range_beyond_jinjas_own_limit_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="Range too big"):
        render("{{ range(10**9) }}")


def test_constant_expressions_are_not_computed_at_compile_time() -> None:
    # This branch is never executed, so no bound at rendering time would apply to its expression.
    assert render("{% if false %}{{ 'a' * 10**12 }}{{ 'a' | center(10**12) }}{% endif %}ok") == "ok"


def test_each_rendering_of_a_template_has_its_own_budget() -> None:
    source = "{% for a in range(90000) %}{% endfor %}done"
    for _ in range(8):
        assert render(source) == "done"


@pytest.mark.slow
def test_rendering_of_a_long_chat_is_well_within_the_bounds() -> None:
    source = (
        "{% for m in messages %}{% set text = m.content | trim %}"
        "{{ '<' ~ m.role ~ '>' + text.replace('\\n', ' ') ~ (m | tojson) }}{% endfor %}"
    )
    messages = [{"role": "user", "content": "some words\n" * 100} for _ in range(3000)]
    text = ChatTemplate(source, bos_token=None, eos_token=None).render(ChatPrompt(messages=messages))
    assert len(text) > 6_000_000


@pytest.mark.parametrize(("source", "text"), [
    ("{% for a in [1, 2, 3] %}{{ loop.index }}/{{ loop.length }}{{ ',' if not loop.last }}{% endfor %}", "1/3,2/3,3/3"),
    ("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% else %}none{% endfor %}", "a1"),
    ("{% for a in [] %}x{% else %}none{% endfor %}", "none"),
    ("{% for a in [1, 2, 3, 4] if a % 2 == 0 %}{{ a }}{% endfor %}", "24"),
    ("{% for a in range(9) %}{% if a == 2 %}{% continue %}{% elif a == 4 %}{% break %}{% endif %}{{ a }}{% endfor %}",
     "013"),
    ("{% for a in [[[], []], []] recursive %}({{ loop(a) }}){% endfor %}", "(()())()"),
    ("{{ 'a' ~ 1 ~ none ~ 2.5 }}", "a1None2.5"),
    ("{{ [3, 1, 2] | sort | reverse | join('-') }}", "3-2-1"),
    ("{{ [{'a': 1}, {'a': 2}] | selectattr('a', 'equalto', 2) | map(attribute='a') | list }}", "[2]"),
    ("{{ '%s is %5.2f' % ('pi', 3.14159) }}", "pi is  3.14"),
    ("{{ '{:>5}|{}'.format(1, 'b') }}", "    1|b"),
    ("{{ 'a\nb' | indent(2) }}{{ 'ab' | upper | replace('A', 'c') }}{{ 7 | round(1) }}", "a\n  bcB7"),
    ("{{ [1] + [2] }}{{ 2 ** 10 }}{{ 7 % 3 }}{{ 'ab' * 2 }}", "[1, 2]10241abab"),
    ("{{ 1 < 2 < 3 }}{{ 1 < 3 < 2 }}{{ 3 < 1 < x.y }}{{ [1] == [1] != [2] }}{{ 'a' < 'b' }}", "TrueFalseFalseTrueTrue"),
    ("{{ 1 in [1, 2] }}{{ 'b' in 'abc' in ['abc'] }}{{ 'k' not in {'k': 1} }}{{ 'a' in nothing }}",
     "TrueTrueFalseFalse"),
    ("{{ [1, 2, 3][1:] }}{{ 'abcd'[::-1] }}{{ 'abcd'[1:-1] }}{{ (1, 2, 3)[:2] }}", "[2, 3]dcbabc(1, 2)"),
    ("{{ 'a,b c'.split(',') }}{{ ' x '.strip() }}{{ 'a\nb'.splitlines() }}{{ 'ab'.replace('a', 'c', 1) }}",
     "['a', 'b c']x['a', 'b']cb"),
    ("{{ {1: 'a', 'b': 2, (1, 2): 3}[(1, 2)] }}{{ {'a': 1}.get('b', 5) }}{{ {'a': 1}.items() | list }}",
     "35[('a', 1)]"),
    ("{% macro f(a) %}{{ a }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ f(*[1, 2], **{'k': 3}) }}", "1(2,){'k': 3}"),
    ("{% set x %}a{{ 1 }}{% endset %}{{ x }}{% set y | upper %}b{% endset %}{{ y }}", "a1B"),
    ("{% filter upper %}a{{ 'b' }}{% endfilter %}", "AB"),
    ("{% macro g() %}<{{ caller() }}>{% endmacro %}{% call g() %}c{% endcall %}", "<c>"),
    ("{{ '%(a)5.1f|%(b)s' % {'a': 1.25, 'b': [1]} }}{{ '%s %s' | format('a', 'b') }}{{ '100%% %s' % 'x' }}",
     "  1.2|[1]a b100% x"),
    ("{{ [1, 2, 2] | unique | list }}{{ [[1], [2]] | sum(start=[]) }}{{ [3, 4] | sum }}{{ 'b' is eq 'b' }}",
     "[1, 2][1, 2]7True"),
    ("{{ {'a': [1, 'x']} | tojson }}{{ [1] | tojson(indent=1) }}{{ {'a': 1} | tojson(separators=(',', ':')) }}",
     '{"a": [1, "x"]}[\n 1\n]{"a":1}'),
    ("{{ dict(a=1) }}{{ namespace(a=2).a }}{{ 'x' is in 'xyz' }}", "{'a': 1}2True"),
])  # fmt: skip
def test_charging_costs_does_not_change_the_output_of_templates(source: str, text: str) -> None:
    assert render(source) == text
