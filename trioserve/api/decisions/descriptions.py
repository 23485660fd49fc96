"""Description of /v1/decisions, for the OpenAPI document."""

from __future__ import annotations

from trioserve.api.decisions.request_types import DecisionsBody
from trioserve.api.decisions.response_types import Decisions
from trioserve.api.described_operation import GENERATES, DescribedOperation

__all__ = ["OPERATIONS"]

OPERATIONS: dict[tuple[str, str], DescribedOperation] = {
    ("POST", "/v1/decisions"): DescribedOperation(
        summary="Compute the probability of each possible answer to a question",
        description="Questions have OpenAI's format, as in vLLM, or SGLang's format with ids. The answers have the "
        "same format. Fields that are not named here are ignored.",
        body=DecisionsBody,
        response=Decisions,
        errors=GENERATES,
        takes_deadlines=True,
    ),
}
