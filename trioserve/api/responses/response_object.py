"""The response object of the Responses API, and the items of its input and output.

The id of an item contains the response and the position: `msg_<key>_2` is the third output item of the response
`resp_<key>`, and `msg_<key>_in0` is its first input item. So a reference to an item is resolved without a table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

import msgspec
from msgspec import UNSET

from trioserve.api.generation import Usage
from trioserve.api.responses.request_types import ResponsesBody
from trioserve.api.responses.response_types import (
    IncompleteDetails,
    InputItem,
    OutputItem,
    ResponseErrorDetail,
    ResponseInputDetails,
    ResponseObject,
    ResponseOutputDetails,
    ResponseReasoning,
    ResponseStatus,
    ResponseUsage,
)
from trioserve.api.responses.tools import Tools
from trioserve.api.streams.cursors import ResumeBody
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.weights import WeightVersions

__all__ = [
    "FINAL",
    "SERVER_ERROR",
    "ItemPlace",
    "ResponseHead",
    "failed_object",
    "item_id",
    "item_place",
    "response_id",
    "response_usage",
    "with_ids",
]

_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "local_shell_call": "lsh",
    "local_shell_call_output": "lsho",
    "reasoning": "rs",
}
_ID = re.compile(r"[a-z]{2,4}_([0-9A-Za-z]{1,64})_(in)?(\d{1,6})")


class ItemPlace(NamedTuple):
    """Position of an item.

    Attributes:
        response_id: Response that the item belongs to.
        is_input: True for an input item, False for an output item.
        position: Index in the input or output.
    """

    response_id: str
    is_input: bool
    position: int


def response_id(key: str) -> str:
    """Return the id of a response.

    Args:
        key: Unique text that cannot be guessed.
    """
    return f"resp_{key}"


def item_id(kind: str, response: str, index: int, *, is_input: bool = False) -> str:
    """Return the id of an item.

    Args:
        kind: Type of the item.
        response: Id of the item's response.
        index: Index in the input or output.
        is_input: True for an input item.
    """
    return f"{_PREFIXES[kind]}_{response.removeprefix('resp_')}_{'in' if is_input else ''}{index}"


def item_place(text: str) -> ItemPlace | None:
    """Return the position that an item id names, or None if this server did not make the id.

    Args:
        text: The id.
    """
    match = _ID.fullmatch(text)
    return None if match is None else ItemPlace(response_id(match[1]), match[2] is not None, int(match[3]))


def with_ids(items: Iterable[InputItem], response: str) -> list[InputItem]:
    """Return copies of input items with ids of this response.

    An id that the client sent is replaced, because it belongs to another response or another server.

    Args:
        items: Checked input items.
        response: Id of the response.
    """
    return [
        msgspec.structs.replace(item, id=item_id(item.type, response, index, is_input=True))
        for index, item in enumerate(items)
    ]


FINAL = frozenset({"completed", "incomplete", "failed", "cancelled"})
"""Statuses that never change again."""

SERVER_ERROR = "server_error"
"""Code of errors that OpenAI's API has no other code for."""

LOST = "the server stopped before this response was complete: send the request again"
"""Message for a response that was interrupted by a restart."""


class ResponseHead(msgspec.Struct, frozen=True, kw_only=True):
    """The unchanging properties of one response.

    Attributes:
        id: Id of the response.
        created_at: Unix time in seconds.
        model: Served name of the model.
        body: The request.
        tools: Tools of the request.
        sampling: Sampling options, with the server's defaults.
        stores: True if the response will be stored.
    """

    id: str
    created_at: int
    model: str
    body: ResponsesBody
    tools: Tools
    sampling: SamplingParams
    stores: bool

    def object(
        self,
        status: ResponseStatus,
        *,
        output: list[OutputItem],
        usage: ResponseUsage | None = None,
        completed_at: int | None = None,
        incomplete_details: IncompleteDetails | None = None,
        error: ResponseErrorDetail | None = None,
        weight_versions: WeightVersions = (),
        resume: ResumeBody | None = None,
    ) -> ResponseObject:
        """Return the response object for a status.

        Args:
            status: Status of the response.
            output: Output items so far.
            usage: Token counts. None until the response ends.
            completed_at: Unix time in seconds. None unless the response is completed.
            incomplete_details: Reason for the status "incomplete".
            error: Error for the status "failed".
            weight_versions: Weight versions of the output tokens. Empty if the weights were never replaced.
            resume: State to resume the response. None if the client cannot resume it.
        """
        body, sampling = self.body, self.sampling
        text = body.text
        text_format: dict[str, object] = {"type": "text"}
        if text is not None and text.format is not None:
            text_format = {"type": text.format.type}
            if text.format.type == "json_schema":
                text_format |= {
                    "name": text.format.name,
                    "description": text.format.description,
                    "schema": text.format.schema,
                    "strict": bool(text.format.strict),
                }
        reasoning = body.reasoning
        return ResponseObject(
            id=self.id,
            created_at=self.created_at,
            completed_at=completed_at,
            status=status,
            background=bool(body.background),
            error=error,
            incomplete_details=incomplete_details,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            max_tool_calls=body.max_tool_calls,
            model=self.model,
            output=output,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=body.previous_response_id,
            prompt_cache_key=body.prompt_cache_key,
            reasoning=ResponseReasoning(
                effort=None if reasoning is None else reasoning.effort,
                summary=None if reasoning is None else reasoning.summary or reasoning.generate_summary,
            ),
            safety_identifier=body.safety_identifier,
            service_tier="default",
            store=self.stores,
            temperature=sampling.temperature,
            text={"format": text_format, "verbosity": "medium" if text is None else text.verbosity or "medium"},
            tool_choice=self.tools.choice_echo,
            tools=self.tools.echo,
            top_logprobs=body.top_logprobs or 0,
            top_p=sampling.top_p,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            truncation=body.truncation or "disabled",
            usage=usage,
            user=body.user,
            metadata=body.metadata or {},
            weight_versions=list(weight_versions) or UNSET,
            resume=UNSET if resume is None else resume,
        )


def response_usage(usage: Usage) -> ResponseUsage:
    details = usage.completion_tokens_details
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=ResponseInputDetails(
            cached_tokens=usage.prompt_tokens_details.cached_tokens,
            cache_write_tokens=0,  # This server does not charge for cache writes.
        ),
        output_tokens=usage.completion_tokens,
        output_tokens_details=ResponseOutputDetails(
            reasoning_tokens=0 if details is UNSET else details.reasoning_tokens
        ),
        total_tokens=usage.total_tokens,
    )


def failed_object(stored: ResponseObject) -> ResponseObject:
    """Return the failed response object for a response that was stored as unfinished and does not run any more. A
    restart of the server causes this state.

    Args:
        stored: The stored response object.
    """
    return msgspec.structs.replace(stored, status="failed", error=ResponseErrorDetail(code=SERVER_ERROR, message=LOST))
