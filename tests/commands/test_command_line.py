"""Tests of command lines: flags of vLLM are accepted or refused by name, and misspelt words get a suggestion.

No model is loaded.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from typing import Any

import pytest

from trioserve import cli
from trioserve.commands import serve
from trioserve.commands.option_groups import (
    FLAGS,
    GROUPS,
    REFUSED_SWITCHES,
    REWRITTEN,
    SWITCHES,
    TERMINAL_OPTIONS,
    without_vllm_flags,
)
from trioserve.config import Config, config_from
from trioserve.contracts.errors import StartupError
from trioserve.options.option import options_of


@pytest.fixture
def served(monkeypatch: Any) -> list[Config]:
    """Return the configurations with which a server would have started."""
    configs: list[Config] = []

    def run_server(config: Config) -> int:
        configs.append(config)
        return 0

    monkeypatch.setattr(serve, "run_server", run_server)
    for name in GROUPS["model"]:
        monkeypatch.delenv(f"TRIOSERVE_{name.upper()}", raising=False)
    return configs


def said(capsys: Any, *arguments: str) -> str:
    """Return the sentence with which a command line is refused."""
    try:
        code = cli.main(arguments)
    except SystemExit as left:
        code = left.code
    assert code in (1, 2)
    written = capsys.readouterr().err
    assert written.startswith("trioserve: ")
    assert written.count("\n") == 1
    return written


def test_vllm_command_line_is_accepted(served: list[Config]):
    line = (
        "serve org/model --tokenizer org/other --revision main --seed 3 --uds /tmp/s --root-path /llm "
        "--trust-remote-code --enable-auto-tool-choice --tool_call_parser hermes --tensor-parallel-size 1 "
        "--pipeline-parallel-size=1 --load-format auto --disable-log-requests --enable-chunked-prefill "
        "--chat-template t.jinja"
    )
    assert cli.main(line.split()) == 0
    [config] = served
    assert (config.model, config.tokenizer, config.revision, config.seed) == ("org/model", "org/other", "main", 3)
    assert (config.uds, config.root_path, config.chat_template) == ("/tmp/s", "/llm", "t.jinja")
    assert config.tool_call_parser == "hermes"


def test_model_name_is_accepted_once_as_argument_or_flag(served: list[Config], capsys: Any):
    assert cli.main(["serve", "m", "--model", "m"]) == cli.main(["--model", "m"]) == 0
    assert [config.model for config in served] == ["m", "m"]
    assert "the model is named twice, m and --model n" in said(capsys, "serve", "m", "--model", "n")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("serve --prot 1", "--prot is not an option of serve: did you mean --port?"),
        ("serve --max_model_length 1", "--max-model-length is not an option of serve: did you mean --max-model-len?"),
        ("serve --colour", "--colour is not an option of serve; `trioserve serve --help` lists them"),
        ("route --endpont u", "--endpont is not an option of route: did you mean --endpoint?"),
        ("chat --port 1", "--port is not an option of chat"),
        ("generate a b", "generate does not accept b"),
        ("serv", "serv is no command: did you mean serve?"),
        ("serve --dtype bfloat17", "bfloat17 is no --dtype: did you mean bfloat16?"),
        ("serve --lora-modules sql", "--lora-modules 'sql' has no name and path: write it like sql=/adapters/sql"),
        ("serve --load-format dummy", "--load-format is 'dummy', and only auto, safetensors, gguf can be honoured"),
        ("serve --tensor-parallel-size 4 --nnodes 3", "--nnodes is 3, and there are 4 ranks: give each machine"),
        ("serve --tensor-parallel-size 4 --nnodes 2", "--ranks-key is not given"),
        ("serve --pipeline-parallel-size 3 --nnodes 2", "each machine must have the same number of stages"),
        ("serve --pipeline-parallel-size 2 --nnodes 2", "--ranks-key is not given"),
        (
            "serve --pipeline-parallel-size 2 --speculative-model mtp",
            "--pipeline-parallel-size is 2, but mtp can draft only for",
        ),
        ("serve --pipeline-parallel-size 64 --tensor-parallel-size 64", "which are 4096 ranks"),
        ("serve --distributed-executor-backend uni", "--distributed-executor-backend"),
        ("serve --distributed-executor-backend ray", "ray, and there is only one rank"),
        ("serve --distributed-executor-backend ray --nnodes 2", "ray, and Ray itself chooses machines"),
        ("serve --distributed-executor-backend ray --headless", "ray, and Ray itself chooses machines"),
        (
            "serve --distributed-executor-backend ray --tensor-parallel-size 2 --speculative-model small",
            "ray, and small would draft",
        ),
        ("serve --tensor-parallel-size 4 --nnodes 2 --node-rank 1", "--node-rank is 1, and --headless is not given"),
    ],
)
def test_invalid_command_line_is_refused_with_one_sentence(line: str, words: str, served: list[Config], capsys: Any):
    assert words in said(capsys, *line.split())
    assert not served


VLLM_COMMAND_LINE = (
    "--tensor-parallel-size 1 --gpu-memory-utilization 0.9 --max-model-len 4096 --dtype auto --trust-remote-code "
    "--served-model-name m --api-key k --enable-prefix-caching --max-num-seqs 64 --max-num-batched-tokens 8192 "
    "--disable-log-requests --no-enable-log-requests --enable-chunked-prefill --swap-space 4 --enforce-eager "
    "--kv-cache-dtype fp8 --quantization awq --load-format auto --tool-call-parser hermes --enable-auto-tool-choice "
    "--reasoning-parser qwen3 --block-size 16 --seed 1 --generation-config vllm --guided-decoding-backend xgrammar "
    "--disable-log-stats --max-seq-len-to-capture 8192 --tokenizer-mode auto --chat-template-content-format auto "
    """--limit-mm-per-prompt {"image":2} --compilation-config 3 --enable-request-id-headers --root-path /a """
    "--distributed-executor-backend mp --num-scheduler-steps 1 --task generate --runner generate --enable-lora "
    "--max-loras 4 --attention-backend FLASH_ATTN --kv-cache-memory-bytes 4G --enable-server-load-tracking "
    "--data-parallel-size 1 --enable-sleep-mode --response-role assistant "
    """--structured-outputs-config {"backend":"auto"} """
    """--speculative-config {"method":"ngram","num_speculative_tokens":4}"""
)


def test_common_flags_of_vllm_start_the_server(served: list[Config]):
    assert cli.main(["serve", "m", *VLLM_COMMAND_LINE.split()]) == 0
    [config] = served
    assert (config.kv_cache_memory, config.quantization, config.max_num_seqs) == (4.0, "auto", 64)


@pytest.mark.parametrize(
    ("flag", "gib"),
    [("4294967296", 4.0), ("4G", 4.0), ("512m", 0.5), ("1.5g", 1.5)],
)
def test_kv_cache_bytes_become_gibibytes(flag: str, gib: float, served: list[Config]):
    assert cli.main(["serve", "--kv-cache-memory-bytes", flag]) == 0
    assert served[0].kv_cache_memory == gib


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--hf-token x", "HF_TOKEN"),
        ("--middleware x", "ASGI"),
        ("--data-parallel-size 2", "`trioserve route`"),
        ("--task transcription", "only auto, generate"),
        ("--kv-cache-memory-bytes lots", "--kv-cache-memory GIB"),
        ("--swap-space", "--swap-space has no value"),
        ("--return-tokens-as-token-ids", "return_token_ids"),
        ("--max-num-se 4", "--max-num-se is not an option of serve: did you mean --max-num-seqs?"),
    ],
)
def test_unsupported_vllm_flag_is_refused_with_advice(line: str, words: str, served: list[Config], capsys: Any):
    assert words in said(capsys, "serve", *line.split())
    assert not served


def test_refused_vllm_flags_have_no_name_of_an_own_option():
    ours = {f"--{name.replace('_', '-')}" for name in options_of(Config)}
    assert ours.isdisjoint(FLAGS.keys() | SWITCHES | REFUSED_SWITCHES.keys())
    assert {name for name, _convert in REWRITTEN.values()} <= ours


def test_every_refused_vllm_flag_has_advice():
    for flag in [*REFUSED_SWITCHES, *(flag for flag, each in FLAGS.items() if each.accepted == ())]:
        with pytest.raises(StartupError, match=f"^{flag} cannot be honoured: .*[:,;a-z] "):
            without_vllm_flags([flag, "x"])
    assert all(each.advice or each.accepted is None for each in FLAGS.values())


@pytest.mark.parametrize("service", ["", "_KV", "_MASTER", "_SERVER", "_PREFILL", "_API_KEY", "_0"])
def test_variables_of_kubernetes_services_are_ignored(service: str):
    """Kubernetes sets such variables for services in the same namespace with names such as trioserve-kv."""
    name = f"TRIOSERVE{service}"
    variables = {
        f"{name}_SERVICE_HOST": "10.0.0.1",
        f"{name}_SERVICE_PORT": "8000",
        f"{name}_SERVICE_PORT_HTTP": "8000",
        f"{name}_PORT": "tcp://10.0.0.1:8000",
        f"{name}_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        f"{name}_PORT_8000_TCP_PROTO": "tcp",
        f"{name}_PORT_8000_TCP_PORT": "8000",
        f"{name}_PORT_8000_TCP_ADDR": "10.0.0.1",
    }
    config = config_from(argparse.Namespace(config=None), variables, kind=Config)
    assert config == config_from(argparse.Namespace(config=None), {}, kind=Config)


def test_misspelt_variable_is_refused_and_other_variables_are_ignored():
    def environment(**variables: str) -> None:
        from argparse import Namespace

        config_from(Namespace(config=None), variables, kind=Config)

    with pytest.raises(StartupError, match=r"^TRIOSERVE_APIKEY is not an option: did you mean TRIOSERVE_API_KEY[?]$"):
        environment(TRIOSERVE_APIKEY="x")
    environment(
        TRIOSERVE_SERVICE_HOST="10.0.0.1",
        TRIOSERVE_SERVICE_PORT_HTTP="80",
        TRIOSERVE_PORT_8000_TCP_ADDR="10.0.0.1",
        TRIOSERVE_NATIVE="off",
        TRIOSERVE_SOMETHING_ELSE="1",
        OTHER="1",
    )


def test_each_option_is_under_one_heading_of_the_help_text():
    grouped = [name for names in GROUPS.values() for name in names]
    assert len(grouped) == len(set(grouped))
    assert set(grouped) <= options_of(Config).keys()


def test_command_line_without_arguments_prints_help_and_with_only_flags_serves(served: list[Config], capsys: Any):
    assert cli.main([]) == 0
    shown = capsys.readouterr().out
    assert [f"trioserve {name}" in shown for name in ("serve", "chat", "route", "doctor")] == [True] * 4
    assert not served
    assert cli.main(["--port", "0"]) == 0
    assert len(served) == 1


def test_server_start_with_too_little_memory_is_reported_in_one_sentence(
    served: list[Config], monkeypatch: Any, capsys: Any
):
    def run_server(config: Config) -> int:
        raise MemoryError

    monkeypatch.setattr(serve, "run_server", run_server)
    assert "there is not enough memory: use a smaller model" in said(capsys, "serve")


@pytest.mark.parametrize("command", ["serve", "chat", "generate"])
def test_help_shows_the_options_of_a_command_under_headings(command: str, capsys: Any):
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    shown = capsys.readouterr().out
    assert "\nmemory and batches:\n" in shown
    assert ("\nserver:\n" in shown) == ("--cors-origin" in shown) == (command == "serve")
    assert "--max-model-len" in shown
    assert TERMINAL_OPTIONS.isdisjoint(GROUPS["server"])


def test_python_without_the_packages_says_to_activate_the_environment():
    program = "import runpy, sys; sys.modules['msgspec'] = None; runpy.run_module('trioserve', run_name='__main__')"
    result = subprocess.run([sys.executable, "-c", program, "doctor"], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert re.match(r"trioserve: msgspec is not installed in \S+: .*\.venv/bin/activate", result.stderr)
    assert "Traceback" not in result.stderr
