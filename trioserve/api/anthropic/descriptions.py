"""What each path of the Messages API does and may answer: for the API's own description."""

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
    """As this API says them: 503 is 529."""
    return tuple(529 if status == 503 else status for status in statuses)


OPERATIONS: dict[tuple[str, str], DescribedOperation] = {
    ("POST", "/v1/messages"): DescribedOperation(
        summary="Answer a conversation, in Anthropic's shape",
        description="Fields, and their meanings, are those of Anthropic's Messages API. Fields that are not named here "
        "are ignored or refused, cache_control among them: prefixes are cached without being asked.",
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
