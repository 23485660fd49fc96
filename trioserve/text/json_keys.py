r"""Prevents repeated keys and escaped spellings of keys in JSON objects, which no grammar can prevent.

A grammar knows the listed properties of an object. Another key, from additionalProperties or patternProperties, could
be written twice, and would count twice for minProperties. A response could also write a listed key with an escape, such
as `"\u0061"` for `"a"`. So a scanner follows the response. In each mask, the scanner clears the tokens that would
complete a repeated key, or begin a `\u` escape in a key.
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

# Positions of a scanner in a JSON text.
VALUE, KEY_AHEAD, KEY, KEY_ESCAPE, STRING, STRING_ESCAPE = range(6)


class KeyTokens:
    """Tokens of one vocabulary that can complete keys. All responses of a model share one object.

    Args:
        vocab_size: Number of tokens. Ids are 0 to vocab_size - 1.
        token_bytes: Returns the bytes of a token.

    Attributes:
        whole: Tokens that contain a text between two quotes, by this text. The text may be a whole key.
        ends: All texts before the first quote of a token. Each text may be the end of a key.
        ended: Tokens that may end a key and then repeat the same key, by the part of the key before the token.

    Cost: about 100 ms to create.
    """

    def __init__(self, vocab_size: int, token_bytes: Callable[[int], bytes]) -> None:
        self.token_bytes = token_bytes
        quoted: list[tuple[bytes, int]] = []
        self._escaping: list[int] = []
        self.whole: dict[bytes, tuple[int, ...]] = {}

        self.ends: set[bytes] = set()

        self.ended: dict[bytes, tuple[int, ...]] = {}

        self._twice: list[int] = []  # Tokens that may contain the same key twice.
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
        """Iterate over the tokens that begin with a text.

        Args:
            text: The text, which contains a quote.
        """
        place = bisect_left(self._quoted, text)
        while place < len(self._quoted) and self._quoted[place].startswith(text):
            yield self._quoted_ids[place]
            place += 1

    def doubtful(self, mode: int, *, in_object: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
        r"""Return the tokens that must be checked one by one at a position.

        These are tokens that write `\u` within a key, and tokens that complete two keys.

        Args:
            mode: Position of the scanner.
            in_object: True if the innermost open value is an object.
        """
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
    """One open object or array.

    Attributes:
        is_object: True for an object, False for an array.
        outer: The surrounding object or array, or None.
        keys: Keys of the object so far, in their written spelling, sorted.
        whole: Tokens that contain one of these keys between two quotes.
    """

    is_object: bool
    outer: Frame | None
    keys: tuple[bytes, ...] = ()
    whole: tuple[int, ...] = ()


class JsonKeys:
    r"""Keys of a response so far. Immutable: `after` returns the state after more text.

    Args:
        tokens: Tokens that can complete keys.
        frame: The innermost open object or array, or None.
        mode: Position of the scanner.
        key: Part of the current key that is written so far.

    Attributes:
        completed_count: Number of keys that the last token has completed.
        has_repeated: True if the last token has completed a key that the object already had.
        has_escaped: True if the last token has written `\u` within a key.
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
        """Return the state after more bytes of the response.

        Args:
            piece: The bytes, which continue the JSON so far. If there is other text around the JSON, such as the text
                of a call format, its braces and quotes must be paired.
        """
        mode, frame, key = self._mode, self._frame, self._key
        if mode == STRING and b'"' not in piece and b"\\" not in piece and not self.completed_count:
            return self  # This fast path serves most tokens of long strings.
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
        r"""Clear the tokens in a mask row that would repeat a key, or write a `\u` escape within a key.

        If the grammar allows only an escape, the escape stays allowed. This happens in a listed key with a control
        character.

        Args:
            address: Memory address of the row.
            words_per_row: Number of uint32 words in the row.

        Cost: some microseconds, plus a little for each key of the object that begins like the current key.
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
        """Iterate over texts that would complete the current key to one of the given keys.

        Each returned text is the beginning of a token.
        """
        begun, ends = self._key, self._tokens.ends
        # UTF-8 never contains the byte 0xFF.
        first, after = bisect_left(keys, begun), bisect_left(keys, begun + b"\xff")
        if after - first <= len(ends):
            return (end for key in keys[first:after] if (end := key[len(begun) :]) in ends)
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
    """Return True if a schema accepts objects with keys that the schema does not list.

    Also returns True if this is uncertain. Then keys may be tracked unnecessarily, at a small cost.
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
            kinds = []  # The members of the combined schema name the types.
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
