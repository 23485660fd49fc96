"""Choice of the API whose format a response has, from the request's path or headers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trioserve.api.anthropic.surface import ANTHROPIC, MESSAGES_PATH, VERSION_HEADER
from trioserve.api.ollama.surface import OLLAMA, OLLAMA_PATH
from trioserve.api.surface import OPENAI, Surface

if TYPE_CHECKING:
    from trioserve.http.exchange import Exchange

__all__ = ["surface_of"]


def surface_of(exchange: Exchange) -> Surface:
    """Choose the format of errors and ids, also for unknown paths.

    Args:
        exchange: the request.
    """
    path = exchange.path
    if path.startswith(OLLAMA_PATH):
        return OLLAMA
    if path.startswith(MESSAGES_PATH) and path[len(MESSAGES_PATH) :][:1] in ("", "/"):
        return ANTHROPIC
    return ANTHROPIC if VERSION_HEADER in exchange.headers else OPENAI
