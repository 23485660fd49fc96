"""Tests the page with a real server on a socket: actions of users on the page, and their effect on the engine."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from .conftest import LEFT_AND_KEPT, Browser
from .real_server import RealServer

Keys = pytest.importorskip("selenium.webdriver.common.keys").Keys
pytestmark = pytest.mark.slow

STEP_SECONDS = 0.07  # A response of 900 tokens takes 63 s, so the response never ends during a test.
OPTIONS: dict[str, Any] = {
    "response": "and so on, " * 300,  # The response is a fixed text, because a random response could end at any token.
    "block_count": 600,
    "max_model_len": 2000,
    "max_num_batched_tokens": 64,
    "step_seconds": STEP_SECONDS,
}
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>'


@pytest.fixture
def serve(browser: Browser) -> Iterator[Callable[..., RealServer]]:
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(RealServer(**{**OPTIONS, **options}))
        browser.leave()


def open_page(browser: Browser, server: RealServer, view: str = "") -> None:
    browser.open(server.url + "/" + view)
    browser.wait_text("#status", "Live")


def ask(browser: Browser, text: str = "Say something long, please.", *, tokens: int = 900, count: str = "1") -> None:
    browser.wait(lambda: browser.run("return document.getElementById('ask-model').value") == "fake")
    browser.run(
        "for (const [id, value] of Object.entries(arguments[0])) document.getElementById(id).value = value",
        {"ask-max_tokens": str(tokens), "ask-count": count},
    )
    browser.type("#ask-text", text + Keys.ENTER)


@contextmanager
def streaming(server: RealServer, *, id: str, key: str | None = None, tokens: int = 1500) -> Iterator[None]:
    """Run a request of another client inside of the `with` block, and abort the request at its end."""
    body = json.dumps({"model": "fake", "prompt": "x" * 40, "max_tokens": tokens, "stream": True}).encode()
    headers = {"Content-Type": "application/json", "X-Request-Id": id}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    with urllib.request.urlopen(urllib.request.Request(server.url + "/v1/completions", body, headers)) as response:
        drain = threading.Thread(target=lambda: [None for _ in response])
        drain.start()
        yield
        server.do(server.engine.abort, [id])
        drain.join()


def test_stop_button_ends_a_streamed_chat_and_frees_its_blocks(
    browser: Browser, serve: Callable[..., RealServer]
) -> None:
    server = serve()
    open_page(browser, server, "#playground")
    ask(browser)
    browser.wait_text(".answer .blocks-line", "KV block")
    browser.wait(lambda: len(browser.text(".answer .text")) > 5)
    browser.click(".answer header button")
    browser.wait_text(".answer .blocks-line", "stopped: ")
    said = browser.text(".answer .blocks-line")
    assert "free after" in said, said
    assert "0 blocks" not in said.replace("10 blocks", "").replace("20 blocks", ""), said
    assert browser.find_all(".squares.back")
    assert server.do(server.engine.stats).blocks_used == 0


def test_leaving_the_page_ends_its_responses(browser: Browser, serve: Callable[..., RealServer]) -> None:
    server = serve(step_seconds=0.3)  # The response takes 270 s, which is longer than the test waits.
    open_page(browser, server, "#playground")
    ask(browser)
    browser.wait(lambda: len(browser.text(".answer .text")) > 5)
    assert server.do(server.engine.stats).blocks_used > 0
    browser.run(LEFT_AND_KEPT)
    browser.wait(lambda: server.do(server.engine.stats).blocks_used == 0, "free blocks")


def test_cancel_button_of_the_live_view_ends_a_request(browser: Browser, serve: Callable[..., RealServer]) -> None:
    server = serve()
    open_page(browser, server)
    assert browser.find("#requests-none").is_displayed()
    with streaming(server, id="somebodys"):
        browser.wait_text("#request-rows", "somebodys")
        browser.wait_text("#request-rows", "decode")
        browser.wait(lambda: browser.text("#legend dd") != "600")
        browser.wait(lambda: browser.text("#figures .value") not in ("0", "–"), "tokens/s")
        browser.click(".cancel")
        browser.wait_text("#request-rows .freed", "free after")
        browser.wait_text("#request-rows", "cancelled")
        browser.wait(lambda: server.do(server.engine.stats).blocks_used == 0)
    browser.wait_text("#said", "somebodys is cancelled: ")


def test_several_choices_share_their_prompt_and_one_is_continued(
    browser: Browser, serve: Callable[..., RealServer]
) -> None:
    server = serve()
    open_page(browser, server, "#playground")
    ask(browser, "A prompt that fills several blocks. " * 4, tokens=600, count="3")
    browser.wait(lambda: len(browser.find_all(".answer")) == 3)
    browser.wait(lambda: int(browser.text("#legend div:last-child dd").replace(",", "")) > 0, "a shared prefix")
    browser.click("#ask-stop-all")
    browser.wait(lambda: all(button.is_displayed() for button in browser.find_all(".answer header button:last-child")))
    browser.find_all(".answer header button:last-child")[1].click()
    assert len(browser.find_all("#talk li")) == 2
    ask(browser, "And on.", tokens=10)
    browser.wait_text(".answer > .aside:last-of-type", "reached its limit of tokens")


def test_two_runs_with_the_same_seed_are_shown_as_equal(browser: Browser, serve: Callable[..., RealServer]) -> None:
    server = serve()
    open_page(browser, server, "#playground")
    ask(browser, tokens=30, count="same")
    browser.wait_text("#difference", "Both runs are the same")
    titles = [title.text for title in browser.find_all(".answer h3")]
    assert titles[0].split(", ")[1] == titles[1].split(", ")[1]


def test_differences_are_marked_in_both_texts(browser: Browser, serve: Callable[..., RealServer]) -> None:
    server = serve()
    open_page(browser, server)
    told = browser.driver.execute_async_script(
        """
        const done = arguments[0];
        import("/ui/difference.js").then(({ markDifferences }) => {
            const made = ["one two three four", "one two 3 four five"].map((text) => {
                const element = document.createElement("div");
                element.textContent = text;
                return element;
            });
            const said = markDifferences(made);
            const marks = (element) => [...element.querySelectorAll("mark")].map((mark) => mark.textContent.trim());
            done([said, ...made.map((element) => marks(element).join("|"))]);
        });
        """
    )
    assert told[0].startswith("The same for the first 2 words; 2 words differ")
    assert told[1] == "three"
    assert told[2] in ("3|five", "3|five")


def test_result_of_a_tool_call_can_be_typed_and_sent(browser: Browser, serve: Callable[..., RealServer]) -> None:
    server = serve(response=lambda prompt: "It is cold." if "minus four" in prompt else CALL, step_seconds=0.001)
    open_page(browser, server, "#playground")
    browser.find_all("#ask summary")[0].click()
    browser.click("#tools-example")
    ask(browser, "How is the weather in Oslo?")
    browser.wait_text(".call", 'get_weather({"city": "Oslo"})')
    browser.wait(lambda: browser.find_all(".results textarea"))
    browser.type(".results textarea", "minus four")
    browser.click(".results button")
    browser.wait_text(".answer .text", "It is cold.")
    assert [item.text.split("\n")[0] for item in browser.find_all("#talk li")] == ["You", "Model", "Tool"]


def test_response_follows_the_schema_and_invalid_json_shows_an_error(
    browser: Browser, serve: Callable[..., RealServer]
) -> None:
    server = serve()
    open_page(browser, server, "#playground")
    browser.find_all("#ask summary")[1].click()
    browser.type("#ask-schema", '{"type": ')
    ask(browser)
    browser.wait_text("#ask-error", "The schema cannot be read")
    browser.wait_text("#ask-schema-error", "This is no JSON")
    schema = {"type": "object", "properties": {"a": {"const": 17}}, "required": ["a"], "additionalProperties": False}
    browser.run("document.getElementById('ask-schema').value = arguments[0]", json.dumps(schema))
    browser.click("#ask-send")
    browser.wait_text(".answer > .aside:last-of-type", "finished")
    assert json.loads(browser.text(".answer .text")) == {"a": 17}


def test_refusal_of_the_server_appears_in_place_of_the_response(
    browser: Browser, serve: Callable[..., RealServer]
) -> None:
    server = serve()
    open_page(browser, server, "#playground")
    browser.expected.append("400")
    browser.type("#ask-temperature", "-3")
    ask(browser)
    browser.wait_text(".answer .error", "temperature")


def test_key_sees_its_own_requests_and_the_admin_key_sees_all(
    browser: Browser, serve: Callable[..., RealServer]
) -> None:
    server = serve(api_keys=("one", "two"), admin_api_key="boss")
    browser.open(server.url)
    browser.expected.append("401")
    with streaming(server, id="of-one", key="one"), streaming(server, id="of-two", key="two"):
        browser.wait(lambda: browser.find("#key-dialog").is_displayed())
        browser.type("#key-input", "one" + Keys.ENTER)
        browser.wait_text("#request-rows", "of-one")
        assert "of-two" not in browser.text("#request-rows")
        browser.click("#key-button")
        browser.type("#key-input", "boss" + Keys.ENTER)
        browser.wait_text("#request-rows", "of-two")


def test_page_shows_that_the_server_drains(browser: Browser, serve: Callable[..., RealServer]) -> None:
    server = serve()
    open_page(browser, server)
    browser.expected += ["503", "ERR_"]
    server.do(server.server.drain)
    browser.wait(lambda: "draining" in browser.text("#note") or "rying again" in browser.text("#status"))
