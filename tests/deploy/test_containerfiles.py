"""Tests of the container files in deploy/: ports, variables, paths, flags, extras and files match the program."""

from __future__ import annotations

import fnmatch
import http.server
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from trioserve import cli
from trioserve.api.operations.health import OPERATIONS
from trioserve.config import Config, config_from
from trioserve.model.loading.default_model import models_folder
from trioserve.options.option import options_of
from trioserve_kernels import build

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "deploy").glob("Containerfile*"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
SUPERVISOR_SECONDS = 5  # This time exceeds --drain-timeout, as docs/guides/operations.md requires.


HEALTH = "/health"


class Containerfile:
    """The instructions of a container file in order. Each instruction is its keyword and the rest of its line."""

    def __init__(self, path: Path) -> None:
        lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
        joined = re.sub(r"\s*\\\n\s*", " ", "\n".join(lines))
        self.comments = path.read_text()
        self.instructions = [tuple(line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()]
        last = max(index for index, (word, _) in enumerate(self.instructions) if word == "FROM")
        self.final = self.instructions[last:]

    def all(self, word: str) -> list[str]:
        return [rest for instruction, rest in self.instructions if instruction == word]

    def last(self, word: str) -> str:
        """Return the arguments of the last instruction of a kind in the final image."""
        return [rest for instruction, rest in self.final if instruction == word][-1]

    @property
    def environment(self) -> dict[str, str]:
        return dict(pair.split("=", 1) for pair in shlex.split(self.last("ENV")))

    @property
    def healthcheck(self) -> list[str]:
        return json.loads(self.last("HEALTHCHECK").partition("CMD")[2])


@pytest.fixture(params=FILES, ids=lambda path: path.name)
def file(request: Any) -> Containerfile:
    return Containerfile(request.param)


def test_deploy_has_one_container_file_for_cpus_and_one_for_gpus():
    assert [path.name for path in FILES] == ["Containerfile", "Containerfile.cuda"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_linter_accepts_the_container_files(path: Path):
    linter = shutil.which("hadolint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if linter is None:
        pytest.skip("there is no hadolint for this machine")
    result = subprocess.run([linter, "--no-color", str(path)], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "")


def test_server_uses_the_exposed_port(file: Containerfile):
    program, command = json.loads(file.last("ENTRYPOINT")), json.loads(file.last("CMD"))
    assert program[0] in PROJECT["scripts"]
    parser, commands = cli._parser()
    arguments = parser.parse_args([*program[1:], *command])
    assert arguments.command in commands
    # The parser raises an error for a misspelt variable.
    config = config_from(arguments, file.environment, kind=Config)
    assert (config.host, config.port) == ("0.0.0.0", int(file.last("EXPOSE")))


def test_every_variable_of_a_container_file_is_an_option_of_the_program(file: Containerfile):
    names = [name.removeprefix("TRIOSERVE_").lower() for name in file.environment if name.startswith("TRIOSERVE_")]
    assert names
    assert set(names) <= options_of(Config).keys()


def test_container_runs_as_an_unprivileged_user_and_stops_with_sigterm(file: Containerfile):
    user, _, group = file.last("USER").partition(":")
    assert int(user) > 0
    assert int(group) > 0
    assert file.last("STOPSIGNAL") == signal.SIGTERM.name


def test_all_files_that_a_container_writes_are_in_the_volume(file: Containerfile, monkeypatch: pytest.MonkeyPatch):
    volume = PurePosixPath(file.last("VOLUME"))
    for name, value in file.environment.items():
        monkeypatch.setenv(name, value)
        if name.endswith(("_HOME", "_CACHE_DIR")) and name != "XDG_CACHE_HOME":
            assert PurePosixPath(value).is_relative_to(volume), name
    assert models_folder().is_relative_to(volume)
    assert build._cache_folder().is_relative_to(volume)
    user = file.last("USER")
    assert f"chown {user} {volume}" in " ".join(rest for word, rest in file.final if word == "RUN")


def test_files_of_the_wheel_are_copied_and_not_ignored(file: Containerfile):
    sources = {source for rest in file.all("COPY") if "--from" not in rest for source in rest.split()[:-1]}
    assert all((ROOT / source).exists() for source in sources)
    packages = {SETUPTOOLS["package-dir"].get(name, name).split(".")[0] for name in SETUPTOOLS["packages"]}
    packages = {SETUPTOOLS["package-dir"].get(name, name) for name in packages}
    assert sources == {"pyproject.toml", PROJECT["readme"], *PROJECT["license-files"], *packages}
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    for source in sources:
        matching = [rule for rule in rules if fnmatch.fnmatch(source, rule.removeprefix("!"))]
        assert matching[-1].startswith("!"), f"{source} is ignored"


def test_wheel_has_compiled_kernels_and_its_extras_exist(file: Containerfile):
    [variable] = {name for run in file.all("RUN") for name in re.findall(r"(TRIOSERVE_\w+)=1", run)}
    packing = (ROOT / "kernels" / "packing.py").read_text()
    assert f'VARIABLE = "{variable}"' in packing
    assert 'ALL_LEVELS = "1"' in packing
    lists = [names for run in file.all("RUN") for names in re.findall(r"\[([\w,]+)\]", run)]
    extras = {name for names in lists for name in names.split(",")}
    assert extras <= set(PROJECT["optional-dependencies"])


def test_python_of_the_base_image_is_new_enough(file: Containerfile):
    [base] = file.all("ARG")
    least = tuple(map(int, re.findall(r"\d+", PROJECT["requires-python"])))
    assert tuple(map(int, re.search(r"python:(\d+)\.(\d+)", base).groups())) >= least


@contextmanager
def answering(status: int) -> Iterator[int]:
    """Run a server at a free port that returns a given status at /health, and 404 for all other paths."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == HEALTH else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.slow
@pytest.mark.parametrize("status", (200, 503))
def test_health_check_succeeds_only_if_the_server_is_healthy(file: Containerfile, status: int):
    assert ("GET", HEALTH) in {(operation.method, operation.path) for operation in OPERATIONS}
    python, *arguments = file.healthcheck
    assert python == "python3"
    with answering(status) as port:
        environment = {**file.environment, "TRIOSERVE_PORT": str(port)}
        result = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, check=False)
    assert (result.returncode == 0) == (status == 200)


def test_documents_show_the_commands_of_the_container_file(file: Containerfile):
    text = (ROOT / "docs" / "guides" / "operations.md").read_text() + file.comments
    port, volume = file.last("EXPOSE"), file.last("VOLUME")
    assert set(re.findall(r"--publish \d+:(\d+)", text)) == {port}
    assert set(re.findall(r"--volume \w+:(\S+)", text)) == {volume}
    assert all((ROOT / name).exists() for name in re.findall(r"deploy/[\w.]+\w", text))
    [grace] = {int(seconds) for seconds in re.findall(r"--stop-timeout (\d+)", text)}
    assert grace >= Config().drain_timeout + SUPERVISOR_SECONDS
