"""Tries the regular expressions of a tokenizer.json before anything is tokenized with them.

The library's engine goes back: a pattern such as (a+)+$ takes for ever with some texts, and nothing interrupts it. So
patterns that are not those of known families are tried in a child process, which is killed after PROBE_SECONDS_MAX.
The texts make a pattern go back if it can: runs of its own characters, then one that does not fit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path

import tokenizers

from trioserve.contracts.errors import ModelLoadError
from trioserve.text.gguf_vocabulary import KNOWN_SPLITS

__all__ = ["check_patterns"]

PROBE_SECONDS_MAX = 20.0  # an ordinary pattern takes under a second, the start of Python included
PROBE_CHARACTERS = 1000  # of a text
PARTS = ("normalizer", "pre_tokenizer", "decoder")
COMMON = "aA1 \n中é'"
OWN_CHARACTERS_MAX = 24  # of the patterns, that texts are made of

GAVE_UP = 3  # the status of a child in which the library gave up, which is a panic of its own

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


def check_patterns(tokenizer: tokenizers.Tokenizer, source: Path) -> None:
    """Try the patterns of a tokenizer as its library has read them, those of known families left out.

    Args:
        source: the file, for an error.

    Raises:
        ModelLoadError: a pattern takes too long.

    Cost: nothing where all are known, otherwise about half a second in another process.
    """
    found = {name: getattr(tokenizer, name) for name in PARTS}
    parts = {name: None if part is None else json.loads(part.__getstate__()) for name, part in found.items()}
    patterns = set(_patterns(parts)) - KNOWN_SPLITS
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
            f"{source}: its patterns ({shown}) go back without end in texts of {PROBE_CHARACTERS} characters, so a "
            "client's text could stop the server: take a tokenizer with other patterns"
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
    # Behind a run stands what ends it, and then what a pattern may need anywhere: the library looks for that first.
    tails = ("!", "\0" + "\0".join(letters))
    for letter in letters:
        for tail in tails:
            yield letter * PROBE_CHARACTERS + tail
    for first, second in permutations(COMMON, 2):
        yield (first + second) * (PROBE_CHARACTERS // 2) + tails[1]
