"""Tests the memory of connections: what is kept and counted, what is removed at a limit, and that nothing leaks."""

from __future__ import annotations

import random

from trioserve.api.limits import ConnectionSettings
from trioserve.api.responses.stored_responses import KeptMemory, KeptResponses


def items(text: str) -> list[dict[str, str]]:
    return [{"type": "message", "content": text}]


def texts(kept: KeptResponses, response_id: str) -> list[str] | None:
    found = kept.find(response_id)
    return None if found is None else [item["content"] for item in found.conversation]


def opened(memory: KeptMemory | None = None, **limits: int) -> KeptResponses:
    return (memory or KeptMemory(2**30)).open(ConnectionSettings(**limits))


def test_items_of_a_long_conversation_are_counted_once():
    kept = opened()
    for index in range(10):
        kept.keep(f"r{index}", items("x" * 1000), previous_id=f"r{index - 1}" if index else None, earlier=[])
    assert 10_000 < kept.byte_count < 20_000
    assert texts(kept, "r9") == ["x" * 1000] * 10


def test_a_removed_response_keeps_its_items_while_a_later_response_needs_them():
    kept = opened(kept_max=1)
    kept.keep("a", items("one"), previous_id=None, earlier=[])
    bytes_of_one = kept.byte_count
    kept.keep("b", items("two"), previous_id="a", earlier=items("one"))
    assert texts(kept, "a") is None
    assert texts(kept, "b") == ["one", "two"]
    kept.keep("c", items("other"), previous_id=None, earlier=[])
    assert texts(kept, "b") is None
    assert kept.byte_count == bytes_of_one + len("other") - len("one")


def test_earlier_items_are_kept_if_the_connection_does_not_have_the_earlier_response():
    kept = opened()
    kept.keep("b", items("two"), previous_id="stored elsewhere", earlier=items("one"))
    assert texts(kept, "b") == ["one", "two"]


def test_a_conversation_above_the_limit_of_its_connection_is_not_kept():
    kept = opened(kept_bytes_max=3000)
    kept.keep("a", items("x" * 2000), previous_id=None, earlier=[])
    kept.keep("b", items("y" * 2000), previous_id="a", earlier=items("x" * 2000))
    assert (texts(kept, "a"), texts(kept, "b"), kept.byte_count) == (None, None, 0)


def test_connection_with_the_most_bytes_loses_its_oldest_responses_at_the_global_limit():
    memory = KeptMemory(10_000)
    large, small = opened(memory), opened(memory)
    for index in range(5):
        large.keep(f"r{index}", items("x" * 1000), previous_id=None, earlier=[])
    for index in range(3):
        small.keep(f"r{index}", items("x" * 1000), previous_id=None, earlier=[])
    assert memory.byte_count <= 10_000
    assert len(small) == 3
    assert (texts(large, "r0"), texts(large, "r4")) == (None, ["x" * 1000])


def test_random_histories_leave_no_bytes():
    for seed in range(50):
        draw = random.Random(seed)
        memory = KeptMemory(20_000)
        tables = [opened(memory, kept_max=8, kept_bytes_max=8_000) for _ in range(4)]
        for index in range(200):
            kept = draw.choice(tables)
            kept.keep(f"r{index}", items("x" * draw.randrange(2000)), previous_id=f"r{draw.randrange(200)}", earlier=[])
            assert memory.byte_count == sum(table.byte_count for table in tables) <= 20_000
            assert all(len(table) <= 8 and table.byte_count <= 8_000 for table in tables)
        for kept in tables:
            kept.close()
            kept.close()
        assert memory.byte_count == 0
