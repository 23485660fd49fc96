"""Tests the gate, which decides which requests of browsers reach a server without API keys."""

from __future__ import annotations

from typing import Any

import pytest

from trioserve.api.error_responses import Refusal
from trioserve.api.gate import HOSTS_REMEMBERED_MAX, PageGate, checked_host_names, is_loopback_host
from trioserve.bench.runner import common_headers
from trioserve.contracts.errors import StartupError
from trioserve.http.exchange import Headers

OWN = "127.0.0.1:8000"
LINK = {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate", "sec_fetch_dest": "document"}


class Request:
    """Headers of a request, as the gate sees them. Keywords are header fields. None: the field is missing."""

    def __init__(self, method: str = "POST", *, is_websocket: bool = False, **fields: str | None) -> None:
        given = {"host": OWN, **fields}
        self.method = method
        self.is_websocket = is_websocket
        self.headers = Headers((name.replace("_", "-"), value) for name, value in given.items() if value is not None)


def refusal(
    gate: PageGate,
    method: str = "POST",
    *,
    is_open: bool = False,
    is_operators: bool = False,
    is_websocket: bool = False,
    **fields: Any,
) -> str | None:
    """Return the error code of the refusal. None: the gate accepts the request."""
    request: Any = Request(method, is_websocket=is_websocket, **fields)
    try:
        gate.check(request, is_open=is_open, is_operators=is_operators)
    except Refusal as refused:
        return refused.response.code
    return None


@pytest.mark.parametrize(
    "origin, origins, is_accepted",
    [
        (None, (), True),
        (f"http://{OWN}", (), True),
        (f"https://{OWN}", (), True),
        ("https://chat.example.org", ("https://chat.example.org",), True),
        ("https://evil.example.org", (), False),
        ("https://evil.example.org", ("https://chat.example.org",), False),
        ("https://evil.example.org", ("*",), False),
        ("http://127.0.0.1:9000", (), False),
        ("null", (), False),
    ],
)
def test_page_opens_a_websocket_only_from_the_server_itself_or_a_named_origin(
    origin: str | None, origins: tuple[str, ...], is_accepted: bool
) -> None:
    gate = PageGate(None, origins)
    for site in (None, "same-origin" if origin == f"http://{OWN}" else None):
        code = refusal(gate, "GET", is_websocket=True, origin=origin, sec_fetch_site=site)
        assert (code is None) == is_accepted
        assert code in (None, "other_site")


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LocalHost:8000",
        "localhost.:8000",
        "a.localhost:8000",
        "127.0.0.1",
        "127.0.0.1:8000",
        "127.1:8000",
        "2130706433",
        "0x7f.1",
        "10.1.2.3:8000",
        "[::1]:8000",
        "[::1]",
        "[2001:db8::7]:8000",
        "[fe80::1%25eth0]:8000",
        "gpubox:8000",
        "GPUBOX.:8000",
        "llm.example.org",
        "a.b.inner.example.org:1",
        "",
        None,
    ],
)
def test_addresses_localhost_and_allowed_names_are_accepted_as_host(host):
    gate = PageGate(("gpubox", "llm.example.org", "*.inner.example.org"))
    for _ in range(2):  # At the second request, the gate remembers the host.
        assert refusal(gate, host=host) is None


@pytest.mark.parametrize(
    "host",
    [
        "evil.example:8000",
        "evil.example",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "localhost@evil.example",
        "evil.example/localhost",
        "notlocalhost",
        "gpubox.evil.example",
        "inner.example.org",
        "evilinner.example.org",
        "localhost, evil.example",
        "[evil.example]:8000",
        "[::1]evil:8000",
        "localhost:80:80",
        "localhost:x",
        "1.2.3.4.5",
        "::1",
        ".localhost.evil",
        "evil\u00e4.example",
    ],
)
def test_requests_with_other_host_names_are_refused(host):
    gate = PageGate(("gpubox", "*.inner.example.org"))
    for method in ("GET", "POST"):
        for _ in range(2):
            assert refusal(gate, method, host=host, is_open=True) == "unknown_host"


NETWORK_NAMES = [
    "gpubox",
    "engine-a:8000",
    "Trio_serve.:8000",
    "gpubox.local:8000",
    "llm.default.svc.cluster.local:8000",
    "host.docker.internal:8000",
    "gpubox.home.arpa",
]


@pytest.mark.parametrize("host", NETWORK_NAMES)
def test_local_network_names_are_accepted_if_that_network_reaches_the_server(host):
    for _ in range(2):
        assert refusal(PageGate((), has_network_names=True), host=host) is None
        assert refusal(PageGate(()), host=host) == "unknown_host"


@pytest.mark.parametrize(
    "host",
    [
        "evil.example:8000",
        "gpubox.evil.example",
        "local.evil.example",
        "evil.notlocal",
        "evil.internal.example",
        "evil.arpa",
        ".local",
        "a b",
        "a@b",
        "evil\u00e4",
        "evil,gpubox",
        "localhost/evil",
        "-",
    ],
)
def test_names_of_the_public_dns_are_not_local_network_names(host):
    assert refusal(PageGate((), has_network_names=True), host=host) == "unknown_host"


def test_pages_of_local_network_hosts_are_other_sites():
    page = {"origin": "http://wiki.local", "sec_fetch_site": "cross-site"}
    assert refusal(PageGate((), has_network_names=True), host="gpubox.local:8000", **page) == "other_site"


def test_a_router_may_use_any_host_name_and_a_page_cannot_pose_as_a_router():
    assert refusal(PageGate(()), host="engine-a:8000", sec_trioserve_client="router") is None
    page = {"origin": "http://evil.example", "sec_fetch_site": "cross-site"}
    assert refusal(PageGate(()), host="engine-a:8000", sec_trioserve_client="router", **page) == "other_site"


