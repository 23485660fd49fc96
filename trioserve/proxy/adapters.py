"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter of a router.

The router sends the request to all endpoints at the same time, or to the endpoints that `?id=` names. The client gets
the result of each endpoint. If some endpoints fail, the other endpoints keep the adapter, and clients can use it.
Before it answers, the router updates its list of each endpoint's models, so that later requests reach the adapter.

A server that loads models on demand sends the request to one model, which `?model=` names. It loads the model first if
necessary, and again with the adapter at each further load.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

import msgspec
import trio

from trioserve.api.error_responses import REASON_HEADER, ErrorDetail, ErrorResponse
from trioserve.api.openai.request_types import LoadAdapterBody, UnloadAdapterBody, decode_body
from trioserve.api.response import Listing, Response
from trioserve.contracts.endpoint import EndpointId
from trioserve.contracts.errors import AdapterRefused, EndpointLost, NoEndpoint
from trioserve.proxy.model_routes import queried_model
from trioserve.proxy.router_context import ENDPOINT_PARAMETER, request_headers
from trioserve.trio_tools.errors_unwrapped import errors_unwrapped

if TYPE_CHECKING:
    from trioserve.admission.model_runs import ModelRuns
    from trioserve.proxy.fleet import EndpointSpec
    from trioserve.proxy.remote_endpoint import RemoteEndpoint
    from trioserve.proxy.router_context import RouterContext

__all__ = ["load_adapter", "unload_adapter"]

LOAD_SECONDS_MAX = 600.0  # Loading a large adapter from a slow disk takes about a minute.
# The router waits UNLOAD_SECONDS longer than the request's timeout, which limits the wait for users of the adapter.
UNLOAD_SECONDS = 30.0
ANSWER_BYTES_MAX = 64 * 1024


class _Answer(Response):
    """Result of one endpoint, which the client gets.

    Attributes:
        endpoint: Endpoint that got the request.
        status: HTTP status. 502 if there is no response, 504 if it took too long.
        message: Text for the client.
    """

    endpoint: EndpointId
    status: int
    message: str

    @property
    def is_good(self) -> bool:
        return self.status < 300


class AdapterFailure(Response):
    """Results of all endpoints, if one of them failed."""

    error: ErrorDetail
    data: list[_Answer]


class _Error(msgspec.Struct):
    message: str = ""


class _ErrorBody(msgspec.Struct):
    error: _Error


async def load_adapter(context: RouterContext) -> None:
    """Load an adapter at the chosen endpoints, and respond when all have answered.

    Args:
        context: Request of the router's API.
    """
    body = await context.exchange.body()
    asked = decode_body(body, LoadAdapterBody)
    if not asked.lora_name or not asked.lora_path:
        raise AdapterRefused("Both 'lora_name' and 'lora_path' must be provided.", reason="missing", param=None)
    if context.services.models is None:
        answers = await _ask(context, _chosen(context), body, seconds_max=LOAD_SECONDS_MAX)
    else:
        models, name = queried_model(context)
        models.check_adapter(name, asked.lora_name)
        answers = await _ask_model(context, models, name, body)
        if answers[0].is_good:
            models.set_adapter(name, asked.lora_name, asked.lora_path)
    await _respond(context, f"the lora adapter '{asked.lora_name}' was not loaded everywhere", answers)


async def unload_adapter(context: RouterContext) -> None:
    """Unload an adapter at the chosen endpoints, and respond when all have answered.

    An endpoint that does not list the adapter counts as a success, if at least one endpoint has unloaded it.

    Args:
        context: Request of the router's API.
    """
    body = await context.exchange.body()
    asked = decode_body(body, UnloadAdapterBody)
    if not asked.lora_name:
        raise AdapterRefused("'lora_name' needs to be provided to unload a LoRA adapter.", reason="missing", param=None)
    models = context.services.models
    if models is not None and asked.lora_name in models.served_names - models.names:
        await _unload_hosted(context, models, asked.lora_name, body)
        return
    chosen = _chosen(context)
    for id in chosen:
        if context.services.fleet.is_adapter_of(id, asked.lora_name):
            context.services.fleet.withdraw_model(id, asked.lora_name)
    seconds_max = None if asked.timeout is None else asked.timeout + UNLOAD_SECONDS
    answers = await _ask(context, chosen, body, seconds_max=seconds_max)
    if any(answer.is_good for answer in answers):
        answers = [
            msgspec.structs.replace(answer, status=200, message="The adapter is not loaded here.")
            if answer.status == 404 and not context.services.fleet.is_adapter_of(answer.endpoint, asked.lora_name)
            else answer
            for answer in answers
        ]
    await _respond(context, f"the lora adapter '{asked.lora_name}' was not unloaded everywhere", answers)


