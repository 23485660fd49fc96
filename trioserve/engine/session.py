"""One conversation with an engine as a scope: `async with engine.session() as session: ...`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import msgspec

from trioserve.contracts.arguments import refuse, to_float
from trioserve.contracts.deadlines import Deadlines
from trioserve.contracts.errors import AlreadyEnded
from trioserve.contracts.events import FinishReason
from trioserve.contracts.prompt import ChatPrompt, Prompt
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.tracing import NO_SPAN, Span
from trioserve.engine.conversation import Conversation, SessionRequest
from trioserve.engine.lifecycle.scope_stream import error_of
from trioserve.engine.request_preparation import checked_prompt
from trioserve.engine.request_stream import RequestStream
from trioserve.engine.sessions import LiveSession, SessionName, SessionTable
from trioserve.text.response_parts import WholeCall
from trioserve.trio_tools.interrupts import uninterrupted
from trioserve.trio_tools.own_run import OwnRun

__all__ = ["Reply", "Session"]


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
        deadlines: Deadlines | None = None,
    ) -> Reply:
        """Send new messages, and return the whole response.

        Args:
            messages: the new messages, in OpenAI's format. A string is one message of the user.
            sampling: see `generate`.
            tools: tools that the model may call. None: those of the turn before.
            tool_choice: see `generate`.
            strict: see `generate`.
            deadlines: see `generate`.

        Raises:
            RequestFailed, RequestAborted, DeadlinePassed: the turn did not complete.
            InvalidRequest: an argument is not allowed, or another turn runs.
            AlreadyEnded: the session is not entered, or has ended.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        prompt = ChatPrompt(messages=list(messages), tools=None if tools is None else list(tools))
        stream = self.generate(prompt, sampling, tool_choice=tool_choice, strict=strict, deadlines=deadlines)
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
