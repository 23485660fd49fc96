"""The files of a served model: its checkpoint, tokenizer, draft model and sampling defaults."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import trio

from trioserve.admission.text_threads import TextThreads
from trioserve.audio.audio_file import decoder_missing
from trioserve.commands.prompt_naming import load_tokenizer
from trioserve.contracts.errors import InvalidRequest, ModelLoadError, StartupError
from trioserve.contracts.media import AudioProcessing, ImageEncoder, SoundProcessing
from trioserve.contracts.sampling import SamplingParams
from trioserve.model.drafts.checkpoints import EagleCheckpoint, check_same_tokens
from trioserve.model.fingerprint import fingerprint_of, weights_name
from trioserve.model.loading.adapter_directory import allowed_directory, read_adapter
from trioserve.model.loading.checkpoint import Checkpoint, open_checkpoint
from trioserve.model.loading.default_model import DOWNLOAD_THREAD, recommended_sampling, resolve_model
from trioserve.model.loading.encoder_directory import EncoderDirectory, opened_encoder
from trioserve.model.loading.hf_config import end_token_ids_from, read_json_object, sampling_defaults_from
from trioserve.model.loading.stored_tensor import AdapterWeights
from trioserve.model.number_formats import Dtype
from trioserve.model.settings import GenerationSettings, generation_settings
from trioserve.options.engine import EngineOptions
from trioserve.text.grammar_compiler import GrammarCompiler
from trioserve.text.templates.chat_template import chat_template_text
from trioserve.text.tokenizer import Tokenizer
from trioserve.trio_tools.interrupts import uninterrupted
from trioserve.trio_tools.worker_thread import LongJob, call_abandonable
from trioserve.vision.families.registry import ImageProcessing
from trioserve.vision.image_file import why_no_images

if TYPE_CHECKING:
    from trioserve.model.drafts.checkpoints import DraftSource

__all__ = [
    "GenerationDefaults",
    "LoadProgress",
    "LoadReport",
    "LoggedProgress",
    "ModelFiles",
    "default_served_name",
    "generation_defaults",
]

logger = logging.getLogger("trioserve.assemble")


ADAPTER_THREAD = "trioserve-adapter"


class LoadProgress(msgspec.Struct, frozen=True):
    """Progress of loading.

    Attributes:
        what: current activity, for people.
        done: bytes so far, or seconds so far if `total` is None.
        total: bytes in total. None if the size of the work is unknown.
    """

    what: str
    done: float
    total: int | None = None

    @property
    def share(self) -> float | None:
        """Share of the activity that is done, from 0 to 1. None if the size of the work is unknown."""
        return None if self.total is None else min(1.0, self.done / max(1, self.total))


LoadReport = Callable[[LoadProgress], None]
"""Receives the progress of loading. Called from the thread that loads, first before the activity begins."""


class LoggedProgress:
    """Logs each activity of loading once, when it begins.

    Args:
        report: also receives all progress. None if only the log needs it.
    """

    def __init__(self, report: LoadReport | None) -> None:
        self._report = report
        self._what = ""

    def __call__(self, progress: LoadProgress) -> None:
        if progress.what != self._what:
            self._what = progress.what
            logger.info("%s", progress.what)
        if self._report is not None:
            self._report(progress)


@uninterrupted
class ModelFiles:
    """Finds and reads the files of one model, at the start and again after each fault of the engine.

    Each opening reads the checkpoint. Paths, tokenizer and grammars of the first opening are kept.

    Args:
        options: the options of the engine.
        text: threads for tokenization.
        report: receives the progress of loading.

    Attributes:
        drafts: settings of draft tokens.
        path: directory or file of the model, once the model was found.
        draft_path: directory or file of the draft model, once it was found.
        checkpoint: the checkpoint of the last opening.
        defaults: sampling defaults of the last opening.
        compiler: tokenizer and grammars, once `prepare_texts` has run.
        adapter_dtype: number format of adapters.
    """

    def __init__(self, options: EngineOptions, text: TextThreads, report: LoadReport) -> None:
        self._options = options
        self._text = text
        self._report = report
        self._generation = generation_settings(options.generation_config, options.override_generation_config)
        self._chat_template: str | None = None
        self._tokenizer_path: Path | None = None
        self._tokenizer_name = ""
        self._weights_name: str | None = None
        self.drafts = options.drafts()
        self.path: Path | None = None
        self.draft_path: Path | None = None
        self.checkpoint: Checkpoint | EncoderDirectory | None = None
        self.defaults: GenerationDefaults | None = None
        self.compiler: GrammarCompiler | None = None
        self.adapter_dtype: Dtype = "float32"

    @property
    def weights_name(self) -> str:
        """Name of the weights, which is a digest of their values."""
        assert self._weights_name is not None, "set when the weights are read"
        return self._weights_name

    async def open(self) -> tuple[Checkpoint | EncoderDirectory, DraftSource | None]:
        """Read the checkpoint, and open the source of draft tokens.

        Raises:
            ModelLoadError: the model cannot be read.
            StartupError: the model does not fit the options.
        """
        options, text, drafts = self._options, self._text, self.drafts
        if options.chat_template is not None:  # The template is used much later, so report an error now.
            self._chat_template = await text.run_cancellable(chat_template_text, options.chat_template)
        if self.path is None:
            self.path = await self._fetched(options.model, revision=options.revision)
            if options.tokenizer is not None:
                self._tokenizer_path = await self._fetched(options.tokenizer, with_weights=False)
            if drafts is not None and drafts.model is not None:
                self.draft_path = await self._fetched(drafts.model, revision=drafts.revision)
            if drafts is not None and drafts.ignored:
                logger.warning("of --speculative-config ignored=%s", ",".join(drafts.ignored))
        uses_further = drafts is not None and drafts.source == "mtp"
        checkpoint = await text.run_cancellable(_opened, self.path, options.max_model_len, uses_further)
        draft = await text.run_cancellable(self._open_draft, checkpoint)
        self.defaults = await text.run_cancellable(self._read_defaults, checkpoint)
        self.checkpoint = checkpoint
        return checkpoint, draft

    async def prepare_texts(self, checkpoint: Checkpoint | EncoderDirectory, weights_come: trio.Event) -> None:
        """Prepare the tokenizer, grammars and the weights' name while the weights are read.

        Args:
            checkpoint: the model.
            weights_come: set when reading the weights has begun.
        """
        # The tokenizer and grammar libraries hold the GIL for tenths of a second. So they run only after the task that
        # loads the weights has begun to read. From then on, reading does not need the GIL.
        await weights_come.wait()
        assert self.defaults is not None, "they are read with the checkpoint"
        is_first = self.compiler is None
        if self.compiler is None:
            tokenizer = await self._text.run_cancellable(self._make_tokenizer, checkpoint)
        else:
            tokenizer = self.compiler.tokenizer
        if not isinstance(checkpoint, EncoderDirectory):
            found = await self._text.run_cancellable(tokenizer.end_token_ids)
            self.defaults = self.defaults.with_ends(found, vocab_size=checkpoint.config.vocab_size)
            if is_first and not self.defaults.eos_token_ids:
                logger.warning(
                    "no end token in the model's files: responses end at max_tokens or a stop string; name one as "
                    "eos_token_id in generation_config.json"
                )
        if is_first:
            ends = self.defaults.eos_token_ids
            self.compiler = await self._text.run_cancellable(_make_compiler, checkpoint, tokenizer, ends)
            self._tokenizer_name = await self._text.run_cancellable(tokenizer.name)
        # The name of the weights is computed last, when most of the weights are in the page cache.
        self._weights_name = await self._text.run_cancellable(_weights_name, checkpoint)

    def fingerprint(self, arithmetic: str, dtype: Dtype, *, is_batch_invariant: bool) -> str | None:
        """Return the fingerprint, or None for an encoder, which has no responses to resume.

        Args:
            arithmetic: how the loaded model computes.
            dtype: number format of the model.
            is_batch_invariant: True if the model's results do not depend on other requests of the batch.
        """
        options, defaults = self._options, self.defaults
        if self._weights_name is None:
            return None
        assert defaults is not None, "they are read with the checkpoint"
        return fingerprint_of(
            weights=self._weights_name,
            arithmetic=arithmetic,
            dtype=dtype,
            batch_invariant=is_batch_invariant,
            tokenizer=self._tokenizer_name,
            others=(
                defaults.eos_token_ids,
                dict(defaults.named),
                options.tool_call_parser,
                options.tool_call_leniency,
                options.reasoning_parser,
            ),
        )

    def media_processing(
        self, checkpoint: Checkpoint | EncoderDirectory, encoder: ImageEncoder | None, tokenizer: Tokenizer
    ) -> ImageProcessing | SoundProcessing | None:
        """Return how images or sounds are prepared for the model, or None if the model is served for texts only.

        Args:
            checkpoint: the model.
            encoder: computes embeddings of images or sounds.
            tokenizer: tokenizer of the model.
        """
        if encoder is None or isinstance(checkpoint, EncoderDirectory) or checkpoint.vision is None:
            return None
        processing = checkpoint.vision.processing
        if isinstance(processing, SoundProcessing):
            what, reason, name, token_id = "sounds", decoder_missing(), "audio_token_id", processing.audio_token_id
        else:
            what, reason, name, token_id = "images", why_no_images(), "image_token_id", processing.image_token_id
        if tokenizer.added_token_id(processing.row_token) != token_id:
            reason = f"its tokenizer has another token for {processing.row_token} than {name} {token_id}"
        if reason is not None:
            logger.warning("%s are not served: %s", what, reason)
            return None
        return processing

    @property
    def audio_processing(self) -> AudioProcessing | None:
        """How the model hears. None for a model without an audio encoder."""
        checkpoint = self.checkpoint
        if checkpoint is None or isinstance(checkpoint, EncoderDirectory) or checkpoint.encoder is None:
            return None
        processing = checkpoint.encoder.processing
        return processing if isinstance(processing, AudioProcessing) else None

    async def read_adapter(self, path: str, is_checked: bool) -> AdapterWeights:
        """Read the files of an adapter for `engine.adapters.Adapters`.

        Args:
            path: directory of the adapter.
            is_checked: True to refuse a directory that is not allowed.

        Raises:
            ModelLoadError: the adapter cannot be read.
        """
        # A read of files may hang and cannot be interrupted. So it runs in a thread that a cancelled caller abandons.
        return await call_abandonable(self._adapter_from, path, is_checked, thread_name=ADAPTER_THREAD)

    def _adapter_from(self, path: str, is_checked: bool) -> AdapterWeights:
        checkpoint, options = self.checkpoint, self._options
        assert checkpoint is not None, "adapters are loaded when the engine is open"
        if isinstance(checkpoint, EncoderDirectory):
            raise ModelLoadError("an encoder does not support LoRA adapters: leave out --enable-lora")
        directory = Path(path)
        if is_checked:
            directory = allowed_directory(directory, [Path(allowed) for allowed in options.adapter_directories])
        return read_adapter(directory, checkpoint.config, dtype=self.adapter_dtype, rank_max=options.max_lora_rank)

    async def _fetched(self, name: str, *, with_weights: bool = True, revision: str | None = None) -> Path:
        """Return the path of a model, and download it first if it is not on this machine.

        Nothing can interrupt a read from the network. So the download runs in a thread that a cancelled caller
        abandons. The thread then ends when it receives the next bytes.
        """
        job = LongJob()

        def report(done: int, total: int) -> None:
            job.check()
            self._report(LoadProgress(f"fetching {name}", done, total or None))

        resolve = functools.partial(resolve_model, with_weights=with_weights, revision=revision, progress=report)
        try:
            return await call_abandonable(resolve, name, thread_name=DOWNLOAD_THREAD)
        finally:
            job.cancel()

    def _read_defaults(self, checkpoint: Checkpoint | EncoderDirectory) -> GenerationDefaults:
        return generation_defaults(checkpoint, self._generation, recommended=recommended_sampling(self._options.model))

    def _make_tokenizer(self, checkpoint: Checkpoint | EncoderDirectory) -> Tokenizer:
        options, path = self._options, self._tokenizer_path
        tokenizer = _make_tokenizer(checkpoint) if path is None else load_tokenizer(path)
        if tokenizer.vocab_size > checkpoint.config.vocab_size and path is not None:
            raise StartupError(
                f"--tokenizer {options.tokenizer} has {tokenizer.vocab_size} tokens, but the model has "
                f"{checkpoint.config.vocab_size}: set it to the tokenizer with which the model was trained"
            )
        if self._chat_template is not None:
            tokenizer.use_chat_template(self._chat_template)
        if options.control_tokens_in_text == "parse":
            tokenizer.parse_control_tokens_in_chats()
        return tokenizer

    def _open_draft(self, checkpoint: Checkpoint | EncoderDirectory) -> DraftSource | None:
        """Open the source of draft tokens. Raises StartupError if the model does not support it."""
        drafts, path = self.drafts, self.draft_path
        if drafts is None or drafts.source == "text" or isinstance(checkpoint, EncoderDirectory):
            return None
        from trioserve.model.drafts.checkpoints import draft_source

        name = drafts.model or drafts.source
        settings = drafts.settings_of_draft(self._options.model_settings())
        draft = draft_source(name, path, checkpoint, settings, drafts.token_count)
        if path is not None and not isinstance(draft.checkpoint, EagleCheckpoint):
            check_same_tokens(_make_tokenizer(checkpoint), load_tokenizer(path), name)
        return draft


def _opened(path: Path, context_tokens: int | None, uses_further_layers: bool = False) -> Checkpoint | EncoderDirectory:
    return opened_encoder(path) or open_checkpoint(
        path, context_tokens=context_tokens, uses_further_layers=uses_further_layers
    )


def _weights_name(checkpoint: Checkpoint | EncoderDirectory) -> str | None:
    """Return the name of the weights. None for an encoder, which neither resumes responses nor exchanges KV."""
    return None if isinstance(checkpoint, EncoderDirectory) else weights_name(checkpoint)


def _make_compiler(
    checkpoint: Checkpoint | EncoderDirectory, tokenizer: Tokenizer, end_token_ids: tuple[int, ...]
) -> GrammarCompiler:
    compiler = GrammarCompiler(tokenizer, vocab_size=checkpoint.config.vocab_size, end_token_ids=end_token_ids)
    reason = None if isinstance(checkpoint, EncoderDirectory) else compiler.load()
    if reason is not None:
        logger.warning("structured output is not available: %s", reason)
    return compiler


def _make_tokenizer(checkpoint: Checkpoint | EncoderDirectory) -> Tokenizer:
    if checkpoint.gguf_metadata is not None:
        return Tokenizer.from_gguf(checkpoint.gguf_metadata)
    assert checkpoint.tokenizer_directory is not None
    return Tokenizer.from_directory(checkpoint.tokenizer_directory)


def default_served_name(model: str) -> str:
    """Return the served name of a model for which no name is configured.

    Args:
        model: the option --model.
    """
    return Path(model).name.removesuffix(".gguf") or model


class GenerationDefaults(msgspec.Struct, frozen=True):
    """Defaults of requests.

    Attributes:
        sampling: values of all sampling parameters that a request does not set.
        named: values that the checkpoint or the operator has set explicitly, by field name.
        eos_token_ids: tokens that end a response.
    """

    sampling: SamplingParams
    named: Mapping[str, float | int]
    eos_token_ids: tuple[int, ...]

    def with_ends(self, token_ids: tuple[int, ...], *, vocab_size: int) -> GenerationDefaults:
        """Append the tokenizer's end tokens to the configs' end tokens, and drop ids outside of the vocabulary.

        Args:
            token_ids: end tokens of the tokenizer.
            vocab_size: tokens of the model.
        """
        known = (token_id for token_id in token_ids if 0 <= token_id < vocab_size)
        return msgspec.structs.replace(self, eos_token_ids=tuple(dict.fromkeys((*self.eos_token_ids, *known))))


def generation_defaults(
    checkpoint: Checkpoint | EncoderDirectory,
    settings: GenerationSettings,
    *,
    recommended: Mapping[str, float | int] | None = None,
) -> GenerationDefaults:
    """Determine the sampling defaults of requests. The function may read a file.

    Args:
        checkpoint: opened model.
        settings: source of the defaults.
        recommended: sampling parameters to use if the checkpoint recommends none.

    Raises:
        ModelLoadError: a file cannot be read, or its values cannot be used.
    """
    named: Mapping[str, float | int] = {}
    eos_token_ids = checkpoint.config.eos_token_ids
    if settings.directory is not None:
        path = settings.directory / "generation_config.json"
        if not path.is_file():
            raise ModelLoadError(
                f"--generation-config is {str(settings.directory)!r}, but there is no file {path}: name a directory "
                "with a generation_config.json, or auto for the model's own, or vllm for none"
            )
        generation_config = read_json_object(path)
        named = sampling_defaults_from(generation_config)
        eos_token_ids = end_token_ids_from(generation_config) or eos_token_ids
        if any(not 0 <= token_id < checkpoint.config.vocab_size for token_id in eos_token_ids):
            raise ModelLoadError(
                f"{path} names the end tokens {', '.join(map(str, eos_token_ids))}, but the model's tokens are 0 to "
                f"{checkpoint.config.vocab_size - 1}: the file belongs to another model"
            )
    elif not settings.is_neutral:
        named = checkpoint.sampling_defaults or recommended or {}
    named = {**named, **settings.override}
    try:
        sampling = msgspec.convert(named, SamplingParams)
    except (msgspec.ValidationError, InvalidRequest) as error:
        raise ModelLoadError(
            f"the sampling defaults of the model cannot be used: {error}; set another value with "
            "--override-generation-config, or ignore them with --generation-config vllm"
        ) from None
    return GenerationDefaults(sampling, named, eos_token_ids)
