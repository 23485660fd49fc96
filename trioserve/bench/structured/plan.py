"""The rows that are measured in turn, and the bodies of their requests."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from trioserve.bench.structured.schema_set import NamedSchema
from trioserve.bench.structured.settings import StructuredBenchSettings

__all__ = ["ROWS", "Row", "row_body", "schema_body"]

PATH = "/v1/chat/completions"

# Nearly no token is forced, and the list continues as long as there are tokens: every token needs a mask.
OPEN = {"type": "array", "items": {"type": "string", "minLength": 24}, "minItems": 1000}
# About half of the tokens are forced: names of properties and the punctuation between them.
HALF = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "product_name": {"type": "string", "minLength": 8, "maxLength": 24},
            "price_in_cents": {"type": "integer", "minimum": 1000, "maximum": 9999},
            "is_available": {"type": "boolean"},
            "comment": {"type": "string", "minLength": 16, "maxLength": 32},
        },
        "required": ["product_name", "price_in_cents", "is_available", "comment"],
        "additionalProperties": False,
    },
}


class Row(msgspec.Struct, frozen=True):
    """One kind of request.

    Attributes:
        name: name of the row.
        meaning: description.
        schema: JSON schema of the response. None: free text.
        is_alone: True: one request at a time, whatever the concurrency is.
        free: name of the row with which it is compared. "": none.
    """

    name: str
    meaning: str
    schema: Any = None
    is_alone: bool = False
    free: str = ""


ROWS = (
    Row("free", "free text"),
    Row("schema", "a list of texts, nothing forced", OPEN, free="free"),
    Row("forced", "a list of objects, about half forced", HALF, free="free"),
    Row("free, alone", "free text, one at a time", is_alone=True),
    Row("schema, alone", "nothing forced, one at a time", OPEN, is_alone=True, free="free, alone"),
    Row("forced, alone", "about half forced, one at a time", HALF, is_alone=True, free="free, alone"),
)


def row_body(settings: StructuredBenchSettings, model: str, row: Row, number: int) -> bytes:
    """Return the body of a request. All rows have the same prompts.

    Args:
        settings: settings of the measurement.
        model: name of the model.
        row: the row.
        number: number of the request within its row and round.
    """
    body = _body(settings, model, f"List number {number}: things that are sold on a market, in JSON.", row.schema)
    return msgspec.json.encode({**body, "ignore_eos": True, "seed": settings.seed + number})


def schema_body(settings: StructuredBenchSettings, model: str, named: NamedSchema, number: int) -> bytes:
    prompt = f"Write one example in JSON: {named.title}"
    return msgspec.json.encode({**_body(settings, model, prompt, named.schema), "seed": settings.seed + number})


def _body(settings: StructuredBenchSettings, model: str, prompt: str, schema: Any) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": settings.output_tokens,
        "temperature": settings.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if schema is not None:
        # Sent as JSON text, since a schema may have numbers that only Python's own reader keeps exactly.
        raw = msgspec.Raw(json.dumps(schema).encode())
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "response", "schema": raw}}
    return body
