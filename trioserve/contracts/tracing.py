"""Interface of tracing, with an implementation that records nothing.

A trace is a tree of spans. A span has a start, an end, attributes, and events in between. Prompts and responses are
never part of a span. This module does not depend on the collector of the spans.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

__all__ = ["NO_SPAN", "NO_TRACER", "Attributes", "Span", "SpanKind", "Tracer"]

Attributes = Mapping[str, str | bool | int | float | Sequence[str]]
SpanKind = Literal["server", "client", "internal"]
"""server: a request from a client. client: a request to another server. internal: work in between."""


class Span:
    """A span that records nothing. Every method may be called at any time. After the span has ended, calls have no
    effect.
    """

    __slots__ = ()

    @property
    def trace_id(self) -> str | None:
        """Return the trace id as 32 hexadecimal digits, or None without a trace."""
        return None

    @property
    def is_recording(self) -> bool:
        """Return True if events and attributes are recorded."""
        return False

    def event(self, name: str, attributes: Attributes | None = None) -> None:
        """Record an event now.

        Args:
            name: Name of the event.
            attributes: Attributes of the event.
        """

    def note(self, attributes: Attributes) -> None:
        """Add attributes to the span.

        Args:
            attributes: Attributes to add.
        """

    def child(self, name: str, *, kind: SpanKind = "internal", attributes: Attributes | None = None) -> Span:
        """Start a child span. The caller must end it.

        Args:
            name: Name of the child span.
            kind: Kind of the child span.
            attributes: Initial attributes. None for no attributes.
        """
        return self

    def headers(self) -> list[tuple[str, str]]:
        """Return HTTP headers that make another server's work part of this span (W3C Trace Context). The list is empty
        without a trace.
        """
        return []

    def end(self, error: str | None = None) -> None:
        """End the span.

        Args:
            error: Name of the error with which the work failed. None for success.
        """


class Tracer:
    """A tracer that starts no traces."""

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
        """Start a span.

        Args:
            name: Name of the span.
            kind: Kind of the span.
            parent: Parent span in this process. None if there is no parent. A span without a trace counts as None.
            traceparent: Header that another server sent. If `parent` is None, the span in this header becomes the
                parent. Otherwise it becomes a link.
            tracestate: Header that another server sent with `traceparent`.
            attributes: Initial attributes. None for no attributes.
        """
        return NO_SPAN


NO_SPAN = Span()
NO_TRACER = Tracer()
