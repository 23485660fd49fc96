"""Tests of embeddings from clients. Prompts with equal tokens and different images get the same responses as when they
run alone.
"""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest

from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.ids import RequestId, root_hash, with_material
from trioserve.contracts.kv_transfer import KVConnector
from trioserve.contracts.media import GivenRows, rows_material
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.sampling import SamplingParams
from trioserve.core import prefix_cache
from trioserve.core.engine import EngineCore
from trioserve.core.settings import CoreSettings
from trioserve.simulation.reference_engine import poor_hash
from trioserve.testing.fake_executor import FakeExecutor, FakeModel
from trioserve.testing.invariants import check_core, check_idle

IMAGE_TOKEN = 200


def rows(start: int, count: int, image: int, *, is_bidirectional: bool = False) -> GivenRows:
    values = array("f", [image + 0.5] * count).tobytes()
    return GivenRows(start, count, bytes([image] * 16), values, is_bidirectional=is_bidirectional)


def request(name: str, tokens: list[int], given: tuple[GivenRows, ...], output: int = 6) -> EngineRequest:
    return EngineRequest(
        id=RequestId(name),
        prompt_token_ids=tuple(tokens),
        sampling=SamplingParams(temperature=0.0, max_tokens=output),
        output_tokens_max=output,
        stop_token_ids=frozenset(),
        seed=0,
        given=given,
    )


def drawn(rng: random.Random, name: str, *, is_bidirectional: bool = False) -> EngineRequest:
    """Return a request with one of a few texts, and one of a few images at one of a few positions."""
    tokens = [rng.randrange(2)] * rng.choice((3, 8, 9))
    given: list[GivenRows] = []
    for _ in range(rng.randrange(3)):
        count = rng.choice((4, 7))
        given.append(rows(len(tokens), count, rng.randrange(2), is_bidirectional=is_bidirectional))
        tokens += [IMAGE_TOKEN] * count + [5] * rng.choice((1, 4))
    return request(name, tokens, tuple(given))


def alone(model: FakeModel, asked: EngineRequest) -> list[int]:
    """Return the response that the request gets in an engine without other requests."""
    core = EngineCore(CoreSettings(block_count=32, block_size=4, context_tokens_max=128, enable_prefix_caching=False))
    executor = FakeExecutor(block_count=32, block_size=4, model=model)
    core.add(asked)
    tokens: list[int] = []
    while (plan := core.schedule(0.0)) is not None:
        result = executor.execute(plan)
        assert result is not None
        for event in core.update_from_output(plan, result, 0.0):
            tokens += getattr(event, "token_ids", ())
    return tokens


def play(seed: int, count: int = 25, *, is_bidirectional: bool = False) -> int:
    """Run `count` random requests. Return how many prompt tokens were found in the cache."""
    rng = random.Random(seed)
    settings = CoreSettings(
        block_count=rng.choice((20, 40)),
        block_size=4,
        context_tokens_max=60,
        max_num_seqs=4,
        step_tokens_max=rng.choice((5, 16)) + 5 * is_bidirectional,
    )
    model = FakeModel()
    core = EngineCore(settings, hash_block=poor_hash if rng.random() < 0.5 else prefix_cache.hash_block)
    executor = FakeExecutor(block_count=settings.block_count, block_size=4, model=model)
    asked: dict[str, EngineRequest] = {}
    said: dict[str, list[int]] = {}
    aborted: set[str] = set()
    while len(asked) < count or list(core.live_requests()):
        if len(asked) < count and rng.random() < 0.5:
            name = f"r{len(asked)}"
            asked[name], said[name] = drawn(rng, name, is_bidirectional=is_bidirectional), []
            core.add(asked[name])
        plan = core.schedule(0.0)
        if asked and rng.random() < 0.1:
            name = rng.choice(list(asked))
            core.abort([RequestId(name)], now=0.0)
            aborted.add(name)
        check_core(core)
        if plan is None:
            continue
        result = executor.execute(plan)
        assert result is not None
        for event in core.update_from_output(plan, result, 0.0):
            said[event.request_id] += getattr(event, "token_ids", ())
        check_core(core)
    check_idle(core)
    for name, tokens in said.items():
        expected = alone(model, asked[name])
        assert tokens == expected[: len(tokens)], name
        assert len(tokens) == len(expected) or name in aborted
    return core.stats().prefix_hit_tokens_total


