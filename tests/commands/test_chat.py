"""Tests of the command `chat`: parsing of lines, answers of a server, and Ctrl-C at a real terminal."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import trio

from trioserve.commands.chat import COMMANDS, Answer, Conversation, Line, ServerAnswers, line_of
from trioserve.commands.remote import ServerFailed
from trioserve.testing.memory_server import open_memory_server

PROMPT = "\x1b[?2004h"  # prompt_toolkit sends this escape sequence when editing begins.
AT_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)
WAIT_SECONDS_MAX = 20  # seconds. The limit is long, because the machine may be busy.


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ("Hello", Line(None, "Hello")),
        ("/system Be brief.", Line("/system", "Be brief.")),
        ("/new", Line("/clear", "")),
        ("//etc/hosts", Line(None, "/etc/hosts")),
        ("/systm x", Line(None, "", "there is no /systm: did you mean /system?")),
        ("/frobnicate", Line(None, "", "there is no /frobnicate: /help lists all commands")),
    ],
)
def test_chat_line_is_parsed_as_message_or_command(typed: str, line: Line):
    assert line_of(typed) == line


def test_chat_removes_a_question_without_an_answer():
    conversation = Conversation("Be brief.")
    conversation.ask("Hi")
    conversation.answer("")
    assert conversation.messages == [{"role": "system", "content": "Be brief."}]
    conversation.ask("Hi")
    conversation.answer("Hello")
    assert [message["role"] for message in conversation.messages] == ["system", "user", "assistant"]
    conversation.clear()
    assert len(conversation.messages) == 1


async def test_cancelling_a_servers_answer_frees_its_blocks():
    async with open_memory_server(paused=True) as server, trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        await nursery.start(server.server.serve, listeners)
        port = listeners[0].socket.getsockname()[1]
        answers = ServerAnswers(f"http://127.0.0.1:{port}/v1", api_key=None, model=None, fields={"max_tokens": 50})
        model = await answers.find_model()
        assert model
        messages = [{"role": "user", "content": "x" * 40}]
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as asking:
                asking.start_soon(answers.answer, messages, Answer(lambda text: None))
                async with server.engine.held_step():
                    scope.cancel()
        await answers.aclose()
        await server.assert_all_free()
        answers = ServerAnswers(f"http://127.0.0.1:{port}", api_key=None, model="none", fields={})
        with pytest.raises(ServerFailed, match="answered with status 404: "):
            await answers.answer(messages, Answer(lambda text: None))
        await answers.aclose()
        nursery.cancel_scope.cancel()


class Answering:
    """Server that answers "Hi there". For "hang", it sends a word and nothing more until the client leaves.

    Attributes:
        left: Released when the client leaves.
    """

    def __init__(self) -> None:
        self.left = threading.Semaphore(0)
        self.bodies: list[dict[str, Any]] = []
        answering = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer(b'{"data": [{"id": "played"}]}')

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                answering.bodies.append(body)
                if body["messages"][-1]["content"] != "hang":
                    words = (b"Hi ", b"there")
                    usage = b'data: {"choices": [], "usage": {"completion_tokens": 2}}\n\ndata: [DONE]\n\n'
                    self.answer(b"".join(map(self.event, words)) + usage)
                    return
                self.send_response(200)
                self.end_headers()
                self.wfile.write(self.event(b"Wait"))
                self.connection.recv(1)
                answering.left.release()
                self.close_connection = True

            def event(self, word: bytes) -> bytes:
                return b'data: {"choices": [{"delta": {"content": "' + word + b'"}}]}\n\n'

            def answer(self, text: bytes) -> None:
                self.send_response(200)
                self.send_header("content-length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_arguments: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def answering() -> Iterator[Answering]:
    made = Answering()
    thread = threading.Thread(target=made.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.server.shutdown()
    thread.join()
    made.server.server_close()


class Terminal:
    """A program at its own terminal."""

    def __init__(self, arguments: list[str], environment: dict[str, str]) -> None:
        self._terminal, other_end = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", AT_TERMINAL, *arguments],
            stdin=other_end,
            stdout=other_end,
            stderr=other_end,
            start_new_session=True,
            env={**os.environ, **environment, "PROMPT_TOOLKIT_NO_CPR": "1"},
        )
        os.close(other_end)
        self._shown = ""

    def wait_for(self, *texts: str) -> None:
        """Wait until each text was shown, in this order, after earlier texts."""
        for text in texts:
            while text not in self._shown:
                assert select.select([self._terminal], [], [], WAIT_SECONDS_MAX)[0], f"no {text!r} in {self._shown!r}"
                self._shown += os.read(self._terminal, 65536).decode(errors="replace")
            self._shown = self._shown.partition(text)[2]

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def end(self) -> int:
        """Wait for the end of the program and return its exit code."""
        try:
            while os.read(self._terminal, 65536):
                pass
        except OSError:  # On Linux, this error means that the other end is closed.
            pass
        os.close(self._terminal)
        return self.process.wait(WAIT_SECONDS_MAX)


@pytest.mark.slow
def test_ctrl_c_at_a_terminal_stops_the_answer_but_not_the_chat(answering: Answering, tmp_path: Path):
    command = [sys.executable, "-m", "trioserve", "chat", "--url", answering.url, "--temperature", "0"]
    terminal = Terminal(command, {"XDG_STATE_HOME": str(tmp_path), "NO_COLOR": "1", "TERM": "xterm"})
    try:
        terminal.wait_for("played at", "Type a message", PROMPT)
        terminal.type("Hello\r")
        terminal.wait_for("Hi there", "(2 tokens", PROMPT)
        for stop in ("\x03", "/stop\n"):
            terminal.type("hang\r")
            terminal.wait_for("Wait")
            terminal.type(stop)
            terminal.wait_for("(stopped, 1 token)", PROMPT)
            assert answering.left.acquire(timeout=WAIT_SECONDS_MAX)
        terminal.type("/help\r")
        terminal.wait_for(*COMMANDS, PROMPT)
        terminal.type("two\x1b\rlines\r")
        terminal.wait_for("Hi there", PROMPT)
        terminal.type("\x1b[A\x1b[A\x1b[A\x1b[A\x1b[A\r")  # Five entries up in the history is the line "Hello".
        terminal.wait_for("Hi there", PROMPT)
        terminal.type("\x04")
        assert terminal.end() == 0
    except BaseException:
        terminal.process.kill()
        terminal.process.wait()
        raise
    asked = [body["messages"][-1]["content"] for body in answering.bodies]
    assert asked == ["Hello", "hang", "hang", "two\nlines", "Hello"]
    assert answering.bodies[0]["temperature"] == 0
    # The partial text of a stopped answer stays in the conversation.
    assert {"role": "assistant", "content": "Wait"} in answering.bodies[-1]["messages"]
    assert "+Hello" in (tmp_path / "trioserve" / "chat_history").read_text()
    assert (tmp_path / "trioserve" / "chat_history").stat().st_mode & 0o077 == 0


@pytest.mark.slow
def test_signal_ends_a_waiting_chat_and_restores_the_terminal(answering: Answering, tmp_path: Path):
    command = [sys.executable, "-m", "trioserve", "chat", "--url", answering.url]
    terminal = Terminal(command, {"XDG_STATE_HOME": str(tmp_path), "TERM": "xterm"})
    terminal.wait_for("Type a message", PROMPT)
    terminal.process.send_signal(signal.SIGTERM)
    terminal.wait_for("interrupted")
    assert terminal.end() == 130
