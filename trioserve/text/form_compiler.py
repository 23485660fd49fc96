"""Compiles forms into matchers of llguidance for one model, and keeps those that are used.

Everything that compiling may use has a bound: characters of the source (contracts.structured_output), the library's
fuel for its lexer and parser, and the stack, since it walks rules and references by recursion: whoever calls `compile`
does so in a thread with form_bounds.COMPILE_STACK_BYTES.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence

from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.structured_output import FormKind, StructuredOutput
from trioserve.text.form_bounds import schemas_within
from trioserve.text.form_grammar import form_grammar
from trioserve.text.json_keys import JsonKeys, KeyTokens, has_free_keys
from trioserve.text.tokenizer import Tokenizer

__all__ = ["CACHE_BYTES_MAX", "COMPILE_SECONDS_MAX", "CompiledForm", "FormCompiler", "in_one_line"]

CACHE_BYTES_MAX = 2**30  # reckoned at the worst (CompiledForm.byte_count_max), of which ordinary forms take a hundredth
FORM_SEQUENCES_MAX = 2000
# Measured with a regex that makes new states with each token, up to max_lexer_states.
MASK_BYTES = 36_000
LEXER_BYTES_MAX = 20 * 2**20
FORM_BYTES = 98_304  # what a small grammar takes, compiled: measured
SOURCE_CHARACTER_BYTES = 150  # and what each character of a large one adds
MESSAGE_CHARACTERS_MAX = 300
# Of one request with many schemas: 128 tools with schemas of 2,000 characters take a fifth of it on a slow machine.
COMPILE_SECONDS_MAX = 3.0
UNSATISFIABLE = ("NoExtension", "NoExtensionBias")  # as the library calls it
NOTHING_FITS = "nothing can satisfy it"  # and we
LIMITS = LLParserLimits(
    max_items_in_row=2000,
    initial_lexer_fuel=1_000_000,  # 20 ms
    step_lexer_fuel=200_000,  # 15 ms for a mask
    step_max_items=10_000,  # 20 ms where one token after another is forced, which the event loop waits for
    max_lexer_states=20_000,  # of one or two kB each
    max_grammar_size=500_000,
    verbose_errors=False,
)


_FREE_TEXT = re.compile(r"\w+(\[\w+\])?: /")
"""A line of a form of tool calls: a terminal that is no fixed text."""


def _go_on() -> None:
    """Nobody asks the compile to end."""


class CompiledForm:
    """Shared by all that have the form; and with it its lexer, which grows as masks are filled, and fails them all once
    it has too many states. So a form wears out: with some thousand sequences, and with the first that fails. Whoever
    wants it then compiles it anew; those that have it go on.

    mask_count: how many masks were filled with it; whoever fills them counts. ignored: paths of the keywords of its
    schemas that it does not keep to. keys: follows the keys of a response, if it is JSON and may repeat some.
    """

    def __init__(
        self, matcher: LLMatcher, byte_count: int, ignored: Sequence[str] = (), keys: JsonKeys | None = None
    ) -> None:
        self._matcher = matcher
        self.keys = keys
        self.ignored = tuple(ignored)
        self._byte_count = byte_count
        self._sequences_left = FORM_SEQUENCES_MAX
        self.mask_count = 0

    def new_matcher(self) -> LLMatcher:
        """For one sequence; costs microseconds."""
        self._sequences_left -= 1
        return self._matcher.deep_copy()

    def wear_out(self) -> None:
        """It has failed a sequence. In any thread."""
        self._sequences_left = 0

    @property
    def is_worn_out(self) -> bool:
        return self._sequences_left <= 0

    @property
    def byte_count_max(self) -> int:
        """What it takes at the worst, used as much as it was."""
        return self._byte_count + min(self.mask_count * MASK_BYTES, LEXER_BYTES_MAX)


_FormKey = tuple[FormKind, str, bool, str | None]  # strict or not, and the cache salt


class FormCompiler:
    """Any method may be called from any thread. hits_total, compiles_total: how often a form was found, and made."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        end_token_ids: Collection[int],
        cpu_seconds: Callable[[], float] = time.thread_time,
    ) -> None:
        """
        Args:
            end_token_ids: those of the model; without any, those of the tokenizer.
            cpu_seconds: CPU time that the calling thread has used so far.
        """
        self._cpu_seconds = cpu_seconds
        self.vocab_size = vocab_size
        self.end_token_ids = tuple(end_token_ids) or _end_token_ids(tokenizer)
        self.tokenizer = tokenizer
        self._special_ids = tokenizer.special_ids()
        self._library: LLTokenizer | None = None
        self._why_none: str | None = None
        self._executor: LLExecutor | None = None
        self._forms: OrderedDict[_FormKey, CompiledForm] = OrderedDict()
        self._lock = threading.Lock()
        self._keys_lock = threading.Lock()
        self._key_tokens: KeyTokens | None = None
        self.hits_total = 0
        self.compiles_total = 0

    def load(self) -> str | None:
        """Read the vocabulary, which the first compile does otherwise: a second for a large one, in which no other
        thread runs. Returns why this model's responses can have no form; None: they can."""
        if self._library is None and self._why_none is None:
            if not self.end_token_ids:
                self._why_none = "it has no end token"
                return self._why_none
            try:
                self._library = LLTokenizer(
                    self.tokenizer.serialized(), n_vocab=self.vocab_size, eos_token=list(self.end_token_ids)
                )
            except Exception as error:  # whatever the library does not know of tokenizers
                self._why_none = f"its tokenizer cannot be read for that: {in_one_line(str(error))}"
        return self._why_none

    def executor(self) -> LLExecutor:
        """For masks behind draft tokens. In the thread of masks alone."""
        if self._executor is None:
            self._executor = LLExecutor(1)
        return self._executor

    def find(self, form: StructuredOutput, cache_salt: str | None = None) -> CompiledForm | None:
        """Return the grammar that was compiled before under the same salt. Never waits for a compile.

        Args:
            cache_salt: of the request. Other salts have other entries, so that the time of a request does not show
                whether another key has sent the schema.
        """
        key = (form.kind, form.source, form.strict, cache_salt)
        with self._lock:
            compiled = self._forms.get(key)
            if compiled is not None and compiled.is_worn_out:
                del self._forms[key]
                compiled = None
            if compiled is not None:
                self._forms.move_to_end(key)
                self.hits_total += 1
        return compiled

    def compile(
        self, form: StructuredOutput, cache_salt: str | None = None, *, check: Callable[[], None] = _go_on
    ) -> CompiledForm:
        """Compile a form, or find it where another request has asked for it meanwhile. Lets go of the GIL.

        Args:
            cache_salt: as in find.
            check: called between the parts of a form that has many. What it raises ends the compile.

        Raises:
            InvalidRequest: it cannot be compiled, nothing can satisfy it, or its schemas take more than
                COMPILE_SECONDS_MAX. `param` is the field; the message has the library's words.

        Cost: milliseconds for most, a second for the largest grammar.
        """
        began_at = self._cpu_seconds()
        compiled = self.find(form, cache_salt)
        if compiled is not None:  # another has asked for it meanwhile
            return compiled
        self.load()
        if self._library is None:
            raise InvalidRequest(f"the responses of this model can have no form: {self._why_none}", param=form.param)
        try:
            ignored: list[str] = []
            grammar = form_grammar(form, self._special_ids, self.end_token_ids, ignored)
        except ValueError as error:
            raise InvalidRequest(
                f"the {form.kind.value} cannot be read: {in_one_line(str(error))}", param=form.param
            ) from None
        matcher = self._begun(self._library, grammar)
        fault = matcher.get_error() if matcher.is_error() else _fault_of_forced(matcher)
        if fault:
            message = in_one_line(fault)
            raise InvalidRequest(f"the {form.kind.value} cannot be compiled: {message}", param=form.param)
        if form.kind in (FormKind.TOOL_CALLS, FormKind.STRUCTURAL_TAG):
            self._check_parts(self._library, grammar, form, began_at, check)
        byte_count = FORM_BYTES + SOURCE_CHARACTER_BYTES * len(form.source)
        compiled = CompiledForm(matcher, byte_count, ignored, self._keys_of(form, grammar))
        self._keep((form.kind, form.source, form.strict, cache_salt), compiled)
        return compiled

    def _keys_of(self, form: StructuredOutput, grammar: str) -> JsonKeys | None:
        """A scanner for responses that may repeat keys, at their beginning."""
        is_calls = form.kind is FormKind.TOOL_CALLS
        if is_calls and not any(_FREE_TEXT.match(line) for line in form.source.splitlines()):
            schemas = [json.loads(schema) for schema in schemas_within(form.source, param=form.param)]
        elif form.kind in (FormKind.JSON_OBJECT, FormKind.JSON_SCHEMA):
            schemas = [part.get("json_schema") for part in json.loads(grammar)["grammars"]]
        else:
            return None  # what stands in free text may be no JSON
        if not any(map(has_free_keys, schemas)):
            return None
        with self._keys_lock:
            if self._key_tokens is None:
                self._key_tokens = KeyTokens(self.vocab_size, self.tokenizer.token_bytes)
            return JsonKeys(self._key_tokens)

    def _begun(self, library: LLTokenizer, grammar: str) -> LLMatcher:
        matcher = LLMatcher(library, grammar, log_level=0, limits=LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()  # begins its lexer, for all that share it
        return matcher

    def _check_parts(
        self, library: LLTokenizer, grammar: str, form: StructuredOutput, began_at: float, check: Callable[[], None]
    ) -> None:
        """Compile each schema of a grammar by itself: where a schema comes behind a choice, the library notices that
        nothing satisfies it only when a response has chosen it.

        Raises:
            InvalidRequest: nothing satisfies one of them, or all of them take too long.
        """
        lark = grammar
        if grammar.startswith("{"):
            lark = "\n".join(part["lark_grammar"] for part in json.loads(grammar)["grammars"])
        schemas = schemas_within(lark, param=form.param)
        for count, schema in enumerate(schemas):
            check()
            if self._cpu_seconds() - began_at > COMPILE_SECONDS_MAX:
                raise InvalidRequest(
                    f"the {form.kind.value} has {len(schemas)} schemas, and compiling {count} of them took more than "
                    f"{COMPILE_SECONDS_MAX:g} s of CPU time, which is the most for one request: send fewer or simpler "
                    "ones",
                    param=form.param,
                )
            part = self._begun(library, LLMatcher.grammar_from_json_schema(schema))
            if part.is_error() and in_one_line(part.get_error()) == NOTHING_FITS:
                shown = schema if len(schema) <= MESSAGE_CHARACTERS_MAX else f"{schema[:MESSAGE_CHARACTERS_MAX]}..."
                raise InvalidRequest(
                    f"the {form.kind.value} cannot be compiled: nothing can satisfy the schema {shown}",
                    param=form.param,
                )

    def _keep(self, key: _FormKey, compiled: CompiledForm) -> None:
        with self._lock:
            self.compiles_total += 1
            self._forms.pop(key, None)
            self._forms[key] = compiled
            byte_count = sum(form.byte_count_max for form in self._forms.values())
            while byte_count > CACHE_BYTES_MAX:
                _, oldest = self._forms.popitem(last=False)
                byte_count -= oldest.byte_count_max


def _fault_of_forced(matcher: LLMatcher) -> str:
    """What a grammar that forces tokens without an end fails with as soon as the first has come; else empty."""
    forced = matcher.compute_ff_tokens()
    if not forced:
        return ""
    copy = matcher.deep_copy()
    copy.consume_token(forced[0])
    return str(copy.get_error()) if copy.is_error() else ""


def in_one_line(message: str) -> str:
    """What the library says, without the pictures that it draws."""
    line = " ".join(message.partition("<state>")[0].partition("<non-verbose")[0].split())
    if line in UNSATISFIABLE:
        return NOTHING_FITS
    return line if len(line) <= MESSAGE_CHARACTERS_MAX else f"{line[:MESSAGE_CHARACTERS_MAX]}..."


def _end_token_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    return () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
