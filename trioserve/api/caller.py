"""Who a request is from, as its API key tells, and what that lets it choose: its tenant, its priority, its cache salt.

With keys, a caller is its key. Whatever else it says of itself counts within its own share only: a key that invents
tenants has one turn in the queue all the same, and its prompts hit the cached blocks of its own prompts alone. What
stands in the request counts for a caller that the operator trusts, and where there are no keys: there nobody can be
told from anybody else.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from hashlib import blake2b

import msgspec

from trioserve.api.error_responses import refusal
from trioserve.api.openai.request_types import check_cache_salt
from trioserve.contracts.errors import InvalidRequest
from trioserve.http.limits import KEEP_ALIVE_SECONDS, RESPONSE_BYTES_MAX, RESPONSES_BYTES_MAX

__all__ = ["ANYBODY", "AccessRules", "Caller", "CallerKind", "check_is_admin", "check_may_operate", "check_model"]

NOBODY = ""  # an owner that no key is
SALT_BYTES = 16  # as many as a block's name has


class AccessRules(msgspec.Struct, frozen=True, kw_only=True):
    """What the operator has decided beside the keys themselves.

    gateway_api_keys: of callers that are trusted to say whose a request is, and how urgent.
    priority_min: the best that an ordinary caller may ask for; None: 0 where there are keys, otherwise any.
    shares_prefix_cache: a key's prompts may hit the blocks of other keys' prompts.
    metrics_need_key, load_needs_key: these pages are closed to callers without a key.
    model_is_required: a request that names no model is refused.
    loads_adapters: LoRA adapters may be loaded and unloaded while the server runs.
    response_bytes_max: of a whole response, estimated from the request. See ResponseBound.
    responses_bytes_max: of all whole responses together. See ResponseBudget.
    keep_alive_seconds: a stream that is silent for so long gets a comment.
    keep_alive_json: whole JSON responses get white space as often, and so status 200 before they are known.

    These count where there are no keys:
    host_names: what the Host header may be; None: anything. See PageGate.
    has_network_names: the Host header may also be a name that only the local network defines. See PageGate.
    page_origins: of web pages that may use the API.
    operates_without_key: anybody may use the routes that operate the server.
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
    ANYBODY = "anybody"  # there are no keys, or this route needs none
    ORDINARY = "ordinary"
    GATEWAY = "gateway"
    ADMIN = "admin"


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """owner: whose requests it may see and abort, and to whom its own belong; None: all, and nobody's. priority_min:
    the best that it may ask for; None: any. salt_key: what its cache salts are derived with; None: they count as they
    are. It is derived from the API key and shown to nobody. may_operate: False for a stranger, who has no key at a
    server that other machines reach: see check_may_operate."""

    kind: CallerKind = CallerKind.ANYBODY
    owner: str | None = None
    priority_min: int | None = None
    salt_key: bytes | None = None
    may_operate: bool = True

    @property
    def lists(self) -> str | None:
        """Whose live requests it may list; None: all. A stranger lists none: who knows an id can abort its request."""
        return self.owner if self.may_operate else NOBODY

    def tenant(self, named: str | None) -> str:
        """With whom it shares one turn in the queue. named: in the request's tenant header."""
        if self.owner is None:
            return named or ""
        if self.kind is CallerKind.GATEWAY and named:
            return f"{self.owner}/{named}"
        return self.owner

    def tenant_told(self, named: str | None) -> str | None:
        """What a router tells endpoints in the tenant header, so that they are fair between its callers, too: a name
        that tells nothing of the key. named: as above."""
        if self.owner is None:
            return named
        return blake2b(self.tenant(named).encode("utf-8", "surrogatepass"), digest_size=SALT_BYTES).hexdigest()

    def cache_salt(self, own: str | None, named: str | None) -> str | None:
        """The salt of its prompts' blocks: equal only for the same key, the same tenant of a gateway's, and the same
        salt of the request's own. named: as above. Raises InvalidRequest."""
        if self.salt_key is None:
            return own
        check_cache_salt(own)
        tenant = named if self.kind is CallerKind.GATEWAY else None
        parts = b"".join(map(_framed, (tenant, own)))
        return blake2b(parts, key=self.salt_key, digest_size=SALT_BYTES).hexdigest()

    def check_priority(self, priority: int | None) -> None:
        """Raises InvalidRequest for a better one than the caller may ask for."""
        least = self.priority_min
        if least is not None and priority is not None and priority < least:
            raise InvalidRequest(
                f"priority is {priority}, and the best that this server gives its callers is {least} (a lower number "
                "is sooner): ask for that or a higher number, or leave it out; --priority-min sets it",
                param="priority",
            )


ANYBODY = Caller()


def check_model(rules: AccessRules, asked: str | None, served: Iterable[str]) -> None:
    """Raises InvalidRequest where none is asked for, and one has to be."""
    if asked is None and rules.model_is_required:
        raise InvalidRequest(
            f"the request names no model, and here it has to: served are {', '.join(served)}", param="model"
        )


def _framed(part: str | None) -> bytes:
    """So that no two pairs of parts look alike."""
    if part is None:
        return b"\x00"
    encoded = part.encode("utf-8", "surrogatepass")
    return b"\x01" + len(encoded).to_bytes(8, "big") + encoded


def check_is_admin(caller: Caller, message: str) -> None:
    """Raises Refusal (403) for an owner of some requests only. message: what is the admin's, in a sentence."""
    if caller.owner is not None:
        raise refusal("not_admin", message)


def check_may_operate(caller: Caller) -> None:
    """Raise Refusal (403) for a caller without a key, where a stranger may be one."""
    if not caller.may_operate:
        raise refusal(
            "operator_routes_off",
            "this is for the operator of the server, and it is off: other machines reach the server, and "
            "no API key says who asks. Start it with --api-key and --admin-api-key, or with "
            "--allow-operator-without-key if everybody who reaches it may operate it",
        )
