"""Tests which of several models a server loads and unloads."""

from __future__ import annotations

import pytest

from trioserve.contracts.errors import InvalidRequest, Overloaded, StartupError
from trioserve.router.hosted_models import HostedModels, ModelOrder, ModelResize, ModelSpec, ModelState
from trioserve.router.settings import HostedModelsSettings


def models_of(*specs: ModelSpec, memory: int = 2, turn_seconds: float = 10.0) -> HostedModels:
    return HostedModels(HostedModelsSettings(memory_bytes=memory, turn_seconds=turn_seconds), specs)


def spec(name: str, size: int = 1, **fields) -> ModelSpec:
    return ModelSpec(name=name, bytes=size, **fields)


def states(orders: list[ModelOrder]) -> list[tuple[str, str]]:
    return [(order.name, order.state.value) for order in orders]


def load(models: HostedModels, name: str, now: float):
    models.wait(name, now)
    assert states(models.decide(now)) == [(name, "loading")]
    models.on_loaded(name, now + 1)
    return models.lease(name, now + 1)


def test_model_loads_once_for_all_requests_that_wait():
    models = models_of(spec("a"))
    models.wait("a", 0)
    models.wait("a", 0)
    assert states(models.decide(0)) == [("a", "loading")]
    assert models.decide(0) == []
    assert models.lease("a", 0) is None
    models.on_loaded("a", 3)
    assert models.lease("a", 3) is not None
    assert models.lease("a", 3) is not None
    assert models["a"].load_seconds == 3


def test_idle_model_that_loads_faster_is_unloaded_first():
    models = models_of(spec("fast"), spec("slow"), spec("new"))
    models.wait("slow", 0)
    models.decide(0)
    models.on_loaded("slow", 20)
    models.release(models.lease("slow", 20), 20)
    models.release(load(models, "fast", 30), 32)
    models.wait("new", 40)
    [order] = models.decide(40)
    assert (order.name, order.state) == ("fast", ModelState.UNLOADING)
    assert order.reason == "new needs its memory"
    models.on_unloaded("fast", 41)
    assert states(models.decide(41)) == [("new", "loading")]


def test_busy_model_is_unloaded_for_a_waiting_model_after_its_turn_and_its_last_request():
    models = models_of(spec("a"), spec("b"), memory=1)
    lease = load(models, "a", 0)
    models.wait("b", 5)
    assert models.decide(5) == []
    assert models.next_at(5) == 11
    assert models.decide(11) == []
    assert models.next_at(11) == 15
    assert states(models.decide(15)) == [("a", "draining")]
    models.wait("a", 16)
    assert models.lease("a", 16) is None
    models.release(lease, 17)
    assert states(models.decide(17)) == [("a", "unloading")]
    models.on_unloaded("a", 18)
    assert states(models.decide(18)) == [("b", "loading")]


def test_model_drains_no_longer_when_the_waiting_request_left():
    models = models_of(spec("a"), spec("b"), memory=1)
    load(models, "a", 0)
    models.wait("b", 0)
    assert states(models.decide(11)) == [("a", "draining")]
    models.stop_waiting("b", 12)
    assert states(models.decide(12)) == [("a", "loaded")]


def test_load_is_cancelled_when_the_last_request_leaves():
    models = models_of(spec("a"))
    models.wait("a", 0)
    models.decide(0)
    models.stop_waiting("a", 1)
    assert states(models.decide(1)) == [("a", "unloading")]
    models.on_loaded("a", 2)
    assert models["a"].state is ModelState.UNLOADING
    models.on_unloaded("a", 3)
    assert models.held_bytes == 0


def test_failed_load_is_repeated_after_growing_times():
    models = models_of(spec("a"))
    now = 0.0
    for seconds in (5, 10, 20, 40, 80, 160, 300, 300):
        models.wait("a", now)
        assert states(models.decide(now)) == [("a", "loading")]
        models.on_failed("a", now, "no such file")
        models.stop_waiting("a", now)
        with pytest.raises(Overloaded, match="could not be loaded: no such file") as caught:
            models.wait("a", now)
        assert caught.value.retry_after_seconds == seconds
        now += seconds
    load(models, "a", now)
    assert models["a"].failure_count == 0