def test_a_benchmark_may_use_any_host_name():
    fields = {name.replace("-", "_"): value for name, value in common_headers(None)}
    assert refusal(PageGate(()), host="gpubox.example.org:8000", **fields) is None


@pytest.mark.parametrize("names", [None, ("*",)])
def test_any_host_name_is_accepted_if_hosts_are_not_checked(names):
    assert refusal(PageGate(names), host="evil.example") is None


def test_cache_of_accepted_host_names_is_bounded():
    gate = PageGate(())
    for number in range(2 * HOSTS_REMEMBERED_MAX):
        assert refusal(gate, host=f"{number}.localhost") is None
    assert refusal(gate, host="x" * 60_000 + ".localhost") is None
    assert len(gate._hosts) == HOSTS_REMEMBERED_MAX


@pytest.mark.parametrize(
    "page",
    [
        {},
        {"sec_fetch_site": "same-origin", "origin": "http://127.0.0.1:8000"},
        {"sec_fetch_site": "same-origin"},
        {"sec_fetch_site": "none"},
        {"origin": "http://127.0.0.1:8000"},
        {"origin": "https://127.0.0.1:8000"},  # A proxy in front of the server terminates TLS.
        {"origin": "http://localhost", "host": "localhost:80"},
        {"origin": "http://localhost:80", "host": "localhost"},
        {"origin": "https://LOCALHOST", "host": "localhost:443"},
        {"origin": "http://[::1]:8000", "host": "[::1]:8000"},
        {"origin": "https://chat.example.org", "sec_fetch_site": "cross-site"},
        {"origin": "https://chat.example.org", "sec_fetch_site": "cross-site", "host": "localhost"},
    ],
)
def test_gate_accepts_own_pages_allowed_pages_and_clients_other_than_browsers(page):
    gate = PageGate((), ["https://chat.example.org"])
    for method in ("GET", "POST", "DELETE", "OPTIONS"):
        assert refusal(gate, method, is_operators=True, **page) is None


@pytest.mark.parametrize(
    "page",
    [
        {"sec_fetch_site": "cross-site", "origin": "https://evil.example"},
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site", "origin": "http://127.0.0.1:3000"},
        {"sec_fetch_site": "same-site"},
        {"sec_fetch_site": "Cross-Site"},
        {"sec_fetch_site": "none, cross-site"},
        {"sec_fetch_site": ""},
        {"sec_fetch_site": "something-new"},
        {"origin": "https://evil.example"},
        {"origin": "http://127.0.0.1"},
        {"origin": "http://127.0.0.1:3000"},
        {"origin": "http://localhost:8000"},  # A browser treats localhost and 127.0.0.1 as different sites.
        {"origin": "http://127.0.0.1:8000", "host": None},
        {"origin": "null"},
        {"origin": "null", "sec_fetch_site": "same-origin"},
        {"origin": "file://"},
        {"origin": ""},
        {"origin": "chrome-extension://127.0.0.1:8000", "sec_fetch_site": "none"},
        {"origin": "http://127.0.0.1:8000, https://evil.example"},
        {"origin": "https://evil.example", "sec_fetch_site": "same-origin"},
        {"origin": "https://chat.example.org:444", "sec_fetch_site": "cross-site"},
        {**LINK, "sec_fetch_dest": "iframe"},
        {**LINK, "origin": "https://evil.example"},
        {"sec_fetch_site": "cross-site", "sec_fetch_mode": "websocket", "origin": "https://evil.example"},
    ],
)
def test_pages_of_other_sites_are_refused(page):
    gate = PageGate((), ["https://chat.example.org"])
    for method in ("GET", "HEAD", "POST", "DELETE", "OPTIONS"):
        assert refusal(gate, method, is_open=True, **page) == "other_site"


def test_a_link_of_another_site_may_open_only_open_routes():
    gate = PageGate(())
    assert refusal(gate, "GET", is_open=True, **LINK) is None
    assert refusal(gate, "HEAD", is_open=True, **LINK) is None
    assert refusal(gate, "POST", is_open=True, **LINK) == "other_site", "a form"
    assert refusal(gate, "GET", is_open=False, **LINK) == "other_site"


def test_allowed_origin_star_lets_every_page_use_but_not_operate_the_server():
    gate = PageGate((), ["*", "https://admin.example.org"])
    for origin in ("https://evil.example", "null"):
        page = {"origin": origin, "sec_fetch_site": "cross-site"}
        assert refusal(gate, **page) is None
        assert refusal(gate, is_operators=True, **page) == "other_site"
    assert refusal(gate, is_operators=True, origin="https://admin.example.org", sec_fetch_site="cross-site") is None
    assert refusal(gate, is_operators=True, origin=f"http://{OWN}") is None


def test_allowed_host_names_are_checked_at_the_start():
    assert checked_host_names(["LLM.example.org.", "*.example.org", "*", "10.0.0.1", "my_box"]) == (
        "llm.example.org",
        "*.example.org",
        "*",
        "10.0.0.1",
        "my_box",
    )
    for wrong in ("http://llm.example.org", "llm.example.org:8000", "a/b", "", "a b", "*x"):
        with pytest.raises(StartupError, match="--allowed-host"):
            checked_host_names([wrong])


def test_loopback_hosts_are_recognized():
    for host in ("127.0.0.1", "localhost", "::1", "[::1]", "127.9.9.9", "::ffff:127.0.0.1", "a.localhost"):
        assert is_loopback_host(host), host
    for host in ("0.0.0.0", "::", "", "10.0.0.1", "gpubox", "[::]", "::ffff:10.0.0.1", "localhost.evil.example"):
        assert not is_loopback_host(host), host
