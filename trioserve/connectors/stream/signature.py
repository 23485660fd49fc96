"""Signs where KV is held, so that a request can only name engines of the same group.

The place to read from comes with a request, and anybody may have written that. Without a signature the writer would
choose to which ports of which machines this server connects, and learn from the time and the error what is there. So
the engine that holds the KV signs its place, and the reader connects to nothing that is not signed.

The key is the group's shared one, or where there is none, and so all engines are on this machine, one in a file that
only this user can read.
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
"""Where the file is, instead of `trioserve` in the user's cache folder."""

log = logging.getLogger(__name__)


def signed(params: KVTransferParams, key: bytes) -> KVTransferParams:
    """Add the signature of this engine's group."""
    return msgspec.structs.replace(params, remote_signature=_signature(params, key))


def is_signed(params: KVTransferParams, key: bytes) -> bool:
    """Whether an engine of this group says that it holds this KV. Takes as long for every wrong signature."""
    given = (params.remote_signature or "").encode("utf-8", "surrogatepass")
    return hmac.compare_digest(given, _signature(params, key).encode())


def _signature(params: KVTransferParams, key: bytes) -> str:
    place = (params.remote_host, params.remote_port, params.remote_engine_id, params.remote_request_id)
    return hmac.new(key, msgspec.msgpack.encode(place), hashlib.sha256).hexdigest()


def signing_key(options: StreamOptions) -> bytes:
    """The key of the group that these options describe. Raises StartupError as StreamOptions.read_key does."""
    shared = options.read_key() or machine_key()
    return hashlib.blake2b(shared, key=b"trioserve kv place", digest_size=KEY_BYTES).digest()


def machine_key(environment: Mapping[str, str] = os.environ) -> bytes:
    """The key that the engines of this user on this machine have in common. The first of them makes it.

    Where the file cannot be used, this engine has a key of its own, a line in the log says so, and the KV of other
    engines is computed here instead of being read.
    """
    path = Path(FILE_NAME)
    try:
        # Path.home() fails for a user without a home, as some containers have.
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
    """Under its name the file is whole from the first moment. If two engines make it, the first one counts."""
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
    """Raises ValueError for a file that others could have written or read."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        key = file.read(KEY_BYTES + 1)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise ValueError("it must be a file of this user that nobody else may read or write: remove it")
    if len(key) != KEY_BYTES:
        raise ValueError(f"it has not {KEY_BYTES} bytes: remove it")
    return key
