"""Tests of the sampling defaults of requests, which come from the checkpoint, a directory and overrides."""

from __future__ import annotations

import json
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from trioserve.assemble import open_engine
from trioserve.assemble_model import GenerationDefaults, generation_defaults
from trioserve.contracts.errors import ModelLoadError, StartupError
from trioserve.contracts.sampling import SamplingParams
from trioserve.model.loading.default_model import recommended_sampling
from trioserve.model.settings import generation_settings

OWN = {"temperature": 0.6, "top_k": 20}


def defaults(
    source: str = "auto", override: object = None, *, own: dict[str, float] | None = None, name: str = "other"
) -> GenerationDefaults:
    config = types.SimpleNamespace(eos_token_ids=(2,), vocab_size=10)
    checkpoint = types.SimpleNamespace(sampling_defaults=OWN if own is None else own, config=config)
    settings = generation_settings(source, override)
    return generation_defaults(checkpoint, settings, recommended=recommended_sampling(name))


def directory(path: Path, **fields: object) -> str:
    (path / "generation_config.json").write_text(json.dumps(fields))
    return str(path)


def test_auto_uses_the_sampling_defaults_of_the_checkpoint():
    assert defaults().sampling == SamplingParams(temperature=0.6, top_k=20)
    assert defaults().eos_token_ids == (2,)


def test_packaged_model_without_sampling_defaults_uses_ours():
    assert defaults(own={}, name="smollm2").sampling == SamplingParams(temperature=0.2, top_p=0.9)
    assert defaults(name="smollm2").sampling == SamplingParams(temperature=0.6, top_k=20)
    assert defaults(own={}).sampling == SamplingParams()


def test_value_vllm_ignores_all_sampling_defaults_of_models():
    assert defaults("vllm", own={}, name="smollm2").named == {}
    assert defaults("vllm").sampling == SamplingParams(temperature=1.0)


def test_directory_replaces_sampling_and_end_tokens_of_the_checkpoint(tmp_path: Path):
    source = directory(tmp_path, top_p=0.5, max_new_tokens=7, eos_token_id=[3, 4])
    assert defaults(source).sampling == SamplingParams(top_p=0.5, max_tokens=7)
    assert defaults(source).eos_token_ids == (3, 4)
    assert defaults(directory(tmp_path, top_p=0.5)).eos_token_ids == (2,)


def test_override_replaces_single_sampling_defaults(tmp_path: Path):
    override = '{"temperature": 0.1, "max_new_tokens": 5}'
    assert defaults("auto", override).sampling == SamplingParams(temperature=0.1, top_k=20, max_tokens=5)
    assert defaults("vllm", {"top_p": 0.3}).sampling == SamplingParams(top_p=0.3)
    assert defaults(directory(tmp_path, top_p=0.5), override).named["top_p"] == 0.5


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ('{"temprature": 1}', "has 'temprature', which it does not accept: did you mean temperature?"),
        ('{"stop": 1}', "has 'stop', which it does not accept: there are: temperature, top_p"),
        ('{"temperature": -1}', "temperature is -1"),
        ('{"top_k": "x"}', "top_k"),
        ("[]", "must be an object like"),
        ("{", "is no JSON"),
    ],
)
def test_wrong_sampling_override_is_refused_before_any_file_is_read(override: str, words: str):
    with pytest.raises(StartupError) as caught:
        generation_settings("auto", override)
    assert str(caught.value).startswith("--override-generation-config")
    assert words in str(caught.value)


def test_wrong_directory_of_sampling_defaults_is_refused_with_one_sentence(tmp_path: Path):
    with pytest.raises(ModelLoadError, match=r"but there is no file .*: name a directory with a"):
        defaults(str(tmp_path))
    with pytest.raises(ModelLoadError, match="names the end tokens 10, but the model's tokens are 0 to 9"):
        defaults(directory(tmp_path, eos_token_id=10))
    with pytest.raises(ModelLoadError, match=r"cannot be used: .*; set another value with --override"):
        defaults(directory(tmp_path, temperature=-3))


def test_end_tokens_of_the_tokenizer_follow_those_of_the_configs():
    found = defaults().with_ends((2, 7, 10), vocab_size=10)
    assert found.eos_token_ids == (2, 7)


@pytest.mark.slow
@pytest.mark.parametrize("named", [None, 2])
async def test_end_token_that_only_the_tokenizer_names_ends_a_response(
    named: int | None, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    for file in tiny_checkpoint("llama").iterdir():
        content = file.read_bytes()
        if file.name in ("config.json", "generation_config.json"):
            content = json.dumps(json.loads(content) | {"eos_token_id": named}).encode()
        (tmp_path / file.name).write_bytes(content)
    async with open_engine(str(tmp_path), dtype="float32", kv_cache_memory=0.01) as engine:
        assert 4 in engine.model.eos_token_ids  # <|im_end|>
