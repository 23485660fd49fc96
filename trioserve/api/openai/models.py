"""GET /v1/models lists the served names. Operators load and unload LoRA adapters."""

from __future__ import annotations

from datetime import UTC, datetime

from trioserve.api.error_responses import refusal
from trioserve.api.openai import response_types
from trioserve.api.openai.request_types import LoadAdapterBody, UnloadAdapterBody
from trioserve.api.request_context import RequestContext
from trioserve.api.route_table import READS_BODY, Operation
from trioserve.api.surface import ANTHROPIC
from trioserve.contracts.errors import AdapterRefused, ModelLoadError

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


async def load_adapter(context: RequestContext) -> None:
    """Load an adapter. Responds when requests may use it.

    Args:
        context: the request.
    """
    _check_may(context)
    body = await context.body(LoadAdapterBody)
    if not body.lora_name or not body.lora_path:
        raise AdapterRefused("Both 'lora_name' and 'lora_path' must be provided.", reason="missing", param=None)
    try:
        await context.engine.adapters.load(body.lora_name, body.lora_path, replaces=body.load_inplace)
    except ModelLoadError as error:
        raise AdapterRefused(str(error), reason="not_loaded", param="lora_path") from None
    await _respond(context, f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def unload_adapter(context: RequestContext) -> None:
    """Unload an adapter. Responds when no request uses the adapter any more, and its memory is free.

    Args:
        context: the request.
    """
    _check_may(context)
    body = await context.body(UnloadAdapterBody)
    if not body.lora_name:
        raise AdapterRefused("'lora_name' needs to be provided to unload a LoRA adapter.", reason="missing", param=None)
    await context.engine.unload_adapter(body.lora_name, seconds=body.timeout)
    await _respond(context, f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _check_may(context: RequestContext) -> None:
    if not (context.services.rules.loads_adapters and context.engine.adapters.is_enabled):
        raise refusal(
            "adapters_fixed",
            "this server cannot load lora adapters while it runs: start it with --enable-lora and "
            "--allow-runtime-lora-updating",
        )


async def _respond(context: RequestContext, sentence: str) -> None:
    await context.respond_bytes(sentence.encode(), "text/plain; charset=utf-8")


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
    Operation(
        method="POST",
        path="/v1/load_lora_adapter",
        handler=load_adapter,
        summary="Load a LoRA adapter",
        is_operators=True,
        admin_action="loading lora adapters",
        description="Needs a server with --allow-runtime-lora-updating.",
        body=LoadAdapterBody,
        response="text/plain",
        errors=(*READS_BODY, 403, 404),
    ),
    Operation(
        method="POST",
        path="/v1/unload_lora_adapter",
        handler=unload_adapter,
        summary="Unload a LoRA adapter",
        is_operators=True,
        admin_action="loading lora adapters",
        description="New requests cannot use it. The response is sent when no request uses it any more.",
        body=UnloadAdapterBody,
        response="text/plain",
        errors=(*READS_BODY, 403, 404),
    ),
)
