"""Turns prompts into token ids, and token ids into text, without blocking the event loop.

Short texts are processed at once, and long texts in a text thread. A text that cannot fit into the model's context is
refused before it is tokenized.
"""

from __future__ import annotations

import functools
import operator
from array import array
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from hashlib import blake2b
from typing import Any, NamedTuple, TypeVar

import msgspec

from trioserve.admission.file_decoders import AudioDecoder
from trioserve.admission.text_threads import LONG_CHARACTERS_MAX, TextRunner
from trioserve.contracts.arguments import refuse, shown
from trioserve.contracts.errors import ContextTooLong, InvalidRequest
from trioserve.contracts.media import AudioProcessing, AudioPrompt
from trioserve.contracts.pooling import LabelledPrompt, PoolingInput, TextPair
from trioserve.contracts.prompt import (
    ChatPrompt,
    Cut,
    EncoderInput,
    Processing,
    Prompt,
    TextProcessing,
    row_positions,
)
from trioserve.text.control_tokens import ChatText
from trioserve.text.response_parsers.registry import COMMON_TOOL_FAMILY
from trioserve.text.templates.chat_template import ChatTemplate
from trioserve.text.tokenizer import EncodedInput, Tokenizer
from trioserve.trio_tools.media_fetcher import MediaFetcher
from trioserve.vision.image_prompt import (
    ImageReader,
    ImageSource,
    MediaReader,
    PromptImage,
    ReadImage,
    SoundReader,
    split_media,
)

__all__ = ["NO_AUDIO", "EncodedPrompt", "PromptEncoder", "unread_medium"]

# Work is measured in characters. One character takes about a microsecond.
# This much work takes less than a millisecond. More work in the event loop would delay every request.
INLINE_CHARACTERS_MAX = 1000
TOKEN_CHARACTERS = 1  # The work of checking one token id, in characters.
VALUE_CHARACTERS = 8  # The work of a JSON value that is not text, in characters.
# Number of values that are counted in a chat, which takes up to 2 ms. A chat with more values counts as LONGEST.
CHAT_VALUES_MAX = 8192
LONGEST = LONG_CHARACTERS_MAX + 1
IMAGE_CHARACTERS = 2000  # The work of an image, in characters, in addition to the work of its bytes.
IMAGE_BYTES_PER_CHARACTER = 200  # Number of image bytes that are decoded in a microsecond.
NO_AUDIO = "this model accepts only text, and the prompt is sound: send text"
UTF8_BYTES_MAX = 4  # The most bytes of one character.
INPUT_CHARACTERS = 30  # The smallest work of one input in a list of inputs.
# Many inputs are encoded in pieces of this work. A cancelled caller does not stop the current piece.
PIECE_CHARACTERS = 32_768

T = TypeVar("T")


class EncodedPrompt(NamedTuple):
    """Token ids of a prompt, and its images or what an encoder reads.

    Attributes:
        token_ids: The tokens. For a model with an encoder, these are one placeholder for each position of the encoder's
            rows, and the decoder's tokens.
        images: Images or sounds in the order of the prompt. Their embeddings are not computed yet.
        encoder_input: Sound or text whose rows are not computed yet. None: the model has no encoder.
    """

    token_ids: list[int]
    images: tuple[PromptImage, ...] = ()
    encoder_input: EncoderInput | None = None


