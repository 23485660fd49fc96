"""Tests the HPACK encoder without a dynamic table: any decoder can read its output, with any offered table size."""

from __future__ import annotations

import hpack
import pytest

from trioserve.http.http2.protocol import FieldEncoder

HEADS = [
    [(b":status", b"200"), (b"content-type", b"application/json"), (b"x-request-id", b"a1"), (b"content-length", b"2")],
    [(b":status", b"404"), (b"date", b"Thu, 01 Jan 1970 00:00:00 GMT"), (b"via", b"")],
    [(b":status", b"429"), (b"retry-after", b"1"), (b"x-" + b"n" * 200, b"v")],
]


@pytest.mark.parametrize("value_bytes", [0, 1, 126, 127, 128, 254, 255, 16_383, 16_384, 40_000])
def test_hpack_field_value_of_any_length_is_decoded(value_bytes):
    fields = [(b"content-type", b"x" * value_bytes), (b"x-own", b"y" * value_bytes)]
    decoder = hpack.Decoder(max_header_list_size=100_000)
    assert decoder.decode(FieldEncoder().encode(fields), raw=True) == fields


@pytest.mark.parametrize("offered", [0, 100, 4096, 2**20])
def test_hpack_response_is_decoded_with_any_offered_table_size(offered):
    encoder, decoder = FieldEncoder(), hpack.Decoder()
    encoder.header_table_size = offered
    decoder.max_allowed_table_size = offered
    for head in HEADS * 3:
        assert decoder.decode(encoder.encode(head), raw=True) == head
    assert decoder.header_table_size == 0
    assert not decoder.header_table.dynamic_entries


def test_hpack_field_in_the_static_table_is_one_byte():
    encoder = FieldEncoder()
    encoder.encode([])
    assert encoder.encode([(b":status", b"200")]) == b"\x88"
