"""Tests that links, files, types, flags, metrics and tables in the documents match the code."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from trioserve.config import Config
from trioserve.metrics.metric import Question
from trioserve.metrics.registry import CATALOGUE, IMAGE_SERVER_PARTS, SERVER_PARTS, Metrics
from trioserve.options.option import options_of

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), ROOT / "trioserve/testing/README.md"]
README_LINES_MAX = 150
COLUMN_PIXELS = 838  # Width of the column of a page. A wider drawing is scaled down.

FOREIGN_FLAGS = {
    *{"--no-deps", "--continuous-batching", "--cb-num-blocks", "--cb-max-batch-tokens", "--no-cache-idle-slots"},
    *{"--name", "--no-name", "--max-time", "--help"},
    *{"--env", "--from", "--shm-size", "--stop-timeout"},  # These flags belong to container engines and uvx.
    "--hook-type",  # This flag belongs to pre-commit.
}


def named(text: str) -> Iterator[str]:
    """Yield each text that a document puts in backticks."""
    yield from re.findall(r"`([^`\n]+)`", text)


def anchors_of(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def load_tables() -> ModuleType:
    """Load docs/site/tables.py by its path, because it belongs to no package."""
    spec = importlib.util.spec_from_file_location("docs_tables", ROOT / "docs" / "site" / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_document_has_a_target(page):
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        place = (page.parent / path).resolve() if path else page
        assert place.exists(), f"{target} leads nowhere"
        if anchor and not anchor.startswith("trioserve."):  # mkdocs makes these anchors from docstrings.
            assert anchor in anchors_of(place), f"{target}: there is no such heading"


@pytest.mark.parametrize("drawing", sorted((ROOT / "docs").rglob("*.svg")), ids=lambda drawing: drawing.name)
def test_text_of_a_drawing_is_at_least_12_pixels_high_on_a_page(drawing):
    text = drawing.read_text(encoding="utf-8")
    scale = COLUMN_PIXELS / float(re.search(r'viewBox="0 0 (\d+)', text)[1])
    sizes = [float(size) for size in re.findall(r"font(?:-size)?: ?(\d+)px", text)]
    assert sizes
    assert min(sizes) * min(scale, 1.0) >= 12


def test_pages_about_architecture_and_kernels_have_a_limited_length():
    assert len((ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").splitlines()) <= 200
    lines = (ROOT / "kernels/README.md").read_text(encoding="utf-8").splitlines()
    # The tables are for looking up a value. One of them is generated.
    assert sum(len(line.split()) for line in lines if not line.startswith("|")) <= 2500


@pytest.mark.parametrize("page", ["README.md", "ARCHITECTURE.md"])
def test_no_line_of_the_first_pages_is_too_long(page):
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if len(line) > 120 and not line.startswith("|")] == []


def test_the_readme_has_a_limited_length():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= README_LINES_MAX
    first_screen = "\n".join(lines[:40])
    assert "make serve" in first_screen
    assert "make test" in first_screen


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=lambda page: page.name)
def test_every_file_that_a_document_names_exists(page):
    for name in named(page.read_text(encoding="utf-8")):
        if re.fullmatch(r"(trioserve|tests|kernels|docs|examples)/[\w/.-]+", name):
            assert (ROOT / name).exists(), name


@pytest.mark.slow
def test_every_type_and_function_that_the_architecture_names_exists():
    defined = set()
    for path in (ROOT / "trioserve").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                defined.add(node.name)
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    for name in named(text):
        if re.fullmatch(r"[A-Z][a-z]+[A-Za-z]*(\.[a-z_]+)?", name) and name not in ("Value", "Cancelled"):
            for part in name.split("."):
                assert part in defined, name


def test_every_flag_that_a_document_names_exists():
    known = {option.flag for option in options_of(Config).values()}
    for path in (ROOT / "trioserve").rglob("*.py"):  # Commands without a Config declare their flags in code.
        known |= set(re.findall(r"\"(--[a-z][a-z-]+)\"", path.read_text(encoding="utf-8")))
    for page in PAGES:
        if page.name == "CHANGELOG.md":  # The changelog also names removed flags.
            continue
        for name in named(page.read_text(encoding="utf-8")):
            for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]", name):
                plain = re.sub(r"^--no-", "--", flag)
                assert {flag, plain} & (known | FOREIGN_FLAGS), f"{page.name}: there is no {flag}"


@pytest.mark.parametrize(
    "page", [page for page in PAGES if "<!-- generated: " in page.read_text()], ids=lambda page: page.name
)
def test_generated_tables_of_a_page_are_current(page):
    text = page.read_text(encoding="utf-8")
    assert load_tables().with_tables(text) == text, "`python docs/site/tables.py` writes the tables again"


def test_every_metric_that_a_document_names_exists():
    known = {metric.full_name for metric in CATALOGUE} | {alias for metric in CATALOGUE for alias in metric.aliases}
    for page in PAGES:
        for name in re.findall(r"\b(?:trioserve|trioserve_router|vllm|vllm_router):[a-z0-9_]+", page.read_text()):
            plain = re.sub(r"_(bucket|sum|count)$", "", name)
            assert plain in known or plain.endswith("_"), f"{page.name}: there is no {name}"


def test_the_generated_tables_have_every_operation_once():
    tables = load_tables()
    rows = "\n".join(tables.endpoint_table(section) for section in tables.ENDPOINT_SECTIONS).splitlines()
    for operation in tables.operations():
        found = [row for row in rows if f"`{operation.path}`" in row and f"| {operation.method} |" in row]
        assert len(found) == 1, operation.path
        assert ("admin" in found[0].rsplit("|", 2)[1]) is bool(
            operation.admin_action or operation.path in ("/kv_events", "/metrics")
        )


def test_the_generated_tables_have_every_option_and_every_metric():
    tables = load_tables()
    text = "\n".join(make() for make in tables.TABLES.values())
    for option in options_of(Config).values():
        assert f"| `{option.flag}`<br>" in text, option.name
    for metric in CATALOGUE:
        assert f"`{metric.full_name}`" in text, metric.name
    pages = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert set(re.findall(r"<!-- generated: ([a-z-]+) -->", pages)) == set(tables.TABLES)
    assert set(re.findall(r"<!-- described: ([a-z-]+) -->", pages)) == set(tables.DESCRIBED)


@pytest.mark.parametrize("kind", ["server", "server of pictures", "router"])
def test_exposed_metrics_are_those_of_the_metrics_page(kind):
    """A prefill-decode pair needs no separate case, since its processes are servers and a router."""
    model, parts = {
        "server": ("m", SERVER_PARTS),
        "server of pictures": ("m", IMAGE_SERVER_PARTS),
        "router": (None, ("frontend", "router")),
    }[kind]
    page = Metrics(model, parts=parts).expose().decode()
    shown = set(re.findall(r"^# TYPE (\S+)", page, re.MULTILINE))
    tables = load_tables()
    names = {
        "engine": "metrics-of-the-engine",
        "frontend": "metrics-of-the-front-end",
        "router": "metrics-of-the-router",
        "images": "metrics-of-pictures",
    }
    text = "\n".join(tables.TABLES[names[part]]() for part in parts)
    text += (
        (ROOT / "docs" / "reference" / "metrics.md")
        .read_text(encoding="utf-8")
        .partition("## Metrics of the process")[2]
    )
    rows = [row.split(" | ") for row in text.splitlines() if row.startswith("|")]
    listed = {name for row in rows for cell in row[:2] for name in named(cell)}
    assert shown == listed


def test_every_operator_question_is_answered_by_a_metric_with_unit_and_meaning():
    assert {metric.question for metric in CATALOGUE} == set(Question)
    for metric in CATALOGUE:
        assert metric.unit, metric.name
        assert metric.meaning.endswith("."), metric.name
        assert metric.question.value.endswith("?")


def test_option_table_has_meaning_allowed_values_and_default():
    rows = load_tables().option_table(Config).splitlines()
    assert next(row for row in rows if "--max-num-seqs" in row) == (
        "| `--max-num-seqs`<br>`TRIOSERVE_MAX_NUM_SEQS` | sequences that run at a time "
        "| number from 1 to 4,096 | 64, or 256 for text on a GPU |"
    )
