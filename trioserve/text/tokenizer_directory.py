"""Reads a tokenizer from a Hugging Face directory: tokenizer.json, and the files around it that complete it."""

from __future__ import annotations

import json
import reprlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from trioserve.contracts.errors import ModelLoadError
from trioserve.text.tokenizer_parts import TokenizerParts, add_sequence_ends
from trioserve.text.tokenizer_patterns import check_tokenizer

__all__ = ["TokenizerDirectory"]

TOKENIZER_BYTES_MAX = 256 * 2**20  # size of tokenizer.json; the largest vocabularies take 35 MB
JSON_BYTES_MAX = 32 * 2**20  # size of each other file; with a full list of added tokens it has about 5 MB
JSON_MARKS_MAX = 2**20  # commas and opening brackets; bounds the number of values, of about 100 bytes each in memory
TEMPLATE_BYTES_MAX = 2**20  # four times TEMPLATE_CHARACTERS_MAX, since a character may take four bytes


class TokenizerDirectory:
    """Reader for the tokenizer files of one directory. Other modules read generation_config.json and config.json.

    Args:
        path: The directory.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> TokenizerParts:
        """Read and check all files.

        Raises:
            ModelLoadError: A file is missing, damaged, or contradicts another file.
        """
        backend = self._read_backend()
        config = self._read_json("tokenizer_config.json")
        special_tokens = self._read_json("special_tokens_map.json")
        bos_token, eos_token, pad_token = (
            _token_text(config.get(name)) or _token_text(special_tokens.get(name))
            for name in ("bos_token", "eos_token", "pad_token")
        )
        self._add_missing_tokens(backend, config)
        _mark_special(backend, (bos_token, eos_token))
        if isinstance(config.get("add_bos_token"), bool):
            # The option is explicit, so it overrides the rule that was saved in tokenizer.json.
            add_sequence_ends(
                backend,
                bos=_end_token(backend, bos_token) if config["add_bos_token"] else None,
                eos=_end_token(backend, eos_token) if config.get("add_eos_token") else None,
            )
        chat_template, tool_chat_template = self._read_chat_templates(config)
        return TokenizerParts(
            backend=backend,
            bos_token=bos_token,
            eos_token=eos_token,
            chat_template=chat_template,
            tool_chat_template=tool_chat_template,
            pad_token=pad_token,
        )

    def _read_backend(self) -> tokenizers.Tokenizer:
        path = self._path / "tokenizer.json"
        if not path.is_file():
            raise ModelLoadError(
                f"{self._path} has no tokenizer.json: a model directory needs it, tokenizer.model alone is not read"
            )
        self._check_size(path, TOKENIZER_BYTES_MAX)
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception for every fault of the file
            raise ModelLoadError(f"{path} cannot be read as a tokenizer ({error}): download it again") from error
        check_tokenizer(backend, path)
        return backend

    def _read_json(self, name: str) -> dict[str, Any]:
        """Return the JSON object in a file, or an empty one if the file does not exist."""
        path = self._path / name
        if not path.is_file():
            return {}
        self._check_size(path, JSON_BYTES_MAX)
        try:
            text = path.read_text(encoding="utf-8")
            if (mark_count := sum(map(text.count, (",", "[", "{")))) > JSON_MARKS_MAX:
                raise ModelLoadError(
                    f"{path} has {mark_count} commas and opening brackets, at most {JSON_MARKS_MAX} are read"
                )
            content = json.loads(text)
            # JSON escapes can produce half of a surrogate pair, which no tokenizer accepts. Refuse it here, where the
            # file is known.
            json.dumps(content, ensure_ascii=False).encode()
        except (OSError, ValueError, RecursionError) as error:
            raise ModelLoadError(f"{path} cannot be read as JSON ({error}): download it again") from error
        if not isinstance(content, dict):
            raise ModelLoadError(f"{path} contains {_kind(content)}, expected a JSON object")
        return content

    def _add_missing_tokens(self, backend: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
        """Add the tokens that are missing in tokenizer.json but listed in other files, in the order of their ids."""
        stated: dict[int, AddedToken] = {}
        for content, token_id in self._read_json("added_tokens.json").items():
            stated[_token_id(token_id, "added_tokens.json")] = AddedToken(content, normalized=False)
        entries = config.get("added_tokens_decoder") or {}
        if not isinstance(entries, dict):
            raise ModelLoadError(
                f"added_tokens_decoder in tokenizer_config.json is {_kind(entries)}, expected an object"
            )
        for key, entry in entries.items():
            stated[_token_id(key, "tokenizer_config.json")] = _added_token(entry)
        for token_id, token in sorted(stated.items()):
            known_id = backend.token_to_id(token.content)
            if known_id is not None:
                if token.special:
                    _mark_special(backend, (token.content,))
                continue
            (backend.add_special_tokens if token.special else backend.add_tokens)([token])
            if backend.token_to_id(token.content) != token_id:
                raise ModelLoadError(
                    f"{self._path}: the added token {token.content!r} is said to have id {token_id}, but the next free "
                    f"id of tokenizer.json is {backend.token_to_id(token.content)}: the files are of different models"
                )

    def _read_chat_templates(self, config: dict[str, Any]) -> tuple[str | None, str | None]:
        """Return the template for chats, and the template for chats with tools. Either is None if there is none."""
        named: dict[str, str] = {}
        entry = config.get("chat_template")
        if isinstance(entry, str):
            named["default"] = entry
        elif isinstance(entry, list):
            named |= dict(_named_template(item) for item in entry)
        for path in sorted((self._path / "additional_chat_templates").glob("*.jinja")):
            named[path.stem] = self._read_text(path)
        path = self._path / "chat_template.jinja"
        if path.is_file():
            named["default"] = self._read_text(path)
        return named.get("default"), named.get("tool_use")

    def _check_size(self, path: Path, bytes_max: int) -> None:
        try:
            size = path.stat().st_size
        except OSError as error:
            raise ModelLoadError(f"{path} cannot be read ({error}): download it again") from error
        if size > bytes_max:
            raise ModelLoadError(f"{path} has {size} bytes, at most {bytes_max} are read: it is damaged")

    def _read_text(self, path: Path) -> str:
        self._check_size(path, TEMPLATE_BYTES_MAX)
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelLoadError(f"{path} cannot be read as text ({error}): download it again") from error


def _token_text(entry: object) -> str | None:
    """Return the text of a token, which a file writes as a string or as an object with the key "content"."""
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None


def _named_template(entry: object) -> tuple[str, str]:
    if isinstance(entry, dict):
        name, template = entry.get("name"), entry.get("template")
        if isinstance(name, str) and isinstance(template, str):
            return name, template
    raise ModelLoadError(
        f"chat_template in tokenizer_config.json has an entry without name and template: {reprlib.repr(entry)}"
    )


def _kind(value: object) -> str:
    return type(value).__name__


def _token_id(value: object, file_name: str) -> int:
    with suppress(ValueError):
        if isinstance(value, int | str) and not isinstance(value, bool):
            return int(value)
    raise ModelLoadError(f"{file_name} names {reprlib.repr(value)} as the id of an added token, expected a number")


def _added_token(entry: object) -> AddedToken:
    content = _token_text(entry)
    if content is None:
        raise ModelLoadError(
            f"added_tokens_decoder in tokenizer_config.json has an entry without content: {reprlib.repr(entry)}"
        )
    flags = entry if isinstance(entry, dict) else {}
    names = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return AddedToken(content, **{name: bool(flags[name]) for name in names if name in flags})


def _mark_special(backend: tokenizers.Tokenizer, contents: tuple[str | None, ...]) -> None:
    """Make the given tokens of the vocabulary special."""
    added = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    for content in contents:
        if content is None or backend.token_to_id(content) is None:
            continue
        token = added.get(content)
        if token is None:
            backend.add_special_tokens([AddedToken(content, normalized=False)])
        elif not token.special:
            token.special = True
            backend.add_special_tokens([token])


def _end_token(backend: tokenizers.Tokenizer, content: str | None) -> tuple[str, int] | None:
    token_id = None if content is None else backend.token_to_id(content)
    return None if content is None or token_id is None else (content, token_id)
