"""Descriptions of the operations of the Messages API, for the OpenAPI document."""

from __future__ import annotations

from trioserve.api.anthropic import response_types
from trioserve.api.anthropic.request_types import MESSAGES_RANGES, CountTokensBody, MessagesBody
from trioserve.api.described_operation import GENERATES, READS_BODY, DescribedOperation
from trioserve.contracts.request import PRIORITY_MAX, PRIORITY_MIN
from trioserve.contracts.sampling import SAMPLING_RANGES, Range

__all__ = ["OPERATIONS", "RANGES", "own_statuses"]

RANGES = {
    **MESSAGES_RANGES,
    "seed": SAMPLING_RANGES["seed"],
    "priority": Range(PRIORITY_MIN, PRIORITY_MAX),
}


def own_statuses(statuses: tuple[int, ...]) -> tuple[int, ...]:
    """Return the statuses as this API sends them: 529 in place of 503.

    Args:
        statuses: HTTP statuses.
    """
    return tuple(529 if status == 503 else status for status in statuses)


OPERATIONS: dict[tuple[str, str], DescribedOperation] = {
    ("POST", "/v1/messages"): DescribedOperation(
        summary="Answer a conversation, in Anthropic's shape",
        description="Fields have the meaning of Anthropic's Messages API. Fields that are not listed here are ignored "
        "or refused. cache_control is ignored, because all prefixes are cached anyway.",
        body=MessagesBody,
        ranges=RANGES,
        response=response_types.MessageResponse,
        named_events=(
            response_types.MessageStart,
            response_types.ContentBlockStart,
            response_types.ContentBlockDelta,
            response_types.ContentBlockStop,
            response_types.MessageDelta,
            response_types.MessageStop,
            response_types.Ping,
        ),
        errors=own_statuses(GENERATES),
        error=response_types.MessagesError,
        takes_deadlines=True,
    ),
    ("POST", "/v1/messages/count_tokens"): DescribedOperation(
        summary="Count the tokens of a conversation, in Anthropic's shape",
        body=CountTokensBody,
        response=response_types.MessageTokens,
        errors=own_statuses((*READS_BODY, 404)),
        error=response_types.MessagesError,
    ),
}
