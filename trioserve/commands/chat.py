"""`trioserve chat`: reads and answers messages until the user ends it. Ctrl-C ends an answer, not the program.

A terminal offers editing and history, and other inputs are read line by line.
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import trio

from trioserve.bench.client import Failure, Http1Client, stream_opener
from trioserve.bench.settings import Target
from trioserve.commands.remote import ServerFailed
from trioserve.commands.terminal import Interrupts, LineReader, SamplingOptions, opened_engine, run_interruptible, say
from trioserve.config import Config
from trioserve.contracts.arguments import closest_name
from trioserve.contracts.endpoint import NOT_A_PAGE_HEADER
from trioserve.contracts.errors import TrioserveError
from trioserve.contracts.events import FinishReason
from trioserve.contracts.prompt import ChatPrompt
from trioserve.contracts.sampling import SamplingParams
from trioserve.engine.engine import Engine

__all__ = [
    "COMMANDS",
    "Answer",
    "Answerer",
    "ChatPlace",
    "Conversation",
    "EngineAnswers",
    "Line",
    "ServerAnswers",
    "TerminalTyping",
    "line_of",
    "run_chat",
]


BODY_BYTES_MAX = 2**20  # maximum size of a response that is not a stream, such as an error
EVENT_BYTES_MAX = 2**20
CUT_OFF = "cut off at the limit of tokens"


class Answer:
    """Answer of the model, which grows while text arrives.

    Args:
        show: Called with each new piece of text.

    Attributes:
        text: Text so far.
        tokens: Number of tokens so far.
        note: Reason for an early end. None for a complete answer.
        started_at: Time of the first text, by Trio's clock. None until the first text arrives.
        ended_at: Time of the latest text, by Trio's clock.
    """

    def __init__(self, show: Callable[[str], None]) -> None:
        self.text = ""
        self.tokens = 0
        self.note: str | None = None
        self.started_at: float | None = None
        self.ended_at = 0.0
        self._show = show

    def add(self, text: str, tokens: int = 1) -> None:
        """Add a piece of text.

        Args:
            text: New text.
            tokens: Number of its tokens.
        """
        self.ended_at = trio.current_time()
        if self.started_at is None:
            self.started_at = self.ended_at
        self.tokens += tokens
        self.text += text
        self._show(text)

    @property
    def tokens_per_second(self) -> float | None:
        """Speed after the first piece of text. None if the speed is unknown."""
        seconds = 0.0 if self.started_at is None else self.ended_at - self.started_at
        return (self.tokens - 1) / seconds if seconds > 0.0 and self.tokens > 1 else None


class Answerer(Protocol):
    """Source of answers."""

    async def answer(self, messages: list[dict[str, Any]], into: Answer) -> None:
        """Get the answer to the last message of the conversation.

        Args:
            messages: Conversation so far.
                into: Answer that receives the text.

        Raises:
            RequestFailed: The engine refused the request.
            ServerFailed: The server refused the request, or did not answer.
        """
        ...


class EngineAnswers:
    """Answers of an engine in this process.

    Args:
        engine: Open engine.
        sampling: Sampling parameters of all answers.
    """

    def __init__(self, engine: Engine, sampling: SamplingParams) -> None:
        self._engine = engine
        self._sampling = sampling

    async def answer(self, messages: list[dict[str, Any]], into: Answer) -> None:
        async with self._engine.generate(ChatPrompt(messages=messages), self._sampling) as stream:
            async for delta in stream:
                into.add(delta.text, len(delta.token_ids))
                if delta.finish_reason is FinishReason.LENGTH:
                    into.note = CUT_OFF
                elif delta.finish_reason is FinishReason.ERROR:
                    into.note = delta.message


class ServerAnswers:
    """Answers of a server with OpenAI's chat completions.

    Args:
        url: Address of the server.
        api_key: Key for the server. None sends no key.
        model: Name of the model. None selects the first model that the server lists.
        fields: Sampling fields that the user has set.

    Raises:
        StartupError: The URL is invalid.
    """

    def __init__(self, url: str, *, api_key: str | None, model: str | None, fields: Mapping[str, Any]) -> None:
        self._target = Target.from_url(url)
        headers = [("host", self._target.authority), ("content-type", "application/json")]
        headers.append((NOT_A_PAGE_HEADER, "trioserve"))
        if api_key:
            headers.append(("authorization", f"Bearer {api_key}"))
        self._client = Http1Client(stream_opener(self._target, 1), headers)
        self._model = model
        self._fields = dict(fields)

    async def find_model(self) -> str:
        """Return the name of the model. If the user gave no name, get the name from the server.

        Raises:
            ServerFailed: The server lists no models, or did not answer.
        """
        if self._model is None:
            listener = _Stream(Answer(lambda text: None))
            await self._request("GET", "/v1/models", b"", listener)
            try:
                self._model = str(msgspec.json.decode(listener.rest)["data"][0]["id"])
            except (msgspec.DecodeError, KeyError, IndexError, TypeError):
                raise ServerFailed(f"{self._target.authority} lists no model: name one with --model NAME") from None
        return self._model

    async def answer(self, messages: list[dict[str, Any]], into: Answer) -> None:
        body = {
            "model": await self.find_model(),
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._fields,
        }
        await self._request("POST", "/v1/chat/completions", msgspec.json.encode(body), _Stream(into))

    async def _request(self, method: str, path: str, body: bytes, listener: _Stream) -> None:
        failure = await self._client.request(method, self._target.path_prefix + path, body, listener)
        if isinstance(failure, Failure):
            raise ServerFailed(
                f"no answer from {self._target.authority} ({failure.message}): start a server, or name another"
            )
        if listener.status != 200:
            raise ServerFailed(f"{self._target.authority} answered with status {listener.status}: {listener.refusal()}")
        if listener.error is not None:
            into = listener.into
            into.note = listener.error

    async def aclose(self) -> None:
        await self._client.aclose()


class _Stream:
    """Parser of a response body. It parses the events of a stream. If the body is not a stream, `rest` contains it."""

    def __init__(self, into: Answer) -> None:
        self.into = into
        self.status = 0
        self.rest = b""
        self.error: str | None = None

    def head(self, status: int) -> None:
        self.status = status

    def body(self, data: bytes, _now_seconds: float) -> bool:
        self.rest += data
        *lines, rest = self.rest.split(b"\n")
        if any(line.startswith((b"data:", b":")) for line in lines):
            for line in lines:
                if line.startswith(b"data:"):
                    self._take(line[5:].strip())
            self.rest = rest
        return len(self.rest) <= max(BODY_BYTES_MAX, EVENT_BYTES_MAX)

    def refusal(self) -> str:
        try:
            error = msgspec.json.decode(self.rest)["error"]
            return str(error["message"] if isinstance(error, dict) else error)
        except (msgspec.DecodeError, KeyError, TypeError):
            return "no reason given"

    def _take(self, data: bytes) -> None:
        if data == b"[DONE]":
            return
        try:
            event = msgspec.json.decode(data)
            error, usage = event.get("error"), event.get("usage")
            if error is not None:
                self.error = str(error.get("message", error))
            for choice in event.get("choices") or ():
                text = (choice.get("delta") or {}).get("content")
                if text:
                    self.into.add(text)
                if choice.get("finish_reason") == "length":
                    self.into.note = CUT_OFF
            if usage:
                self.into.tokens = int(usage.get("completion_tokens", self.into.tokens))
        except (msgspec.DecodeError, AttributeError, TypeError, ValueError):
            self.error = "the server sent an event that is not a chunk of a chat"


INTERRUPTED = "\x03"


class Typing(Protocol):
    """Source of a user's messages."""

    async def read(self) -> str | None:
        """Return the next message, or None at the end of the input."""
        ...

    async def read_meanwhile(self) -> str:
        """Return a line that the user types during an answer. Waits forever if such lines cannot be read."""
        ...


