"""Which sampling counts where a request says nothing: the checkpoint's, a directory's or none, and what is laid over
it."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from trioserve.contracts.errors import InvalidRequest, ModelLoadError
from trioserve.contracts.sampling import SamplingParams
from trioserve.model.loading.checkpoint import Checkpoint
from trioserve.model.loading.encoder_directory import EncoderDirectory
from trioserve.model.loading.hf_config import end_token_ids_from, read_json_object, sampling_defaults_from
from trioserve.model.loading.settings import GenerationSettings

__all__ = ["GenerationDefaults", "generation_defaults"]


class GenerationDefaults(msgspec.Struct, frozen=True):
    """sampling: for whatever a request does not say. named: those of its fields that somebody has set.
    eos_token_ids: the tokens that end a response."""

    sampling: SamplingParams
    named: Mapping[str, float | int]
    eos_token_ids: tuple[int, ...]

    def with_ends(self, token_ids: tuple[int, ...], *, vocab_size: int) -> GenerationDefaults:
        """Add end tokens that the tokenizer names, behind those of the configs, and drop ids that the model lacks."""
        known = (token_id for token_id in token_ids if 0 <= token_id < vocab_size)
        return msgspec.structs.replace(self, eos_token_ids=tuple(dict.fromkeys((*self.eos_token_ids, *known))))


def generation_defaults(
    checkpoint: Checkpoint | EncoderDirectory,
    settings: GenerationSettings,
    *,
    recommended: Mapping[str, float | int] | None = None,
) -> GenerationDefaults:
    """recommended: what counts where the checkpoint itself recommends nothing. May read a file. Raises ModelLoadError
    when one cannot be read, or holds what cannot be used."""
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
                f"{checkpoint.config.vocab_size - 1}: it is another model's"
            )
    elif not settings.is_neutral:
        named = checkpoint.sampling_defaults or recommended or {}
    named = {**named, **settings.override}
    try:
        sampling = msgspec.convert(named, SamplingParams)
    except (msgspec.ValidationError, InvalidRequest) as error:
        raise ModelLoadError(
            f"the sampling defaults of the model cannot be used: {error}; set another value with "
            "--override-generation-config, or pass them over with --generation-config vllm"
        ) from None
    return GenerationDefaults(sampling, named, eos_token_ids)
