"""Tests when `disagg` starts and stops its router and its two servers, and with which command lines."""

from __future__ import annotations

import pytest

from trioserve.commands.child_processes import Ended, Order, Serving, Signalled
from trioserve.commands.disagg import DisaggSettings, StartAndStop
from trioserve.commands.program_end import EXIT_FAILED, EXIT_INTERRUPTED
from trioserve.contracts.errors import StartupError


def begun() -> StartAndStop:
    decides = StartAndStop()
    assert decides.begin() == [Order("start", "prefill"), Order("start", "decode")]
    return decides


def ready() -> StartAndStop:
    decides = begun()
    assert decides.note(Serving("decode")) == []
    assert not decides.is_ready
    assert decides.note(Serving("prefill")) == [Order("start", "router")]
    assert decides.note(Serving("router")) == []
    assert decides.is_ready
    return decides


def test_only_serving_servers_get_the_reload_signal():
    decides = begun()
    decides.note(Serving("prefill"))
    assert decides.serving == ["prefill"]
    decides = ready()
    assert decides.serving == ["decode", "prefill", "router"]
    decides.note(Ended("router", 1))
    assert decides.serving == ["decode", "prefill"]


def test_stop_signal_stops_the_router_first_and_then_both_servers():
    decides = ready()
    assert decides.note(Signalled()) == [Order("stop", "router")]
    assert decides.note(Ended("router", 0)) == [Order("stop", "decode"), Order("stop", "prefill")]
    assert decides.note(Ended("prefill", 0)) == []
    assert not decides.is_over
    assert decides.note(Ended("decode", 0)) == []
    assert decides.is_over
    assert decides.exit_code == 0


def test_second_stop_signal_is_forwarded_and_the_third_kills_the_processes():
    decides = ready()
    decides.note(Signalled())
    assert decides.note(Signalled()) == [Order("stop", "router")]
    kills = [Order("kill", name) for name in ("decode", "prefill", "router")]
    assert decides.note(Signalled()) == kills
    for name in ("router", "decode", "prefill"):
        decides.note(Ended(name, -9))
    assert decides.is_over
    assert decides.exit_code == EXIT_FAILED


def test_stop_signal_during_the_start_gives_the_exit_code_of_an_interruption():
    decides = begun()
    decides.note(Serving("prefill"))
    assert decides.note(Signalled()) == [Order("stop", "decode"), Order("stop", "prefill")]
    assert decides.note(Serving("decode")) == [], "no process is started any more"
    decides.note(Ended("decode", 0))
    decides.note(Ended("prefill", 0))
    assert decides.is_over
    assert decides.exit_code == EXIT_INTERRUPTED


def test_failed_start_of_a_process_stops_the_other_processes_and_sets_the_exit_code():
    decides = begun()
    assert decides.note(Ended("decode", 3)) == [Order("stop", "prefill")]
    decides.note(Ended("prefill", 0))
    assert decides.is_over
    assert decides.exit_code == 3


@pytest.mark.parametrize("lost", ["prefill", "decode"])
def test_router_and_server_continue_after_the_other_server_ends(lost):
    decides = ready()
    assert decides.note(Ended(lost, -9)) == []
    other = "decode" if lost == "prefill" else "prefill"
    assert decides.note(Signalled()) == [Order("stop", "router")]
    assert decides.note(Ended("router", 0)) == [Order("stop", other)]
    decides.note(Ended(other, 0))
    assert decides.is_over
    assert decides.exit_code == EXIT_FAILED


def test_program_ends_when_the_router_or_all_servers_have_ended():
    decides = ready()
    assert decides.note(Ended("router", 0)) == [Order("stop", "decode"), Order("stop", "prefill")]
    decides = ready()
    decides.note(Ended("prefill", 1))
    assert decides.note(Ended("decode", 1)) == [Order("stop", "router")]
    decides.note(Ended("router", 0))
    assert decides.is_over
    assert decides.exit_code == 1


def test_each_process_gets_its_role_and_the_users_flags():
    settings = DisaggSettings(router_args=("--port", "9000", "--policy", "prefix_aware"), server_args=("--seed-less",))
    with pytest.raises(StartupError, match="--server-args has --seed-less"):
        settings.commands(core_count=8)
    commands = DisaggSettings(
        router_args=("--port", "9000", "--policy", "prefix_aware"), server_args=("--max-num-seqs", "4")
    ).commands(core_count=8)
    server = ["serve", "--max-num-seqs", "4", "--threads", "4"]
    assert commands["prefill"] == [*server, "--role", "prefill", "--port", "8001"]
    assert commands["decode"] == [*server, "--role", "decode", "--port", "8002"]
    assert commands["router"] == [
        *("route", "--port", "9000", "--policy", "prefix_aware"),
        *("--prefill-endpoint", "prefill=http://127.0.0.1:8001", "--decode-endpoint", "decode=http://127.0.0.1:8002"),
    ]


def test_threads_flag_of_the_user_reaches_the_servers():
    commands = DisaggSettings(server_args=("--threads", "3")).commands(core_count=8)
    assert commands["decode"].count("--threads") == 1
    assert "3" in commands["decode"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (DisaggSettings(router_args=("--port", "8001")), "need different ports"),
        (DisaggSettings(router_args=("--port", "many")), "--port"),
        (DisaggSettings(router_args=("--lease-until", "never")), "--router-args"),
        (DisaggSettings(prefill_port=8002), "need different ports"),
    ],
)
def test_invalid_flags_are_refused_before_any_process_starts(settings, words):
    with pytest.raises(StartupError, match=words):
        settings.commands(core_count=2)
