"""Keeps the keys of JSON objects different from each other, which no grammar can do, and spelled in one way.

A grammar knows the listed properties of an object. Any other key, from additionalProperties or patternProperties, could
come twice, and would count twice for minProperties. It could also spell a listed one with an escape, `"\\u0061"` for
`"a"`. So a scanner follows the response and clears, in each mask, the tokens that would complete a key again or begin
an escape with `\\u` in a key.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

from trioserve.text.mask_bits import clear_bits, has_any_bit, is_row_empty

__all__ = ["JsonKeys", "KeyTokens", "has_free_keys"]

QUOTE, BACKSLASH, COMMA, U = b'"\\,u'
OPEN_OBJECT, CLOSE_OBJECT, OPEN_ARRAY, CLOSE_ARRAY = b"{}[]"
ESCAPE: Final = b"\\u"

# Where in the text a scanner is.
VALUE, KEY_AHEAD, KEY, KEY_ESCAPE, STRING, STRING_ESCAPE = range(6)


class KeyTokens:
    """The tokens of one vocabulary that can complete keys. Made once for a model; costs some 100 ms.

    Args:
        vocab_size: Token ids are 0 to vocab_size - 1.
        token_bytes: The bytes of a token.
    """

    def __init__(self, vocab_size: int, token_bytes: Callable[[int], bytes]) -> None:
        self.token_bytes = token_bytes
        quoted: list[tuple[bytes, int]] = []
        self._escaping: list[int] = []
        self.whole: dict[bytes, tuple[int, ...]] = {}
        """Tokens that have a text between two of their quotes, by that text: the key may be in one token."""
        self.ends: set[bytes] = set()
        """What tokens have before their first quote: the end of a key."""
        self.ended: dict[bytes, tuple[int, ...]] = {}
        """Tokens that may end a key and have it once more, by the beginning of the key before the token."""
        self._twice: list[int] = []  # tokens that may have a whole key twice
        for token_id in range(vocab_size):
            piece = token_bytes(token_id)
            if b'"' in piece:
                quoted.append((piece, token_id))
                first, *texts, _ = piece.split(b'"')
                self.ends.add(first)
                for text in set(texts):
                    self.whole[text] = (*self.whole.get(text, ()), token_id)
                for text in {text for text in texts[1:] if text.endswith(first)}:
                    begun = text[: len(text) - len(first)]
                    self.ended[begun] = (*self.ended.get(begun, ()), token_id)
                if len(set(texts)) < len(texts):
                    self._twice.append(token_id)
            if ESCAPE in piece or piece.startswith(b"u"):
                self._escaping.append(token_id)
        quoted.sort()
        self._quoted = [piece for piece, _ in quoted]
        self._quoted_ids = [token_id for _, token_id in quoted]
        self._doubtful: dict[tuple[int, bool], tuple[tuple[int, ...], tuple[int, ...]]] = {}

    def beginning_with(self, text: bytes) -> Iterator[int]:
        """Iterate over the tokens that begin with a text. It has a quote."""
        place = bisect_left(self._quoted, text)
        while place < len(self._quoted) and self._quoted[place].startswith(text):
            yield self._quoted_ids[place]
            place += 1

    def doubtful(self, mode: int, *, in_object: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The tokens that write `\\u` within a key, and those that complete two keys, behind a text in this mode."""
        found = self._doubtful.get((mode, in_object))
        if found is None:
            outer = None
            for is_object in (True, True, True, in_object):
                outer = Frame(is_object=is_object, outer=outer)
            here = JsonKeys(self, outer, mode)
            found = (
                tuple(one for one in self._escaping if here.after(self.token_bytes(one)).has_escaped),
                tuple(one for one in self._twice if here.after(self.token_bytes(one)).completed_count > 1),
            )
            self._doubtful[mode, in_object] = found
        return found


class Frame(NamedTuple):
    """One object or array that is open.

    Args:
        is_object: It has keys.
        outer: The one around it.
        keys: Those that it has, as they are spelled, sorted.
        whole: Tokens that have one of these keys between two quotes.
    """

    is_object: bool
    outer: Frame | None
    keys: tuple[bytes, ...] = ()
    whole: tuple[int, ...] = ()


