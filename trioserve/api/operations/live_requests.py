"""Running requests: list them, abort them by id, end their reasoning, and hand them over to another server.

With API keys, a key sees and aborts only its own requests, and the admin's key sees and aborts all requests. Without
keys, everybody sees all requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from msgspec import UNSET, UnsetType

from trioserve.api.caller import check_may_operate
from trioserve.api.error_responses import HandedOver, Refusal, refusal
from trioserve.api.openai.request_types import AbortBody, AbortRequestBody, AbortRequestsBody, ControlBody, decode_body
from trioserve.api.request_context import EngineContext, RequestContext
from trioserve.api.response import Response
from trioserve.api.route_table import READS_BODY, Operation
from trioserve.api.sse import encode
from trioserve.api.streams.cursors import ResumeBody, resume_body, shown_logprobs
from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.events import AbortOutcome, FinishReason, HandOverOutcome, Phase, TokenLogprob
from trioserve.contracts.page import LiveRequestView
from trioserve.contracts.sampling import ReasoningOutcome
from trioserve.contracts.weights import WeightVersions

if TYPE_CHECKING:
    from trioserve.contracts.resume import AbortResult, Partial

__all__ = [
    "HAND_OVER",
    "OPERATIONS",
    "REQUEST_PATH",
    "AbortedRequests",
    "PartialResult",
    "RequestAbort",
    "RequestAborts",
    "abort_request",
    "abort_requests",
    "checked_ids",
    "hand_over_event",
    "list_requests",
    "respond_aborted",
    "unknown_request",
]

REQUEST_PATH = "/v1/requests/"
"""Path before a request's id, which may have slashes."""


ABORTS_MAX = 1000  # The number of ids in one call is limited, because each id adds an entry to the response.


class LiveRequest(Response, tag_field="object", tag="request"):
    """A running request.

    Attributes:
        age_seconds: time since the request arrived.
        blocks: blocks of the KV cache that the request uses, or that are held for another engine (state "held").
    """

    id: str
    state: str
    phase: Phase
    priority: int
    age_seconds: float
    prompt_tokens: int
    completion_tokens: int
    blocks: int


class LiveRequests(Response, tag_field="object", tag="list"):
    data: list[LiveRequest]


class PartialChoice(Response):
    """Partial result of one choice.

    Attributes:
        weight_versions: pairs of a weight version and the number of tokens that it sampled. Empty: the weights were
            never replaced.
    """

    index: int
    token_ids: Sequence[int]
    logprobs: list[TokenLogprob] | None
    weight_versions: WeightVersions
    finish_reason: FinishReason | None


class PartialResult(Response):
    """Output that the client of a request has received, or receives by the end of its response.

    Attributes:
        resume: value of the field `resume` in the next, otherwise unchanged request. It continues the response.
    """

    choices: list[PartialChoice]
    resume: ResumeBody


class RequestAbort(Response, tag_field="object", tag="request.abort"):
    """Result of aborting one id.

    Attributes:
        partials: partial results, one for each request with this id. Unset: they were not asked for.
    """

    id: str
    result: AbortOutcome
    partials: list[PartialResult] | UnsetType = UNSET


class RequestControl(Response, tag_field="object", tag="request.control"):
    """Result of a change to a running request.

    Attributes:
        result: "ending": the model writes the end of the reasoning next.
    """

    id: str
    result: Literal["ending"]


class RequestHandOver(Response, tag_field="object", tag="request.hand_over"):
    id: str
    result: Literal["handed_over"]


class RequestAborts(Response, tag_field="object", tag="list"):
    data: list[RequestAbort]


class AbortedRequests(Response, tag_field="status", tag="aborted"):
    """Result of vLLM's /abort_requests.

    Attributes:
        aborted: number of running requests that were aborted.
    """

    aborted: int


async def list_requests(context: RequestContext) -> None:
    views = context.engine.live_requests(owner=context.owner)
    await context.respond_json(LiveRequests(data=[_shown(view) for view in views]))


async def abort_request(context: EngineContext) -> None:
    """Abort one request, and respond with the result.

    Args:
        context: the request.

    Raises:
        Refusal: the caller has no request with this id (404).
    """
    request_id = context.exchange.path.removeprefix(REQUEST_PATH)
    outcome = context.engine.abort([request_id], owner=context.owner)[request_id]
    if outcome is AbortOutcome.UNKNOWN:
        raise unknown_request(request_id)
    await context.respond_json(RequestAbort(id=request_id, result=outcome))


def unknown_request(request_id: str) -> Refusal:
    """Make the error (404) for an id that no running request of the caller has."""
    return refusal(
        "request_not_found",
        f"no request with the id {request_id!r} is known; every response has its id in X-Request-Id",
    )


