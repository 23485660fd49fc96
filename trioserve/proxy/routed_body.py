"""Fields of a request body that the router reads or replaces. All other bytes are forwarded unchanged."""

from __future__ import annotations

from collections.abc import Collection
from hashlib import blake2b
from typing import Any

import msgspec

from trioserve.api.form import FormPart, form_boundary, form_parts, text_of, twice
from trioserve.api.ollama.models import untagged
from trioserve.api.openai.request_types import Int32, decode_body, wrong_field
from trioserve.api.surface import OLLAMA_PATH
from trioserve.contracts.endpoint import PREFIX_BLOCK_TOKENS
from trioserve.contracts.ids import BlockHash, root_hash
from trioserve.contracts.image_generation import PROMPT_CHARACTERS_MAX

__all__ = [
    "EDITS_PATH",
    "FORM_PATHS",
    "LINE_PATHS",
    "TRANSFER_PARAMS",
    "RoutedBody",
    "RoutedForm",
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
