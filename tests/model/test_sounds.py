"""Tests of tiny language models that hear sounds in chats: parity with transformers, limits, and cancellation."""

from __future__ import annotations

import base64
import io
import json
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import trio

from trioserve.assemble import open_engine
from trioserve.contracts.errors import InvalidRequest, ModelLoadError
from trioserve.contracts.prompt import ChatPrompt
from trioserve.contracts.sampling import SamplingParams
from trioserve.engine.engine import Engine
from trioserve.model.loading.checkpoint import open_checkpoint
from trioserve.testing.accounting import assert_all_free

pytest.importorskip("av")

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=0)
RATE = 16_000
ROWS = 40  # Rows of the encoder in a window of one second.
VOCAB_SIZE = 320
ROW_TOKENS = {"Qwen2Audio": "<|AUDIO|>", "AudioFlamingo3": "<sound>", "Voxtral": "[AUDIO]"}
SPECIAL = ("<unk>", "<|im_start|>", "<|im_end|>", *ROW_TOKENS.values())
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{% for part in message['content'] %}{% if part['type'] == 'audio' %}"
    "SIGN{% else %}{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>{% endfor %}"
)


def write_checkpoint(directory: Path, kind: str) -> None:
    import tokenizers
    import transformers
    from tokenizers import decoders, models, pre_tokenizers

    names = {"width": "d_model", "layers": "encoder_layers", "heads": "encoder_attention_heads"}
    names |= {"middle": "encoder_ffn_dim"}
    if kind != "Qwen2Audio":
        names = {"width": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads"}
        names |= {"middle": "intermediate_size"}
    sizes = {names["width"]: 32, names["layers"]: 3, names["heads"]: 2, names["middle"]: 128}
    texts = {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    texts |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "eos_token_id": 2}
    if kind == "Voxtral":
        texts |= {"head_dim": 16}
    model_class = getattr(transformers, f"{kind}ForConditionalGeneration")
    token = "audio_token_index" if kind == "Qwen2Audio" else "audio_token_id"
    model = model_class(
        model_class.config_class(
            audio_config={"num_mel_bins": 20, "max_source_positions": ROWS, **sizes},
            text_config={"model_type": "llama" if kind == "Voxtral" else "qwen2", **texts},
            **{token: SPECIAL.index(ROW_TOKENS[kind])},
        )
    )
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0.0, 0.3 if "audio_tower" in name else 0.15, generator=generator)
            if "norm.weight" in name:
                parameter.add_(1.0)
    model.save_pretrained(directory)
    extractor = {"chunk_length": 1, "feature_size": 20, "hop_length": 200, "n_fft": 400, "sampling_rate": RATE}
    (directory / "preprocessor_config.json").write_text(json.dumps(extractor))
    alphabet = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = tokenizers.Tokenizer(models.BPE(vocab={one: index for index, one in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(one, special=True, normalized=False) for one in SPECIAL])
    backend.save(str(directory / "tokenizer.json"))
    template = TEMPLATE.replace("SIGN", ROW_TOKENS[kind])
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))


