"""What mkdocs calls while it builds: fills in generated tables, and turns links out of docs/ into text.

A page asks for a table with a comment of its own line, `<!-- generated: options -->`. So a table cannot go stale, and
nothing that can be generated is kept in the repository.
"""

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

GENERATED = re.compile(r"^<!-- generated: ([a-z-]+) -->$", re.MULTILINE)
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:|#)([^)\s]+)\)")


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """The page's text with its generated tables."""
    markdown = GENERATED.sub(lambda found: tables.TABLES[found[1]](), markdown)
    folder = posixpath.dirname(page.file.src_uri)
    return LINK.sub(lambda found: _link(found, folder), markdown)


def _link(found: re.Match[str], folder: str) -> str:
    """Files outside of docs/ are no part of the site: their names are shown instead of links that lead nowhere."""
    path = posixpath.normpath(posixpath.join("docs", folder, found[2].partition("#")[0]))
    if path.startswith("docs/"):
        return found[0]
    return f"{found[1]} (`{path}`)" if found[1].strip("`") != path else f"`{path}`"
