"""Runs Debian's Chromium without a window. Without Chromium, tests are skipped. Nothing is downloaded."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

if TYPE_CHECKING:
    from selenium.webdriver.remote.webelement import WebElement

SECONDS_MAX = 100.0  # The timeout is long, because the machine is shared.
LEFT_AND_KEPT = "dispatchEvent(new PageTransitionEvent('pagehide', { persisted: true }))"
"""The event that a page gets when its user leaves, but the browser keeps the page and its connections for some time."""
Value = TypeVar("Value")


class Browser:
    """One tab of a browser.

    Attributes:
        driver: the WebDriver of the browser.
        expected: parts of console messages that `problems` leaves out.
    """

    def __init__(self) -> None:
        from selenium import webdriver

        os.environ["SE_OFFLINE"] = "true"
        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which("chromium") or ""
        for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        service = webdriver.ChromeService(executable_path=shutil.which("chromedriver"))
        self.driver = webdriver.Chrome(options=options, service=service)
        self.expected: list[str] = []

    def open(self, url: str, *, width: int = 1400, height: int = 1000, scale: float = 1) -> None:
        self.expected.clear()
        self.driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 500},
        )
        self.leave()  # If only the fragment of the URL changed, the browser would not load the page.
        self.driver.get(url)

    def prefer(self, **features: str) -> None:
        """Set media features: `prefer(color_scheme="dark", reduced_motion="reduce")`.

        Without arguments, reset all features.
        """
        told = [{"name": f"prefers-{name.replace('_', '-')}", "value": value} for name, value in features.items()]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": told})

    def leave(self) -> None:
        """Close every connection of the page."""
        self.driver.get("about:blank")

    def find(self, selector: str) -> WebElement:
        return self.driver.find_element("css selector", selector)

    def find_all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements("css selector", selector)

    def text(self, selector: str) -> str:
        """Return the text of the first matching element, with hidden text, or "" if no element matches."""
        return " ".join(self.run("return document.querySelector(arguments[0])?.textContent ?? ''", selector).split())

    def click(self, selector: str) -> None:
        self.find(selector).click()

    def run(self, script: str, *arguments: object) -> Any:
        return self.driver.execute_script(script, *arguments)

    def type(self, selector: str, text: str) -> None:
        self.find(selector).send_keys(text)

    def press(self, key: str) -> None:
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.driver).send_keys(key).perform()

    def wait(self, condition: Callable[[], Value], what: str | Callable[[], str] = "it") -> Value:
        """Wait until the condition holds. Check it after each frame that the browser paints.

        Args:
            condition: returns a true value once the wait is over.
            what: description of the condition for the error message. A function is called when the wait has failed.

        Returns:
            The result of the condition.
        """
        deadline = time.monotonic() + SECONDS_MAX
        while True:
            value = condition()
            if value:
                return value
            if time.monotonic() >= deadline:
                named = what if isinstance(what, str) else what()
                raise AssertionError(f"{named} did not come: {self.problems()}")
            self.driver.execute_async_script("requestAnimationFrame(arguments[0])")

    def wait_text(self, selector: str, part: str) -> None:
        self.wait(lambda: part in self.text(selector), lambda: f"{part!r} in {selector}: {self.text(selector)!r}")

    def problems(self) -> list[str]:
        messages = [entry["message"] for entry in self.driver.get_log("browser")]
        return [message for message in messages if not any(part in message for part in self.expected)]

    def image(self, path: str) -> None:
        self.driver.save_screenshot(path)


@pytest.fixture(scope="session")
def shared_browser() -> Iterator[Browser]:
    pytest.importorskip("selenium")
    for program in ("chromium", "chromedriver"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is missing: apt-get install chromium chromium-driver")
    browser = Browser()
    yield browser
    browser.driver.quit()


@pytest.fixture
def browser(shared_browser: Browser) -> Iterator[Browser]:
    """Give a browser with default media features, and check at the end that the browser reported no problem."""
    shared_browser.leave()
    shared_browser.prefer()
    shared_browser.problems()
    yield shared_browser
    assert shared_browser.problems() == []
