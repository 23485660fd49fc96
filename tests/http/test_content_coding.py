"""Tests that compressed request bodies are decompressed, and that the limits apply to the decompressed size."""

from __future__ import annotations

import gzip
import os
import zlib
from typing import Any

import msgspec
import pytest

from trioserve.contracts.errors import InvalidRequest, Overloaded
from trioserve.http.body_budget import PIECE_BYTES, BodyBudget, BodyShare, decoded_body
from trioserve.http.exchange import BodyTooLarge, Headers, UnknownCoding
from trioserve.http.limits import FrontendLimits
from trioserve.testing import open_memory_server

BODY = msgspec.json.encode({"prompt": "Hello", "max_tokens": 3})
LARGE = os.urandom(300_000) + b"\0" * (3 * PIECE_BYTES)


def raw_deflate(data: bytes) -> bytes:
    compressor = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return compressor.compress(data) + compressor.flush()


async def decompressed(raw: bytes, coding: str, **limits: int) -> tuple[bytes, BodyBudget]:
    """Return the decoded body, and the budget after the body was released."""
    budget = BodyBudget(FrontendLimits(**limits))
    share = BodyShare(budget)
    share.add(raw)
    try:
        headers = Headers([("content-encoding", coding)])
        plain = await decoded_body(share, headers)
        assert await decoded_body(share, headers) == plain
        assert budget.bytes_held == len(plain)
    finally:
        share.release()
    assert budget.bytes_held == 0
    return plain, budget


@pytest.mark.parametrize(
    "coding, raw",
    [
        ("gzip", gzip.compress(LARGE, mtime=0)),
        ("X-GZIP", gzip.compress(LARGE, mtime=0)),
        ("deflate", zlib.compress(LARGE)),
        ("deflate", raw_deflate(LARGE)),
        (" identity ", LARGE),
    ],
)
async def test_compressed_request_body_is_decompressed(coding: str, raw: bytes) -> None:
    plain, _ = await decompressed(raw, coding)
    assert plain == LARGE


@pytest.mark.parametrize(
    "coding, raw, error, words",
    [
        ("br", b"x", UnknownCoding, '"br", allowed are gzip, deflate'),
        ("gzip, gzip", gzip.compress(gzip.compress(BODY, mtime=0), mtime=0), UnknownCoding, "gzip, gzip"),
        ("gzip", BODY, InvalidRequest, "the body is no valid gzip"),
        ("gzip", b"", InvalidRequest, "ends in the middle"),
        ("gzip", gzip.compress(LARGE, mtime=0)[:-1], InvalidRequest, "ends in the middle"),
        ("gzip", gzip.compress(BODY, mtime=0) * 2, InvalidRequest, "a single member"),
        ("gzip", gzip.compress(BODY, mtime=0)[:-8] + b"\0" * 8, InvalidRequest, "incorrect data check"),
    ],
)
async def test_invalid_compressed_body_is_refused(coding: str, raw: bytes, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        await decompressed(raw, coding)


@pytest.mark.parametrize("limit, error", [("body_bytes_max", BodyTooLarge), ("bodies_bytes_max", Overloaded)])
async def test_decompressed_size_of_a_body_is_limited(limit: str, error: type[Exception]) -> None:
    """The body has 64 KiB that would decompress to 64 MiB. Decompression stops at the piece that exceeds the limit."""
    bomb = gzip.compress(b"\0" * 2**26, 9, mtime=0)
    assert len(bomb) < 70_000
    with pytest.raises(error, match=r"at most 1048576 are allowed"):
        await decompressed(bomb, "gzip", **{limit: 2**20})


@pytest.mark.parametrize("http", [1, 2])
async def test_server_decompresses_a_body_and_names_the_supported_codings(http: int) -> None:
    async with open_memory_server() as server:
        client = server.client(http=http)
        body, headers = gzip.compress(BODY, mtime=0), {"content-encoding": "gzip"}
        response = await client.post("/v1/completions", body, headers=headers)
        assert response.status == 200
        refused = await client.post("/v1/completions", BODY, headers={"content-encoding": "zstd"})
        assert refused.status == 415
        assert refused.headers["accept-encoding"] == "gzip, deflate"
        error: Any = await refused.json()
        assert error["error"]["code"] == "unsupported_content_encoding"
        await server.assert_all_free()
