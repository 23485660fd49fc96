"""GET /v1/models: lists the served names, in Anthropic's format for clients of its API."""

from __future__ import annotations

from datetime import UTC, datetime

from trioserve.api.anthropic.surface import ANTHROPIC
from trioserve.api.openai import response_types
from trioserve.api.request_context import RequestContext
from trioserve.api.route_table import Operation

__all__ = ["MODEL_PATH", "OPERATIONS", "list_models", "read_model"]

MODEL_PATH = "/v1/models/"
"""Path before a model's name, which may have slashes."""


async def list_models(context: RequestContext) -> None:
    names = context.served_names
    data = [_card(context, name) for name in names]
    listed: dict[str, object] = {"object": "list", "data": data}
    if context.surface is ANTHROPIC:
        listed = {"data": data, "has_more": False, "first_id": names[0], "last_id": names[-1]}
    await context.respond_json(listed)


async def read_model(context: RequestContext) -> None:
    """Describe one model.

    Args:
        context: the request, whose path ends with the name.

    Raises:
        UnknownModel: this server does not serve the model.
    """
    await context.respond_json(_card(context, context.model_name(context.exchange.path.removeprefix(MODEL_PATH))))


def _card(context: RequestContext, name: str) -> dict[str, object]:
    model = context.engine.model
    adapter = context.engine.adapters.book.get(name)
    if context.surface is ANTHROPIC:
        made_at = datetime.fromtimestamp(model.created_at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return {
            "type": "model",
            "id": name,
            "display_name": name,
            "created_at": made_at,
            "lifecycle": "active",
            "max_input_tokens": model.context_tokens_max,
            "max_tokens": model.context_tokens_max,
        }
    card: dict[str, object] = {
        "id": name,
        "object": "model",
        "created": model.created_at,
        "owned_by": "trioserve",
        "root": model.source,
        "parent": None,
        "max_model_len": model.context_tokens_max,
        "batch_invariant": model.batch_invariant,
        "fingerprint": model.fingerprint,
        "weight_version": context.engine.weight_version,
    }
    if adapter is not None and adapter.ref is not None:
        card["root"], card["parent"] = adapter.source, model.name
        card["fingerprint"] = model.fingerprint_with(adapter.ref.digest)
        card["adapter"] = adapter.ref.digest
    return card


OPERATIONS: tuple[Operation[RequestContext], ...] = (
    Operation(
        method="GET",
        path="/v1/models",
        handler=list_models,
        summary="List models and adapters",
        response=response_types.Models,
    ),
    Operation(
        method="GET",
        path="/v1/models/{model}",
        handler=read_model,
        summary="Find a model by its name",
        id_has_slashes=True,
        response=response_types.Model,
        errors=(400, 404),
        path_parameter="name of the model, slashes included",
    ),
)
