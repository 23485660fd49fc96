"""Runs the examples of the testing kit's guide and README unchanged, as a reader would."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEST_COUNTS = {"docs/guides/testing.md": 39, "trioserve/testing/README.md": 1}


def run_pytest(folder: Path, source: str, *arguments: str, trio: bool = True) -> subprocess.CompletedProcess[str]:
    mode = "trio_mode = true\n" if trio else ""
    (folder / "pytest.ini").write_text(f"[pytest]\n{mode}filterwarnings = error\n")
    (folder / "test_it.py").write_text(source)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *arguments, "test_it.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted(TEST_COUNTS))
def test_every_example_of_the_kit_runs_unchanged(page, tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    ran = run_pytest(tmp_path, "\n\n".join(blocks))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert re.search(rf"\b{TEST_COUNTS[page]} passed", ran.stdout)


def test_every_name_of_the_kit_can_be_imported():
    import trioserve.testing

    for name in trioserve.testing.__all__:
        assert getattr(trioserve.testing, name) is not None


def test_no_module_of_the_kit_has_the_name_of_an_object_in_it():
    """Importing such a module would replace the object in the package's namespace."""
    import trioserve.testing

    folder = Path(trioserve.testing.__file__).parent
    assert {module.stem for module in folder.iterdir()}.isdisjoint(trioserve.testing.__all__)


@pytest.mark.slow
def test_test_that_leaves_a_request_open_fails(tmp_path):
    source = """
kept = []


async def test_it(fake_engine):
    kept.append(fake_engine.generate("hello"))
    await kept[-1].__aenter__()


async def test_other(memory_server):
    kept.append(memory_server.client().ask("/v1/completions", {"prompt": "hello", "stream": True}, withheld_bytes=1))
    await kept[-1].__aenter__()
"""
    ran = run_pytest(tmp_path, source)
    assert ran.returncode == 1
    assert "2 failed" in ran.stdout, ran.stdout
    assert "AssertionError: not all is free" in ran.stdout, ran.stdout
    assert "AssertionError: 1 requests are still open in the front end" in ran.stdout, ran.stdout


@pytest.mark.slow
def test_engine_fault_that_was_not_injected_fails_the_test(tmp_path):
    source = """
import pytest, trio, trioserve

@pytest.mark.fake_engine(next_token=lambda token_ids: 1000)
async def test_it(fake_engine):
    with pytest.raises(trioserve.EngineFault):
        async with fake_engine.generate("hello") as stream:
            async for _ in stream:
                pass
"""
    ran = run_pytest(tmp_path, source)
    assert ran.returncode == 1, ran.stdout
    assert "next_token returned 1000" in ran.stdout


@pytest.mark.slow
def test_plugin_loads_without_pytest_trio(tmp_path):
    (tmp_path / "pytest_trio.py").write_text("raise ImportError('not here')\n")
    ran = run_pytest(tmp_path, "def test_it():\n    pass\n", "-p", "no:trio", trio=False)
    assert "1 passed" in ran.stdout, ran.stdout + ran.stderr


def test_former_name_of_a_kit_function_still_works():
    import trioserve.testing

    assert trioserve.testing.MemoryAnswer is trioserve.testing.MemoryResponse
