"""Fields of a request body that the router reads or replaces. All other bytes are forwarded unchanged.

PromptBlocks names the blocks of the prompt like an engine does. The names only improve the choice of an endpoint. A
prompt that cannot be named in time is routed without names. A body that an engine would refuse has no names: the
endpoint reports the error to the client.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import msgspec
import trio

from trioserve.api.form import FormPart, form_boundary, form_parts, text_of, twice
from trioserve.api.ollama.models import untagged
from trioserve.api.openai.chat_prompt import chat_prompt
from trioserve.api.openai.request_types import ChatBody, CompletionBody, GenerationBody, Int32, decode_body, wrong_field
from trioserve.api.surface import OLLAMA_PATH
from trioserve.contracts.endpoint import PREFIX_BLOCK_TOKENS
from trioserve.contracts.errors import InvalidRequest, Overloaded
from trioserve.contracts.ids import BlockHash, hash_block, root_hash
from trioserve.contracts.image_generation import PROMPT_CHARACTERS_MAX
from trioserve.contracts.prompt import Prompt
from trioserve.contracts.weights import adapter_salt

if TYPE_CHECKING:
    from trioserve.admission.text_threads import TextThreads
    from trioserve.text.tokenizer import Tokenizer

__all__ = [
    "CHAT_PATH",
    "COMPLETIONS_PATH",
    "EDITS_PATH",
    "FORM_PATHS",
    "LINE_PATHS",
    "PROMPT_TOKENS_MAX",
    "PromptBlocks",
    "RoutedBody",
    "RoutedForm",
    "TRANSFER_PARAMS",
    "block_names",
    "named_blocks",
    "ollama_body",
    "prefix_of",
    "rewritten",
    "without_transfer_params",
]


# English text and JSON have about 4 bytes per token. The router needs an estimate, because it does not tokenize.
TOKEN_BYTES = 4
PREFIX_BLOCK_BYTES = PREFIX_BLOCK_TOKENS * TOKEN_BYTES
LINE_PATHS = frozenset({"/api/chat", "/api/generate"})
"""Paths whose streams are lines of JSON."""
# 1024 blocks cover 128 KiB of the prompt. Later blocks do not influence the choice of an endpoint.
PREFIX_BLOCKS_MAX = 1024
TRANSFER_PARAMS = "kv_transfer_params"

_NOTHING = msgspec.Raw()


class RoutedBody(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that decide which endpoint gets a request and how long the request may take. The endpoint checks all other
    fields.
    """

    model: str | None = None
    stream: bool | None = None
    n: Int32 | None = None
    priority: Int32 | None = None
    cache_salt: str | None = None
    queue_timeout: float | None = None
    ttft_timeout: float | None = None
    timeout: float | None = None
    prompt: msgspec.Raw = _NOTHING
    messages: msgspec.Raw = _NOTHING
    input: msgspec.Raw = _NOTHING
    system: msgspec.Raw = _NOTHING
    instructions: msgspec.Raw = _NOTHING
    query: msgspec.Raw = _NOTHING
    documents: msgspec.Raw = _NOTHING
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    return_partial: bool | None = None
    kv_transfer_params: msgspec.Raw = _NOTHING
    resume: msgspec.Raw = _NOTHING
    keep_alive: float | str | None = None

    @property
    def content(self) -> bytes:
        """JSON text of the prompt. The parts of the text have the same order as their tokens."""
        said = bytes(self.messages) or bytes(self.prompt) or bytes(self.input) or bytes(self.documents)
        before = bytes(self.system) or bytes(self.instructions) or bytes(self.query)
        return before + said if before else said

    @property
    def known_token_count(self) -> int:
        """Estimated number of known tokens in a request that resumes a response. The endpoint computes known tokens
        like a prompt.
        """
        return bytes(self.resume).count(b",")

    @property
    def prompt_count(self) -> int:
        """Number of prompts. A list of texts, or a list of token id lists, counts as several prompts."""
        if bytes(memoryview(self.prompt)[:1]) != b"[":
            return 1
        # The first item shows which type the list has. Any amount of white space may come before the first item.
        if not bytes(self.prompt)[1:].lstrip().startswith((b'"', b"[")):
            return 1
        return max(1, len(msgspec.json.decode(self.prompt, type=list[msgspec.Raw])))


