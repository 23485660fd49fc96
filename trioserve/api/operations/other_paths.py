"""Paths of vLLM, SGLang and Ollama that this server lacks, with what to do instead.

These paths replace weights, free memory, or change the available models.
"""

from __future__ import annotations

from trioserve.api.error_responses import Refusal, refusal

__all__ = ["OTHER_PATHS", "other_path"]

UPDATES = "/update_weights_from_disk, /update_weights_from_shared_memory or /update_weights_from_distributed"
ONE_CALL = f"one call of {UPDATES} replaces all weights, or none, and sets their weight_version"

START_WITH = (
    "models are chosen at the start of the server: start it with `trioserve serve --model NAME`, which downloads NAME"
)
ONLY_SERVED = "models are chosen at the start of the server, which cannot create, copy or delete models"

OTHER_PATHS = {
    "/api/pull": START_WITH,
    "/api/push": ONLY_SERVED,
    "/api/create": ONLY_SERVED,
    "/api/copy": ONLY_SERVED,
    "/api/delete": ONLY_SERVED,
    "/init_weight_transfer_engine": "a trainer joins by torch.distributed with the backend gloo: use "
    "/init_weights_update_group",
    "/start_weight_update": ONE_CALL,
    "/update_weights": f"use {UPDATES}",
    "/finish_weight_update": ONE_CALL,
    "/shutdown_weight_transfer_engine": "use /destroy_weights_update_group",
    "/start_draft_weight_update": "a draft model keeps its weights, which does not change the responses",
    "/update_weight_version": f"the version is set together with the weights: send weight_version to {UPDATES}",
    "/weight_checker": "an update refuses weights that do not fit; /weight_info has the current version",
    "/update_weights_from_tensor": "use /update_weights_from_shared_memory on the server's machine, otherwise "
    "/update_weights_from_distributed",
    "/release_memory_occupation": "use /sleep",
    "/resume_memory_occupation": "use /wake_up",
}
"""Advice by path."""


def other_path(path: str) -> Refusal | None:
    """Make the error (404) for a path of another server.

    Args:
        path: path of a request.

    Returns:
        The error, or None if the path is not one of these.
    """
    instead = OTHER_PATHS.get(path)
    if instead is None:
        return None
    page = "ollama" if path.startswith("/api/") else "rollouts"
    return refusal("other_path", f"there is nothing at {path}: {instead}; see docs/guides/{page}.md")
