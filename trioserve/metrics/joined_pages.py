"""Joins the metric pages of several processes. Each series gets a label with the name of its process."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["joined_pages"]


def joined_pages(pages: Mapping[str, bytes], *, label: str) -> bytes:
    """Join pages in Prometheus' text format 0.0.4.

    Args:
        pages: pages by the value that the added label has. A value must not contain a quote, backslash or line break.
        label: name of the added label.

    Returns:
        One page. Families are in the order of their first appearance, and their series in the order of the pages.
    """
    families: dict[bytes, tuple[list[bytes], list[bytes]]] = {}  # by name: HELP and TYPE lines, and the series
    for value, page in pages.items():
        mark = f'{label}="{value}"'.encode()
        is_new, series = False, families.setdefault(b"", ([], []))[1]
        for line in page.splitlines():
            if line.startswith((b"# HELP ", b"# TYPE ")):
                name = line.split(b" ", 3)[2]
                is_new = name not in families if line.startswith(b"# HELP ") else is_new
                head, series = families.setdefault(name, ([], []))
                if is_new:
                    head.append(line)
            elif line:
                series.append(_marked(line, mark))
    lines = [line for head, series in families.values() for line in (*head, *series)]
    return b"".join(line + b"\n" for line in lines)


def _marked(line: bytes, mark: bytes) -> bytes:
    """Add the label to a line of the form `name{labels} value` or `name value`."""
    brace, blank = line.find(b"{"), line.find(b" ")
    if 0 <= brace < blank:
        return b"%b{%b,%b" % (line[:brace], mark, line[brace + 1 :])
    return b"%b{%b}%b" % (line[:blank], mark, line[blank:])
