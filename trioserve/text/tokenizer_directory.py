"""Reads a tokenizer from a Hugging Face directory: tokenizer.json, and the other files that complete it.

Before its first use, two properties of a tokenizer.json are checked: how much its steps may lengthen a text, and how
long its patterns take. The library's regex engine backtracks. A pattern such as (a+)+$ takes practically forever on
some texts, and nothing can interrupt the engine. So a child process tries every pattern that is not from a known
family. The child is killed after PROBE_SECONDS_MAX. The child tries texts that provoke backtracking: runs of characters
from the patterns, each followed by a character that does not match.
"""

from __future__ import annotations

import base64
import json
import math
import os
import reprlib
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import permutations
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from trioserve.contracts.errors import ModelLoadError
from trioserve.text.gguf_vocabulary import KNOWN_SPLITS
from trioserve.text.tokenizer_parts import TokenizerParts, add_sequence_ends

__all__ = ["check_patterns", "check_tokenizer", "TokenizerDirectory"]

GROWTH_MAX = 64  # Largest factor by which all steps together may lengthen a text. NFKC in SentencePiece reaches 18.
# WordPiece takes quadratic time in the length of a word. Real tokenizers allow 100 characters.
WORD_CHARACTERS_MAX = 1_000

PROBE_SECONDS_MAX = 20.0  # An ordinary pattern takes under a second, including the start of Python.
PROBE_CHARACTERS = 1000  # Length of each text that the child process tries.
PARTS = ("normalizer", "pre_tokenizer", "decoder")
COMMON = "aA1 \n中é'"
OWN_CHARACTERS_MAX = 24  # Maximum number of characters of the patterns that the texts repeat, in addition to COMMON.

# Patterns that are known to be fast on all texts, so the child process need not try them. The patterns below are not in
# KNOWN_SPLITS. The library `transformers` writes these patterns into the tokenizers of some model families.
KNOWN_PATTERNS = KNOWN_SPLITS | {
    r"\s+",
    " {2,}",
    r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",
}

GAVE_UP = 3  # Exit status of the child process if the library gave up on a pattern and panicked.

_PROBE = f"""
import json, sys, tokenizers
parts, texts = json.load(sys.stdin)
model = dict(type="BPE", vocab=dict(), merges=[])
tokenizer = tokenizers.Tokenizer.from_str(json.dumps(dict(version="1.0", added_tokens=[], model=model, **parts)))
for text in texts:
    for do in (lambda: tokenizer.normalizer and tokenizer.normalizer.normalize_str(text),
               lambda: tokenizer.pre_tokenizer and tokenizer.pre_tokenizer.pre_tokenize_str(text),
               lambda: tokenizer.decoder and tokenizer.decoder.decode([text])):
        try:
            do()
        except Exception:
            pass
        except BaseException:
            sys.exit({GAVE_UP})
"""


def check_tokenizer(tokenizer: tokenizers.Tokenizer, source: Path) -> None:
    """Check how much a tokenizer may lengthen a text, the length limit of its words, and its patterns.

    Args:
        source: Path of its file, for error messages.

    Raises:
        ModelLoadError: A short text could use all memory, or a pattern or a word takes too long.
    """
    for names in (("normalizer", "post_processor"), ("decoder",)):
        growths = {name: _growth(_state(tokenizer, name)) for name in names}
        if math.prod(growths.values()) > GROWTH_MAX:
            shown = " and ".join(name for name, growth in growths.items() if growth > 1)
            raise ModelLoadError(
                f"{source}: its {shown} may make a text more than {GROWTH_MAX} times as long, so a client could use "
                "all memory: use another tokenizer"
            )
    word_characters = getattr(tokenizer.model, "max_input_chars_per_word", 0)
    if word_characters > WORD_CHARACTERS_MAX:
        raise ModelLoadError(
            f"{source}: max_input_chars_per_word is {word_characters}, allowed are {WORD_CHARACTERS_MAX}: the file is "
            "damaged"
        )
    check_patterns(tokenizer, source)


def _state(tokenizer: tokenizers.Tokenizer, name: str) -> Any:
    part = getattr(tokenizer, name)
    return None if part is None else json.loads(part.__getstate__())


def _growth(state: object) -> float:
    """Return the largest factor by which a part of a tokenizer may lengthen a text.

    The factors of nested parts are multiplied.
    """
    growth, waiting = 1.0, [state]
    while waiting and growth <= GROWTH_MAX:
        found = waiting.pop()
        if isinstance(found, list):
            waiting += found
        elif isinstance(found, dict):
            kind = found.get("type")
            if kind == "Sequence":
                waiting += [inner for name, inner in found.items() if name != "type"]
            elif kind == "Replace":
                pattern = found["pattern"]
                replaced = len(pattern.get("String", "")) or 1  # A regular expression may match a single character.
                growth *= max(1.0, len(found["content"]) / replaced)
            elif kind == "Precompiled":
                growth *= _longest_replacement(base64.b64decode(found["precompiled_charsmap"]))
            elif kind == "TemplateProcessing":
                pieces = max(found["single"], found["pair"], key=len)
                growth *= max(1, sum("Sequence" in piece for piece in pieces))
    return growth


