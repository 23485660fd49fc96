"""Signatures of the addresses where KV is held, so that a request can only name engines of the same group.

The address to read from comes with a request, and any client may have written it. Without a signature, a client could
make this server connect to any port of any machine. Response times and errors would then show which services run there.
The engine that holds the KV therefore signs its address, and the reader connects only to signed addresses.

The signing key is derived from the key of the group. A group without a key runs on one machine. Its signing key is
derived from a file that only this user can read.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from trioserve.connectors.settings import StreamOptions
from trioserve.connectors.stream.frames import ID_LENGTH_MAX
from trioserve.contracts.request import KVTransferParams

__all__ = ["is_signed", "machine_key", "signed", "signing_key", "Origin", "Source", "origin_of"]

KEY_BYTES = 32
FILE_NAME = "kv-key"
DIRECTORY_VARIABLE = "TRIOSERVE_KV_KEY_DIRECTORY"
"""Environment variable with the folder of the key file. The default is `trioserve` in the user's cache folder."""

log = logging.getLogger(__name__)


def signed(params: KVTransferParams, key: bytes) -> KVTransferParams:
    """Add the signature of the group to parameters.

    Args:
        params: Parameters with the address of this engine.
        key: Signing key of the group.
    """
    return msgspec.structs.replace(params, remote_signature=_signature(params, key))


def is_signed(params: KVTransferParams, key: bytes) -> bool:
    """Return True if an engine of this group signed the address in the parameters.

    The comparison takes constant time, so that a client cannot guess a signature step by step.

    Args:
        params: Parameters from a request.
        key: Signing key of the group.
    """
    given = (params.remote_signature or "").encode("utf-8", "surrogatepass")
    return hmac.compare_digest(given, _signature(params, key).encode())


def _signature(params: KVTransferParams, key: bytes) -> str:
    place = (params.remote_host, params.remote_port, params.remote_engine_id, params.remote_request_id)
    return hmac.new(key, msgspec.msgpack.encode(place), hashlib.sha256).hexdigest()


def signing_key(options: StreamOptions) -> bytes:
    """Derive the signing key of the group from its options.

    Args:
        options: Options with the key of the group. Without a key, the key file of this machine is used.

    Raises:
        StartupError: the key cannot be read, or is too short or too long.
    """
    shared = options.read_key() or machine_key()
    return hashlib.blake2b(shared, key=b"trioserve kv place", digest_size=KEY_BYTES).digest()


def machine_key(environment: Mapping[str, str] = os.environ) -> bytes:
    """Return the key that all engines of this user on this machine share. The first engine creates its file.

    If the file cannot be used, the function logs a warning and returns a random key. The engine then computes all KV
    and reads none from other engines.

    Args:
        environment: Environment variables.
    """
    path = Path(FILE_NAME)
    try:
        # Path.home() fails for a user without a home directory. Some containers have such users.
        if directory := environment.get(DIRECTORY_VARIABLE):
            path = Path(directory) / path
        else:
            path = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trioserve" / path
        if not path.exists():
            _make(path)
        return _read(path)
    except (OSError, ValueError, RuntimeError) as error:
        log.warning("kv of other engines is not read, give all engines a key or key_file path=%s error=%s", path, error)
        return secrets.token_bytes(KEY_BYTES)


def _make(path: Path) -> None:
    """Create the key file atomically. If two engines create the file at once, the first file stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{FILE_NAME}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
        try:
            os.link(draft, path)
        except FileExistsError:
            return
    finally:
        draft.unlink()


def _read(path: Path) -> bytes:
    """Read the key file.

    Raises:
        ValueError: the file has the wrong size, or another user may read, write or own it.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        key = file.read(KEY_BYTES + 1)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise ValueError("the key file must belong to this user, and no other user may read or write it: remove it")
    if len(key) != KEY_BYTES:
        raise ValueError(f"the key file must have {KEY_BYTES} bytes: remove it")
    return key


TOKENS_MAX = 100_000_000  # No context is as long, so a larger value is an error.
BLOCKS_MAX = 100_000  # enough for one million tokens in small blocks; checking the list takes a few milliseconds


class Source(NamedTuple):
    """Engine that holds blocks, with the address where it listens."""

    host: str
    port: int
    engine_id: str

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class Origin(NamedTuple):
    """Engine and request that hold KV which another request can load.

    Attributes:
        source: Engine that holds the blocks.
        request_id: Id of the request at the holder.
        token_count: Number of positions whose KV is held. None if the parameters do not contain this number.
    """

    source: Source
    request_id: str
    token_count: int | None


def origin_of(params: KVTransferParams, options: StreamOptions, key: bytes) -> Origin | str:
    """Find the holder of a request's KV. Check every field, because a client may have written it.

    Args:
        params: kv_transfer_params of the request.
        options: Options of this connector, which define the allowed hosts.
        key: Key with which the engines of this group sign their addresses.

    Returns:
        The origin, or a sentence that says which field is wrong.
    """
    host, port = params.remote_host, params.remote_port
    if not host or len(host) > 255 or not host.isprintable():
        return "its kv_transfer_params have no valid remote_host"
    if port is None or not 0 < port <= 65_535:
        return f"its kv_transfer_params have remote_port {port}: it must be 1 to 65535"
    for name, value in (("engine", params.remote_engine_id), ("request", params.remote_request_id)):
        if not value or len(value) > ID_LENGTH_MAX:
            return f"its kv_transfer_params have no remote_{name}_id of 1 to {ID_LENGTH_MAX} characters"
    assert params.remote_engine_id is not None
    assert params.remote_request_id is not None
    if params.tp_size != 1:
        return f"its kv_transfer_params have tp_size {params.tp_size}: this engine reads from engines with tp_size 1"
    token_count, block_size = params.remote_num_tokens, params.remote_block_size
    if token_count is not None and not 0 < token_count <= TOKENS_MAX:
        return f"its kv_transfer_params have remote_num_tokens {token_count}: it must be 1 to {TOKENS_MAX}"
    if block_size is not None and not 0 < block_size <= TOKENS_MAX:
        return f"its kv_transfer_params have remote_block_size {block_size}: it must be 1 to {TOKENS_MAX}"
    blocks = params.remote_block_ids
    if blocks is not None and len(blocks) > BLOCKS_MAX:
        return f"its kv_transfer_params name {len(blocks)} blocks: at most {BLOCKS_MAX} are allowed"
    if blocks is not None and any(isinstance(block, tuple) for block in blocks):
        if len(blocks) != 1 or not isinstance(blocks[0], tuple):
            return "its kv_transfer_params have several groups of blocks: this engine accepts one group"
        blocks = blocks[0]
    if blocks is not None and block_size is not None:
        # The holder checks its own records later. This check only finds contradictions early.
        if token_count is None:
            token_count = len(blocks) * block_size
        elif not 0 <= len(blocks) * block_size - token_count < block_size:
            return (
                f"its kv_transfer_params say {token_count} tokens in {len(blocks)} blocks of {block_size}: the "
                "numbers do not match"
            )
    objection = options.objection_to(host)
    if objection is not None:
        return objection
    if not is_signed(params, key):
        return (
            "its kv_transfer_params have no remote_signature of an engine of this group: pass on all fields of the "
            "other engine's response, and give both engines the same key"
        )
    return Origin(Source(host, port, params.remote_engine_id), params.remote_request_id, token_count)
