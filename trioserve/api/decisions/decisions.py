"""POST /v1/decisions: computes the probability of each possible answer to questions about one input.

The server generates no text. Each question is a prompt that ends where the answer would begin. The probabilities of the
answers' labels as the next token are the result. All prompts begin with the input and belong to one request. The input
is computed once, and the other prompts hit the prefix cache.
"""

from __future__ import annotations

from trioserve.api.decisions.questions import LabelWeights, has_ids, question_prompt
from trioserve.api.decisions.request_types import DecisionsBody
from trioserve.api.decisions.response_types import Decisions
from trioserve.api.embeddings.pooling import pool
from trioserve.api.request_context import RequestContext
from trioserve.api.route_table import GENERATES, Forwarding, Operation
from trioserve.contracts.pooling import LabelledPrompt, PoolingParams
from trioserve.contracts.prompt import ChatPrompt
from trioserve.text.chat_messages import check_shape

__all__ = ["OPERATIONS", "create_decisions"]

PROMPT_FORMAT_VERSION = 1  # version of SGLang's wording
WITHOUT_REASONING = {"enable_thinking": False, "thinking": False}
"""Template arguments that switch reasoning off, so that the answer is the first output token."""


async def create_decisions(context: RequestContext) -> None:
    body = await context.body(DecisionsBody)
    model = context.model_name(body.model)
    body.check()
    check_shape(body.chat_template_kwargs, "chat_template_kwargs")
    by_id = has_ids(body.questions)
    questions = [
        question_prompt(question, f"questions[{index}]", in_sglang_format=by_id)
        for index, question in enumerate(body.questions)
    ]
    text = body.text
    arguments = WITHOUT_REASONING | (body.chat_template_kwargs or {})
    prompts = [
        LabelledPrompt(
            ChatPrompt(
                messages=[{"role": "user", "content": f"{text}\n\n{question.text}"}], template_arguments=arguments
            ),
            question.labels,
        )
        for question in questions
    ]
    response = await pool(
        context, body, prompts, PoolingParams(task="labels"), name_of=lambda index: f"questions[{index}]"
    )
    temperature = 1.0 if body.temperature is None else body.temperature
    answers = [
        question.answer(LabelWeights.of(one.values(), temperature))
        for question, one in zip(questions, response.pooled, strict=True)
    ]
    if by_id:
        answered: dict[str, object] = {
            "object": "decisions",
            "model": model,
            "prompt_format_version": PROMPT_FORMAT_VERSION,
            "answers": {question.id: answer for question, answer in zip(body.questions, answers, strict=True)},
            "usage": response.usage,
        }
    else:
        answered = {
            "model": model,
            "answers": answers,
            "usage": _usage(response.usage.prompt_tokens, response.cached_token_count),
        }
    await context.respond_json(answered)


def _usage(token_count: int, cached_token_count: int) -> dict[str, object]:
    return {
        "input_tokens": token_count,
        "input_tokens_details": {"cached_tokens": cached_token_count, "cache_write_tokens": 0},
        "output_tokens": 0,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": token_count,
    }


OPERATIONS: tuple[Operation[RequestContext], ...] = (
    Operation(
        method="POST",
        path="/v1/decisions",
        handler=create_decisions,
        summary="Compute the probability of each possible answer to a question",
        forwarding=Forwarding.BY_MODEL,
        description="Questions have OpenAI's format, as in vLLM, or SGLang's format with ids. The answers have the "
        "same format. Fields that are not named here are ignored.",
        body=DecisionsBody,
        response=Decisions,
        errors=GENERATES,
        takes_deadlines=True,
    ),
)
