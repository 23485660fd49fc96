"""Tests of the commands that install extras: in a checkout, in an installed copy, and in a virtual environment."""

from __future__ import annotations

import re
import sys
import tomllib
import typing
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path

import pytest

from trioserve.contracts.extras import Extra, install_command

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def no_virtual_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)


def install(
    monkeypatch: pytest.MonkeyPatch, direct_url: str | None, *, is_there: bool = True, folder: str = "/site-packages"
) -> None:
    """Pretend that trioserve was installed in a certain way, with its metadata in a folder."""

    class Installed:
        def locate_file(self, name: str) -> Path:
            return Path(folder, name)

        def read_text(self, _name: str) -> str | None:
            return direct_url

    def from_name(name: str) -> Installed:
        if not is_there:
            raise PackageNotFoundError(name)
        return Installed()

    monkeypatch.setattr(Distribution, "from_name", from_name)


def test_command_of_a_checkout_installs_the_extra_from_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = f"pip install -e '{ROOT}[vision]'"
    install(monkeypatch, '{"url": "file:///elsewhere", "dir_info": {"editable": true}}')
    assert install_command("vision") == expected
    install(monkeypatch, None, is_there=False)
    assert install_command("vision") == expected
    install(monkeypatch, None, folder=str(ROOT))
    assert install_command("vision") == expected


@pytest.mark.parametrize(
    "direct_url", [None, '{"url": "file:///src", "dir_info": {}}', '{"url": "file:///x.whl", "archive_info": {}}']
)
def test_command_of_an_installed_copy_installs_the_extra_by_package_name(
    monkeypatch: pytest.MonkeyPatch, direct_url: str | None
) -> None:
    install(monkeypatch, direct_url)
    assert install_command("vision") == "pip install 'trioserve[vision]'"


def test_command_names_the_python_of_a_virtual_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, None)
    monkeypatch.setattr(sys, "prefix", "/srv/venv")
    monkeypatch.setattr(sys, "executable", "/srv/venv/bin/python")
    assert install_command("hub") == "/srv/venv/bin/python -m pip install 'trioserve[hub]'"


def test_each_extra_in_messages_is_an_extra_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(typing.get_args(Extra)) == set(project["optional-dependencies"]) - {"docs", "test"}


def test_no_error_message_contains_its_own_install_command() -> None:
    spelled = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in (ROOT / "trioserve").rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.search(r"trioserve\[\w+\]", line) and "`pip install" not in line
    ]
    assert spelled == []
