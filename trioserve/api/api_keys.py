"""API keys: find the caller for the key in a request.

Clients send a key as a bearer token (RFC 6750) or, as clients of Anthropic's API do, in the header X-Api-Key.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

import msgspec

from trioserve.api.caller import ANYBODY, AccessRules, Caller, CallerKind
from trioserve.api.error_responses import refusal
from trioserve.contracts.errors import StartupError

__all__ = ["ApiKeys"]


PRIORITY_MIN_WITH_KEYS = 0  # the priority of requests that set none


class ApiKeys:
    """Digests of the configured keys, and the rights of each key's owner. Without keys, everyone may do everything.

    Args:
        keys: keys of ordinary callers.
        admin_key: key of the administrator. None: there is none.
        rules: access rules, including the keys of gateways.

    Raises:
        StartupError: a key has characters that no header can carry, or a rule needs keys that are not set.
    """

    def __init__(
        self, keys: Iterable[str] = (), *, admin_key: str | None = None, rules: AccessRules | None = None
    ) -> None:
        self.rules = rules or AccessRules()
        self._callers: dict[bytes, Caller] = {}
        for kind, given in ((CallerKind.ORDINARY, keys), (CallerKind.GATEWAY, self.rules.gateway_api_keys)):
            for key in given:
                self._add(key, kind)
        if admin_key is not None:
            if not self._callers:
                raise StartupError(
                    "an admin key is set, but no API key: without API keys, everybody sees every request"
                )
            self._add(admin_key, CallerKind.ADMIN)
        self._check_rules(has_admin=admin_key is not None)
        self._nobody = msgspec.structs.replace(
            ANYBODY, priority_min=self.rules.priority_min, may_operate=self.rules.operates_without_key
        )

    @property
    def are_set(self) -> bool:
        """True if there are keys, which identify the callers."""
        return bool(self._callers)

    def caller(self, authorization: str | None, own_header: str | None = None) -> Caller:
        """Find the caller for the headers of a request. If both headers have a valid key, Authorization counts.

        Args:
            authorization: value of the header Authorization. None: not sent.
            own_header: value of the header X-Api-Key. None: not sent.

        Raises:
            Refusal: there are keys, and the request has none of them (401).
        """
        if not self._callers:
            return self._nobody
        scheme, _, token = (authorization or "").partition(" ")
        by_token = self._known(token if scheme.lower() == "bearer" else "")
        by_header = self._known(own_header or "")
        caller = by_token or by_header
        if caller is None:
            came = authorization is not None or own_header is not None
            what = "the API key is wrong" if came else "the request has no API key"
            raise refusal(
                "invalid_api_key",
                f'{what}: send it as "Authorization: Bearer KEY" or "X-Api-Key: KEY"',
                headers=(("www-authenticate", 'Bearer realm="trioserve"'),),
            )
        return caller

    def caller_of(self, owner: str | None) -> Caller | None:
        """Find the caller with this owner's name.

        Args:
            owner: name of an owner. None: the administrator, or anybody if there are no keys.

        Returns:
            The caller, or None if the owner's key no longer exists.
        """
        if owner is None:
            return next((caller for caller in self._callers.values() if caller.owner is None), self._nobody)
        return self._callers.get(bytes.fromhex(owner))

    def _known(self, key: str) -> Caller | None:
        given = _digest(key.strip())
        # All keys are compared in constant time, so the duration of a refusal reveals nothing about a key.
        matches = [hmac.compare_digest(given, digest) for digest in self._callers]
        return self._callers[given] if any(matches) else None

    def _add(self, key: str, kind: CallerKind) -> None:
        """Add a key. If it was added before with another kind, the new kind counts. So add trusted kinds last."""
        digest = _checked_digest(key)
        if kind is CallerKind.ADMIN:
            self._callers[digest] = Caller(kind=kind)
            return
        rules, least = self.rules, None
        if kind is CallerKind.ORDINARY:
            least = PRIORITY_MIN_WITH_KEYS if rules.priority_min is None else rules.priority_min
        self._callers[digest] = Caller(
            kind=kind,
            owner=digest.hex(),
            priority_min=least,
            salt_key=None if rules.shares_prefix_cache else _salt_key(digest),
        )

    def _check_rules(self, *, has_admin: bool) -> None:
        rules = self.rules
        if rules.metrics_need_key and not has_admin:
            raise StartupError("--metrics-need-key is set, but no --admin-api-key, which is needed to read them")
        if rules.load_needs_key and not self._callers:
            raise StartupError("--load-needs-key is set, but no API key: see --api-key")


def _salt_key(digest: bytes) -> bytes:
    """Derive the salt key. Servers with the same API key derive the same salt key, and so name shared blocks alike."""
    return hashlib.blake2b(digest, digest_size=32, person=b"trioserve salt").digest()


def _checked_digest(key: str) -> bytes:
    """Return the key's digest. Raise StartupError if the key has characters that no header can carry."""
    if not key or not all("!" <= character <= "~" for character in key):
        raise StartupError("an API key must be 1 or more printable ASCII characters without blanks")
    return _digest(key)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
