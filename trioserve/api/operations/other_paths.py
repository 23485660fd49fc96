"""Paths of vLLM, SGLang and Ollama that are not here, and what to do instead.

They replace weights, give memory back, or change which models there are.
"""

from __future__ import annotations

from trioserve.api.error_responses import Refusal, refusal

__all__ = ["OTHER_PATHS", "other_path"]

UPDATES = "/update_weights_from_disk, /update_weights_from_shared_memory or /update_weights_from_distributed"
ONE_CALL = f"one call of {UPDATES} replaces all weights, or none, and says their weight_version"

START_WITH = (
    "models are chosen when the server starts: start it with `trioserve serve --model NAME`, which downloads NAME"
)
ONLY_SERVED = "models are chosen when the server starts, and none is made, copied or deleted while it runs"

OTHER_PATHS = {
    "/api/pull": START_WITH,
    "/api/push": ONLY_SERVED,
    "/api/create": ONLY_SERVED,
    "/api/copy": ONLY_SERVED,
    "/api/delete": ONLY_SERVED,
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
"""By path. docs/rollouts.md says more about weights, docs/ollama.md about models."""


def other_path(path: str) -> Refusal | None:
    """404; None for any other path."""
    instead = OTHER_PATHS.get(path)
    if instead is None:
        return None
    return refusal("other_path", f"there is nothing at {path}: {instead}; see docs/rollouts.md")