@pytest.mark.parametrize("seed", range(25))
def test_random_histories_with_images_give_the_right_responses(seed: int) -> None:
    play(seed)


@pytest.mark.parametrize("seed", range(25))
def test_no_chunk_ends_inside_an_image_whose_tokens_attend_to_each_other(seed: int) -> None:
    play(seed, is_bidirectional=True)  # The executor checks the chunks.


def test_image_that_fits_no_step_is_refused() -> None:
    settings = CoreSettings(block_count=32, block_size=4, context_tokens_max=64, max_num_seqs=4, step_tokens_max=9)
    core = EngineCore(settings)
    core.add(request("a", [IMAGE_TOKEN] * 7, (rows(0, 6, 1, is_bidirectional=True),)))
    with pytest.raises(InvalidRequest, match=r"7 tokens that must be computed in one step, .* at most 6 tokens"):
        core.add(request("b", [IMAGE_TOKEN] * 8, (rows(0, 7, 1, is_bidirectional=True),)))


def test_random_histories_hit_the_cache() -> None:
    assert sum(play(seed) for seed in range(5)) > 0


@pytest.mark.parametrize("bug", ["no material", "no place", "not compared"])
def test_prefix_cache_that_confuses_images_is_detected(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if bug == "no material":
        monkeypatch.setattr(prefix_cache, "rows_material", lambda given, start, end: b"")
    elif bug == "no place":

        def without_last(given: Any, start: int, end: int) -> bytes:
            return rows_material(given, start, end - 1)

        monkeypatch.setattr(prefix_cache, "rows_material", without_last)
    else:  # This fault is visible only if hashes collide.
        monkeypatch.setattr(prefix_cache, "with_material", lambda parent, material: parent)
        monkeypatch.setattr(prefix_cache, "rows_material", lambda given, start, end: b"x" if given else b"")
    with pytest.raises(AssertionError):
        for seed in range(25):
            play(seed)


def test_block_hash_input_depends_on_the_embeddings_inside_the_block() -> None:
    given = (rows(3, 6, 1), rows(20, 4, 2))
    assert rows_material(given, 0, 3) == b""
    assert rows_material(given, 0, 4) != rows_material(given, 4, 8) != b""
    assert rows_material(given, 9, 20) == rows_material(given, 24, 30) == b""
    assert rows_material((rows(3, 6, 1),), 0, 4) != rows_material((rows(3, 6, 2),), 0, 4)
    assert rows_material((rows(3, 6, 1),), 0, 4) != rows_material((rows(2, 6, 1),), 0, 4)
    root = root_hash(None)
    assert with_material(root, b"") == root != with_material(root, b"a") != with_material(root, b"b")


def test_requests_with_given_rows_are_hidden_from_connectors() -> None:
    class Counting:
        def __getattr__(self, name: str) -> Any:
            if name in ("progress",):
                return lambda: ()
            raise AssertionError(f"{name} was called")

    connector: KVConnector = Counting()  # type: ignore[assignment]
    core = EngineCore(CoreSettings(block_count=32, block_size=4, context_tokens_max=128), connector=connector)
    executor = FakeExecutor(block_count=32, block_size=4)
    core.add(request("a", [1, 2, 3, *[IMAGE_TOKEN] * 6, 4], (rows(3, 6, 1),)))
    while (plan := core.schedule(0.0)) is not None:
        result = executor.execute(plan)
        assert result is not None
        core.update_from_output(plan, result, 0.0)
    check_idle(core)
    assert core.latest_faults == {}
