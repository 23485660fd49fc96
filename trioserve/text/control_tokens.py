"""Separates the control tokens of a chat template from equal characters in the texts of a request.

A chat template writes control tokens, such as <|im_start|>, as text. A client can write the same text in a message, and
the tokenizer cannot tell the two apart. So a chat is rendered a second time if its texts might contain control tokens.
In the second rendering, each character that may be part of a control token is replaced by a stand-in: a character from
a Unicode plane that the chat does not use. Every stand-in in the rendered text came from the request.

Such a chat is encoded by a second encoder with the same vocabulary. In this encoder, the control tokens have secret
names. The control tokens that the template wrote are renamed before encoding. Control tokens from the request are not
renamed, so they are ordinary text to this encoder. All other text is encoded as usual.
"""

from __future__ import annotations

import json
import re
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import tokenizers
from tokenizers import AddedToken

from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.prompt import ChatPrompt
from trioserve.text.call_formats.harmony import HARMONY_TOKENS
from trioserve.text.call_formats.kimi import K3_TOKENS
from trioserve.text.detokenizer import steps_of
from trioserve.text.request_texts import RequestTexts, TokenPattern, has_character_in, in_slices
from trioserve.text.response_parsers.families import REASONING_FAMILIES, TOOL_FAMILIES
from trioserve.text.templates.chat_template import ChatTemplate

__all__ = ["ChatText", "ControlTokens"]

SECRET_BYTES = 12  # Number of random bytes in a control token's secret name.
SHORT_CHARACTERS = 1000  # A text up to this length is translated in one call, without slices.
PLANE = 0x10000  # Number of characters in one Unicode plane.
PLANES = (*range(4, 14), 15, 16)  # Unicode planes without assigned characters, and planes for private use.

_SURROGATES = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_TURN_MARKERS = frozenset((*HARMONY_TOKENS, *K3_TOKENS))  # These tokens of two formats also begin and end messages.
_TOOL_RESULTS = ("<tool_response>", "</tool_response>")


def _markers() -> frozenset[str]:
    """Return the markers of reasoning and tool calls of all model families.

    Not every vocabulary declares these markers as special tokens.
    """
    markers = set(_TOOL_RESULTS)
    for tools in TOOL_FAMILIES.values():
        markers.update(tools.special_tokens, tools.readers)
    for reasoning in REASONING_FAMILIES.values():
        markers.update(reasoning.special_tokens, reasoning.tags.opening, reasoning.tags.closing)
    return frozenset(markers)


_MARKERS = _markers()
_ASSISTANT_MARKERS = _MARKERS - _TURN_MARKERS - set(_TOOL_RESULTS)
"""Markers that a model writes within its own message. Clients send them back as part of that message's content."""


class StandIns:
    """Maps the characters of a vocabulary's control tokens to stand-in characters and back.

    Args:
        plane: A Unicode plane that the chat does not use.
        letters: The characters, each once.

    Attributes:
        mark_after: A character of the plane that is no stand-in. This character is written after a token to mark the
            token.
        mark_before: Another character of the plane that is no stand-in. This character is written before a token.
    """

    def __init__(self, plane: int, letters: str) -> None:
        first = plane * PLANE
        self._to = {ord(letter): first + index for index, letter in enumerate(letters)}
        self._back = {stand_in: letter for letter, stand_in in self._to.items()}
        self.mark_after, self.mark_before = chr(first + len(letters)), chr(first + len(letters) + 1)

    def of(self, text: str) -> str:
        """Replace the characters of control tokens in a text by their stand-ins."""
        if len(text) <= SHORT_CHARACTERS:
            return text.translate(self._to)
        return "".join(part.translate(self._to) for part in in_slices(text))

    def undone(self, text: str) -> str:
        """Replace the stand-ins in a text by the original characters."""
        return "".join(part.translate(self._back) for part in in_slices(text))

    def without_escapes(self, text: str) -> str:
        """Replace the JSON escapes of stand-ins in a text by the stand-ins.

        A stand-in for a character that is not ASCII is replaced by the JSON escape of that character.

        Args:
            text: Text that a template may have written as JSON with escapes.
        """

        def written(found: re.Match[str]) -> str:
            character = json.loads(f'"{found[0]}"')
            letter = chr(self._back.get(ord(character), 0))
            if letter == "\0":
                return character if character in (self.mark_after, self.mark_before) else found[0]
            return character if letter.isascii() else json.dumps(letter)[1:-1]

        return _SURROGATES.sub(written, text)


