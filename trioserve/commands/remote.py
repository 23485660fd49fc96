"""A blocking HTTP client for commands that call a running server: JSON calls and event streams.

The commands `requests`, `abort`, `endpoints` and `drain` are here too. Each sends one call. Ctrl-C ends a call and
closes its connection.
"""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from http.client import HTTPException, HTTPResponse
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

import msgspec

from trioserve.commands.program_end import EXIT_FAILED
from trioserve.contracts.endpoint import NOT_A_PAGE_HEADER
from trioserve.contracts.errors import TrioserveError

__all__ = [
    "DEFAULT_URL",
    "Event",
    "RemoteServer",
    "ServerFailed",
    "run_abort",
    "run_drain",
    "run_endpoints",
    "run_requests",
]


DEFAULT_URL = "http://127.0.0.1:8000"
CALL_SECONDS_MAX = 30.0
SILENCE_SECONDS_MAX = 120.0  # longest time without bytes on a stream; by default, servers send a comment every 15 s
MESSAGE_CHARACTERS_MAX = 600
LOOPBACK = ("127.", "localhost", "::1")


class ServerFailed(TrioserveError):
    """Error: the server cannot be reached, or refused the call. The message is one sentence that says what to do."""


class Event(NamedTuple):
    name: str
    data: str


