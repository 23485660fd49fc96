"""Records docs/casts/first_minutes.cast (asciicast v2): a session in a terminal with a real server.

`trioserve` must be on the PATH, with the extra `top` and the default model, and port 8000 must be free. Run it with
`python docs/casts/record.py`.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import shutil
import signal
import struct
import tempfile
import termios
import time
from pathlib import Path

CAST = Path(__file__).with_name("first_minutes.cast")
COLUMNS, ROWS = 100, 30
PROMPT = "$ "
KEY_SECONDS = 0.04  # between two keys
READ_SECONDS = 1.5  # for the viewer, after the output of a command
PAUSE_SECONDS_MAX = 2.0  # longer pauses are cut to this
SECONDS_MAX = 120.0  # until an expected output
URL = "http://127.0.0.1:8000"
ESSAY = {"prompt": "A long essay on rivers:", "max_tokens": 2000, "ignore_eos": True, "stream": True}
CONTROL = re.compile(r"\x1b(?:\[[0-9;?<>=]*[A-Za-z]|\][^\x07]*\x07|[=>()][0-9A-Za-z]?)|\r(?!\n)|[\x07\x08]")


class Terminal:
    """A shell behind a pseudo-terminal.

    Attributes:
        events: pieces of output, each with its time in seconds.
    """

    def __init__(self, folder: str) -> None:
        self.events: list[tuple[float, str]] = []
        self.began_at = time.monotonic()
        self._said = ""
        self._rest = b""
        pid, self._file = pty.fork()
        if pid == 0:
            os.chdir(folder)
            environment = {
                **os.environ,
                "PS1": PROMPT,
                "HOME": folder,
                "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache")),
                "PROMPT_TOOLKIT_NO_CPR": "1",
                "HISTFILE": "",
                "TERM": "xterm-256color",
                "COLUMNS": str(COLUMNS),
                "LINES": str(ROWS),
            }
            os.execvpe("bash", ["bash", "--norc", "--noprofile"], environment)
        self.pid = pid
        fcntl.ioctl(self._file, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))

    def look(self, seconds: float) -> None:
        """Record the output of some seconds."""
        ends_at = time.monotonic() + seconds
        while (left := ends_at - time.monotonic()) > 0:
            if not select.select([self._file], [], [], left)[0]:
                return
            data = self._rest + os.read(self._file, 65536)
            text = data.decode(errors="ignore")
            self._rest = b"" if text.encode() == data else data[len(text.encode()) :]
            self.events.append((time.monotonic() - self.began_at, text))
            self._said += text

    def wait(self, pattern: str, *, reading: float = READ_SECONDS) -> None:
        """Record until the output since the last key matches a regular expression, and then for the time to read it."""
        ends_at = time.monotonic() + SECONDS_MAX
        while not re.search(pattern, CONTROL.sub("", self._said)):
            assert time.monotonic() < ends_at, f"{pattern!r} did not come: {self._said[-500:]!r}"
            self.look(0.05)
        self.look(reading)

    def type(self, text: str) -> None:
        for key in text:
            self._said = ""
            os.write(self._file, key.encode())
            self.look(KEY_SECONDS)

    def run(self, command: str, pattern: str = r"\n\$ $", *, reading: float = READ_SECONDS) -> None:
        self.type(command)
        self.look(0.4)
        self.type("\n")
        self.wait(pattern, reading=reading)


def play(terminal: Terminal) -> None:
    terminal.wait(r"\$ $")
    terminal.run("# A server with the bundled model:", r"\$ $", reading=0.5)
    terminal.run("trioserve serve --model smollm2 --no-access-log &", "serving .*\n", reading=3)
    terminal.run("", r"\$ $", reading=0.2)
    terminal.run(f"trioserve chat --url {URL}", r"\n(>|you|\S*>) ?$", reading=1)
    terminal.run("Name three rivers.", r"tokens/s|\n(>|you|\S*>) ?$", reading=3)
    terminal.run("/exit", r"\$ $")
    terminal.run("# A request for many tokens:", r"\$ $", reading=0.5)
    body = json.dumps(ESSAY)
    terminal.run(f"curl -sN {URL}/v1/completions -H 'X-Request-Id: essay' -d '{body}' >essay.txt &", r"\$ $", reading=2)
    terminal.run("trioserve top", "essay", reading=7)
    terminal.type("\x03")
    terminal.wait(r"\$ $")
    terminal.run("# Its KV blocks, before and after an abort:", r"\$ $", reading=0.5)
    blocks = f"curl -s {URL}/metrics | grep '^trioserve:kv_blocks{{'"
    terminal.run(blocks)
    terminal.run("trioserve abort essay")
    terminal.run(blocks, reading=3)
    terminal.run("tail -n 2 essay.txt", reading=3)
    terminal.run("# Drain: running requests finish, then the server exits.", r"\$ $", reading=0.5)
    terminal.run("kill -TERM %1; wait", r"\n\$ $", reading=2)


def main() -> None:
    assert shutil.which("trioserve"), "trioserve is not on the PATH"
    with tempfile.TemporaryDirectory() as folder:
        terminal = Terminal(folder)
        try:
            play(terminal)
        finally:
            os.kill(terminal.pid, signal.SIGHUP)
            os.waitpid(terminal.pid, 0)
    lines, at, before = [], 0.0, 0.0
    for moment, text in terminal.events:
        at += min(PAUSE_SECONDS_MAX, moment - before)
        before = moment
        lines.append(json.dumps([round(at, 3), "o", text], ensure_ascii=False))
    head = {"version": 2, "width": COLUMNS, "height": ROWS, "title": "trioserve: the first minutes"}
    CAST.write_text("\n".join([json.dumps(head), *lines]) + "\n")
    print(f"{CAST}: {at:.0f} s, {CAST.stat().st_size / 1000:.0f} KB")


if __name__ == "__main__":
    main()
