"""Finds the kind of a draft model from its path."""

from __future__ import annotations

from pathlib import Path

from trioserve.contracts.errors import StartupError
from trioserve.model.drafts.checkpoints import MtpCheckpoint, check_draft, is_eagle, open_eagle
from trioserve.model.loading.checkpoint import Checkpoint, open_checkpoint
from trioserve.model.loading.encoder_directory import opened_encoder
from trioserve.model.runner import DraftSource
from trioserve.model.settings import ModelSettings

__all__ = ["draft_source"]


def draft_source(
    name: str, path: Path | None, checkpoint: Checkpoint, settings: ModelSettings, token_count: int
) -> DraftSource:
    """Open a draft model and check that it fits the target model. Only headers of the files are read.

    Args:
        name: name for error texts and logs.
        path: directory or file of the draft model. None selects the target model's own prediction layer (MTP).
        checkpoint: the target model.
        settings: settings of the draft model.
        token_count: largest number of draft tokens of a request in one step.

    Raises:
        ModelLoadError: a file cannot be read.
        StartupError: the draft model does not fit the target model.
    """
    if path is None:
        return DraftSource(name, MtpCheckpoint(checkpoint), settings, token_count)
    if is_eagle(path):
        eagle = open_eagle(path)
        check_draft(checkpoint.config, eagle.config, name)
        return DraftSource(name, eagle, settings, token_count)
    if opened_encoder(path) is not None:
        raise StartupError(f"the draft model {name} is an encoder, which generates no tokens: name a decoder model")
    draft = open_checkpoint(path)
    check_draft(checkpoint.config, draft.config, name)
    return DraftSource(name, draft, settings, token_count)