class PromptEncoder:
    """Encodes the prompts of one model.

    A prompt that cannot fit into the model's context is refused before it is tokenized. Any other prompt is encoded,
    and the caller compares its token count with the context. The check assumes that every token of a text is as long as
    the longest token of the vocabulary. So a text that fits is never refused.

    Args:
        tokenizer: The model's tokenizer.
        texts: Runs the work of long texts in threads.
        vocab_size: Number of token ids.
        context_tokens_max: The model's context, in tokens.
        tool_family: Format of tools and tool calls. It is used if the chat template does not render tools. None for the
            common format.
        images: Reads the images of chats. None if the model takes no images.
        sounds: Reads the sounds of chats. None if the model hears none.
        audio_decoder: Measures the length of sounds. None if the model hears none.
        media: Fetches images by URL. None if this is not allowed.
        encoder: How the model reads sound or text with its encoder. None if the model has none.
        block_size: Positions of a KV block. Rows of the encoder fill whole blocks.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        texts: TextRunner,
        *,
        vocab_size: int,
        context_tokens_max: int,
        tool_family: str | None = None,
        images: ImageReader | None = None,
        sounds: SoundReader | None = None,
        audio_decoder: AudioDecoder | None = None,
        media: MediaFetcher | None = None,
        encoder: Processing | None = None,
        block_size: int = 1,
    ) -> None:
        self._images = images
        self._sounds = sounds
        self._audio_decoder = audio_decoder
        self._encoder = encoder
        self._block_size = block_size
        self._media = media
        self._tokenizer = tokenizer
        self._texts = texts
        self._tenant: str | None = None
        self._vocab_size = vocab_size
        self._context_tokens_max = context_tokens_max
        if isinstance(encoder, TextProcessing):  # Only the encoder reads prompts.
            self._context_tokens_max = encoder.rows_max
        self._tool_family = tool_family or COMMON_TOOL_FAMILY

    def of_tenant(self, tenant: str | None) -> PromptEncoder:
        """Return a copy of this encoder whose long texts count as texts of one tenant.

        Args:
            tenant: See TextRunner.
        """
        encoder = copy(self)
        encoder._tenant = tenant
        return encoder

    async def encode(self, prompt: Prompt, *, add_special_tokens: bool = True, cut: Cut | None = None) -> list[int]:
        """Return the token ids of a prompt. If the caller is cancelled, it returns at once.

        For a model with an encoder of texts, these are the tokens that the encoder reads.

        Args:
            prompt: Text, token ids or a chat.
            add_special_tokens: True to add the tokenizer's special tokens to a text.
            cut: How a prompt that is too long is truncated. None to refuse such a prompt.

        Raises:
            InvalidRequest: the prompt is not valid.
            ContextTooLong: the prompt cannot fit into the model's context.
        """
        encoded = await self.encode_prompt(prompt, add_special_tokens=add_special_tokens, cut=cut)
        if isinstance(self._encoder, TextProcessing) and encoded.encoder_input is not None:
            return memoryview(encoded.encoder_input.content).cast("q").tolist()  # type: ignore[arg-type]  # it is bytes
        return encoded.token_ids

    async def encode_prompt(
        self, prompt: Prompt, *, add_special_tokens: bool = True, cut: Cut | None = None
    ) -> EncodedPrompt:
        """Return the token ids, media and encoder's input of a prompt. If the caller is cancelled, it returns at once.

        Only the headers of images are read. Damage after the header is detected later, when the image is decoded.
        A sound is decoded, because its length decides its number of tokens.

        Args:
            prompt: Text, token ids, a chat, or sound.
            add_special_tokens: See `encode`.
            cut: See `encode`. Not allowed with images or sounds.

        Raises:
            InvalidRequest: the prompt is not valid.
            ContextTooLong: the prompt cannot fit into the model's context.
        """
        if isinstance(prompt, AudioPrompt):
            return self._encode_audio(prompt)
        if isinstance(prompt, ChatPrompt):
            messages, sources = split_media(prompt.messages)
            if sources:
                return await self._encode_with_media(msgspec.structs.replace(prompt, messages=messages), sources, cut)
        if isinstance(prompt, ChatPrompt) and cut is None:
            token_ids = await self.run(functools.partial(self._encode_chat, prompt), size=_chat_size(prompt))
        else:
            token_ids = await self._encode_texts(prompt, add_special_tokens=add_special_tokens, cut=cut)
        if isinstance(self._encoder, TextProcessing):
            return self._read_by_encoder(token_ids, self._encoder)
        return EncodedPrompt(token_ids)

    def _read_by_encoder(self, token_ids: list[int], encoder: TextProcessing) -> EncodedPrompt:
        """Return the decoder's first tokens after one placeholder for each position of the encoder's rows."""
        if not token_ids:
            raise InvalidRequest("the prompt is empty: the encoder needs at least one token", param="prompt")
        if len(token_ids) > encoder.rows_max:
            raise ContextTooLong(
                f"This model's encoder reads {encoder.rows_max} tokens, and the prompt has {len(token_ids)} tokens: "
                "shorten it",
                param="prompt",
            )
        content = array("q", token_ids).tobytes()
        return self._with_rows(content, blake2b(content, digest_size=16).digest(), len(token_ids), encoder.start_ids)

    def _with_rows(self, content: object, digest: bytes, row_count: int, token_ids: Sequence[int]) -> EncodedPrompt:
        positions = row_positions(row_count, self._block_size)
        read = EncoderInput(content, digest, row_count, positions)
        return EncodedPrompt([*[token_ids[0]] * positions, *token_ids], encoder_input=read)

    def _encode_audio(self, prompt: AudioPrompt) -> EncodedPrompt:
        """Return the decoder's tokens after one placeholder for each position of the encoder's rows."""
        audio = self._encoder
        if not isinstance(audio, AudioProcessing):
            raise InvalidRequest(NO_AUDIO, param="prompt")
        size, allowed = memoryview(prompt.features).nbytes, 4 * audio.mel_bins * audio.frame_count  # type: ignore[arg-type]
        if size != allowed:
            raise InvalidRequest(
                f"the features have {size} bytes, this model's have {allowed}: float32 [{audio.mel_bins}, "
                f"{audio.frame_count}]",
                param="prompt",
            )
        token_ids = self._checked(prompt.token_ids)
        if len(token_ids) >= audio.tokens_max:
            raise ContextTooLong(
                f"This model's maximum context length is {audio.tokens_max} tokens besides the sound, with at least "
                f"one of response, and the prompt has {len(token_ids)} tokens: shorten it",
                param="prompt",
            )
        return self._with_rows(prompt.features, prompt.digest, audio.row_count, token_ids)

    async def _encode_texts(
        self, prompt: str | Sequence[int] | ChatPrompt, *, add_special_tokens: bool, cut: Cut | None
    ) -> list[int]:
        if cut is not None:
            [encoded] = await self.encode_inputs(
                [prompt], name_of=lambda _: "prompt", add_special_tokens=add_special_tokens, cut=cut
            )
            return encoded.token_ids
        assert not isinstance(prompt, ChatPrompt), "encoded by encode_prompt"
        if isinstance(prompt, str):
            return await self.run(
                lambda: self._encode_text(prompt, add_special_tokens=add_special_tokens, param="prompt"),
                size=len(prompt),
            )
        if len(prompt) > self._context_tokens_max:
            raise ContextTooLong(
                f"This model's maximum context length is {self._context_tokens_max} tokens, and the prompt has "
                f"{len(prompt)} tokens: shorten it, or raise max_model_len",
                param="prompt",
            )
        return await self.run(lambda: self._checked(prompt), size=len(prompt) * TOKEN_CHARACTERS)

    async def encode_inputs(
        self,
        inputs: Sequence[PoolingInput],
        *,
        name_of: Callable[[int], str],
        add_special_tokens: bool = True,
        cut: Cut | None = None,
    ) -> list[EncodedInput]:
        """Encode many inputs, in short pieces. Between two pieces, the thread can process texts of other requests.

        Args:
            inputs: Prompts, pairs of texts, or prompts with labels.
            name_of: Returns the name of an input for error messages, by index.
            add_special_tokens: See `encode`.
            cut: See `encode`.

        Raises:
            InvalidRequest: an input is not valid. The message names the input.
            ContextTooLong: an input cannot fit into the model's context. The message names the input.
        """
        encoded: list[EncodedInput] = []

        def encode_piece(first: int, piece: Sequence[PoolingInput]) -> list[EncodedInput]:
            return [
                self._encode_input(one, name_of(first + place), add_special_tokens, cut)
                for place, one in enumerate(piece)
            ]

        while len(encoded) < len(inputs):
            first, size = len(encoded), 0
            end = first
            while end < len(inputs) and (end == first or size < PIECE_CHARACTERS):
                size += INPUT_CHARACTERS + _input_size(inputs[end])
                end += 1
            piece = inputs[first:end]
            encoded += await self.run(functools.partial(encode_piece, first, piece), size=size)
        return encoded

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids.

        Args:
            skip_special_tokens: True to leave special tokens out.

        Raises:
            InvalidRequest: the model has no such token id.
        """
        return await self.run(
            lambda: self._tokenizer.decode(self._checked(token_ids), skip_special_tokens=skip_special_tokens),
            size=len(token_ids) * TOKEN_CHARACTERS,
        )

    async def run(self, function: Callable[[], T], *, size: int) -> T:
        """Call a function at once if its work is small. Otherwise call it in a text thread.

        Args:
            function: The function. It must not use state of the event loop.
            size: Estimated work of the function, see TextRunner.
        """
        if size <= INLINE_CHARACTERS_MAX:
            return function()
        return await self._texts.run(function, size=size, tenant=self._tenant)

    def _encode_input(self, one: PoolingInput, name: str, add_special_tokens: bool, cut: Cut | None) -> EncodedInput:
        try:
            if isinstance(one, LabelledPrompt):
                return self._encode_labelled(one)
            if isinstance(one, ChatPrompt):
                return _cut_ids(self._encode_chat(one, is_cut=cut is not None), cut)
            if isinstance(one, str | TextPair):
                first, second = (one, None) if isinstance(one, str) else (one.first, one.second)
                for text in (first, second or "") if cut is None else ():
                    self._check_length(text, param=name)
                return self._tokenizer.encode_input(first, second, add_special_tokens=add_special_tokens, cut=cut)
            if isinstance(one, AudioPrompt):
                raise InvalidRequest("sound is transcribed, and no vector is computed from it: send text", param=name)
            return _cut_ids(self._checked(one), cut)
        except InvalidRequest as error:
            raise type(error)(f"{name}: {error}", param=name) from error

    def _encode_labelled(self, one: LabelledPrompt) -> EncodedInput:
        text = self._chat_text(one.prompt) if isinstance(one.prompt, ChatPrompt) else one.prompt
        self._check_length(text if isinstance(text, str) else text.plain, param="prompt")
        return self._tokenizer.encode_labelled(text, one.labels, add_special_tokens=isinstance(text, str))

    def _encode_chat(self, prompt: ChatPrompt, *, is_cut: bool = False) -> list[int]:
        chat = self._chat_text(prompt)
        if not is_cut:
            self._check_length(chat.plain, param="messages")
        # The template writes the special tokens itself.
        # Only the rendered text is checked, because the template may omit parts of the messages.
        return self._tokenizer.encode_chat(chat)

    async def _encode_with_media(
        self, marked: ChatPrompt, sources: list[ImageSource], cut: Cut | None
    ) -> EncodedPrompt:
        for source in sources:
            if (self._sounds if source.is_sound else self._images) is None:
                raise unread_medium(source)
        if cut is not None:
            raise InvalidRequest(
                "truncate_prompt_tokens is set, but a prompt with images or sounds cannot be truncated: leave it out",
                param="truncate_prompt_tokens",
            )
        size = _chat_size(marked)
        if (sounds := self._sounds) is not None:
            sounds.check_count(sources)
            read = [await self._measured(source, sounds) for source in sources]
            return await self.run(lambda: self._encode_with_images(marked, read, sounds), size=size)
        images = self._images
        assert images is not None, "no family reads both images and sounds"
        images.check_count(sources)
        if self._media is not None:
            sources = [await _fetched(source, self._media) for source in sources]
        size += sum(map(_image_size, sources))
        return await self.run(lambda: self._encode_with_images(marked, images.read(sources), images), size=size)

    async def _measured(self, source: ImageSource, reader: SoundReader) -> ReadImage:
        assert self._audio_decoder is not None, "a model that hears sounds has a decoder of them"
        content = await self.run(functools.partial(reader.content_of, source), size=_image_size(source))
        seconds = await self._audio_decoder.seconds(content, reader.processing, source.place, tenant=self._tenant or "")
        return reader.read(source.place, content, seconds)

    def _encode_with_images(
        self, prompt: ChatPrompt, images: Sequence[ReadImage], reader: MediaReader
    ) -> EncodedPrompt:
        chat = self._chat_text(prompt)
        chat = chat._replace(text=reader.expand(chat.text, images))
        self._check_length(chat.plain, param="messages")
        token_ids = self._tokenizer.encode_chat(chat)
        return EncodedPrompt(token_ids, reader.locate(token_ids, images))

    def _chat_text(self, prompt: ChatPrompt) -> ChatText:
        tokenizer = self._tokenizer
        template = tokenizer.chat_template
        if prompt.chat_template is not None:
            template = ChatTemplate(prompt.chat_template, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)
        if template is None:
            raise InvalidRequest(
                "this model has no chat template: use completions with a prompt, or send a chat_template",
                param="messages",
            )
        return tokenizer.render(template, prompt, tool_family=self._tool_family)

    def _encode_text(self, text: str, *, add_special_tokens: bool, param: str) -> list[int]:
        self._check_length(text, param=param)
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _check_length(self, text: str, *, param: str) -> None:
        if len(text) * UTF8_BYTES_MAX <= self._context_tokens_max:
            return  # A token has at least one byte, so most texts fit without counting.
        token_count_min = self._tokenizer.token_count_min(text)
        if token_count_min > self._context_tokens_max:
            raise ContextTooLong(
                f"This model's maximum context length is {self._context_tokens_max} tokens, and the prompt has "
                f"{len(text)} characters, which are at least {token_count_min} tokens: shorten it, or raise "
                "max_model_len",
                param=param,
            )

    def _checked(self, token_ids: Sequence[int]) -> list[int]:
        try:
            # A float would pass the range check, and would make a later step fail.
            checked = list(map(operator.index, token_ids))
        except TypeError:
            wrong = next((token_id for token_id in token_ids if not _is_whole(token_id)), token_ids)
            refuse("prompt", wrong, "a list of token ids (int)", verb="holds")
        if checked and not (min(checked) >= 0 and max(checked) < self._vocab_size):
            token_id = next(token_id for token_id in checked if not 0 <= token_id < self._vocab_size)
            raise InvalidRequest(
                f"the prompt has token id {shown(token_id)}, this model's are 0 to {self._vocab_size - 1}",
                param="prompt",
            )
        return checked


