"""A file, environment variables and flags become one Config. Errors name the option as the user wrote it."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from trioserve.config import Config, add_arguments, config_from, make_config
from trioserve.contracts.errors import StartupError
from trioserve.model.settings import DraftSettings


def config(*flags: str, environment: dict[str, str] | None = None) -> Config:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return config_from(parser.parse_args(flags), environment or {}, kind=Config)


def test_flag_overrides_environment_and_environment_overrides_file(tmp_path: Path):
    file = tmp_path / "trioserve.toml"
    file.write_text('port = 1\nmax-num-seqs = 2\nblock_size = 8\napi_key = ["a"]\nenable_prefix_caching = false\n')
    environment = {"TRIOSERVE_PORT": "3", "TRIOSERVE_MAX_NUM_SEQS": "4", "TRIOSERVE_ENABLE_PREFIX_CACHING": "true"}
    made = config("--config", str(file), "--port", "5", environment=environment)
    assert (made.port, made.max_num_seqs, made.block_size, made.api_key) == (5, 4, 8, ("a",))
    assert made.enable_prefix_caching is True


@pytest.mark.parametrize("flags", [["--cors-origin", "a", "b"], ["--cors-origin", "a", "--cors-origin", "b"]])
def test_list_option_is_one_flag_with_several_values_or_a_repeated_flag(flags):
    assert config(*flags).cors_origin == ("a", "b")


@pytest.mark.parametrize("text", ["k1,k2", "k1 k2", " k1,  k2 "])
def test_list_option_in_a_variable_is_separated_by_commas_or_blanks(text):
    assert config(environment={"TRIOSERVE_API_KEY": text}).api_key == ("k1", "k2")


@pytest.mark.parametrize(
    ("flags", "environment", "sentence"),
    [
        (["--port", "99999"], {}, "--port is '99999', allowed is a whole number of at least 0 and up to 65535"),
        ([], {"TRIOSERVE_PORT": "x"}, "TRIOSERVE_PORT is 'x', allowed is a whole number of at least 0 and up to 65535"),
        ([], {"TRIOSERVE_DTYPE": "x"}, "TRIOSERVE_DTYPE is 'x', allowed is one of auto, bfloat16, float16, float32"),
        (["--kv-cache-memory", "0"], {}, "--kv-cache-memory is '0', allowed is a number above 0"),
        (["--timeout", "0"], {}, None),
    ],
)
def test_error_about_a_value_names_the_allowed_range(flags, environment, sentence, capsys):
    with pytest.raises((StartupError, SystemExit)) as caught:
        config(*flags, environment=environment)
    if sentence is not None:
        assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("4096", 4096),
        ("32k", 32_000),
        ("32K", 32_768),
        ("25.6k", 25_600),
        ("1M", 1_048_576),
        ("auto", None),
        ("-1", None),
    ],
)
def test_context_length_can_end_in_k_or_be_auto(text, count):
    assert config(f"--max-model-len={text}").max_model_len == count
    assert make_config(max_model_len=text if count != 4096 else count).max_model_len == count


@pytest.mark.parametrize("text", ["32kk", "k", "1.k", "-2k", "0k"])
def test_invalid_token_count_is_refused(text):
    with pytest.raises(StartupError, match=r"--max-model-len is .*, allowed is a whole number of at least 2"):
        config(f"--max-model-len={text}")


def test_error_in_a_file_names_the_file(tmp_path: Path):
    file = tmp_path / "trioserve.toml"
    for text, words in (
        ("prot = 1", f"prot in {file} is not an option: did you mean port?"),
        ("zzz = 1", f"zzz in {file} is not an option; options are: access_log, admin_api_key, "),
        ("port = -1", f"port in {file} is -1, allowed is"),
        ("port", "is not TOML"),
    ):
        file.write_text(text)
        with pytest.raises(StartupError) as caught:
            config("--config", str(file))
        assert words in str(caught.value)
    with pytest.raises(StartupError, match="cannot be read: No such file"):
        config("--config", str(tmp_path / "none.toml"))


def test_option_values_from_python_keep_their_types():
    assert make_config(port=1, api_key=("a",)) == Config(port=1, api_key=("a",))
    with pytest.raises(StartupError, match="port is '1', allowed is a whole number"):
        make_config(port="1")


def test_help_of_every_option_has_unit_or_choices_and_default():
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    for action in parser._actions[1:]:
        assert action.help
        assert "default" in action.help, action.dest
        assert action.metavar or action.choices or isinstance(action, argparse.BooleanOptionalAction), action.dest


def test_contradicting_options_are_refused_before_a_model_is_loaded():
    assert config("--overlap-steps").overlap_steps
    with pytest.raises(StartupError, match=r"^--overlap-steps .* --speculative-ngram 4 ") as caught:
        config("--overlap-steps", "--speculative-ngram", "4")
    assert str(caught.value).endswith("needs these results: use only one of the two options")


def test_step_timeout_option_accepts_seconds_or_no_limit():
    assert make_config().step_timeout is None
    assert make_config(step_timeout=2.5).step_timeout == 2.5
    assert make_config(step_timeout=0.0).step_timeout == 0
    with pytest.raises(StartupError, match="step_timeout is -1"):
        make_config(step_timeout=-1.0)


def test_draft_model_option_accepts_json_like_vllm_or_a_short_text():
    vllm = config("--speculative-config", '{"model": "small", "num_speculative_tokens": 5, "method": "draft_model"}')
    own = config("--speculative-model", "small", "--speculative-tokens", "5")
    assert vllm.drafts() == own.drafts() == DraftSettings(source="model", token_count=5, model="small")
    given = {"model": "small", "num_speculative_tokens": 2, "quantization": "int4", "revision": "v1"}
    drafts = make_config(speculative_config=given).drafts()
    assert drafts is not None
    assert (drafts.quantization, drafts.revision) == ("int4", "v1")
    ngram = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}'
    drafts = config("--speculative-config", ngram).drafts()
    assert drafts == DraftSettings(source="text", token_count=4, ignored=("prompt_lookup_max",))
    assert config("--speculative-ngram", "4").drafts() == DraftSettings(source="text", token_count=4)
    assert config().drafts() is None


@pytest.mark.parametrize("method", ["mtp", "deepseek_mtp", "glm4_moe_mtp"])
def test_mtp_layer_of_the_model_can_be_the_source_of_drafts(method):
    drafts = DraftSettings(source="mtp", token_count=2)
    assert config("--speculative-model", "mtp", "--speculative-tokens", "2").drafts() == drafts
    assert make_config(speculative_config={"method": method, "num_speculative_tokens": 2}).drafts() == drafts
    assert make_config(speculative_config={"model": "mtp", "num_speculative_tokens": 2}).drafts() == drafts


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ('{"method": "mtp", "model": "small", "num_speculative_tokens": 4}', 'remove "model"'),
        ("{", "is not JSON"),
        ("[]", "is not a JSON object"),
        ('{"model": "small"}', "num_speculative_tokens in --speculative-config is None, allowed is 1 to 15"),
        ('{"model": "small", "num_speculative_tokens": true}', "is True, allowed is 1 to 15"),
        ('{"model": "small", "num_speculative_tokens": 16}', "is 16, allowed is 1 to 15"),
        ('{"num_speculative_tokens": 4}', 'has no "model"'),
        ('{"model": "small", "num_speculative_tokens": 4, "method": "medusa"}', "is 'medusa', allowed is"),
        ('{"model": "small", "num_speculative_tokens": 4, "temper": 1}', "has temper, which is not supported"),
        ('{"model": "small", "num_speculative_tokens": 4, "quantization": "awq"}', "is 'awq', allowed is one of"),
        ('{"model": "small", "num_speculative_tokens": 4, "draft_tensor_parallel_size": 2}', "runs on one device"),
    ],
)
def test_invalid_speculative_config_is_refused_before_a_model_is_loaded(given, sentence):
    with pytest.raises(StartupError, match=re.escape(sentence)):
        config("--speculative-config", given)


def test_only_one_source_of_drafts_is_allowed():
    for other in (["--speculative-model", "small"], ["--speculative-config", '{"num_speculative_tokens": 4}']):
        with pytest.raises(StartupError, match="--speculative-ngram"):
            config("--speculative-ngram", "4", *other)
    with pytest.raises(StartupError, match=r"^--overlap-steps .* a draft model needs these results"):
        config("--overlap-steps", "--speculative-model", "small")
