"""What was said so far, and what a line means that a person types."""

from __future__ import annotations

from typing import Any, NamedTuple

from trioserve.contracts.spelling import closest_name

__all__ = ["COMMANDS", "Conversation", "Line", "line_of"]

COMMANDS = {
    "/help": "show this",
    "/system": "TEXT sets the system message, alone it shows it",
    "/clear": "begin again, with the same system message",
    "/save": "FILE writes the conversation as JSON",
    "/stop": "while an answer comes: end it, as Ctrl-C does",
    "/exit": "end the chat, as Ctrl-D does",
}
SAME = {"/new": "/clear", "/quit": "/exit"}


class Line(NamedTuple):
    """command: one of COMMANDS; None: it is a message, `text`. error: why it is neither."""

    command: str | None
    text: str
    error: str | None = None


def line_of(typed: str) -> Line:
    """A message that begins with / is written with two of them."""
    if not typed.startswith("/") or "\n" in typed.split(" ")[0]:
        return Line(None, typed)
    if typed.startswith("//"):
        return Line(None, typed[1:])
    name, _blank, rest = typed.partition(" ")
    name = SAME.get(name, name)
    if name in COMMANDS:
        return Line(name, rest.strip())
    closest = closest_name(name, COMMANDS)
    hint = f"did you mean {closest}?" if closest else "/help lists what there is"
    return Line(None, "", f"there is no {name}: {hint}")


class Conversation:
    """system: the message at its beginning; None: none."""

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
        """What came of the question. Nothing came: the question is forgotten, too."""
        if text:
            self._turns.append({"role": "assistant", "content": text})
        else:
            self._turns.pop()

    def clear(self) -> None:
        self._turns.clear()
