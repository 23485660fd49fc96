"""Paths by which vLLM and SGLang replace weights or give memory back, and which are not here since they do it in
another way: what to ask instead."""

from __future__ import annotations

from trioserve.api.error_responses import REASON_HEADER, ErrorResponse, Refusal

__all__ = ["OTHER_PATHS", "other_path"]

UPDATES = "/update_weights_from_disk, /update_weights_from_shared_memory or /update_weights_from_distributed"
ONE_CALL = f"one call of {UPDATES} replaces all weights, or none, and says their weight_version"

OTHER_PATHS = {
    "/init_weight_transfer_engine": "a trainer joins by torch.distributed with the backend gloo: ask "
    "/init_weights_update_group",
    "/start_weight_update": ONE_CALL,
    "/update_weights": f"ask {UPDATES}",
    "/finish_weight_update": ONE_CALL,
    "/shutdown_weight_transfer_engine": "ask /destroy_weights_update_group",
    "/start_draft_weight_update": "a draft model keeps its weights, and responses are the model's all the same",
    "/update_weight_version": f"weights get their version with them: send weight_version to {UPDATES}",
    "/weight_checker": "what does not fit is refused by the update itself; /weight_info says which weights are there",
    "/update_weights_from_tensor": "on the server's machine ask /update_weights_from_shared_memory, else "
    "/update_weights_from_distributed",
    "/release_memory_occupation": "ask /sleep",
    "/resume_memory_occupation": "ask /wake_up",
}
"""With docs/rollouts.md, which says more."""


def other_path(path: str) -> Refusal | None:
    """404; None for any other path."""
    instead = OTHER_PATHS.get(path)
    if instead is None:
        return None
    return Refusal(
        ErrorResponse(
            status=404,
            type="invalid_request_error",
            code="other_path",
            message=f"there is nothing at {path}: {instead}; see docs/rollouts.md",
            headers=((REASON_HEADER, "other_path"),),
        )
    )
