"""Guide of one sequence: combines its grammar, the state of its reasoning, its allowed tokens and its bad words.

A token is allowed if all these restraints allow the token. While the end of reasoning is forced, the other restraints
do not apply. A grammar may begin after reasoning. Before the grammar begins, the response cannot end. If the response
may begin either with reasoning or with text of the grammar, the guide tracks both possibilities until a token belongs
to only one of them. Meanwhile the opening tag of reasoning must consist of the tokens with which the tokenizer encodes
it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Sequence

from llguidance import LLExecutor, LLMatcher

from trioserve.text.grammar_compiler import CompiledGrammar, in_one_line
from trioserve.text.json_keys import JsonKeys
from trioserve.text.mask_bits import (
    clear_bits,
    has_any_bit,
    has_bit,
    is_row_empty,
    keep_bits,
    set_all_bits,
    set_bits,
)
from trioserve.text.reasoning_state import ReasoningPhase, ReasoningState, TextFinder
from trioserve.text.stop_strings import BadWords
from trioserve.text.tokenizer import Tokenizer

__all__ = ["SequenceGuide"]


class SequenceGuide:
    """Implements contracts.guide.Guide for one sequence.

    Args:
        tokenizer: Tokenizer of the model.
        executor: Returns the library's executor, which computes masks after draft tokens.
        vocab_size: Number of tokens in the vocabulary.
        stop_token_ids: Tokens that end the sequence. Each is allowed where the grammar may end.
        end_token_ids: Tokens that the matcher treats as the end of the response.
        grammar: The compiled grammar, or None.
        free_until: The grammar begins after this text. Empty if the grammar begins with the response.
        reasoning: State of the reasoning, or None if the response has none.
        reasoning_begin: Tokens of the opening tag of reasoning.
        allowed: Mask row, as bytes, with the bits of the only allowed tokens. None to allow all tokens.
        bad_words: Bad words of the request, or None.
        keys: Tracks the keys of a JSON response, or None if no key can be repeated.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        executor: Callable[[], LLExecutor],
        *,
        vocab_size: int,
        stop_token_ids: Collection[int],
        end_token_ids: Collection[int],
        grammar: CompiledGrammar | None = None,
        free_until: str = "",
        reasoning: ReasoningState | None = None,
        reasoning_begin: Sequence[int] = (),
        allowed: bytes | None = None,
        bad_words: BadWords | None = None,
        keys: JsonKeys | None = None,
    ) -> None:
        self.fault: str | None = None
        self._tokenizer = tokenizer
        self._executor = executor
        self._vocab_size = vocab_size
        self._stop_token_ids = stop_token_ids
        self._end_token_ids = end_token_ids
        self._ignored_ids = [token_id for token_id in end_token_ids if token_id not in stop_token_ids]
        self._grammar = grammar
        self._matcher = None if grammar is None else grammar.new_matcher()
        self._gate = TextFinder(free_until.encode()) if grammar is not None and free_until else None
        self._reasoning = reasoning
        # Rest of the opening tag of reasoning, while the response may begin with reasoning or with text of the grammar.
        # None at any other time.
        self._opening: tuple[int, ...] | None = None
        if self._gate is not None and reasoning is not None and free_until == reasoning.end_text:
            if reasoning.phase is ReasoningPhase.OVER:
                self._gate = None
            elif reasoning.phase is ReasoningPhase.BEFORE and reasoning_begin:
                self._opening = tuple(reasoning_begin)
        self._may_be_grammar = True  # True while the tokens so far may begin a text of the grammar.
        self._is_end_due = False
        self._allowed = allowed
        self._bad_words = bad_words
        self._written = 0  # State of the bad words after the tokens so far.
        self._keys = self._no_keys = keys

    def end_reasoning(self) -> bool:
        """Force the end of the response's reasoning. This may be called at any time in the core's thread.

        Returns:
            False if the response has no reasoning, or its reasoning has already ended.
        """
        if self._reasoning is None or self._reasoning.phase is ReasoningPhase.OVER:
            return False
        self._is_end_due = True
        return True

    # --- Guide ---

    @property
    def is_free_ahead(self) -> bool:
        return (
            self._matcher is None
            and self._allowed is None
            and self._bad_words is None
            and (self._reasoning is None or not self._reasoning.may_end_within(1))
        )

    def wants_mask(self, draft: Sequence[int]) -> bool:
        if self._allowed is not None:
            return True
        if self._matcher is not None:
            return True
        if self._bad_words is not None and (draft or self._bad_words.bars_any(self._written)):
            return True
        reasoning = self._reasoning
        if reasoning is None or reasoning.phase is ReasoningPhase.OVER:
            return False
        return bool(reasoning.forced) or (bool(draft) and (self._is_end_due or reasoning.may_end_within(len(draft))))

    @property
    def is_over(self) -> bool:
        return self._matcher is not None and self._gate is None and self._matcher.is_stopped()

    def accept(self, token_id: int) -> bool:
        piece = self._tokenizer.token_bytes(token_id)
        is_consumed = self._opening is not None and self._open(token_id, self._opening)
        if self._reasoning is not None:
            self._reasoning = self._reasoning.after(token_id, piece, is_end_due=self._is_end_due)
        self._written = self._bad_words_after(token_id, self._written)
        if self._gate is not None:
            self._pass_gate(self._gate.after(piece))
        elif self._matcher is not None and not is_consumed:
            if not self._matcher.consume_token(token_id):
                self._note_fault(self._matcher)
            elif self._keys is not None:
                self._keys = self._keys.after(piece)
        return self.fault is None

    def forced_tokens(self, count_max: int) -> tuple[int, ...]:
        reasoning = self._reasoning
        if reasoning is not None and reasoning.forced:
            return reasoning.forced[:count_max]
        if self._opening is not None and not self._may_be_grammar:
            return self._opening[:count_max]
        if self._matcher is None or self._gate is not None or self._allowed is not None or self._bad_words is not None:
            return ()
        forced = self._matcher.compute_ff_tokens()[:count_max]
        return tuple(forced[: self._new_keys_count(forced, is_draft=False)])

    def acceptable_count(self, token_ids: Sequence[int]) -> int:
        if self._opening is not None:
            return 0
        matcher = self._matcher
        gate, reasoning, written = self._gate, self._reasoning, self._written
        for count, token_id in enumerate(token_ids):
            if not self._is_allowed(token_id, reasoning, written):
                return count
            if matcher is not None and gate is None:
                # The grammar has begun, so it checks this token and all later draft tokens.
                valid = matcher.validate_tokens(list(token_ids[count:]))
                valid = self._new_keys_count(token_ids[count : count + valid], is_draft=True)
                return count + self._others_acceptable(token_ids[count : count + valid], reasoning, written)
            piece = self._tokenizer.token_bytes(token_id)
            gate, reasoning = self._states_after(token_id, piece, gate, reasoning)
            written = self._bad_words_after(token_id, written)
            if gate is not None and gate.is_found:
                return count  # Later tokens can be checked only after this token was accepted.
        return len(token_ids)

    def fill_masks(self, address: int, words_per_row: int, draft: Sequence[int]) -> None:
        row_bytes = 4 * words_per_row
        gate, reasoning, written = self._gate, self._reasoning, self._written
        keys = self._keys
        filled_from = None  # Index of the first row that the grammar has filled.
        for row in range(1 + len(draft)):
            at = address + row * row_bytes
            may_end = False  # True if the response may end before the token of this row.
            if reasoning is not None and reasoning.forced:
                ctypes.memset(at, 0, row_bytes)
                set_bits(at, (reasoning.forced[0],))
            else:
                if self._opening is not None and self._matcher is not None:
                    self._fill_opening(self._matcher, self._opening, at, row_bytes)
                elif self._matcher is None or gate is not None:
                    set_all_bits(at, words_per_row, self._vocab_size)
                    if gate is not None:
                        clear_bits(at, self._end_token_ids)
                else:
                    if filled_from is None:
                        filled_from = row
                        self._fill_grammar(self._matcher, at, row_bytes, draft[row:])
                    may_end = self._allow_end(at)
                    if keys is not None:
                        self._prune_keys(keys, at, words_per_row, is_next=row == 0)
                if self._allowed is not None or self._bad_words is not None:
                    self._restrict(at, words_per_row, written, may_end=may_end, is_next=row == 0)
            if row < len(draft):
                token_id = draft[row]
                piece = self._tokenizer.token_bytes(token_id)
                gate, reasoning = self._states_after(token_id, piece, gate, reasoning)
                written = self._bad_words_after(token_id, written)
                if keys is not None and filled_from is not None:
                    keys = keys.after(piece)

    # --- private ---

    def _open(self, token_id: int, opening: Sequence[int]) -> bool:
        """Accept a token while the response may still begin with reasoning or with text of the grammar.

        Args:
            opening: Rest of the opening tag of reasoning.

        Returns:
            True if the token belongs to the grammar. The matcher has then consumed it.
        """
        assert self._grammar is not None
        assert self._matcher is not None
        first, *rest = opening
        is_grammar = self._may_be_grammar and self._matcher.validate_tokens([token_id]) == 1
        if token_id != first:
            self._opening = self._gate = None
        elif rest and is_grammar:
            self._opening = tuple(rest)
        else:
            # The response begins with reasoning, since the tokens so far do not belong to the grammar.
            self._opening = tuple(rest) or None
            self._matcher = self._grammar.new_matcher()
            self._may_be_grammar = False
            self._keys = self._no_keys
            return False
        if is_grammar:
            self._matcher.consume_token(token_id)
            if self._keys is not None:
                self._keys = self._keys.after(self._tokenizer.token_bytes(token_id))
        return is_grammar

    def _fill_opening(self, matcher: LLMatcher, opening: Sequence[int], address: int, row_bytes: int) -> None:
        if self._may_be_grammar:
            self._fill_grammar(matcher, address, row_bytes, ())
            self._allow_end(address)
        else:
            ctypes.memset(address, 0, row_bytes)
        set_bits(address, (opening[0],))

    def _pass_gate(self, gate: TextFinder) -> None:
        """Set the finder of `free_until` after one more token, and begin the grammar if the text was found.

        The grammar begins with the next token. If the current token contains text after `free_until`, the grammar
        begins with that text if it allows the text.
        """
        if not gate.is_found:
            self._gate = gate
            return
        self._gate = None
        assert self._matcher is not None
        if gate.rest.strip():
            tokens = self._tokenizer.encode(gate.rest.decode("utf-8", "ignore"), add_special_tokens=False)
            if self._matcher.validate_tokens(tokens) == len(tokens):
                self._matcher.consume_tokens(tokens)
                if self._keys is not None:
                    self._keys = self._keys.after(gate.rest)

    def _states_after(
        self, token_id: int, piece: bytes, gate: TextFinder | None, reasoning: ReasoningState | None
    ) -> tuple[TextFinder | None, ReasoningState | None]:
        """Return the finder of `free_until` and the state of reasoning after one more token."""
        if gate is not None:
            gate = gate.after(piece)
        if reasoning is not None:
            reasoning = reasoning.after(token_id, piece, is_end_due=self._is_end_due)
        return gate, reasoning

    def _bad_words_after(self, token_id: int, written: int) -> int:
        """Return the state of the bad words after one more token."""
        return written if self._bad_words is None else self._bad_words.after(written, token_id)

    def _is_allowed(self, token_id: int, reasoning: ReasoningState | None, written: int) -> bool:
        if reasoning is not None and reasoning.forced:
            return token_id == reasoning.forced[0]
        if self._allowed is not None and not has_bit(self._allowed, token_id):
            return False
        return self._bad_words is None or not self._bad_words.is_barred(written, token_id)

    def _others_acceptable(self, token_ids: Sequence[int], reasoning: ReasoningState | None, written: int) -> int:
        for count, token_id in enumerate(token_ids):
            if not self._is_allowed(token_id, reasoning, written):
                return count
            if reasoning is not None:
                reasoning = reasoning.after(
                    token_id, self._tokenizer.token_bytes(token_id), is_end_due=self._is_end_due
                )
            written = self._bad_words_after(token_id, written)
        return len(token_ids)

    def _fill_grammar(self, matcher: LLMatcher, address: int, row_bytes: int, draft: Sequence[int]) -> None:
        if draft:
            ctypes.memset(address, 0, row_bytes * (1 + len(draft)))
            rows = [(matcher, 0, list(draft))]
            self._executor().unsafe_compute_mask_ptr_with_draft_token(rows, address, row_bytes, 1 + len(draft))
        else:
            matcher.unsafe_compute_mask_ptr(address, row_bytes)
        assert self._grammar is not None
        self._grammar.mask_count += 1 + len(draft)
        if matcher.is_error():
            self._note_fault(matcher)
            ctypes.memset(address, 0, row_bytes * (1 + len(draft)))

    def _allow_end(self, address: int) -> bool:
        """If the grammar may end now, allow every stop token, and clear the end tokens that do not end the sequence.

        Returns:
            True if the grammar may end now.
        """
        if not has_any_bit(address, self._end_token_ids):
            return False
        clear_bits(address, self._ignored_ids)
        set_bits(address, self._stop_token_ids)
        return True

    def _restrict(self, address: int, words_per_row: int, written: int, *, may_end: bool, is_next: bool) -> None:
        """Clear the tokens that are not in allowed_token_ids or that are barred by bad_words.

        If this clears all tokens and the grammar may end now, allow the stop tokens, so that the response ends.

        Args:
            address: Memory address of the row. The row has all bits of the other restraints.
            words_per_row: Number of uint32 words in the row.
            written: State of the bad words.
            may_end: True if the grammar may end before the row's token.
            is_next: True if the row is for the next token. If such a row becomes empty, the fault of this guide is set.
        """
        if self._allowed is not None:
            keep_bits(address, self._allowed)
        if self._bad_words is not None:
            self._bad_words.clear(address, words_per_row, written)
        if not is_row_empty(address, words_per_row):
            return
        if may_end:
            set_bits(address, self._stop_token_ids or self._end_token_ids)
        elif is_next and self.fault is None:
            what = "of its schema or grammar" if self._matcher is not None else "of the vocabulary"
            self.fault = (
                f"the response cannot continue: under {self._restrictions}, no token {what} is allowed here; allow "
                "more tokens, or change the schema or grammar"
            )

    def _prune_keys(self, keys: JsonKeys, address: int, words_per_row: int, *, is_next: bool) -> None:
        """Clear the tokens that would repeat a key of an open object.

        The arguments have the same meaning as in `_restrict`.
        """
        keys.prune(address, words_per_row)
        if is_next and self.fault is None and is_row_empty(address, words_per_row):
            self.fault = (
                "the response cannot continue: the schema allows no key here that the object does not already have; "
                "require fewer properties, or allow more names"
            )

    def _new_keys_count(self, token_ids: Sequence[int], *, is_draft: bool) -> int:
        """Return how many tokens precede the first token that repeats a key. The grammar must allow these tokens."""
        keys = self._keys
        if keys is None:
            return len(token_ids)
        for count, token_id in enumerate(token_ids):
            keys = keys.after(self._tokenizer.token_bytes(token_id))
            if keys.has_repeated or (is_draft and keys.has_escaped):
                return count
        return len(token_ids)

    @property
    def _restrictions(self) -> str:
        """Names of the request's fields that exclude tokens, for error messages."""
        fields = {"allowed_token_ids": self._allowed, "bad_words": self._bad_words}
        return " and ".join(name for name, value in fields.items() if value is not None)

    def _note_fault(self, matcher: LLMatcher) -> None:
        assert self._grammar is not None
        self._grammar.wear_out()  # Other sequences that use this compiled grammar might fail for the same reason.
        self.fault = f"the response cannot continue in its grammar: {in_one_line(matcher.get_error())}"