class JsonKeys:
    """The keys of a response so far. Never changes: `after` makes the state behind one more token.

    Attributes:
        completed_count: Keys that the last token has completed.
        has_repeated: The last token has completed a key that its object had.
        has_escaped: The last token has written `\\u` within a key.
    """

    __slots__ = ("_frame", "_key", "_mode", "_tokens", "completed_count", "has_escaped", "has_repeated")

    def __init__(self, tokens: KeyTokens, frame: Frame | None = None, mode: int = VALUE, key: bytes = b"") -> None:
        self._tokens = tokens
        self._frame = frame
        self._mode = mode
        self._key = key
        self.completed_count = 0
        self.has_repeated = False
        self.has_escaped = False

    def after(self, piece: bytes) -> JsonKeys:
        """Return the state behind these bytes.

        Args:
            piece: JSON behind what came before. Other text around it, such as that of a format of calls, may have no
                brace or quote without its partner.
        """
        mode, frame, key = self._mode, self._frame, self._key
        if mode == STRING and b'"' not in piece and b"\\" not in piece and not self.completed_count:
            return self  # as for most tokens of long texts
        has_repeated = has_escaped = False
        completed_count = 0
        for byte in piece:
            if mode == STRING:
                if byte == QUOTE:
                    mode = VALUE
                elif byte == BACKSLASH:
                    mode = STRING_ESCAPE
            elif mode == STRING_ESCAPE:
                mode = STRING
            elif mode == KEY_ESCAPE:
                key += bytes((byte,))
                has_escaped = has_escaped or byte == U
                mode = KEY
            elif mode == KEY:
                if byte == QUOTE:
                    assert frame is not None
                    has_repeated = has_repeated or _has(frame.keys, key)
                    frame = self._with_key(frame, key)
                    completed_count += 1
                    mode, key = VALUE, b""
                else:
                    key += bytes((byte,))
                    mode = KEY_ESCAPE if byte == BACKSLASH else KEY
            elif byte == QUOTE:
                mode = KEY if mode == KEY_AHEAD else STRING
            elif byte in (OPEN_OBJECT, OPEN_ARRAY):
                frame = Frame(is_object=byte == OPEN_OBJECT, outer=frame)
                mode = KEY_AHEAD if frame.is_object else VALUE
            elif byte in (CLOSE_OBJECT, CLOSE_ARRAY):
                frame = None if frame is None else frame.outer
                mode = VALUE
            elif byte == COMMA:
                mode = KEY_AHEAD if frame is not None and frame.is_object else VALUE
        state = JsonKeys(self._tokens, frame, mode, key)
        state.has_repeated, state.has_escaped, state.completed_count = has_repeated, has_escaped, completed_count
        return state

    def prune(self, address: int, words_per_row: int) -> None:
        """Clear the tokens of a row of a mask that would repeat a key, or escape within one.

        Where the grammar leaves nothing but an escape, it stays: that is a listed name with a control character.

        Cost: microseconds, and some more for each key with the beginning that is written.
        """
        tokens, frame = self._tokens, self._frame
        escapes, twice = tokens.doubtful(self._mode, in_object=frame is not None and frame.is_object)
        if escapes:
            row = ctypes.string_at(address, 4 * words_per_row)
            clear_bits(address, escapes)
            if is_row_empty(address, words_per_row):
                ctypes.memmove(address, row, 4 * words_per_row)
        doubtful = set(twice)
        if self._mode in (KEY, KEY_ESCAPE):
            assert frame is not None
            for text in self._ends_of_keys(frame.keys):
                clear_bits(address, tokens.beginning_with(text + b'"'))
            doubtful.update(tokens.ended.get(self._key, ()))
        while frame is not None:
            doubtful.update(frame.whole)
            frame = frame.outer
        for token_id in doubtful:
            if has_any_bit(address, (token_id,)) and self.after(tokens.token_bytes(token_id)).has_repeated:
                clear_bits(address, (token_id,))

    def _ends_of_keys(self, keys: tuple[bytes, ...]) -> Iterator[bytes]:
        """Iterate over what would make one of these keys of the beginning that is written, as far as one token can."""
        begun, ends = self._key, self._tokens.ends
        first, behind = bisect_left(keys, begun), bisect_left(keys, begun + b"\xff")  # no UTF-8 text has this byte
        if behind - first <= len(ends):
            return (end for key in keys[first:behind] if (end := key[len(begun) :]) in ends)
        return (end for end in ends if _has(keys, begun + end))

    def _with_key(self, frame: Frame, key: bytes) -> Frame:
        if _has(frame.keys, key):
            return frame
        keys = list(frame.keys)
        insort(keys, key)
        return frame._replace(keys=tuple(keys), whole=(*frame.whole, *self._tokens.whole.get(key, ())))


def _has(keys: tuple[bytes, ...], key: bytes) -> bool:
    place = bisect_left(keys, key)
    return place < len(keys) and keys[place] == key


_MEMBERS: Final = ("anyOf", "oneOf", "allOf", "$ref")


def has_free_keys(schema: Any) -> bool:
    """Return whether objects that a schema accepts may have keys that it does not list.

    Doubtful schemas count as such: their responses are followed for nothing, at a small cost.
    """
    left = [schema]
    while left:
        node = left.pop()
        if isinstance(node, list):
            left += node
            continue
        if node is True:
            return True
        if not isinstance(node, dict) or "const" in node or "enum" in node:
            continue
        wanted = node.get("type")
        kinds = [wanted] if isinstance(wanted, str) else wanted
        if kinds is None and any(key in node for key in _MEMBERS) and not _looks_into_objects(node):
            kinds = []  # the members say which
        has_more = node.get("additionalProperties") is not False or bool(node.get("patternProperties"))
        if has_more and (kinds is None or "object" in kinds):
            return True
        if (kinds is None or "array" in kinds) and "items" not in node:
            return True
        if not str(node.get("$ref", "#/$defs/")).startswith(("#/$defs/", "#/definitions/")):
            return True
        for key in ("properties", "$defs", "definitions"):
            values = node.get(key)
            left += values.values() if isinstance(values, dict) else ()
        for key in ("items", "additionalItems", "prefixItems", *_MEMBERS[:3]):
            value = node.get(key)
            if isinstance(value, dict | list) or (value is True and key in ("items", "additionalItems")):
                left.append(value)
    return False


def _looks_into_objects(node: dict[str, Any]) -> bool:
    return any(key in node for key in ("properties", "required", "items", "prefixItems", "minProperties"))
