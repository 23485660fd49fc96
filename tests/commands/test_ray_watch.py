"""Tests of reports about the engines of a group. A fake replaces Ray and gives its answers."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import pytest

from trioserve.commands.ray_watch import AGAIN_SECONDS, GroupWatch, Lost


class FakeEngines:
    """Fake calls to Ray about a group.

    Attributes:
        urls: URLs of the existing actors. None if the actor does not accept requests.
        lost: Actors that Ray restarts.
    """

    def __init__(self, **urls: str | None) -> None:
        self.urls: dict[str, str | None] = dict(urls)
        self.lost: set[str] = set()
        self.silent: set[str] = set()
        self._told: dict[tuple[str, int], object] = {}
        self.questions: list[str] = []

    def names(self) -> Sequence[str]:
        return list(self.urls)

    def ask(self, name: str, known: object) -> Hashable:
        self.questions.append(name)
        question = (name, len(self.questions))
        self._told[question] = known
        return question

    def wait(self, questions: Sequence[Hashable], seconds_max: float) -> Sequence[Hashable]:
        assert seconds_max > 0
        return [question for question in questions if self._is_answered(question)]

    def _is_answered(self, question: Hashable) -> bool:
        assert isinstance(question, tuple)
        name = question[0]
        if name in self.silent:
            return False
        return name in self.lost or name not in self.urls or self._told[question] != ("state", self.urls[name])

    def answer(self, question: Hashable) -> tuple[object, str | None]:
        assert isinstance(question, tuple)
        name = question[0]
        if name in self.lost or name not in self.urls:
            raise Lost(name)
        return ("state", self.urls[name]), self.urls[name]


def looked(watch: GroupWatch, now: float = 0.0, times: int = 2) -> tuple[str, ...]:
    for _ in range(times):
        watch.update(now)
    return watch.urls


def test_serving_engines_are_reported_and_each_is_asked_once_per_change():
    engines = FakeEngines(a="http://a:1", b=None)
    watch = GroupWatch(engines)
    assert looked(watch, times=5) == ("http://a:1",)
    assert sorted(engines.questions) == ["a", "a", "b", "b"], "the second question waits for a change"
    engines.urls["b"] = "http://b:1"
    assert looked(watch) == ("http://a:1", "http://b:1")
    engines.urls["a"] = None  # The engine drains, so it reports no URL.
    assert looked(watch) == ("http://b:1",)


def test_dead_engine_is_dropped_at_once_and_returns_at_another_url():
    engines = FakeEngines(a="http://a:1", b="http://b:1")
    watch = GroupWatch(engines)
    looked(watch)
    engines.lost.add("a")
    watch.update(now=1.0)
    assert watch.urls == ("http://b:1",)
    engines.lost.clear()
    engines.urls["a"] = "http://c:7"
    assert looked(watch, now=1.0) == ("http://b:1",), "the engine is not asked again at once"
    assert looked(watch, now=1.0 + AGAIN_SECONDS) == ("http://b:1", "http://c:7")


def test_restarted_engine_returns_at_the_same_url():
    engines = FakeEngines(a="http://a:1")
    watch = GroupWatch(engines)
    looked(watch)
    engines.lost.add("a")
    watch.update(now=1.0)
    assert watch.urls == ()
    engines.lost.clear()
    assert looked(watch, now=2.0) == ("http://a:1",)


def test_removed_engine_is_dropped_and_a_new_one_may_have_its_name():
    engines = FakeEngines(a="http://a:1", b="http://b:1")
    watch = GroupWatch(engines)
    looked(watch)
    del engines.urls["a"]
    assert looked(watch) == ("http://b:1",)
    engines.urls["a"] = "http://a:1"
    assert looked(watch, now=5.0) == ("http://a:1", "http://b:1")


@pytest.mark.parametrize("way", ["answers", "is lost", "is removed"])
def test_first_report_waits_for_every_engine(way):
    engines = FakeEngines(a="http://a:1", b="http://b:1")
    engines.silent.add("b")
    watch = GroupWatch(engines)
    assert not watch.knows_all
    looked(watch)
    assert not watch.knows_all
    engines.silent.clear()
    if way == "is lost":
        engines.lost.add("b")
    elif way == "is removed":
        del engines.urls["b"]
    looked(watch)
    assert watch.knows_all
    assert ("http://b:1" in watch.urls) == (way == "answers")


def test_unknown_group_is_reported_as_empty():
    watch = GroupWatch(FakeEngines())
    looked(watch)
    assert watch.knows_all
    assert watch.urls == ()
