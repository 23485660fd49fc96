"""Runs the scripts of one response. The first script separates reasoning, the second separates calls from content."""

from __future__ import annotations

from collections.abc import Callable

from trioserve.text.response_parsers.part_sink import PartSink
from trioserve.text.response_parsers.text_source import Script, TextSource
from trioserve.text.response_parts import ResponsePart

__all__ = ["RunningScript", "ScriptedParser"]


class RunningScript:
    """A script and the source that it reads. Pushed text is read at the next `flush` or at the end.

    Args:
        source: The source.
        script: The script.
    """

    __slots__ = ("_pieces", "_script", "_source")

    def __init__(self, source: TextSource, script: Script[None]) -> None:
        self._source = source
        self._script: Script[None] | None = script
        self._pieces: list[str] = []

    def push(self, text: str) -> None:
        if text:
            self._pieces.append(text)

    def flush(self) -> None:
        if self._pieces:
            self._source.push("".join(self._pieces))
            self._pieces.clear()
            self._run()

    def end(self) -> None:
        self.flush()
        self._source.over = True
        self._run()
        assert self._script is None, "a script ends when its text ends"

    def _run(self) -> None:
        if self._script is None:
            return
        try:
            next(self._script)
        except StopIteration:
            self._script = None


class ScriptedParser:
    """A ResponseParser that runs scripts.

    Args:
        sink: Receives the parts.
        scripts: The scripts in order. Each pushes text to the next.
        pass_on: Receives the text of the response. It is `push` of the first script, or of the sink if there are no
            scripts.
    """

    def __init__(self, sink: PartSink, scripts: list[RunningScript], *, pass_on: Callable[[str], None]) -> None:
        self._sink = sink
        self._scripts = scripts
        self._pass_on = pass_on

    def feed(self, text: str) -> list[ResponsePart]:
        self._pass_on(text)
        for script in self._scripts:
            script.flush()
        return self._sink.drain()

    def end(self) -> list[ResponsePart]:
        for script in self._scripts:
            script.end()
        self._sink.give_up_call()
        return self._sink.drain()
