"""Tests that people can use the page without a mouse, without colour vision and without sight."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .conftest import Browser
from .scripted_server import FILES, ScriptedServer, scripted_request, scripted_snapshot

Keys = pytest.importorskip("selenium.webdriver.common.keys").Keys
pytestmark = pytest.mark.slow

FILES_BYTES_MAX = 100_000
THEMES = ("light", "dark")
TEXTS = ("ink", "muted", "accent", "good", "bad", "warn")
SHAPES = (*(f"owner-{number}" for number in range(8)), "edge", "other")
# These matrices convert linear red, green and blue to the colours that colour-blind people see. Source: Machado,
# Oliveira and Fernandes 2009, severity 1.
BLINDNESSES = {
    "protanopia": ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
    "deuteranopia": ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
    "tritanopia": ((1.256, -0.077, -0.179), (-0.078, 0.931, 0.148), (0.005, 0.691, 0.304)),
}
Colour = tuple[float, float, float]


@pytest.fixture(scope="module")
def script() -> Iterator[ScriptedServer]:
    snapshot = scripted_snapshot(
        blocks=[[8, 2], [2, 1], [2, 3], [52, 0]],
        requests={
            "a": scripted_request("r-a", blocks=[[0, 8]]),
            "b": scripted_request("r-b", blocks=[[10, 2]], state="held", ended_at=999.0, held_until=1900.0),
        },
        history={"interval_seconds": 5, "at": 1000.0, "series": {"tokens_per_second": [1.0, 2.0]}},
        endpoints={"a": {"health": "healthy", "leases": 1, "leases_max": 2, "in_flight": 1, "waiting_depth": 0}},
    )
    with ScriptedServer(snapshot) as server:
        yield server


def colours(css: str, theme: str) -> dict[str, Colour]:
    """Read the colours of a style sheet.

    Args:
        css: text of the style sheet.
        theme: "light" or "dark".

    Returns:
        Linear red, green and blue, each from 0 to 1, by name of the variable.
    """

    def linear(part: str) -> float:
        value = int(part, 16) / 255
        return value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4

    found = re.findall(r"--([\w-]+): light-dark\(#(\w{6}), #(\w{6})\)", css)
    chosen = {name: light if theme == "light" else dark for name, light, dark in found}
    return {name: (linear(code[:2]), linear(code[2:4]), linear(code[4:])) for name, code in chosen.items()}


def seen(colour: Colour, blindness: str) -> Colour:
    red, green, blue = (
        max(0.0, min(1.0, sum(weight * part for weight, part in zip(row, colour, strict=True))))
        for row in BLINDNESSES[blindness]
    )
    return red, green, blue


def luminance(colour: Colour) -> float:
    red, green, blue = colour
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: Colour, other: Colour) -> float:
    """Return the contrast ratio of WCAG 2, from 1 to 21."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", THEMES)
def test_texts_and_shapes_have_enough_contrast(theme: str) -> None:
    palette = colours((FILES / "page.css").read_text(), theme)
    for name in TEXTS:
        for ground in ("panel", "ground"):
            assert contrast(palette[name], palette[ground]) >= 4.5, f"{name} on {ground}"
    assert contrast(palette["on-accent"], palette["accent"]) >= 4.5
    for name in SHAPES:
        assert contrast(palette[name], palette["panel"]) >= 3, name
        assert contrast(palette[name], palette["free"]) >= 3, f"{name} beside free blocks"


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("blindness", BLINDNESSES)
def test_used_and_cached_blocks_differ_from_free_blocks_for_colour_blind_people(theme: str, blindness: str) -> None:
    found = colours((FILES / "page.css").read_text(), theme)
    palette = {name: seen(colour, blindness) for name, colour in found.items()}
    assert contrast(palette["free"], palette["cached"]) >= 1.6
    for number in range(8):
        assert contrast(palette[f"owner-{number}"], palette["free"]) >= 2.7


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("blindness", BLINDNESSES)
def test_held_and_shared_blocks_differ_from_used_blocks_for_colour_blind_people(theme: str, blindness: str) -> None:
    """Held blocks have stripes in the colour of their request and of the ground. Small cells are divided into halves.

    In shared blocks, the colour of ink replaces the ground.
    """
    found = colours((FILES / "page.css").read_text(), theme)
    palette = {name: seen(colour, blindness) for name, colour in found.items()}
    for owner in (*(f"owner-{number}" for number in range(8)), "other"):
        assert contrast(palette[owner], palette["panel"]) >= 2.7, owner
        assert contrast(palette[owner], palette["ink"]) >= 1.5, owner


def test_page_files_are_small_and_refer_to_no_other_site() -> None:
    files = {path.name: path for path in FILES.iterdir() if path.suffix in (".html", ".css", ".js")}
    reached: set[str] = set()
    for page in ("page.html", "images.html"):
        names = files_loaded_by(files, page)
        assert sum(files[name].stat().st_size for name in names) < FILES_BYTES_MAX, page
        reached |= names
    assert reached == set(files), "a file that no page asks for"
    for path in files.values():
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|document\.cookie|\bstyle=|\son\w+=\"|innerHTML|\beval\(", text), path.name


