"""Finds stop strings and bad words in a text that arrives in pieces.

The stop strings become one automaton (A. V. Aho and M. J. Corasick, "Efficient string matching: an aid to bibliographic
search", CACM 18, 1975). Each state is a prefix of a stop string. The current state is the longest such prefix that is a
suffix of the text so far. Each character costs two comparisons on average, however many stop strings there are, and
however much the stop strings overlap with each other or with the text.

A bad word must not be generated. Once all tokens of a bad word except its last token are written, the last token is
barred.
"""

from __future__ import annotations

import functools
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from trioserve.text.mask_bits import clear_bits, keep_bits

__all__ = ["PrefixAutomaton", "StopStringFinder", "BadWords"]

# Each automaton takes up to 60 KB. All choices of a request share one automaton, and so do requests with equal stop
# strings.
AUTOMATA_KEPT_MAX = 64


class StopStringFinder:
    """Searches a text that arrives in pieces for the first of several stop strings.

    The finder reports the stop string that is complete first. If several stop strings are complete at the same
    character, the finder reports the longest of them. So the end of the text does not depend on how the text is cut
    into pieces. The finder never needs another token to see whether a longer stop string follows.

    The finder holds back the longest suffix of the text that is a prefix of a stop string, and nothing more. The held
    text is shorter than the longest stop string. The work for all pieces is linear in their total length.

    Args:
        stops: The stop strings, at least one, none empty.
        cache_salt: Salt of the request. Finders share an automaton only under the same salt.

    Attributes:
        found: The stop string that was found, or None. Do not call feed after a stop string was found.

    Cost: the first finder for given stop strings and salt takes one microsecond per character of the stop strings.
    """

    __slots__ = ("_automaton", "_first_characters", "_held", "_state", "found")

    def __init__(self, stops: Sequence[str], cache_salt: str | None = None) -> None:
        assert stops, "there is at least one stop string"
        assert all(stops), "no stop string is empty: it would end every text at once"
        self._automaton = _automaton(tuple(stops), cache_salt)
        self._first_characters = self._automaton.first_characters
        self._state = 0
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str, *, may_complete: bool = True) -> str:
        """Process the next piece of the text.

        Args:
            text: The piece.
            may_complete: False if no stop string may end in this piece. A stop string may still begin in such a piece.

        Returns:
            The text that can be shown now. If a stop string was found, this is the text before it.
        """
        assert self.found is None, "no text is processed after a stop string was found"
        state = self._state
        first_characters = self._first_characters
        if not state and first_characters.isdisjoint(text):
            return text  # This fast path serves almost every token.
        automaton = self._automaton
        next_characters, branches = automaton.next_characters, automaton.branches
        falls_back_to, stop_indices = automaton.falls_back_to, automaton.stop_indices
        for index, character in enumerate(text):
            if not state and character not in first_characters:
                continue
            while next_characters[state] != character:
                if state in branches and (target := branches[state].get(character)):
                    state = target
                    break
                if not state:
                    break
                state = falls_back_to[state]
            else:
                state += 1
            if stop_indices[state] >= 0:
                if may_complete:
                    stop = self.found = automaton.stops[stop_indices[state]]
                    shown_count = len(self._held) + index + 1 - len(stop)
                    shown, self._held = (self._held + text)[:shown_count], ""
                    return shown
                if automaton.is_whole(state):
                    state = falls_back_to[state]
        self._state = state
        buffer = self._held + text
        shown_count = len(buffer) - automaton.depths[state]
        self._held = buffer[shown_count:]
        return buffer[:shown_count]

    def flush(self) -> str:
        """Return the text that was held back. Call this method when no more text follows."""
        held, self._held = self._held, ""
        self._state = 0
        return held


