"""Which draft model a name and a path stand for."""

from __future__ import annotations

from pathlib import Path

from trioserve.contracts.errors import StartupError
from trioserve.model.drafts.eagle_checkpoint import is_eagle, open_eagle
from trioserve.model.drafts.mtp_checkpoint import MtpCheckpoint
from trioserve.model.drafts.vocabulary import check_draft
from trioserve.model.loading.checkpoint import Checkpoint, open_checkpoint
from trioserve.model.loading.encoder_directory import opened_encoder
from trioserve.model.runner import DraftSource
from trioserve.model.settings import ModelSettings

__all__ = ["draft_source"]


def draft_source(
    name: str, path: Path | None, checkpoint: Checkpoint, settings: ModelSettings, token_count: int
) -> DraftSource:
    """name: for people. path: None for the model's own further layer. checkpoint: of the model that it drafts for.
    Reads headers. Raises ModelLoadError, and StartupError if it cannot draft for that one."""
    if path is None:
        return DraftSource(name, MtpCheckpoint(checkpoint), settings, token_count)
    if is_eagle(path):
        eagle = open_eagle(path)
        check_draft(checkpoint.config, eagle.config, name)
        return DraftSource(name, eagle, settings, token_count)
    if opened_encoder(path) is not None:
        raise StartupError(f"the draft model {name} is an encoder, which writes no tokens: name another one")
    draft = open_checkpoint(path)
    check_draft(checkpoint.config, draft.config, name)
    return DraftSource(name, draft, settings, token_count)
