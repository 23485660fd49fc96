"""One conversation with an engine as a scope: `async with engine.session() as session: ...`.

`Conversation` has the tokens and messages of a session's turns, and the requests that continue them. A turn contains
only the new part of the conversation. Its prompt is the tokens of all earlier turns, and then the new tokens. For a
chat, the template renders all messages again, because only the template knows how a message is written. If the rendered
tokens begin with the history, the template is append-only, and the KV of the history is reused. Otherwise the prompt is
the rendered chat, and only the common beginning is reused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import msgspec

from trioserve.admission.prompt_encoder import EncodedPrompt, PromptEncoder
from trioserve.contracts.arguments import refuse, to_float
from trioserve.contracts.deadlines import Deadlines
from trioserve.contracts.errors import AlreadyEnded, InvalidRequest
from trioserve.contracts.events import FinishReason
from trioserve.contracts.output import Delta
from trioserve.contracts.prompt import ChatPrompt, Prompt
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.tracing import NO_SPAN, Span
from trioserve.engine.lifecycle.request_scope import error_of
from trioserve.engine.open_request import OpenRequest
from trioserve.engine.request_preparation import checked_prompt
from trioserve.engine.request_stream import RequestStream
from trioserve.engine.sessions import LiveSession, SessionName, SessionTable
from trioserve.metrics.registry import Metrics
from trioserve.text.response_parsers.offered_tools import offered_tools
from trioserve.text.response_parsers.registry import ResponseFamilies
from trioserve.text.response_parts import (
    ContentText,
    JoinedResponse,
    ReasoningText,
    ResponseParser,
    ResponsePart,
    WholeCall,
)
from trioserve.text.tokenizer import Tokenizer
from trioserve.trio_tools.interrupts import uninterrupted
from trioserve.trio_tools.own_run import OwnRun

__all__ = ["Conversation", "Reply", "Session", "SessionRequest", "WHOLE"]

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
                tools = None if self.calls_max == 0 else self.prompt.tools
                self._parser = self._conversation.families.new_parser(
                    offered_tools(tools), prompt_token_ids=self.prompt_token_ids
                )
            parts = self._parser.feed(delta.text) + (self._parser.end() if is_whole else [])
            self._response.take(filter(self._is_kept, parts))
        if is_whole:
            self._conversation.take(self, self._delivered_to(0).token_ids, self._response)
            if self._response.calls and self.turn_of is not None:
                self.turn_of.await_tools([call.name for call in self._response.calls])

    def _is_kept(self, part: ResponsePart) -> bool:
        return self.calls_max is None or isinstance(part, ContentText | ReasoningText) or part.index < self.calls_max


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


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """A whole response to a turn of chat messages.

    Attributes:
        content: text for the user.
        reasoning: text that the model marked as reasoning.
        tool_calls: complete tool calls, each with an id. The next turn sends their results.
        finish_reason: STOP, or LENGTH if the response was cut off.
        cached_token_count: prompt tokens that needed no computation.
    """

    content: str
    reasoning: str
    tool_calls: tuple[WholeCall, ...]
    finish_reason: FinishReason
    cached_token_count: int


@uninterrupted
class Session:
    """One conversation: `async with engine.session() as session: reply = await session.respond(messages)`.

    Each turn sends only its new messages, text or tokens. The session keeps the messages and tokens of
    all complete turns. A turn that was left early, aborted, or failed changes nothing, so it can be sent again. Turns
    run one after the other: entering a turn while another one runs raises InvalidRequest.

    Between two turns, the prefix cache prefers to keep the session's blocks. Leaving the scope aborts the turn that
    runs, and ends the session. `Engine.session` creates a session.

    Args:
        table: all open sessions.
        name: identity, owner and retention of the session.
        generate: creates a request with the session's priority and tenant, see `Engine.generate`.
        conversation: keeps the turns.
        own_run: checks that calls come from the right thread, Trio program and process.
    """

    def __init__(
        self,
        table: SessionTable,
        name: SessionName,
        generate: Callable[..., RequestStream],
        conversation: Conversation,
        own_run: OwnRun,
    ) -> None:
        self._table = table
        self._name = name
        self._generate = generate
        self._conversation = conversation
        self._own_run = own_run
        self._live: LiveSession | None = None

    async def __aenter__(self) -> Session:
        self.enter()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.leave()

    def enter(self) -> None:
        """Open the session. `async with` calls this.

        Raises:
            Overloaded: too many sessions are open.
            AlreadyEnded: the session was entered before.
        """
        self._own_run.check("entering a session")
        if self._live is not None:
            raise AlreadyEnded(f"the session {self._live.name} was entered before: make another one")
        self._live = self._table.open(self._name)
        self._live.new_request = partial(SessionRequest, self._conversation)

    def leave(self) -> None:
        """Abort the turn that runs, and end the session. `async with` calls this. Never waits."""
        self._own_run.check("leaving a session")
        if self._live is None:
            raise AlreadyEnded("the session was not entered: leave its scope once, after entering it")
        self._live.end()

    @property
    def id(self) -> str:
        """Name of the session, for status pages and logs."""
        return self._entered().name

    @property
    def messages(self) -> tuple[dict[str, Any], ...]:
        """Messages of all complete turns, in OpenAI's format. Empty if the turns are texts or tokens."""
        return self._conversation.messages

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens of all complete turns: the prompt and the response of the last one."""
        return self._conversation.token_ids

    def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        add_special_tokens: bool = True,
        deadlines: Deadlines | None = None,
        keep_logprobs: bool = False,
        tool_choice: str | Mapping[str, Any] | None = None,
        strict: bool | None = None,
        parallel_tool_calls: bool = True,
        part_of: Span = NO_SPAN,
    ) -> RequestStream:
        """Create the next turn. It begins when the stream is entered with `async with`, and uses no resources before.

        The turn is complete when its last delta was read. To split the response of a chat into content and tool calls,
        use `Engine.read_parts`, or read the last one of `messages` after the turn.

        Args:
            prompt: new part of the conversation: text, token ids, or a ChatPrompt with the new messages. All
                turns are of one kind. A ChatPrompt without tools or template inherits them from the turn before.
            sampling: see `Engine.generate`. One choice only.
            request_id: see `Engine.generate`.
            add_special_tokens: see `Engine.generate`. Counts for the first text only.
            deadlines: see `Engine.generate`.
            keep_logprobs: see `Engine.generate`.
            tool_choice: see `Engine.generate`.
            strict: see `Engine.generate`.
            parallel_tool_calls: see `Engine.generate`.
            part_of: see `Engine.generate`.

        Returns:
            The stream, to be entered.

        Raises:
            InvalidRequest: an argument is not allowed. Entering raises it, too, if another turn runs.
            AlreadyEnded: the session is not entered, or has ended.
        """
        live = self._entered()
        return self._generate(
            self._conversation.prepared(checked_prompt(prompt)),
            sampling,
            request_id=request_id,
            add_special_tokens=add_special_tokens,
            deadlines=deadlines,
            keep_logprobs=keep_logprobs,
            tool_choice=tool_choice,
            strict=strict,
            parallel_tool_calls=parallel_tool_calls,
            session=live,
            part_of=part_of,
        )

    async def respond(
        self,
        messages: Sequence[dict[str, Any]] | str,
        sampling: SamplingParams | None = None,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        strict: bool | None = None,
        parallel_tool_calls: bool = True,
        deadlines: Deadlines | None = None,
    ) -> Reply:
        """Send new messages, and return the whole response.

        Args:
            messages: the new messages, in OpenAI's format. A string is one message of the user.
            sampling: see `generate`.
            tools: tools that the model may call. None: those of the turn before.
            tool_choice: see `generate`.
            strict: see `generate`.
            parallel_tool_calls: False: the reply has at most one call. Further calls are dropped.
            deadlines: see `generate`.

        Raises:
            RequestFailed, RequestAborted, DeadlinePassed: the turn did not complete.
            InvalidRequest: an argument is not allowed, or another turn runs.
            AlreadyEnded: the session is not entered, or has ended.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        prompt = ChatPrompt(messages=list(messages), tools=None if tools is None else list(tools))
        stream = self.generate(
            prompt,
            sampling,
            deadlines=deadlines,
            tool_choice=tool_choice,
            strict=strict,
            parallel_tool_calls=parallel_tool_calls,
        )
        finish_reason: FinishReason | None = None
        async with stream:
            async for delta in stream:
                if (error := error_of(delta)) is not None:
                    raise error
                finish_reason = delta.finish_reason
        assert finish_reason is not None, "the stream has ended without a last delta"
        message = self.messages[-1]
        return Reply(
            content=message["content"],
            reasoning=message.get("reasoning_content", ""),
            tool_calls=tuple(
                WholeCall(call["function"]["name"], call["function"]["arguments"], call["id"])
                for call in message.get("tool_calls", ())
            ),
            finish_reason=finish_reason,
            cached_token_count=stream.cached_token_count,
        )

    def expect_turn(self, seconds: float) -> None:
        """Note that the next turn is expected in some seconds, for example while a tool runs. Never waits.

        Args:
            seconds: estimated time until the next turn, 0 or more.

        Raises:
            InvalidRequest: the time is no number, or negative.
            AlreadyEnded: the session is not entered, or has ended.
        """
        live = self._entered()
        number = to_float("seconds", seconds)
        if not 0 <= number < math.inf:
            refuse("seconds", seconds, "a number of seconds")
        live.expect_turn(number)

    def _entered(self) -> LiveSession:
        if self._live is None or self._live.is_ended:
            how = "is not entered" if self._live is None else "has ended"
            raise AlreadyEnded(f"the session {how}: use it inside its `async with`")
        return self._live
