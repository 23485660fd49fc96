"""Whether a response has the form that was asked for: the library `jsonschema` says so, which no server here uses.

A response that max_tokens cut off is no JSON yet; it has to be the beginning of some. That is asked of a grammar over
single bytes, which knows nothing of the model's tokens.
"""

from __future__ import annotations

import enum
import importlib
import json
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from trioserve.contracts.errors import StartupError

__all__ = ["Judge", "Verdict"]

REASON_CHARACTERS_MAX = 200


class Verdict(enum.Enum):
    VALID = "valid"
    CUT = "cut, a valid beginning"
    REFUSED = "refused"  # before anything was written: status 400
    INVALID = "INVALID"
    FAILED = "FAILED"  # no response, or one that the server ended


class Judge:
    """Raises StartupError without the library."""

    def __init__(self) -> None:
        try:
            self._jsonschema: Any = importlib.import_module("jsonschema")
        except ModuleNotFoundError:
            raise StartupError("judging responses needs jsonschema: install trioserve[bench]") from None
        self._bytes = LLTokenizer("byte")

    def judge(self, schema: Any, text: str, *, is_cut: bool) -> tuple[Verdict, str]:
        """With the reason for what is not valid."""
        if is_cut:
            return self._judge_beginning(schema, text)
        try:
            value = json.loads(text)
        except ValueError as error:
            return Verdict.INVALID, f"no JSON: {error}"
        validators = self._jsonschema.validators
        try:
            validator = validators.validator_for(schema, default=validators.Draft202012Validator)(schema)
            wrong = self._jsonschema.exceptions.best_match(validator.iter_errors(value))
        except Exception as fault:  # a schema that is none, or points to nowhere: nobody can judge by it
            return Verdict.INVALID, f"cannot be judged: {fault}"[:REASON_CHARACTERS_MAX]
        if wrong is not None:
            return Verdict.INVALID, f"{wrong.json_path}: {wrong.message}"[:REASON_CHARACTERS_MAX]
        return Verdict.VALID, ""

    def _judge_beginning(self, schema: Any, text: str) -> tuple[Verdict, str]:
        # What was cut within a character shows as a replacement character at its end.
        data = text.removesuffix("\ufffd").encode()
        matcher = LLMatcher(self._bytes, LLMatcher.grammar_from_json_schema(json.dumps(schema)), log_level=0)
        if matcher.is_error():
            return Verdict.INVALID, f"cannot be judged: {matcher.get_error()}"[:REASON_CHARACTERS_MAX]
        accepted = matcher.validate_tokens(list(data))
        if accepted < len(data):
            return Verdict.INVALID, f"cut, and wrong from byte {accepted} on: {text[-80:]!r}"
        return Verdict.CUT, ""
