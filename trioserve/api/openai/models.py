"""GET /v1/models: which names this server answers to."""

from __future__ import annotations

from trioserve.api.request_context import RequestContext

__all__ = ["MODEL_PATH", "list_models", "read_model"]

MODEL_PATH = "/v1/models/"
"""What follows is the model's name, slashes included."""


async def list_models(context: RequestContext) -> None:
    names = context.engine.model.served_names
    await context.respond_json({"object": "list", "data": [_card(context, name) for name in names]})


async def read_model(context: RequestContext) -> None:
    """Raises UnknownModel."""
    await context.respond_json(_card(context, context.model_name(context.exchange.path.removeprefix(MODEL_PATH))))


def _card(context: RequestContext, name: str) -> dict[str, object]:
    model = context.engine.model
    return {
        "id": name,
        "object": "model",
        "created": model.created_at,
        "owned_by": "trioserve",
        "root": model.source,
        "parent": None,
        "max_model_len": model.context_tokens_max,
    }
