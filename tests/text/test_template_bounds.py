"""A template that runs away ends as that request's error, soon and with little memory."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.prompt import ChatPrompt
from trioserve.text.chat_template import ChatTemplate

MEMORY_BYTES_MAX = 400_000_000  # the largest value allowed, in the widest characters, a few times over

DOUBLED_LIST = "{% set ns = namespace(x=['a']) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"


def render(source: str) -> str:
    return ChatTemplate(source, bos_token=None, eos_token=None).render(
        ChatPrompt(messages=[{"role": "user", "content": "hi"}])
    )


@pytest.fixture(autouse=True)
def _bounded_memory() -> Iterator[None]:
    """Beyond it a template fails with MemoryError, which is another message than the tests expect."""
    in_use_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (in_use_bytes + MEMORY_BYTES_MAX, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


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
def test_endless_work_is_cut_short(source: str) -> None:
    with pytest.raises(InvalidRequest, match=r"it takes more than|it handles more than|recursion"):
        render(source)


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
    "{{ ('x' * 100000).join(range(100000) | map('string')) }}",
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
def test_a_value_that_would_fill_the_memory_is_not_made(source: str) -> None:
    with pytest.raises(InvalidRequest, match=r"it makes a|it formats|it indents|it prints|it handles"):
        render(source)


def test_a_text_longer_than_any_context_is_cut_off() -> None:
    with pytest.raises(InvalidRequest, match="its text has more than 16,000,000 characters"):
        render("{% for i in range(2000) %}{{ 'a' * 10000 }}{% endfor %}")


def test_a_range_beyond_the_sandboxs_own_limit_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="Range too big"):
        render("{{ range(10**9) }}")


def test_constants_are_not_computed_when_a_template_is_compiled() -> None:
    # In a branch that is never taken, a bound at rendering would not help.
    assert render("{% if false %}{{ 'a' * 10**12 }}{{ 'a' | center(10**12) }}{% endif %}ok") == "ok"


def test_each_rendering_has_bounds_of_its_own() -> None:
    source = "{% for a in range(90000) %}{% endfor %}done"
    for _ in range(8):
        assert render(source) == "done"


def test_a_long_chat_is_well_within_the_bounds() -> None:
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
    ("{{ dict(a=1) }}{{ namespace(a=2).a }}{{ 'x' is in 'xyz' }}", "{'a': 1}2True"),
])  # fmt: skip
def test_the_meter_changes_nothing_about_what_templates_mean(source: str, text: str) -> None:
    assert render(source) == text
