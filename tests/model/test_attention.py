"""Tests that the grouping of rows for attention changes only the speed, and no result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from trioserve.contracts.events import TokenLogprob
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.step import ScheduledChunk
from trioserve.model.torch_step import step_tensors
from trioserve.model.torch_step.formats import Sending
from trioserve.model.torch_step.step_tensors import HeadShape, StepShape, StepTensors, build_step_tensors

HEADS = HeadShape(head_count=4, kv_head_count=2, head_dim=16)
CONTEXTS = {"a": 60, "b": 3, "c": 41, "d": 17, "e": 58, "f": 1}


def logprobs(path: Path, step_driver: ModuleType) -> list[TokenLogprob]:
    """Return logprobs of all prompt tokens, with each prompt in two chunks, and of four decodes of all requests
    together.
    """
    driver = step_driver.StepDriver(step_driver.load_runner(path))
    sampling = SamplingParams(temperature=0.0, logprobs=0, prompt_logprobs=0)
    for name, length in CONTEXTS.items():
        driver.add(name, [(7 * length + 3 * index) % 320 for index in range(length)], sampling)
    entries: list[TokenLogprob] = []
    for counts in ({name: (length + 1) // 3 + 1 for name, length in CONTEXTS.items()}, {}, {}, {}, {}):
        result = driver.step({name: min(counts.get(name, 99), driver.left(name)) for name in CONTEXTS})
        for name in CONTEXTS:
            entries.extend(result.prompt_logprobs[name])
            if name in result.logprobs:
                entries.append(result.logprobs[name])
    return entries


@pytest.mark.parametrize("kind", ("llama", "qwen2-sliding"))
def test_small_and_large_groups_give_equal_logprobs(
    kind: str, tiny_checkpoint: Callable[..., Path], step_driver: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results in float32 may differ only by the order of sums."""
    path = tiny_checkpoint(kind)
    large = logprobs(path, step_driver)
    assert len(large) > sum(CONTEXTS.values())
    for gathered_bytes, part_rows in ((1, 1), (6_000, 7)):
        monkeypatch.setitem(step_tensors.GATHERED_BYTES_MAX, "cpu", gathered_bytes)
        monkeypatch.setitem(step_tensors.PART_ROWS_MAX, "cpu", part_rows)
        small = logprobs(path, step_driver)
        assert [entry.token_id for entry in small] == [entry.token_id for entry in large]
        assert [entry.logprob for entry in small] == pytest.approx([entry.logprob for entry in large], abs=2e-4)


def tensors_of_decodes(positions: list[int], *, window: int | None = None, token_kv_bytes: int = 1) -> StepTensors:
    """Return index tensors of one decode at each position. Blocks have 4 tokens, and sequence i's blocks start at 1000
    * i.
    """
    chunks = []
    for index, position in enumerate(positions):
        request = EngineRequest(
            id=str(index),
            prompt_token_ids=(0,),
            sampling=SamplingParams(),
            output_tokens_max=1,
            stop_token_ids=frozenset(),
            seed=0,
        )
        table = range(1000 * index, 1000 * index + position // 4 + 1)
        chunks.append(ScheduledChunk(request, [0] * (position + 1), position, 1, table, True))
    shape = StepShape(
        block_size=4,
        hidden_size=16,
        token_kv_bytes=token_kv_bytes,
        kinds=((window, HEADS),),
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    sending = Sending(shape.device)
    tensors = build_step_tensors(chunks, shape, sending)
    sending.send()
    return tensors


def table_shapes(tensors: StepTensors, window: int | None = None) -> list[tuple[int, ...]]:
    return [tuple(group.block_table.shape) for group in tensors.attention[window, HEADS].decode_groups]


def test_short_sequences_are_not_padded_to_the_length_of_a_long_sequence() -> None:
    tensors = tensors_of_decodes([100, 4000, 120, 90, 3])
    assert table_shapes(tensors) == [(1, 1001), (3, 31), (1, 1)]
    assert tensors.first_rows == (2, 0, 1, 3, 4)


def test_gathered_kv_bytes_of_a_group_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(step_tensors.GATHERED_BYTES_MAX, "cpu", 100 * 40 * 2)
    assert table_shapes(tensors_of_decodes([39] * 5, token_kv_bytes=100)) == [(2, 10), (2, 10), (1, 10)]


def test_only_blocks_within_the_window_are_gathered() -> None:
    tensors = tensors_of_decodes([4000, 4003, 2], window=8)
    assert table_shapes(tensors, 8) == [(3, 3)]
    tables = tensors.attention[8, HEADS].decode_groups[0].block_table.tolist()
    # Position 4003 sees 3996 to 4003, position 4000 sees 3993 to 4000; blocks hold 4, and the last one pads.
    assert tables == [[1999, 2000, 2000], [998, 999, 1000], [2000, 2000, 2000]]


def test_block_table_is_padded_with_the_sequences_own_block() -> None:
    (group,) = tensors_of_decodes([30, 18]).attention[None, HEADS].decode_groups
    assert group.block_table.tolist() == [list(range(8)), [1000, 1001, 1002, 1003, 1004, 1004, 1004, 1004]]
    assert (group.mask[1, 0, 0] == 0).tolist() == [True] * 19 + [False] * 13
