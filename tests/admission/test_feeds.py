"""Tests that data for watching clients is dropped when the last client has disconnected, normally or with an error."""

from __future__ import annotations

import pytest

from trioserve.admission.feeds import Watchers


def test_data_is_dropped_when_the_last_watcher_leaves():
    forgotten = []
    watchers = Watchers(lambda: forgotten.append(bool(watchers)))
    assert not watchers
    with watchers.watching():
        with watchers.watching():
            assert watchers
        assert watchers
        assert forgotten == []
    assert not watchers
    assert forgotten == [False]


def test_watcher_is_not_counted_after_its_scope_ended_with_an_error():
    forgotten = []
    watchers = Watchers(lambda: forgotten.append(True))
    with pytest.raises(ZeroDivisionError), watchers.watching():
        _ = 1 / 0
    assert not watchers
    assert forgotten == [True]
