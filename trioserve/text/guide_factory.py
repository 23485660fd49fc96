"""What a request's sampling says of its tokens, made ready for its sequences."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import reduce
from typing import Final

from llguidance import LLMatcher

from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.token_masks import mask_words
from trioserve.text.bad_words import BadWords
from trioserve.text.form_compiler import CompiledForm, FormCompiler
from trioserve.text.mask_bits import allowed_row, has_any_bit, keep_bits, row_tokens, set_all_bits
from trioserve.text.prompt_reasoning import PromptReasoning
from trioserve.text.sequence_guide import SequenceGuide
from trioserve.text.thought import Thought

__all__ = ["GuideFactory", "PreparedGuides", "is_guided"]

PATH_TOKENS_MAX: Final = 32  # at the beginning of a response: whatever goes on for so long is no contradiction
TRIED_ROWS_MAX: Final = 64  # masks of one request: each takes up to 15 ms for the most complex forms
TOKENS_SHOWN_MAX: Final = 4
BEHIND_CHARACTERS_MAX: Final = 40


def is_guided(sampling: SamplingParams) -> bool:
    """Whether anything restrains its tokens."""
    return (
        sampling.structured is not None
        or sampling.allowed_token_ids is not None
        or bool(sampling.bad_words)
        or sampling.thinking is not None
    )


class PreparedGuides:
    """Of one request: a guide for each of its sequences."""

    def __init__(self, compiler: FormCompiler, sampling: SamplingParams, form: CompiledForm | None) -> None:
        tokenizer = compiler.tokenizer
        self._compiler = compiler
        self._form = form
        self._sampling = sampling
        self._structured = sampling.structured
        self._free_until = "" if sampling.structured is None else sampling.structured.free_until
        self._allowed: bytes | None = None
        self._bad_words: BadWords | None = None
        self._thinking = sampling.thinking
        self._thought_end: tuple[int, ...] = ()
        self._thought_begin: tuple[int, ...] = ()
        if sampling.allowed_token_ids is not None:
            self._allowed = allowed_row(sampling.allowed_token_ids, mask_words(compiler.vocab_size))
        if sampling.bad_words:
            self._bad_words = BadWords(
                sampling.bad_words, lambda text: tokenizer.encode(text, add_special_tokens=False)
            )
        if sampling.thinking is not None:
            thinking = sampling.thinking
            self._thought_end = tuple(tokenizer.encode(thinking.end, add_special_tokens=False))
            self._thought_begin = tuple(tokenizer.encode(thinking.begin, add_special_tokens=False))
            self._prompt_reasoning = PromptReasoning(
                tokenizer, opening=(thinking.begin,) if thinking.begin.strip() else (), closing=(thinking.end,)
            )

    def check_restrictions(self, check: Callable[[], None]) -> None:
        """Refuse allowed_token_ids and bad_words that leave no way to write the response.

        Tries the ways to begin it, depth first, until one reaches the end of the form or PATH_TOKENS_MAX tokens. If
        TRIED_ROWS_MAX masks do not decide it, the request is accepted, and fails where it comes to a dead end.

        Args:
            check: Raises when nobody waits for the request any more.

        Raises:
            InvalidRequest: Every way to begin leads to a dead end.
        """
        if self._allowed is None and self._bad_words is None:
            return
        sampling = self._sampling
        tokens_max = PATH_TOKENS_MAX if sampling.max_tokens is None else min(PATH_TOKENS_MAX, sampling.max_tokens)
        if sampling.stop or sampling.stop_token_ids:
            tokens_max = 1  # the response may end before its form does
        matcher = None if self._form is None else self._form.new_matcher()
        written: list[int] = []
        # Tokens that are still to be tried: at the beginning, and behind each of `written`.
        ways: list[Iterator[int]] = []
        refusal: InvalidRequest | None = None  # about the first dead end
        for _ in range(TRIED_ROWS_MAX):
            check()
            row, may_end = self._row_behind(written, matcher)
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

    def _row_behind(
        self, written: Sequence[int], matcher: LLMatcher | None, *, is_restricted: bool = True
    ) -> tuple[bytes, bool]:
        """Fill a row of a mask: the tokens that may follow at the beginning of the response.

        Args:
            written: The tokens before them.
            matcher: Behind `written`. None: the response has no form.
            is_restricted: Clear the tokens that allowed_token_ids and bad_words exclude.

        Returns:
            The row, and whether the form is complete behind `written`.
        """
        compiler = self._compiler
        words = array("I", bytes(4 * mask_words(compiler.vocab_size)))
        address = words.buffer_info()[0]
        may_end = False
        if matcher is None:
            set_all_bits(address, len(words), compiler.vocab_size)
        else:
            assert self._form is not None
            self._form.mask_count += 1
            matcher.unsafe_compute_mask_ptr(address, 4 * len(words))
            may_end = matcher.is_error() or has_any_bit(address, compiler.end_token_ids)
        if is_restricted and self._allowed is not None:
            keep_bits(address, self._allowed)
        if is_restricted and self._bad_words is not None:
            state = reduce(self._bad_words.after, written, 0)
            self._bad_words.clear(address, len(words), state)
        return words.tobytes(), may_end

    def _dead_end(self, written: Sequence[int], matcher: LLMatcher | None) -> InvalidRequest:
        """The error for a response that cannot go on behind these tokens."""
        tokenizer, sampling = self._compiler.tokenizer, self._sampling
        fields = {"allowed_token_ids": sampling.allowed_token_ids, "bad_words": sampling.bad_words}
        named = [name for name, value in fields.items() if value]
        behind = tokenizer.decode(written, skip_special_tokens=False)[-BEHIND_CHARACTERS_MAX:]
        place = f"behind {behind!r}" if written else "at its beginning"
        if self._structured is None:
            return InvalidRequest(
                f"{' and '.join(named)} leave no token that may come {place}: allow more tokens", param=named[0]
            )
        wanted = list(row_tokens(self._row_behind(written, matcher, is_restricted=False)[0]))
        shown = ", ".join(f"{tokenizer.token_text(token_id)!r} ({token_id})" for token_id in wanted[:TOKENS_SHOWN_MAX])
        if len(wanted) > TOKENS_SHOWN_MAX:
            shown += f" and {len(wanted) - TOKENS_SHOWN_MAX} others"
        form = f"{self._structured.kind.value} in {self._structured.param}"
        return InvalidRequest(
            f"{' and '.join(named)} leave no response that keeps to the {form}: {place} it can go on with {shown}, and "
            f"none of these may come; allow one of them, or change the {self._structured.kind.value}",
            param=named[0],
        )

    @property
    def ignored_keywords(self) -> tuple[str, ...]:
        """Paths of the keywords of the schema that the response need not keep to."""
        if self._structured is None or self._form is None:
            return ()
        return tuple(f"{self._structured.param}.{path}" for path in self._form.ignored)

    def new_guide(self, stop_token_ids: Collection[int], prompt_token_ids: Sequence[int]) -> SequenceGuide:
        """Costs microseconds. stop_token_ids: those that end the sequence."""
        thought = None
        if self._thinking is not None:
            begins_inside = self._prompt_reasoning.begins_inside(prompt_token_ids)
            thought = Thought.behind_prompt(self._thinking, self._thought_end, begins_inside=begins_inside)
        return SequenceGuide(
            self._compiler.tokenizer,
            self._compiler.executor,
            vocab_size=self._compiler.vocab_size,
            stop_token_ids=stop_token_ids,
            end_token_ids=self._compiler.end_token_ids,
            form=self._form,
            free_until=self._free_until,
            thought=thought,
            thought_begin=self._thought_begin,
            allowed=self._allowed,
            bad_words=self._bad_words,
            keys=None if self._form is None else self._form.keys,
        )


class GuideFactory:
    def __init__(self, compiler: FormCompiler) -> None:
        self.compiler = compiler

    def find(self, sampling: SamplingParams, cache_salt: str | None = None) -> PreparedGuides | None:
        """Return what is at hand under this salt; None where there is more to do than a moment's work."""
        form = None
        if sampling.structured is not None:
            form = self.compiler.find(sampling.structured, cache_salt)
            if form is None:
                return None
        if sampling.bad_words or sampling.allowed_token_ids is not None:
            return None
        return PreparedGuides(self.compiler, sampling, form)

    def prepare(
        self, sampling: SamplingParams, cache_salt: str | None = None, check: Callable[[], None] = lambda: None
    ) -> PreparedGuides:
        """Compile what a request needs, in a thread for that (FormCompiler.compile).

        Args:
            check: raises when nobody waits for it any more.

        Raises:
            InvalidRequest: it cannot be compiled, or allowed_token_ids and bad_words leave no way to write it.
        """
        check()
        form = (
            None if sampling.structured is None else self.compiler.compile(sampling.structured, cache_salt, check=check)
        )
        prepared = PreparedGuides(self.compiler, sampling, form)
        prepared.check_restrictions(check)
        return prepared
