"""The OpenAPI 3.1 document of the API.

The declared operations determine the paths and descriptions, and the body types determine the schemas. The server
serves the document, and tests compare the document with the server's behaviour.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from trioserve.api.openai.embeddings import PoolingBody
from trioserve.api.openai.request_types import HEADERS as DEADLINE_HEADERS
from trioserve.api.openai.request_types import REFUSED
from trioserve.api.route_table import Operation
from trioserve.contracts.extras import VERSION
from trioserve.contracts.sampling import Range

__all__ = ["openapi_document"]

REF = "#/components/schemas/{name}"
TAKEN_BY_SOME = ("truncate_prompt_tokens",)
"""Fields that bodies of pooling requests may have, and other bodies may not."""


STATUSES = {
    400: "The request is invalid; error.param names the field.",
    401: "An API key is needed, and it is missing or wrong.",
    403: "The API key does not allow this.",
    404: "The model, the request or another named object does not exist, or the function is switched off.",
    410: "The requested events are no longer kept.",
    408: "The body did not arrive in time.",
    409: "The state of the request or response does not allow this.",
    413: "The body is too large.",
    415: "The compression of the body is not supported; Accept-Encoding lists those that are.",
    426: "The path takes only websockets.",
    429: "A limit was reached: X-Trioserve-Reason names it, and Retry-After says when to try again.",
    500: "The server failed on this request.",
    503: "The server is shutting down, or the request was aborted; another server may accept it.",
    504: "A deadline of the request has passed; error.code says which.",
    529: "The server accepts no requests now, or the request was aborted; another server may accept it.",
    507: "The store is full: delete stored objects, or send store=false.",
}

_STRING = {"type": "string"}
_RESPONSE_HEADERS = {
    "X-Request-Id": {"description": "id of the request, chosen by the client or the server", "schema": _STRING},
}
_REFUSAL_HEADERS = {
    **_RESPONSE_HEADERS,
    "X-Trioserve-Reason": {"description": "reason, in one word for programs", "schema": _STRING},
    "Retry-After": {
        "description": "seconds until a retry may succeed",
        "schema": {"type": "string", "pattern": "^[0-9]+$"},
    },
}
_REQUEST_ID = {
    "name": "X-Request-Id",
    "in": "header",
    "description": "id of the request that the client chooses, printable ASCII",
    "schema": {"type": "string", "minLength": 1, "maxLength": 128, "pattern": "^[ -~]+$"},
}


def openapi_document(operations: Sequence[Operation[Any]]) -> dict[str, Any]:
    """Make the OpenAPI document of some operations.

    Args:
        operations: all operations of a server.
    """
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _described(operation)
    components = _components(operations)
    return {
        "openapi": "3.1.0",
        "info": {"title": "trioserve", "version": VERSION, "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "apiKey": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "Needed only if the server was started with API keys.",
                },
                "apiKeyHeader": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "The same key."},
            },
        },
    }


def _described(described: Operation[Any]) -> dict[str, Any]:
    parameters: list[dict[str, Any]] = [_REQUEST_ID]
    if described.path_parameter:
        name = described.path.partition("{")[2].partition("}")[0]
        schema = {"type": "string", "minLength": 1}
        parameters.append(
            {"name": name, "in": "path", "required": True, "description": described.path_parameter, "schema": schema}
        )
    for name, (text, schema) in described.query.items():
        parameters.append({"name": name, "in": "query", "description": text, "schema": schema})
    if described.takes_deadlines:
        for deadline, header in DEADLINE_HEADERS.items():
            text = f"deadline in seconds, if the body does not set {deadline.value}"
            parameters.append(
                {"name": header, "in": "header", "description": text, "schema": {"type": "number", "minimum": 0}}
            )
    operation: dict[str, Any] = {
        "operationId": f"{described.method.lower()}{described.path.translate(_NO_PUNCTUATION)}",
        "summary": described.summary,
        "parameters": parameters,
        "responses": _responses(described),
        "security": [{"apiKey": []}, {"apiKeyHeader": []}, {}] if described.needs_key else [],
    }
    key = "Needs the admin's key, if there are keys." if described.admin_action else ""
    if text := " ".join(filter(None, (described.description, key))):
        operation["description"] = text
    if described.body is not None:
        # The server accepts a JSON body with any other content type too.
        content = {described.body_media: {"schema": _ref(described.body)}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _responses(described: Operation[Any]) -> dict[str, Any]:
    if isinstance(described.response, str):
        content: dict[str, Any] = {described.response: {}}
        if described.kinds:
            content[described.response] = {
                "x-description": 'Each event is one line "data: JSON", where JSON is as in x-event. Lines that begin '
                "with a colon keep the connection alive.",
                "x-event": {"anyOf": [_ref(kind) for kind in described.kinds]},
            }
    else:
        content = {"application/json": {"schema": _ref(described.response)}}
    if described.event is not None:
        # The key is not `schema`, because some tools apply `schema` to the whole body, and other tools to one event.
        content["text/event-stream"] = {
            "x-description": 'With "stream": true. Each event is one line "data: JSON", where JSON is as in x-event. '
            'The last one is "data: [DONE]", or, if the response could not be completed, an Error. Lines that begin '
            "with a colon keep the connection alive.",
            "x-event": {"anyOf": [_ref(described.event), _ref(described.error)]},
        }
    if described.line is not None:
        content["application/x-ndjson"] = {
            "x-description": 'Unless "stream" is false. Each line is JSON as in x-line. If the response could not be '
            "completed, the last one is an error. Spaces before a line keep the connection alive.",
            "x-line": {"anyOf": [_ref(described.line), _ref(described.error)]},
        }
    if described.named_events:
        content["text/event-stream"] = {
            "x-description": 'With "stream": true. Each event is a line "event: NAME" and a line "data: JSON", where '
            "JSON is as in x-event and its type is NAME. If the response could not be completed, the last one is an "
            "error.",
            "x-event": {"anyOf": [_ref(kind) for kind in (*described.named_events, described.error)]},
        }
    responses: dict[str, Any] = {
        "200": {"description": "The request succeeded.", "headers": _RESPONSE_HEADERS, "content": content}
    }
    if described.is_websocket:
        responses = {"101": {"description": "The websocket is open."}}
    for status in sorted({*described.errors, *([401] if described.needs_key else [])}):
        responses[str(status)] = {
            "description": STATUSES[status],
            "headers": _REFUSAL_HEADERS,
            "content": {"application/json": {"schema": _ref(described.error)}},
        }
    if described.not_ready is not None:
        responses["503"] = {
            "description": "The server is not ready; the field reason says why.",
            "headers": _REFUSAL_HEADERS,
            "content": {"application/json": {"schema": _ref(described.not_ready)}},
        }
    return responses


def _components(operations: Sequence[Operation[Any]]) -> dict[str, Any]:
    used: dict[str, type] = {}
    for described in operations:
        kinds = (
            described.body,
            described.response,
            described.event,
            described.line,
            described.not_ready,
            described.error,
        )
        for kind in (*kinds, *described.kinds, *described.named_events):
            if isinstance(kind, type):
                used[kind.__name__] = kind
    _, components = msgspec.json.schema_components(used.values(), ref_template=REF)
    for name, schema in components.items():
        _describe_properties(schema)
        taken = TAKEN_BY_SOME if issubclass(used.get(name, object), PoolingBody) else ()
        for field, reason in REFUSED.items():
            if field in schema.get("properties", ()) and field not in taken:
                schema["properties"][field] = {"type": "null", "description": f"not supported: {reason}"}
    for described in operations:
        if described.body is not None:
            properties = components[described.body.__name__]["properties"]
            for field, reason in described.refused.items():
                if field in properties:
                    properties[field] = {"type": "null", "description": f"not supported: {reason}"}
            for place, allowed in described.ranges.items():
                inner, _, field = place.rpartition(".")
                _say_range(components[inner or described.body.__name__]["properties"].get(field, {}), allowed)
    return components


def _describe_properties(schema: dict[str, Any]) -> None:
    """Move the section "Attributes:" of a type's docstring to the descriptions of the type's properties."""
    description = inspect.cleandoc(schema.get("description", ""))
    text, _, section = description.partition("\nAttributes:\n")
    if description:
        schema["description"] = text.strip()
    if section:
        for name, meaning in re.findall(r"^ {4}(\w+): (.+(?:\n {5,}.+)*)", section, re.MULTILINE):
            if name in schema.get("properties", ()):
                schema["properties"][name].setdefault("description", " ".join(meaning.split()))


def _say_range(schema: dict[str, Any], allowed: Range) -> None:
    """Write the allowed range into the schema of a field, or of the entries of the field."""
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
