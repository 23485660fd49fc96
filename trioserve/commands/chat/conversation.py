"""The messages of a chat, and the commands that a user can type."""

from __future__ import annotations

from typing import Any, NamedTuple

from trioserve.contracts.spelling import closest_name

__all__ = ["COMMANDS", "Conversation", "Line", "line_of"]

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
