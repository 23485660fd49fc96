"""Which processes of one router end when, and what is said of it; and what cannot be several processes."""

from __future__ import annotations

import argparse

import pytest

from trioserve.commands.router_processes import Ended, Late, Lives, Order, Serving, Signalled, check_processes
from trioserve.config import Config, RouteConfig, add_arguments, config_from
from trioserve.contracts.errors import StartupError


def configured(*flags: str, kind: type[RouteConfig] = RouteConfig) -> RouteConfig:
    parser = argparse.ArgumentParser()
    add_arguments(parser, kind)
    return config_from(parser.parse_args(flags), {}, kind=kind)


def serving(count: int = 2) -> Lives:
    lives = Lives(count)
    for number in range(1, count + 1):
        assert lives.note(Serving(number)) == []
    assert lives.all_serve
    return lives


def test_a_signal_stops_all_and_it_is_over_when_the_last_one_has_ended():
    lives = serving()
    assert lives.note(Signalled()) == [Order("stop", 1), Order("stop", 2)]
    assert lives.note(Ended(2, 0)) == []
    assert not lives.is_over
    assert lives.note(Signalled()) == [Order("stop", 1)], "a second one shortens what the rest is given"
    assert lives.note(Ended(1, 0)) == []
    assert (lives.is_over, lives.exit_code, lives.failures) == (True, 0, [])


@pytest.mark.parametrize(
    ("code", "how"), [(-9, "was killed by SIGKILL"), (1, "ended with code 1"), (0, "ended with code 0")]
)
def test_a_process_that_ends_unasked_is_named_and_the_others_are_stopped(code, how):
    lives = serving(3)
    assert lives.note(Ended(2, code)) == [Order("stop", 1), Order("stop", 3)]
    assert lives.failures == [f"process 2 of this router {how}; the others drain and end, too"]
    assert [lives.note(Ended(number, 0)) for number in (1, 3)] == [[], []]
    assert (lives.is_over, lives.exit_code) == (True, 1)


def test_only_processes_that_serve_are_asked_to_reload():
    lives = Lives(3)
    assert lives.serving == []
    lives.note(Serving(1))
    lives.note(Serving(3))
    assert lives.serving == [1, 3]
    lives.note(Ended(1, 0))
    assert lives.serving == [3]


def test_a_process_that_fails_while_it_drains_is_a_failure():
    lives = serving()
    lives.note(Signalled())
    lives.note(Ended(1, -11))
    lives.note(Ended(2, 0))
    assert (lives.failures, lives.exit_code) == (["process 1 of this router was killed by SIGSEGV"], 1)


def test_a_signal_before_all_serve_ends_the_start():
    lives = Lives(2)
    lives.note(Serving(1))
    assert lives.note(Signalled()) == [Order("stop", 1), Order("stop", 2)]
    lives.note(Ended(1, 0))
    lives.note(Ended(2, -15))  # it listened to no signals yet
    assert (lives.is_over, lives.exit_code, lives.failures) == (True, 130, [])


def test_who_does_not_stop_is_killed_by_the_fourth_signal_or_when_it_is_late():
    lives = serving()
    for _ in range(3):
        assert lives.note(Signalled())[0].what == "stop"
    assert lives.note(Signalled()) == [Order("kill", 1), Order("kill", 2)]
    lives = serving()
    lives.note(Signalled())
    lives.note(Ended(1, 0))
    assert lives.note(Late()) == [Order("kill", 2)]
    lives.note(Ended(2, -9))
    assert lives.exit_code == 1
    assert "process 2" in lives.failures[0]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--uds", "/tmp/x"], ["--router-processes is 2", "leave out --uds"]),
        (["--router-peers", "http://10.0.0.1:8000"], ["--router-processes is 2", "leave out --router-peers"]),
    ],
)
def test_what_cannot_be_shared_by_processes_is_refused_by_name(flags, words, monkeypatch):
    monkeypatch.setattr("sys.platform", "linux")
    with pytest.raises(StartupError) as refusal:
        check_processes(configured("--router-processes", "2", *flags))
    for word in words:
        assert word in str(refusal.value)


def test_only_linux_spreads_connections(monkeypatch):
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(StartupError, match="only Linux"):
        check_processes(configured("--router-processes", "2"))


def test_a_server_with_an_engine_is_one_process():
    assert configured("--router-processes", "1", kind=Config).router_processes == 1
    with pytest.raises(StartupError, match="the engine of serve is in one process"):
        configured("--router-processes", "2", kind=Config)