@pytest.fixture(scope="module")
def hearing(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def checkpoint(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            write_checkpoint(made[kind], kind)
        return made[kind]

    return checkpoint


def sound(seconds: float, seed: int = 0) -> npt.NDArray[np.int16]:
    count = int(seconds * RATE)
    noise = np.random.default_rng(seed).normal(0, 1500, count)
    return (noise + 6000 * np.sin(np.arange(count) * (0.1 + 0.05 * seed))).astype(np.int16)


def wav(samples: npt.NDArray[np.int16]) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as written:
        written.setnchannels(1)
        written.setsampwidth(2)
        written.setframerate(RATE)
        written.writeframes(samples.tobytes())
    return file.getvalue()


def chat(*sounds: npt.NDArray[np.int16], text: str = "What is it?") -> ChatPrompt:
    """Return a chat with sounds in the format of OpenAI's API."""
    parts: list[dict[str, Any]] = [
        {"type": "input_audio", "input_audio": {"data": base64.b64encode(wav(one)).decode(), "format": "wav"}}
        for one in sounds
    ]
    return ChatPrompt(messages=[{"role": "user", "content": [*parts, {"type": "text", "text": text}]}])


async def said(engine: Engine, asked: ChatPrompt) -> tuple[list[int], list[float]]:
    tokens: list[int] = []
    logprobs: list[float] = []
    async with engine.generate(asked, GREEDY) as stream:
        async for delta in stream:
            tokens += delta.token_ids
            logprobs += [entry.logprob for entry in delta.logprobs or ()]
    return tokens, logprobs


def expected(path: Path, kind: str, sounds: list[npt.NDArray[np.int16]]) -> tuple[list[int], list[float]]:
    """Return the greedy tokens of transformers, and their log probabilities."""
    import transformers

    extractor = transformers.WhisperFeatureExtractor.from_pretrained(path)
    model = getattr(transformers, f"{kind}ForConditionalGeneration").from_pretrained(path, dtype=torch.float32).eval()
    features, masks, counts = [], [], []
    for samples in sounds:
        values = samples.astype(np.float64) / 2**15
        if kind == "Voxtral":
            filled = np.pad(values, (0, -len(values) % RATE))
            read = extractor(filled, sampling_rate=RATE, return_tensors="pt", truncation=False, padding=False)
            windows = read["input_features"].reshape(20, -1, 2 * ROWS).transpose(0, 1)
            features.append(windows)
            counts.append(ROWS // 4 * len(windows))
            continue
        count = 0
        for first in range(0, len(values), RATE):
            read = extractor(
                values[first : first + RATE], sampling_rate=RATE, return_tensors="pt", return_attention_mask=True
            )
            features.append(read["input_features"])
            masks.append(read["attention_mask"])
            count += int(read["attention_mask"].sum())
        counts.append(((count - 1) // 2 + 1 - 2) // 2 + 1)
    row = SPECIAL.index(ROW_TOKENS[kind])
    backend = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path / "tokenizer.json"))
    tokens = [1]
    for count in counts:
        tokens += [row] * count
    tokens += [*backend.encode("What is it?", add_special_tokens=False), 2]
    inputs: dict[str, Any] = {"input_features": torch.cat(features)}
    if masks:
        name = "feature_attention_mask" if kind == "Qwen2Audio" else "input_features_mask"
        inputs[name] = torch.cat(masks)
    start, logprobs = len(tokens), []
    with torch.no_grad():
        for _ in range(6):
            ids = torch.tensor([tokens])
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs).logits[0, -1]
            tokens.append(int(logits.argmax()))
            logprobs.append(float(logits.log_softmax(-1).max()))
    return tokens[start:], logprobs


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, seconds",
    [
        ("Qwen2Audio", (0.63, 1.0)),
        ("AudioFlamingo3", (2.31,)),
        ("Voxtral", (0.4, 1.7)),
    ],
)
async def test_response_about_sounds_equals_that_of_transformers(
    kind: str, seconds: tuple[float, ...], hearing: Callable[[str], Path]
) -> None:
    sounds = [sound(length, seed) for seed, length in enumerate(seconds)]
    tokens, logprobs = expected(hearing(kind), kind, sounds)
    async with open_engine(str(hearing(kind)), dtype="float32", max_num_seqs=4, max_num_batched_tokens=32) as engine:
        for _ in range(2):  # The second request finds the sounds' embeddings and KV blocks in caches.
            found = await said(engine, chat(*sounds))
            assert found[0] == tokens
            assert found[1] == pytest.approx(logprobs, abs=1e-3)
        assert (await said(engine, chat(*sounds[1:], sound(0.5, 9))))[1] != pytest.approx(logprobs, abs=1e-3)
        assert engine.image_outputs is not None
        assert engine.image_outputs.hit_count >= len(sounds)
        engine.image_outputs.check()
        assert engine.audio_decoder is not None
        assert engine.audio_decoder.bytes_held == 0
        assert_all_free(engine)


@pytest.mark.slow
async def test_sounds_that_a_model_cannot_hear_are_refused(hearing: Callable[[str], Path]) -> None:
    async with open_engine(str(hearing("Qwen2Audio")), dtype="float32", limit_mm_per_prompt={"audio": 1}) as engine:
        for asked, words in (
            (chat(sound(1.5)), "this model hears 1 s: send it in parts"),
            (chat(sound(0.2), sound(0.2)), "2 sounds, at most 1 are allowed"),
            (
                ChatPrompt(messages=[{"role": "user", "content": [{"type": "audio", "audio": b"text"}]}]),
                "which is no audio",
            ),
            (ChatPrompt(messages=[{"role": "user", "content": [{"type": "input_audio"}]}]), r"no input_audio\.data"),
            (
                ChatPrompt(messages=[{"role": "user", "content": [{"type": "image", "image": b"x"}]}]),
                r"content\[0\] is an image",
            ),
        ):
            with pytest.raises(InvalidRequest, match=words):
                await said(engine, asked)
        assert_all_free(engine)


@pytest.mark.slow
async def test_leaving_while_a_sound_is_prepared_frees_everything(hearing: Callable[[str], Path]) -> None:
    async with open_engine(str(hearing("Voxtral")), dtype="float32") as engine:
        with trio.CancelScope() as scope:
            async with engine.generate(chat(sound(3.0)), GREEDY) as stream:
                scope.cancel()
                await stream.wait_until_begun()
        assert engine.audio_decoder is not None
        assert engine.audio_decoder.bytes_held == 0
        assert engine.image_outputs is not None
        engine.image_outputs.check()
        assert_all_free(engine)


@pytest.mark.parametrize(
    "kind, changes, words",
    [
        ("Voxtral", {"projector_hidden_act": "relu"}, "projector_hidden_act in config.json is 'relu'"),
        ("Voxtral", {"audio_token_id": 999}, "audio_token_id in config.json is 999"),
        ("Qwen2Audio", {"audio_config": None}, "config.json has no audio_config"),
    ],
)
def test_damaged_configs_of_sounds_are_refused(
    kind: str, changes: dict[str, Any], words: str, hearing: Callable[[str], Path], tmp_path: Path
) -> None:
    for file in hearing(kind).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ModelLoadError) as caught:
        open_checkpoint(tmp_path)
    assert words in str(caught.value)
