"""Tests of weight replacement in ranks: the orders that are sent, and how answers are handled."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from tests.model.test_weights_in_place import changed
from trioserve.contracts.errors import InvalidRequest, RankLost, WeightsLost
from trioserve.contracts.step import never_abandoned
from trioserve.contracts.weights import BroadcastWeights, ReplacementState, SharedWeights
from trioserve.ranks.messages import Answer, CheckWeights, ConfirmWeights, Refusal, WriteWeights
from trioserve.ranks.ranked_runner import PART_BYTES, RankedWeights
from trioserve.trio_tools.errors_unwrapped import errors_unwrapped

from .test_failures import step

LARGE = PART_BYTES // 2 + 3  # A float32 tensor with so many numbers is sent in three parts.
SENT = BroadcastWeights(names=("a", "b", "c"), dtypes=("float32", "bfloat16", "float32"), shapes=((LARGE,), (2, 3), ()))


class Ranks:
    """Three ranks with given answers.

    Args:
        values: the values of the answers to orders of the type `answered_type`.
        lost_at: index of the order at which the group breaks.
    """

    def __init__(
        self, values: Mapping[int, object] | None = None, *, are_apart: bool = False, lost_at: int = -1
    ) -> None:
        self.are_apart = are_apart
        self.orders: list[Any] = []
        self.while_asked: Callable[[], object] = lambda: None
        self.values = values or {}
        self.answered_type: type[Any] = CheckWeights
        self._lost_at = lost_at

    async def ask(self, make: Callable[[int], Any], **options: bool) -> dict[int, Answer]:
        assert options.pop("is_timed") is False, "reading weights has no time limit"
        order = make(7)
        assert options == ({"may_leave": True, "is_beside": True} if isinstance(order, CheckWeights) else {})
        self.orders.append(order)
        self.while_asked()
        if len(self.orders) - 1 == self._lost_at:
            raise RankLost("rank 1 is gone")
        values = self.values if isinstance(order, self.answered_type) else {}
        return {rank: Answer(7, values.get(rank)) for rank in (2, 0, 1)}  # type: ignore[arg-type]


class Trainer:
    """A group with a trainer, which sends `count` tensors of ones and then stops."""

    def __init__(self, count: int = 100) -> None:
        self.left = count
        self.forgotten: list[str] = []

    def check(self, name: str) -> None:
        assert name == SENT.group_name

    def forget(self, name: str) -> None:
        self.forgotten.append(name)

    def receive(self, name: str, shape: tuple[int, ...], dtype: str) -> Any:
        self.left -= 1
        if self.left < 0:
            raise WeightsLost("it sends nothing")
        return np.ones(shape, dtype=np.float32 if dtype == "float32" else np.uint16)


def place(ranks: Ranks, trainer: Trainer | None = None, **options: Any) -> RankedWeights:
    return RankedWeights(ranks, trainer or Trainer(), **options)  # type: ignore[arg-type]


async def test_all_ranks_check_new_weights_before_any_rank_writes() -> None:
    ranks = Ranks()
    weights = place(ranks)
    replacement = await weights.check("new")
    assert ranks.orders == [CheckWeights(serial=7, offer=1, path=str(Path.cwd() / "new"))]
    assert replacement.state is ReplacementState.CHECKED
    await replacement.replace()
    assert replacement.state is ReplacementState.WHOLE
    await weights.check(SharedWeights("s"))
    assert ranks.orders[1:] == [
        ConfirmWeights(7, 1),
        WriteWeights(7, 1),
        CheckWeights(serial=7, offer=2, shared=SharedWeights("s")),
    ]


async def test_weights_changed_since_the_check_are_not_written() -> None:
    ranks = Ranks()
    replacement = await place(ranks).check("new")
    ranks.answered_type = ConfirmWeights
    ranks.values = {1: Refusal("overwritten", "model_path")}
    with pytest.raises(InvalidRequest, match=r"^rank 1: overwritten$"):
        await replacement.replace()
    assert replacement.state is ReplacementState.CHECKED
    assert not any(isinstance(order, WriteWeights) for order in ranks.orders)


@pytest.mark.parametrize(
    ("reasons", "message"),
    [
        ({0: "no", 1: "no", 2: "no"}, "no"),
        ({2: "no"}, "rank 2: no"),
        ({0: "no", 1: "no", 2: "not so"}, "rank 0: no; rank 1: no; rank 2: not so"),
    ],
)
async def test_weight_update_is_refused_if_one_rank_refuses_it(reasons: dict[int, str], message: str) -> None:
    ranks = Ranks({rank: Refusal(sentence, "model_path") for rank, sentence in reasons.items()})
    with pytest.raises(InvalidRequest) as refusal:
        await place(ranks).check("new")
    assert (str(refusal.value), refusal.value.param) == (message, "model_path")
    assert len(ranks.orders) == 1


async def test_weight_files_that_differ_between_machines_are_refused() -> None:
    for names, is_refused in (({0: "x", 1: "x", 2: "x"}, False), ({0: "x", 1: "x", 2: "y"}, True)):
        ranks = Ranks(names, are_apart=True)
        if is_refused:
            with pytest.raises(InvalidRequest, match="ranks 2 find other weights in /new than rank 0"):
                await place(ranks).check("/new")
        else:
            await place(ranks).check("/new")
        assert ranks.orders == [CheckWeights(serial=7, offer=1, path="/new", is_named=True)]


async def test_weights_of_a_model_with_images_are_not_replaced() -> None:
    ranks = Ranks()
    with pytest.raises(InvalidRequest, match="cannot be replaced: it sees images"):
        await place(ranks, why_fixed="it sees images").check("new")
    assert not ranks.orders


async def test_tensors_of_a_trainer_are_forwarded_to_ranks_in_parts() -> None:
    ranks, trainer = Ranks(), Trainer()
    replacement = await place(ranks, trainer).check(SENT)
    await replacement.replace()
    assert replacement.state is ReplacementState.WHOLE
    assert not trainer.forgotten
    puts = ranks.orders[1:]
    assert [(put.name, len(put.part), put.is_last) for put in puts] == [
        ("a", PART_BYTES, False),
        ("a", PART_BYTES, False),
        ("a", 4 * LARGE - 2 * PART_BYTES, True),
        ("b", 12, True),
        ("c", 4, True),
    ]
    assert b"".join(put.part for put in puts[:3]) == np.ones(LARGE, dtype=np.float32).tobytes()


@pytest.mark.parametrize(("count", "state"), [(0, ReplacementState.CHECKED), (1, ReplacementState.BEGUN)])
async def test_trainer_that_stops_ends_the_update(count: int, state: ReplacementState) -> None:
    ranks, trainer = Ranks(), Trainer(count)
    replacement = await place(ranks, trainer).check(SENT)
    with pytest.raises(WeightsLost, match="sends nothing"):
        await replacement.replace()
    assert replacement.state is state
    assert trainer.forgotten == [SENT.group_name]


async def test_cancelled_update_ends_after_a_whole_tensor() -> None:
    ranks, trainer = Ranks(), Trainer()
    replacement = await place(ranks, trainer).check(SENT)
    with trio.CancelScope() as scope:
        ranks.while_asked = scope.cancel  # The cancel comes while the first part is sent.
        await replacement.replace()
    assert scope.cancelled_caught
    assert [put.is_last for put in ranks.orders[1:]] == [False, False, True]
    assert replacement.state is ReplacementState.BEGUN
    assert trainer.forgotten == [SENT.group_name]


@pytest.mark.parametrize(("source", "lost_at"), [("new", 1), ("new", 2), (SENT, 1)])
async def test_lost_ranks_lose_the_written_weights(source: Any, lost_at: int) -> None:
    ranks = Ranks(lost_at=lost_at)
    replacement = await place(ranks).check(source)
    with pytest.raises(RankLost):
        await replacement.replace()
    assert replacement.state is ReplacementState.GONE


async def test_refusal_of_one_real_rank_changes_no_weights(
    tiny_model: Callable[[str], Path], real_ranks: Any, tmp_path: Path
) -> None:
    old = tiny_model("llama")
    new = changed(old, tmp_path / "new")
    other = tmp_path / "other"
    shutil.copytree(old, other)
    config = json.loads((other / "config.json").read_text(encoding="utf-8"))
    (other / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}), encoding="utf-8")
    with trio.fail_after(60), errors_unwrapped():
        async with real_ranks(old, paths={1: other}) as ranks:
            await ranks.group.load()
            weights = RankedWeights(ranks.group, Trainer())  # type: ignore[arg-type]
            before = await ranks.group.run_step(step(), never_abandoned)
            with pytest.raises(InvalidRequest, match=r"^rank 1: .*norm_eps"):
                await weights.check(str(new))
            with pytest.raises(InvalidRequest, match=r"^rank 0: .*norm_eps"):
                await weights.check(str(other))
            assert await ranks.group.run_step(step(1), never_abandoned) == before
