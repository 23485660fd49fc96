"""GET /v1/models lists the served names, in OpenAI's or Anthropic's format. Operators load and unload LoRA adapters."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal

from msgspec import UNSET, UnsetType

from trioserve.api.error_responses import refusal
from trioserve.api.openai.request_types import LoadAdapterBody, UnloadAdapterBody
from trioserve.api.request_context import RequestContext
from trioserve.api.response import Response
from trioserve.api.route_table import READS_BODY, Operation
from trioserve.api.surface import ANTHROPIC
from trioserve.contracts.errors import AdapterRefused, ModelLoadError

__all__ = ["MODEL_PATH", "OPERATIONS", "Model", "Models", "list_models", "read_model"]

MODEL_PATH = "/v1/models/"
"""Path before a model's name, which may have slashes."""


class Model(Response, tag_field="object", tag="model"):
    """A model or a LoRA adapter.

    Attributes:
        parent: model that the adapter changes. null: this is a model.
        adapter: digest of the adapter's content. Unset: this is a model.
        weight_version: version of the model's weights.
    """

    id: str
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    batch_invariant: bool
    fingerprint: str | None
    weight_version: str
    adapter: str | UnsetType = UNSET


class Models(Response, tag_field="object", tag="list"):
    data: list[Model]


class MessagesModel(Response, tag_field="type", tag="model"):
    """A model in Anthropic's format. Times are in RFC 3339 format."""

    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_input_tokens: int
    max_tokens: int


class MessagesModels(Response):
    data: list[MessagesModel]
    has_more: bool
    first_id: str
    last_id: str


async def list_models(context: RequestContext) -> None:
    names = context.served_names
    if context.surface is ANTHROPIC:
        models = [_messages_model(context, name) for name in names]
        await context.respond_json(MessagesModels(data=models, has_more=False, first_id=names[0], last_id=names[-1]))
    else:
        await context.respond_json(Models(data=[_model(context, name) for name in names]))


async def read_model(context: RequestContext) -> None:
    """Describe one model.

    Args:
        context: the request, whose path ends with the name.

    Raises:
        UnknownModel: this server does not serve the model.
    """
    name = context.model_name(context.exchange.path.removeprefix(MODEL_PATH))
    await context.respond_json((_messages_model if context.surface is ANTHROPIC else _model)(context, name))


def _messages_model(context: RequestContext, name: str) -> MessagesModel:
    model = context.engine.model
    return MessagesModel(
        id=name,
        display_name=name,
        created_at=datetime.fromtimestamp(model.created_at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        lifecycle="active",
        max_input_tokens=model.context_tokens_max,
        max_tokens=model.context_tokens_max,
    )


def _model(context: RequestContext, name: str) -> Model:
    model = context.engine.model
    described = Model(
        id=name,
        created=model.created_at,
        owned_by="trioserve",
        root=model.source,
        parent=None,
        max_model_len=model.context_tokens_max,
        batch_invariant=model.batch_invariant,
        fingerprint=model.fingerprint,
        weight_version=context.engine.weight_version,
    )
    adapter = context.engine.adapters.book.get(name)
    if adapter is not None and adapter.ref is not None:
        described.root, described.parent = adapter.source, model.name
        described.fingerprint = model.fingerprint_with(adapter.ref.digest)
        described.adapter = adapter.ref.digest
    return described


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
        response=Models,
    ),
    Operation(
        method="GET",
        path="/v1/models/{model}",
        handler=read_model,
        summary="Find a model by its name",
        id_has_slashes=True,
        response=Model,
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
