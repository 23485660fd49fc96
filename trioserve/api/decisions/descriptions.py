"""What /v1/decisions does and may answer: for the API's own description."""

from __future__ import annotations

from trioserve.api.decisions.request_types import DecisionsBody
from trioserve.api.decisions.response_types import Decisions
from trioserve.api.described_operation import GENERATES, DescribedOperation

__all__ = ["OPERATIONS"]

OPERATIONS: dict[tuple[str, str], DescribedOperation] = {
    ("POST", "/v1/decisions"): DescribedOperation(
        summary="Say how likely each possible answer to a question is",
        description="Questions are in OpenAI's shape, as in vLLM, or in SGLang's, with ids; the answers, too. Fields "
        "that are not named here are ignored.",
        body=DecisionsBody,
        response=Decisions,
        errors=GENERATES,
        takes_deadlines=True,
    ),
}
