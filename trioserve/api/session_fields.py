"""The session that an HTTP request belongs to: which header or field names it, and how long its blocks are preferred.

A session does not change responses. It tells the prefix cache which blocks are likely to be used again. A session opens
with the first request that names it. It ends by its name, after an idle time, or with its connection.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final, Literal, Protocol

import msgspec

from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.request import RETENTION_IDLE_SECONDS_MAX, Retention
from trioserve.engine.sessions import SessionName
from trioserve.http.exchange import Headers

__all__ = [
    "SESSION_HEADER",
    "CacheControl",
    "CacheRetention",
    "NamesSession",
    "check_cache_key",
    "conversation_key",
    "retention_seconds",
    "session_name",
]

SESSION_HEADER: Final = "x-session-id"
SESSION_CHARACTERS_MAX = 512  # The Responses API has the same limit for such fields.
KEY_BYTES = 16

CacheRetention = Literal["in_memory", "in-memory", "24h"]
"""Values of `prompt_cache_retention` in OpenAI's API, with an older spelling."""


class CacheControl(msgspec.Struct, frozen=True, kw_only=True):
    """Mark of Anthropic's API at the end of a prefix that will be used again.

    Attributes:
        ttl: How long the blocks are preferred after each use. Default: 5 minutes.
    """

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None

    @property
    def seconds(self) -> float:
        return 3600.0 if self.ttl == "1h" else 300.0


class NamesSession(Protocol):
    """Fields of a request that name its session.

    Attributes:
        session_key: name of the session. None: the header may name one.
        retention_seconds: time without requests in which the prefix cache prefers to keep the session's blocks. None:
            the default.
    """

    @property
    def session_key(self) -> str | None: ...
    @property
    def retention_seconds(self) -> float | None: ...


def session_name(headers: Headers, body: NamesSession, *, identity: str, owner: str | None) -> SessionName | None:
    """Return the session that a request names. The header takes precedence over the body.

    Args:
        headers: header fields of the request.
        body: body of the request.
        identity: identity of the caller. Callers with different identities never share a session.
        owner: owner of the session.

    Returns:
        The session, or None if the request names none.

    Raises:
        InvalidRequest: the name is too long.
    """
    name = headers.get(SESSION_HEADER)
    if name:
        _check_length("X-Session-Id", name)
    name = name or body.session_key
    if not name:
        return None
    seconds = body.retention_seconds
    return SessionName(
        name=name,
        identity=identity,
        owner=owner,
        retention=None if seconds is None else Retention(idle_seconds=seconds, tenant=identity),
    )


def check_cache_key(key: str) -> None:
    """Check the length of `prompt_cache_key`.

    Args:
        key: value of the field.

    Raises:
        InvalidRequest: the key is too long.
    """
    _check_length("prompt_cache_key", key)


def _check_length(param: str, name: str) -> None:
    if len(name) > SESSION_CHARACTERS_MAX:
        raise InvalidRequest(
            f"{param} has {len(name)} characters, allowed are up to {SESSION_CHARACTERS_MAX}", param=param
        )


def retention_seconds(retention: CacheRetention | None) -> float | None:
    """Return the time that `prompt_cache_retention` asks for, within the limit of this server.

    Args:
        retention: value of the field. None: not sent.

    Returns:
        Seconds. None: the default.
    """
    return RETENTION_IDLE_SECONDS_MAX if retention == "24h" else None


def conversation_key(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> str:
    """Return a name for a conversation whose client names none: a hash of its beginning, which stays the same.

    Two conversations with the same beginning get the same name. They share the blocks of this beginning anyway.

    Args:
        messages: messages in OpenAI's format.
        tools: tools in OpenAI's format. None: no tools.
    """
    first_answer = next((place for place, message in enumerate(messages) if message["role"] == "assistant"), None)
    beginning = msgspec.json.encode([tools, messages[:first_answer]])
    return f"conversation-{blake2b(beginning, digest_size=KEY_BYTES).hexdigest()}"
