"""How a person's messages are read: with editing and history in a terminal, line by line from elsewhere."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Protocol

import trio

from trioserve.commands.terminal import LineReader, say

__all__ = ["PlainTyping", "TerminalTyping", "Typing", "history_path"]

INTERRUPTED = "\x03"


class Typing(Protocol):
    async def read(self) -> str | None:
        """The next message; None at the end."""
        ...

    async def read_meanwhile(self) -> str:
        """A line that is typed while an answer comes. Waits for ever where nobody can."""
        ...


class PlainTyping:
    """A line that ends with a backslash goes on in the next one."""

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
    """prompt_toolkit in a thread; while an answer comes, the terminal is as it was, and read line by line."""

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
                # It ends when it is asked to, so that the terminal is put right before this returns.
                typed = await trio.to_thread.run_sync(self._prompt)
                nursery.cancel_scope.cancel()
            if typed != INTERRUPTED:
                self._was_interrupted = False
                return typed
            if self._was_interrupted:
                return None
            self._was_interrupted = True
            say("(Ctrl-C once more or Ctrl-D ends the chat)")

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
    """Where what was typed is kept, for its owner alone; None if that cannot be."""
    base = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    path = base / "trioserve" / "chat_history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
    except OSError:
        return None
    return path
