"""Tests of loading a tokenizer from a directory as on model hubs. A damaged directory is refused with one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from trioserve.contracts.errors import ModelLoadError
from trioserve.contracts.prompt import ChatPrompt
from trioserve.text.tokenizer import Tokenizer

MakeDirectory = Callable[..., Path]
CHAT = ChatPrompt(messages=[{"role": "user", "content": "hi"}])
TOOL_CHAT = ChatPrompt(messages=[{"role": "user", "content": "hi"}], tools=[{"type": "function"}])


@pytest.fixture
def make_directory(tmp_path: Path, byte_level_library: tokenizers.Tokenizer) -> MakeDirectory:
    """Return a function that makes a directory with tokenizer.json and the given files of text or JSON values."""

    def make(**files: object) -> Path:
        byte_level_library.save(str(tmp_path / "tokenizer.json"))
        for name, content in files.items():
            path = tmp_path / f"{name}.{'jinja' if name == 'chat_template' else 'json'}"
            path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        return tmp_path

    return make


def test_a_directory_needs_only_tokenizer_json(make_directory: MakeDirectory, byte_level: Tokenizer) -> None:
    tokenizer = Tokenizer.from_directory(make_directory())
    text = "The <|user|> 🦆 2024"
    assert tokenizer.encode(text) == byte_level.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == byte_level.decode(byte_level.encode(text))
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.eos_token_id) == (None, None, None)
    assert tokenizer.chat_template is None


@pytest.mark.parametrize("files", [
    {"tokenizer_config": {"bos_token": "<|begin|>", "eos_token": {"content": "<|end|>", "lstrip": False}}},
    {"special_tokens_map": {"bos_token": {"content": "<|begin|>"}, "eos_token": "<|end|>"}},
    {"tokenizer_config": {"bos_token": "<|begin|>", "eos_token": None}, "special_tokens_map": {"eos_token": "<|end|>"}},
])  # fmt: skip
def test_special_tokens_are_read_from_either_file(files: dict[str, Any], make_directory: MakeDirectory) -> None:
    tokenizer = Tokenizer.from_directory(make_directory(**files))
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.eos_token_id) == ("<|begin|>", "<|end|>", 0)


def test_a_named_special_token_outside_the_vocabulary_has_no_id(make_directory: MakeDirectory) -> None:
    tokenizer = Tokenizer.from_directory(make_directory(tokenizer_config={"eos_token": "<nowhere>"}))
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<nowhere>", None)


@pytest.mark.parametrize(("config", "ends"), [
    ({}, (False, False)),
    ({"add_bos_token": None}, (False, False)),
    ({"add_bos_token": True}, (True, False)),
    ({"add_bos_token": True, "add_eos_token": True}, (True, True)),
    ({"add_bos_token": False, "add_eos_token": True}, (False, True)),
])  # fmt: skip
def test_bos_and_eos_are_added_as_the_config_says(
    config: dict[str, Any], ends: tuple[bool, bool], make_directory: MakeDirectory
) -> None:
    named = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
    tokenizer = Tokenizer.from_directory(make_directory(tokenizer_config=named | config))
    token_ids = tokenizer.encode("the")
    assert (token_ids[0] == 1, token_ids[-1] == 0) == ends
    plain = tokenizer.encode("the", add_special_tokens=False)
    assert 0 not in plain
    assert 1 not in plain


def test_an_ordinary_token_that_the_config_names_as_eos_becomes_special(make_directory: MakeDirectory) -> None:
    tokenizer = Tokenizer.from_directory(make_directory(tokenizer_config={"eos_token": "<think>"}))
    assert 3 in tokenizer.special_token_ids
    assert tokenizer.decode(tokenizer.encode("a<think>b")) == "ab"


def test_tokens_that_only_tokenizer_config_json_lists_are_added(
    make_directory: MakeDirectory, byte_level: Tokenizer
) -> None:
    size = byte_level.vocab_size
    decoder = {
        str(size + 1): {"content": "<plain>", "special": False},
        str(size): {"content": "<more>", "special": True},
        "3": {"content": "<think>", "special": True},
        "0": {"content": "<|end|>", "special": True},
    }
    tokenizer = Tokenizer.from_directory(make_directory(tokenizer_config={"added_tokens_decoder": decoder}))
    assert tokenizer.encode("a<more><plain>")[1:] == [size, size + 1]
    assert [token_id in tokenizer.special_token_ids for token_id in (size, size + 1, 3)] == [True, False, True]
    assert tokenizer.vocab_size == size + 2


def test_tokens_of_added_tokens_json_are_added(make_directory: MakeDirectory, byte_level: Tokenizer) -> None:
    size = byte_level.vocab_size
    tokenizer = Tokenizer.from_directory(make_directory(added_tokens={"<more>": size}))
    assert tokenizer.encode("<more>") == [size]


@pytest.mark.parametrize(("files", "plain", "with_tools"), [
    ({"tokenizer_config": {"chat_template": "config"}}, "config", "config"),
    ({"tokenizer_config": {"chat_template": "config"}, "chat_template": "file"}, "file", "file"),
    ({"tokenizer_config": {"chat_template": [{"name": "default", "template": "one"},
                                             {"name": "tool_use", "template": "two"}]}}, "one", "two"),
    ({"tokenizer_config": {"chat_template": [{"name": "default", "template": "one"}]}}, "one", "one"),
])  # fmt: skip
def test_the_chat_template_is_found_in_several_files(
    files: dict[str, Any], plain: str, with_tools: str, make_directory: MakeDirectory
) -> None:
    template = Tokenizer.from_directory(make_directory(**files)).chat_template
    assert template is not None
    assert (template.render(CHAT), template.render(TOOL_CHAT)) == (plain, with_tools)


def test_an_additional_template_file_for_tools_is_used(make_directory: MakeDirectory) -> None:
    path = make_directory(chat_template="file")
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    template = Tokenizer.from_directory(path).chat_template
    assert template is not None
    assert (template.render(CHAT), template.render(TOOL_CHAT)) == ("file", "tools")


def test_templates_of_a_directory_get_the_special_tokens(make_directory: MakeDirectory) -> None:
    config = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "chat_template": "{{ bos_token }}x{{ eos_token }}"}
    template = Tokenizer.from_directory(make_directory(tokenizer_config=config)).chat_template
    assert template is not None
    assert template.render(CHAT) == "<|begin|>x<|end|>"


def test_a_directory_without_tokenizer_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(ModelLoadError, match=r"has no tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b"[]", b"\xff\xfe", b'{"model": {"type": "BPE"}}'])
def test_a_damaged_tokenizer_json_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json cannot be read as a tokenizer"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize(("files", "said"), [
    ({"tokenizer_config": "{"}, r"tokenizer_config\.json cannot be read as JSON"),
    ({"tokenizer_config": "[]"}, r"tokenizer_config\.json contains list, expected a JSON object"),
    ({"special_tokens_map": "nul"}, r"special_tokens_map\.json cannot be read as JSON"),
    ({"tokenizer_config": {"added_tokens_decoder": {"x": {"content": "y"}}}}, "'x' as the id of an added token"),
    ({"tokenizer_config": {"added_tokens_decoder": {"9999": {}}}}, "without content"),
    ({"tokenizer_config": {"added_tokens_decoder": ["x"]}}, "added_tokens_decoder .* is list"),
    ({"tokenizer_config": {"chat_template": [{"name": "default"}]}}, "chat_template .* without name and template"),
    ({"added_tokens": {"<more>": None}}, r"added_tokens\.json names None"),
    ({"tokenizer_config": {"added_tokens_decoder": {"9999": {"content": "<far>"}}}}, "'<far>' is said to have id 9999"),
])  # fmt: skip
def test_a_damaged_or_contradictory_file_is_refused_and_the_error_names_it(
    files: dict[str, Any], said: str, make_directory: MakeDirectory
) -> None:
    with pytest.raises(ModelLoadError, match=said):
        Tokenizer.from_directory(make_directory(**files))


def test_a_template_that_is_not_text_is_refused(make_directory: MakeDirectory) -> None:
    path = make_directory()
    (path / "chat_template.jinja").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ModelLoadError, match=r"chat_template\.jinja cannot be read as text"):
        Tokenizer.from_directory(path)
