"""Prepares the guides of a request: its compiled grammar, allowed tokens, bad words and limits of reasoning."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import reduce
from typing import Final

from llguidance import LLMatcher

from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.guide import mask_words
from trioserve.contracts.sampling import SamplingParams
from trioserve.text.grammar_compiler import CompiledGrammar, GrammarCompiler
from trioserve.text.mask_bits import allowed_row, has_any_bit, keep_bits, row_tokens, set_all_bits
from trioserve.text.reasoning_state import PromptReasoning, ReasoningState
from trioserve.text.sequence_guide import SequenceGuide
from trioserve.text.stop_strings import BadWords

__all__ = ["GuideFactory", "PreparedGuides", "is_guided"]

PATH_TOKENS_MAX: Final = 32  # If the restraints allow a beginning of this many tokens, they count as satisfiable.
# Maximum number of masks that are tried per request. For the most complex grammars, each mask takes up to 15 ms.
TRIED_ROWS_MAX: Final = 64
TOKENS_SHOWN_MAX: Final = 4
SHOWN_CHARACTERS_MAX: Final = 40


def is_guided(sampling: SamplingParams) -> bool:
    """Return True if the sampling parameters restrain the tokens of a response.

    Args:
        sampling: Sampling parameters of the request.
    """
    return (
        sampling.structured is not None
        or sampling.allowed_token_ids is not None
        or bool(sampling.bad_words)
        or sampling.thinking is not None
    )


class PreparedGuides:
    """Makes the guides of one request. Each sequence gets its own guide.

    Args:
        compiler: Compiler for the model.
        sampling: Sampling parameters of the request.
        grammar: The compiled grammar, or None.
    """

    def __init__(self, compiler: GrammarCompiler, sampling: SamplingParams, grammar: CompiledGrammar | None) -> None:
        tokenizer = compiler.tokenizer
        self._compiler = compiler
        self._grammar = grammar
        self._sampling = sampling
        self._structured = sampling.structured
        self._free_until = "" if sampling.structured is None else sampling.structured.free_until
        self._allowed: bytes | None = None
        self._bad_words: BadWords | None = None
        self._thinking = sampling.thinking
        self._reasoning_end: tuple[int, ...] = ()
        self._reasoning_begin: tuple[int, ...] = ()
        if sampling.allowed_token_ids is not None:
            self._allowed = allowed_row(sampling.allowed_token_ids, mask_words(compiler.vocab_size))
        if sampling.bad_words:
            self._bad_words = BadWords(
                sampling.bad_words, lambda text: tokenizer.encode(text, add_special_tokens=False)
            )
        if sampling.thinking is not None:
            thinking = sampling.thinking
            self._reasoning_end = tuple(tokenizer.encode(thinking.end, add_special_tokens=False))
            self._reasoning_begin = tuple(tokenizer.encode(thinking.begin, add_special_tokens=False))
            self._prompt_reasoning = PromptReasoning(
                tokenizer, opening=(thinking.begin,) if thinking.begin.strip() else (), closing=(thinking.end,)
            )

    def check_restrictions(self, check: Callable[[], None]) -> None:
        """Refuse allowed_token_ids and bad_words that make every response impossible.

        Tries the possible beginnings, depth first, until one of them completes the grammar or has PATH_TOKENS_MAX
        tokens. If TRIED_ROWS_MAX masks give no result, the request is accepted. It may later fail when no token is
        allowed.

        Args:
            check: Raises an exception if the request was cancelled.

        Raises:
            InvalidRequest: No beginning can be completed.
        """
        if self._allowed is None and self._bad_words is None:
            return
        sampling = self._sampling
        tokens_max = PATH_TOKENS_MAX if sampling.max_tokens is None else min(PATH_TOKENS_MAX, sampling.max_tokens)
        if sampling.stop or sampling.stop_token_ids:
            tokens_max = 1  # A stop string or stop token may end the response before its grammar is complete.
        matcher = None if self._grammar is None else self._grammar.new_matcher()
        written: list[int] = []
        # For the beginning and for each token of `written`, the next tokens that still have to be tried.
        ways: list[Iterator[int]] = []
        refusal: InvalidRequest | None = None  # Error for the first beginning after which no token is allowed.
        for _ in range(TRIED_ROWS_MAX):
            check()
            row, may_end = self._row_after(written, matcher)
            if may_end:
                return
            if refusal is None and not any(row):
                refusal = self._dead_end(written, matcher)
            ways.append(row_tokens(row))
            while (token_id := next(ways[-1], None)) is None:
                ways.pop()
                if not ways:
                    assert refusal is not None
                    raise refusal
                written.pop()
                if matcher is not None:
                    matcher.rollback(1)
            written.append(token_id)
            if len(written) >= tokens_max or (matcher is not None and not matcher.consume_token(token_id)):
                return

    def _row_after(
        self, written: Sequence[int], matcher: LLMatcher | None, *, is_restricted: bool = True
    ) -> tuple[bytes, bool]:
        """Make a mask row of the tokens that are allowed after the first tokens of a response.

        Args:
            written: The first tokens of the response.
            matcher: Matcher after `written`, or None if the response has no grammar.
            is_restricted: True to clear the tokens that allowed_token_ids and bad_words exclude.

        Returns:
            The row, and True if the grammar is complete after `written`.
        """
        compiler = self._compiler
        words = array("I", bytes(4 * mask_words(compiler.vocab_size)))
        address = words.buffer_info()[0]
        may_end = False
        if matcher is None:
            set_all_bits(address, len(words), compiler.vocab_size)
        else:
            assert self._grammar is not None
            self._grammar.mask_count += 1
            matcher.unsafe_compute_mask_ptr(address, 4 * len(words))
            may_end = matcher.is_error() or has_any_bit(address, compiler.end_token_ids)
        if is_restricted and self._allowed is not None:
            keep_bits(address, self._allowed)
        if is_restricted and self._bad_words is not None:
            state = reduce(self._bad_words.after, written, 0)
            self._bad_words.clear(address, len(words), state)
        return words.tobytes(), may_end

    def _dead_end(self, written: Sequence[int], matcher: LLMatcher | None) -> InvalidRequest:
        """Return the error for a response that cannot continue after the tokens in `written`."""
        tokenizer, sampling = self._compiler.tokenizer, self._sampling
        fields = {"allowed_token_ids": sampling.allowed_token_ids, "bad_words": sampling.bad_words}
        named = [name for name, value in fields.items() if value]
        written_text = tokenizer.decode(written, skip_special_tokens=False)[-SHOWN_CHARACTERS_MAX:]
        place = f"after {written_text!r}" if written else "at the beginning of the response"
        if self._structured is None:
            return InvalidRequest(f"{' and '.join(named)} allow no token {place}: allow more tokens", param=named[0])
        wanted = list(row_tokens(self._row_after(written, matcher, is_restricted=False)[0]))
        shown = ", ".join(f"{tokenizer.token_text(token_id)!r} ({token_id})" for token_id in wanted[:TOKENS_SHOWN_MAX])
        if len(wanted) > TOKENS_SHOWN_MAX:
            shown += f" and {len(wanted) - TOKENS_SHOWN_MAX} others"
        return InvalidRequest(
            f"{' and '.join(named)} leave no response that follows the {self._structured.kind.value} in "
            f"{self._structured.param}: {place} it requires {shown}, and none of these tokens is allowed; allow one of "
            f"them, or change the {self._structured.kind.value}",
            param=named[0],
        )

    @property
    def ignored_keywords(self) -> tuple[str, ...]:
        """Paths of the schema keywords that the response is not forced to follow."""
        if self._structured is None or self._grammar is None:
            return ()
        return tuple(f"{self._structured.param}.{path}" for path in self._grammar.ignored)

    def new_guide(self, stop_token_ids: Collection[int], prompt_token_ids: Sequence[int]) -> SequenceGuide:
        """Make the guide of one sequence. This takes microseconds.

        Args:
            stop_token_ids: Tokens that end the sequence.
            prompt_token_ids: Tokens of the prompt, which show whether the prompt has opened reasoning.
        """
        reasoning = None
        if self._thinking is not None:
            begins_inside = self._prompt_reasoning.begins_inside(prompt_token_ids)
            reasoning = ReasoningState.after_prompt(self._thinking, self._reasoning_end, begins_inside=begins_inside)
        return SequenceGuide(
            self._compiler.tokenizer,
            self._compiler.executor,
            vocab_size=self._compiler.vocab_size,
            stop_token_ids=stop_token_ids,
            end_token_ids=self._compiler.end_token_ids,
            grammar=self._grammar,
            free_until=self._free_until,
            reasoning=reasoning,
            reasoning_begin=self._reasoning_begin,
            allowed=self._allowed,
            bad_words=self._bad_words,
            keys=None if self._grammar is None else self._grammar.keys,
        )


class GuideFactory:
    """Prepares guides for requests of one model.

    Args:
        compiler: Compiler for the model.
    """

    def __init__(self, compiler: GrammarCompiler) -> None:
        self.compiler = compiler

    def find(self, sampling: SamplingParams, cache_salt: str | None = None) -> PreparedGuides | None:
        """Return the guides of a request if preparing them takes no noticeable time, otherwise None.

        Args:
            sampling: Sampling parameters of the request.
            cache_salt: Salt of the request, as in GrammarCompiler.find.
        """
        grammar = None
        if sampling.structured is not None:
            grammar = self.compiler.find(sampling.structured, cache_salt)
            if grammar is None:
                return None
        if sampling.bad_words or sampling.allowed_token_ids is not None:
            return None
        return PreparedGuides(self.compiler, sampling, grammar)

    def prepare(
        self, sampling: SamplingParams, cache_salt: str | None = None, check: Callable[[], None] = lambda: None
    ) -> PreparedGuides:
        """Compile and check the restraints of a request.

        Call this method in a thread with a large stack, like GrammarCompiler.compile.

        Args:
            sampling: Sampling parameters of the request.
            cache_salt: Salt of the request, as in GrammarCompiler.find.
            check: Raises an exception if the request was cancelled.

        Raises:
            InvalidRequest: The grammar cannot be compiled, or allowed_token_ids and bad_words allow no response that
                follows the grammar.
        """
        check()
        grammar = (
            None if sampling.structured is None else self.compiler.compile(sampling.structured, cache_salt, check=check)
        )
        prepared = PreparedGuides(self.compiler, sampling, grammar)
        prepared.check_restrictions(check)
        return prepared
