"""Translates structured output to grammars, compiles them for one model with llguidance, and caches the results.

All resources of the compiler have bounds: the length of the source (contracts.structured_output), the library's fuel
for its lexer and parser, and the stack, since the library follows rules and references by recursion. Callers of
`compile` use a thread with a stack of grammar_bounds.COMPILE_STACK_BYTES.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.structured_output import SchemaKind, StructuredOutput
from trioserve.text.grammar_bounds import (
    check_fixed_text,
    check_lark,
    check_pattern,
    check_schema,
    check_schemas_within,
    schemas_within,
    with_kept_schemas,
)
from trioserve.text.json_keys import JsonKeys, KeyTokens, has_free_keys
from trioserve.text.schema_keywords import KeptSchema
from trioserve.text.structural_tag import StructuralTagGrammar, with_json_options
from trioserve.text.tokenizer import Tokenizer

__all__ = [
    "grammar_source",
    "CACHE_BYTES_MAX",
    "COMPILE_SECONDS_MAX",
    "CompiledGrammar",
    "GrammarCompiler",
    "in_one_line",
]


def grammar_source(
    structured: StructuredOutput, special_ids: Mapping[str, int], end_token_ids: Collection[int], ignored: list[str]
) -> str:
    """Return the source of the grammar.

    Args:
        structured: Schema, regex, choices or grammar of the request.
        special_ids: Ids of the model's special tokens by their text, end tokens included.
        end_token_ids: End tokens of the model.
        ignored: Receives the paths of schema keywords that are left out.

    Raises:
        InvalidRequest: `structured` is not valid, exceeds a bound, or is a strict schema with a keyword that cannot be
            enforced.
    """
    match structured.kind:
        case SchemaKind.JSON_OBJECT:
            return LLMatcher.grammar_from_json_schema(with_json_options({"type": "object"}))
        case SchemaKind.JSON_SCHEMA:
            return LLMatcher.grammar_from_json_schema(with_json_options(_schema_of(structured, ignored)))
        case SchemaKind.REGEX:
            check_pattern(structured.source, param=structured.param)
            return LLMatcher.grammar_from_regex(structured.source)
        case SchemaKind.CHOICE:
            # All choices share one terminal, since the parser needs an item per rule and is limited to 2,000 items.
            choices = " | ".join(map(json.dumps, _choices_of(structured)))
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}")
        case SchemaKind.GRAMMAR:
            return LLMatcher.grammar_from_lark(_lark_of(structured))
        case SchemaKind.TOOL_CALLS:
            check_schemas_within(structured.source, param=structured.param)
            return LLMatcher.grammar_from_lark(with_kept_schemas(structured.source, ignored, param=structured.param))
        case SchemaKind.STRUCTURAL_TAG:
            tag = StructuralTagGrammar(
                _parsed(structured), special_ids, end_token_ids, param=structured.param, lenient=not structured.strict
            )
            ignored += tag.ignored
            return tag.grammar if tag.grammar.startswith("{") else LLMatcher.grammar_from_lark(tag.grammar)


def _parsed(structured: StructuredOutput) -> Any:
    try:
        return json.loads(structured.source)
    except RecursionError:
        raise InvalidRequest(f"the {structured.kind.value} is nested too deeply", param=structured.param) from None
    except ValueError as error:
        raise InvalidRequest(f"the {structured.kind.value} is not JSON: {error}", param=structured.param) from None


def _schema_of(structured: StructuredOutput, ignored: list[str]) -> dict[str, Any]:
    schema = _parsed(structured)
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise InvalidRequest("a JSON schema must be an object", param=structured.param)
    check_schema(schema, param=structured.param)
    kept = KeptSchema(schema, param=structured.param, lenient=not structured.strict)
    ignored += kept.ignored
    check_schema(kept.schema, param=structured.param)
    if kept.schema is False:
        raise InvalidRequest("nothing can satisfy the schema", param=structured.param)
    return dict(kept.schema)


def _choices_of(structured: StructuredOutput) -> list[str]:
    choices = _parsed(structured)
    if (
        not isinstance(choices, list)
        or not choices
        or not all(isinstance(choice, str) and choice for choice in choices)
    ):
        raise InvalidRequest("choices must be a list of texts that are not empty", param=structured.param)
    for choice in choices:
        check_fixed_text(choice, "a choice", param=structured.param)
    return choices


def _lark_of(structured: StructuredOutput) -> str:
    try:
        lark: str = any_to_lark(structured.source)
    except RecursionError:
        raise InvalidRequest("the grammar is nested too deeply", param=structured.param) from None
    except Exception as error:  # The library's reader of GBNF raises various exceptions.
        raise InvalidRequest(f"the grammar is neither Lark nor GBNF: {error}", param=structured.param) from None
    check_lark(lark, param=structured.param)
    return lark


# Limit for the sum of CompiledGrammar.byte_count_max, which is a worst case. Ordinary grammars take a hundredth of
# byte_count_max.
CACHE_BYTES_MAX = 2**30
GRAMMAR_SEQUENCES_MAX = 2000
# Maximum memory per mask. It was measured with a regex that makes new lexer states with each token, up to
# max_lexer_states.
MASK_BYTES = 36_000
LEXER_BYTES_MAX = 20 * 2**20
GRAMMAR_BYTES = 98_304  # Measured memory of a small compiled grammar.
SOURCE_CHARACTER_BYTES = 150  # Additional memory per character of the source.
MESSAGE_CHARACTERS_MAX = 300
# Limit for all schemas of one request. 128 tools with schemas of 2,000 characters take a fifth of this time on a slow
# machine.
COMPILE_SECONDS_MAX = 3.0
UNSATISFIABLE = ("NoExtension", "NoExtensionBias")  # Two messages of the library that users would not understand.
NOTHING_FITS = "nothing can satisfy it"  # This message replaces the two messages of the library.
LIMITS = LLParserLimits(
    max_items_in_row=2000,
    initial_lexer_fuel=1_000_000,  # This fuel lasts for 20 ms.
    step_lexer_fuel=200_000,  # This fuel lasts for 15 ms per mask.
    step_max_items=10_000,  # A run of forced tokens takes up to 20 ms, and the event loop waits meanwhile.
    max_lexer_states=20_000,  # Each lexer state takes 1 or 2 kB.
    max_grammar_size=500_000,
    verbose_errors=False,
)


_FREE_TEXT = re.compile(r"\w+(\[\w+\])?: /")
"""Matches a line in a grammar of tool calls that defines a terminal which is not a fixed text."""


def _never_end() -> None:
    """Do nothing. This is the default of `check`, which never ends the compilation."""


class CompiledGrammar:
    """A compiled grammar, shared by all sequences that use it.

    The sequences also share the grammar's lexer, which gets more states as masks are filled. With too many states, the
    lexer fails for all sequences. So a grammar wears out after some thousand sequences, or after the first failure. The
    next request then compiles the grammar again. Sequences that already use the worn-out grammar continue to use it.

    Args:
        matcher: Matcher of the library at the beginning of the grammar. It is copied for each sequence.
        byte_count: Estimated memory of the grammar without its lexer states.
        ignored: Paths of schema keywords that the grammar does not enforce.
        keys: Tracks the keys of a JSON response, or None if no key can be repeated.

    Attributes:
        mask_count: Number of masks that were filled. Callers that fill masks increase this number.
        keys: As above.
        ignored: As above.
    """

    def __init__(
        self, matcher: LLMatcher, byte_count: int, ignored: Sequence[str] = (), keys: JsonKeys | None = None
    ) -> None:
        self._matcher = matcher
        self.keys = keys
        self.ignored = tuple(ignored)
        self._byte_count = byte_count
        self._sequences_left = GRAMMAR_SEQUENCES_MAX
        self.mask_count = 0

    def new_matcher(self) -> LLMatcher:
        """Return a matcher for one sequence. This takes microseconds."""
        self._sequences_left -= 1
        return self._matcher.deep_copy()

    def wear_out(self) -> None:
        """Mark the grammar as worn out because it failed for a sequence. Any thread may call this method."""
        self._sequences_left = 0

    @property
    def is_worn_out(self) -> bool:
        return self._sequences_left <= 0

    @property
    def byte_count_max(self) -> int:
        """Worst-case memory of the grammar after all masks that were filled so far."""
        return self._byte_count + min(self.mask_count * MASK_BYTES, LEXER_BYTES_MAX)


# The items are the kind, the source, True if strict, and the cache salt.
_GrammarKey = tuple[SchemaKind, str, bool, str | None]


class GrammarCompiler:
    """Compiles schemas and grammars for one model, and caches them. Any thread may call any method.

    Args:
        tokenizer: Tokenizer of the model.
        vocab_size: Number of tokens in the vocabulary.
        end_token_ids: End tokens of the model. Empty to use the tokenizer's end tokens.
        cpu_seconds: Returns the CPU time of the calling thread so far, in seconds.

    Attributes:
        hits_total: Number of times that a grammar was found in the cache.
        compiles_total: Number of grammars that were compiled.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        end_token_ids: Collection[int],
        cpu_seconds: Callable[[], float] = time.thread_time,
    ) -> None:
        self._cpu_seconds = cpu_seconds
        self.vocab_size = vocab_size
        self.end_token_ids = tuple(end_token_ids) or _end_token_ids(tokenizer)
        self.tokenizer = tokenizer
        self._special_ids = tokenizer.special_ids()
        self._library: LLTokenizer | None = None
        self._unusable_reason: str | None = None
        self._executor: LLExecutor | None = None
        self._grammars: OrderedDict[_GrammarKey, CompiledGrammar] = OrderedDict()
        self._lock = threading.Lock()
        self._keys_lock = threading.Lock()
        self._key_tokens: KeyTokens | None = None
        self.hits_total = 0
        self.compiles_total = 0

    def load(self) -> str | None:
        """Read the vocabulary into the library. Otherwise the first compilation does so.

        Returns:
            The reason why this model's responses cannot follow a grammar, or None if they can.

        Cost: 1 s for a large vocabulary. No other thread runs meanwhile.
        """
        if self._library is None and self._unusable_reason is None:
            if not self.end_token_ids:
                self._unusable_reason = "it has no end token"
                return self._unusable_reason
            try:
                self._library = LLTokenizer(
                    self.tokenizer.serialized(), n_vocab=self.vocab_size, eos_token=list(self.end_token_ids)
                )
            except Exception as error:  # The library does not support every tokenizer.
                self._unusable_reason = f"its tokenizer is not supported for this: {in_one_line(str(error))}"
        return self._unusable_reason

    def executor(self) -> LLExecutor:
        """Return the executor that computes masks after draft tokens.

        Only the thread that fills masks calls this method.
        """
        if self._executor is None:
            self._executor = LLExecutor(1)
        return self._executor

    def find(self, structured: StructuredOutput, cache_salt: str | None = None) -> CompiledGrammar | None:
        """Return a grammar that was compiled before under the same salt, or None. Never waits for a compilation.

        Args:
            structured: The structured output that a request asks for.
            cache_salt: Salt of the request. Each salt has its own cache entries. So the time of a request does not
                reveal whether another key has sent the same schema.
        """
        key = (structured.kind, structured.source, structured.strict, cache_salt)
        with self._lock:
            compiled = self._grammars.get(key)
            if compiled is not None and compiled.is_worn_out:
                del self._grammars[key]
                compiled = None
            if compiled is not None:
                self._grammars.move_to_end(key)
                self.hits_total += 1
        return compiled

    def compile(
        self, structured: StructuredOutput, cache_salt: str | None = None, *, check: Callable[[], None] = _never_end
    ) -> CompiledGrammar:
        """Compile a grammar, unless another request has compiled the same grammar meanwhile. Releases the GIL.

        Args:
            structured: The structured output that a request asks for.
            cache_salt: Salt of the request, as in `find`.
            check: Called between two schemas of a grammar that has several. If it raises an exception, the compilation
                ends.

        Raises:
            InvalidRequest: The grammar cannot be compiled, no text can satisfy it, or its schemas take more than
                COMPILE_SECONDS_MAX. `param` names the field. The message contains the library's message.

        Cost: milliseconds for most grammars, 1 s for the largest.
        """
        began_at = self._cpu_seconds()
        compiled = self.find(structured, cache_salt)
        if compiled is not None:  # Another request has compiled the same grammar meanwhile.
            return compiled
        self.load()
        if self._library is None:
            raise InvalidRequest(
                f"the responses of this model cannot follow a schema or grammar: {self._unusable_reason}",
                param=structured.param,
            )
        try:
            ignored: list[str] = []
            grammar = grammar_source(structured, self._special_ids, self.end_token_ids, ignored)
        except ValueError as error:
            raise InvalidRequest(
                f"the {structured.kind.value} cannot be read: {in_one_line(str(error))}", param=structured.param
            ) from None
        matcher = self._begun(self._library, grammar)
        fault = matcher.get_error() if matcher.is_error() else _fault_of_forced(matcher)
        if fault:
            message = in_one_line(fault)
            raise InvalidRequest(f"the {structured.kind.value} cannot be compiled: {message}", param=structured.param)
        if structured.kind in (SchemaKind.TOOL_CALLS, SchemaKind.STRUCTURAL_TAG):
            self._check_parts(self._library, grammar, structured, began_at, check)
        byte_count = GRAMMAR_BYTES + SOURCE_CHARACTER_BYTES * len(structured.source)
        compiled = CompiledGrammar(matcher, byte_count, ignored, self._keys_of(structured, grammar))
        self._keep((structured.kind, structured.source, structured.strict, cache_salt), compiled)
        return compiled

    def _keys_of(self, structured: StructuredOutput, grammar: str) -> JsonKeys | None:
        """Return the initial state that tracks the keys of a response, or None if the response cannot repeat a key."""
        is_calls = structured.kind is SchemaKind.TOOL_CALLS
        if is_calls and not any(_FREE_TEXT.match(line) for line in structured.source.splitlines()):
            schemas = [json.loads(schema) for schema in schemas_within(structured.source, param=structured.param)]
        elif structured.kind in (SchemaKind.JSON_OBJECT, SchemaKind.JSON_SCHEMA):
            schemas = [part.get("json_schema") for part in json.loads(grammar)["grammars"]]
        else:
            return None  # In free text, braces and quotes need not belong to JSON.
        if not any(map(has_free_keys, schemas)):
            return None
        with self._keys_lock:
            if self._key_tokens is None:
                self._key_tokens = KeyTokens(self.vocab_size, self.tokenizer.token_bytes)
            return JsonKeys(self._key_tokens)

    def _begun(self, library: LLTokenizer, grammar: str) -> LLMatcher:
        matcher = LLMatcher(library, grammar, log_level=0, limits=LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()  # This call initializes the lexer that all sequences share.
        return matcher

    def _check_parts(
        self,
        library: LLTokenizer,
        grammar: str,
        structured: StructuredOutput,
        began_at: float,
        check: Callable[[], None],
    ) -> None:
        """Compile each schema of a grammar separately.

        If a schema belongs to one of several alternatives, the library notices that no value satisfies the schema only
        when a response has begun this alternative.

        Raises:
            InvalidRequest: No value satisfies one of the schemas, or compiling all schemas takes too long.
        """
        lark = grammar
        if grammar.startswith("{"):
            lark = "\n".join(part["lark_grammar"] for part in json.loads(grammar)["grammars"])
        schemas = schemas_within(lark, param=structured.param)
        for count, schema in enumerate(schemas):
            check()
            if self._cpu_seconds() - began_at > COMPILE_SECONDS_MAX:
                raise InvalidRequest(
                    f"the {structured.kind.value} has {len(schemas)} schemas, and compiling {count} of them took more "
                    f"than {COMPILE_SECONDS_MAX:g} s of CPU time, which is the limit for one request: send fewer or "
                    "simpler schemas",
                    param=structured.param,
                )
            part = self._begun(library, LLMatcher.grammar_from_json_schema(schema))
            if part.is_error() and in_one_line(part.get_error()) == NOTHING_FITS:
                shown = schema if len(schema) <= MESSAGE_CHARACTERS_MAX else f"{schema[:MESSAGE_CHARACTERS_MAX]}..."
                raise InvalidRequest(
                    f"the {structured.kind.value} cannot be compiled: nothing can satisfy the schema {shown}",
                    param=structured.param,
                )

    def _keep(self, key: _GrammarKey, compiled: CompiledGrammar) -> None:
        with self._lock:
            self.compiles_total += 1
            self._grammars.pop(key, None)
            self._grammars[key] = compiled
            byte_count = sum(structured.byte_count_max for structured in self._grammars.values())
            while byte_count > CACHE_BYTES_MAX:
                _, oldest = self._grammars.popitem(last=False)
                byte_count -= oldest.byte_count_max


def _fault_of_forced(matcher: LLMatcher) -> str:
    """Return the error of a grammar that forces endlessly many tokens, or "".

    The error occurs after its first token.
    """
    forced = matcher.compute_ff_tokens()
    if not forced:
        return ""
    copy = matcher.deep_copy()
    copy.consume_token(forced[0])
    return str(copy.get_error()) if copy.is_error() else ""


def in_one_line(message: str) -> str:
    """Return a message of the library in one line, without the dump of the parser's state."""
    line = " ".join(message.partition("<state>")[0].partition("<non-verbose")[0].split())
    if line in UNSATISFIABLE:
        return NOTHING_FITS
    return line if len(line) <= MESSAGE_CHARACTERS_MAX else f"{line[:MESSAGE_CHARACTERS_MAX]}..."


def _end_token_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    return () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
