"""GET /v1/models: which names this server answers to."""

from __future__ import annotations

from trioserve.api.request_context import Call

__all__ = ["MODEL_PATH", "list_models", "read_model"]

MODEL_PATH = "/v1/models/"
"""What follows is the model's name, slashes included."""


async def list_models(call: Call) -> None:
    names = call.engine.model.served_names
    await call.response({"object": "list", "data": [_card(call, name) for name in names]})


async def read_model(call: Call) -> None:
    """Raises UnknownModel."""
    await call.response(_card(call, call.model_name(call.exchange.path.removeprefix(MODEL_PATH))))


def _card(call: Call, name: str) -> dict[str, object]:
    model = call.engine.model
    return {
        "id": name,
        "object": "model",
        "created": model.created_at,
        "owned_by": "trioserve",
        "root": model.source,
        "parent": None,
        "max_model_len": model.context_tokens_max,
    }