class PlainTyping:
    """Reads lines from standard input. A backslash at the end of a line continues the message in the next line."""

    def __init__(self) -> None:
        self._lines = LineReader()

    async def read(self) -> str | None:
        say("> ", end="")
        parts: list[str] = []
        while (line := await self._lines.read()) is not None:
            parts.append(line.removesuffix("\\"))
            if not line.endswith("\\"):
                break
        return "\n".join(parts) if parts else None

    async def read_meanwhile(self) -> str:
        await trio.sleep_forever()
        raise AssertionError("not reached")


class TerminalTyping:
    """Reads messages with prompt_toolkit in a thread.

    During an answer, the terminal is in its normal mode, and this object reads whole lines.
    """

    def __init__(self) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.history import FileHistory, InMemoryHistory
        from prompt_toolkit.key_binding import KeyBindings

        keys = KeyBindings()

        @keys.add("escape", "enter")
        def _(event: Any) -> None:
            event.current_buffer.insert_text("\n")

        path = history_path()
        history = InMemoryHistory() if path is None else FileHistory(str(path))
        self._session: PromptSession[str] = PromptSession(history=history, key_bindings=keys)
        self._meanwhile = LineReader()
        self._waiting: list[str] = []
        self._was_interrupted = False
        self._is_leaving = False

    async def read(self) -> str | None:
        if self._waiting:
            return self._waiting.pop(0)
        while True:
            self._is_leaving = False
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._leave_when_cancelled)
                # A cancel makes the thread end. So the thread restores the terminal before this function returns.
                typed = await trio.to_thread.run_sync(self._prompt)
                nursery.cancel_scope.cancel()
            if typed != INTERRUPTED:
                self._was_interrupted = False
                return typed
            if self._was_interrupted:
                return None
            self._was_interrupted = True
            say("(Ctrl-C again or Ctrl-D ends the chat)")

    async def read_meanwhile(self) -> str:
        line = await self._meanwhile.read()
        if line is None:
            await trio.sleep_forever()
            raise AssertionError("not reached")
        if line.strip() != "/stop":
            self._waiting.append(line)
        return line

    def _prompt(self) -> str | None:
        def begin() -> None:
            if self._is_leaving:
                self._session.app.exit(exception=EOFError())

        try:
            return self._session.prompt("> ", pre_run=begin)
        except EOFError:
            return None
        except KeyboardInterrupt:
            return INTERRUPTED

    async def _leave_when_cancelled(self) -> None:
        try:
            await trio.sleep_forever()
        finally:
            self._is_leaving = True
            app = self._session.app
            if app.is_running and app.loop is not None:
                app.loop.call_soon_threadsafe(self._exit)

    def _exit(self) -> None:
        if self._session.app.is_running:
            self._session.app.exit(exception=EOFError())