class RemoteServer:
    """Client of one running server.

    Args:
        url: address of the server, with or without `http://` and a final `/v1`.
        api_key: API key, which is sent as bearer token. None sends no key.

    Raises:
        ServerFailed: `url` is not a valid http or https URL.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        url = url if "://" in url else f"http://{url}"
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ServerFailed(f"{url!r} is not the URL of a server: use a URL such as {DEFAULT_URL}")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"content-type": "application/json", NOT_A_PAGE_HEADER: "trioserve"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        # Proxies in environment variables are for other machines. A proxy cannot reach a loopback address of this
        # machine.
        proxies = [urllib.request.ProxyHandler({})] if parts.hostname.startswith(LOOPBACK) else []
        self._opener = urllib.request.build_opener(*proxies)

    @classmethod
    def from_arguments(cls, url: str | None, api_key: str | None) -> RemoteServer:
        """Create a client from command line arguments, with environment variables as defaults.

        Args:
            url: URL of the server. None uses TRIOSERVE_URL, or DEFAULT_URL if that variable is not set.
            api_key: one or more keys, separated by commas or spaces. The first key is used. None uses
                TRIOSERVE_API_KEY.

        Raises:
            ServerFailed: the URL is not valid.
        """
        keys = (api_key or os.environ.get("TRIOSERVE_API_KEY", "")).replace(",", " ").split()
        return cls(url or os.environ.get("TRIOSERVE_URL") or DEFAULT_URL, keys[0] if keys else None)

    def call(self, method: str, path: str, body: object = None) -> Any:
        """Send one request and return the decoded JSON of the response.

        Args:
            method: HTTP method.
            path: path and query, from the root of the server.
            body: encoded as JSON. None sends no body.

        Raises:
            ServerFailed: the server cannot be reached, refuses the request, or does not answer with JSON.
        """
        with closing(self._open(method, path, body, CALL_SECONDS_MAX)) as response:
            try:
                return msgspec.json.decode(response.read())
            except (msgspec.DecodeError, OSError, HTTPException) as error:
                raise ServerFailed(
                    f"{self.url}{path} did not answer with JSON ({error}): check that the URL is right"
                ) from None

    def events(self, method: str, path: str, body: object = None) -> Generator[Event, None, None]:
        """Send one request and yield server-sent events until the server ends the response.

        To close the connection earlier, close the iterator.

        Args:
            method: HTTP method.
            path: path and query, from the root of the server.
            body: encoded as JSON. None sends no body.

        Raises:
            ServerFailed: the server cannot be reached, refuses the request, or the connection is lost.
        """
        with closing(self._open(method, path, body, SILENCE_SECONDS_MAX)) as response:
            name, lines = "message", []
            try:
                for raw in response:
                    line = raw.decode(errors="replace").rstrip("\r\n")
                    field, _colon, value = line.partition(":")
                    if field == "event":
                        name = value.strip()
                    elif field == "data":
                        lines.append(value.removeprefix(" "))
                    elif not line and lines:
                        yield Event(name, "\n".join(lines))
                        name, lines = "message", []
            except (OSError, HTTPException) as error:
                raise ServerFailed(f"the connection to {self.url} is lost ({error}): try again") from None

    def _open(self, method: str, path: str, body: object, seconds_max: float) -> HTTPResponse:
        data = None if body is None else msgspec.json.encode(body)
        request = urllib.request.Request(self.url + path, data, self._headers, method=method)
        try:
            response: HTTPResponse = self._opener.open(request, timeout=seconds_max)
        except urllib.error.HTTPError as error:
            with error:
                raise ServerFailed(self._refusal(path, error)) from None
        except (OSError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise ServerFailed(
                f"no server answers at {self.url} ({reason}): start one with `trioserve serve`, or give another URL"
            ) from None
        return response

    def _refusal(self, path: str, error: urllib.error.HTTPError) -> str:
        try:
            refusal = msgspec.json.decode(error.read())["error"]
            message = str(refusal["message"] if isinstance(refusal, dict) else refusal)
        except (msgspec.DecodeError, OSError, HTTPException, KeyError, TypeError):
            message = f"there is no {path}" if error.code == 404 else str(error.reason)
        hint = ": set a key with --api-key or TRIOSERVE_API_KEY" if error.code in (401, 403) else ""
        return f"{self.url} answered {error.code}, {message[:MESSAGE_CHARACTERS_MAX]}{hint}"


REQUEST_COLUMNS = (
    *("id", "state", "age_seconds", "prompt_tokens", "completion_tokens", "tenant"),
    *("pictures", "steps_done", "step_count"),
)
"""Columns of the table. A column without any value is left out."""
ENDPOINT_COLUMNS = ("id", "url", "health", "role", "leases", "leases_max", "in_flight", "moved_from", "moved_to")


def run_requests(server: RemoteServer, *, as_json: bool) -> int:
    """Print the unfinished requests that the caller's API key may see.

    Args:
        server: running server.
        as_json: True prints the JSON of the response instead of a table.
    """
    return _show(server.call("GET", "/v1/requests"), REQUEST_COLUMNS, as_json=as_json, nothing="no unfinished requests")


def run_endpoints(server: RemoteServer, *, as_json: bool) -> int:
    return _show(server.call("GET", "/endpoints"), ENDPOINT_COLUMNS, as_json=as_json, nothing="no endpoints")


def run_abort(server: RemoteServer, ids: Sequence[str], *, as_json: bool) -> int:
    """Abort requests, and print the result for each request.

    Args:
        server: running server.
        ids: ids of the requests.
        as_json: True prints the JSON of the response.

    Returns:
        1 if the server does not know one of the requests, otherwise 0.
    """
    answer = server.call("POST", "/v1/requests/abort", {"ids": list(ids)})
    if as_json:
        print(msgspec.json.encode(answer).decode())
    else:
        for result in answer["data"]:
            print(f"{result['id']}: {result['result']}")
    return EXIT_FAILED if any(result["result"] == "unknown" for result in answer["data"]) else 0


def run_drain(server: RemoteServer, name: str, *, move: bool, as_json: bool) -> int:
    """Drain an endpoint of a router: the router sends it no new requests, and removes it once it is idle.

    Args:
        server: running router.
        name: id of the endpoint.
        move: True moves running requests to other endpoints instead of waiting for their end.
        as_json: True prints the JSON of the response.
    """
    query = "?move=true" if move else ""
    answer = server.call("POST", f"/endpoints/{quote(name, safe='')}/drain{query}", {})
    if as_json:
        print(msgspec.json.encode(answer).decode())
    else:
        print(f"{name} gets no new requests, and is removed once its last request has ended or moved")
    return 0


def _show(answer: Mapping[str, Any], columns: Sequence[str], *, as_json: bool, nothing: str) -> int:
    rows: list[Mapping[str, Any]] = answer["data"]
    if as_json:
        print(msgspec.json.encode(answer).decode())
        return 0
    if not rows:
        print(nothing)
        return 0
    shown = [column for column in columns if any(row.get(column) is not None for row in rows)]
    cells = [shown, *([_cell(row.get(column)) for column in shown] for row in rows)]
    widths = [max(len(line[place]) for line in cells) for place in range(len(shown))]
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    return 0


def _cell(value: object) -> str:
    if value is None:
        return "-"
    text = f"{value:.1f}" if isinstance(value, float) else str(value)
    return "".join(character if character.isprintable() else "?" for character in text)
