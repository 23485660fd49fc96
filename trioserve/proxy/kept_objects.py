"""Where what endpoints keep is: stored responses, files, batches. An endpoint that is reached with the router's own key
takes all callers for one, so whose each of them is, is known here, and nowhere else."""

from __future__ import annotations

import re
from collections import OrderedDict

import msgspec

from trioserve.contracts.endpoint import EndpointId

__all__ = ["KeptObject", "KeptObjects", "may_be_id", "object_id_in"]

OBJECTS_MAX = 100_000  # of 300 bytes each; the oldest are forgotten, as endpoints forget them, too
SEARCHED_BYTES_MAX = 4096  # an object begins with its id
_ID = re.compile(rb'"id"\s*:\s*"((?:resp|file|batch|msgbatch)[-_][\w-]{1,128})"')
_MAY_BE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}")


class KeptObject(msgspec.Struct, frozen=True):
    """owner: the only caller for whom it is there; None: all."""

    endpoint: EndpointId
    owner: str | None


class KeptObjects:
    """By their ids, those that this router has seen being made. The oldest go first."""

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
    """The id of the response, file or batch that a body, or the first event of a stream, tells of."""
    found = _ID.search(body[:SEARCHED_BYTES_MAX])
    return None if found is None else found[1].decode()


def may_be_id(text: str) -> bool:
    """Whether an endpoint may have something with this id; anything else would change the path that it stands in."""
    return _MAY_BE_ID.fullmatch(text) is not None
