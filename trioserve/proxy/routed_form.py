"""Fields of a multipart form that the router reads or replaces. Other parts, mainly files, are forwarded unchanged."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from trioserve.api.form import INLINE_BYTES_MAX, FormPart, form_boundary, form_parts, text_of, twice
from trioserve.api.openai.request_types import wrong_field
from trioserve.contracts.image_generation import PROMPT_CHARACTERS_MAX
from trioserve.proxy.routed_body import RoutedBody

if TYPE_CHECKING:
    from trioserve.proxy.router_context import RouterContext

__all__ = ["EDITS_PATH", "RoutedForm", "read_form"]

EDITS_PATH = "/v1/images/edits"
PROMPT = "prompt"
READ = frozenset({PROMPT, "model", "stream", "n", "priority", "queue_timeout", "ttft_timeout", "timeout"})
TEXT_BYTES_MAX = 4 * PROMPT_CHARACTERS_MAX  # bytes of a prompt in UTF-8, as an image engine accepts it


class RoutedForm:
    """A multipart form and the fields of it that the router has read.

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
        # Every value of a form is text. An empty value means that the field was not filled in.
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


async def read_form(context: RouterContext, raw: bytes) -> RoutedForm:
    """Parse a form. A large form is parsed in a thread, in turn with forms of other tenants.

    Args:
        context: Request that has the form as its body.
        raw: Bytes of the form.

    Raises:
        InvalidRequest: As for `RoutedForm.read`.
    """
    content_type = context.exchange.headers.get("content-type")
    if len(raw) <= INLINE_BYTES_MAX:
        return RoutedForm.read(raw, content_type)
    tenant = context.caller.tenant(context.named_tenant)
    return await context.forms.call(partial(RoutedForm.read, raw, content_type), key=tenant)
