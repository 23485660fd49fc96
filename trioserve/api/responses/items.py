"""Items of the Responses API: what goes into a response and comes out of one, with its ids.

The id of an item tells of which response it is and where: `msg_<key>_2` is the third item of the output of the response
`resp_<key>`, and `msg_<key>_in0` the first one of its input. So a reference to an item needs no table to be looked up
in.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

__all__ = ["ItemPlace", "item_id", "item_place", "response_id", "with_ids"]

Item = dict[str, Any]

_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "local_shell_call": "lsh",
    "local_shell_call_output": "lsho",
    "reasoning": "rs",
}
_ID = re.compile(r"[a-z]{2,4}_([0-9A-Za-z]{1,64})_(in)?(\d{1,6})")


class ItemPlace(NamedTuple):
    response_id: str
    is_input: bool
    position: int


def response_id(key: str) -> str:
    """key: that nobody has and nobody can guess."""
    return f"resp_{key}"


def item_id(kind: str, response: str, index: int, *, is_input: bool = False) -> str:
    """kind: the item's type. response: the id of its response."""
    return f"{_PREFIXES[kind]}_{response.removeprefix('resp_')}_{'in' if is_input else ''}{index}"


def item_place(text: str) -> ItemPlace | None:
    """Where the item with this id is; None if it is none of ours."""
    match = _ID.fullmatch(text)
    return None if match is None else ItemPlace(response_id(match[1]), match[2] is not None, int(match[3]))


def with_ids(items: list[Item], response: str) -> list[Item]:
    """Input items as they are listed later: each with an id of this response. An id that came with an item is of
    another response, or of another server."""
    return [{**item, "id": item_id(item["type"], response, index, is_input=True)} for index, item in enumerate(items)]
