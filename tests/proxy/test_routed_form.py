"""Tests forms at a router: the router reads some fields, and forwards all other bytes unchanged."""

from __future__ import annotations

import msgspec
import pytest

from trioserve.api.form import PARTS_MAX, form_boundary, form_parts
from trioserve.contracts.errors import InvalidRequest
from trioserve.proxy.routed_body import RoutedForm

TYPE = 'multipart/form-data; boundary="a b"'
FILE = bytes(range(256)) + b"\r\n--a \r\n\r\n--"


def form(*parts: tuple[str, str | bytes], preamble: bytes = b"") -> bytes:
    body = preamble
    for name, content in parts:
        data = content if isinstance(content, bytes) else content.encode()
        kind = b"; filename=x\r\nContent-Type: image/png" if isinstance(content, bytes) else b""
        body += b'--a b\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n' % (name.encode(), kind, data)
    return body + b"--a b--\r\n"


def told(raw: bytes) -> list[tuple[str, bytes]]:
    return [(part.name, part.content) for part in form_parts(raw, form_boundary(TYPE))]


def test_fields_of_a_form_for_routing_are_read() -> None:
    raw = form(("image", FILE), ("model", "m"), ("prompt", 'a "cat"'), ("n", "3"), ("stream", "true"), ("timeout", "2"))
    body = RoutedForm.read(raw, TYPE).body
    assert (body.model, body.n, body.stream, body.timeout, body.priority) == ("m", 3, True, 2.0, None)
    assert msgspec.json.decode(body.content) == 'a "cat"'


def test_empty_field_of_a_form_counts_as_missing() -> None:
    body = RoutedForm.read(form(("model", ""), ("n", ""), ("image", FILE)), TYPE).body
    assert (body.model, body.n, body.prompt_count) == (None, None, 1)


@pytest.mark.parametrize("preamble", [b"", b"\r\n", b"some text\r\n"])
def test_router_replaces_fields_of_a_form(preamble: bytes) -> None:
    parts = [("image", FILE), ("timeout", "9"), ("seed", "5"), ("model", "m"), ("mask", FILE), ("ttft_timeout", "1")]
    routed = RoutedForm.read(form(*parts, preamble=preamble), TYPE)
    rest = [("image", FILE), ("seed", b"5"), ("mask", FILE)]
    rewritten = routed.rewritten({"timeout": 0.5, "model": "ü"}, without=("ttft_timeout", "queue_timeout"))
    assert told(rewritten) == [("timeout", b"0.5"), ("model", "ü".encode()), *rest]
    assert FILE in rewritten
    assert b"filename=x\r\nContent-Type: image/png" in rewritten
    only_less = routed.rewritten({}, without=("timeout", "model", "ttft_timeout"))
    assert told(only_less) == rest


def test_unchanged_parts_of_a_form_are_forwarded_byte_for_byte() -> None:
    raw = form(("image", FILE), ("model", "m"))
    assert RoutedForm.read(raw, TYPE).rewritten({}, without=("timeout",)) is raw


@pytest.mark.parametrize(
    ("parts", "param"),
    [
        ([("n", "many")], "n"),
        ([("stream", "perhaps")], "stream"),
        ([("prompt", "a"), ("prompt", "b")], "prompt"),
        ([("model", "m" * 200_000)], "model"),
    ],
)
def test_error_names_the_invalid_field_of_a_form(parts: list[tuple[str, str]], param: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        RoutedForm.read(form(*parts), TYPE)
    assert refusal.value.param == param


def test_parts_that_the_router_does_not_read_may_be_repeated_and_long() -> None:
    parts = [("image[]", FILE * 1000), ("image[]", b""), ("note", "x" * 200_000)]
    routed = RoutedForm.read(form(*parts, ("model", "m")), TYPE)
    assert [name for name, _ in told(routed.rewritten({"model": "n"}))] == ["model", "image[]", "image[]", "note"]


@pytest.mark.parametrize("raw", [b"", b"{}", form(("model", "m"))[:-9], form(*[("a", "b")] * (PARTS_MAX + 1))])
def test_router_refuses_an_invalid_form_body(raw: bytes) -> None:
    with pytest.raises(InvalidRequest, match="not a multipart form"):
        RoutedForm.read(raw, TYPE)


def test_form_without_a_boundary_is_refused() -> None:
    with pytest.raises(InvalidRequest) as refusal:
        RoutedForm.read(form(), "application/json")
    assert refusal.value.param == "content-type"
