"""Tests that BART, mBART, T5 and mT5 compute the log probabilities and tokens of transformers, for any chunks of a
prompt, and that requests of several lengths share a batch.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from trioserve.contracts.errors import ModelLoadError
from trioserve.contracts.media import GivenRows
from trioserve.contracts.prompt import TextProcessing, row_positions
from trioserve.contracts.sampling import SamplingParams
from trioserve.model.loading.checkpoint import open_checkpoint

TOLERANCE = 1e-3
ALL_LOGPROBS = SamplingParams(temperature=0.0, logprobs=20)
NAMES = ("bart", "bart-unusual", "mbart", "t5", "t5-1.1", "t5-silu", "mt5")


@pytest.fixture(scope="module")
def checkpoint_of(tiny_encoder_decoders: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def checkpoint(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            tiny_encoder_decoders.write_checkpoint(made[name], name)
        return made[name]

    return checkpoint


def expected_logprobs(model: Any, text: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    with torch.no_grad():
        out = model(input_ids=torch.tensor([list(text)]), decoder_input_ids=torch.tensor([list(tokens)]))
    found: torch.Tensor = out.logits[0].log_softmax(-1)
    return found


@pytest.mark.parametrize("sizes", [(400,), (5, 1)])
@pytest.mark.parametrize("name", NAMES)
def test_tokens_and_logprobs_equal_those_of_transformers(
    name: str,
    sizes: tuple[int, ...],
    checkpoint_of: Callable[[str], Path],
    step_driver: ModuleType,
    tiny_encoder_decoders: ModuleType,
) -> None:
    path = checkpoint_of(name)
    part = open_checkpoint(path).encoder
    assert part is not None
    assert isinstance(part.processing, TextProcessing)
    runner = step_driver.load_runner(path)
    driver = step_driver.StepDriver(runner)
    draw = np.random.default_rng(7)
    texts = {str(size): draw.integers(0, 256, size).tolist() for size in (1, 4, 7, 50)}
    start, places, found = list(part.processing.start_ids), {}, {}
    for text_name, text in texts.items():
        encoding = runner.row_encoder.begin(np.array(text, dtype=np.int64))
        while not encoding.advance():
            pass
        given = GivenRows(0, len(text), len(text).to_bytes(16, "big"), encoding.rows)
        places[text_name] = row_positions(len(text), runner.block_size)
        driver.add(text_name, [0] * places[text_name] + start, ALL_LOGPROBS, given=(given,))
        found[text_name] = []
    step = 0
    while any(len(entries) < 24 for entries in found.values()):
        size = sizes[step % len(sizes)]
        step += 1
        result = driver.step({each: min(driver.left(each), size) for each in texts if len(found[each]) < 24})
        assert not result.errors
        for each, entry in result.logprobs.items():
            found[each].append(entry)
    runner.close()
    model = tiny_encoder_decoders.model_of(path, name)
    for text_name, text in texts.items():
        output = driver.tokens[text_name][places[text_name] + len(start) :]
        wanted = expected_logprobs(model, text, [*start, *output])[len(start) - 1 :]

        for row, entry in enumerate(found[text_name]):
            assert output[row] == int(wanted[row].argmax())
            for token, logprob in entry.top:
                assert logprob == pytest.approx(float(wanted[row, token]), abs=TOLERANCE)


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("bart", {"is_encoder_decoder": False}, "a decoder without its encoder"),
        ("bart", {"activation_function": "tanh"}, "'tanh'; supported are"),
        ("bart", {"encoder_attention_heads": 5}, "must divide d_model"),
        ("bart", {"decoder_start_token_id": 1000}, "begin the decoder with token 1000"),
        ("t5", {"feed_forward_proj": "gated-tanh"}, "feed_forward_proj .* must be relu, gelu"),
        ("t5", {"relative_attention_num_buckets": 2}, "relative_attention_num_buckets is 2"),
    ],
)
def test_a_config_that_is_not_supported_is_refused_by_its_field(
    name: str, fields: dict[str, object], words: str, checkpoint_of: Callable[[str], Path], tmp_path: Path
) -> None:
    path = tmp_path / "changed"
    shutil.copytree(checkpoint_of(name), path)
    for file in (path / "config.json", path / "generation_config.json"):
        content = json.loads(file.read_text())
        known = fields if file.name == "config.json" else {key: fields[key] for key in fields if key in content}
        file.write_text(json.dumps({**content, **known}))
    with pytest.raises(ModelLoadError, match=words):
        open_checkpoint(path)
