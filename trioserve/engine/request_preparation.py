"""Checks the options of a request before it enters, and creates its sequences for the core."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from trioserve.admission.prompt_encoder import NO_AUDIO, unread_medium
from trioserve.contracts.arguments import check_flags, check_texts, is_list, refuse, to_str
from trioserve.contracts.errors import ContextTooLong, InvalidRequest, ResumeMismatch
from trioserve.contracts.ids import RequestId
from trioserve.contracts.kv_transfer import EngineRole
from trioserve.contracts.media import AudioProcessing, AudioPrompt
from trioserve.contracts.prompt import ChatPrompt, Prompt
from trioserve.contracts.request import EngineRequest, KVTransferParams
from trioserve.contracts.resume import Resume
from trioserve.contracts.sampling import SamplingParams
from trioserve.engine.model_description import ModelDescription
from trioserve.engine.open_request import Choice, OpenRequest
from trioserve.engine.resumed_output import ResumedOutput, checked_resume
from trioserve.text.output import ChoiceOutput
from trioserve.text.sequence_guide import SequenceGuide
from trioserve.text.tokenizer import Tokenizer
from trioserve.vision.image_prompt import split_media

__all__ = ["SEED_STRIDE", "RequestPreparation", "checked_kv_transfer", "checked_prompt", "instance_of"]

T = TypeVar("T")

# The constant is 2**64 divided by the golden ratio. It makes the seeds of a request's choices very different.
SEED_STRIDE = 0x9E3779B97F4A7C15


class RequestPreparation:
    """Checks and prepares requests for one model.

    Args:
        model: description of the model.
        tokenizer: the model's tokenizer.
        role: the engine's role in KV exchange. None: the engine does not exchange KV with others.
    """

    def __init__(self, model: ModelDescription, tokenizer: Tokenizer, *, role: EngineRole | None) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._role = role
        self._sequence_numbers = itertools.count()

    def check(self, request: OpenRequest) -> None:
        """Check that this model and this engine can serve a request.

        Raises:
            InvalidRequest: this model or engine does not support an option.
        """
        sampling = request.sampling
        if sampling.logit_bias or sampling.stop_token_ids or sampling.allowed_token_ids:
            self._check_vocabulary(sampling)
        self._check_media(request)
        if request.kv_transfer is not None:
            self._check_kv_transfer(request, request.kv_transfer)
        if request.resume is not None:
            checked_resume(
                request.resume,
                sampling,
                vocab_size=self._model.vocab_size,
                context_tokens_max=self._model.context_tokens_max,
            )

    def new_choices(self, request: OpenRequest) -> list[Choice]:
        """Create the n choices of a request, with unique sequence ids."""
        choices = []
        for index in range(request.choice_count):
            # The sequence number makes the id unique, even if callers use the same request id twice.
            sequence_id = RequestId(f"{next(self._sequence_numbers)}/{request.id}/{index}")
            output = ChoiceOutput(self._tokenizer, request.sampling, index=index, cache_salt=request.cache_salt)
            choices.append(Choice(request, index, sequence_id, output, is_mute=request.sampling.max_tokens == 0))
        return choices

    def resumed_output(self, request: OpenRequest, resume: Resume) -> ResumedOutput:
        """Return the known output of a resumed request, ready for its replay.

        Args:
            request: a request whose prompt is tokenized.
            resume: the known output.

        Raises:
            ResumeMismatch: the output belongs to another prompt.
            ContextTooLong: the prompt leaves no space for output.
        """
        digest = request.prompt_digest
        if resume.prompt_digest is not None and resume.prompt_digest != digest:
            raise ResumeMismatch(
                f"the response began after a prompt with digest {resume.prompt_digest}, and here the digest is "
                f"{digest}: its continuation would be another text. A chat template that prints the date has this "
                "effect; send the request without resume",
                param="resume.prompt_digest",
            )
        sampling = request.sampling
        return ResumedOutput(
            tokenizer=self._tokenizer,
            sampling=sampling,
            cache_salt=request.cache_salt,
            resume=resume,
            stop_token_ids=self._stop_token_ids(sampling),
            tokens_max=self._tokens_max(request),
            prompt_token_ids=request.prompt_token_ids,
            guides=request.guides,
        )

    def sequences(self, request: OpenRequest) -> list[tuple[Choice, EngineRequest]]:
        """Create one sequence per unfinished choice.

        Args:
            request: a request whose prompt is tokenized.

        Returns:
            The choices in order, each with its sequence.

        Raises:
            ContextTooLong: the prompt leaves no space for output.
        """
        sampling = request.sampling
        tokens_max = self._tokens_max(request)
        stop_token_ids = self._stop_token_ids(sampling)
        sequences: list[tuple[Choice, EngineRequest]] = []
        for choice in request.choices:
            if choice.is_ended:
                continue
            if request.guides is not None:
                if choice.guide is None:
                    choice.guide = request.guides.new_guide(stop_token_ids, request.prompt_token_ids)
                if request.is_reasoning_ended_early:
                    choice.guide.end_reasoning()
            sequence = EngineRequest(
                id=choice.sequence_id,
                prompt_token_ids=request.prompt_token_ids,
                sampling=sampling,
                output_tokens_max=tokens_max,
                stop_token_ids=stop_token_ids,
                seed=(request.seed + choice.index * SEED_STRIDE) % 2**64,
                priority=request.priority,
                cache_salt=request.block_salt,
                adapter=request.adapter_ref,
                # Only the first choice loads KV. The other choices can find this KV in the prefix cache.
                kv_transfer=None if sequences or request.given else request.kv_transfer,
                guide=choice.guide,
                resumed_output=() if request.resume is None else request.resume.token_ids[choice.index],
                given=request.given,
                session=None if request.session is None else request.session.id,
            )
            sequences.append((choice, sequence))
        return sequences

    def check_room(self, request: OpenRequest) -> None:
        """Check the length of a prompt before the expensive preparation.

        Args:
            request: a request whose prompt is tokenized.

        Raises:
            ContextTooLong: the prompt leaves no space for output.
        """
        self._tokens_max(request)

    def _tokens_max(self, request: OpenRequest) -> int:
        """Return the highest number of output tokens of each choice. Raises ContextTooLong."""
        room = self._model.context_tokens_max - len(request.prompt_token_ids)
        encoder = self._model.encoder
        if encoder is not None:
            room = min(room, encoder.tokens_max - request.decoder_token_count)
        if room < 1:
            raise ContextTooLong(
                f"This model's maximum context length is {self._model.context_tokens_max} tokens, with at least one of "
                f"response, and the prompt has {len(request.prompt_token_ids)} tokens: shorten it, or "
                "raise max_model_len",
                param="prompt",
            )
        max_tokens = request.sampling.max_tokens
        if max_tokens is None or (max_tokens > room and (request.sampling.clamp_max_tokens or encoder is not None)):
            return room
        return max(1, max_tokens)

    def _stop_token_ids(self, sampling: SamplingParams) -> frozenset[int]:
        stop_token_ids = frozenset(sampling.stop_token_ids)
        return stop_token_ids if sampling.ignore_eos else stop_token_ids | frozenset(self._model.eos_token_ids)

    def continued(self, request: OpenRequest, sequence: EngineRequest, output: Sequence[int]) -> EngineRequest:
        """Create a sequence for the next core that continues after its delivered output.

        Args:
            request: owner of the sequence. It has the sampling options.
            sequence: the sequence in the old core.
            output: the output tokens that were already delivered.
        """
        guide: SequenceGuide | None = None
        # The old guide may have accepted tokens that were never delivered, so a new guide is created.
        if sequence.guide is not None:
            assert request.guides is not None, request.id
            guide = request.guides.new_guide(sequence.stop_token_ids, sequence.prompt_token_ids)
            for token_id in output:
                guide.accept(token_id)
            if request.is_reasoning_ended_early:
                guide.end_reasoning()
        kv_transfer = sequence.kv_transfer
        if kv_transfer is not None:  # KV that should have been loaded is computed instead. A requested hold is kept.
            kv_transfer = KVTransferParams(do_remote_decode=True) if kv_transfer.do_remote_decode else None
        return msgspec.structs.replace(sequence, resumed_output=tuple(output), guide=guide, kv_transfer=kv_transfer)

    def _check_media(self, request: OpenRequest) -> None:
        """Check that the model reads the images, or hears the sounds, of the prompt."""
        if self._model.images is None and self._model.sounds is None and isinstance(request.prompt, ChatPrompt):
            _, sources = split_media(request.prompt.messages)
            if sources:
                raise unread_medium(sources[0])
        hears, encoder = isinstance(request.prompt, AudioPrompt), self._model.encoder
        audio = encoder if isinstance(encoder, AudioProcessing) else None
        if audio is None and hears:
            raise InvalidRequest(NO_AUDIO, param="prompt")
        if encoder is not None and request.sampling.prompt_logprobs is not None:
            raise InvalidRequest(
                "prompt_logprobs is set, but the encoder that reads the prompt predicts no tokens: leave it out",
                param="prompt_logprobs",
            )
        if audio is not None and not hears:
            raise InvalidRequest(
                f"{self._model.name} transcribes speech, and this is text: send sound to /v1/audio/transcriptions",
                param="prompt",
            )
        speech = request.sampling.speech
        if speech is not None and (audio is None or speech.end_id != audio.end_id):
            raise InvalidRequest(f"speech has rules that are not those of {self._model.name}", param="speech")

    def _check_vocabulary(self, sampling: SamplingParams) -> None:
        vocab_size = self._model.vocab_size
        for param, token_ids in (
            ("logit_bias", sampling.logit_bias or ()),
            ("stop_token_ids", sampling.stop_token_ids),
            ("allowed_token_ids", sampling.allowed_token_ids or ()),
        ):
            for token_id in token_ids:
                if token_id >= vocab_size:
                    raise InvalidRequest(
                        f"{param} names token id {token_id}, this model's are 0 to {vocab_size - 1}", param=param
                    )

    def _check_kv_transfer(self, request: OpenRequest, asked: KVTransferParams) -> None:
        if not (asked.do_remote_decode or asked.do_remote_prefill):
            request.kv_transfer = None
        elif self._role is None:
            raise InvalidRequest(
                "kv_transfer_params ask for KV to be exchanged with another engine, but this server was started "
                "without a connector that does: leave them out, or start it with --kv-transfer-config",
                param="kv_transfer_params",
            )
        elif asked.do_remote_decode and request.sampling.n > 1:
            raise InvalidRequest(
                f"n is {request.sampling.n}, but with do_remote_decode it must be 1: one sequence is held for another "
                "engine",
                param="n",
            )


def instance_of(kind: type[T], param: str, value: object, default: T) -> T:
    """Return a value if it has the allowed type, or the default if it is None.

    Args:
        kind: allowed type.
        param: name of the parameter.
        default: used for None.

    Raises:
        InvalidRequest: the value has another type.
    """
    if value is None:
        return default
    if not isinstance(value, kind):
        refuse(param, value, f"a {kind.__name__}, or None")
    return value


def checked_prompt(prompt: object) -> Prompt:
    """Check that a prompt has a valid type, and return it.

    Long content is checked later: token ids during tokenization, and messages when the template is rendered.

    Raises:
        InvalidRequest: the prompt has another type.
    """
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, ChatPrompt):
        _check_chat(prompt)
        return prompt
    if isinstance(prompt, AudioPrompt):
        return prompt
    if not is_list(prompt):
        refuse("prompt", prompt, "a text (str), a ChatPrompt, or a list of token ids (int)")
    return prompt  # type: ignore[return-value]  # a numpy array also works, although it is not a Sequence


def _check_chat(prompt: ChatPrompt) -> None:
    for param, dicts in (("messages", prompt.messages), ("tools", [] if prompt.tools is None else prompt.tools)):
        if not isinstance(dicts, list | tuple):
            refuse(param, dicts, "a list of dicts")
        for item in dicts:
            if not isinstance(item, dict):
                refuse(param, item, "a list of dicts", verb="holds")
    check_flags(
        add_generation_prompt=prompt.add_generation_prompt, continue_final_message=prompt.continue_final_message
    )
    check_texts(chat_template=prompt.chat_template)
    if not isinstance(prompt.template_arguments, dict):
        refuse("template_arguments", prompt.template_arguments, "a dict of names (str) and values")
    for name in prompt.template_arguments:
        to_str("template_arguments", name, "a dict of names (str) and values", verb="holds")


def checked_kv_transfer(asked: object) -> KVTransferParams:
    """Check the options for KV exchange, and return them.

    Args:
        asked: the options.

    Raises:
        InvalidRequest: the options or a field have a wrong type.
    """
    if not isinstance(asked, KVTransferParams):
        refuse("kv_transfer", asked, "a KVTransferParams, or None")
    try:
        return msgspec.convert(msgspec.structs.asdict(asked), KVTransferParams)
    except msgspec.ValidationError as error:
        refuse("kv_transfer", asked, f"a KVTransferParams whose fields have their types: {error}")
