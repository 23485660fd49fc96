"""Tests how the page shows states that a real server rarely has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .conftest import Browser
from .scripted_server import ScriptedServer, scripted_request, scripted_snapshot

Keys = pytest.importorskip("selenium.webdriver.common.keys").Keys
pytestmark = pytest.mark.slow


@pytest.fixture
def script() -> Iterator[ScriptedServer]:
    with ScriptedServer(scripted_snapshot()) as server:
        yield server


def open_live(browser: Browser, script: ScriptedServer, path: str = "/", **size: int) -> None:
    browser.open(script.url + path, **size)
    browser.wait_text("#status", "Live")


def test_keyboard_moves_between_blocks_and_the_page_describes_each_block(
    browser: Browser, script: ScriptedServer
) -> None:
    script.snapshot = scripted_snapshot(
        blocks=[[10, 2], [10, 1], [4, 3], [40, 0]],
        requests={
            "a": scripted_request("r-a", blocks=[[0, 6]]),
            "b": scripted_request("r-b", blocks=[[0, 3], [6, 4]]),
            "c": scripted_request("r-c", state="held", ended_at=999.0, held_until=1060.0, blocks=[[20, 4]]),
        },
    )
    open_live(browser, script)
    assert browser.text("#legend") == "Free40Cached10Used10Held4Shared prefix3"
    browser.run("document.getElementById('map-marks').focus()")
    said = []
    for key in (Keys.HOME, *[Keys.PAGE_DOWN] * 5):
        browser.press(key)
        said.append(browser.text("#map-said"))
    assert said[:4] == [
        "Block 0: shared by 2: r-a, r-b",
        "Block 3: used by r-a",
        "Block 6: used by r-b",
        "Block 10: cached, not in use",
    ]
    assert said[4].startswith("Block 20: held for r-c, for ")
    assert said[5] == "Block 24: free"
    browser.press(Keys.HOME)
    browser.press(Keys.ARROW_RIGHT)
    assert browser.text("#map-said").startswith("Block 1: ")
    browser.press(Keys.END)
    assert browser.text("#map-said") == "Block 63: free"


def test_enter_on_a_block_selects_its_request(browser: Browser, script: ScriptedServer) -> None:
    script.snapshot = scripted_snapshot(
        blocks=[[4, 2], [60, 0]], requests={"a": scripted_request("r-a", blocks=[[0, 4]])}
    )
    open_live(browser, script)
    browser.run("document.getElementById('map-marks').focus()")
    browser.press(Keys.HOME)
    browser.press(Keys.ENTER)
    assert browser.run("return document.activeElement.textContent").startswith("r-a")
    assert browser.find_all("tr.chosen")


def test_block_states_look_different_and_freed_blocks_look_free(browser: Browser, script: ScriptedServer) -> None:
    script.snapshot = scripted_snapshot(
        blocks=[[1, 0], [1, 1], [1, 2], [1, 3], [1, 4], [59, 0]],
        requests={"a": scripted_request("r-a", blocks=[[2, 2]])},
    )
    open_live(browser, script)
    looks = """
        const canvas = document.getElementById("map-cells"), cell = 16, looks = [];
        for (let block = 0; block < 5; block += 1) {
            const data = canvas.getContext("2d").getImageData(block * cell, 0, cell, cell).data;
            looks.push([...data].join(","));
        }
        return looks;
    """
    browser.expected.append("willReadFrequently")
    before = browser.run(looks)
    assert len(set(before)) == 5
    assert browser.text("#legend") == "Free60Cached1Used1Held1Retired1Shared prefix0"
    assert browser.text("#blocks-sum").startswith("63 blocks"), "the pool has no retired blocks"
    script.change(blocks=[[2, 2, 0]], requests={"a": None}, stats={"blocks_free": 62, "blocks_cached": 1})
    browser.wait_text("#legend", "Free62")
    after = browser.run(looks)
    assert after[0] == after[2] == after[3] == before[0]


def test_only_changed_blocks_of_a_hundred_thousand_are_painted(browser: Browser, script: ScriptedServer) -> None:
    total = 100_000
    script.snapshot = scripted_snapshot(block_count=total, blocks=[[total, 0]])
    open_live(browser, script)
    browser.run(
        """
        const own = CanvasRenderingContext2D.prototype.fillRect;
        window.painted = 0;
        CanvasRenderingContext2D.prototype.fillRect = function (...box) {
            if (this.canvas.id === "map-cells") window.painted += 1;
            return own.apply(this, box);
        };
        """
    )
    script.change(
        blocks=[[50_000, 300, 2]],
        requests={"a": scripted_request("r-a", blocks=[[50_000, 300]])},
        stats={"blocks_free": total - 300, "blocks_used": 300},
    )
    browser.wait_text("#legend", "Used300")
    assert browser.run("return window.painted") == 300
    width, height = browser.run("const c = document.getElementById('map-cells'); return [c.width, c.height]")
    assert width * height >= total * 4, "a cell has at least two pixels each way"


def test_figures_show_sessions_retained_blocks_and_websockets(browser: Browser, script: ScriptedServer) -> None:
    script.snapshot = scripted_snapshot(stats={"sessions": 3, "retained_blocks": 40, "websockets": 2})
    open_live(browser, script)
    browser.wait_text("#figures", "Sessions340 blocks retained")
    browser.wait_text("#figures", "Websockets2open")


def test_row_of_a_request_shows_its_phases(browser: Browser, script: ScriptedServer) -> None:
    waiting = scripted_request("r-1", state="waiting", phase="queued", running_at=None, first_token_at=None)
    script.snapshot = scripted_snapshot(requests={"1": {**waiting, "tenant": "acme", "deadline_at": 1030.0}})
    open_live(browser, script)
    row = "#request-rows tr"
    assert "waiting" in browser.text(row)
    assert "tenant acme" in browser.text(row)
    shown = """
        const segments = [...document.querySelectorAll(".track .seg")];
        return segments.filter((segment) => segment.style.display !== "none").map((segment) => segment.classList[1]);
    """
    browser.wait(lambda: browser.run(shown) == ["queue"])
    script.change(now=1001.0, requests={"1": {"state": "running", "phase": "prefill", "running_at": 1000.5}})
    browser.wait_text(row, "prefill")
    script.change(now=1002.0, requests={"1": {"phase": "decode", "first_token_at": 1001.5, "completion_tokens": 7}})
    browser.wait_text(row, "decode")
    browser.wait(lambda: browser.run(shown) == ["queue", "prefill", "decode"])
    script.change(now=1004.0, requests={"1": {"state": "held", "ended_at": 1003.0, "held_until": 1013.0}})
    browser.wait_text(row, "held")
    browser.wait(lambda: browser.run(shown) == ["queue", "prefill", "decode", "held"])
    assert "r-1" in browser.text("#holds")


def test_cancel_button_sends_delete_and_the_row_shows_freed_blocks(browser: Browser, script: ScriptedServer) -> None:
    script.snapshot = scripted_snapshot(
        requests={"1": scripted_request("a/b", blocks=[[0, 9]])}, blocks=[[9, 2], [55, 0]]
    )
    open_live(browser, script)
    assert browser.find(".cancel").get_attribute("aria-label") == "Cancel request a/b"
    browser.click(".cancel")
    browser.wait(lambda: script.asked == ["DELETE /v1/requests/a/b"])
    freed = {"blocks": 9, "steps": 1, "seconds": 0.0094}
    ended = {"state": "finished", "ended_at": 1001.0, "outcome": "cancelled", "blocks": [], "freed": freed}
    script.change(now=1001.0, requests={"1": ended}, blocks=[[0, 9, 0]], stats={"blocks_free": 64})
    browser.wait_text("#request-rows .freed", "9 blocks free after 1 step, 9.4 ms")
    browser.wait_text("#said", "a/b is cancelled: 9 blocks free after 1 step, 9.4 ms")


def test_rows_of_requests_keep_their_order_while_a_row_has_focus(browser: Browser, script: ScriptedServer) -> None:
    script.snapshot = scripted_snapshot(
        requests={name: scripted_request(name, entered_at=990.0 + n) for n, name in enumerate("abc")}
    )
    open_live(browser, script)
    browser.run("document.querySelectorAll('.cancel')[2].focus()")
    over = {"state": "finished", "ended_at": 1001.0, "outcome": "finished"}
    script.change(now=1001.0, requests={"a": over, "d": scripted_request("d", entered_at=980.0)})
    ids = "return [...document.querySelectorAll('#request-rows .id')].map(e => e.textContent).join('')"
    browser.wait(lambda: browser.run(ids) == "abcd", "a new row at the end")
    browser.run("document.activeElement.blur()")
    browser.wait(lambda: browser.run(ids) == "dbca", "the order of entry")


def test_page_shows_that_the_server_was_restarted(browser: Browser, script: ScriptedServer) -> None:
    open_live(browser, script)
    script.snapshot["server"]["started_at"] = 2.0
    script.hang_up()
    browser.wait_text("#status", "Live: the server was started again")


def test_page_asks_for_an_api_key_and_keeps_it_in_memory_only(browser: Browser, script: ScriptedServer) -> None:
    script.key = "secret"
    script.snapshot["server"]["sees"] = "own"
    browser.open(script.url)
    browser.expected.append("401")
    browser.wait(lambda: browser.find("#key-dialog").is_displayed())
    browser.type("#key-input", "wrong" + Keys.ENTER)
    browser.wait_text("#key-error", "this API key is not known")
    browser.type("#key-input", "secret" + Keys.ENTER)
    browser.wait_text("#status", "Live")
    assert not browser.find("#key-dialog").is_displayed()
    assert "your own requests" in browser.text("#note")
    kept = browser.run("return JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])")
    assert "secret" not in kept


def test_router_page_shows_endpoints_moved_streams_and_drains(browser: Browser, script: ScriptedServer) -> None:
    endpoint = {
        "health": "healthy",
        "models": ["m"],
        "leases": 3,
        "leases_max": 8,
        "in_flight": 3,
        "waiting_depth": 1,
        "load": {"running": 3, "waiting": 1, "kv_usage": 0.25},
        "moved_from": 2,
        "moved_to": 1,
        "role": None,
        "url": "http://10.0.0.1",
    }
    script.snapshot = scripted_snapshot(
        block_count=0,
        blocks=None,
        endpoints={"a": endpoint, "b": endpoint},
        queues={"waiting": 2},
        requests={"1": scripted_request("r-1", endpoint="a")},
        stats={"running": 6, "waiting": 2, "continued_total": 4, "moved_total": 1},
    )
    open_live(browser, script, "/router")
    assert browser.text("#endpoints-sum") == "2 of 2 endpoints healthy, 2 in the queue"
    assert not browser.find("#blocks-panel").is_displayed()
    assert "3 running, 1 waiting, KV 25 %" in browser.text(".endpoint")
    assert "2 from here, 1 to here" in browser.text(".endpoint")
    script.change(requests={"1": {"endpoint": "b"}})
    browser.wait_text("#move-list", "r-1: a → b")
    browser.click("[aria-label='Drain endpoint a']")
    browser.wait(lambda: browser.find("#drain-dialog").is_displayed())
    assert browser.text("#drain-title") == "Drain a?"
    browser.click("#drain-form .danger")
    browser.wait(lambda: script.asked == ["POST /endpoints/a/drain?move=true"])
    script.change(endpoints={"a": {"health": "draining"}})
    browser.wait_text(".endpoint", "draining")
    assert not browser.find("[aria-label='Drain endpoint a']").is_enabled()
    script.change(endpoints={"a": None})
    browser.wait(lambda: len(browser.find_all(".endpoint")) == 1)


def test_router_page_lists_models_on_demand_and_can_unload_a_model(browser: Browser, script: ScriptedServer) -> None:
    model = {
        "state": "loaded",
        "reason": "it was loaded",
        "since_at": 990.0,
        "bytes": 2**30,
        "waiting": 0,
        "leases": 2,
        "pinned": False,
        "failure": None,
        "unloads_at": None,
    }
    waits = {**model, "state": "unloaded", "waiting": 3, "leases": 0, "failure": "its weights are damaged"}
    script.snapshot = scripted_snapshot(block_count=0, blocks=None, models={"a": model, "b": waits})
    open_live(browser, script, "/router")
    assert browser.text("#models-sum") == "1 of 2 models in memory, 1.0 GiB, 3 requests waiting"
    assert "2 use it, 0 wait" in browser.text(".model")
    assert "its weights are damaged" in browser.text(".model + .model")
    browser.click("[aria-label='Unload model a']")
    browser.wait(lambda: script.asked == ["POST /models/unload"])
    script.change(models={"a": {**model, "state": "unloading"}, "b": waits})
    browser.wait_text(".model", "unloading")


def test_plots_can_be_read_by_keyboard_and_as_a_table(browser: Browser, script: ScriptedServer) -> None:
    series = {"tokens_per_second": [10.0, 20.0, 40.0], "ttft_p50": [None, 0.02, 0.03], "ttft_p95": [None, 0.05, 0.06]}
    script.snapshot = scripted_snapshot(
        history={"interval_seconds": 5, "at": 1000.0, "series": series},
        steps={
            "count": 100,
            "schedule_seconds": 0.1,
            "forward_seconds": 0.8,
            "update_seconds": 0.06,
            "deliver_seconds": 0.04,
        },
    )
    open_live(browser, script)
    plot = browser.find("#plots svg")
    assert plot.get_attribute("aria-label") == "Tokens/s, now: tokens/s 40.0"
    browser.run("document.querySelector('#plots svg').focus()")
    browser.press(Keys.ARROW_LEFT)
    assert plot.get_attribute("aria-label") == "Tokens/s, 5.0 s ago: tokens/s 20.0"
    script.change(history={"at": 1005.0, "points": {name: [values[-1]] for name, values in series.items()}})
    browser.wait(lambda: plot.get_attribute("aria-label") == "Tokens/s, 5.0 s ago: tokens/s 40.0")
    browser.click(".table-of summary")
    browser.wait_text("#plot-table", "First token, p95")
    assert browser.text("#steps-sum") == "10 ms a step, 100 in the last second"
    assert "8.0 ms · 80 %" in browser.text("#steps")


def test_page_fits_the_width_of_a_phone(browser: Browser, script: ScriptedServer) -> None:
    requests = {
        str(n): scripted_request("a-long-name-of-a-request-" * 3 + str(n), tenant="t" * 20, blocks=[[n, 2]])
        for n in range(5)
    }
    script.snapshot = scripted_snapshot(
        block_count=12_000, blocks=[[10, 2], [11_990, 0]], requests=requests, transfers={"fetched_bytes_total": 123456}
    )
    for view in ("/", "/#playground"):
        open_live(browser, script, view, width=360, height=740)
        assert browser.run("return document.documentElement.scrollWidth") == 360
        wide = """
            const isWide = (element) => element.getBoundingClientRect().right > 361;
            const wide = [...document.querySelectorAll("main *")].filter(isWide);
            return wide.map((element) => element.outerHTML.slice(0, 80));
        """
        assert browser.run(wide) == []
