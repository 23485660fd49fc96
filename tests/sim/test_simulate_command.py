"""Tests the command `trioserve simulate`: its output, its exit codes, and the arguments that it refuses."""

from __future__ import annotations

import subprocess
import sys

import pytest

from trioserve.cli import main
from trioserve.core.guided_steps import finish_reason_of

TWO_FINISH = """\
world block_count=4 block_size=2 max_num_seqs=2 step_tokens_max=4
arrive id="a" prompt=[1,2] output=1
arrive id="b" prompt=[2,1] output=2
"""


@pytest.fixture
def broken(monkeypatch):
    """Plant a bug with which every response ends after its first token."""
    monkeypatch.setattr(
        "trioserve.core.guided_steps.finish_reason_of", lambda live: finish_reason_of(live) or _length_of(live)
    )


def _length_of(live):
    from trioserve.contracts.events import FinishReason

    return FinishReason.LENGTH if live.output_count == 1 else None


@pytest.mark.slow
def test_passing_simulation_prints_its_counts(capsys):
    assert main(["simulate", "--seeds", "0:30"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split()[:1] == ["requests"] for line in lines)
    assert lines[-1].startswith("30 histories held, seeds 0 to 29: ")
    assert "requests, " in lines[-1]
    assert "per second of one core" in lines[-1]


@pytest.mark.slow
def test_router_simulation_prints_its_counts(capsys):
    assert main(["simulate", "--router", "--seeds", "0:30"]) == 0
    lines = capsys.readouterr().out.splitlines()
    shown = {line.rsplit(maxsplit=1)[0].strip() for line in lines[:-1]}
    assert {"requests", "grants", "retries", "leaves: in the queue", "refused: queue_full"} <= shown
    assert lines[-1].startswith("30 histories held, seeds 0 to 29: ")
    assert " grants, " in lines[-1]


def test_router_script_is_recognized_by_its_first_line(capsys, tmp_path):
    script = tmp_path / "history.txt"
    script.write_text('# once\nrouter leases_max=1\nadd id="e"\ncheck id="e"\narrive name="a"\n', encoding="utf-8")
    assert main(["simulate", "--replay", str(script)]) == 0
    shown = capsys.readouterr().out
    assert "  a -> e" in shown
    assert shown.endswith("every contract held\n")


@pytest.mark.slow
def test_pair_simulation_prints_its_counts(capsys):
    assert main(["simulate", "--pair", "--seeds", "0:20"]) == 0
    lines = capsys.readouterr().out.splitlines()
    shown = {line.rsplit(maxsplit=1)[0].strip() for line in lines[:-1]}
    assert {"requests", "loads: completed", "holds: completed", "clients: left"} <= shown
    assert lines[-1].startswith("20 histories held, seeds 0 to 19: ")


def test_pair_script_is_recognized_by_its_first_line(capsys, tmp_path):
    script = tmp_path / "history.txt"
    script.write_text('# once\npair\ncome id="a" prompt=[1,2,3] output=2\n', encoding="utf-8")
    assert main(["simulate", "--replay", str(script)]) == 0
    shown = capsys.readouterr().out
    assert "  prefill: a.prefill1" in shown
    assert shown.endswith("every contract held\n")


def test_routers_script_is_recognized_by_its_first_line(capsys, tmp_path):
    script = tmp_path / "history.txt"
    script.write_text("# once\nrouters\ncome number=1\ndie router=0\n", encoding="utf-8")
    assert main(["simulate", "--replay", str(script)]) == 0
    shown = capsys.readouterr().out
    assert "  1: router 0 -> e0" in shown
    assert "  1: router 1 -> e0" in shown
    assert shown.endswith("every contract held\n")


@pytest.mark.slow
def test_simulation_in_two_processes_prints_the_counts_of_one_process():
    """Both runs begin in a new process, as with a user, so that the state of the test process has no effect."""

    def counts(*jobs: str) -> list[str]:
        command = [sys.executable, "-m", "trioserve", "simulate", "--stack", "--seeds", "0:60", *jobs]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()[:-1]  # The last line contains the duration.

    assert counts("--jobs", "2") == counts()


def test_failing_seed_is_shrunk_and_can_be_replayed(broken, capsys, tmp_path):
    assert main(["simulate", "--seeds", "0:30"]) == 1
    lines = capsys.readouterr().out.splitlines()
    seed = lines[0].split()[1]
    assert lines[0].startswith(f"seed {seed} failed: AssertionError in expected.py")
    assert f"--replay {seed} --steps 100" in lines[1]
    script = tmp_path / "history.txt"
    script.write_text("\n".join(lines[3:]), encoding="utf-8")
    assert len(lines) <= 7, lines

    for what in (seed, str(script)):
        assert main(["simulate", "--replay", what]) == 1
        shown = capsys.readouterr().out.splitlines()
        assert shown[0].startswith("world ")
        assert shown[-1].startswith("failed: AssertionError in expected.py")


def test_replay_of_a_seed_prints_its_trace(capsys, tmp_path):
    script = tmp_path / "history.txt"
    script.write_text(TWO_FINISH, encoding="utf-8")
    assert main(["simulate", "--replay", str(script)]) == 0
    shown = capsys.readouterr().out
    assert "  step 0: a[0:2]*" in shown
    assert "RequestFinished(request_id='b'" in shown
    assert shown.endswith("every contract held\n")


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--seeds", "5:5"], "--seeds is '5:5'"),
        (["--seeds", "x"], "--seeds is 'x'"),
        (["--steps", "0"], "--steps is 0"),
        (["--router", "--stack"], "give one of them"),
        (["--pair", "--router"], "give one of them"),
        (["--pair", "--routers"], "give one of them"),
        (["--pair", "--routers", "2"], "a simulation of its own"),
        (["--jobs", "0"], "--jobs is 0"),
        (["--replay", "no such file"], "--replay is 'no such file'"),
    ],
)
def test_simulate_option_out_of_range_is_refused_with_one_sentence(arguments, match, capsys):
    assert main(["simulate", *arguments]) == 1
    assert match in capsys.readouterr().err


def test_simulate_command_is_refused_if_assertions_are_disabled():
    command = [sys.executable, "-O", "-m", "trioserve", "simulate", "--seeds", "1"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert "run python without -O" in ran.stderr
