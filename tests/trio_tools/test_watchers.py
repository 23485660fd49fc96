"""What is kept for watchers is forgotten when the last one has gone, however it goes."""

from __future__ import annotations

import pytest

from trioserve.trio_tools.watchers import Watchers


def test_what_is_kept_is_forgotten_with_the_last_watcher():
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


def test_a_watcher_that_fails_has_gone():
    forgotten = []
    watchers = Watchers(lambda: forgotten.append(True))
    with pytest.raises(ZeroDivisionError), watchers.watching():
        _ = 1 / 0
    assert not watchers
    assert forgotten == [True]