def test_keep_alive_counts_from_the_end_of_the_last_request():
    models = models_of(spec("a", keep_alive_seconds=30))
    lease = load(models, "a", 0)
    assert models.decide(100) == []
    models.release(lease, 100)
    assert models.next_at(100) == 130
    assert models.decide(129) == []
    [order] = models.decide(130)
    assert (order.state, order.reason) == (ModelState.UNLOADING, "it was idle")


def test_crash_returns_the_leases():
    models = models_of(spec("a"))
    lease = load(models, "a", 0)
    models.on_failed("a", 5, "signal 9")
    assert models.held_bytes == 0
    assert not models["a"].leases
    models.release(lease, 6)
    assert models["a"].used_at == 1


def test_pinned_model_is_loaded_at_the_start_and_after_a_crash():
    models = models_of(spec("a", is_pinned=True, keep_alive_seconds=1), spec("b"), memory=1)
    assert states(models.decide(0)) == [("a", "loading")]
    models.on_loaded("a", 1)
    assert models.decide(100) == []
    with pytest.raises(InvalidRequest, match="b needs 1 bytes of memory, but models may have 0"):
        models.wait("b", 100)
    models.on_failed("a", 100, "signal 9")
    assert states(models.decide(100)) == [("a", "loading")]
    models.on_loaded("a", 101)
    models.on_failed("a", 160, "signal 9")
    assert models.decide(160) == []
    assert models.next_at(160) == 165
    assert states(models.decide(165)) == [("a", "loading")]


def test_more_pinned_models_than_memory_are_refused():
    with pytest.raises(StartupError, match="the pinned models need 3 bytes, but all models together may have 2"):
        models_of(spec("a", 2, is_pinned=True), spec("b", is_pinned=True))


def test_operator_loads_a_failed_model_at_once_and_unloads_it():
    models = models_of(spec("a"))
    models.wait("a", 0)
    models.decide(0)
    models.on_failed("a", 0, "no such file")
    models.stop_waiting("a", 0)
    models.request_load("a", 1)
    assert states(models.decide(1)) == [("a", "loading")]
    models.on_loaded("a", 2)
    assert states(models.request_unload("a", 3)) == [("a", "unloading")]
    assert models.request_unload("a", 3) == []


def test_operator_unloads_a_busy_model_after_its_last_request():
    models = models_of(spec("a"))
    lease = load(models, "a", 0)
    assert states(models.request_unload("a", 3)) == [("a", "draining")]
    assert models.decide(4) == []
    models.release(lease, 5)
    assert states(models.decide(5)) == [("a", "unloading")]


def cached(name: str, size: int = 10, **fields) -> ModelSpec:
    return spec(name, size, kv_blocks=6, kv_blocks_min=2, kv_block_bytes=1, kv_block_tokens=16, **fields)


def test_caches_of_idle_models_become_smaller_before_a_model_is_unloaded():
    models = models_of(cached("a"), cached("b"), spec("c", 7), memory=21)
    models.release(load(models, "a", 0), 1)
    models.release(load(models, "b", 2), 3)
    models.wait("c", 4)
    reason = "c needs its memory"
    assert models.decide(4) == [ModelResize("a", 2, 32, reason), ModelResize("b", 4, 64, reason)]
    assert models.decide(4) == []
    assert models.held_bytes == 20
    models.on_resized("b", 5)
    assert models.decide(5) == []
    models.on_resized("a", 6)
    assert states(models.decide(6)) == [("c", "loading")]
    assert models.held_bytes == 21