def history_path() -> Path | None:
    """Return the file for the history of messages. Only its owner can read it. None if it cannot be created."""
    base = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    path = base / "trioserve" / "chat_history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
    except OSError:
        return None
    return path


COMMANDS = {
    "/help": "show this",
    "/system": "TEXT sets the system message. Without TEXT, shows it",
    "/clear": "start a new conversation with the same system message",
    "/save": "FILE writes the conversation as JSON",
    "/stop": "end the running answer, as Ctrl-C does",
    "/exit": "end the chat, as Ctrl-D does",
}
ALIASES = {"/new": "/clear", "/quit": "/exit"}


class Line(NamedTuple):
    """Parsed line that the user typed.

    Attributes:
        command: One of COMMANDS. None for a message.
        text: Message, or argument of the command.
        error: Reason why the line is invalid. None if it is valid.
    """

    command: str | None
    text: str
    error: str | None = None


def line_of(typed: str) -> Line:
    """Parse a line. A line that begins with / is a command, and a line that begins with // is a message with one /.

    Args:
        typed: Line that the user typed.
    """
    if not typed.startswith("/") or "\n" in typed.split(" ")[0]:
        return Line(None, typed)
    if typed.startswith("//"):
        return Line(None, typed[1:])
    name, _blank, rest = typed.partition(" ")
    name = ALIASES.get(name, name)
    if name in COMMANDS:
        return Line(name, rest.strip())
    closest = closest_name(name, COMMANDS)
    hint = f"did you mean {closest}?" if closest else "/help lists all commands"
    return Line(None, "", f"there is no {name}: {hint}")


class Conversation:
    """Messages so far.

    Args:
        system: System message at the beginning. None for no system message.
    """

    def __init__(self, system: str | None) -> None:
        self.system = system
        self._turns: list[dict[str, Any]] = []

    @property
    def messages(self) -> list[dict[str, Any]]:
        start = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*start, *self._turns]

    def ask(self, text: str) -> None:
        self._turns.append({"role": "user", "content": text})

    def answer(self, text: str) -> None:
        """Add the answer to the last message of the user. If the answer is empty, remove that message.

        Args:
            text: Text of the answer.
        """
        if text:
            self._turns.append({"role": "assistant", "content": text})
        else:
            self._turns.pop()

    def clear(self) -> None:
        self._turns.clear()


class ChatPlace(msgspec.Struct, frozen=True):
    """Server that answers the messages.

    Attributes:
        url: Address of the server.
        api_key: Key for the server. None sends no key.
        model: Name of the model. None selects the first model that the server lists.
    """

    url: str
    api_key: str | None
    model: str | None


