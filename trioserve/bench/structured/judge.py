"""Judges responses against their JSON schema with the library `jsonschema`, which no measured server uses.

A response that max_tokens ended early is not JSON yet, but must be a valid beginning. A grammar over single bytes
checks that. It knows nothing of the model's tokens.
"""

from __future__ import annotations

import enum
import importlib
import json
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from trioserve.contracts.errors import StartupError
from trioserve.contracts.extras import install_command

__all__ = ["Judge", "Verdict"]

REASON_CHARACTERS_MAX = 200


class Verdict(enum.Enum):
    VALID = "valid"
    CUT = "cut, a valid beginning"
    REFUSED = "refused"  # status 400, before any output
    INVALID = "INVALID"
    FAILED = "FAILED"  # no response, or a response that the server ended


class Judge:
    """Judges responses. Raises StartupError if the library is not installed."""

    def __init__(self) -> None:
        try:
            self._jsonschema: Any = importlib.import_module("jsonschema")
        except ModuleNotFoundError:
            raise StartupError(f"judging responses needs jsonschema: {install_command('bench')}") from None
        self._bytes = LLTokenizer("byte")

    def judge(self, schema: Any, text: str, *, is_cut: bool) -> tuple[Verdict, str]:
        """Judge a response.

        Args:
            schema: the requested JSON schema.
            text: the response.
            is_cut: True if max_tokens ended the response.

        Returns:
            The verdict, and the reason if the response is not valid.
        """
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
        except Exception as fault:  # The schema is not a valid schema, or has a reference to nowhere.
            return Verdict.INVALID, f"cannot be judged: {fault}"[:REASON_CHARACTERS_MAX]
        if wrong is not None:
            return Verdict.INVALID, f"{wrong.json_path}: {wrong.message}"[:REASON_CHARACTERS_MAX]
        return Verdict.VALID, ""

    def _judge_beginning(self, schema: Any, text: str) -> tuple[Verdict, str]:
        # A text that ends within a character has a replacement character at its end.
        data = text.removesuffix("\ufffd").encode()
        matcher = LLMatcher(self._bytes, LLMatcher.grammar_from_json_schema(json.dumps(schema)), log_level=0)
        if matcher.is_error():
            return Verdict.INVALID, f"cannot be judged: {matcher.get_error()}"[:REASON_CHARACTERS_MAX]
        accepted = matcher.validate_tokens(list(data))
        if accepted < len(data):
            return Verdict.INVALID, f"cut, and wrong from byte {accepted} on: {text[-80:]!r}"
        return Verdict.CUT, ""
