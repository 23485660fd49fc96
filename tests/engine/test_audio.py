"""Tests of prompts of sound: which models accept them, and what they become in the core."""

from __future__ import annotations

import pytest

from trioserve.admission.prompt_encoder import PromptEncoder
from trioserve.contracts.errors import ContextTooLong, InvalidRequest
from trioserve.contracts.media import AudioProcessing, AudioPrompt
from trioserve.contracts.prompt import ChatPrompt, EncoderInput, Prompt, TextProcessing
from trioserve.contracts.sampling import SamplingParams
from trioserve.testing.byte_tokenizer import byte_tokenizer
from trioserve.testing.fake_engine import open_fake_engine
from trioserve.testing.inline_work import InlineTexts

AUDIO = AudioProcessing(
    sample_rate=16_000,
    mel_bins=4,
    fft_size=400,
    hop_length=160,
    window_seconds=1,
    frame_count=100,
    row_count=50,
    embedding_size=8,
    tokens_max=32,
    start_id=258,
    end_id=257,
    transcribe_id=None,
    translate_id=None,
    no_timestamps_id=263,
    previous_id=261,
    no_speech_id=262,
    languages={},
    suppressed_ids=(7,),
)


def heard(*token_ids: int, byte_count: int = 1600) -> AudioPrompt:
    return AudioPrompt(features=bytes(byte_count), digest=bytes(16), token_ids=token_ids)


async def test_positions_of_the_sound_come_before_the_tokens() -> None:
    encoder = PromptEncoder(
        byte_tokenizer(), InlineTexts(), vocab_size=300, context_tokens_max=96, encoder=AUDIO, block_size=16
    )
    encoded = await encoder.encode_prompt(heard(258, 263))
    assert encoded.token_ids == [258] * 64 + [258, 263]
    assert encoded.encoder_input == EncoderInput(bytes(1600), bytes(16), 50, 64)


@pytest.mark.parametrize(
    ("prompt", "error", "words"),
    [
        (heard(258, byte_count=400), InvalidRequest, "400 bytes, this model's have 1600"),
        (heard(*[258] * 32), ContextTooLong, "is 32 tokens besides the sound.*has 32"),
        (heard(300), InvalidRequest, "token id 300"),
    ],
)
async def test_audio_prompt_that_does_not_match_the_model_is_refused(
    prompt: AudioPrompt, error: type[InvalidRequest], words: str
) -> None:
    encoder = PromptEncoder(
        byte_tokenizer(), InlineTexts(), vocab_size=300, context_tokens_max=96, encoder=AUDIO, block_size=16
    )
    with pytest.raises(error, match=words):
        await encoder.encode_prompt(prompt)


@pytest.mark.parametrize("fields", [{"token_ids": ()}, {"digest": b"short"}])
def test_sound_without_tokens_or_digest_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest):
        AudioPrompt(**{"features": b"", "digest": bytes(16), "token_ids": (1,), **fields})  # type: ignore[arg-type]


async def test_text_model_refuses_sound_and_rules_of_speech() -> None:
    async with open_fake_engine() as fake:
        with pytest.raises(InvalidRequest, match="accepts only text"):
            async with fake.generate(heard(1)):
                pass
        with pytest.raises(InvalidRequest, match="rules that are not those"):
            async with fake.generate("a", SamplingParams(speech=AUDIO.rules(has_timestamps=True))):
                pass
        fake.assert_all_free()


@pytest.mark.parametrize(
    "prompt", ["abc", [97, 98, 99], ChatPrompt(messages=[{"role": "user", "content": "a"}], chat_template="abc")]
)
async def test_encoder_of_texts_reads_every_kind_of_prompt(prompt: Prompt) -> None:
    reads = TextProcessing(rows_max=8, tokens_max=32, embedding_size=8, start_ids=(258, 1))
    encoder = PromptEncoder(
        byte_tokenizer(), InlineTexts(), vocab_size=300, context_tokens_max=96, encoder=reads, block_size=4
    )
    encoded = await encoder.encode_prompt(prompt, add_special_tokens=False)
    assert encoded.token_ids == [258] * 4 + [258, 1]
    assert encoded.encoder_input is not None
    assert encoded.encoder_input.row_count == 3
    assert await encoder.encode(prompt, add_special_tokens=False) == [97, 98, 99]
    with pytest.raises(ContextTooLong, match="8 tokens"):
        await encoder.encode_prompt([1] * 9)
