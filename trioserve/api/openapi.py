"""The API's own description, OpenAPI 3.1: paths from the routes, bodies and responses from their types, what each path
does and may answer from the table here. It is served, and tests hold it against what the server really does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from trioserve.api.deadline_fields import HEADERS as DEADLINE_HEADERS
from trioserve.api.openai import response_types
from trioserve.api.openai.request_types import (
    REFUSED,
    AbortBody,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    TokenizeBody,
)
from trioserve.api.operations.health import VERSION
from trioserve.contracts.kv_events import BlocksRemoved, BlocksStored, ResidencySnapshot
from trioserve.contracts.request import PRIORITY_MAX, PRIORITY_MIN
from trioserve.contracts.sampling import SAMPLING_RANGES, Range

if TYPE_CHECKING:
    from trioserve.api.app import Route
    from trioserve.api.request_context import RequestContext

__all__ = ["OPERATIONS", "DescribedOperation", "openapi_document"]

REF = "#/components/schemas/{name}"


class DescribedOperation(msgspec.Struct, frozen=True, kw_only=True):
    """What a method on a path takes and gives.

    answer: type of the JSON with status 200, or the media type of what is no JSON. event: the type of a stream's events
    when the body has `"stream": true`; kinds: the types of those of a stream that is the whole response. errors:
    statuses that come with an Error. path_parameter: what it is.
    """

    summary: str
    response: type | str
    description: str = ""
    body: type | None = None
    event: type | None = None
    kinds: tuple[type, ...] = ()
    errors: tuple[int, ...] = (400,)
    not_ready: type | None = None
    path_parameter: str = ""
    takes_deadlines: bool = False


_READS_BODY = (400, 408, 413, 415, 429, 503)
_GENERATES = (*_READS_BODY, 404, 500, 504)

OPERATIONS: dict[tuple[str, str], DescribedOperation] = {
    ("POST", "/v1/chat/completions"): DescribedOperation(
        summary="Answer a chat",
        description="Fields, and their meanings, are OpenAI's and vLLM's. Fields that are not named here are ignored.",
        body=ChatBody,
        response=response_types.ChatCompletion,
        event=response_types.ChatCompletionChunk,
        errors=_GENERATES,
        takes_deadlines=True,
    ),
    ("POST", "/v1/completions"): DescribedOperation(
        summary="Continue one or more prompts",
        description="Choice number prompt_index * n + i is choice i of that prompt. As above for everything else.",
        body=CompletionBody,
        response=response_types.Completion,
        event=response_types.Completion,
        errors=_GENERATES,
        takes_deadlines=True,
    ),
    ("GET", "/v1/models"): DescribedOperation(summary="List the names that are served", response=response_types.Models),
    ("GET", "/v1/models/{model}"): DescribedOperation(
        summary="Find a model by its name",
        response=response_types.Model,
        errors=(400, 404),
        path_parameter="name of the model, slashes included",
    ),
    ("GET", "/v1/requests"): DescribedOperation(
        summary="List the requests that live",
        description="Those of the caller's key; all of them with the admin key, or where there are no keys. Answered "
        "ones, too, while their blocks are held for another engine.",
        response=response_types.LiveRequests,
    ),
    ("DELETE", "/v1/requests/{request}"): DescribedOperation(
        summary="Abort a request",
        description="Its blocks are free with the next step. The client of its stream gets an error event. Of one that "
        "has its response, and whose blocks are held for another engine, the hold is ended.",
        response=response_types.RequestAbort,
        errors=(400, 404),
        path_parameter="the request's X-Request-Id",
    ),
    ("POST", "/v1/requests/abort"): DescribedOperation(
        summary="Abort several requests",
        body=AbortBody,
        response=response_types.RequestAborts,
        errors=_READS_BODY,
    ),
    ("POST", "/tokenize"): DescribedOperation(
        summary="Show the tokens of a prompt or a chat",
        body=TokenizeBody,
        response=response_types.Tokenized,
        errors=(*_READS_BODY, 404),
    ),
    ("POST", "/detokenize"): DescribedOperation(
        summary="Show the text of tokens",
        body=DetokenizeBody,
        response=response_types.Detokenized,
        errors=(*_READS_BODY, 404),
    ),
    ("GET", "/tokenizer_info"): DescribedOperation(
        summary="Say what a client needs to render chats and to count tokens by itself",
        response=response_types.TokenizerInfo,
    ),
    ("GET", "/kv_events"): DescribedOperation(
        summary="Read which blocks the prefix cache holds, and each change from then on",
        description="A snapshot, in one part or several, then changes, numbered in order. Another snapshot means that "
        "changes were missed. Only where the server was started with --kv-events; with API keys, only for the admin's.",
        response="text/event-stream",
        kinds=(ResidencySnapshot, BlocksStored, BlocksRemoved),
        errors=(400, 403, 404, 429, 503),
    ),
    ("GET", "/health"): DescribedOperation(
        summary="Whether the process lives, and its engine does not hang",
        response=response_types.Alive,
        not_ready=response_types.Hangs,
    ),
    ("GET", "/ready"): DescribedOperation(
        summary="Whether requests are taken", response=response_types.Ready, not_ready=response_types.NotReady
    ),
    ("GET", "/load"): DescribedOperation(summary="How much there is to do", response=response_types.Load),
    ("GET", "/version"): DescribedOperation(summary="Version of the server", response=response_types.Version),
    ("GET", "/metrics"): DescribedOperation(summary="Metrics, in Prometheus' text format", response="text/plain"),
    ("GET", "/openapi.json"): DescribedOperation(summary="This description", response="application/json"),
}

STATUSES = {
    400: "The request cannot be served as it stands; error.param names the field.",
    401: "An API key is needed, and none or a wrong one came.",
    403: "An API key came that may not do this.",
    404: "There is no such model or request, or it is switched off.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is compressed in a way that is not read here; Accept-Encoding says which are.",
    429: "Too much at a time: Retry-After says when to try again, X-Trioserve-Reason which bound it was.",
    500: "The server failed on this request.",
    503: "The server is leaving, or the request was aborted; another one may take it.",
    504: "A deadline of the request has passed; error.code says which.",
    507: "There is no room for what was to be stored: delete some, or send store=false.",
}

_STRING = {"type": "string"}
_RESPONSE_HEADERS = {
    "X-Request-Id": {"description": "the request's id: its client's, or the server's", "schema": _STRING},
}
_REFUSAL_HEADERS = {
    **_RESPONSE_HEADERS,
    "X-Trioserve-Reason": {"description": "why, in one word for programs", "schema": _STRING},
    "Retry-After": {"description": "seconds, where it may help", "schema": {"type": "string", "pattern": "^[0-9]+$"}},
}
_REQUEST_ID = {
    "name": "X-Request-Id",
    "in": "header",
    "description": "an id of the client's own, printable ASCII",
    "schema": {"type": "string", "minLength": 1, "maxLength": 128, "pattern": "^[ -~]+$"},
}


def openapi_document(routes: Iterable[Route[RequestContext]]) -> dict[str, Any]:
    """The description of these routes, ready to become JSON."""
    components = _components()
    return {
        "openapi": "3.1.0",
        "info": {"title": "trioserve", "version": VERSION, "license": {"name": "Apache-2.0"}},
        "paths": {
            route.path: {
                method.lower(): _operation(OPERATIONS[method, route.path], route, method) for method in route.operations
            }
            for route in routes
        },
        "components": {
            "schemas": components,
            "securitySchemes": {
                "apiKey": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "Needed only where the server was started with API keys.",
                },
                "apiKeyHeader": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "The same key."},
            },
        },
    }


def _operation(described: DescribedOperation, route: Route[RequestContext], method: str) -> dict[str, Any]:
    parameters: list[dict[str, Any]] = [_REQUEST_ID]
    if described.path_parameter:
        name = route.path.partition("{")[2].rstrip("}")
        schema = {"type": "string", "minLength": 1}
        parameters.append(
            {"name": name, "in": "path", "required": True, "description": described.path_parameter, "schema": schema}
        )
    if described.takes_deadlines:
        for deadline, header in DEADLINE_HEADERS.items():
            text = f"seconds, unless the body has {deadline.value}"
            parameters.append(
                {"name": header, "in": "header", "description": text, "schema": {"type": "number", "minimum": 0}}
            )
    operation: dict[str, Any] = {
        "operationId": f"{method.lower()}{route.path.translate(_NO_PUNCTUATION)}",
        "summary": described.summary,
        "parameters": parameters,
        "responses": _responses(described, needs_key=route.needs_key),
        "security": [{"apiKey": []}, {"apiKeyHeader": []}, {}] if route.needs_key else [],
    }
    if described.description:
        operation["description"] = described.description
    if described.body is not None:
        # Any other content type is read as JSON, too.
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": _ref(described.body)}}}
    return operation


def _responses(described: DescribedOperation, *, needs_key: bool) -> dict[str, Any]:
    if isinstance(described.response, str):
        content: dict[str, Any] = {described.response: {}}
        if described.kinds:
            content[described.response] = {
                "x-description": 'Each event is one line "data: JSON", where JSON is as in x-event. Lines that begin '
                "with a colon say that the server lives.",
                "x-event": {"anyOf": [_ref(kind) for kind in described.kinds]},
            }
    else:
        content = {"application/json": {"schema": _ref(described.response)}}
    if described.event is not None:
        # No schema: some tools take it for that of the whole body, and some for that of an event.
        content["text/event-stream"] = {
            "x-description": 'With "stream": true. Each event is one line "data: JSON", where JSON is as in x-event. '
            'The last one is "data: [DONE]", or, if the response could not be completed, an Error. Lines that begin '
            "with a colon keep the connection alive.",
            "x-event": {"anyOf": [_ref(described.event), _ref(response_types.Error)]},
        }
    responses: dict[str, Any] = {"200": {"description": "As asked.", "headers": _RESPONSE_HEADERS, "content": content}}
    for status in sorted({*described.errors, *([401] if needs_key else [])}):
        responses[str(status)] = {
            "description": STATUSES[status],
            "headers": _REFUSAL_HEADERS,
            "content": {"application/json": {"schema": _ref(response_types.Error)}},
        }
    if described.not_ready is not None:
        responses["503"] = {
            "description": "Not now; why is in reason.",
            "headers": _REFUSAL_HEADERS,
            "content": {"application/json": {"schema": _ref(described.not_ready)}},
        }
    return responses


def _components() -> dict[str, Any]:
    used: dict[str, type] = {}
    for described in OPERATIONS.values():
        kinds = (described.body, described.response, described.event, described.not_ready, response_types.Error)
        for kind in (*kinds, *described.kinds):
            if isinstance(kind, type):
                used[kind.__name__] = kind
    _, components = msgspec.json.schema_components(used.values(), ref_template=REF)
    for schema in components.values():
        for field, reason in REFUSED.items():
            if field in schema.get("properties", ()):
                schema["properties"][field] = {"type": "null", "description": f"not supported: {reason}"}
    for name, kind in used.items():
        if issubclass(kind, GenerationBody):
            for field, allowed in _RANGES.items():
                _say_range(components[name]["properties"].get(field, {}), allowed)
    return components


_RANGES = SAMPLING_RANGES | {
    "max_completion_tokens": SAMPLING_RANGES["max_tokens"],
    "top_logprobs": SAMPLING_RANGES["logprobs"],
    "priority": Range(PRIORITY_MIN, PRIORITY_MAX),
}


def _say_range(schema: dict[str, Any], allowed: Range) -> None:
    """Of the numbers in this schema of a field: the field itself, or its entries."""
    if schema.get("type") in ("integer", "number"):
        schema["exclusiveMinimum" if allowed.is_low_excluded else "minimum"] = allowed.low
        if allowed.high is not None:
            schema["maximum"] = allowed.high
    entries = [schema[word] for word in ("items", "additionalProperties") if word in schema]
    for part in [*schema.get("anyOf", ()), *entries]:
        _say_range(part, allowed)


def _ref(kind: type) -> dict[str, str]:
    return {"$ref": REF.format(name=kind.__name__)}


_NO_PUNCTUATION = str.maketrans({"/": "_", ".": "_", "{": None, "}": None})
