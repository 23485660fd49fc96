"""Tests the page of an image server with a real server: requests, previews, images and cancellation."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import msgspec
import pytest

from trioserve.testing.fake_image_engine import FAKE_CLASSES, FAKE_IMAGE_MODEL

from .conftest import LEFT_AND_KEPT, Browser
from .real_server import RealImageServer
from .test_accessibility import NAMES

Keys = pytest.importorskip("selenium.webdriver.common.keys").Keys
pytestmark = pytest.mark.slow

STEP_SECONDS = 0.03
LONG = 250  # steps
SLOW = {"step_seconds": 60 / LONG}  # A request of LONG steps takes 60 s, so the request never ends during a test.


@pytest.fixture
def serve(browser: Browser) -> Iterator[Callable[..., RealImageServer]]:
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(RealImageServer(**{"step_seconds": STEP_SECONDS, **options}))
        browser.leave()


def open_page(browser: Browser, server: RealImageServer) -> None:
    browser.open(server.url)
    browser.wait_text("#status", "Live")


def fill(browser: Browser, **values: Any) -> None:
    browser.run(
        "for (const [id, value] of Object.entries(arguments[0])) document.getElementById(`ask-${id}`).value = value",
        {name: str(value) for name, value in values.items()},
    )


def sizes(browser: Browser, selector: str) -> list[list[int]]:
    """Return width and height of each visible image that the selector matches."""
    shown = "[...document.querySelectorAll(arguments[0])].filter((image) => !image.hidden && image.complete)"
    sizes: list[list[int]] = browser.run(
        f"return {shown}.map((image) => [image.naturalWidth, image.naturalHeight])", selector
    )
    return sizes


@contextmanager
def streaming(server: RealImageServer, *, id: str) -> Iterator[None]:
    """Run a request of another client inside of the `with` block, and abort the request at its end."""
    body = json.dumps({"prompt": "theirs", "steps": LONG, "stream": True}).encode()
    headers = {"Content-Type": "application/json", "X-Request-Id": id}
    with urllib.request.urlopen(
        urllib.request.Request(server.url + "/v1/images/generations", body, headers)
    ) as response:
        drain = threading.Thread(target=lambda: [None for _ in response])
        drain.start()
        yield
        server.do(server.engine.abort, [id])
        drain.join()


def test_images_appear_first_as_previews_and_then_complete(
    browser: Browser, serve: Callable[..., RealImageServer]
) -> None:
    server = serve()
    open_page(browser, server)
    assert browser.text("#model") == "fake"
    assert browser.run("return document.getElementById('ask-steps').placeholder") == "4"
    fill(browser, steps=40, n=2, seed=f"00{2**64 - 1}", width=32, height=16)
    browser.type("#ask-prompt", "a cat" + Keys.CONTROL + Keys.ENTER)
    browser.wait(lambda: browser.find_all(".shot img.unfinished"), "a look on the way")
    assert browser.run("return document.querySelector('.shot progress').value") > 0
    browser.wait_text(".set .shot:nth-child(2) figcaption", "seed 0")
    browser.wait_text(".set .shot:nth-child(1) figcaption", f"seed {2**64 - 1}")
    browser.wait(lambda: sizes(browser, ".shot img:not(.unfinished)") == [[32, 16]] * 2, "both pictures")
    assert browser.find(".shot a").get_attribute("download").startswith("a-cat-")
    assert browser.run("return document.querySelector('.set header button').hidden")


def test_cancel_button_frees_the_slots(browser: Browser, serve: Callable[..., RealImageServer]) -> None:
    server = serve(**SLOW)
    open_page(browser, server)
    fill(browser, steps=LONG, n=2, prompt="a cat")
    browser.click("#ask-send")
    browser.wait_text(".set .shot figcaption", "step ")
    assert server.do(server.engine.stats).slots_used == 2
    browser.click(".set header button")
    browser.wait_text(".set .aside", "cancelled after")
    browser.wait(lambda: server.do(server.engine.stats).slots_used == 0, "free slots")
    assert browser.text(".set .shot:nth-child(2) figcaption").startswith("cancelled")


def test_leaving_the_page_ends_its_image_requests(browser: Browser, serve: Callable[..., RealImageServer]) -> None:
    server = serve(step_seconds=1.0)  # The request takes 250 s, which is longer than the test waits.
    open_page(browser, server)
    fill(browser, steps=LONG, n=2, prompt="a cat")
    browser.click("#ask-send")
    browser.wait_text(".set .shot figcaption", "step ")
    assert server.do(server.engine.stats).slots_used == 2
    browser.run(LEFT_AND_KEPT)
    browser.wait(lambda: server.do(server.engine.stats).slots_used == 0, "free slots")
    browser.wait_text(".set .aside", "cancelled after")


def test_requests_of_other_clients_are_listed_and_can_be_cancelled(
    browser: Browser, serve: Callable[..., RealImageServer]
) -> None:
    server = serve(**SLOW)
    open_page(browser, server)
    with streaming(server, id="a/b c"):
        browser.wait_text("#requests", "a/b c")
        browser.wait(lambda: browser.run("return document.querySelector('#requests progress').value") > 0, "steps")
        assert browser.text("#requests-sum") == "1 request live, 0 not yet running"
        browser.click("#requests button")
        browser.wait_text("#requests-none", "No request lives.")
        browser.wait(lambda: not browser.run("return document.getElementById('requests-none').hidden"), "their end")


def test_model_with_classes_shows_a_class_menu_instead_of_a_prompt(
    browser: Browser, serve: Callable[..., RealImageServer]
) -> None:
    model = msgspec.structs.replace(
        FAKE_IMAGE_MODEL, classes=FAKE_CLASSES, takes_images=False, side_min=16, side_max=16
    )
    server = serve(model=model)
    open_page(browser, server)
    hidden = "return arguments[0].map((id) => document.getElementById(id).hidden)"
    ids = ["prompt-label", "negative-label", "width-label", "edit", "class-label", "guidance-label"]
    assert browser.run(hidden, ids) == [True, True, True, True, False, False]
    fill(browser, **{"class": "three"})
    browser.click("#ask-send")
    browser.wait_text(".set .shot figcaption", "4 steps")
    assert browser.text(".set h3") == "three"


def test_uploaded_image_is_edited_at_its_own_size(browser: Browser, serve: Callable[..., RealImageServer]) -> None:
    server = serve()
    open_page(browser, server)
    browser.run("""
        const canvas = Object.assign(document.createElement("canvas"), { width: 24, height: 16 });
        canvas.getContext("2d").fillRect(0, 0, 24, 16);
        canvas.toBlob((blob) => {
            const files = new DataTransfer();
            files.items.add(new File([blob], "a.png", { type: "image/png" }));
            document.getElementById("ask-image").files = files.files;
        });
    """)
    browser.wait(lambda: browser.run("return document.getElementById('ask-image').files.length"), "the file")
    fill(browser, prompt="a dog", strength="0.5")
    browser.click("#ask-send")
    browser.wait_text(".set .shot figcaption", "2 steps")
    browser.wait(lambda: sizes(browser, ".shot img") == [[24, 16]], "the picture")


def test_invalid_fields_and_refusals_show_an_error(browser: Browser, serve: Callable[..., RealImageServer]) -> None:
    server = serve()
    open_page(browser, server)
    browser.click("#ask-send")
    assert browser.text("#ask-error") == "Say what is to be seen."
    fill(browser, prompt="a cat", steps="many")
    browser.click("#ask-send")
    assert browser.text("#ask-error") == '"many" is no number (steps)'
    fill(browser, steps=10_000)
    browser.expected.append("400")  # The browser logs each refusal.
    browser.click("#ask-send")
    browser.wait_text(".set .error", "steps is 10000, at most 250")


def test_image_page_asks_for_an_api_key_and_then_connects(
    browser: Browser, serve: Callable[..., RealImageServer]
) -> None:
    server = serve(api_keys=("secret",))
    browser.open(server.url)
    browser.expected.append("401")
    browser.wait_text("#status", "An API key is needed")
    browser.wait(lambda: browser.run("return document.getElementById('key-dialog').open"), "the dialog")
    browser.type("#key-input", "secret" + Keys.ENTER)
    browser.wait_text("#status", "Live")
    browser.wait_text("#model", "fake")


def test_every_control_of_the_image_page_has_an_accessible_name(
    browser: Browser, serve: Callable[..., RealImageServer]
) -> None:
    server = serve(**SLOW)
    open_page(browser, server)
    fill(browser, prompt="a cat", steps=LONG)
    browser.click("#ask-send")
    browser.wait_text(".set .shot figcaption", "step ")
    assert browser.run(NAMES) == []
    ids = browser.run("return [...document.querySelectorAll('[id]')].map((element) => element.id)")
    assert len(ids) == len(set(ids))
    browser.click(".set header button")
    browser.wait_text(".set .aside", "cancelled after")
    browser.open(server.url, width=380, height=800)
    browser.wait_text("#status", "Live")
    assert browser.run("return document.documentElement.scrollWidth <= innerWidth"), "nothing is cut off on a phone"
