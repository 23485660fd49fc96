"""Tests that every Python, shell, TOML and JSON block of README.md and docs/ works, so that a reader can copy it.

Python blocks are run, and blocks with tests are run by pytest. In shell blocks, commands that end by themselves are
run, curl commands are sent to a server, and the flags of other commands are parsed by the real command line. A block
that cannot run has the comment `<!-- not run: the reason -->` above. For the page about images, the server and
`build/digits` have an image model.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from trioserve import cli
from trioserve.config import Config, config_from
from trioserve.options.router import RouterOptions

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
IMAGE_GUIDE = ROOT / "docs" / "guides" / "image-generation.md"
KIT_GUIDE = (
    ROOT / "docs" / "guides" / "testing.md"
)  # The blocks of this page form one file, which tests/testing/test_kit_readme.py runs.

BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<reason>[^\n]+) -->\n)?```(?P<language>[a-z]*)\n(?P<source>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
# The language "text" is used for the configuration of other programs.
LANGUAGES = {"python", "sh", "toml", "yaml", "json", "text"}
SERVER_PLACE = re.compile(r"(?:127\.0\.0\.1|localhost):8000")
OPERATORS = {"|", "||", "&&", ";", "&"}
FOREIGN_WORDS = {"grep"}  # Programs other than trioserve and curl that may follow a pipe.


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        page: file of the page.
        line: number of the first source line, counted from 1.
        language: word after the opening fence.
        source: text between the fences.
        reason: why the block is not run, or None if it is run.
    """

    page: Path
    line: int
    language: str
    source: str
    reason: str | None

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in BLOCK.finditer(text):
        line = text.count("\n", 0, found.start("source")) + 1
        yield Block(page, line, found["language"], found["source"], found["reason"])


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def blocks_to_run(language: str) -> list[Block]:
    return [
        block for block in BLOCKS if block.language == language and block.reason is None and block.page != KIT_GUIDE
    ]


# --- servers for curl and Python blocks ---


