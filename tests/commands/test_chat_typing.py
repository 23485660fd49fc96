"""Tests that one Ctrl-C at the prompt of a chat only clears the line."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from trioserve.commands import chat


async def test_single_ctrl_c_does_not_end_the_chat(monkeypatch: pytest.MonkeyPatch):
    prompt = object.__new__(chat.TerminalTyping)
    prompt._session = SimpleNamespace(app=SimpleNamespace(is_running=False))
    prompt._waiting, prompt._was_interrupted, prompt._is_leaving = [], False, False
    typed = iter((chat.INTERRUPTED, "hello"))

    def ask(self: chat.TerminalTyping) -> str | None:
        return None if self._is_leaving else next(typed)

    monkeypatch.setattr(chat.TerminalTyping, "_prompt", ask)
    assert await prompt.read() == "hello"
