"""Callers and API keys: who sent a request, and which tenant, priority and cache salt the caller may use.

With API keys, each key is one caller. A caller cannot gain a larger share of the queue by sending other tenant names,
and its prompts hit only cached blocks of its own prompts. The tenant name in a request counts in two cases: the
operator trusts the caller, or the server has no keys, so that callers cannot be distinguished.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
from collections.abc import Iterable
from hashlib import blake2b

import msgspec

from trioserve.api.error_responses import Refusal, refusal
from trioserve.api.openai.request_types import check_cache_salt
from trioserve.contracts.errors import InvalidRequest, StartupError
from trioserve.http.exchange import Headers
from trioserve.http.limits import KEEP_ALIVE_SECONDS, RESPONSE_BYTES_MAX, RESPONSES_BYTES_MAX

__all__ = [
    "ANYBODY",
    "AccessRules",
    "ApiKeys",
    "Caller",
    "CallerKind",
    "check_is_admin",
    "check_may_operate",
    "check_model",
]

NOBODY = ""  # No API key has this owner.
SALT_BYTES = 16  # The salt is as long as the name of a block.


class AccessRules(msgspec.Struct, frozen=True, kw_only=True):
    """Access rules that the operator sets in addition to the API keys.

    Attributes:
        gateway_api_keys: keys of callers that the operator trusts to name the tenant and the priority of a request.
        priority_min: lowest priority number that an ordinary caller may use. None: 0 if there are keys, otherwise any.
        shares_prefix_cache: True: a key's prompts may hit the blocks of other keys' prompts.
        metrics_need_key: True: /metrics is closed to callers without the admin's key.
        load_needs_key: True: /load is closed to callers without a key.
        model_is_required: True: a request that names no model is refused.
        loads_adapters: True: LoRA adapters may be loaded and unloaded while the server runs.
        response_bytes_max: limit of one whole response, estimated from the request. See ResponseBound.
        responses_bytes_max: limit of all whole responses together. See ResponseBudget.
        keep_alive_seconds: silence after which a stream sends a comment.
        keep_alive_json: True: silent whole JSON responses send white space, after an early head with status 200.
        host_names: names that the Host header may have. None: any. Unused if there are keys. See PageGate.
        has_network_names: True: the Host header may also have a name that only the local network defines. Unused if
            there are keys. See PageGate.
        page_origins: origins of web pages that may use the API. Unused if there are keys.
        operates_without_key: True: if there are no keys, anybody may use the routes that operate the server.
    """

    gateway_api_keys: tuple[str, ...] = ()
    priority_min: int | None = None
    shares_prefix_cache: bool = False
    metrics_need_key: bool = False
    load_needs_key: bool = False
    model_is_required: bool = False
    loads_adapters: bool = False
    response_bytes_max: int = RESPONSE_BYTES_MAX
    responses_bytes_max: int = RESPONSES_BYTES_MAX
    keep_alive_seconds: float = KEEP_ALIVE_SECONDS
    keep_alive_json: bool = False
    host_names: tuple[str, ...] | None = None
    has_network_names: bool = False
    page_origins: tuple[str, ...] = ()
    operates_without_key: bool = True


class CallerKind(enum.Enum):
    ANYBODY = "anybody"  # The server has no API keys, or the route needs none.
    ORDINARY = "ordinary"
    GATEWAY = "gateway"
    ADMIN = "admin"


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """Identity and rights of the sender of a request.

    Attributes:
        kind: how far the operator trusts the caller.
        owner: owner of the requests that the caller may see and abort, and of its new requests. None: the caller sees
            all requests, and its own have no owner.
        priority_min: lowest priority number that the caller may use. None: any.
        salt_key: secret from which cache salts are derived, itself derived from the API key. None: a request's salt is
            used unchanged.
        may_operate: False for a caller without a key, if other machines reach the server. See check_may_operate.
    """

    kind: CallerKind = CallerKind.ANYBODY
    owner: str | None = None
    priority_min: int | None = None
    salt_key: bytes | None = None
    may_operate: bool = True

    @property
    def lists(self) -> str | None:
        """Owner whose running requests the caller may list. None: all.

        A caller that may not operate the server may list no requests, because a caller who knows the id of a request
        could abort the request.
        """
        return self.owner if self.may_operate else NOBODY

    def tenant(self, named: str | None) -> str:
        """Return the tenant of a request. All requests of one tenant share one turn in the queue.

        Args:
            named: tenant in the header of the request. None: the request has no such header.
        """
        if self.owner is None:
            return named or ""
        if self.kind is CallerKind.GATEWAY and named:
            return f"{self.owner}/{named}"
        return self.owner

    def tenant_for_endpoint(self, named: str | None) -> str | None:
        """Return the tenant name that a router sends to endpoints, so that the queues of the endpoints are fair too.

        Args:
            named: tenant in the header of the request. None: the request has no such header.

        Returns:
            A name that reveals nothing of the key. None: no tenant.
        """
        if self.owner is None:
            return named
        return blake2b(self.tenant(named).encode("utf-8", "surrogatepass"), digest_size=SALT_BYTES).hexdigest()

    def cache_salt(self, own: str | None, named: str | None) -> str | None:
        """Return the salt for the names of the prompt's blocks.

        Two requests have equal salts only if the key, the gateway's tenant and the request's own salt are equal.

        Args:
            own: salt in the request. None: the request has no salt.
            named: tenant in the header of the request. None: the request has no such header.

        Raises:
            InvalidRequest: the request's salt has a bad value.
        """
        if self.salt_key is None:
            return own
        check_cache_salt(own)
        tenant = named if self.kind is CallerKind.GATEWAY else None
        parts = b"".join(map(_framed, (tenant, own)))
        return blake2b(parts, key=self.salt_key, digest_size=SALT_BYTES).hexdigest()

    def check_priority(self, priority: int | None) -> None:
        """Check a request's priority.

        Args:
            priority: priority in the request. None: the default.

        Raises:
            InvalidRequest: the number is lower than the caller may use.
        """
        least = self.priority_min
        if least is not None and priority is not None and priority < least:
            raise InvalidRequest(
                f"priority is {priority}, and the lowest number that this server allows is {least} (lower is sooner): "
                f"send {least} or a higher number, or leave it out; --priority-min sets the limit",
                param="priority",
            )


ANYBODY = Caller()


def check_model(rules: AccessRules, asked: str | None, served: Iterable[str]) -> None:
    """Check that the request names a model if it must.

    Args:
        rules: access rules of the operator.
        asked: model name in the request. None: the request names no model.
        served: names for the error message.

    Raises:
        InvalidRequest: the request must name a model, and names none.
    """
    if asked is None and rules.model_is_required:
        raise InvalidRequest(
            f"the request names no model, and this server needs one: served are {', '.join(served)}", param="model"
        )


def _framed(part: str | None) -> bytes:
    """Encode a value so that different lists of values never have the same concatenated encodings."""
    if part is None:
        return b"\x00"
    encoded = part.encode("utf-8", "surrogatepass")
    return b"\x01" + len(encoded).to_bytes(8, "big") + encoded


def check_is_admin(caller: Caller, message: str) -> None:
    """Check that the caller sees the requests of all owners.

    Args:
        caller: sender of the request.
        message: sentence for the error.

    Raises:
        Refusal: the caller has an ordinary key or a gateway's key (403).
    """
    if caller.owner is not None:
        raise refusal("not_admin", message)


def check_may_operate(caller: Caller) -> None:
    """Check that the caller may operate the server.

    Args:
        caller: sender of the request.

    Raises:
        Refusal: the caller has no key, and other machines reach the server (403).
    """
    if not caller.may_operate:
        raise refusal(
            "operator_routes_off",
            "this path is for the operator of the server, and it is off: other machines reach the server, and "
            "there are no API keys. Start the server with --api-key and --admin-api-key, or with "
            "--allow-operator-without-key if everybody who reaches it may operate it",
        )


# This is the default priority. Ordinary callers may use no lower number, unless the operator sets priority_min.
PRIORITY_MIN_WITH_KEYS = 0


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
        self._latest: tuple[Headers, Caller] | None = None  # Newest request that `knows` has checked.
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

    def knows(self, headers: Headers) -> bool:
        """Return True if a request has a valid key. The next call of `caller` for the same request finds this result.

        Args:
            headers: header fields of the request.
        """
        try:
            self._latest = headers, self.caller(headers)
        except Refusal:
            return False
        return True

    def caller(self, headers: Headers) -> Caller:
        """Find the caller of a request. If both Authorization and X-Api-Key have a valid key, Authorization counts.

        Args:
            headers: header fields of the request.

        Raises:
            Refusal: there are keys, and the request has none of them (401).
        """
        if not self._callers:
            return self._nobody
        latest, self._latest = self._latest, None
        if latest is not None and latest[0] is headers:
            return latest[1]
        authorization, own_header = headers.get("authorization"), headers.get("x-api-key")
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
        """Add an API key of one kind. If the key was added before with another kind, the new kind counts. So the more
        trusted kinds must be added later.
        """
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
