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

import msgspec

from trioserve.connectors.stream.options import StreamOptions
from trioserve.contracts.kv_transfer_params import KVTransferParams

__all__ = ["is_signed", "machine_key", "signed", "signing_key"]

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
