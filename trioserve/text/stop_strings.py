"""Finds a stop string even when it straddles deltas, and says how much text may be shown meanwhile.

The stop strings become one automaton (A. V. Aho and M. J. Corasick, "Efficient string matching: an aid to
bibliographic search", CACM 18, 1975). Its states are the beginnings of the stop strings, and it is in the longest one
that the text so far ends with. A character costs two looks at it on the average, however many stop strings there are
and whatever they have in common with each other or with the text.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Sequence

__all__ = ["PrefixAutomaton", "StopStringFinder"]

AUTOMATA_KEPT_MAX = 64  # of 60 KB at most: the choices of a request share one, and so do clients that always ask alike


class StopStringFinder:
    """Scans a text that arrives in pieces for the first of several stop strings.

    First is the one that is complete first; of those complete at the same character, the longest. So where the text
    ends does not depend on how it was cut into pieces, and no token is computed to see whether a longer stop string
    would have followed. Held back is the longest end of the text that begins a stop string, and nothing more: at most
    the longest stop string less one character. Work for all pieces together is linear in their characters.

    found: the stop string that was found, else None. After it was found, feed must not be called again.
    """

    __slots__ = ("_automaton", "_first_characters", "_held", "_state", "found")

    def __init__(self, stops: Sequence[str], cache_salt: str | None = None) -> None:
        """The first finder for these stop strings under a salt takes a microsecond for each of their characters."""
        assert stops, "without stop strings there is nothing to find"
        assert all(stops), "an empty stop string would end every text at once"
        self._automaton = _automaton(tuple(stops), cache_salt)
        self._first_characters = self._automaton.first_characters
        self._state = 0
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str, *, may_complete: bool = True) -> str:
        """Takes the next piece and returns what can be shown now; when `found` is set, the text ends with it.

        may_complete: whether a stop string may become complete in this piece. If not, it may still begin here.
        """
        assert self.found is None, "fed after a stop string was found"
        state = self._state
        first_characters = self._first_characters
        if not state and first_characters.isdisjoint(text):
            return text  # what nearly every token is
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
        """The text held back, once it is known that nothing follows."""
        held, self._held = self._held, ""
        self._state = 0
        return held


class PrefixAutomaton:
    """A state stands for a beginning of a stop string, 0 for the empty one. Most are followed by one character only,
    and the state that it leads to has the next number: so a state takes a few bytes. Immutable once it is built.

    next_characters: leads to the next state; the other ways on are in branches, for the few states that have any.
    depths: how many characters have been matched. first_characters: without one of them nothing begins.
    falls_back_to: the longest proper end of what was matched that begins a stop string and is not all of it.
    stop_indices: into stops, the longest stop string that is complete in this state; -1 where none is.
    shorter_stops: by stop string, the longest other one that it ends with; -1 where there is none.
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
        # Sorted, so that behind each one come those which begin with it: a state with a way on has a next character.
        self.stops = stops = tuple(sorted(stops))
        self.first_characters = frozenset(stop[0] for stop in stops)
        self.branches: dict[int, dict[str, int]] = {}
        next_characters: list[str] = [""]  # nothing leads on from a state that has no further character
        depths = [0]
        ends: dict[int, int] = {}  # where a stop string is complete
        entries: list[tuple[int, str, int]] = []  # every state but the first: from which one, by which character
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
        entries.sort(key=lambda entry: depths[entry[2]])  # falling back leads to shorter ones, which come first
        state_count = len(depths)
        suffixes = [0] * state_count  # as falls_back_to, but it may be all of a stop string
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
        # In a whole one nobody looks for the next character: the text has ended, or it fell back.
        self.next_characters = "".join(character or "\0" for character in next_characters)
        self.depths = array("I", depths)
        self.stop_indices = array("h", complete)
        self.shorter_stops = array("h", bytes(2 * len(stops)))
        for state, stop_index in ends.items():
            self.shorter_stops[stop_index] = complete[suffixes[state]]
        self.falls_back_to = array("I", self._past_whole(suffixes, entries))

    def advance(self, state: int, character: str) -> int:
        """The state behind one more character of a text that does not end where a stop string is complete.

        Cost: the length of the longest stop string at most, two looks on average over a text.
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
        """Whether it is all of a stop string and begins no longer one: nothing is held back for it."""
        return state in self._is_whole

    def _next(self, next_characters: list[str], state: int, character: str) -> int:
        """The state that a character leads to, 0 if none."""
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
    """cache_salt: each has entries of its own, so that a request's time does not show what other keys send."""
    return PrefixAutomaton(stops)