def prefix_of(content: bytes, model: str, salt: str | None) -> tuple[BlockHash, ...]:
    """Compute the names of the full blocks at the beginning of a prompt.

    Each name also depends on all earlier blocks. Two prompts with the same beginning therefore share names. The blocks
    consist of bytes, because only an endpoint knows the tokens.

    Args:
        content: JSON text of the prompt.
        model: Model that computes the request.
        salt: Cache salt of the request. None without a salt.

    Returns:
        At most PREFIX_BLOCKS_MAX names, in order.
    """
    name = blake2b(root_hash(salt) + model.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    names = []
    end = min(len(content) // PREFIX_BLOCK_BYTES, PREFIX_BLOCKS_MAX) * PREFIX_BLOCK_BYTES
    for begin in range(0, end, PREFIX_BLOCK_BYTES):
        name = blake2b(name + content[begin : begin + PREFIX_BLOCK_BYTES], digest_size=16).digest()
        names.append(BlockHash(name))
    return tuple(names)


def rewritten(raw: bytes, fields: dict[str, object], *, without: Collection[str] = ()) -> bytes:
    """Replace and remove fields of a JSON object. The bytes of all other fields stay unchanged.

    Args:
        raw: The JSON object.
        fields: New values by field name. A field that the object lacks is added.
        without: Names of fields to remove.
    """
    if not fields and not without:
        return raw
    parsed = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    for name in without:
        parsed.pop(name, None)
    return msgspec.json.encode({**parsed, **fields})


def without_transfer_params(raw: bytes, body: RoutedBody, fields: dict[str, object]) -> bytes:
    """Replace fields of a client's body and remove its kv_transfer_params.

    kv_transfer_params names the host and port from which an engine fetches KV. A client that could set them could make
    servers connect to any address, and read the KV of other clients. Only the router sets them.

    Args:
        raw: Body as the client sent it.
        body: Fields that the router has read from `raw`.
        fields: New values by field name.
    """
    return rewritten(raw, fields, without=(TRANSFER_PARAMS,) if bytes(body.kv_transfer_params) else ())


EDITS_PATH = "/v1/images/edits"
FORM_PATHS = (EDITS_PATH, "/v1/audio/transcriptions", "/v1/audio/translations")
PROMPT = "prompt"
READ = frozenset({PROMPT, "model", "stream", "n", "priority", "queue_timeout", "ttft_timeout", "timeout"})
# The longest prompt that an image engine accepts has this many bytes in UTF-8.
TEXT_BYTES_MAX = 4 * PROMPT_CHARACTERS_MAX


class RoutedForm:
    """A multipart form, and the form fields that the router has read.

    Args:
        raw: Bytes of the form.
        boundary: Boundary between the parts, from the content type.
        body: Fields that decide which endpoint gets the request.
        parts: Positions of the parts that the router has read, by name.
    """

    def __init__(self, raw: bytes, boundary: str, body: RoutedBody, parts: dict[str, FormPart]) -> None:
        self.body = body
        self._raw = raw
        self._boundary = boundary
        self._parts = parts

    @classmethod
    def read(cls, raw: bytes, content_type: str | None) -> RoutedForm:
        """Parse a form.

        Args:
            raw: Bytes of the form.
            content_type: Header `content-type` of the request. None if the request has none.

        Raises:
            InvalidRequest: The bytes are not a form, or a field that the router reads is invalid or occurs twice.
        """
        boundary = form_boundary(content_type)
        parts: dict[str, FormPart] = {}
        for part in form_parts(raw, boundary):
            if part.name in parts:
                raise twice(part.name)
            if part.name in READ:
                parts[part.name] = part
        texts = {name: text_of(part, TEXT_BYTES_MAX) for name, part in parts.items()}
        # Every value of a form is text. An empty value means that the user did not fill in the field.
        fields: dict[str, Any] = {name: text for name, text in texts.items() if text and name != PROMPT}
        try:
            body = msgspec.convert(fields, RoutedBody, strict=False)
        except msgspec.ValidationError as error:
            raise wrong_field(error) from error
        prompt = msgspec.Raw(msgspec.json.encode(texts.get(PROMPT, "")))
        return cls(raw, boundary, msgspec.structs.replace(body, prompt=prompt), parts)

    def rewritten(self, fields: dict[str, object], *, without: Collection[str] = ()) -> bytes:
        """Replace and remove fields. All other parts stay unchanged.

        Args:
            fields: New values by field name. A field that the form lacks is added.
            without: Names of fields to remove.
        """
        gone = sorted((part.begin, part.end) for name, part in self._parts.items() if name in fields or name in without)
        if not fields and not gone:
            return self._raw
        pieces = [self._part(name, value) for name, value in fields.items()]
        kept_to = self._raw.index(b"--" + self._boundary.encode())
        for begin, end in gone:
            pieces.append(self._raw[kept_to:begin])
            kept_to = end
        pieces.append(self._raw[kept_to:])
        return b"".join(pieces)

    def _part(self, name: str, value: object) -> bytes:
        head = f'--{self._boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n'
        return f"{head}{value}\r\n".encode()


class _Named(msgspec.Struct):
    name: str | None = None


def ollama_body(path: str, raw: bytes, body: RoutedBody, served: list[str]) -> RoutedBody:
    """Complete the fields of a body of Ollama's API, so that they have the defaults of the other APIs.

    In Ollama's API, a stream is the default, and a model name may have a tag.

    Args:
        path: Path of the request. Bodies of other APIs are returned unchanged.
        raw: Bytes of the body.
        body: Fields that the router has read from `raw`.
        served: All model names of the router.
    """
    if not path.startswith(OLLAMA_PATH):
        return body
    model = body.model
    if model is None and path == "/api/show":  # The path /api/show also accepts an older name of the field.
        model = decode_body(raw, _Named).name
    stream = body.stream is not False if path in LINE_PATHS else None
    return msgspec.structs.replace(body, model=untagged(model, served), stream=stream)


PROMPT_TOKENS_MAX = 262_144  # Tokenizing so many tokens takes about a second. A longer prompt gets no names.
# Only this many leading tokens get names. With 16 tokens in a block, the names take 100 KB. Later blocks hardly
# influence the choice of an endpoint.
NAMED_TOKENS_MAX = 32_768
# The time limit for naming includes the wait for the texts of other requests. A cache hit seldom saves more time.
NAMING_SECONDS_MAX = 1.0
INLINE_TOKENS_MAX = 4096  # Naming the blocks of this many tokens takes a quarter of a millisecond.


class PromptBlocks:
    """Names the blocks of prompts.

    Args:
        tokenizer: Tokenizer of the model.
        texts: Threads that tokenize long prompts and name the blocks of many tokens.
    """

    def __init__(self, tokenizer: Tokenizer, texts: TextThreads) -> None:
        # Imported here, because only a router that names prompts needs a tokenizer and Jinja.
        from trioserve.admission.prompt_encoder import PromptEncoder

        self._texts = texts
        self._encoder = PromptEncoder(
            tokenizer, texts, vocab_size=tokenizer.vocab_size, context_tokens_max=PROMPT_TOKENS_MAX
        )

    async def names(
        self,
        prompt: Prompt,
        block_sizes: Iterable[int],
        *,
        salt: str | None,
        add_special_tokens: bool,
        tenant: str | None = None,
    ) -> dict[int, tuple[BlockHash, ...]]:
        """Name the leading blocks of a prompt.

        Args:
            prompt: Text or token ids.
            block_sizes: Block sizes of the endpoints, in tokens.
            salt: Salt of the first block. None without a salt.
            add_special_tokens: Whether the tokenizer adds special tokens, as in the request to the engine.
            tenant: Tenant of the request. Long prompts of different tenants are tokenized in turn.

        Returns:
            Names in order, by block size. Empty if the prompt is invalid or naming takes longer than
            NAMING_SECONDS_MAX.
        """
        with trio.move_on_after(NAMING_SECONDS_MAX):
            try:
                token_ids = await self._token_ids(prompt, tenant, add_special_tokens=add_special_tokens)
                sizes = tuple(block_sizes)
                if len(token_ids) <= INLINE_TOKENS_MAX:
                    return _named(token_ids, sizes, salt)
                size = min(len(token_ids), NAMED_TOKENS_MAX)
                return await self._texts.run(lambda: _named(token_ids, sizes, salt), size=size, tenant=tenant)
            except (InvalidRequest, Overloaded):
                pass
        return {}

    async def _token_ids(self, prompt: Prompt, tenant: str | None, *, add_special_tokens: bool) -> Sequence[int]:
        if isinstance(prompt, Sequence) and not isinstance(prompt, str):
            return prompt  # The ids are not checked, because a token id that the model lacks matches no block.
        return await self._encoder.of_tenant(tenant).encode(prompt, add_special_tokens=add_special_tokens)


def _named(token_ids: Sequence[int], block_sizes: Iterable[int], salt: str | None) -> dict[int, tuple[BlockHash, ...]]:
    return {size: block_names(token_ids, size, salt) for size in block_sizes}


def block_names(token_ids: Sequence[int], block_size: int, salt: str | None) -> tuple[BlockHash, ...]:
    """Name the leading blocks of a prompt that the prefix cache can contain.

    A request computes at least its last token. So the block that the last token fills is left out.

    Args:
        token_ids: Tokens of the prompt.
        block_size: Tokens per block.
        salt: Salt of the first block. None without a salt.

    Returns:
        Names of full blocks in order, for at most NAMED_TOKENS_MAX tokens.
    """
    end = min(len(token_ids) - 1, NAMED_TOKENS_MAX) // block_size * block_size
    if end > 0 and not 0 <= min(token_ids[:end]) <= max(token_ids[:end]) < 2**32:
        return ()
    name = root_hash(salt)
    names = []
    for begin in range(0, end, block_size):
        name = hash_block(name, token_ids[begin : begin + block_size])
        names.append(name)
    return tuple(names)


CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"


async def named_blocks(
    naming: PromptBlocks,
    path: str,
    raw: bytes,
    block_sizes: Collection[int],
    adapter_digest: str | None = None,
    *,
    tenant: str | None = None,
) -> dict[int, tuple[BlockHash, ...]]:
    """Compute the names of a prompt's leading blocks, for each block size.

    Args:
        naming: Tokenizes the prompt and names its blocks.
        path: Path of the request. Only chat and text completions have names.
        raw: Body of the request.
        block_sizes: Block sizes of the endpoints, in tokens.
        adapter_digest: Digest of the LoRA adapter that computes the request. None without an adapter.
        tenant: Tenant of the request, for a fair share of the tokenizer threads.

    Returns:
        Names in order, by block size. Empty if the names cannot be computed, or if no cached block could be used.
    """
    try:
        body: GenerationBody
        if path == CHAT_PATH:
            chat = body = decode_body(raw, ChatBody)
            prompt: Prompt | None = _chat(chat)
            adds_special_tokens = False
        elif path == COMPLETIONS_PATH:
            completion = body = decode_body(raw, CompletionBody)
            prompt = _first(completion)
            adds_special_tokens = completion.add_special_tokens is not False
        else:
            return {}
    except InvalidRequest:
        return {}
    # Prompt log probabilities require that every token is computed, even tokens in the prefix cache.
    if prompt is None or body.prompt_logprobs is not None:
        return {}
    salt = adapter_salt(body.cache_salt, adapter_digest)
    return await naming.names(prompt, block_sizes, salt=salt, add_special_tokens=adds_special_tokens, tenant=tenant)


def _chat(body: ChatBody) -> Prompt | None:
    # A template from the request may run for any length of time. The router does not know whether the engine trusts it.
    return None if body.chat_template is not None else chat_prompt(body, trust_chat_template=False)


def _first(body: CompletionBody) -> Prompt | None:
    """Return the first prompt of the body, or None if there is none that the prefix cache can serve."""
    if body.echo and body.logprobs is not None:
        return None
    prompt = body.prompt
    if isinstance(prompt, str):
        return prompt
    first = prompt[0] if prompt else None
    if isinstance(first, int):
        return prompt if all(type(item) is int for item in prompt) else None  # type: ignore[return-value]
    return first or None
