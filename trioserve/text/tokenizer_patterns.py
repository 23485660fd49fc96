"""Checks a tokenizer.json before its first use: how much longer it may make a text, and how long its patterns take.

The library's regex engine backtracks. A pattern such as (a+)+$ takes practically forever on some texts, and nothing can
interrupt the engine. So a child process tries every pattern that is not from a known family. The child is killed after
PROBE_SECONDS_MAX. The texts that it tries provoke backtracking: runs of characters from the patterns, each followed by
a character that does not match.
"""

from __future__ import annotations

import base64
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import tokenizers

from trioserve.contracts.errors import ModelLoadError
from trioserve.text.gguf_vocabulary import KNOWN_SPLITS

__all__ = ["check_patterns", "check_tokenizer"]

GROWTH_MAX = 64  # length of a text after all steps, divided by its length before; NFKC in SentencePiece reaches 18
WORD_CHARACTERS_MAX = 1_000  # WordPiece takes quadratic time in the length of a word; real tokenizers allow 100

PROBE_SECONDS_MAX = 20.0  # an ordinary pattern takes under a second, the start of Python included
PROBE_CHARACTERS = 1000  # length of each text that the child process tries
PARTS = ("normalizer", "pre_tokenizer", "decoder")
COMMON = "aA1 \n中é'"
OWN_CHARACTERS_MAX = 24  # characters from the patterns that the texts repeat

# KNOWN_SPLITS, and patterns of families whose tokenizers the library transformers makes.
KNOWN_PATTERNS = KNOWN_SPLITS | {
    r"\s+",
    " {2,}",
    r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",
}

GAVE_UP = 3  # exit status of a child in which the library panicked because it gave up on a pattern

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
    """Check how much longer a tokenizer may make a text, the length of its words, and its patterns.

    Args:
        tokenizer: The tokenizer.
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

    Factors of nested parts are multiplied.
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
                replaced = len(pattern.get("String", "")) or 1  # a regular expression may match one character
                growth *= max(1.0, len(found["content"]) / replaced)
            elif kind == "Precompiled":
                growth *= _longest_replacement(base64.b64decode(found["precompiled_charsmap"]))
            elif kind == "TemplateProcessing":
                pieces = max(found["single"], found["pair"], key=len)
                growth *= max(1, sum("Sequence" in piece for piece in pieces))
    return growth


def _longest_replacement(charsmap: bytes) -> int:
    """Return the number of characters of the longest text that SentencePiece's table writes in place of one character.

    Args:
        charsmap: Length of a trie in 4 bytes, the trie, and then the texts. A zero byte ends each text.
    """
    texts = charsmap[4 + int.from_bytes(charsmap[:4], "little") :].split(b"\0")
    return max(1, *(len(text.decode(errors="replace")) for text in texts))


def check_patterns(tokenizer: tokenizers.Tokenizer, source: Path) -> None:
    """Try the patterns of a tokenizer as its library has read them, except those of known families.

    Args:
        tokenizer: The tokenizer.
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
    # Each run is followed by a character that ends it. The second tail also has every character that a pattern may
    # require anywhere, since the library searches for required characters first.
    tails = ("!", "\0" + "\0".join(letters))
    for letter in letters:
        for tail in tails:
            yield letter * PROBE_CHARACTERS + tail
    for first, second in permutations(COMMON, 2):
        yield (first + second) * (PROBE_CHARACTERS // 2) + tails[1]