async def _ask_model(context: RouterContext, models: ModelRuns[EndpointSpec], name: str, body: bytes) -> list[_Answer]:
    """Load a model on demand if necessary, send the request to its endpoint, and keep it loaded until the answer."""
    async with models.leased(name) as spec:
        return await _ask(context, [spec.endpoint_id], body, seconds_max=LOAD_SECONDS_MAX)


async def _unload_hosted(context: RouterContext, models: ModelRuns[EndpointSpec], adapter: str, body: bytes) -> None:
    """Remove an adapter from a model on demand. If the model is not loaded, its next load omits the adapter."""
    name = models.base(adapter)
    answers: list[_Answer] = []
    if models.loaded(name) is not None:
        answers = await _ask_model(context, models, name, body)
    if all(answer.is_good or answer.status == 404 for answer in answers):
        models.set_adapter(name, adapter, None)
    await _respond(context, f"the lora adapter '{adapter}' was not unloaded", answers)


def _chosen(context: RouterContext) -> list[EndpointId]:
    """Return the endpoints that the query names. Without names, return all endpoints that are not being drained.

    Raises:
        AdapterRefused: The query names an unknown endpoint.
        NoEndpoint: There is no endpoint.
    """
    ids = [
        state.id
        for state in context.services.fleet.dispatch.endpoints
        if not context.services.fleet.is_draining(state.id)
    ]
    named = [EndpointId(value) for key, value in parse_qsl(context.exchange.query) if key == ENDPOINT_PARAMETER]
    for id in named:
        if id not in ids:
            raise AdapterRefused(
                f'id is "{id[:160]}", and no endpoint has this id: GET /endpoints lists them',
                reason="endpoint_not_found",
                param=ENDPOINT_PARAMETER,
            )
    if not ids:
        raise NoEndpoint("there is no endpoint: add one first", reason="no_endpoint", retry_after_seconds=5)
    return list(dict.fromkeys(named)) or ids


async def _ask(
    context: RouterContext, ids: list[EndpointId], body: bytes, *, seconds_max: float | None
) -> list[_Answer]:
    """Send the request to all chosen endpoints at the same time.

    If the caller is cancelled, the requests to the endpoints are cancelled too. An endpoint still completes the work
    that it has begun.
    """
    answers: dict[EndpointId, _Answer] = {}

    async def ask(remote: RemoteEndpoint) -> None:
        id = remote.id
        answers[id] = _Answer(endpoint=id, status=504, message=f"The endpoint did not answer within {seconds_max} s.")
        with trio.move_on_after(math.inf if seconds_max is None else seconds_max):
            answers[id] = await _answer(context, remote, body)
        if id in context.services.fleet.specs():
            await context.services.fleet.ask_models(id)

    with errors_unwrapped():
        async with trio.open_nursery() as nursery:
            # Look up the clients before the tasks start, because an endpoint may leave the fleet before its task runs.
            for remote in [context.services.fleet.remote(id) for id in ids]:
                nursery.start_soon(ask, remote)
    return [answers[id] for id in ids]


async def _answer(context: RouterContext, remote: RemoteEndpoint, body: bytes) -> _Answer:
    headers = request_headers(context, None)
    id = remote.id
    try:
        async with remote.request("POST", context.exchange.path, headers, body) as response:
            said = await response.whole(ANSWER_BYTES_MAX) or b""
    except EndpointLost as error:
        return _Answer(endpoint=id, status=502, message=str(error))
    return _Answer(endpoint=id, status=response.status, message=_message(said))


def _message(said: bytes) -> str:
    """Return the message of an error of trioserve or vLLM, or the beginning of the body."""
    try:
        return msgspec.json.decode(said, type=_ErrorBody).error.message
    except msgspec.DecodeError:
        return said.decode("utf-8", "replace")[:500]


async def _respond(context: RouterContext, failure: str, answers: list[_Answer]) -> None:
    """Send the results of all endpoints.

    The status is the common status of all endpoints, or 502 if they differ.
    """
    bad = [answer for answer in answers if not answer.is_good]
    if not bad:
        await context.respond_json(Listing(data=answers))
        return
    statuses = {answer.status for answer in answers}
    status = statuses.pop() if len(statuses) == 1 else 502
    code = "adapter_failed" if len(bad) == len(answers) else "adapter_failed_in_part"
    good = ", ".join(answer.endpoint for answer in answers if answer.is_good)
    parts = [f"{answer.endpoint}: {answer.status} {answer.message}" for answer in bad]
    message = f"{failure}. {'; '.join(parts)}" + (f". It succeeded at {good}, and is not undone there." if good else "")
    error = ErrorResponse(
        status=status,
        type="invalid_request_error" if status < 500 else "server_error",
        code=code,
        message=message,
    )
    failed = AdapterFailure(error=error.body().error, data=answers)
    await context.respond_json(failed, status=status, headers=((REASON_HEADER, code),))