class PrefixAutomaton:
    r"""Immutable automaton that recognizes stop strings.

    Each state represents a prefix of a stop string, and state 0 represents the empty prefix. After most prefixes, only
    one character can follow. This character leads to the state with the next number, so most states take only a few
    bytes.

    Args:
        stops: The stop strings, none empty.

    Attributes:
        stops: The stop strings, sorted.
        first_characters: First characters of all stop strings.
        next_characters: By state, the character that leads to the state with the next number. "\0" if there is none.
        branches: By state, the states that further characters lead to, by character. Few states have an entry.
        depths: By state, the length of its prefix.
        falls_back_to: By state, the longest proper suffix of its prefix that is a prefix of a stop string but not a
            whole stop string that nothing extends.
        stop_indices: By state, the index in `stops` of the longest stop string that is complete in the state, or -1.
        shorter_stops: By index in `stops`, the index of the longest other stop string that is a suffix of it, or -1.
    """

    __slots__ = (
        "_is_whole",
        "branches",
        "depths",
        "falls_back_to",
        "first_characters",
        "next_characters",
        "shorter_stops",
        "stop_indices",
        "stops",
    )

    def __init__(self, stops: tuple[str, ...]) -> None:
        # In sorted order, a stop string precedes every longer stop string that begins with it. So each state after
        # which a character can follow has an entry in next_characters.
        self.stops = stops = tuple(sorted(stops))
        self.first_characters = frozenset(stop[0] for stop in stops)
        self.branches: dict[int, dict[str, int]] = {}
        next_characters: list[str] = [""]  # By state, the next character, or "" if no character follows.
        depths = [0]
        ends: dict[int, int] = {}  # By state, the index of the stop string that ends in the state.
        # The parent state, the character and the state, for each state except 0.
        entries: list[tuple[int, str, int]] = []
        for stop_index, stop in enumerate(stops):
            state = depth = 0
            while depth < len(stop) and (known := self._next(next_characters, state, stop[depth])):
                state = known
                depth += 1
            for character in stop[depth:]:
                new = len(depths)
                if not next_characters[state] and new == state + 1:
                    next_characters[state] = character
                else:
                    self.branches.setdefault(state, {})[character] = new
                entries.append((state, character, new))
                depth += 1
                depths.append(depth)
                next_characters.append("")
                state = new
            ends.setdefault(state, stop_index)
        # States are processed by the length of their prefix. A fallback state has a shorter prefix, so its own fallback
        # state is already computed.
        entries.sort(key=lambda entry: depths[entry[2]])
        state_count = len(depths)
        suffixes = [0] * state_count  # Like falls_back_to, but the suffix may be a whole stop string.
        complete = [ends.get(state, -1) for state in range(state_count)]
        for parent, character, state in entries:
            suffix = parent
            while suffix:
                suffix = suffixes[suffix]
                if target := self._next(next_characters, suffix, character):
                    suffixes[state] = target
                    break
            if complete[state] < 0:
                complete[state] = complete[suffixes[state]]
        self._is_whole = frozenset(state for state in ends if not next_characters[state] and state not in self.branches)
        # The character "\0" stands for no next character. It is never looked up in a whole stop string, since the text
        # has ended or the caller has fallen back.
        self.next_characters = "".join(character or "\0" for character in next_characters)
        self.depths = array("I", depths)
        self.stop_indices = array("h", complete)
        self.shorter_stops = array("h", bytes(2 * len(stops)))
        for state, stop_index in ends.items():
            self.shorter_stops[stop_index] = complete[suffixes[state]]
        self.falls_back_to = array("I", self._past_whole(suffixes, entries))

    def advance(self, state: int, character: str) -> int:
        """Return the state after one more character, for a text that does not end at a complete stop string.

        Args:
            state: The state before the character.

        Cost: two comparisons on average over a text, and at most the length of the longest stop string.
        """
        next_characters = self.next_characters
        while next_characters[state] != character:
            if state in self.branches and (target := self.branches[state].get(character)):
                return target
            if not state:
                return 0
            state = self.falls_back_to[state]
        return state + 1

    def is_whole(self, state: int) -> bool:
        """Return True if a state is a whole stop string that is no prefix of a longer one.

        In such a state, no text is held back.
        """
        return state in self._is_whole

    def _next(self, next_characters: list[str], state: int, character: str) -> int:
        """Return the state that a character leads to, or 0 if there is none."""
        if next_characters[state] == character:
            return state + 1
        branch = self.branches.get(state)
        return branch.get(character, 0) if branch else 0

    def _past_whole(self, suffixes: list[int], entries: list[tuple[int, str, int]]) -> list[int]:
        falls_back_to = [0] * len(suffixes)
        for _, _, state in entries:
            suffix = suffixes[state]
            falls_back_to[state] = falls_back_to[suffix] if suffix in self._is_whole else suffix
        return falls_back_to


@functools.lru_cache(maxsize=AUTOMATA_KEPT_MAX)
def _automaton(stops: tuple[str, ...], cache_salt: str | None) -> PrefixAutomaton:
    """Return the automaton of stop strings.

    Args:
        cache_salt: Only a part of the cache key. So the time of a request does not reveal the stop strings of other API
            keys.
    """
    return PrefixAutomaton(stops)


