"""Tests of the command bench: its lists, its calls of measurements, and the refusal of former command lines."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys

import pytest

from trioserve.bench import startup
from trioserve.bench.command import MEASUREMENTS
from trioserve.bench.inside import draft_bench
from trioserve.bench.inside.command import PARTS, run_inside
from trioserve.bench.server_settings import StartupSettings
from trioserve.cli import main


def test_bench_without_arguments_lists_the_measurements(capsys):
    assert main(["bench"]) == 1
    shown = capsys.readouterr().out
    for name in (*(measurement.name for measurement in MEASUREMENTS), "inside"):
        assert re.search(rf"\n    {name}\s", shown)


def test_bench_inside_without_arguments_lists_the_parts(capsys):
    assert main(["bench", "inside"]) == 1
    shown = capsys.readouterr().out
    for name in PARTS:
        assert f"\n    {name} " in shown


def test_measurement_gets_its_settings_and_returns_the_exit_code(monkeypatch):
    given = []

    def measured(settings):
        given.append(settings)
        return 7

    monkeypatch.setattr(startup, "main", measured)
    assert main(["bench", "startup", "--rounds", "3"]) == 7
    assert given == [StartupSettings(rounds=3)]


def test_value_out_of_range_is_refused_in_one_sentence(capsys):
    assert main(["bench", "load", "--requests", "0"]) == 1
    assert capsys.readouterr().err == "trioserve: --requests is 0, allowed is 1 to 10000000\n"


@pytest.mark.parametrize(
    "former, said",
    [
        ("--suite --rounds 3", "bench suite;"),
        ("--url http://localhost --soak", "bench soak;"),
        ("--disaggregated", "bench disagg;"),
        ("--core", "bench inside core;"),
        ("--requests 5", "bench load;"),
    ],
)
def test_former_bench_command_line_is_refused_and_the_error_names_the_new_command(former, said, capsys):
    assert main(["bench", *former.split(" ")]) == 1
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("part", PARTS)
def test_help_of_every_part_has_defaults(part, capsys):
    with pytest.raises(SystemExit) as left:
        main(["bench", "inside", part, "--help"])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: python -m trioserve bench inside {part} ")
    assert "(default: " in shown


def test_unknown_bench_part_is_refused_with_the_known_parts(capsys):
    with pytest.raises(SystemExit) as left:
        main(["bench", "inside", "nothing"])
    assert left.value.code == 2
    assert "'core', 'delivery'" in capsys.readouterr().err


def test_bench_part_gets_its_flags_and_the_functions_that_open_engines(monkeypatch):
    given = []

    def measured(arguments: argparse.Namespace) -> int:
        given.append(arguments)
        return 7

    monkeypatch.setattr(draft_bench, "run", measured)
    opener = object()
    assert run_inside(["drafts", "--tokens", "5"], open_engine=opener, open_image_engine=opener) == 7
    assert (given[0].tokens, given[0].rounds, given[0].open_engine) == (5, draft_bench.ROUNDS, opener)


def test_list_of_parts_imports_no_measurement():
    program = (
        "import sys, trioserve.cli; trioserve.cli.main(['bench']); "
        "print([m for m in ('trio', 'torch', 'h2', 'trioserve.core.engine', 'trioserve.testing') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert shown.stdout.splitlines()[-1] == "[]"
