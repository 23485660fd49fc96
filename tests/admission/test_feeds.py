"""Data that only watchers need is dropped when the last watcher has left, normally or with an error."""

from __future__ import annotations

import pytest

from trioserve.admission.feeds import Watchers


def test_data_is_dropped_with_the_last_watcher():
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


def test_watcher_whose_scope_ends_with_an_error_is_no_longer_counted():
    forgotten = []
    watchers = Watchers(lambda: forgotten.append(True))
    with pytest.raises(ZeroDivisionError), watchers.watching():
        _ = 1 / 0
    assert not watchers
    assert forgotten == [True]