def unread_medium(source: ImageSource) -> InvalidRequest:
    """Return the error for an image or a sound that the model does not read.

    Args:
        source: the image or sound.
    """
    what = "a sound, and this model hears none" if source.is_sound else "an image, and this model accepts only text"
    return InvalidRequest(f"{source.place} is {what}: send text", param=source.place)


def _cut_ids(token_ids: list[int], cut: Cut | None) -> EncodedInput:
    if cut is not None and len(token_ids) > cut.tokens_max:
        token_ids = token_ids[: cut.tokens_max] if cut.side == "right" else token_ids[-cut.tokens_max :]
    return EncodedInput(token_ids)


def _input_size(one: PoolingInput) -> int:
    if isinstance(one, AudioPrompt):
        return len(one.token_ids)
    if isinstance(one, TextPair):
        return len(one.first) + len(one.second)
    if isinstance(one, LabelledPrompt):
        return _input_size(one.prompt)
    return _chat_size(one) if isinstance(one, ChatPrompt) else len(one)


async def _fetched(source: ImageSource, media: MediaFetcher) -> ImageSource:
    if not source.is_elsewhere or isinstance(source.sent, bytes):
        return source
    return ImageSource(source.place, await media.fetch(source.sent, source.place))


def _image_size(source: ImageSource) -> int:
    return IMAGE_CHARACTERS + len(source.sent) // IMAGE_BYTES_PER_CHARACTER


def _is_whole(value: object) -> bool:
    try:
        operator.index(value)  # type: ignore[arg-type]  # raises for other types
    except TypeError:
        return False
    return True


def _chat_size(prompt: ChatPrompt) -> int:
    """Return the work of rendering a chat, in characters. Return LONGEST if counting would take too long. Also return
    LONGEST if the request has its own chat template, because the work of such a template cannot be predicted.
    """
    if prompt.chat_template is not None:
        return LONGEST
    size = value_count = 0
    waiting: list[Iterable[Any]] = [prompt.messages, prompt.tools or (), (prompt.template_arguments,)]
    while waiting:
        for value in waiting.pop():
            size += len(value) if isinstance(value, str) else VALUE_CHARACTERS
            value_count += 1
            if size > LONG_CHARACTERS_MAX or value_count > CHAT_VALUES_MAX:
                return LONGEST
            if isinstance(value, dict):
                waiting += (value.keys(), value.values())
            elif isinstance(value, list | tuple):
                waiting.append(value)
    return size
