"""Declarations of HTTP operations, and the table that finds the operation of a request.

Each operation has one declaration, which determines its route, its entry in the OpenAPI document, and how a router
forwards it.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from trioserve.api.error_responses import Error, refusal
from trioserve.contracts.sampling import Range

if TYPE_CHECKING:
    from trioserve.api.responder import Responder

__all__ = ["GENERATES", "READS_BODY", "Forwarding", "Handler", "Operation", "Route", "RouteTable", "find_operation"]

READS_BODY = (400, 408, 413, 415, 429, 503)
GENERATES = (*READS_BODY, 404, 500, 504)
"""Error statuses of all operations that use the engine. READS_BODY has those of all operations with a body."""
READS = ("GET", "HEAD")

ContextType = TypeVar("ContextType", bound="Responder")
TakenContext = TypeVar("TakenContext", bound="Responder", contravariant=True)
Handler = Callable[[ContextType], Awaitable[None]]


class Forwarding(enum.Enum):
    """How a router finds the endpoint for a request that it forwards."""

    # The endpoint must serve the model that the body names. The request waits in the router's queue.
    BY_MODEL = "by_model"
    ANYWHERE = "anywhere"
    HOME = "home"  # One endpoint keeps all objects of this kind for the caller.
    BATCH = "batch"  # The request goes to the endpoint that keeps the batch's input file.
    KEPT = "kept"  # The path names an object, and the request goes to the endpoint that keeps it.
    STREAM = "stream"  # The path ends with the name of a detached stream or of a session.


class Operation(msgspec.Struct, Generic[TakenContext], frozen=True, kw_only=True):
    """One method on one path of the API: its handler, its callers, its input and its output.

    An operation of GET never changes anything, since a link or an image of any web page can send a GET.

    Attributes:
        method: HTTP method. GET also answers HEAD.
        path: path, which is also the name of the route in metrics. A segment in braces matches any id.
        handler: answers the request.
        summary: one line.
        response: type of the JSON with status 200, or the media type of a response that is not JSON.
        needs_key: True: callers need an API key if there are any. Rules of the operator may close other routes too.
        is_polled: True: machines poll the route, so it has no trace, and its log line has level DEBUG unless it fails.
        is_operators: True: the operation changes the server for everybody, or shows details for the operator.
            Strangers may not use it (see check_may_operate). If there are no keys, its body must be declared as JSON.
        admin_action: what the operation does, as the subject of a sentence. If there are keys, only the admin may call
            the operation, and others get a refusal that begins with this text. Empty: callers with any key may call it.
        id_has_slashes: True: the id in the path may contain slashes.
        forwarding: how a router forwards the operation. None: a router has its own handler, or no such operation.
        description: further sentences.
        body: type of the request's body. None: no body.
        body_media: media type of the request's body.
        event: type of a stream's events if the body has `"stream": true`.
        named_events: types of a stream's events if the body has `"stream": true` and each event has a name.
        kinds: types of the events of a response that is always a stream.
        line: type of the lines of a stream, which is sent unless the body has `"stream": false`.
        errors: statuses of responses with an error.
        error: type of an error.
        ranges: allowed numbers, by field of the body, or by "Type.field" for a type inside the body.
        refused: fields of the body that must be empty, with the reason.
        not_ready: type of the response with status 503, if it is not an error.
        path_parameter: meaning of the id in the path.
        query: meaning and schema of each query parameter.
        takes_deadlines: True: the operation reads the deadline headers.
        is_websocket: True: the operation of GET takes only websockets. A plain request gets a refusal (426).
    """

    method: str
    path: str
    handler: Callable[[TakenContext], Awaitable[None]]
    summary: str
    response: type | str = "application/json"
    needs_key: bool = True
    is_polled: bool = False
    is_operators: bool = False
    admin_action: str = ""
    id_has_slashes: bool = False
    forwarding: Forwarding | None = None
    description: str = ""
    body: type | None = None
    body_media: str = "application/json"
    event: type | None = None
    named_events: tuple[type, ...] = ()
    kinds: tuple[type, ...] = ()
    line: type | None = None
    errors: tuple[int, ...] = (400,)
    error: type = Error
    ranges: Mapping[str, Range] = {}
    refused: Mapping[str, str] = {}
    not_ready: type | None = None
    path_parameter: str = ""
    query: Mapping[str, tuple[str, dict[str, Any]]] = {}
    takes_deadlines: bool = False
    is_websocket: bool = False


def find_operation(operations: Iterable[Operation[TakenContext]], method: str, path: str) -> Operation[TakenContext]:
    """Return the declaration of one method on one path.

    Args:
        operations: declarations with exactly one for the method and path.
        method: HTTP method.
        path: path as declared.
    """
    (found,) = (operation for operation in operations if operation.method == method and operation.path == path)
    return found


class Route(Generic[ContextType]):
    """One path of the API, with its operations.

    Args:
        operations: all operations of the path.

    Attributes:
        path: path as declared.
        operations: operations by declared method.
        by_method: operations by each accepted method. HEAD runs GET: the exchange drops the body of its response.
        needs_key: True: callers need an API key if there are any.
        is_polled: True: machines poll the route.
    """

    def __init__(self, operations: Iterable[Operation[ContextType]]) -> None:
        self.operations = {operation.method: operation for operation in operations}
        self.by_method = dict(self.operations)
        if "GET" in self.by_method:
            self.by_method["HEAD"] = self.by_method["GET"]
        first = next(iter(self.operations.values()))
        self.path = first.path
        self.needs_key = first.needs_key
        self.is_polled = first.is_polled

    def operates(self, method: str) -> bool:
        """Return True if a request with this method needs the operator's rights.

        Args:
            method: HTTP method. If the path does not accept it, the strictest operation of the path counts.
        """
        operation = self.by_method.get(method)
        if operation is None:
            return any(each.is_operators for each in self.operations.values())
        return operation.is_operators

    def operation(self, method: str, *, is_websocket: bool = False) -> Operation[ContextType]:
        """Return the operation of a method.

        Args:
            method: HTTP method.
            is_websocket: True if the request opens a websocket.

        Raises:
            Refusal: the path does not accept the method (405), opens no websockets (400), or takes only websockets
                (426).
        """
        operation = self.by_method.get(method)
        if operation is None:
            allowed = ", ".join(sorted(self.by_method))
            raise refusal(
                "method_not_allowed",
                f"{self.path} does not take {method}, allowed is: {allowed}",
                headers=(("allow", allowed),),
            )
        if is_websocket and not operation.is_websocket:
            raise refusal("no_websocket", f"{self.path} opens no websocket: send an ordinary HTTP request")
        if operation.is_websocket and not is_websocket:
            raise refusal(
                "websocket_required",
                f"{self.path} with {method} takes only websockets: open it with a websocket client, or check that each "
                "proxy on the way passes the headers Upgrade and Connection",
            )
        return operation


class RouteTable(Generic[ContextType]):
    """Finds the route of a path.

    Args:
        operations: all operations of a server.
        others: paths of other servers' APIs that a declared path with an id would otherwise match.

    Attributes:
        routes: all routes by path, in the order of the declarations.
    """

    def __init__(self, operations: Iterable[Operation[ContextType]], *, others: frozenset[str] = frozenset()) -> None:
        by_path: dict[str, list[Operation[ContextType]]] = {}
        for operation in operations:
            by_path.setdefault(operation.path, []).append(operation)
        self.routes = {path: Route(found) for path, found in by_path.items()}
        # Longer paths come first, because an id with slashes could otherwise match the words that follow another id.
        with_ids = sorted((path for path in by_path if "{" in path), key=lambda path: -path.count("/"))
        self._patterns = [(_pattern(by_path[path][0]), self.routes[path]) for path in with_ids]
        self._others = others

    def find(self, path: str) -> Route[ContextType] | None:
        """Find the route of a path. A declared path without ids takes precedence over a declared path with ids.

        Args:
            path: path of a request.
        """
        found = self.routes.get(path)
        if found is not None:
            return found
        if path in self._others:
            return None
        return next((route for pattern, route in self._patterns if pattern.fullmatch(path)), None)


def _pattern(operation: Operation[ContextType]) -> re.Pattern[str]:
    """Make the expression of a path with ids. An id is at least one character."""
    parts = re.split(r"\{\w+\}", operation.path)
    return re.compile((".+" if operation.id_has_slashes else "[^/]+").join(map(re.escape, parts)), re.DOTALL)
