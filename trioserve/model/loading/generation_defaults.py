"""Determines the sampling defaults of requests: from the checkpoint, from a directory, or neutral, with overrides."""

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