class ChatText(NamedTuple):
    """Text of a rendered chat.

    Attributes:
        text: The text, with stand-ins where a text of the request may be part of a control token.
        stand_ins: Mapping of the stand-ins, or None if the text contains no stand-ins.
        is_kept: True if the text must not be passed to Tokenizer.encode, which would find control tokens that the
            template did not write.
    """

    text: str
    stand_ins: StandIns | None = None
    is_kept: bool = False

    @property
    def plain(self) -> str:
        """The text without stand-ins."""
        return self.text if self.stand_ins is None else self.stand_ins.undone(self.text)


class ControlTokens:
    """Control tokens of one vocabulary: special tokens, and added tokens that mark reasoning, tool calls or turns.

    Added tokens that are ordinary text, such as runs of spaces, are not control tokens. Any thread may call any method.

    Args:
        backend: Tokenizer of the vocabulary.
        template: Text of the model's chat template.

    Attributes:
        encoder: The second encoder, in which the control tokens have secret names.

    Cost: a few milliseconds for thousands of control tokens. The two encoders share the vocabulary.
    """

    def __init__(self, backend: tokenizers.Tokenizer, template: str) -> None:
        added = sorted(backend.get_added_tokens_decoder().items())
        self._ids = {token.content: token_id for token_id, token in added if _is_control(token, template)}
        self._pattern = TokenPattern(self._ids)
        self._letters = "".join(sorted(set().union(*self._ids)))
        self._in_template = frozenset(token for token in self._ids if token in template)
        self._always_renamed = _normalizes_letters(backend) and any(
            token.normalized for _, token in added if token.content in self._ids
        )
        secret = secrets.token_hex(SECRET_BYTES)
        self._renamed = {token: f"{token[0]}{secret}{token[1:]}" for token in self._ids}
        self.encoder = _encoder_like(backend, [_renamed(token, self._renamed) for _, token in added])
        self._model = backend.model
        self._token_ids = {
            encoder_id: token_id
            for token_id, token in added
            if (encoder_id := self.encoder.token_to_id(self._renamed.get(token.content, token.content))) is not None
        }
        # If the second encoder gives an added token the id of another token in the vocabulary, ids are ambiguous.
        self._is_ambiguous = any(
            self._model.id_to_token(encoder_id) not in (None, self.encoder.id_to_token(encoder_id))
            for encoder_id in self._token_ids
        )
        unknown = {"<unk>", "[UNK]", getattr(self._model, "unk_token", None)}
        self._unwritten_ids = {
            token_id: token for token, token_id in self._ids.items() if token not in unknown and len(token) > 1
        }

    def render(self, template: ChatTemplate, prompt: ChatPrompt, *, tool_family: str | None = None) -> ChatText:
        """Render a chat, and find the control tokens that the texts of the request wrote.

        Args:
            template: Chat template to render.
            prompt: The chat.
            tool_family: Format for tools and calls that the template cannot show, as in ChatTemplate.render.

        Raises:
            InvalidRequest: The template refuses the chat, as in ChatTemplate.render. Also raised if the template
                accepts the chat only as long as the control tokens in its texts are not replaced.

        Cost: a scan of the rendered text and of the texts of the chat. If one of the texts might be part of a control
        token, the chat is rendered once or twice more.
        """
        text = template.render(prompt, tool_family=tool_family)
        found = Counter(self._pattern.tokens_in(text))
        if not found:
            return ChatText(text, is_kept=self._always_renamed)
        texts = RequestTexts(found, self._pattern, exempt=_ASSISTANT_MARKERS, substitutions=template.substitutions)
        if not texts.are_risky(prompt):
            return ChatText(text, is_kept=self._always_renamed)
        stand_ins = self._stand_ins(prompt)

        def rendered(beside: Mapping[str, str]) -> str | None:
            replacing = texts.replacing(stand_ins.of, beside)
            try:
                return stand_ins.without_escapes(template.render(prompt, tool_family=tool_family, texts=replacing))
            except InvalidRequest:  # The template refuses the chat only with stand-ins.
                return None

        marked = rendered({})
        is_same = marked is not None and stand_ins.undone(marked) == text
        if not is_same and texts.has_whole:
            beside = self._beside(texts, stand_ins)
            second = _settled(rendered(beside), beside, stand_ins)
            if second is not None and stand_ins.undone(second) == text:
                marked, is_same = second, True
        if marked is None and texts.has_whole:
            raise InvalidRequest(
                f"a message contains a control token of this model, one of {', '.join(sorted(found))[:200]}, and the "
                "chat template does not accept it as plain text: remove it from the messages",
                param="messages",
            )
        is_harmless = marked is None or Counter(self._pattern.tokens_in(marked)) == found
        if is_harmless and (is_same or not texts.has_whole):
            return ChatText(text, is_kept=self._always_renamed)
        assert marked is not None
        return ChatText(marked, stand_ins, is_kept=True)

    def _beside(self, texts: RequestTexts, stand_ins: StandIns) -> dict[str, str]:
        """Return each token with a mark beside it, for templates that search messages for their control tokens.

        Such a template still finds the token, since the mark is beside the token and not inside.
        """
        return {
            token: f"{stand_ins.mark_before}{token}" if token[1:2] == "/" else f"{token}{stand_ins.mark_after}"
            for token in texts.tokens
            if token in self._in_template
        }

    def renamed(self, chat: ChatText) -> str:
        """Return the text for the second encoder. The method `read` converts the ids that the second encoder returns.

        Args:
            chat: The rendered chat.

        Raises:
            InvalidRequest: The second encoder has ambiguous token ids, so it cannot be used for this vocabulary.
        """
        if self._is_ambiguous:
            raise InvalidRequest(
                "a message contains a control token of this model, whose tokenizer cannot encode it as plain text: "
                "remove it from the messages",
                param="messages",
            )
        text = self._pattern.replaced(chat.text, self._renamed.__getitem__)
        return text if chat.stand_ins is None else chat.stand_ins.undone(text)

    def read(self, token_ids: Iterable[int]) -> list[int]:
        """Convert token ids of the second encoder to ids of the vocabulary.

        Args:
            token_ids: Ids from `encoder`.
        """
        read: list[int] = []
        for token_id in token_ids:
            own = self._token_ids.get(token_id)
            if own is not None:
                read.append(own)
            elif token_id in self._unwritten_ids:
                read += self._spelled(self._unwritten_ids[token_id])
            else:
                read.append(token_id)
        return read

    def _spelled(self, token: str) -> list[int]:
        """Return the ids of smaller tokens that together spell a control token as ordinary text."""
        ids: list[int] = []
        for part in (token[:1], token[1:]):
            for piece in self._model.tokenize(part):
                inner = self._unwritten_ids.get(piece.id)
                ids += [piece.id] if inner is None or len(inner) >= len(token) else self._spelled(inner)
        return ids

    def _stand_ins(self, prompt: ChatPrompt) -> StandIns:
        for plane in PLANES:
            if not has_character_in(prompt, chr(plane * PLANE), chr(plane * PLANE + PLANE - 1)):
                return StandIns(plane, self._letters)
        raise InvalidRequest(
            "the messages have characters from every Unicode plane without assigned characters: remove those of one "
            "plane",
            param="messages",
        )


