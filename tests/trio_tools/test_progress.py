"""Tests that progress is shown as one line in a terminal, and as a few lines in a log."""

from __future__ import annotations

import io
import os

import pytest

from trioserve.trio_tools.progress import ProgressBar, ProgressLine, with_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture(autouse=True)
def terminal_of_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")


def test_log_gets_a_progress_line_at_once_and_then_every_ten_seconds() -> None:
    stream, clock = io.StringIO(), Clock()
    with ProgressBar("fetching it", stream, clock=clock) as bar:
        for second in range(35):
            clock.seconds = second
            bar.show_share(second * 1_000_000, 100_000_000)
    assert stream.getvalue().splitlines() == [
        "fetching it",
        "fetching it:  10 %  10 of 100 MB",
        "fetching it:  20 %  20 of 100 MB",
        "fetching it:  30 %  30 of 100 MB",
    ]


def test_progress_of_short_work_is_one_line_in_a_log() -> None:
    stream, clock = io.StringIO(), Clock()
    with ProgressBar("loading it", stream, clock=clock) as bar:
        for done in range(101):
            clock.seconds += 0.05
            bar.show_share(done, 100)
    assert stream.getvalue() == "loading it\n"


def test_progress_line_in_a_terminal_is_overwritten_and_then_cleared() -> None:
    stream, clock = Terminal(), Clock()
    with ProgressBar("simulating", stream, unit="histories", clock=clock) as bar:
        clock.seconds = 1
        bar.show_share(1_000, 4_000, "7 a second")
    assert stream.getvalue() == (
        "\r\x1b[Ksimulating ..."
        f"\r\x1b[Ksimulating [{'#' * 5}{'.' * 15}]  25 %  1,000 of 4,000 histories, 7 a second"
        "\r\x1b[K"
    )


def test_progress_in_a_terminal_is_updated_at_most_ten_times_a_second() -> None:
    stream, clock = Terminal(), Clock()
    with ProgressLine(stream, clock=clock) as line:
        for step in range(1_000):
            clock.seconds = step / 1_000
            line.show(f"step {step}")
    assert stream.getvalue().count("step") == 10


def test_progress_line_is_cut_to_the_width_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    stream = Terminal()
    with ProgressLine(stream, clock=Clock()) as line:
        line.show("x" * 100)
    assert stream.getvalue().count("x") == 19


def test_progress_of_work_of_unknown_length_shows_seconds() -> None:
    stream, clock = Terminal(), Clock()
    with ProgressBar("loading it", stream, clock=clock) as bar:
        bar.turn_to("compiling")
        clock.seconds = 3
        bar.show_seconds(2.6)
    assert stream.getvalue().split("\r\x1b[K")[2:] == ["compiling ...", "compiling ... 3 s", ""]


def test_closed_progress_line_shows_nothing_and_may_be_closed_again() -> None:
    stream, clock = Terminal(), Clock()
    line = ProgressLine(stream, clock=clock)
    line.show("one")
    line.close()
    clock.seconds = 1
    line.show("two")
    line.close()
    assert stream.getvalue() == "\r\x1b[Kone\r\x1b[K"


def test_dumb_terminal_is_treated_as_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    with ProgressBar("loading it", stream, clock=Clock()):
        pass
    assert stream.getvalue() == "loading it\n"


def test_permanent_text_replaces_the_progress_line() -> None:
    stream = Terminal()
    with ProgressLine(stream, clock=Clock()) as line:
        line.show("half")
        line.say("round 1: 7 ms")
    assert stream.getvalue() == "\r\x1b[Khalf\r\x1b[Kround 1: 7 ms\n"


def test_progress_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBar("loading it"):
        pass
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"loading it{os.linesep}")


def test_progress_of_a_loop_is_shown() -> None:
    stream = Terminal()
    assert list(with_progress("abc", "measuring", unit="rounds", stream=stream)) == ["a", "b", "c"]
    assert stream.getvalue().startswith("\r\x1b[Kmeasuring ...")
    assert stream.getvalue().endswith("\r\x1b[K")
