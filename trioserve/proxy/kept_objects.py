"""Memory of which endpoint stores which response, file or batch, and who owns it.

An endpoint that the router calls with its own key cannot distinguish callers. Only the router knows the owners then.
"""

from __future__ import annotations

import re
from collections import OrderedDict

import msgspec

from trioserve.contracts.endpoint import EndpointId

__all__ = ["KeptObject", "KeptObjects", "may_be_id", "object_id_in"]

OBJECTS_MAX = 100_000  # at about 300 bytes each; the oldest are forgotten, as endpoints forget them too
SEARCHED_BYTES_MAX = 4096  # an object begins with its id
_ID = re.compile(rb'"id"\s*:\s*"((?:resp|file|batch|msgbatch)[-_][\w-]{1,128})"')
_MAY_BE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}")


class KeptObject(msgspec.Struct, frozen=True):
    """Location and owner of a stored object.

    Attributes:
        endpoint: Endpoint that stores the object.
        owner: Only caller who may use the object. None: all callers may.
    """

    endpoint: EndpointId
    owner: str | None


class KeptObjects:
    """Stored objects by id, as far as this router has seen their creation. The oldest are forgotten first."""

    def __init__(self) -> None:
        self._objects: OrderedDict[str, KeptObject] = OrderedDict()

    def remember(self, id: str, kept: KeptObject) -> None:
        self._objects[id] = kept
        self._objects.move_to_end(id)
        if len(self._objects) > OBJECTS_MAX:
            self._objects.popitem(last=False)

    def find(self, id: str) -> KeptObject | None:
        return self._objects.get(id)


def object_id_in(body: bytes) -> str | None:
    """Return the id of the stored object in a body, or None if there is none.

    Args:
        body: Response body, or the first event of a stream. It describes a response, file or batch.
    """
    found = _ID.search(body[:SEARCHED_BYTES_MAX])
    return None if found is None else found[1].decode()


def may_be_id(text: str) -> bool:
    """Return True if the text has the form of an id. Any other text could change the path that contains it.

    Args:
        text: Text from a client.
    """
    return _MAY_BE_ID.fullmatch(text) is not None