async def abort_requests(context: EngineContext) -> None:
    """Abort several requests. Responds with one result for each id, in the same order.

    Args:
        context: the request.

    Raises:
        InvalidRequest: the body has a bad value, or asks for partial results.
    """
    body = decode_body(await context.exchange.body(), AbortBody)
    if body.return_partial:
        raise InvalidRequest(
            "return_partial is set, but this server has no partial results: send it to a text engine",
            param="return_partial",
        )
    await respond_aborted(context, body)


async def respond_aborted(context: EngineContext, body: AbortBody) -> None:
    """Abort requests, and respond without partial results.

    Args:
        context: the request.
        body: ids of the requests to abort.

    Raises:
        InvalidRequest: there are too many ids, or none.
    """
    outcomes = context.engine.abort(checked_ids(body.ids), owner=context.owner, min_age_seconds=body.min_age_seconds)
    results = [RequestAbort(id=request_id, result=outcome) for request_id, outcome in outcomes.items()]
    await context.respond_json(RequestAborts(data=results))


def checked_ids(ids: list[str]) -> list[str]:
    """Check the number of ids.

    Args:
        ids: ids of requests.

    Raises:
        InvalidRequest: there are too many ids, or none.
    """
    if not 1 <= len(ids) <= ABORTS_MAX:
        raise InvalidRequest(f"ids has {len(ids)} entries, allowed are 1 to {ABORTS_MAX}", param="ids")
    return ids


def _shown(view: LiveRequestView) -> LiveRequest:
    return LiveRequest(
        id=view.id,
        state=view.state,
        phase=view.phase,
        priority=view.priority,
        age_seconds=round(view.age_seconds, 3),
        prompt_tokens=view.prompt_token_count,
        completion_tokens=view.completion_token_count,
        blocks=view.block_count,
    )


async def abort_with_partials(context: RequestContext) -> None:
    """Abort several requests. Responds with one result for each id, in the same order.

    Args:
        context: the request.

    Raises:
        InvalidRequest: the body has a bad value.
    """
    body = await context.body(AbortBody)
    if body.min_age_seconds:
        if body.return_partial:
            raise InvalidRequest(
                "min_age_seconds and return_partial are both set: leave one of them out", param="min_age_seconds"
            )
        await respond_aborted(context, body)
        return
    cut = context.engine.abort_with_partial(checked_ids(body.ids), owner=context.owner)
    await _respond(context, cut, with_partials=body.return_partial)


async def abort_for_sglang(context: RequestContext) -> None:
    """Abort one request, or all requests of the caller, as SGLang's /abort_request.

    Args:
        context: the request.

    Raises:
        InvalidRequest: the body has both an id and abort_all, or neither.
        Refusal: the body has no ids, and the caller may not operate the server (403).
    """
    body = await context.body(AbortRequestBody)
    if bool(body.rid) is body.abort_all:
        raise InvalidRequest("send either the id of a request as rid, or abort_all", param="rid")
    ids = [body.rid]
    if body.abort_all:
        check_may_operate(context.caller)
        ids = [view.id for view in context.engine.live_requests(owner=context.owner)]
    cut = context.engine.abort_with_partial(ids, owner=context.owner)
    await _respond(context, cut, with_partials=body.return_partial)


async def abort_for_vllm(context: RequestContext) -> None:
    """Abort requests as vLLM's /abort_requests does. Without ids, abort all requests of the caller.

    Args:
        context: the request.

    Raises:
        InvalidRequest: the body has a bad value.
        Refusal: the body has no ids, and the caller may not operate the server (403).
    """
    ids = (await context.body(AbortRequestsBody)).request_ids
    if ids:
        checked_ids(ids)
    else:
        check_may_operate(context.caller)
        ids = [view.id for view in context.engine.live_requests(owner=context.owner)]
    outcomes = context.engine.abort(ids, owner=context.owner)
    aborted = sum(outcome is AbortOutcome.ABORTED for outcome in outcomes.values())
    await context.respond_json(AbortedRequests(aborted=aborted))


async def _respond(context: RequestContext, cut: Mapping[str, AbortResult], *, with_partials: bool) -> None:
    results = [
        RequestAbort(
            id=request_id,
            result=one.outcome,
            partials=[_partial_shown(partial) for partial in one.partials] if with_partials else UNSET,
        )
        for request_id, one in cut.items()
    ]
    await context.respond_json(RequestAborts(data=results))


def _partial_shown(partial: Partial) -> PartialResult:
    resume = partial.resume
    return PartialResult(
        choices=[
            PartialChoice(
                index=index,
                token_ids=choice.token_ids,
                logprobs=None if choice.logprobs is None else shown_logprobs(choice.logprobs),
                weight_versions=choice.weight_versions,
                finish_reason=choice.finish_reason,
            )
            for index, choice in enumerate(partial.choices)
        ],
        resume=resume_body([resume], prompt_digest=resume.prompt_digest, seed=resume.seed),
    )