def files_loaded_by(files: dict[str, Path], name: str) -> set[str]:
    """Return the name of a page and the names of all files that the page loads."""
    found, left = set[str](), [name]
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += re.findall(r"[\"/]((?:\w|-)+\.(?:css|js))\"", files[name].read_text())
    return found


NAMES = """
    const named = (element) => {
        const by = element.getAttribute("aria-labelledby");
        return [element.getAttribute("aria-label"), by && document.getElementById(by)?.textContent,
            ...[...(element.labels ?? [])].map((label) => label.textContent),
            /^(A|BUTTON|SUMMARY|TR)$/.test(element.tagName) && element.textContent].some((name) => name && name.trim());
    };
    const wanting = "a, button, select, input, textarea, summary, section, nav, dialog, svg[role], [tabindex='0']";
    const nameless = [...document.querySelectorAll(wanting)].filter((element) => !named(element));
    return nameless.map((element) => element.outerHTML.slice(0, 90));
"""


def test_every_control_has_an_accessible_name(browser: Browser, script: ScriptedServer) -> None:
    browser.open(script.url)
    browser.wait_text("#status", "Live")
    assert browser.run(NAMES) == []
    for landmark in ("header", "nav", "main", "footer"):
        assert len(browser.find_all(landmark + ":not(article header)")) == 1
    ids = browser.run("return [...document.querySelectorAll('[id]')].map((element) => element.id)")
    assert len(ids) == len(set(ids))
    told = browser.run(
        "return [...document.querySelectorAll('[aria-describedby], [aria-labelledby], [aria-controls]')].flatMap((e) =>"
        " ['aria-describedby', 'aria-labelledby'].map((name) => e.getAttribute(name)).filter(Boolean))"
    )
    assert set(told) <= set(ids)
    assert browser.run("return [...document.querySelectorAll('h1, h2, h3')].map((h) => h.tagName)")[0] == "H1"
    assert browser.run("return document.documentElement.lang") == "en"
    assert len(browser.find_all("[aria-live], [role=status], [role=alert]")) <= 8, "live regions are for few things"


def test_focus_moves_in_reading_order_and_is_visible(browser: Browser, script: ScriptedServer) -> None:
    browser.open(script.url)
    browser.wait_text("#status", "Live")
    look = """
        const element = document.activeElement, box = element.getBoundingClientRect();
        const { outlineStyle, outlineWidth } = getComputedStyle(element);
        return {name: element.id || element.className || element.tagName,
            ring: outlineStyle !== "none" && parseFloat(outlineWidth) >= 2,
            isBody: element === document.body,
            isSeen: box.width > 0 && box.bottom > 0 && box.top < innerHeight};
    """
    seen: list[dict[str, Any]] = []
    for _ in range(40):
        browser.press(Keys.TAB)
        at = browser.run(look)
        if at["isBody"]:
            break
        seen.append(at)
    assert all(at["ring"] for at in seen), seen
    assert all(at["isSeen"] for at in seen), seen
    names = [at["name"] for at in seen]
    assert names[0] == "skip"
    assert names.index("theme") < names.index("map-marks") < names.index("window") < names.index("cancel")


def test_theme_follows_the_system_and_the_switch(browser: Browser, script: ScriptedServer) -> None:
    ground = "return getComputedStyle(document.documentElement).backgroundColor"
    browser.prefer(color_scheme="dark")
    browser.open(script.url)
    browser.wait_text("#status", "Live")
    dark = browser.run(ground)
    browser.prefer(color_scheme="light")
    light = browser.run(ground)
    assert dark != light
    browser.run("const s = document.getElementById('theme'); s.value = 'dark'; s.dispatchEvent(new Event('change'))")
    assert browser.run(ground) == dark
    browser.open(script.url)
    browser.wait_text("#status", "Live")  # The styles are loaded once the page is live.
    assert browser.run(ground) == dark, "it is remembered"
    browser.run("const s = document.getElementById('theme'); s.value = ''; s.dispatchEvent(new Event('change'))")
    assert browser.run(ground) == light


def test_reduced_motion_disables_all_transitions(browser: Browser, script: ScriptedServer) -> None:
    browser.prefer(reduced_motion="reduce")
    browser.open(script.url)
    browser.wait_text("#status", "Live")
    moving = """
        const takes = (element) => parseFloat(getComputedStyle(element).transitionDuration);
        return [...document.querySelectorAll("*")].filter((element) => takes(element) > 0).length;
    """
    assert browser.run(moving) == 0


def test_scripted_server_sends_the_content_security_policy_of_the_real_server() -> None:
    from .scripted_server import POLICY

    source = Path(FILES / "files.py")
    if not source.exists():
        pytest.skip("the page is served by nobody yet")
    from trioserve.api.page import HEADERS

    assert dict(HEADERS)["content-security-policy"] == POLICY
