"""Reads the messages of a user. A terminal offers editing and history, and other inputs are read line by line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Protocol

import trio

from trioserve.commands.terminal import LineReader, say

__all__ = ["PlainTyping", "TerminalTyping", "Typing", "history_path"]

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
