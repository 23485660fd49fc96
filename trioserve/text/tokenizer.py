"""Converts text to token ids and back. Tokenizers come from Hugging Face directories or from metadata of GGUF files.

If a plain prompt contains the spelling of a special token ("<|im_end|>"), it becomes the special token, as in vLLM and
llama.cpp. In a chat, only the chat template can write special tokens. The module control_tokens explains how.
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
from trioserve.text.control_tokens import ChatText, ControlTokens
from trioserve.text.detokenizer import IncrementalDecoder, TokenPieces, TokenSpan
from trioserve.text.gguf_vocabulary import vocabulary_from_gguf
from trioserve.text.templates.chat_template import ChatTemplate
from trioserve.text.tokenizer_directory import TokenizerDirectory
from trioserve.text.tokenizer_parts import TokenizerParts, panics_become_load_errors

__all__ = ["Cut", "EncodedInput", "Tokenizer"]


NAME_BYTES = 16
# Content of an assistant's message, for a test rendering. The text that a template writes after this content ends the
# assistant's turn.
TURN_TEXT = "Zq7"


class EncodedInput(NamedTuple):
    """Token ids of one input of a model.

    Attributes:
        token_ids: Ids of all tokens, special tokens included.
        first_segment_tokens: For a pair of texts, the number of tokens that belong to the first text. None for a single
            text.
        label_token_ids: For encode_labelled, the token id of each label. Otherwise empty.
    """

    token_ids: list[int]
    first_segment_tokens: int | None = None
    label_token_ids: tuple[int, ...] = ()


class Tokenizer:
    """Encodes and decodes text for one model. Any thread may call any method.

    Args:
        parts: Contents of the model's tokenizer files.

    Attributes:
        vocab_size: Upper bound of the token ids that have a text. The model's own vocabulary may be larger and contain
            ids without a text.
        bos_token: Text of the token that begins a sequence, or None if the files name none.
        eos_token: Text of the token that ends a sequence, or None if the files name none.
        pad_token: Text of the token that fills batches, or None if the files name none.
        eos_token_id: Id of `eos_token`, or None if `eos_token` has no id.
        chat_template: Chat template of the model, or None if the files have none.

    Raises:
        ModelLoadError: The tokenizer's decoder is of a kind that cannot be streamed.
    """

    def __init__(self, parts: TokenizerParts) -> None:
        self._backend = parts.backend
        # Tokenizer files may enable truncation and padding for training batches. Prompts of a server must stay whole.
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
        """Build a tokenizer from a directory with a tokenizer.json and the other files of a tokenizer.

        Args:
            path: The directory.

        Raises:
            ModelLoadError: A file is missing or damaged. The message is one sentence.
        """
        with panics_become_load_errors(f"{path}"):
            return cls(TokenizerDirectory(path).read())

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object]) -> Self:
        """Build a tokenizer from the metadata of a GGUF file.

        Args:
            metadata: Key-value pairs of the file, such as "tokenizer.ggml.tokens".

        Raises:
            ModelLoadError: A key is missing, damaged, or names a tokenizer that is not supported. The message is one
                sentence.
        """
        with panics_become_load_errors("the GGUF file's tokens and merges"):
            return cls(vocabulary_from_gguf(metadata))

    def use_chat_template(self, source: str) -> None:
        """Replace the model's chat templates, the one for requests with tools included.

        Call this before other threads use the tokenizer.

        Args:
            source: Text of the Jinja template.
        """
        self.chat_template = ChatTemplate(source, bos_token=self.bos_token, eos_token=self.eos_token)
        self._find_control_tokens()

    def parse_control_tokens_in_chats(self) -> None:
        """From now on, read control tokens in the messages of chats as control tokens.

        Call this before other threads use the tokenizer.
        """
        self._parses_chat_texts = True

    def render(self, template: ChatTemplate, prompt: ChatPrompt, *, tool_family: str | None = None) -> ChatText:
        """Render a chat for `encode_chat`.

        Args:
            template: Chat template to render: the model's own template, or a template in the request.
            prompt: The chat.
            tool_family: Format for tools and calls that the template cannot show, as in ChatTemplate.render.

        Raises:
            InvalidRequest: The template refuses the chat, as in ChatTemplate.render.
        """
        if self._parses_chat_texts:
            return ChatText(template.render(prompt, tool_family=tool_family))
        return self._control_tokens.render(template, prompt, tool_family=tool_family)

    def encode_chat(self, chat: ChatText) -> list[int]:
        """Return the token ids of a rendered chat. Text that the request wrote never becomes a control token.

        Args:
            chat: Result of `render`.

        Raises:
            InvalidRequest: The text has lone surrogates, or the tokenizer cannot encode control tokens in the messages
                as plain text.
            RequestFailed: The tokenizer library fails on the text.
        """
        if not chat.is_kept:
            return self.encode(chat.text, add_special_tokens=False)
        controls = self._control_tokens
        (encoding,) = self._encodings([controls.renamed(chat)], add_special_tokens=False, encoder=controls.encoder)
        return controls.read(encoding.ids)

    def end_token_ids(self) -> tuple[int, ...]:
        """Return the ids of tokens that end a response.

        These tokens are EOS, and the token that the chat template writes after an assistant's message.

        A fine-tuned model may name the end of its turns only in the template, while its config names the end token of
        its base model.
        """
        ends = [] if self.eos_token_id is None else [self.eos_token_id]
        if (turn_end := self._turn_end()) is not None:
            ends.append(turn_end)
        return tuple(dict.fromkeys(ends))

    def _turn_end(self) -> int | None:
        """Return the special token that the template writes after the content of an assistant's message, or None."""
        if self.chat_template is None:
            return None
        messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": TURN_TEXT}]
        try:
            text = self.chat_template.render(ChatPrompt(messages=messages, add_generation_prompt=False))
        except InvalidRequest:  # The template requires other messages before these messages.
            return None
        _, found, after = text.rpartition(TURN_TEXT)
        after = after.lstrip()
        written = [token for token in self._added_ids if found and token and after.startswith(token)]
        token_id = self._added_ids[max(written, key=len)] if written else None
        return token_id if token_id in self._special_ids else None

    def name(self) -> str:
        """Return a hash of the tokenizer. Tokenizers with equal vocabulary, rules and chat template have equal hashes.

        Cost: 0.1 to 0.2 s.
        """
        template = None if self.chat_template is None else self.chat_template.text
        parts = (self._backend.to_str(), self.bos_token, self.eos_token, template)
        return blake2b(msgspec.json.encode(parts), digest_size=NAME_BYTES).hexdigest()

    def writes_special(self, token: str) -> bool:
        """Return True if a text is exactly one special token.

        Responses hide special tokens unless the request asks for them.

        Args:
            token: The text.
        """
        return self._backend.token_to_id(token) in self._special_ids

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text.

        Args:
            add_special_tokens: True to add the begin and end tokens that the model's tokenizer prescribes. Use False
                for rendered chats, whose template has written these tokens.

        Raises:
            InvalidRequest: The text has lone surrogates, which no Unicode encoding can represent.
            RequestFailed: The tokenizer library fails on the text.

        Cost: 0.2 to 1.3 s per million characters. Other threads can run meanwhile.
        """
        (encoding,) = self._encodings([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def encode_input(
        self, text: str, second: str | None = None, *, add_special_tokens: bool = True, cut: Cut | None = None
    ) -> EncodedInput:
        """Return the token ids of one text or a pair of texts, for a pooling model.

        If the input is too long, its texts are truncated. Special tokens are never truncated. The longer text of a pair
        is truncated first.

        Args:
            text: The text, or the first text of a pair.
            second: The second text of a pair, or None.
            add_special_tokens: True to add special tokens around the texts.
            cut: Maximum token count, and the side from which tokens are removed. None to keep every token.

        Raises:
            InvalidRequest: A text has lone surrogates.
            RequestFailed: The tokenizer library fails on a text.
        """
        texts = [text] if second is None else [text, second]
        encodings = self._encodings(texts, add_special_tokens=False)
        if cut is not None:
            special_count = self._backend.num_special_tokens_to_add(second is not None) if add_special_tokens else 0
            text_tokens_max = max(0, cut.tokens_max - special_count)
            counts = _shares([len(encoding.ids) for encoding in encodings], text_tokens_max)
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
        """Return the token ids of a text, and for each label the single token that the label adds to the text.

        Args:
            text: The text, or a rendered chat.
            labels: Texts of the labels.
            add_special_tokens: True to encode `text` with begin and end tokens.

        Raises:
            InvalidRequest: A label is not exactly one token after this text, or two labels have the same token. Also
                raised if the text has lone surrogates.
            RequestFailed: The tokenizer library fails on the text.
        """
        chat = ChatText(text) if isinstance(text, str) else text

        def encode(part: str) -> list[int]:
            return self.encode_chat(chat._replace(text=part))

        token_ids = self.encode(chat.text) if add_special_tokens else encode(chat.text)
        # The tokenizer encodes the text after the last special token separately. So each label is appended only to this
        # last text.
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
                    f"the label {label!r} is not one token after this prompt, or has the token of another "
                    "label: this model cannot score it, so send another label"
                )
            label_ids.append(ids[-1])
        return EncodedInput(token_ids, label_token_ids=tuple(label_ids))

    def _encodings(
        self, texts: list[str], *, add_special_tokens: bool, encoder: tokenizers.Tokenizer | None = None
    ) -> list[tokenizers.Encoding]:
        used = self._backend if encoder is None else encoder
        try:
            # Among the library's encoding methods, only the batch methods release the GIL. The fast variant omits the
            # text offsets of the tokens, which this method does not need.
            return used.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        except TypeError:
            text = next((text for text in texts if any("\ud800" <= letter <= "\udfff" for letter in text)), "")
            index = next((index for index, character in enumerate(text) if "\ud800" <= character <= "\udfff"), None)
            if index is None:
                raise
            raise InvalidRequest(
                f"the text has U+{ord(text[index]):04X} at character {index}, which is half of a surrogate pair: "
                "send both halves of characters above U+FFFF"
            ) from None
        except BaseException as error:
            if not is_library_panic(error):
                raise
            raise RequestFailed(
                f"the model's tokenizer failed on this text ({str(error)[:200]}): its files may be damaged"
            ) from error

    def token_count_min(self, text: str) -> int:
        """Return a lower bound of a text's token count, from its length and the longest token.

        The bound is 0 if no bound is certain.
        """
        return self._span.token_count_min(text)

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids. Bytes that are not UTF-8 become U+FFFD. Ids without a text are skipped.

        Args:
            skip_special_tokens: True to leave out special tokens.
        """
        decoder = self.new_decoder(skip_special_tokens)
        return "".join(map(decoder.push, token_ids)) + decoder.flush()

    def new_decoder(self, skip_special_tokens: bool, *, continues_text: bool = False) -> IncrementalDecoder:
        """Make a decoder for one sequence.

        Args:
            skip_special_tokens: True to leave out special tokens.
            continues_text: True if the sequence follows other text, so the space at its beginning is kept.
        """
        skipped_ids = self._special_ids if skip_special_tokens else frozenset()
        return IncrementalDecoder(self._pieces, skipped_ids=skipped_ids, continues_text=continues_text)

    def serialized(self) -> str:
        """Return the tokenizer as the text of a tokenizer.json."""
        return self._backend.to_str()

    def special_ids(self) -> dict[str, int]:
        """Return the ids of all tokens that no text in a grammar can match, by the text of the token.

        These tokens are the special tokens, and added tokens in angle brackets such as Qwen's <tool_call>. llguidance
        treats such added tokens as special.
        """
        added = self._backend.get_added_tokens_decoder()
        return {
            token.content: token_id
            for token_id, token in added.items()
            if token.special or (token.content.startswith("<") and token.content.endswith(">"))
        }

    def added_token_id(self, text: str) -> int | None:
        """Return the id of an added token, or None. The tokenizer recognizes added tokens as a whole in every text.

        Args:
            text: Text of the token.
        """
        return self._added_ids.get(text)

    @property
    def special_token_ids(self) -> frozenset[int]:
        return self._special_ids

    def is_added(self, token_id: int) -> bool:
        """Return True if a token is a special token or another added token.

        The tokenizer recognizes added tokens as a whole in every text.
        """
        return token_id in self._added_token_ids

    def token_text(self, token_id: int) -> str:
        """Return the text of one token, special or not. A partial character becomes U+FFFD.

        The text of an unknown id is "".
        """
        return self._pieces[token_id].decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the exact bytes that one token adds, even if they are only part of a character."""
        return self._pieces[token_id]


def _shares(lengths: list[int], tokens_max: int) -> list[int]:
    """Divide a token limit among one or two texts. The longer of two texts is shortened first.

    Args:
        lengths: Token counts of the texts.
        tokens_max: Limit for all texts together.

    Returns:
        For each text, the number of tokens to keep.
    """
    if sum(lengths) <= tokens_max:
        return lengths
    if len(lengths) == 1:
        return [tokens_max]
    first, second = lengths
    half = tokens_max // 2
    if first <= half:
        return [first, tokens_max - first]
    return [tokens_max - second, second] if second <= tokens_max - half else [half, tokens_max - half]