def _settled(marked: str | None, beside: Mapping[str, str], stand_ins: StandIns) -> str | None:
    """Replace each token that has a mark beside it by the stand-ins of its characters, and remove the marks."""
    if marked is None:
        return None
    for token, written in beside.items():
        marked = marked.replace(written, stand_ins.of(token))
    return marked.replace(stand_ins.mark_before, "").replace(stand_ins.mark_after, "")


def _is_control(token: AddedToken, template: str) -> bool:
    content: str = token.content
    if not content.strip():
        return False
    if token.special or content in _MARKERS:
        return True
    if content[0].isalnum() or content[-1].isalnum() or len(content) < 3:
        return False
    return content in template or (content[:2] in ("<|", "<｜") and content[-2:] in ("|>", "｜>"))


def _renamed(token: AddedToken, names: dict[str, str]) -> AddedToken:
    return AddedToken(
        names.get(token.content, token.content),
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=token.special,
    )


def _encoder_like(backend: tokenizers.Tokenizer, added: list[AddedToken]) -> tokenizers.Tokenizer:
    encoder = tokenizers.Tokenizer(backend.model)
    if backend.normalizer is not None:
        encoder.normalizer = backend.normalizer
    if backend.pre_tokenizer is not None:
        encoder.pre_tokenizer = backend.pre_tokenizer
    encoder.add_tokens(added)
    return encoder


def _normalizes_letters(backend: tokenizers.Tokenizer) -> bool:
    """Return True if the tokenizer's normalizer may turn ordinary text into a control token."""
    normalizer = backend.normalizer
    if normalizer is None:
        return False
    steps = steps_of(normalizer, "normalizers")
    return not all(
        step["type"] == "Prepend" or (step["type"] == "Replace" and step["pattern"] == {"String": " "})
        for step in steps
    )
