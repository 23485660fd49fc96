"""Tests that Whisper's rows, log probabilities and greedy tokens equal those of transformers, for any chunks of a
prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from trioserve.contracts.media import GivenRows
from trioserve.contracts.prompt import row_positions
from trioserve.contracts.sampling import SamplingParams
from trioserve.model.loading.checkpoint import open_checkpoint

TOLERANCE = 1e-3
ALL_LOGPROBS = SamplingParams(temperature=0.0, logprobs=20)


@pytest.fixture(scope="module", params=["usual", "unusual"])
def whisper(request: Any, tiny_whisper: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whisper")
    unusual = {"activation_function": "gelu_new", "scale_embedding": True, "num_mel_bins": 24}
    tiny_whisper.write_checkpoint(path, **(unusual if request.param == "unusual" else {}))
    return path


def encoded(runner: Any, features: Any) -> Any:
    encoding = runner.row_encoder.begin(features)
    while not encoding.advance():
        pass
    return encoding.rows


def expected_logprobs(path: Path, features: Any, tokens: Sequence[int]) -> torch.Tensor:
    from transformers import WhisperForConditionalGeneration

    model: Any = WhisperForConditionalGeneration.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        out = model(input_features=torch.from_numpy(features)[None], decoder_input_ids=torch.tensor([list(tokens)]))
    found: torch.Tensor = out.logits[0].log_softmax(-1)
    return found


@pytest.mark.parametrize("sizes", [(400,), (7,), (33, 1), (64, 3)])
def test_tokens_and_logprobs_equal_those_of_transformers(
    sizes: tuple[int, ...], whisper: Path, step_driver: ModuleType
) -> None:
    runner = step_driver.load_runner(whisper)
    part = open_checkpoint(whisper).encoder
    assert part is not None
    processing = part.processing
    shape = (processing.mel_bins, processing.frame_count)
    driver = step_driver.StepDriver(runner)
    positions = row_positions(processing.row_count, runner.block_size)
    prompts = {
        "one": [
            processing.start_id,
            processing.languages["de"],
            processing.transcribe_id or 0,
            processing.no_timestamps_id,
        ],
        "two": [processing.previous_id, 3, 4, 5, processing.start_id, processing.languages["en"]],
        "three": [processing.start_id],
    }
    sounds = {}
    for seed, (name, prompt) in enumerate(prompts.items()):
        sounds[name] = np.random.default_rng(seed).normal(0.0, 1.0, shape).astype(np.float32)
        rows = encoded(runner, sounds[name])
        given = GivenRows(0, processing.row_count, bytes([seed] * 16), rows)
        driver.add(name, [0] * positions + prompt, ALL_LOGPROBS, given=(given,))
    found: dict[str, list[Any]] = {name: [] for name in prompts}
    step = 0
    while any(len(entries) < 12 for entries in found.values()):
        size = sizes[step % len(sizes)]
        step += 1
        result = driver.step({name: min(driver.left(name), size) for name in prompts if len(found[name]) < 12})
        assert not result.errors
        for name, entry in result.logprobs.items():
            found[name].append(entry)
    for name, prompt in prompts.items():
        output = driver.tokens[name][positions + len(prompt) :]
        wanted = expected_logprobs(whisper, sounds[name], [*prompt, *output])[len(prompt) - 1 :]
        for row, entry in enumerate(found[name]):
            assert output[row] == int(wanted[row].argmax())
            for token, logprob in entry.top:
                assert logprob == pytest.approx(float(wanted[row, token]), abs=TOLERANCE)
    runner.close()


TIMES = 24  # First timestamp.
HISTORIES = [
    (),
    (24,),
    (24, 3),
    (30, 3, 4, 31),
    (30, 3, 4, 31, 31),
    (24, 3, 40, 40, 5, 6),
    (26, 26),
    (3, 4),
    (24, 3, 53),
]


@pytest.mark.parametrize("output", HISTORIES)
@pytest.mark.parametrize("first_max", [None, 5])
@pytest.mark.parametrize("lift", [-6.0, 0.0, 2.0])
def test_speech_rules_allow_the_same_tokens_as_transformers(
    output: tuple[int, ...], first_max: int | None, lift: float
) -> None:
    from transformers import (
        GenerationConfig,
        SuppressTokensAtBeginLogitsProcessor,
        SuppressTokensLogitsProcessor,
        WhisperTimeStampLogitsProcessor,
    )

    from trioserve.contracts.media import SpeechRules
    from trioserve.model.torch_step.sampler import follow_speech_rules_

    rules = SpeechRules(
        end_id=20,
        no_timestamps_id=TIMES - 1,
        has_timestamps=True,
        first_timestamp_max=first_max,
        suppressed_ids=(1, 2, 21),
        begin_suppressed_ids=(5, 20),
    )
    prompt = [22, 21]
    config = GenerationConfig(eos_token_id=20, no_timestamps_token_id=TIMES - 1, max_initial_timestamp_index=first_max)
    processors = (
        SuppressTokensAtBeginLogitsProcessor(rules.begin_suppressed_ids, len(prompt)),
        SuppressTokensLogitsProcessor(rules.suppressed_ids),
        WhisperTimeStampLogitsProcessor(config, begin_index=len(prompt)),
    )
    for seed in range(20):
        logits = torch.randn(56, generator=torch.Generator().manual_seed(seed))
        logits[TIMES:] += lift
        wanted = logits[None].clone()
        for processor in processors:
            wanted = processor(torch.tensor([[*prompt, *output]]), wanted)
        follow_speech_rules_(logits, rules, output)
        assert torch.equal(logits, wanted[0])
