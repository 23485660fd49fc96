"""What a request's sampling says of its tokens, made ready for its sequences."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.token_masks import mask_words
from trioserve.text.bad_words import BadWords
from trioserve.text.form_compiler import CompiledForm, FormCompiler
from trioserve.text.mask_bits import allowed_row
from trioserve.text.prompt_reasoning import PromptReasoning
from trioserve.text.sequence_guide import SequenceGuide
from trioserve.text.thought import Thought

__all__ = ["GuideFactory", "PreparedGuides", "is_guided"]


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
            InvalidRequest: it cannot be compiled.
        """
        check()
        form = (
            None if sampling.structured is None else self.compiler.compile(sampling.structured, cache_salt, check=check)
        )
        return PreparedGuides(self.compiler, sampling, form)
