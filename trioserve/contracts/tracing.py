"""What a request tells of itself while it lives, for whoever follows it across servers. Here: telling nobody.

A trace is a tree of spans; a span has a beginning, an end, attributes, and events between. Nothing here knows who
collects them. Never in a span: what was asked or answered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

__all__ = ["NO_SPAN", "NO_TRACER", "Attributes", "Span", "SpanKind", "Tracer"]

Attributes = Mapping[str, str | bool | int | float | Sequence[str]]
SpanKind = Literal["server", "client", "internal"]
"""Of what a client asked for, of what is asked of another server, and of what happens in between."""


class Span:
    """One that nobody follows. Every method may be called at any time; after the end they do nothing."""

    __slots__ = ()

    @property
    def trace_id(self) -> str | None:
        """32 hexadecimal digits; None where there is no trace."""
        return None

    @property
    def is_recording(self) -> bool:
        """Whether anybody will see what it is told."""
        return False

    def event(self, name: str, attributes: Attributes | None = None) -> None:
        """Something happens now."""

    def note(self, attributes: Attributes) -> None:
        """Something is known of it."""

    def child(self, name: str, *, kind: SpanKind = "internal", attributes: Attributes | None = None) -> Span:
        """A part of it begins now, and is to be ended by itself."""
        return self

    def headers(self) -> list[tuple[str, str]]:
        """What tells another server whose part its work is (W3C Trace Context); empty where there is no trace."""
        return []

    def end(self, error: str | None = None) -> None:
        """It is over. error: the name of what it failed with."""


class Tracer:
    """One that begins no trace."""

    def begin(
        self,
        name: str,
        *,
        kind: SpanKind = "internal",
        parent: Span | None = None,
        traceparent: str | None = None,
        tracestate: str | None = None,
        attributes: Attributes | None = None,
    ) -> Span:
        """A span begins now. parent: whose part it is; one without a trace counts as none. traceparent, tracestate: the
        same as another server said it; where there is a parent as well, that is only linked to."""
        return NO_SPAN


NO_SPAN = Span()
NO_TRACER = Tracer()
