"""Handlers that describe the served models for Ollama's clients.

They serve GET /api/tags, /api/ps and /api/version, and POST /api/show.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256
from typing import Any

from trioserve.api.ollama import answer as types
from trioserve.api.ollama.answer import OllamaModel, OllamaShowBody, iso_time
from trioserve.api.request_context import RequestContext
from trioserve.api.responder import Responder
from trioserve.api.route_table import READS_BODY, Forwarding, Operation
from trioserve.api.surface import OllamaError
from trioserve.text.fill_in_middle import fill_in_middle

__all__ = [
    "OPERATIONS",
    "list_running",
    "list_tags",
    "model_card",
    "read_api_version",
    "requested_model",
    "running_card",
    "show_model",
    "tagged",
    "untagged",
]

API_VERSION = "0.12.11"
"""Version of Ollama whose API this is. Clients derive the available fields from it."""

LATEST = ":latest"
NEVER = "9999-12-31T23:59:59Z"  # Responses report this time as the time at which a model is unloaded.


def tagged(name: str) -> str:
    """Return a model name with a tag, as Ollama's API shows it.

    Args:
        name: Name of a served model.
    """
    return name if ":" in name.rpartition("/")[2] else name + LATEST


def untagged(requested: str | None, served: Iterable[str]) -> str | None:
    """Return the requested name, without ":latest" unless a served name has this tag.

    Args:
        requested: Requested name. None if the request has none.
        served: Names of the served models.
    """
    if requested is None or requested in served or not requested.endswith(LATEST):
        return requested
    return requested.removesuffix(LATEST)


def requested_model(context: RequestContext, requested: str | None) -> str:
    """Return the served name of the model that a request names.

    Args:
        context: The request.
        requested: Model name in the request, with or without the tag ":latest". None: the first served name.

    Raises:
        UnknownModel: This server does not serve the model.
        InvalidRequest: The request must name a model, and names none.
    """
    return context.model_name(untagged(requested, context.served_names))


def model_card(
    name: str, *, made_at: int, identity: str, family: str | None = None, weight_bytes: int = 0
) -> OllamaModel:
    """Describe a model in Ollama's format.

    Args:
        name: Name of the model.
        made_at: Unix time in seconds.
        identity: Text that differs between models of the same name. Its hash becomes the digest.
        family: Model family. None if it is not known.
        weight_bytes: Size of the weights. 0 if it is not known.
    """
    return OllamaModel(
        name=tagged(name),
        model=tagged(name),
        modified_at=iso_time(made_at),
        size=weight_bytes,
        digest=sha256(identity.encode("utf-8", "surrogatepass")).hexdigest(),
        details=_details(family),
    )


def _details(family: str | None) -> types.OllamaDetails:
    return types.OllamaDetails(
        parent_model="",
        format="",
        family=family or "",
        families=[family] if family else [],
        parameter_size="",
        quantization_level="",
    )


def running_card(card: OllamaModel, *, context_length: int = 0) -> types.OllamaRunningModel:
    """Describe a loaded model.

    Args:
        card: Description from model_card.
        context_length: Tokens of the context.
    """
    return types.OllamaRunningModel(
        name=card.name,
        model=card.model,
        size=card.size,
        digest=card.digest,
        details=card.details,
        expires_at=NEVER,
        size_vram=0,
        context_length=context_length,
    )


async def list_tags(context: RequestContext) -> None:
    await context.respond_json(types.OllamaModels(models=_cards(context)))


async def list_running(context: RequestContext) -> None:
    length = context.engine.model.context_tokens_max
    running = [running_card(card, context_length=length) for card in _cards(context)]
    await context.respond_json(types.OllamaRunning(models=running))


def _cards(context: RequestContext) -> list[OllamaModel]:
    model = context.engine.model
    identity = model.fingerprint or f"{model.source} {model.created_at}"
    return [
        model_card(
            name,
            made_at=model.created_at,
            identity=identity,
            family=model.family,
            weight_bytes=model.weight_bytes,
        )
        for name in context.served_names
    ]


async def show_model(context: RequestContext) -> None:
    body = await context.body(OllamaShowBody)
    requested_model(context, body.model or body.name)
    engine = context.engine
    model = engine.model
    family = model.family or "unknown"
    template = engine.tokenizer.chat_template
    facts: dict[str, Any] = {
        "general.architecture": family,
        f"{family}.context_length": model.context_tokens_max,
        f"{family}.vocab_size": model.vocab_size,
    }
    if model.pooled is not None:
        facts[f"{family}.embedding_length"] = model.pooled.embedding_size
    await context.respond_json(
        types.OllamaShown(
            modelfile=f"FROM {model.source}\n",
            parameters=f"num_ctx {model.context_tokens_max}",
            template="" if template is None else template.source,
            details=_details(model.family),
            model_info=facts,
            capabilities=_capabilities(context),
            modified_at=iso_time(model.created_at),
        )
    )


def _capabilities(context: RequestContext) -> list[types.Capability]:
    engine = context.engine
    pooled = engine.model.pooled
    continues = pooled is None or pooled.continues_texts
    has: dict[types.Capability, bool] = {
        "completion": continues,
        "tools": continues and engine.families.tool_family is not None,
        "thinking": continues and engine.families.reasoning_family is not None,
        "insert": continues and fill_in_middle(engine.tokenizer) is not None,
        "embedding": pooled is not None and not pooled.scores_pairs,
    }
    return [name for name, is_there in has.items() if is_there]


async def read_api_version(context: Responder) -> None:
    await context.respond_json(types.OllamaVersion(version=API_VERSION))


OPERATIONS: tuple[Operation[RequestContext], ...] = (
    Operation(
        method="GET",
        path="/api/tags",
        handler=list_tags,
        summary="List the models, in Ollama's format",
        response=types.OllamaModels,
        error=OllamaError,
    ),
    Operation(
        method="GET",
        path="/api/ps",
        handler=list_running,
        summary="List the loaded models, in Ollama's format. All models are always loaded",
        response=types.OllamaRunning,
        error=OllamaError,
    ),
    Operation(
        method="POST",
        path="/api/show",
        handler=show_model,
        summary="Describe a model and its capabilities, in Ollama's format",
        forwarding=Forwarding.BY_MODEL,
        body=OllamaShowBody,
        response=types.OllamaShown,
        errors=(*READS_BODY, 404),
        error=OllamaError,
    ),
    Operation(
        method="GET",
        path="/api/version",
        handler=read_api_version,
        summary="Return the version of Ollama's API",
        needs_key=False,
        is_polled=True,
        response=types.OllamaVersion,
        error=OllamaError,
    ),
)