SINGLE_BITS_MAX = 16  # If more bits must be cleared, one operation on the whole row clears all of them.
ROWS_KEPT_MAX = 8  # Maximum number of cached token masks. Each mask takes 16 KB for a vocabulary of 131,072 tokens.


class BadWords:
    """Words that the output of one request must not contain (`bad_words`). All choices of the request share one object.

    An automaton reads the output of each sequence, with one transition per token. The caller keeps the automaton's
    state as a number for each sequence, and passes it to the methods. The cost of a token does not depend on the number
    of words with a common beginning.

    The tokenizer encodes each word alone, once with and once without a space before the word. Only these token
    sequences are barred. Other tokens with the same text are allowed.

    Args:
        words: The forbidden words.
        encode: Returns the token ids of a text.
    """

    def __init__(self, words: Iterable[str], encode: Callable[[str], Sequence[int]]) -> None:
        alone: set[int] = set()
        last_ids: dict[str, set[int]] = {}  # The last tokens of bad words, by the preceding tokens of the word.
        for word in words:
            for text in {word, f" {word.lstrip()}"}:
                *before, last = encode(text) or (-1,)
                if before:
                    last_ids.setdefault("".join(map(_character, before)), set()).add(last)
                elif last >= 0:
                    alone.add(last)
        self._alone = frozenset(alone)
        self._automaton = PrefixAutomaton(tuple(last_ids)) if last_ids else None
        stops = () if self._automaton is None else self._automaton.stops
        self._last_ids = [frozenset(last_ids[stop]) for stop in stops]
        self._rows: OrderedDict[int, tuple[tuple[int, ...], bytes | None]] = OrderedDict()

    def after(self, state: int, token_id: int) -> int:
        """Return the state after one more token.

        Args:
            state: The state before the token. The first state is 0.
        """
        return 0 if self._automaton is None else self._automaton.advance(state, _character(token_id))

    def bars_any(self, state: int) -> bool:
        """Return True if a bad word bars any token as the next token.

        Args:
            state: State of the sequence.
        """
        return bool(self._alone) or self._stop_index(state) >= 0

    def is_barred(self, state: int, token_id: int) -> bool:
        if token_id in self._alone:
            return True
        index = self._stop_index(state)
        while index >= 0:
            if token_id in self._last_ids[index]:
                return True
            assert self._automaton is not None
            index = self._automaton.shorter_stops[index]
        return False

    def barred(self, state: int) -> set[int]:
        """Return all tokens that bad words bar as the next token.

        Args:
            state: State of the sequence.
        """
        barred = set(self._alone)
        index = self._stop_index(state)
        while index >= 0:
            barred |= self._last_ids[index]
            assert self._automaton is not None
            index = self._automaton.shorter_stops[index]
        return barred

    def clear(self, address: int, words_per_row: int, state: int) -> None:
        """Clear the bits of the barred tokens in one row of a token mask.

        Only the thread that fills masks calls this method.

        Args:
            address: Memory address of the row.
            words_per_row: Number of uint32 words in the row.
            state: State of the sequence before the row's token.
        """
        index = self._stop_index(state)
        found = self._rows.get(index)
        if found is None:
            found = self._rows[index] = self._row(state, words_per_row)
            if len(self._rows) > ROWS_KEPT_MAX:
                self._rows.popitem(last=False)
        else:
            self._rows.move_to_end(index)
        token_ids, row = found
        if row is None:
            clear_bits(address, token_ids)
        else:
            keep_bits(address, row)

    def _row(self, state: int, words_per_row: int) -> tuple[tuple[int, ...], bytes | None]:
        """Return the bits to clear.

        Returns:
            Token ids and None if there are few bits to clear. Otherwise an empty tuple, and a row with all bits that
            stay set.
        """
        token_ids = tuple(token_id for token_id in self.barred(state) if token_id < 32 * words_per_row)
        if len(token_ids) <= SINGLE_BITS_MAX:
            return token_ids, None
        row = bytearray(b"\xff" * (4 * words_per_row))
        for token_id in token_ids:
            row[token_id // 8] &= ~(1 << token_id % 8)
        return (), bytes(row)

    def _stop_index(self, state: int) -> int:
        return -1 if self._automaton is None else self._automaton.stop_indices[state]


def _character(token_id: int) -> str:
    return chr(token_id + 1)  # PrefixAutomaton uses the character 0 for "no character", so add 1.
