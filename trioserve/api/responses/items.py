"""Items of the Responses API, the parts of a response's input and output, and their ids.

The id of an item contains the response and the position: `msg_<key>_2` is the third output item of the response
`resp_<key>`, and `msg_<key>_in0` is its first input item. So a reference to an item is resolved without a table.
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
    """Position of an item.

    Attributes:
        response_id: Response that the item belongs to.
        is_input: True for an input item, False for an output item.
        position: Index in the input or output.
    """

    response_id: str
    is_input: bool
    position: int


def response_id(key: str) -> str:
    """Return the id of a response.

    Args:
        key: Unique text that nobody can guess.
    """
    return f"resp_{key}"


def item_id(kind: str, response: str, index: int, *, is_input: bool = False) -> str:
    """Return the id of an item.

    Args:
        kind: Type of the item.
        response: Id of the item's response.
        index: Index in the input or output.
        is_input: True for an input item.
    """
    return f"{_PREFIXES[kind]}_{response.removeprefix('resp_')}_{'in' if is_input else ''}{index}"


def item_place(text: str) -> ItemPlace | None:
    """Return the position that an item id names, or None if this server did not make the id.

    Args:
        text: The id.
    """
    match = _ID.fullmatch(text)
    return None if match is None else ItemPlace(response_id(match[1]), match[2] is not None, int(match[3]))


def with_ids(items: list[Item], response: str) -> list[Item]:
    """Return copies of input items with ids of this response.

    An id that the client sent is replaced, because it belongs to another response or another server.

    Args:
        items: Checked input items.
        response: Id of the response.
    """
    return [{**item, "id": item_id(item["type"], response, index, is_input=True)} for index, item in enumerate(items)]
