"""The tokens and messages of a session's turns, and the requests that continue them.

A turn contains only the new part of the conversation. Its prompt is the tokens of all earlier turns, and then the new
tokens. For a chat, the template renders all messages again, because only the template knows how a message is written.
If the rendered tokens begin with the history, the template is append-only, and the KV of the history is reused.
Otherwise the prompt is the rendered chat, and only the common beginning is reused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from trioserve.admission.prompt_encoder import EncodedPrompt, PromptEncoder
from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.events import FinishReason
from trioserve.contracts.output import Delta
from trioserve.contracts.prompt import ChatPrompt, Prompt
from trioserve.contracts.sampling import SamplingParams
from trioserve.engine.open_request import OpenRequest
from trioserve.metrics.registry import Metrics
from trioserve.text.response_parsers.offered_tools import offered_tools
from trioserve.text.response_parsers.registry import ResponseFamilies
from trioserve.text.response_parts import JoinedResponse, ResponseParser
from trioserve.text.tokenizer import Tokenizer
from trioserve.trio_tools.interrupts import uninterrupted

__all__ = ["Conversation", "SessionRequest", "WHOLE"]

WHOLE = (FinishReason.STOP, FinishReason.LENGTH)  # Finish reasons of a complete response.


@uninterrupted
class Conversation:
    """Tokens and messages of the complete turns of one session.

    A turn is complete when its reader has read the last delta with the finish reason STOP or LENGTH. A turn that was
    left earlier, aborted, or ended by an error changes nothing, so its caller may send it again. The history is at most
    as long as the model's context, because each prompt begins with it.

    Args:
        tokenizer: the model's tokenizer.
        families: formats in which the model writes tool calls and reasoning.
        metrics: counts the turns.

    Attributes:
        token_ids: prompt and output of the last complete turn.
        messages: all messages of a conversation of chats, in OpenAI's format. The last one is the assistant's.
        turn_count: number of complete turns.
    """

    def __init__(self, tokenizer: Tokenizer, families: ResponseFamilies, metrics: Metrics) -> None:
        self.families = families
        self.token_ids: tuple[int, ...] = ()
        self.messages: tuple[dict[str, Any], ...] = ()
        self.turn_count = 0
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._chat: ChatPrompt | None = None  # The last chat, whose tools and template the next chat inherits.
        self._running: SessionRequest | None = None

    def begin_turn(self, request: SessionRequest) -> None:
        """Note that a turn has entered.

        Args:
            request: the turn.

        Raises:
            InvalidRequest: another turn runs.
        """
        if self._running is not None:
            raise InvalidRequest(
                f"the request {self._running.id} is a turn of this session and has not ended: leave its scope before "
                "the next turn, or open one session for each conversation"
            )
        self._running = request

    def end_turn(self) -> None:
        """Note that the scope of the current turn was left."""
        self._running = None

    def prepared(self, prompt: Prompt) -> Prompt:
        """Return a prompt with the tools and the template of the last chat, unless it has its own. Remember its own.

        Args:
            prompt: new text, new tokens, or a chat with new messages.

        Raises:
            InvalidRequest: the earlier turns are chats and the prompt is none, or the other way round.
        """
        is_chat = isinstance(prompt, ChatPrompt)
        if self.turn_count and is_chat is not bool(self.messages):
            kind, other = ("texts or tokens", "a ChatPrompt") if is_chat else ("chats", "no ChatPrompt")
            raise InvalidRequest(
                f"prompt is {other}, but the earlier turns of this session are {kind}: send a prompt of the same kind, "
                "or open another session",
                param="prompt",
            )
        if not isinstance(prompt, ChatPrompt):
            return prompt
        if (last := self._chat) is not None:
            prompt = msgspec.structs.replace(
                prompt,
                tools=last.tools if prompt.tools is None else prompt.tools,
                chat_template=prompt.chat_template or last.chat_template,
                template_arguments=last.template_arguments | prompt.template_arguments,
            )
        self._chat = msgspec.structs.replace(prompt, messages=[])
        return prompt

    async def encoded(self, prompt: Prompt, encoder: PromptEncoder, *, add_special_tokens: bool) -> EncodedPrompt:
        """Return the tokens of all complete turns and of a new prompt.

        Args:
            prompt: new text, new tokens, or a chat with new messages.
            encoder: encodes prompts.
            add_special_tokens: True to begin the first text with the tokenizer's special tokens.

        Raises:
            InvalidRequest: the prompt is not valid.
            ContextTooLong: the prompt cannot fit into the model's context.
        """
        if not isinstance(prompt, ChatPrompt):
            is_first = add_special_tokens and not self.token_ids
            new = await encoder.encode_prompt(prompt, add_special_tokens=is_first)
            self._count(0)
            return EncodedPrompt([*self.token_ids, *new.token_ids])
        whole = msgspec.structs.replace(prompt, messages=[*self.messages, *prompt.messages])
        encoded = await encoder.encode_prompt(whole)
        # Without the last token, whose KV was not computed: it ended the turn, and not every template writes it.
        history, token_ids = self.token_ids[:-1], encoded.token_ids
        common = common_count(history, token_ids)
        if common < len(history) and not encoded.images:  # The positions of images fit the rendered tokens only.
            size = len(history) - common
            spliced = await encoder.run(lambda: self._spliced(history, token_ids, common), size=size)
            if spliced is not None:
                token_ids, common = spliced, len(history)
        self._count(len(history) - common)
        return encoded._replace(token_ids=token_ids)

    def _spliced(self, history: Sequence[int], rendered: list[int], common: int) -> list[int] | None:
        """Replace the beginning of a rendered chat by the history, if both are the same text in other tokens.

        A model does not always write a text in the tokens that the tokenizer would choose.

        Args:
            history: tokens of the earlier turns.
            rendered: tokens of the rendered chat.
            common: number of tokens at the beginning that are equal.

        Returns:
            The tokens, or None if the texts differ.
        """
        tokenizer, rest = self._tokenizer, history[common:]
        wanted = b"".join(map(tokenizer.token_bytes, rest))
        end, written = common, bytearray()
        while end < len(rendered) and len(written) < len(wanted):
            written += tokenizer.token_bytes(rendered[end])
            end += 1
        # A message may spell a control token as ordinary text, which is another prompt.
        same_controls = list(filter(tokenizer.is_added, rest)) == list(filter(tokenizer.is_added, rendered[common:end]))
        if written != wanted or not same_controls:
            return None
        return [*history, *rendered[end:]]

    def _count(self, lost_count: int) -> None:
        """Count a turn.

        Args:
            lost_count: number of tokens of the history with which the prompt does not begin.
        """
        prompt = "rewritten" if lost_count else "appended" if self.turn_count else "first"
        self._metrics.session_turns_total.labels(prompt).inc()
        self._metrics.session_rewritten_tokens_total.inc(lost_count)

    def take(self, request: SessionRequest, output: Sequence[int], response: JoinedResponse) -> None:
        """Add a complete turn.

        Args:
            request: the turn.
            output: all tokens of its response.
            response: the parts of its response. Unused if the prompt is no chat.
        """
        self.token_ids = (*request.prompt_token_ids, *output)
        self.turn_count += 1
        prompt = request.prompt
        if isinstance(prompt, ChatPrompt):
            self.messages = (*self.messages, *prompt.messages, self._message(response))

    def _message(self, response: JoinedResponse) -> dict[str, Any]:
        """Return the assistant's message in OpenAI's format. A call without an id gets one."""
        message: dict[str, Any] = {"role": "assistant", "content": response.content}
        if response.reasoning:
            message["reasoning_content"] = response.reasoning
        if response.calls:
            message["tool_calls"] = [
                {
                    "id": call.id or self.families.call_id(f"{self.turn_count:08x}{index:08x}"),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for index, call in enumerate(response.calls)
            ]
        return message


class SessionRequest(OpenRequest):
    """A request that is a turn of a conversation.

    Args:
        conversation: the earlier turns.
        prompt: new text, new tokens, or a chat with new messages.
        sampling: see `OpenRequest`.
        **options: see `OpenRequest`.

    Raises:
        InvalidRequest: the request asks for several choices.
    """

    def __init__(self, conversation: Conversation, prompt: Prompt, sampling: SamplingParams, **options: Any) -> None:
        if sampling.n != 1:
            raise InvalidRequest(f"n is {sampling.n}, but a turn of a session has one choice: send n=1", param="n")
        self._conversation = conversation
        self._response = JoinedResponse()
        self._parser: ResponseParser | None = None
        super().__init__(prompt, sampling, **options)

    def enter(self) -> None:
        self._conversation.begin_turn(self)
        try:
            super().enter()
        except BaseException:
            self._conversation.end_turn()
            raise

    def leave(self) -> None:
        super().leave()
        self._conversation.end_turn()

    @property
    def known_token_count(self) -> int:
        return len(self._conversation.token_ids)

    async def tokenize(self, encoder: PromptEncoder) -> None:
        encoded = await self._conversation.encoded(self.prompt, encoder, add_special_tokens=self.add_special_tokens)
        self.take_encoded(encoded)

    def note_read(self, delta: Delta) -> None:
        super().note_read(delta)
        is_whole = delta.finish_reason in WHOLE
        if isinstance(self.prompt, ChatPrompt):
            if self._parser is None:
                self._parser = self._conversation.families.new_parser(
                    offered_tools(self.prompt.tools), prompt_token_ids=self.prompt_token_ids
                )
            self._response.take(self._parser.feed(delta.text))
            if is_whole:
                self._response.take(self._parser.end())
        if is_whole:
            self._conversation.take(self, self._given_to(0).token_ids, self._response)
            if self._response.calls and self.turn_of is not None:
                self.turn_of.await_tools([call.name for call in self._response.calls])


def common_count(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many tokens at the beginning of two sequences are equal.

    Args:
        first: tokens.
        second: tokens.

    Cost: a few comparisons of slices, which take a millisecond for 100,000 tokens.
    """
    low, high = 0, min(len(first), len(second))
    first, second = tuple(first), tuple(second)
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
