"""POST /tokenize and /detokenize, in vLLM's shape: what a prompt becomes before the model sees it, and the way back."""

from __future__ import annotations

from trioserve.contracts.errors import InvalidRequest
from trioserve.frontend.call import Call
from trioserve.frontend.chat_prompt import chat_prompt
from trioserve.frontend.openai_types import DetokenizeBody, TokenizeBody

__all__ = ["detokenize", "tokenize"]


async def tokenize(call: Call) -> None:
    body = await call.body(TokenizeBody)
    call.model_name(body.model)
    token_ids = await _token_ids(call, body)
    strings = [call.engine.tokenizer.token_text(token_id) for token_id in token_ids] if body.return_token_strs else None
    await call.answer(
        {
            "count": len(token_ids),
            "max_model_len": call.engine.model.context_tokens_max,
            "tokens": token_ids,
            "token_strs": strings,
        }
    )


async def detokenize(call: Call) -> None:
    body = await call.body(DetokenizeBody)
    call.model_name(body.model)
    vocab_size = call.engine.model.vocab_size
    for index, token_id in enumerate(body.tokens):
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"tokens[{index}] is {token_id}, allowed is 0 to {vocab_size - 1}", param=f"tokens[{index}]"
            )
    await call.answer({"prompt": await call.engine.decode(body.tokens)})


async def _token_ids(call: Call, body: TokenizeBody) -> list[int]:
    prompt = body.prompt
    if (prompt is None) == (body.messages is None):
        raise InvalidRequest("send either prompt or messages", param="prompt" if prompt is None else "messages")
    if prompt is None:
        return await call.engine.encode(chat_prompt(body, trust_chat_template=call.trust_chat_template))
    return await call.engine.encode(prompt, add_special_tokens=body.add_special_tokens is not False)