def test_idle_model_is_unloaded_if_the_caches_are_not_enough():
    models = models_of(cached("a"), cached("b"), spec("c", 14), memory=20)
    models.release(load(models, "a", 0), 1)
    models.release(load(models, "b", 2), 3)
    models.wait("c", 4)
    assert models.decide(4) == [
        ModelOrder("b", ModelState.SLEEPING, "c needs its memory"),
        ModelOrder("a", ModelState.UNLOADING, "c needs its memory"),
    ]


def test_cache_of_a_busy_model_becomes_larger_again_after_a_turn():
    models = models_of(cached("a"), spec("b", 3), memory=10, turn_seconds=10)
    load(models, "a", 0)
    models.wait("b", 5)
    [order] = models.decide(5)
    assert order == ModelResize("a", 3, 48, "b needs its memory")
    models.on_resized("a", 6)
    models.decide(6)
    models.on_loaded("b", 7)
    models.release(models.lease("b", 7), 8)
    models.request_unload("b", 9)
    models.on_unloaded("b", 10)
    assert (models.decide(10), models.next_at(10)) == ([], 15)
    assert models.decide(15) == [ModelResize("a", 6, 96, "memory is free")]
    assert models.held_bytes == 10


def test_cache_keeps_its_size_if_resizing_it_fails():
    models = models_of(cached("a"), spec("b", 3), memory=10)
    models.release(load(models, "a", 0), 1)
    models.wait("b", 5)
    models.decide(5)
    models.on_resized("a", 6, has_failed=True)
    assert models.held_bytes == 10
    assert states(models.decide(6)) == [("a", "unloading")]


def test_pinned_model_keeps_its_cache():
    models = models_of(cached("a", is_pinned=True), spec("b", 3), memory=10)
    models.decide(0)
    models.on_loaded("a", 1)
    with pytest.raises(InvalidRequest, match="models may have 0"):
        models.wait("b", 2)


def test_one_model_of_a_group_is_loaded_although_memory_is_free():
    models = models_of(spec("a", group="gpu"), spec("b", group="gpu"), spec("c"), memory=10)
    lease = load(models, "a", 0)
    models.wait("b", 5)
    models.wait("c", 6)
    assert states(models.decide(6)) == [("c", "loading")]
    models.on_loaded("c", 7)
    assert models.next_at(7) == 11
    assert models.decide(14.9) == []
    assert models.decide(15) == [ModelOrder("a", ModelState.DRAINING, "b of the same group is needed")]
    models.release(lease, 16)
    assert states(models.decide(16)) == [("a", "unloading")]
    assert [rival.spec.name for rival in models.rivals(models["b"])] == ["a"]
    models.on_unloaded("a", 17)
    assert states(models.decide(17)) == [("b", "loading")]
    models.on_loaded("b", 18)
    models.release(models.lease("b", 18), 18)
    models.wait("a", 19)
    assert states(models.decide(19)) == [("b", "unloading")]


def test_group_of_a_pinned_model_has_no_other_model():
    with pytest.raises(StartupError, match="a is pinned, so that b of the same group is never loaded"):
        models_of(spec("a", is_pinned=True, group="gpu"), spec("b", group="gpu"))


@pytest.mark.parametrize(("earlier_seconds", "first"), [(9.9, "b"), (10.1, "a")])
def test_priority_is_worth_ten_seconds_of_waiting(earlier_seconds, first):
    models = models_of(spec("a"), spec("b", priority=-1), memory=1)
    models.wait("a", 100 - earlier_seconds)
    models.wait("b", 100)
    assert states(models.decide(100)) == [(first, "loading")]


def test_idle_model_of_worse_priority_gives_way_first():
    models = models_of(spec("a", priority=-1), spec("b"), spec("c"))
    models.release(load(models, "a", 0), 1)
    models.release(load(models, "b", 100), 101)
    models.wait("c", 102)
    assert states(models.decide(102)) == [("b", "unloading")]


