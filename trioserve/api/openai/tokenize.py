"""POST /tokenize and /detokenize, in vLLM's format: from a prompt to tokens, and back.

Both operations use neither the queue nor a lease. So their long texts are processed separately from other requests, and
only a few at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from trioserve.api.openai.chat_prompt import chat_prompt, prompt_cut
from trioserve.api.openai.request_types import DetokenizeBody, TokenizeBody
from trioserve.api.request_context import RequestContext
from trioserve.api.response import Response
from trioserve.api.route_table import READS_BODY, Forwarding, Operation
from trioserve.api.whole_response import LargeJson
from trioserve.contracts.errors import InvalidRequest

if TYPE_CHECKING:
    from trioserve.admission.prompt_encoder import PromptEncoder
    from trioserve.engine.engine import Engine

__all__ = ["OPERATIONS", "detokenize", "read_tokenizer_info", "tokenize"]

T = TypeVar("T")

# The transformers library uses this class name for every tokenizer of the `tokenizers` library.
TOKENIZER_CLASS = "PreTrainedTokenizerFast"


class Tokenized(Response):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Response):
    prompt: str


class TokenizerInfo(Response):
    """Special tokens as text (null if the model's files name none), and the chat template."""

    tokenizer_class: str
    vocab_size: int
    model_max_length: int
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    chat_template: str | None


async def tokenize(context: RequestContext) -> None:
    body = await context.body(TokenizeBody)
    context.model_name(body.model)
    with context.engine.tokenizing(owner=context.owner) as texts:
        token_ids = await _token_ids(context, body, texts)
        strings = await _run_on_tokens(context, texts, _token_texts, token_ids) if body.return_token_strs else None
    large = LargeJson()
    await context.respond_large(
        large,
        Tokenized(
            count=len(token_ids),
            max_model_len=context.engine.model.context_tokens_max,
            tokens=await large.add(token_ids, list),
            token_strs=None if strings is None else await large.add(strings, list),
        ),
    )


async def detokenize(context: RequestContext) -> None:
    body = await context.body(DetokenizeBody)
    context.model_name(body.model)
    with context.engine.tokenizing(owner=context.owner) as texts:
        byte_count = await _run_on_tokens(context, texts, _checked_byte_count, body.tokens)
        context.response_bound.check_text(byte_count, f"{len(body.tokens)} tokens as text", "tokens")
        prompt = await texts.decode(body.tokens)
    large = LargeJson()
    await context.respond_large(large, Detokenized(prompt=await large.add_text(prompt)))


async def read_tokenizer_info(context: RequestContext) -> None:
    """Send the data that clients need to render chats and count tokens, as vLLM's GET /tokenizer_info does.

    Args:
        context: the request.
    """
    engine = context.engine
    tokenizer = engine.tokenizer
    template = tokenizer.chat_template
    await context.respond_json(
        TokenizerInfo(
            tokenizer_class=TOKENIZER_CLASS,
            vocab_size=engine.model.vocab_size,
            model_max_length=engine.model.context_tokens_max,
            bos_token=tokenizer.bos_token,
            eos_token=tokenizer.eos_token,
            pad_token=tokenizer.pad_token,
            chat_template=None if template is None else template.source,
        )
    )


async def _run_on_tokens(
    context: RequestContext, texts: PromptEncoder, look: Callable[[Engine, Sequence[int]], T], token_ids: Sequence[int]
) -> T:
    """Call `look` with the engine and token ids, and return its result. With many tokens, `look` runs in a thread. A
    cancelled caller does not wait for that thread.
    """
    return await texts.run(lambda: look(context.engine, token_ids), size=len(token_ids))


def _token_texts(engine: Engine, token_ids: Sequence[int]) -> list[str]:
    return [engine.tokenizer.token_text(token_id) for token_id in token_ids]


def _checked_byte_count(engine: Engine, token_ids: Sequence[int]) -> int:
    """Count the bytes of the tokens' texts. Raise InvalidRequest for an unknown token id."""
    vocab_size = engine.model.vocab_size
    for index, token_id in enumerate(token_ids):
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"tokens[{index}] is {token_id}, allowed is 0 to {vocab_size - 1}", param=f"tokens[{index}]"
            )
    return sum(len(engine.tokenizer.token_bytes(token_id)) for token_id in token_ids)


async def _token_ids(context: RequestContext, body: TokenizeBody, texts: PromptEncoder) -> list[int]:
    prompt = body.prompt
    if (prompt is None) == (body.messages is None):
        raise InvalidRequest("send either prompt or messages", param="prompt" if prompt is None else "messages")
    cut = prompt_cut(body.truncate_prompt_tokens, context.engine.model.context_tokens_max, None)
    if prompt is None:
        return await texts.encode(chat_prompt(body, trust_chat_template=context.services.trust_chat_template), cut=cut)
    return await texts.encode(prompt, add_special_tokens=body.add_special_tokens is not False, cut=cut)


OPERATIONS: tuple[Operation[RequestContext], ...] = (
    Operation(
        method="POST",
        path="/tokenize",
        handler=tokenize,
        summary="Show the tokens of a prompt or a chat",
        forwarding=Forwarding.BY_MODEL,
        body=TokenizeBody,
        response=Tokenized,
        errors=(*READS_BODY, 404),
    ),
    Operation(
        method="POST",
        path="/detokenize",
        handler=detokenize,
        summary="Show the text of tokens",
        forwarding=Forwarding.BY_MODEL,
        body=DetokenizeBody,
        response=Detokenized,
        errors=(*READS_BODY, 404),
    ),
    Operation(
        method="GET",
        path="/tokenizer_info",
        handler=read_tokenizer_info,
        summary="Read the data that clients need to render chats and count tokens",
        forwarding=Forwarding.ANYWHERE,
        response=TokenizerInfo,
    ),
)
