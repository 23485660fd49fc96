"""Hooks of mkdocs: fill in the Python reference, and turn links out of docs/ into text."""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))
import tables  # beside this file

DESCRIBED = re.compile(r"^<!-- described: ([a-z-]+) -->$", re.MULTILINE)
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:|#)([^)\s]+)\)")


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Return the page's text with directives for docstrings, and without links to files outside of docs/."""
    markdown = DESCRIBED.sub(lambda found: tables.DESCRIBED[found[1]](), markdown)
    folder = posixpath.dirname(page.file.src_uri)
    return LINK.sub(lambda found: _link(found, folder), markdown)


def _link(found: re.Match[str], folder: str) -> str:
    """Return the link, or the name of a file outside of docs/, which is not part of the site."""
    path = posixpath.normpath(posixpath.join("docs", folder, found[2].partition("#")[0]))
    if path.startswith("docs/"):
        return found[0]
    return f"{found[1]} (`{path}`)" if found[1].strip("`") != path else f"`{path}`"