def test_idle_model_sleeps_if_its_cache_is_enough_and_a_request_wakes_it():
    models = models_of(cached("a"), spec("b", 6), memory=10)
    models.release(load(models, "a", 0), 1)
    models.wait("b", 4)
    assert models.decide(4) == [ModelOrder("a", ModelState.SLEEPING, "b needs its memory")]
    assert models.held_bytes == 10
    models.on_slept("a", 5)
    assert models.held_bytes == 4
    assert states(models.decide(5)) == [("b", "loading")]
    models.on_loaded("b", 6)
    models.release(models.lease("b", 6), 7)
    models.wait("a", 8)
    assert models.lease("a", 8) is None
    assert states(models.decide(8)) == [("b", "unloading")]
    models.on_unloaded("b", 9)
    assert states(models.decide(9)) == [("a", "waking")]
    assert models.held_bytes == 10
    models.on_woken("a", 9.5)
    assert models.lease("a", 9.5) is not None
    assert models["a"].wake_seconds == 0.5


def test_model_that_wakes_slower_than_it_loads_is_unloaded():
    models = models_of(cached("a"), spec("b", 6), memory=10)
    models.release(load(models, "a", 0), 1)
    models.request_sleep("a", 2)
    models.on_slept("a", 3)
    models.request_load("a", 4)
    assert states(models.decide(4)) == [("a", "waking")]
    models.on_woken("a", 6)
    models.wait("b", 7)
    assert states(models.decide(7)) == [("a", "unloading")]


def test_model_in_use_does_not_sleep():
    models = models_of(cached("a"), memory=10)
    load(models, "a", 0)
    with pytest.raises(InvalidRequest, match="the model a cannot sleep now"):
        models.request_sleep("a", 2)


def turns_of(tenants: dict[str, str], count: int) -> list[str]:
    """Return which models are loaded one after another if requests always wait for all models, and one fits.

    Args:
        tenants: tenant of each model.
        count: number of loads.
    """
    models, now, turns = models_of(*map(spec, tenants), memory=1), 0.0, []
    for name, tenant in tenants.items():
        models.wait(name, now, tenant)
    while len(turns) < count:
        [order] = models.decide(now)
        assert order.state is ModelState.LOADING
        name, tenant = order.name, tenants[order.name]
        turns.append(name)
        models.on_loaded(name, now)
        lease = models.lease(name, now, tenant)
        while not (orders := models.decide(now)):
            now = models.next_at(now)
        assert states(orders) == [(name, "draining")]
        models.wait(name, now, tenant)
        models.release(lease, now)
        assert states(models.decide(now)) == [(name, "unloading")]
        now += 1
        models.on_unloaded(name, now)
    return turns


def test_tenant_with_one_model_gets_as_many_turns_as_a_tenant_with_three():
    turns = turns_of({"b1": "b", "b2": "b", "b3": "b", "a1": "a"}, 24)
    assert turns[:8] == ["a1", "b1", "a1", "b2", "a1", "b3", "a1", "b1"]
    assert all(turns.count(name) == 4 for name in ("b1", "b2", "b3"))


def test_models_of_one_tenant_take_turns():
    assert turns_of(dict.fromkeys(("x", "y", "z"), "a"), 7) == ["x", "y", "z", "x", "y", "z", "x"]


def test_model_that_two_tenants_need_has_the_turn_of_the_tenant_that_is_first():
    models = models_of(spec("old"), spec("new"), spec("shared"))
    models.wait("old", 0, "b")
    models.wait("new", 0.5, "b")
    models.wait("shared", 1, "b")
    assert states(models.decide(2)) == [("old", "loading")]
    models.wait("shared", 3, "a")
    models.on_loaded("old", 4)
    models.lease("old", 4, "b")
    assert states(models.decide(4)) == [("shared", "loading")]


def test_tenants_without_waiting_requests_are_forgotten():
    models = models_of(spec("a"))
    for number in range(3):
        models.wait("a", number, str(number))
        models.decide(number)
        models.on_failed("a", number, "broken")
        models["a"].retry_at = number
        models.stop_waiting("a", number, str(number))
    assert len(models._turn_at) <= 1
