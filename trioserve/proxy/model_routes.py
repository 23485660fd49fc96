"""Handlers of a router that describe, load and unload models.

The paths /models/load and /models/unload, and `status` in the list of models, are those of llama-server's router.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Literal

import msgspec
from msgspec import UNSET, UnsetType

from trioserve.admission.model_runs import ModelRuns, ModelStatus
from trioserve.api.form import Query
from trioserve.api.ollama.answer import (
    OllamaChatLine,
    OllamaModel,
    OllamaModels,
    OllamaReply,
    OllamaRunning,
    OllamaTextLine,
    iso_time,
)
from trioserve.api.ollama.models import model_card, running_card
from trioserve.api.openai.models import MODEL_PATH
from trioserve.api.openai.request_types import decode_body
from trioserve.api.operations.pausing import IsSleeping
from trioserve.api.response import Listing, Response
from trioserve.api.sse import encode
from trioserve.api.surface import OLLAMA_PATH
from trioserve.contracts.errors import InvalidRequest, UnknownModel
from trioserve.proxy.fleet import EndpointSpec
from trioserve.proxy.routed_body import LINE_PATHS, RoutedBody

if TYPE_CHECKING:
    from trioserve.admission.admission_scope import AdmissionScope
    from trioserve.proxy.router_context import RouterContext

__all__ = [
    "ModelChanged",
    "NamedModel",
    "hosted_model",
    "keep_alive_seconds",
    "list_models",
    "list_running",
    "list_tags",
    "load_model",
    "loading_comment",
    "queried_model",
    "read_is_sleeping",
    "read_model",
    "set_keep_alive",
    "sleep_model",
    "unload_model",
    "wake_model",
]

STARTED_AT = int(time.time())
LOADED_STATES = ("loaded", "draining")


class RoutedModelStatus(Response):
    """State of a model that is loaded on demand.

    Attributes:
        value: state of the model.
        failed: True if the last load failed, or the model crashed, and it was not loaded since.
        reason: why the model has this state.
        waiting: requests that wait for the model.
        leases: requests that use the model.
        memory_bytes: memory that the model may use while it is loaded.
        load_seconds: time of the last load, or its estimate.
        activity: what the load does at the moment.
        progress: share of the activity that is done, from 0 to 1.
        unloads_in_seconds: time until the model is unloaded if it stays idle.
    """

    value: Literal["unloaded", "loading", "loaded", "draining", "unloading", "sleeping", "waking"]
    reason: str
    waiting: int
    leases: int
    memory_bytes: int
    load_seconds: float
    activity: str | UnsetType = UNSET
    progress: float | UnsetType = UNSET
    failed: bool | UnsetType = UNSET
    unloads_in_seconds: float | UnsetType = UNSET


class RoutedModel(Response, tag_field="object", tag="model"):
    """A model of the router's endpoints, or a model that is loaded on demand, which has a status.

    Attributes:
        status: state of a model that is loaded on demand, or of an adapter's model.
        parent: model that a LoRA adapter changes. Unset: it is no adapter of a model that is loaded on demand.
    """

    id: str
    created: int
    owned_by: str
    status: RoutedModelStatus | UnsetType = UNSET
    parent: str | UnsetType = UNSET


class LoadingComment(Response):
    """Comment in a stream that waits for its model.

    Attributes:
        model: name of the model.
        state: state of the model.
        activity: what the load does at the moment.
        progress: share of the activity that is done, from 0 to 1.
        position: place of the request among those that wait for the model, in the order of their arrival.
    """

    model: str
    state: str
    position: int
    activity: str | UnsetType = UNSET
    progress: float | UnsetType = UNSET


class NamedModel(msgspec.Struct, frozen=True):
    """Body of a request to load or unload a model.

    Attributes:
        model: name of the model.
    """

    model: str


class ModelChanged(Response):
    """Result of a load or unload.

    Attributes:
        success: True if the model has the wanted state. False if it was loaded again, or still, for a waiting request.
        status: state of the model.
    """

    success: bool
    status: RoutedModelStatus


async def list_models(context: RouterContext) -> None:
    await context.respond_json(Listing(data=[_card(context, name) for name in context.services.fleet.models()]))


async def read_model(context: RouterContext) -> None:
    """GET /v1/models/MODEL.

    Args:
        context: Request of the router's API.

    Raises:
        UnknownModel: No endpoint serves the model.
    """
    name = context.exchange.path.removeprefix(MODEL_PATH)
    if name not in context.services.fleet.models():
        raise UnknownModel(
            f'the model "{name}" is not served here; served are: {", ".join(context.services.fleet.models())}'
        )
    await context.respond_json(_card(context, name))


async def load_model(context: RouterContext) -> None:
    """POST /models/load: load a model, and wait until it is loaded.

    Args:
        context: Request of the router's API.

    Raises:
        InvalidRequest: The model is not loaded on demand, does not fit into the memory, or its load failed or was
            cancelled by an unload.
    """
    models, name = hosted_model(context, decode_body(await context.exchange.body(), NamedModel).model)
    models.load(name)
    status = await models.wait_until_settled(name)
    if status.failure is not None:
        raise InvalidRequest(f"the model {name} could not be loaded: {status.failure}", param="model")
    if status.state != "loaded":
        raise InvalidRequest(
            f"the model {name} is {status.state}, because it was unloaded meanwhile: {status.reason}", param="model"
        )
    await context.respond_json(ModelChanged(success=True, status=_status(status)))


async def unload_model(context: RouterContext) -> None:
    """POST /models/unload: unload a model after its last request, and wait until its memory is free.

    Args:
        context: Request of the router's API.

    Raises:
        InvalidRequest: The model is not loaded on demand.
    """
    models, name = hosted_model(context, decode_body(await context.exchange.body(), NamedModel).model)
    models.unload(name)
    status = await models.wait_until_settled(name)
    await context.respond_json(ModelChanged(success=status.state == "unloaded", status=_status(status)))


async def sleep_model(context: RouterContext) -> None:
    """POST /sleep?model=NAME: free the KV cache of an idle model, and wait until its memory is free.

    Args:
        context: Request of the router's API.

    Raises:
        InvalidRequest: The model is not loaded on demand, is in use, or cannot sleep.
    """
    models, name = queried_model(context)
    Query(context.exchange.query).number("level", 1, low=1, high=1)
    models.sleep(name)
    await _respond_sleeping(context, await models.wait_until_settled(name))


async def wake_model(context: RouterContext) -> None:
    """POST /wake_up?model=NAME: wake a model, and wait until it is awake. A model that is not loaded stays so.

    Args:
        context: Request of the router's API.

    Raises:
        InvalidRequest: The model is not loaded on demand.
    """
    models, name = queried_model(context)
    if models.status(name).state == "sleeping":
        models.load(name)
    await _respond_sleeping(context, await models.wait_until_settled(name))


async def read_is_sleeping(context: RouterContext) -> None:
    """GET /is_sleeping?model=NAME.

    Args:
        context: Request of the router's API.

    Raises:
        InvalidRequest: The model is not loaded on demand.
    """
    models, name = queried_model(context)
    await _respond_sleeping(context, models.status(name))


async def _respond_sleeping(context: RouterContext, status: ModelStatus) -> None:
    await context.respond_json(IsSleeping(is_sleeping=status.state == "sleeping"))


def loading_comment(context: RouterContext, admission: AdmissionScope) -> bytes:
    """Describe what a stream waits for, as a comment that readers of events skip.

    Args:
        context: request of the router's API, for a model that is loaded on demand.
        admission: the same request.
    """
    models = context.services.models
    assert models is not None, "only models that are loaded on demand are waited for"
    shown = _status(models.status(admission.model))
    comment = LoadingComment(
        model=admission.model,
        state=shown.value,
        activity=shown.activity,
        progress=shown.progress,
        position=context.services.fleet.dispatch.position(admission),
    )
    return b": loading " + encode(comment) + b"\n\n"


async def set_keep_alive(context: RouterContext, hosted: str, body: RoutedBody) -> bool:
    """Set how long the model of a request stays loaded after it, and answer a request of Ollama's API that unloads it.

    Such a request has no prompt and a `keep_alive` of 0. A request without `keep_alive` sets the model's default.

    Args:
        context: Request of the router's API.
        hosted: name of its model.
        body: its body.

    Returns:
        True if the request was answered.

    Raises:
        InvalidRequest: `keep_alive` is no time.
    """
    models, path = context.services.models, context.exchange.path
    if models is None or hosted not in models:
        return False
    seconds = None
    if body.keep_alive is not None and path.startswith(OLLAMA_PATH):
        seconds = keep_alive_seconds(body.keep_alive)
    models.keep_alive(hosted, seconds)
    has_no_prompt = bytes(body.content) in (b"", b'""', b"[]", b"null")
    if seconds != 0 or path not in LINE_PATHS or not has_no_prompt:
        return False
    models.unload(hosted)
    model, now = body.model or hosted, iso_time(int(time.time()))
    if path == "/api/chat":
        said = OllamaReply(role="assistant", content="")
        line = OllamaChatLine(model=model, created_at=now, done=True, done_reason="unload", message=said)
        await context.respond_json(line)
    else:
        await context.respond_json(
            OllamaTextLine(model=model, created_at=now, done=True, done_reason="unload", response="")
        )
    return True


async def list_tags(context: RouterContext) -> None:
    """GET /api/tags: all models, as Ollama lists downloaded models.

    Args:
        context: Request of the router's API.
    """
    names = context.services.fleet.models()
    await context.respond_json(OllamaModels(models=[_ollama_card(context, name) for name in names]))


async def list_running(context: RouterContext) -> None:
    """GET /api/ps: the loaded models.

    Args:
        context: Request of the router's API.
    """
    cards = []
    for name in context.services.fleet.models():
        status = _status_of(context.services.models, context.services.fleet.aliases.get(name, name))
        if status is not None and status.state not in LOADED_STATES:
            continue
        card = running_card(_ollama_card(context, name))
        if status is not None and status.unloads_in_seconds is not None:
            card.expires_at = iso_time(int(time.time() + status.unloads_in_seconds))
        cards.append(card)
    await context.respond_json(OllamaRunning(models=cards))


def keep_alive_seconds(value: float | str) -> float:
    """Read the field keep_alive of Ollama's API.

    Args:
        value: seconds, or a text such as "5m", "1h30m" or "300". A negative time means forever.

    Returns:
        Seconds, or math.inf.

    Raises:
        InvalidRequest: the text is no time.
    """
    seconds = value if isinstance(value, int | float) else _duration(value)
    if seconds is None or math.isnan(seconds):
        raise InvalidRequest(
            f'keep_alive is "{str(value)[:80]}", it must be seconds or a time such as "5m" or "1h30m"',
            param="keep_alive",
        )
    return math.inf if seconds < 0 else float(seconds)


UNIT_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def _duration(text: str) -> float | None:
    """Parse a duration of Go, such as 1h30m, or a number of seconds. Return None if it is neither."""
    sign = -1.0 if text.startswith("-") else 1.0
    rest = text.lstrip("+-")
    try:
        return sign * float(rest)
    except ValueError:
        pass
    seconds = 0.0
    while rest:
        number = rest[: len(rest) - len(rest.lstrip("0123456789."))]
        rest = rest[len(number) :]
        unit = next((unit for unit in ("ns", "us", "ms", "s", "m", "h") if rest.startswith(unit)), None)
        if unit is None or not number.strip("."):
            return None
        seconds += float(number) * UNIT_SECONDS[unit] if number.count(".") < 2 else math.nan
        rest = rest[len(unit) :]
    return sign * seconds if text else None


def queried_model(context: RouterContext) -> tuple[ModelRuns[EndpointSpec], str]:
    """Find the model on demand that the query names, or the only one if the query names none. See `hosted_model`.

    Args:
        context: Request of the router's API.
    """
    named, models = context.query("model"), context.services.models
    if named is None and models is not None:
        if len(models.names) > 1:
            raise InvalidRequest(
                f"the query names no model: add ?model= with one of {', '.join(sorted(models.names))}", param="model"
            )
        named = next(iter(models.names))
    return hosted_model(context, named or "")


def hosted_model(context: RouterContext, named: str) -> tuple[ModelRuns[EndpointSpec], str]:
    """Find a model on demand.

    Args:
        context: Request of the router's API.
        named: Name or alias of the model, or name of one of its adapters.

    Returns:
        The models on demand, and the name of the model.

    Raises:
        InvalidRequest: The router has no models on demand, or none with this name.
    """
    models = context.services.models
    if models is None:
        raise InvalidRequest("this router loads no models on demand: send the request to one of its endpoints")
    name = context.services.fleet.aliases.get(named, named)
    if name not in models:
        raise InvalidRequest(
            f'the model "{named}" is not loaded on demand here; such models are: {", ".join(sorted(models.names))}',
            param="model",
        )
    return models, models.base(name)


def _status_of(models: ModelRuns[EndpointSpec] | None, name: str) -> ModelStatus | None:
    return models.status(name) if models is not None and name in models else None


def _status(status: ModelStatus) -> RoutedModelStatus:
    return RoutedModelStatus(
        value=status.state,  # type: ignore[arg-type]
        reason=status.reason,
        waiting=status.waiting,
        leases=status.leases,
        memory_bytes=status.bytes,
        load_seconds=round(status.load_seconds, 3),
        activity=UNSET if status.activity is None else status.activity,
        progress=UNSET if status.progress is None else status.progress,
        failed=True if status.failure is not None else UNSET,
        unloads_in_seconds=UNSET if status.unloads_in_seconds is None else round(status.unloads_in_seconds, 3),
    )


def _card(context: RouterContext, name: str) -> RoutedModel:
    card = RoutedModel(id=name, created=STARTED_AT, owned_by="trioserve")
    status = _status_of(context.services.models, context.services.fleet.aliases.get(name, name))
    if status is not None:
        card.status = _status(status)
        if status.name != context.services.fleet.aliases.get(name, name):
            card.parent = status.name
    return card


def _ollama_card(context: RouterContext, name: str) -> OllamaModel:
    status = _status_of(context.services.models, context.services.fleet.aliases.get(name, name))
    size = 0 if status is None else status.bytes
    return model_card(name, made_at=STARTED_AT, identity=name, weight_bytes=size)
