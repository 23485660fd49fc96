"""Tests the page of a real router with two real engines. A test kills or drains one of the engines."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from .conftest import Browser
from .real_server import RealRouter

pytestmark = pytest.mark.slow

ENGINES = {"block_count": 600, "max_model_len": 2000, "step_seconds": 0.05}


@pytest.fixture
def router(browser: Browser) -> Iterator[RealRouter]:
    with RealRouter(**ENGINES) as router:
        yield router
        browser.leave()


class Stream(threading.Thread):
    """Reads a streamed request of another client in a thread.

    Attributes:
        text: text received so far.
        errors: codes of error events received so far.
    """

    def __init__(self, url: str, id: str) -> None:
        super().__init__(daemon=True)
        body = {"model": "fake", "prompt": "x" * 40, "max_tokens": 1500, "stream": True, "ignore_eos": True}
        headers = {"Content-Type": "application/json", "X-Request-Id": id}
        self.request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(), headers)
        self.text = ""
        self.errors: list[object] = []
        self.start()

    def run(self) -> None:
        with urllib.request.urlopen(self.request) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        self.errors.append(event["error"]["code"])
                    self.text += "".join(choice["text"] for choice in event.get("choices", ()))


@contextmanager
def streaming(browser: Browser, router: RealRouter, id: str) -> Iterator[Stream]:
    """Run a streamed request inside of the `with` block, and abort the request at its end."""
    stream = Stream(router.url, id)
    browser.wait(lambda: stream.text, "a token")
    yield stream
    request = urllib.request.Request(f"{router.url}/v1/requests/{id}", method="DELETE")
    urllib.request.urlopen(request).close()
    stream.join()
    assert stream.errors == ["request_aborted"]


def card_value(browser: Browser, id: str, name: str) -> str:
    """Return a value from the card of an endpoint, or "" if the page has no such card or value.

    Args:
        browser: shows the page of the router.
        id: id of the endpoint.
        name: label of the value, or "health".
    """
    said: str = browser.run(
        """
        const [id, name] = arguments, cards = [...document.querySelectorAll(".endpoint")];
        const card = cards.find((one) => one.querySelector("h3").textContent === id);
        if (!card) return "";
        if (name === "health") return card.querySelector(".health").textContent;
        const facts = [...card.querySelectorAll(".facts > div")];
        return facts.find((one) => one.firstChild.textContent === name)?.lastChild.textContent ?? "";
        """,
        id,
        name,
    )
    return said


def open_page(browser: Browser, router: RealRouter) -> None:
    browser.open(router.url + "/router")
    browser.wait_text("#status", "Live")
    browser.wait_text("#endpoints-sum", "2 of 2 endpoints healthy")


def test_page_shows_how_a_stream_moves_when_its_endpoint_is_killed(browser: Browser, router: RealRouter) -> None:
    open_page(browser, router)
    with streaming(browser, router, "mine") as stream:
        first = router.where("mine")
        other = "b" if first == "a" else "a"
        browser.wait_text("#request-rows", f"at {first}")
        browser.wait_text("#request-rows", "decode")
        router.kill(first)
        browser.wait_text("#move-list", f"mine: {first} → {other}")
        browser.wait_text("#request-rows", f"at {other}")
        browser.wait(lambda: "ejected" in card_value(browser, first, "health"))
        browser.wait(lambda: card_value(browser, first, "Streams moved") == "1 from here, 0 to here")
        assert card_value(browser, other, "Streams moved") == "0 from here, 1 to here"
        browser.wait(lambda: card_value(browser, other, "In flight") == "1")
        browser.wait_text("#endpoints-sum", "1 of 2 endpoints healthy")
        browser.wait_text("#figures", "Streams continued1")
        length = len(stream.text)
        browser.wait(lambda: len(stream.text) > length, "more tokens")
        router.revive(first)
        browser.wait_text("#endpoints-sum", "2 of 2 endpoints healthy")
        browser.wait(lambda: "healthy for" in card_value(browser, first, "health"))
    browser.wait_text("#request-rows", "cancelled")


def test_drain_button_moves_the_stream_of_an_endpoint(browser: Browser, router: RealRouter) -> None:
    open_page(browser, router)
    with streaming(browser, router, "mine"):
        first = router.where("mine")
        other = "b" if first == "a" else "a"
        browser.wait_text("#request-rows", f"at {first}")
        browser.click(f"[aria-label='Drain endpoint {first}']")
        browser.click("#drain-form .danger")
        browser.wait_text("#move-list", f"mine: {first} → {other}")
        browser.wait(lambda: not card_value(browser, first, "Serves"), "the end of its card")
        assert card_value(browser, other, "Streams moved") == "0 from here, 1 to here"
        browser.wait_text("#figures", "1 moved on purpose")
        assert router.where("mine") == other


def test_cancel_button_of_the_router_page_ends_the_request_in_the_engine(browser: Browser, router: RealRouter) -> None:
    open_page(browser, router)
    stream = Stream(router.url, "mine")
    browser.wait_text("#request-rows", "mine")
    browser.wait(lambda: router.where("mine"))
    browser.click(".cancel")
    browser.wait_text("#request-rows", "cancelled")
    browser.wait(lambda: not router.where("mine"))
    stream.join()
    assert stream.errors == ["request_aborted"]