def _longest_replacement(charsmap: bytes) -> int:
    """Return the length of the longest text with which SentencePiece's table replaces one character, in characters.

    Args:
        charsmap: The length of a trie in 4 bytes, the trie, and the texts. A zero byte ends each text.
    """
    texts = charsmap[4 + int.from_bytes(charsmap[:4], "little") :].split(b"\0")
    return max(1, *(len(text.decode(errors="replace")) for text in texts))


def check_patterns(tokenizer: tokenizers.Tokenizer, source: Path) -> None:
    """Try the patterns of a tokenizer as the library has read them, except patterns of known families.

    Args:
        source: Path of its file, for error messages.

    Raises:
        ModelLoadError: A pattern takes too long, or no child process could be started.

    Cost: nothing if all patterns are known, otherwise about 0.5 s in another process.
    """
    parts = {name: _state(tokenizer, name) for name in PARTS}
    patterns = set(_patterns(parts)) - KNOWN_PATTERNS
    if not patterns:
        return
    try:
        child = subprocess.run(
            [sys.executable, "-c", _PROBE],
            input=json.dumps((parts, list(_texts(patterns)))).encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={name: text for name, text in os.environ.items() if name.startswith(("PYTHON", "LD_", "PATH"))},
            timeout=PROBE_SECONDS_MAX,
            check=False,
            start_new_session=True,
        )
        is_slow = child.returncode == GAVE_UP
    except subprocess.TimeoutExpired:
        is_slow = True
    except OSError as error:
        raise ModelLoadError(f"{source}: no process could be started to try its patterns: {error.strerror}") from error
    if is_slow:
        shown = ", ".join(repr(pattern[:80]) for pattern in sorted(patterns)[:3])
        raise ModelLoadError(
            f"{source}: its patterns ({shown}) backtrack too long on texts of {PROBE_CHARACTERS} characters, so a "
            "client's text could stop the server: use a tokenizer with other patterns"
        )


def _patterns(value: object) -> Iterator[str]:
    waiting = [value]
    while waiting:
        found = waiting.pop()
        if isinstance(found, dict):
            if isinstance(pattern := found.get("Regex"), str):
                yield pattern
            waiting += found.values()
        elif isinstance(found, list):
            waiting += found


def _texts(patterns: set[str]) -> Iterator[str]:
    own = sorted({letter for pattern in patterns for letter in pattern if letter.isalnum()} - set(COMMON))
    letters = (*COMMON, *own[:OWN_CHARACTERS_MAX])
    # Each run is followed by a tail that ends the run. The second tail also has every character that a pattern may
    # require anywhere, since the library first searches for required characters.
    tails = ("!", "\0" + "\0".join(letters))
    for letter in letters:
        for tail in tails:
            yield letter * PROBE_CHARACTERS + tail
    for first, second in permutations(COMMON, 2):
        yield (first + second) * (PROBE_CHARACTERS // 2) + tails[1]


TOKENIZER_BYTES_MAX = 256 * 2**20  # Largest tokenizer.json. The largest known vocabularies take 35 MB.
JSON_BYTES_MAX = 32 * 2**20  # Largest size of each other file. A file with a full list of added tokens has about 5 MB.
# Maximum number of commas and opening brackets in a JSON file. Their number limits the number of values, each of which
# takes about 100 bytes in memory.
JSON_MARKS_MAX = 2**20
TEMPLATE_BYTES_MAX = 2**20  # This is four times TEMPLATE_CHARACTERS_MAX, since a character may take four bytes.


class TokenizerDirectory:
    """Reads the tokenizer files of one directory. Other modules read generation_config.json and config.json.

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
            # The config sets this option explicitly, so the option overrides the rule that was saved in tokenizer.json.
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
        except Exception as error:  # The library raises plain Exception for every fault of the file.
            raise ModelLoadError(f"{path} cannot be read as a tokenizer ({error}): download it again") from error
        check_tokenizer(backend, path)
        return backend

    def _read_json(self, name: str) -> dict[str, Any]:
        """Return the JSON object in a file, or an empty object if the file does not exist."""
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
            # JSON escapes can produce half of a surrogate pair, which no tokenizer accepts. Such a file is refused at
            # once, so that the error can name the file.
            json.dumps(content, ensure_ascii=False).encode()
        except (OSError, ValueError, RecursionError) as error:
            raise ModelLoadError(f"{path} cannot be read as JSON ({error}): download it again") from error
        if not isinstance(content, dict):
            raise ModelLoadError(f"{path} contains {_kind(content)}, expected a JSON object")
        return content

    def _add_missing_tokens(self, backend: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
        """Add the tokens that are missing in tokenizer.json but listed in other files.

        Add them in the order of their ids.
        """
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
        """Return the template for chats and the template for chats with tools. A missing template is None."""
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
    """Return the text of a token that a file contains as a string or as an object with the key "content"."""
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
    """Change the given tokens of the vocabulary into special tokens."""
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
