"""All that restrains one sequence, as one guide: its form, its thought, the tokens it may have, the words it may not.

They are taken together: a token may come if each of them lets it. An end of a thought that is forced comes before
everything else. A form may begin behind a thought, and before it the response cannot end. Where the response may begin
with either, the form or a thought, both are followed until a token belongs to one of them alone: the thought's
beginning token by token, as the tokenizer writes it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Sequence

from llguidance import LLExecutor, LLMatcher

from trioserve.text.bad_words import BadWords
from trioserve.text.form_compiler import CompiledForm, in_one_line
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
from trioserve.text.thought import TextFinder, Thought, ThoughtPhase
from trioserve.text.tokenizer import Tokenizer

__all__ = ["SequenceGuide"]


class SequenceGuide:
    """See contracts.guide. executor: computes masks behind draft tokens. form: None: it has none.
    free_until: the form begins behind this text. allowed: the tokens that it may have, as the bytes of a row; None:
    all. stop_token_ids: those that end the sequence; where the form may end, each of them may come. end_token_ids:
    those that the matcher takes for its end. thought_begin: the beginning of a thought that is still to come, as
    tokens. keys: follows the keys of a form that is JSON; None: none of them can be repeated.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        executor: Callable[[], LLExecutor],
        *,
        vocab_size: int,
        stop_token_ids: Collection[int],
        end_token_ids: Collection[int],
        form: CompiledForm | None = None,
        free_until: str = "",
        thought: Thought | None = None,
        thought_begin: Sequence[int] = (),
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
        self._form = form
        self._matcher = None if form is None else form.new_matcher()
        self._gate = TextFinder(free_until.encode()) if form is not None and free_until else None
        self._thought = thought
        # What is left of the beginning of a thought, while the response may begin with one or with the form.
        self._opening: tuple[int, ...] | None = None
        if self._gate is not None and thought is not None and free_until == thought.end_text:
            if thought.phase is ThoughtPhase.OVER:
                self._gate = None
            elif thought.phase is ThoughtPhase.BEFORE and thought_begin:
                self._opening = tuple(thought_begin)
        self._may_be_form = True  # as far as the beginning has come
        self._is_hurried = False
        self._allowed = allowed
        self._bad_words = bad_words
        self._written = 0  # the state of the bad words
        self._keys = self._no_keys = keys

    def end_thought(self) -> bool:
        """The thought that is written is to end with the next token. False: there is none. May be called at any time
        in the thread of the core."""
        if self._thought is None or self._thought.phase is ThoughtPhase.OVER:
            return False
        self._is_hurried = True
        return True

    # --- Guide ---

    @property
    def is_free_ahead(self) -> bool:
        return (
            self._matcher is None
            and self._allowed is None
            and self._bad_words is None
            and (self._thought is None or not self._thought.may_end_within(1))
        )

    def wants_mask(self, draft: Sequence[int]) -> bool:
        if self._allowed is not None:
            return True
        if self._matcher is not None:
            return True
        if self._bad_words is not None and (draft or self._bad_words.bars_any(self._written)):
            return True
        thought = self._thought
        if thought is None or thought.phase is ThoughtPhase.OVER:
            return False
        return bool(thought.forced) or (bool(draft) and (self._is_hurried or thought.may_end_within(len(draft))))

    @property
    def is_over(self) -> bool:
        return self._matcher is not None and self._gate is None and self._matcher.is_stopped()

    def accept(self, token_id: int) -> bool:
        piece = self._tokenizer.token_bytes(token_id)
        is_consumed = self._opening is not None and self._open(token_id, self._opening)
        if self._thought is not None:
            self._thought = self._thought.after(token_id, piece, is_hurried=self._is_hurried)
        self._written = self._written_behind(token_id, self._written)
        if self._gate is not None:
            self._pass_gate(self._gate.after(piece))
        elif self._matcher is not None and not is_consumed:
            if not self._matcher.consume_token(token_id):
                self._note_fault(self._matcher)
            elif self._keys is not None:
                self._keys = self._keys.after(piece)
        return self.fault is None

    def forced_tokens(self, count_max: int) -> tuple[int, ...]:
        thought = self._thought
        if thought is not None and thought.forced:
            return thought.forced[:count_max]
        if self._opening is not None and not self._may_be_form:
            return self._opening[:count_max]
        if self._matcher is None or self._gate is not None or self._allowed is not None or self._bad_words is not None:
            return ()
        forced = self._matcher.compute_ff_tokens()[:count_max]
        return tuple(forced[: self._new_keys_count(forced, is_draft=False)])

    def acceptable_count(self, token_ids: Sequence[int]) -> int:
        if self._opening is not None:
            return 0
        matcher = self._matcher
        gate, thought, written = self._gate, self._thought, self._written
        for count, token_id in enumerate(token_ids):
            if not self._may_come(token_id, thought, written):
                return count
            if matcher is not None and gate is None:
                # From here on the form decides, together with the rest.
                valid = matcher.validate_tokens(list(token_ids[count:]))
                valid = self._new_keys_count(token_ids[count : count + valid], is_draft=True)
                return count + self._others_acceptable(token_ids[count : count + valid], thought, written)
            piece = self._tokenizer.token_bytes(token_id)
            gate, thought = self._behind(token_id, piece, gate, thought)
            written = self._written_behind(token_id, written)
            if gate is not None and gate.is_found:
                return count  # what may come behind it is known when it has come
        return len(token_ids)

    def fill_masks(self, address: int, words_per_row: int, draft: Sequence[int]) -> None:
        row_bytes = 4 * words_per_row
        gate, thought, written = self._gate, self._thought, self._written
        keys = self._keys
        filled_from = None  # the row from which on the form's bits are there
        for row in range(1 + len(draft)):
            at = address + row * row_bytes
            may_end = False  # the form is complete, as far as it has come
            if thought is not None and thought.forced:
                ctypes.memset(at, 0, row_bytes)
                set_bits(at, (thought.forced[0],))
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
                        self._fill_form(self._matcher, at, row_bytes, draft[row:])
                    may_end = self._let_end(at)
                    if keys is not None:
                        self._prune_keys(keys, at, words_per_row, is_next=row == 0)
                if self._allowed is not None or self._bad_words is not None:
                    self._restrict(at, words_per_row, written, may_end=may_end, is_next=row == 0)
            if row < len(draft):
                token_id = draft[row]
                piece = self._tokenizer.token_bytes(token_id)
                gate, thought = self._behind(token_id, piece, gate, thought)
                written = self._written_behind(token_id, written)
                if keys is not None and filled_from is not None:
                    keys = keys.after(piece)

    # --- inside ---

    def _open(self, token_id: int, opening: Sequence[int]) -> bool:
        """The response goes on with this token, as a thought, as the form, or still as both. Whether it is a token of
        the form, which has it then."""
        assert self._form is not None
        assert self._matcher is not None
        first, *rest = opening
        is_form = self._may_be_form and self._matcher.validate_tokens([token_id]) == 1
        if token_id != first:
            self._opening = self._gate = None
        elif rest and is_form:
            self._opening = tuple(rest)
        else:
            # A thought for sure: what the form has taken so far was none of it.
            self._opening = tuple(rest) or None
            self._matcher = self._form.new_matcher()
            self._may_be_form = False
            self._keys = self._no_keys
            return False
        if is_form:
            self._matcher.consume_token(token_id)
            if self._keys is not None:
                self._keys = self._keys.after(self._tokenizer.token_bytes(token_id))
        return is_form

    def _fill_opening(self, matcher: LLMatcher, opening: Sequence[int], address: int, row_bytes: int) -> None:
        if self._may_be_form:
            self._fill_form(matcher, address, row_bytes, ())
            self._let_end(address)
        else:
            ctypes.memset(address, 0, row_bytes)
        set_bits(address, (opening[0],))

    def _pass_gate(self, gate: TextFinder) -> None:
        """The form begins with the first token that begins behind the gate's text; what its last token has behind it is
        part of the form where the form takes it."""
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

    def _behind(
        self, token_id: int, piece: bytes, gate: TextFinder | None, thought: Thought | None
    ) -> tuple[TextFinder | None, Thought | None]:
        """Gate and thought behind one more token."""
        if gate is not None:
            gate = gate.after(piece)
        if thought is not None:
            thought = thought.after(token_id, piece, is_hurried=self._is_hurried)
        return gate, thought

    def _written_behind(self, token_id: int, written: int) -> int:
        """The state of the bad words behind one more token."""
        return written if self._bad_words is None else self._bad_words.after(written, token_id)

    def _may_come(self, token_id: int, thought: Thought | None, written: int) -> bool:
        if thought is not None and thought.forced:
            return token_id == thought.forced[0]
        if self._allowed is not None and not has_bit(self._allowed, token_id):
            return False
        return self._bad_words is None or not self._bad_words.is_barred(written, token_id)

    def _others_acceptable(self, token_ids: Sequence[int], thought: Thought | None, written: int) -> int:
        for count, token_id in enumerate(token_ids):
            if not self._may_come(token_id, thought, written):
                return count
            if thought is not None:
                thought = thought.after(token_id, self._tokenizer.token_bytes(token_id), is_hurried=self._is_hurried)
            written = self._written_behind(token_id, written)
        return len(token_ids)

    def _fill_form(self, matcher: LLMatcher, address: int, row_bytes: int, draft: Sequence[int]) -> None:
        if draft:
            ctypes.memset(address, 0, row_bytes * (1 + len(draft)))
            rows = [(matcher, 0, list(draft))]
            self._executor().unsafe_compute_mask_ptr_with_draft_token(rows, address, row_bytes, 1 + len(draft))
        else:
            matcher.unsafe_compute_mask_ptr(address, row_bytes)
        assert self._form is not None
        self._form.mask_count += 1 + len(draft)
        if matcher.is_error():
            self._note_fault(matcher)
            ctypes.memset(address, 0, row_bytes * (1 + len(draft)))

    def _let_end(self, address: int) -> bool:
        """Let every stop token come where the form may end, and no end token that is ignored.

        Returns:
            Whether the form may end here.
        """
        if not has_any_bit(address, self._end_token_ids):
            return False
        clear_bits(address, self._ignored_ids)
        set_bits(address, self._stop_token_ids)
        return True

    def _restrict(self, address: int, words_per_row: int, written: int, *, may_end: bool, is_next: bool) -> None:
        """Clear the tokens that allowed_token_ids leaves out or that bad_words bar.

        Where the form is complete and none of its other tokens is left, the response ends: an end token comes.

        Args:
            address: Of a row that has every other bit.
            written: The state of the bad words.
            may_end: The form is complete here.
            is_next: The row is that of the next token. If nothing is left in it, this guide has a fault.
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
            what = "of the form of the response" if self._matcher is not None else "of the vocabulary"
            self.fault = (
                f"the response cannot go on: no token {what} may come next under {self._restrictions}; allow more "
                "tokens, or change the form"
            )

    def _prune_keys(self, keys: JsonKeys, address: int, words_per_row: int, *, is_next: bool) -> None:
        """Clear the tokens that would repeat a key of an open object. The arguments are those of `_restrict`."""
        keys.prune(address, words_per_row)
        if is_next and self.fault is None and is_row_empty(address, words_per_row):
            self.fault = (
                "the response cannot go on: the schema allows no key here that the object does not have already; ask "
                "for fewer properties, or allow more names"
            )

    def _new_keys_count(self, token_ids: Sequence[int], *, is_draft: bool) -> int:
        """Count the tokens before the first one that repeats a key. The form takes all of them, one after the other."""
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
        """The fields that clear bits, for a message."""
        fields = {"allowed_token_ids": self._allowed, "bad_words": self._bad_words}
        return " and ".join(name for name, value in fields.items() if value is not None)

    def _note_fault(self, matcher: LLMatcher) -> None:
        assert self._form is not None
        self._form.wear_out()  # others that begin with it might fail for the same reason
        self.fault = f"the form of this response cannot go on: {in_one_line(matcher.get_error())}"