async def control_request(context: RequestContext) -> None:
    """End the reasoning of a request. Responds when the model is about to write the end of the reasoning.

    Args:
        context: the request.

    Raises:
        InvalidRequest: the body asks for nothing.
        Refusal: the caller has no request with this id (404), or the request has no reasoning to end (409).
    """
    body = await context.body(ControlBody)
    if body.end_thinking is not True:
        raise InvalidRequest(
            'the body asks for no change: send {"end_thinking": true}, or abort the request with DELETE',
            param="end_thinking",
        )
    request_id = context.exchange.path.removeprefix(REQUEST_PATH)
    outcome = context.engine.end_reasoning([request_id], owner=context.owner)[request_id]
    if outcome is ReasoningOutcome.UNKNOWN:
        raise unknown_request(request_id)
    if outcome is ReasoningOutcome.NO_REASONING:
        raise refusal(
            "no_thought",
            f"the request {request_id!r} has no reasoning to end: its model writes none, or the reasoning has "
            "ended already",
        )
    await context.respond_json(RequestControl(id=request_id, result="ending"))


HAND_OVER = "/hand-over"
HANDED_OVER_ID = b"id: >"


async def hand_over_stream(context: RequestContext) -> None:
    """Hand a stream over to another server. Responds when the stream is about to end.

    Args:
        context: the request.

    Raises:
        Refusal: the caller has no request with this id (404), or the request cannot be continued elsewhere (409).
    """
    request_id = context.exchange.path.removeprefix(REQUEST_PATH).removesuffix(HAND_OVER)
    outcome = context.engine.hand_over([request_id], owner=context.owner)[request_id]
    if outcome is HandOverOutcome.UNKNOWN:
        raise unknown_request(request_id)
    if outcome is HandOverOutcome.NOT_POSSIBLE:
        raise refusal(
            "no_hand_over",
            f"the request {request_id!r} cannot be handed over: it does not run at this moment, or it is not a "
            "stream that was requested with X-Trioserve-Resumable",
        )
    await context.respond_json(RequestHandOver(id=request_id, result="handed_over"))


def hand_over_event(handed: HandedOver) -> bytes:
    """Make the last event of a stream that was handed over.

    Args:
        handed: how another server fetches the KV.
    """
    event = encode({"object": "hand_over", "kv_transfer_params": handed.kv_transfer})
    return b"data: %b\n%b\n\n" % (event, HANDED_OVER_ID)


OPERATIONS: tuple[Operation[RequestContext], ...] = (
    Operation(
        method="GET",
        path="/v1/requests",
        handler=list_requests,
        summary="List running requests",
        is_operators=True,
        description="Lists the requests of the caller's key, or all requests with the admin's key or without keys. "
        "Includes finished requests whose blocks are held for another engine.",
        response=LiveRequests,
    ),
    Operation(
        method="DELETE",
        path="/v1/requests/{request}",
        handler=abort_request,
        summary="Abort a request",
        id_has_slashes=True,
        description="Its blocks are free after the next step. A streaming client gets an error event. If the request "
        "has finished and its blocks are held for another engine, they are released.",
        response=RequestAbort,
        errors=(400, 404),
        path_parameter="the request's X-Request-Id",
    ),
    Operation(
        method="POST",
        path="/v1/requests/abort",
        handler=abort_with_partials,
        summary="Abort several requests",
        description="With return_partial, the response has the partial result of each request, which can be resumed.",
        body=AbortBody,
        response=RequestAborts,
        errors=READS_BODY,
    ),
    Operation(
        method="POST",
        path="/abort_request",
        handler=abort_for_sglang,
        summary="Abort one request, or all of the caller (SGLang's name)",
        body=AbortRequestBody,
        response=RequestAborts,
        errors=READS_BODY,
    ),
    Operation(
        method="POST",
        path="/abort_requests",
        handler=abort_for_vllm,
        summary="Abort several requests (vLLM's name)",
        body=AbortRequestsBody,
        response=AbortedRequests,
        errors=READS_BODY,
    ),
    Operation(
        method="POST",
        path="/v1/requests/{request}",
        handler=control_request,
        summary="End the reasoning of a running request",
        id_has_slashes=True,
        description="The model continues after the end of the reasoning. 409 if the request has no reasoning to end.",
        body=ControlBody,
        response=RequestControl,
        errors=(*READS_BODY, 404, 409),
        path_parameter="the request's X-Request-Id",
    ),
    Operation(
        method="POST",
        path="/v1/requests/{request}/hand-over",
        handler=hand_over_stream,
        summary="Hand a stream over to another server",
        id_has_slashes=True,
        description="The stream ends after the step in flight at the latest, with a last complete group. If a "
        "connector holds its KV, an event then says how to fetch it. Only running streams that were requested with "
        "X-Trioserve-Resumable can be handed over; 409 otherwise.",
        response=RequestHandOver,
        errors=(400, 404, 409),
        path_parameter="the request's X-Request-Id",
    ),
)