@pytest.fixture(scope="module")
def server_address() -> Iterator[str]:
    """Run a server with the default model and give its HOST:PORT."""
    with served("--kv-cache-memory", "0.25") as address:
        yield address


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train the model of examples/train_digits.py for two steps and give its folder."""
    folder = tmp_path_factory.mktemp("models") / "digits"
    run([sys.executable, str(ROOT / "examples" / "train_digits.py"), "--steps", "2", "--out", str(folder)], ROOT)
    return folder


@pytest.fixture(scope="module")
def image_server_address(digits: Path) -> Iterator[str]:
    with served("--model", str(digits)) as address:
        yield address


@pytest.fixture
def block_address(block: Block, tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """Give the HOST:PORT of the server for a block. For the page about images, this is an image server."""
    if block.page != IMAGE_GUIDE:
        return str(request.getfixturevalue("server_address"))
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "digits").symlink_to(request.getfixturevalue("digits"))
    return str(request.getfixturevalue("image_server_address"))


@contextmanager
def served(*options: str) -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "trioserve", "serve", "--port", "0", *options],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stderr is not None
    try:
        lines = []
        for line in process.stderr:
            lines.append(line)
            found = re.search(r"serving .* at http://(\S+)", line)
            if found:
                break
        else:
            pytest.fail("".join(lines))
        yield found[1]
    finally:
        process.terminate()
        process.stderr.read()
        process.stderr.close()
        process.wait(60)


def run(arguments: list[str], folder: Path) -> str:
    """Run a program to its end and return its standard output."""
    ran = subprocess.run(
        arguments,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])},
    )
    assert ran.returncode == 0, f"{shlex.join(arguments)}\n{ran.stdout}{ran.stderr}"
    return ran.stdout


# --- all blocks ---


def test_every_block_has_a_checked_language_or_a_reason_why_it_is_not_run():
    assert len(BLOCKS) > 30
    for block in BLOCKS:
        assert block.language in LANGUAGES, f"{block} is {block.language!r}"
        assert block.reason is None or len(block.reason) > 15, f"{block}: the reason is no reason"
    fences = sum(len(re.findall(r"^ *```", page.read_text(encoding="utf-8"), re.MULTILINE)) for page in PAGES)
    assert fences == 2 * len(BLOCKS), "a fence that the expression for blocks does not find"


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "json"], ids=str)
def test_json_block_is_valid_json(block):
    json.loads(block.source)


# --- Python ---


@pytest.mark.slow
@pytest.mark.parametrize("block", blocks_to_run("python"), ids=str)
def test_python_block_runs(block, block_address, tmp_path):
    source = SERVER_PLACE.sub(block_address, block.source)
    if "def test_" not in source:
        (tmp_path / "block.py").write_text(source)
        run([sys.executable, "-W", "error::ResourceWarning", "block.py"], tmp_path)
        return
    (tmp_path / "pytest.ini").write_text("[pytest]\ntrio_mode = true\nfilterwarnings = error\n")
    (tmp_path / "test_block.py").write_text(source)
    printed = run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_block.py"], tmp_path)
    assert f"{source.count('def test_')} passed" in printed


# --- shell ---


def logical_lines(source: str) -> Iterator[str]:
    """Split a block into commands. A line with an open quote or a final backslash continues on the next line."""
    pending = ""
    for line in source.splitlines():
        pending += line
        if pending.endswith("\\"):
            pending = pending[:-1]
            continue
        try:
            words = shlex.split(pending, comments=True)
        except ValueError:  # A quote is open, so the command continues on the next line.
            pending += "\n"
            continue
        if words:
            yield pending
        pending = ""
    assert not pending, f"not a whole command: {pending}"


def simple_commands(line: str) -> list[list[str]]:
    """Split a line into its commands, without leading assignments of variables. Each command is a list of words."""
    reader = shlex.shlex(line, posix=True, punctuation_chars=True)
    reader.whitespace_split = True
    commands: list[list[str]] = [[]]
    for word in reader:
        if word in OPERATORS:
            commands.append([])
        elif commands[-1] or not re.fullmatch(r"[A-Z_]+=.*", word):
            commands[-1].append(word)
    return commands


class Parsed(Exception):
    def __init__(self, parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
        self.parser = parser
        self.arguments = arguments


def parse(arguments: list[str]) -> Parsed:
    """Parse arguments with the real command line, without running the command.

    Raises:
        SystemExit: the command line does not accept the arguments.
    """
    real = argparse.ArgumentParser.parse_args

    def parse_args(self: argparse.ArgumentParser, args: list[str] | None = None) -> argparse.Namespace:
        found = real(self, args)
        if set(vars(found)) == {"part"}:
            return found  # The command `bench` parses the remaining words with a second parser.
        raise Parsed(self, found)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
        try:
            cli.main(arguments)
        except Parsed as parsed:
            return parsed
    raise AssertionError("the command line was not parsed")


def check_trioserve(words: list[str], folder: Path) -> None:
    """Check the arguments of `python -m trioserve`, and run commands that end soon by themselves.

    Args:
        words: arguments after `python -m trioserve`.
        folder: working folder of the command.
    """
    arguments = parse(words).arguments
    command = getattr(arguments, "command", None)  # The parsed arguments of `bench` have no attribute `command`.
    kind: type[Config] | type[RouterOptions] | None = {"serve": Config, "route": RouterOptions}.get(command or "")
    if kind is not None:
        config_from(argparse.Namespace(**{**vars(arguments), "config": None}), {}, kind=kind)
    if command == "generate" or getattr(arguments, "replay", None):
        paths = [str(ROOT / word) if word.startswith("tests/") else word for word in words]
        run([sys.executable, "-m", "trioserve", *paths], folder)


def check_python(words: list[str], folder: Path) -> None:
    assert words[0] == "-m", f"python {words} is not checked"
    if words[1] == "trioserve":
        check_trioserve(words[2:], folder)
    else:
        assert words[2:] == ["--help"], f"python {words} is not checked"
        run([sys.executable, *words], folder)


def check_make(words: list[str], folder: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert words[0] in re.findall(r"^([a-z-]+):", makefile, re.MULTILINE)
    for word in words[1:]:
        assert word.partition("=")[0] in re.findall(r"^([A-Z_]+) \?=", makefile, re.MULTILINE), word


CHECKS: dict[str, Callable[[list[str], Path], None]] = {"python": check_python, "make": check_make}


@pytest.mark.slow
@pytest.mark.parametrize("block", blocks_to_run("sh"), ids=str)
def test_commands_of_a_shell_block_are_valid(block, block_address, tmp_path):
    for line in logical_lines(block.source):
        commands = simple_commands(line)
        if commands[0][0] == "curl":
            curl = 'curl() { command curl --fail-with-body --no-progress-meter --max-time 60 "$@"; }; '
            run(["bash", "-o", "pipefail", "-c", curl + SERVER_PLACE.sub(block_address, line)], tmp_path)
            continue
        for command in commands:
            if command[0] not in FOREIGN_WORDS:
                assert command[0] in CHECKS, f"{block}: {command[0]} is not checked; mark the block as not run"
                CHECKS[command[0]](command[1:], tmp_path)


def test_every_path_of_the_api_is_documented(server_address):
    described = (ROOT / "docs" / "reference" / "http-api.md").read_text(encoding="utf-8")
    with urllib.request.urlopen(f"http://{server_address}/openapi.json", timeout=60) as response:
        paths = json.load(response)["paths"]
    assert [path for path in paths if f"`{path}`" not in described] == []


# --- TOML ---


@pytest.mark.parametrize("block", blocks_to_run("toml"), ids=str)
def test_toml_block_is_a_valid_configuration(block, tmp_path):
    values = tomllib.loads(block.source)
    if "project" in values:  # This block is the pyproject.toml of a user's package.
        return
    file = tmp_path / "trioserve.toml"
    file.write_text(block.source)
    assert config_from(parse(["serve", "--config", str(file)]).arguments, {}, kind=Config) != Config()
