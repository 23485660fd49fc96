"""Tests that flags become settings, and that bad values are refused in one sentence."""

from __future__ import annotations

import argparse
import subprocess
import sys

import msgspec
import pytest

from trioserve.bench.command import MEASUREMENTS, bench_parser
from trioserve.bench.server_settings import WITHOUT_FLAGS, DisaggregatedSettings, RouterBenchSettings, StartupSettings
from trioserve.bench.settings import BenchSettings, SoakSettings, SuiteSettings, Target
from trioserve.contracts.errors import StartupError


def parse(words: str) -> msgspec.Struct:
    parsed = bench_parser().parse_args(words.split(" "))
    return parsed.measurement.settings_from(parsed)


@pytest.mark.parametrize("measurement", MEASUREMENTS, ids=lambda measurement: measurement.name)
def test_no_flags_give_default_settings(measurement):
    assert parse(measurement.name) == measurement.settings()


def test_flags_of_a_startup_reach_their_settings():
    settings = parse("startup --rounds 3 --flags=--threads=2 --timeout 9 --json - --label l")
    assert settings == StartupSettings(
        server_flags=("--threads=2",), rounds=3, timeout_seconds=9.0, json_path="-", label="l"
    )


def test_flags_of_a_router_reach_their_settings():
    settings = parse(
        "router --rows latency,bursts --requests 5 --concurrency 4 --rounds 3 --output-tokens 80 "
        "--flags=--policy=session --seed 12 --json - --label l"
    )
    assert settings == RouterBenchSettings(
        rows=("latency", "bursts"),
        requests=5,
        concurrency=4,
        rounds=3,
        output_tokens=80,
        server_flags=("--policy=session",),
        seed=12,
        json_path="-",
        label="l",
    )


def test_every_flag_reaches_its_setting():
    settings = parse(
        "load --url https://localhost:8443/v1 --model m --endpoint chat --http 2 --connections 3 --concurrency 4 "
        "--requests 5 --rate 1.5 --prompt-tokens 60 --prefix-tokens 7 --output-tokens 80 --prompt-mode text "
        "--vocab-size 900 --abort-fraction 0.1 --abort-after-tokens 11 --temperature 0.5 --no-ignore-eos "
        "--seed 12 --warmup 13 --timeout 14 --api-key k --json - --label l --allow-remote"
    )
    assert settings == BenchSettings(
        url="https://localhost:8443/v1",
        model="m",
        endpoint="chat",
        http=2,
        connections=3,
        concurrency=4,
        requests=5,
        rate_per_second=1.5,
        prompt_tokens=60,
        prefix_tokens=7,
        output_tokens=80,
        prompt_mode="text",
        vocab_size=900,
        abort_fraction=0.1,
        abort_after_tokens=11,
        temperature=0.5,
        ignore_eos=False,
        seed=12,
        warmup_requests=13,
        timeout_seconds=14.0,
        api_key="k",
        json_path="-",
        label="l",
        allow_remote=True,
    )


def test_soak_has_its_own_defaults():
    assert parse("soak") == SoakSettings()
    assert parse("soak").requests == 10_000
    assert parse("soak").abort_fraction == 0.5


def test_every_flag_of_a_soak_reaches_its_setting():
    settings = parse(
        "soak --url https://localhost:8443/v1 --model m --concurrency 4 --requests 5 --prompt-tokens 60 "
        "--long-prompt-tokens 600 --output-tokens 80 --vocab-size 900 --abort-fraction 0.1 --temperature 0.5 --seed 12 "
        "--warmup 13 --timeout 14 --api-key k --json - --label l --allow-remote"
    )
    assert settings == SoakSettings(
        url="https://localhost:8443/v1",
        model="m",
        concurrency=4,
        requests=5,
        prompt_tokens=60,
        long_prompt_tokens=600,
        output_tokens=80,
        vocab_size=900,
        abort_fraction=0.1,
        temperature=0.5,
        seed=12,
        warmup_requests=13,
        timeout_seconds=14.0,
        api_key="k",
        json_path="-",
        label="l",
        allow_remote=True,
    )


def test_flags_of_a_suite_reach_their_settings():
    settings = parse(
        "suite --peer http://localhost:9000 --peer http://localhost:9001 --rows a,o1 --rounds 3 "
        "--request-share 0.5 --markdown ./table.md"
    )
    assert settings == SuiteSettings(
        peers=("http://localhost:9000", "http://localhost:9001"),
        rows=("a", "o1"),
        rounds=3,
        request_share=0.5,
        markdown_path="./table.md",
    )


