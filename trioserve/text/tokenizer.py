"""Text to token ids and back: one interface over a Hugging Face directory and over the metadata of a GGUF file.

Special tokens written in a plain prompt ("<|im_end|>") become the special token, as in vLLM and llama.cpp. In a chat,
only those that the chat template writes do. See control_tokens.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple, Self

import msgspec
import tokenizers

from trioserve.contracts.errors import InvalidRequest, RequestFailed, is_library_panic
from trioserve.contracts.prompt import ChatPrompt, Cut
from trioserve.text.chat_template import ChatTemplate
from trioserve.text.control_tokens import ChatText, ControlTokens
from trioserve.text.detokenizer import IncrementalDecoder
from trioserve.text.gguf_vocabulary import vocabulary_from_gguf
from trioserve.text.token_pieces import TokenPieces
from trioserve.text.token_span import TokenSpan
from trioserve.text.tokenizer_directory import TokenizerDirectory
from trioserve.text.tokenizer_parts import TokenizerParts, panics_become_load_errors

__all__ = ["Cut", "EncodedInput", "Tokenizer"]


NAME_BYTES = 16
TURN_TEXT = "Zq7"  # an assistant's message, by which the end of its turn is found


class EncodedInput(NamedTuple):
    """first_segment_tokens: of a pair, how many tokens belong to its first text; None: there is one text.
    label_token_ids: see Tokenizer.encode_labelled."""

    token_ids: list[int]
    first_segment_tokens: int | None = None
    label_token_ids: tuple[int, ...] = ()


class Tokenizer:
    """Encodes and decodes for one model. Every method may be called from any thread.

    vocab_size: ids below it may have a text. A model's own vocabulary may be larger, its further ids have none.
    bos_token, eos_token, pad_token: as the model's files name them; None where they name none.
    chat_template: None when the files hold none.
    """

    def __init__(self, parts: TokenizerParts) -> None:
        """Raises ModelLoadError when the tokenizer's decoder is of a kind that cannot be streamed."""
        self._backend = parts.backend
        # What a tokenizer file says about training batches must not cut or fill the prompts of a server.
        self._backend.no_truncation()
        self._backend.no_padding()
        added = self._backend.get_added_tokens_decoder()
        self._added_ids = {token.content: token_id for token_id, token in added.items()}
        self._added_token_ids = frozenset(added)
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._pieces = TokenPieces(self._backend)
        self._span = TokenSpan(self._backend)
        self.vocab_size = max(self._backend.get_vocab_size(with_added_tokens=False), max(added, default=-1) + 1)
        self.bos_token = parts.bos_token
        self.eos_token = parts.eos_token
        self.pad_token = parts.pad_token
        self.eos_token_id = None if parts.eos_token is None else self._backend.token_to_id(parts.eos_token)
        self.chat_template: ChatTemplate | None = None
        if parts.chat_template is not None:
            self.chat_template = ChatTemplate(
                parts.chat_template,
                bos_token=parts.bos_token,
                eos_token=parts.eos_token,
                tool_source=parts.tool_chat_template,
            )
        self._parses_chat_texts = False
        self._find_control_tokens()

    def _find_control_tokens(self) -> None:
        template = "" if self.chat_template is None else self.chat_template.text
        self._control_tokens = ControlTokens(self._backend, template)

    @classmethod
    def from_directory(cls, path: Path) -> Self:
        """From tokenizer.json and the files around it. Raises ModelLoadError, in one sentence."""
        with panics_become_load_errors(f"{path}"):
            return cls(TokenizerDirectory(path).read())

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object]) -> Self:
        """From a GGUF file's key-value pairs ("tokenizer.ggml.tokens", ...). Raises ModelLoadError, in one sentence."""
        with panics_become_load_errors("the GGUF file's tokens and merges"):
            return cls(vocabulary_from_gguf(metadata))

    def use_chat_template(self, source: str) -> None:
        """Instead of the model's own, for tools, too. To be called before others use this tokenizer."""
        self.chat_template = ChatTemplate(source, bos_token=self.bos_token, eos_token=self.eos_token)
        self._find_control_tokens()

    def parse_control_tokens_in_chats(self) -> None:
        """Let the texts of a chat write control tokens, as the template does. To be called before others use this
        tokenizer."""
        self._parses_chat_texts = True

    def render(self, template: ChatTemplate, prompt: ChatPrompt, *, tool_family: str | None = None) -> ChatText:
        """Render a chat for `encode_chat`. Raises what ChatTemplate.render does, for whose arguments see there."""
        if self._parses_chat_texts:
            return ChatText(template.render(prompt, tool_family=tool_family))
        return self._control_tokens.render(template, prompt, tool_family=tool_family)

    def encode_chat(self, chat: ChatText) -> list[int]:
        """Token ids of a rendered chat, in which the request's own texts are no control tokens. Raises what encode
        does."""
        if not chat.is_kept:
            return self.encode(chat.text, add_special_tokens=False)
        controls = self._control_tokens
        (encoding,) = self._encodings([controls.renamed(chat)], add_special_tokens=False, encoder=controls.encoder)
        return controls.read(encoding.ids)

    def end_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a response: EOS, and what the chat template writes behind an assistant's message.

        A fine-tuned model may name the end of its turns only here, and the base model's end in its config.
        """
        ends = [] if self.eos_token_id is None else [self.eos_token_id]
        if (turn_end := self._turn_end()) is not None:
            ends.append(turn_end)
        return tuple(dict.fromkeys(ends))

    def _turn_end(self) -> int | None:
        """The special token that follows the content of an assistant's message, if the template writes one."""
        if self.chat_template is None:
            return None
        messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": TURN_TEXT}]
        try:
            text = self.chat_template.render(ChatPrompt(messages=messages, add_generation_prompt=False))
        except InvalidRequest:  # such a template wants other messages first
            return None
        _, found, behind = text.rpartition(TURN_TEXT)
        behind = behind.lstrip()
        written = [token for token in self._added_ids if found and token and behind.startswith(token)]
        token_id = self._added_ids[max(written, key=len)] if written else None
        return token_id if token_id in self._special_ids else None

    def name(self) -> str:
        """The same for tokenizers with the same vocabulary, rules and chat template. A tenth of a second or two."""
        template = None if self.chat_template is None else self.chat_template.text
        parts = (self._backend.to_str(), self.bos_token, self.eos_token, template)
        return blake2b(msgspec.json.encode(parts), digest_size=NAME_BYTES).hexdigest()

    def writes_special(self, token: str) -> bool:
        """Whether a text is one special token, which a response does not show unless it is asked to."""
        return self._backend.token_to_id(token) in self._special_ids

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. 0.2 to 1.3 seconds per million characters, in which other threads may run.

        add_special_tokens: begin (and end) as the model's tokenizer says. Off for rendered chats: templates write them.
        Raises InvalidRequest for a text with lone surrogates, which no encoding of Unicode can hold, and RequestFailed
        if the tokenizer library breaks on it.
        """
        (encoding,) = self._encodings([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def encode_input(
        self, text: str, second: str | None = None, *, add_special_tokens: bool = True, cut: Cut | None = None
    ) -> EncodedInput:
        """Token ids of a text, or of a pair of texts, for a model that pools it. Of texts that are too long tokens are
        cut off, those in which the special tokens lie never; of a pair the longer one is cut first. Raises what encode
        does."""
        texts = [text] if second is None else [text, second]
        encodings = self._encodings(texts, add_special_tokens=False)
        if cut is not None:
            special_count = self._backend.num_special_tokens_to_add(second is not None) if add_special_tokens else 0
            room = max(0, cut.tokens_max - special_count)
            counts = _shares([len(encoding.ids) for encoding in encodings], room)
            for encoding, count in zip(encodings, counts, strict=True):
                encoding.truncate(count, direction=cut.side)
        joined = self._backend.post_process(
            encodings[0], None if second is None else encodings[1], add_special_tokens=add_special_tokens
        )
        ids = joined.ids if cut is None else joined.ids[: cut.tokens_max]
        first_segment_tokens = None
        if second is not None:
            type_ids = joined.type_ids
            first_segment_tokens = type_ids.index(1) if 1 in type_ids else len(ids)
        return EncodedInput(ids, first_segment_tokens)

    def encode_labelled(self, text: str | ChatText, labels: Sequence[str], *, add_special_tokens: bool) -> EncodedInput:
        """Token ids of a text, and for each label the one token that it would add. Raises InvalidRequest for a label
        that is not one token behind this text, or the same as another's; and what encode does."""
        chat = ChatText(text) if isinstance(text, str) else text

        def encode(part: str) -> list[int]:
            return self.encode_chat(chat._replace(text=part))

        token_ids = self.encode(chat.text) if add_special_tokens else encode(chat.text)
        # What stands behind the last special token is tokenized by itself: so the labels are tried behind that alone.
        end = max((place for place, token in enumerate(token_ids) if token in self._special_ids), default=-1) + 1
        tail, tail_ids = chat.text, encode(chat.text)
        if end > 0:
            special = self._backend.id_to_token(token_ids[end - 1]) or ""
            found = chat.text.rpartition(special) if special else ("", "", chat.text)
            if found[1] and encode(found[2]) == token_ids[end:]:
                tail, tail_ids = found[2], token_ids[end:]
        label_ids: list[int] = []
        for label in labels:
            ids = encode(tail + label)
            if not ids or ids[:-1] != tail_ids or ids[-1] in label_ids:
                raise InvalidRequest(
                    f"the label {label!r} is not one token of its own behind this prompt, so that this model cannot be "
                    "asked how likely it is"
                )
            label_ids.append(ids[-1])
        return EncodedInput(token_ids, label_token_ids=tuple(label_ids))

    def _encodings(
        self, texts: list[str], *, add_special_tokens: bool, encoder: tokenizers.Tokenizer | None = None
    ) -> list[tokenizers.Encoding]:
        used = self._backend if encoder is None else encoder
        try:
            # Of the library's ways to encode only those for several texts let go of the GIL; the fast one leaves out
            # where in the text each token lies, which nobody asks for here.
            return used.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        except TypeError:
            text = next((text for text in texts if any("\ud800" <= letter <= "\udfff" for letter in text)), "")
            index = next((index for index, character in enumerate(text) if "\ud800" <= character <= "\udfff"), None)
            if index is None:
                raise
            raise InvalidRequest(
                f"the text holds U+{ord(text[index]):04X} at character {index}, half of a surrogate pair: "
                "send characters beyond U+FFFF whole"
            ) from None
        except BaseException as error:
            if not is_library_panic(error):
                raise
            raise RequestFailed(
                f"the model's tokenizer broke on this text ({str(error)[:200]}): its files may be damaged"
            ) from error

    def token_count_min(self, text: str) -> int:
        """So many tokens a text has at least, from its length and the longest token; 0 where nothing is certain."""
        return self._span.token_count_min(text)

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids; bytes that are not UTF-8 become U+FFFD, ids without a text nothing."""
        decoder = self.new_decoder(skip_special_tokens)
        return "".join(map(decoder.push, token_ids)) + decoder.flush()

    def new_decoder(self, skip_special_tokens: bool, *, continues_text: bool = False) -> IncrementalDecoder:
        """A decoder for one sequence. continues_text: it follows other text, so keep the first token's space."""
        skipped_ids = self._special_ids if skip_special_tokens else frozenset()
        return IncrementalDecoder(self._pieces, skipped_ids=skipped_ids, continues_text=continues_text)

    def serialized(self) -> str:
        """All of it, as a tokenizer.json."""
        return self._backend.to_str()

    def special_ids(self) -> dict[str, int]:
        """The tokens that no text in a grammar matches, by their text: the special ones, and of the added ones those in
        angle brackets, such as Qwen's <tool_call>, since llguidance takes them for special, too."""
        added = self._backend.get_added_tokens_decoder()
        return {
            token.content: token_id
            for token_id, token in added.items()
            if token.special or (token.content.startswith("<") and token.content.endswith(">"))
        }

    def added_token_id(self, text: str) -> int | None:
        """The id of a token that is one whole in every text, as special ones are; None if there is none such."""
        return self._added_ids.get(text)

    @property
    def special_token_ids(self) -> frozenset[int]:
        return self._special_ids

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def is_added(self, token_id: int) -> bool:
        """Whether it is a token that the tokenizer matches whole in every text: special tokens, and some others."""
        return token_id in self._added_token_ids

    def token_text(self, token_id: int) -> str:
        """One token as text, special ones too; part of a character is U+FFFD, an id without a text is empty."""
        return self._pieces[token_id].decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token adds, exactly, even when they are part of a character."""
        return self._pieces[token_id]


def _shares(lengths: list[int], room: int) -> list[int]:
    """How much of each is left when all together have so much room: the longer one of two loses first."""
    if sum(lengths) <= room:
        return lengths
    if len(lengths) == 1:
        return [room]
    first, second = lengths
    half = room // 2
    if first <= half:
        return [first, room - first]
    return [room - second, second] if second <= room - half else [half, room - half]
