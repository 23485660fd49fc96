"""Tests of positions in a grid (M-RoPE): tokens of images have the positions that transformers gives them, natively and
in torch, for any chunks of a prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from trioserve.contracts.ids import RequestId
from trioserve.contracts.media import GivenRows, rows_material
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.step import ScheduledChunk
from trioserve.model.step_rows import rotary_positions

GRIDS = ((3, 2), (1, 5), (4, 4))
FIRST, BETWEEN, LAST = 5, 3, 9  # tokens of text before, between and after the images
HIDDEN_SIZE = 64
LOGPROB_TOLERANCE = 2e-4
ALL_LOGPROBS = SamplingParams(temperature=0.0, logprobs=20, prompt_logprobs=20)


def images(values: np.ndarray[Any, Any]) -> tuple[GivenRows, ...]:
    """Return the images of GRIDS with texts between them. values: float32 [all tokens of images, HIDDEN_SIZE]."""
    given, start, first = [], FIRST, 0
    for rows, columns in GRIDS:
        count = rows * columns
        own = np.ascontiguousarray(values[first : first + count])
        given.append(GivenRows(start, count, bytes([first] * 16), own, (rows, columns)))
        start, first = start + count + BETWEEN, first + count
    return tuple(given)


def random_values() -> np.ndarray[Any, Any]:
    count = sum(rows * columns for rows, columns in GRIDS)
    return np.random.default_rng(1).normal(size=(count, HIDDEN_SIZE)).astype(np.float32)


def positions(given: tuple[GivenRows, ...], start: int, count: int) -> np.ndarray[Any, Any]:
    """Return the positions of a part of a prompt, int64 [3, count]."""
    request = EngineRequest(
        id=RequestId("a"),
        prompt_token_ids=(1,) * 60,
        sampling=SamplingParams(),
        output_tokens_max=1,
        stop_token_ids=frozenset(),
        seed=0,
        given=given,
    )
    found = rotary_positions(ScheduledChunk(request, (1,) * 60, start, count, (), samples=False))
    return np.broadcast_to(found, (3, count))


def test_position_after_an_image_follows_its_largest_position() -> None:
    given = (GivenRows(2, 6, bytes(16), b"", (2, 3)),)
    assert positions(given, 0, 10).tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],
    ]


def test_positions_are_the_same_for_all_chunks_of_a_prompt() -> None:
    given = images(random_values())
    whole = positions(given, 0, 60)
    for count in (1, 4, 7):
        for start in range(60 - count):
            assert np.array_equal(positions(given, start, count), whole[:, start : start + count]), (start, count)


def test_images_without_a_grid_have_positions_of_texts() -> None:
    assert positions((GivenRows(2, 6, bytes(16), b""),), 1, 20)[1].tolist() == list(range(1, 21))


def test_blocks_with_equal_contents_and_different_grids_differ() -> None:
    wide, high = (GivenRows(2, 6, bytes(16), b"", grid) for grid in ((2, 3), (3, 2)))
    assert rows_material((wide,), 0, 4) != rows_material((high,), 0, 4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2.5-vl", "qwen3-vl"])
def test_logprobs_after_images_equal_those_of_transformers(
    kind: str, cpu_kernels: str, tiny_checkpoint: Callable[..., Path], step_driver: ModuleType
) -> None:
    import transformers

    path = tiny_checkpoint(kind)
    model = transformers.AutoModelForImageTextToText.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    values = random_values()
    given = images(values)
    count = given[-1].end + LAST
    prompt = np.random.default_rng(2).integers(3, 200, size=count).tolist()
    is_image = torch.zeros(1, count, dtype=torch.int)
    for image in given:
        is_image[0, image.start : image.end] = 1
    merge = model.config.vision_config.spatial_merge_size
    grids = torch.tensor([(1, rows * merge, columns * merge) for rows, columns in GRIDS])

    def expected(tokens: list[int]) -> torch.Tensor:
        """Return the logprobs after each token, [tokens, vocabulary]."""
        ids = torch.tensor([tokens])
        kinds = torch.cat((is_image, torch.zeros(1, len(tokens) - count, dtype=torch.int)), 1)
        with torch.no_grad():
            places, _ = model.model.get_rope_index(ids, kinds, image_grid_thw=grids)
            embeds = model.get_input_embeddings()(ids)
            embeds[kinds == 1] = torch.from_numpy(values)
            hidden = model.model.language_model(inputs_embeds=embeds, position_ids=places, use_cache=False)
            return model.lm_head(hidden.last_hidden_state)[0].log_softmax(-1)

    runner = step_driver.load_runner(path, cpu_kernels=cpu_kernels)
    driver = step_driver.StepDriver(runner)
    wanted = expected(prompt)
    for name, size in (("whole", count), ("chunks", 7)):  # Most chunks begin or end inside an image.
        driver.add(name, prompt, ALL_LOGPROBS, given=given)
        entries: list[Any] = []
        while (left := driver.left(name)) > 0 and len(driver.tokens[name]) == count:
            entries.extend(driver.step({name: min(left, size)}).prompt_logprobs[name])
        assert len(entries) == count - 1
        for row, entry in enumerate(entries):
            for token, logprob in ((entry.token_id, entry.logprob), *entry.top):
                assert logprob == pytest.approx(float(wanted[row, token]), abs=LOGPROB_TOLERANCE)
    driver.add("text", prompt[:20])
    driver.step({"text": 20, "whole": 1, "chunks": 1})
    last = [driver.step({"chunks": 1, "text": 1, "whole": 1}) for _ in range(4)][-1]
    for name in ("whole", "chunks"):
        tokens = driver.tokens[name]
        after = expected(tokens[:-1])
        assert tokens[count:] == after[count - 1 :].argmax(-1).tolist()
        for token, logprob in last.logprobs[name].top:
            assert logprob == pytest.approx(float(after[-1, token]), abs=LOGPROB_TOLERANCE)
    runner.close()
