"""Stored responses, files and batches: the endpoint and the owner of each object.

If the router sends its own key to an endpoint, the endpoint cannot distinguish callers. Then only the router knows the
owners.
"""

from __future__ import annotations

import re
from collections import OrderedDict

import msgspec

from trioserve.contracts.endpoint import EndpointId

__all__ = ["RESPONSES_PATH", "KeptObject", "KeptObjects", "may_be_id", "object_id_in"]

OBJECTS_MAX = 100_000  # Each entry takes about 300 bytes. The router forgets the oldest objects, and so do endpoints.
RESPONSES_PATH = "/v1/responses"
SEARCHED_BYTES_MAX = 4096  # An object begins with its id, so the search can stop early.
_ID = re.compile(rb'"id"\s*:\s*"((?:resp|file|batch|msgbatch)[-_][\w-]{1,128})"')
_MAY_BE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}")


class KeptObject(msgspec.Struct, frozen=True):
    """Location and owner of a stored object.

    Attributes:
        endpoint: Endpoint that stores the object.
        owner: Only caller who may use the object. None: all callers may.
        previous_response_id: Response that a response continues, if only a connection to this router had it. The
            endpoint got the items instead, and does not know the id.
    """

    endpoint: EndpointId
    owner: str | None
    previous_response_id: str | None = None


class KeptObjects:
    """Stored objects by id, as far as this router has seen their creation. The oldest are forgotten first."""

    def __init__(self) -> None:
        self._objects: OrderedDict[str, KeptObject] = OrderedDict()

    def remember(self, id: str, kept: KeptObject) -> None:
        self._objects[id] = kept
        self._objects.move_to_end(id)
        if len(self._objects) > OBJECTS_MAX:
            self._objects.popitem(last=False)

    def note_previous(self, id: str, previous: str) -> None:
        """Record which response a response continues.

        Args:
            id: Response that an endpoint may store.
            previous: Response that it continues. Only a connection to this router has it.
        """
        kept = self._objects.get(id)
        if kept is not None:
            self._objects[id] = msgspec.structs.replace(kept, previous_response_id=previous)

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
    """Return True if the text is a valid id. Any other text could change the path that contains it.

    Args:
        text: Text from a client.
    """
    return _MAY_BE_ID.fullmatch(text) is not None
