"""Who may use the API: whoever sends one of the configured keys as a bearer token (RFC 6750)."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from trioserve.contracts.errors import StartupError
from trioserve.frontend.error_responses import REASON_HEADER, ErrorAnswer, Refusal

__all__ = ["ApiKeys"]


class ApiKeys:
    """The configured keys, as digests. Without any, everybody may.

    Raises StartupError for a key that no header could carry.
    """

    def __init__(self, keys: Iterable[str] = (), *, admin_key: str | None = None) -> None:
        self._digests = tuple(_checked_digest(key) for key in keys)
        self._admin_digest = None if admin_key is None else _checked_digest(admin_key)
        if self._admin_digest is not None:
            if not self._digests:
                raise StartupError("an admin key is set, but no API key: without those, everybody sees every request")
            self._digests += (self._admin_digest,)

    def owner(self, authorization: str | None) -> str | None:
        """Who sends this: a name for the key in the value of the Authorization header, or None for somebody who sees
        all requests (the admin; anybody, if there are no keys). Raises Refusal (401) unless it holds a key."""
        if not self._digests:
            return None
        scheme, _, token = (authorization or "").partition(" ")
        given = _digest(token.strip())
        # Every key is compared, and in constant time: how long a refusal takes tells nothing about any of them.
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        if scheme.lower() != "bearer" or not any(matches):
            what = "no API key came" if authorization is None else "the API key is wrong"
            raise Refusal(
                ErrorAnswer(
                    status=401,
                    type="invalid_request_error",
                    code="invalid_api_key",
                    message=f'{what}: send it as "Authorization: Bearer KEY"',
                    headers=(("www-authenticate", 'Bearer realm="trioserve"'), (REASON_HEADER, "invalid_api_key")),
                )
            )
        if self._admin_digest is not None and hmac.compare_digest(given, self._admin_digest):
            return None
        return given.hex()


def _checked_digest(key: str) -> bytes:
    """Raises StartupError for a key that no header could carry."""
    if not key or not all("!" <= character <= "~" for character in key):
        raise StartupError("an API key must be 1 or more printable ASCII characters without blanks")
    return _digest(key)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
