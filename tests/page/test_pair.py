"""Tests the pages of a prefill server and a decode server, which are separate processes with a real model.

The pages show held blocks, their deadlines and the finished transfers.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator

import pytest

from ..end_to_end.conftest import ServerProcess, start_shared_server  # noqa: F401, a fixture
from ..end_to_end.test_pair import LONG, SMALL, Asker, wait_until_healthy
from .conftest import Browser

Keys = pytest.importorskip("selenium.webdriver.common.keys").Keys
pytestmark = pytest.mark.slow

KEY = {"kv_connector": "tcp", "kv_connector_extra_config": {"key": "a secret of some length"}}


class Pair:
    def __init__(self, start: Callable[..., ServerProcess]) -> None:
        flags = (f"--kv-transfer-config={json.dumps(KEY)}", "--kv-hold-timeout=600", *SMALL)
        self.prefill = start("--role=prefill", *flags)
        self.decode = start("--role=decode", *flags)
        self.router = start(
            f"--prefill-endpoint=p={self.prefill.url}",
            f"--decode-endpoint=d={self.decode.url}",
            "--health-interval=600",
            command="route",
        )
        wait_until_healthy(self.router)


@pytest.fixture
def pair(browser: Browser, start_shared_server: Callable[..., ServerProcess]) -> Iterator[Pair]:  # noqa: F811
    yield Pair(start_shared_server)
    browser.leave()


def test_pages_show_held_blocks_with_their_request_and_deadline(browser: Browser, pair: Pair) -> None:
    pair.decode.process.send_signal(signal.SIGSTOP)
    asker = Asker(pair.router.url, LONG, 16)
    browser.open(pair.prefill.url)
    browser.wait_text("#request-rows", "held, ")
    assert " at most" in browser.text("#request-rows")
    held = int(browser.text("#legend > div:nth-child(4) dd").replace(",", ""))
    assert held > 20
    assert browser.text("#transfers-sum") == f"{held} blocks held"
    assert f"{held} blocks, " in browser.text("#holds")
    assert "left at most" in browser.text("#holds")
    request_id = browser.text("#request-rows .id")
    browser.run("document.getElementById('map-marks').focus()")
    browser.press(Keys.HOME)
    for _ in range(3):
        if "held" not in browser.text("#map-said"):
            browser.press(Keys.PAGE_DOWN)
    assert f": held for {request_id}, for " in browser.text("#map-said")
    pair.decode.process.send_signal(signal.SIGCONT)
    assert asker.text()
    browser.wait_text("#transfers-sum", "0 blocks held")
    browser.wait_text("#legend > div:nth-child(4) dd", "0")

    browser.open(pair.decode.url)
    browser.wait_text("#transfers", "Loads completed1")
    assert f"Blocks received{held}" in browser.text("#transfers")
    assert "failed" not in browser.text("#transfers"), "what has never been is not listed"
    browser.wait_text("#about", "role decode")
    browser.open(pair.router.url + "/router")
    browser.wait_text("#endpoints", "(prefill)")
    browser.wait_text("#endpoints", "(decode)")
