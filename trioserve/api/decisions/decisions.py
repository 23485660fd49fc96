"""POST /v1/decisions: questions about one input, each with a few possible answers, and how likely the model finds each.

Nothing is generated. Each question is a prompt that ends where the answer would begin, and what counts are the
probabilities of the answers' labels as the next token. All prompts begin with the input, which is computed once, since
the others find it in the prefix cache; and all of them are one request.
"""

from __future__ import annotations

from trioserve.api.decisions.questions import Weighed, asked, has_ids
from trioserve.api.decisions.request_types import DecisionsBody
from trioserve.api.embeddings.pooling import pool
from trioserve.api.request_context import RequestContext
from trioserve.contracts.pooling import LabelledPrompt, PoolingParams
from trioserve.contracts.prompt import ChatPrompt
from trioserve.text.chat_messages import check_shape

__all__ = ["create_decisions"]

PROMPT_FORMAT_VERSION = 1  # of SGLang's wording
WITHOUT_THOUGHTS = {"enable_thinking": False, "thinking": False}
"""For chat templates that know one of them: the answer is the first thing that the model says."""


async def create_decisions(context: RequestContext) -> None:
    body = await context.body(DecisionsBody)
    model = context.model_name(body.model)
    body.check()
    check_shape(body.chat_template_kwargs, "chat_template_kwargs")
    by_id = has_ids(body.questions)
    questions = [
        asked(question, f"questions[{index}]", in_sglangs_shape=by_id) for index, question in enumerate(body.questions)
    ]
    text = body.text
    arguments = WITHOUT_THOUGHTS | (body.chat_template_kwargs or {})
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
        question.answer(Weighed.of(one.values(), temperature))
        for question, one in zip(questions, response.pooled, strict=True)
    ]
    if by_id:
        said: dict[str, object] = {
            "object": "decisions",
            "model": model,
            "prompt_format_version": PROMPT_FORMAT_VERSION,
            "answers": {question.id: answer for question, answer in zip(body.questions, answers, strict=True)},
            "usage": response.usage,
        }
    else:
        said = {
            "model": model,
            "answers": answers,
            "usage": _usage(response.usage.prompt_tokens, response.cached_token_count),
        }
    await context.respond_json(said)


def _usage(token_count: int, cached_token_count: int) -> dict[str, object]:
    return {
        "input_tokens": token_count,
        "input_tokens_details": {"cached_tokens": cached_token_count, "cache_write_tokens": 0},
        "output_tokens": 0,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": token_count,
    }