def run_chat(config: Config, sampling: SamplingOptions, *, system: str | None, place: ChatPlace | None) -> int:
    """Run a chat.

    Args:
        config: Options of the engine.
        sampling: Sampling options of the user.
        system: System message. None for no system message.
        place: Server that answers. If None, an engine in this process answers.

    Returns:
        Exit code of the program.
    """

    async def main(interrupts: Interrupts) -> None:
        async with _answerer(config, sampling, place) as answerer:
            is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
            typing: Typing = TerminalTyping() if is_terminal else PlainTyping()
            await _Chat(answerer, typing, Conversation(system), interrupts).run()

    return run_interruptible(main)


@asynccontextmanager
async def _answerer(config: Config, sampling: SamplingOptions, place: ChatPlace | None) -> AsyncIterator[Answerer]:
    if place is None:
        async with opened_engine(config) as engine:
            yield EngineAnswers(engine, sampling.applied_to(engine.default_sampling))
        return
    answers = ServerAnswers(place.url, api_key=place.api_key, model=place.model, fields=sampling.given())
    try:
        say(f"{await answers.find_model()} at {place.url}")
        yield answers
    finally:
        with trio.CancelScope(deadline=trio.current_time() + 1, shield=True):
            await answers.aclose()


class _Chat:
    def __init__(self, answerer: Answerer, typing: Typing, conversation: Conversation, interrupts: Interrupts) -> None:
        self._answerer = answerer
        self._typing = typing
        self._conversation = conversation
        self._interrupts = interrupts

    async def run(self) -> None:
        say("Type a message. /help lists commands, Alt-Enter adds a line, Ctrl-C ends an answer, Ctrl-D the chat.")
        while (typed := await self._typing.read()) is not None:
            line = line_of(typed.strip())
            if line.error is not None:
                say(line.error)
            elif line.command == "/exit":
                return
            elif line.command is not None:
                await self._run_command(line.command, line.text)
            elif line.text:
                await self._answer(line.text)

    async def _run_command(self, command: str, text: str) -> None:
        conversation = self._conversation
        if command == "/help":
            for name, meaning in COMMANDS.items():
                say(f"  {name:<8} {meaning}")
        elif command == "/clear":
            conversation.clear()
        elif command == "/system" and not text:
            say(conversation.system or "there is no system message")
        elif command == "/system":
            conversation.system = text
        elif command == "/save" and not text:
            say("name a file: /save FILE")
        elif command == "/save":
            encoded = msgspec.json.format(msgspec.json.encode(conversation.messages), indent=2)
            try:
                await trio.to_thread.run_sync(_write, text, encoded + b"\n")
            except OSError as error:
                say(f"{text} cannot be written: {error.strerror}")
        else:
            say("no answer is running")

    async def _answer(self, text: str) -> None:
        self._conversation.ask(text)
        answer = Answer(lambda piece: print(piece, end="", flush=True))
        scope = trio.CancelScope()
        self._interrupts.response_scope = scope
        try:
            with scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._stop_on_command, scope)
                    try:
                        await self._answerer.answer(self._conversation.messages, answer)
                    except TrioserveError as error:  # The user sees the error, and the chat continues.
                        answer.note = str(error)
                    nursery.cancel_scope.cancel()
        finally:
            self._interrupts.response_scope = None
            print(flush=True)
        self._conversation.answer(answer.text)
        _say_dim(_summary(answer, was_stopped=scope.cancelled_caught))

    async def _stop_on_command(self, scope: trio.CancelScope) -> None:
        while (await self._typing.read_meanwhile()).strip() != "/stop":
            pass
        scope.cancel()


def _write(name: str, content: bytes) -> None:
    Path(name).expanduser().write_bytes(content)


def _summary(answer: Answer, *, was_stopped: bool) -> str:
    speed = answer.tokens_per_second
    parts = [
        "stopped" if was_stopped else "",
        f"{answer.tokens} token{'' if answer.tokens == 1 else 's'}",
        "" if speed is None else f"{speed:.1f} tokens/s",
        answer.note or "",
    ]
    return f"({', '.join(filter(None, parts))})"


def _say_dim(text: str) -> None:
    has_colours = sys.stderr.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    say(f"\x1b[2m{text}\x1b[0m" if has_colours else text)