def test_flags_of_a_disaggregated_measurement_reach_their_settings():
    settings = parse("disagg --connector nixl --rate 2 --long-prompt-tokens 900 --threads 4 --flags=--enforce-eager")
    assert settings == DisaggregatedSettings(
        connector="nixl",
        rate_per_second=2.0,
        long_prompt_tokens=900,
        threads=4,
        server_flags=("--enforce-eager",),
    )


@pytest.mark.parametrize("measurement", MEASUREMENTS, ids=lambda measurement: measurement.name)
def test_help_of_a_measurement_has_only_its_flags_with_defaults(measurement, capsys):
    parser = argparse.ArgumentParser()
    measurement.add_arguments(parser)
    flags = [action for action in parser._actions if action.dest != "help"]
    assert {action.dest for action in flags} == {*measurement.settings.__struct_fields__} - WITHOUT_FLAGS
    for action in flags:
        assert "(default: " in action.help, action.dest
    with pytest.raises(SystemExit) as left:
        bench_parser().parse_args([measurement.name, "--help"])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert "%(" not in shown
    assert all(action.option_strings[0] in shown for action in flags)


@pytest.mark.parametrize(
    "words, said",
    [
        ("load --requests 0", "--requests is 0, allowed is 1"),
        ("load --concurrency 0", "--concurrency is 0"),
        ("load --rate 0", "--rate is 0"),
        ("load --rate nan", "--rate is nan"),
        ("load --temperature inf", "--temperature is inf"),
        ("load --abort-fraction 1.5", "--abort-fraction is 1.5, allowed is 0 to 1"),
        ("load --prompt-tokens 10 --prefix-tokens 11", "--prefix-tokens is 11, allowed is 0 to 10"),
        ("load --connections 2", "use --http 2"),
        ("load --endpoint chat --prompt-mode ids", "--prompt-mode ids needs --endpoint completions"),
        ("load --abort-fraction 0.5 --output-tokens 8 --abort-after-tokens 8", "must be below --output-tokens"),
        ("load --url ftp://127.0.0.1", "allowed are http and https"),
        ("load --url 127.0.0.1:8000", "allowed are http and https"),
        ("load --url http://127.0.0.1:70000", "cannot be read"),
        ("load --url http://user@127.0.0.1", "are not allowed"),
        ("load --url http://192.0.2.1:8000", "add --allow-remote"),
        ("load --url http://example.org", "add --allow-remote"),
        ("load --url http://localhost.example.org", "add --allow-remote"),
        ("load --json /nowhere/at/all.json", "--json /nowhere/at/all.json cannot be written"),
        ("load --json /", "cannot be written"),
        ("load --api-key key\n", "--api-key has characters"),
        ("soak --requests 1", "--requests is 1, allowed is 2"),
        ("soak --output-tokens 1", "--output-tokens is 1, allowed is 2"),
        ("soak --url http://192.0.2.1:8000", "add --allow-remote"),
        ("soak --json /nowhere/at/all.json", "cannot be written"),
    ],
)
def test_value_out_of_range_is_refused_with_its_flag(words, said):
    with pytest.raises(StartupError) as refusal:
        parse(words)
    assert said in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000", "http://127.8.9.1", "http://[::1]:80", "http://localhost"])
def test_measuring_a_loopback_server_needs_no_permission(url):
    assert BenchSettings(url=url).target.is_loopback


def test_measuring_a_remote_server_needs_permission():
    assert BenchSettings(url="http://192.0.2.1:8000", allow_remote=True).target.host == "192.0.2.1"


@pytest.mark.parametrize(
    "url, target, authority",
    [
        ("http://127.0.0.1:8000", Target("http", "127.0.0.1", 8000, ""), "127.0.0.1:8000"),
        ("http://127.0.0.1:8000/v1/", Target("http", "127.0.0.1", 8000, ""), "127.0.0.1:8000"),
        ("http://localhost/llm/v1", Target("http", "localhost", 80, "/llm"), "localhost"),
        ("https://[::1]:443", Target("https", "::1", 443, ""), "[::1]"),
    ],
)
def test_url_has_host_port_and_prefix(url, target, authority):
    assert Target.from_url(url) == target
    assert target.authority == authority


def test_flags_are_shown_without_importing_trio_or_h2():
    program = "import sys, trioserve.bench.command; print([m for m in ('trio', 'h2', 'h11') if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "words", ["soak --rate 2", "soak --no-ignore-eos", "load --long-prompt-tokens 9", "startup --url http://localhost"]
)
def test_flag_of_another_measurement_is_refused(words, capsys):
    with pytest.raises(SystemExit) as left:
        parse(words)
    assert left.value.code == 2
    assert f"unrecognized arguments: {words.split(' ', 1)[1]}" in capsys.readouterr().err
