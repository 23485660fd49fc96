"""Tests of a router with several processes: its stop, its failure messages, and options that require one process."""

from __future__ import annotations

import argparse

import pytest

from trioserve.commands.child_processes import Ended, Order, Serving, Signalled
from trioserve.commands.router_processes import Late, ProcessStates, check_processes
from trioserve.config import Config, add_arguments, config_from
from trioserve.contracts.errors import StartupError
from trioserve.options.router import RouterOptions


def configured(*flags: str, kind: type[RouterOptions] = RouterOptions) -> RouterOptions:
    parser = argparse.ArgumentParser()
    add_arguments(parser, kind)
    return config_from(parser.parse_args(flags), {}, kind=kind)


def serving(count: int = 2) -> ProcessStates:
    states = ProcessStates(count)
    for number in range(1, count + 1):
        assert states.note(Serving(number)) == []
    assert states.all_serve
    return states


def test_stop_signal_stops_all_processes_and_the_router_ends_after_the_last_process():
    states = serving()
    assert states.note(Signalled()) == [Order("stop", 1), Order("stop", 2)]
    assert states.note(Ended(2, 0)) == []
    assert not states.is_over
    assert states.note(Signalled()) == [Order("stop", 1)], "a second signal shortens the drain of the rest"
    assert states.note(Ended(1, 0)) == []
    assert (states.is_over, states.exit_code, states.failures) == (True, 0, [])


@pytest.mark.parametrize(
    ("code", "how"), [(-9, "was killed by SIGKILL"), (1, "ended with code 1"), (0, "ended with code 0")]
)
def test_unexpected_end_of_a_router_process_is_reported_and_stops_the_other_processes(code, how):
    states = serving(3)
    assert states.note(Ended(2, code)) == [Order("stop", 1), Order("stop", 3)]
    assert states.failures == [f"process 2 of this router {how}; the other processes drain and end"]
    assert [states.note(Ended(number, 0)) for number in (1, 3)] == [[], []]
    assert (states.is_over, states.exit_code) == (True, 1)


def test_only_serving_processes_get_the_reload_signal():
    states = ProcessStates(3)
    assert states.serving == []
    states.note(Serving(1))
    states.note(Serving(3))
    assert states.serving == [1, 3]
    states.note(Ended(1, 0))
    assert states.serving == [3]


def test_failure_of_a_process_during_its_drain_sets_the_exit_code():
    states = serving()
    states.note(Signalled())
    states.note(Ended(1, -11))
    states.note(Ended(2, 0))
    assert (states.failures, states.exit_code) == (["process 1 of this router was killed by SIGSEGV"], 1)


def test_stop_signal_during_the_start_ends_all_router_processes():
    states = ProcessStates(2)
    states.note(Serving(1))
    assert states.note(Signalled()) == [Order("stop", 1), Order("stop", 2)]
    states.note(Ended(1, 0))
    states.note(Ended(2, -15))  # The process had no signal handlers yet.
    assert (states.is_over, states.exit_code, states.failures) == (True, 130, [])


def test_hung_process_is_killed_at_the_fourth_signal_or_the_deadline():
    states = serving()
    for _ in range(3):
        assert states.note(Signalled())[0].what == "stop"
    assert states.note(Signalled()) == [Order("kill", 1), Order("kill", 2)]
    states = serving()
    states.note(Signalled())
    states.note(Ended(1, 0))
    assert states.note(Late()) == [Order("kill", 2)]
    states.note(Ended(2, -9))
    assert states.exit_code == 1
    assert "process 2" in states.failures[0]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--uds", "/tmp/x"], ["--router-processes is 2", "remove --uds"]),
        (["--router-peers", "http://10.0.0.1:8000"], ["--router-processes is 2", "remove --router-peers"]),
    ],
)
def test_options_that_processes_cannot_share_are_refused(flags, words, monkeypatch):
    monkeypatch.setattr("sys.platform", "linux")
    with pytest.raises(StartupError) as refusal:
        check_processes(configured("--router-processes", "2", *flags))
    for word in words:
        assert word in str(refusal.value)


def test_router_with_several_processes_needs_linux(monkeypatch):
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(StartupError, match="only Linux"):
        check_processes(configured("--router-processes", "2"))


def test_server_with_an_engine_refuses_several_processes():
    assert configured("--router-processes", "1", kind=Config).router_processes == 1
    with pytest.raises(StartupError, match="the engine of serve runs in one process"):
        configured("--router-processes", "2", kind=Config)
