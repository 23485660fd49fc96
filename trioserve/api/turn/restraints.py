"""What a turn asks of its tokens: the form of its content, and when its thoughts have to end."""

from __future__ import annotations

import msgspec

from trioserve.api.turn.turn_request import Reasoning
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.structured_output import StructuredOutput
from trioserve.contracts.thinking import Thinking
from trioserve.text.response_families import ResponseFamilies

__all__ = ["restrained"]


def restrained(
    sampling: SamplingParams,
    structured: StructuredOutput | None,
    reasoning: Reasoning,
    families: ResponseFamilies,
) -> SamplingParams:
    """The sampling with the form, which begins behind the thought of a model that thinks aloud, and with the thought's
    end, so that its budget can end it, or somebody by hand. A model that does not think has no use for a budget."""
    tags = families.thought_tags
    if tags is None:
        return sampling if structured is None else msgspec.structs.replace(sampling, structured=structured)
    end = tags.closing[0]
    thinking = Thinking(
        begin="" if tags.begins_inside else tags.opening[0], end=end, tokens_max=reasoning.budget_tokens
    )
    if structured is not None:
        structured = msgspec.structs.replace(structured, free_until=end)
    return msgspec.structs.replace(sampling, structured=structured, thinking=thinking)
