"""An argument parser that suggests the right spelling of commands and flags."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from trioserve.contracts.arguments import closest_name
from trioserve.contracts.errors import StartupError

__all__ = ["Parser"]

CHOICE = re.compile(r"argument (?P<name>\S+): invalid choice: '(?P<written>[^']*)' \(choose from (?P<known>.*)\)")


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one sentence with a suggestion. It refuses abbreviated flags.

    Abbreviations are refused because a new option could change their meaning, or make them ambiguous.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs["allow_abbrev"] = False
        super().__init__(*args, **kwargs)

    def parse_known_args(  # type: ignore[override]  # argparse has overloads for namespaces of other types
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse arguments. Unknown arguments are refused, while argparse returns them.

        Args:
            args: arguments without the program's name. None uses the arguments of the process.
            namespace: receives the values. None for a new namespace.

        Raises:
            StartupError: the command does not accept one of the arguments.
        """
        found, unknown = super().parse_known_args(args, namespace)
        if unknown and getattr(found, "command", None):
            _refuse(self, found.command, unknown)
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """Print an error and exit with code 2, as argparse does.

        Args:
            message: message from argparse.
        """
        found = CHOICE.fullmatch(message)
        if found is not None:
            known = [name.strip("'\" ") for name in found["known"].split(",")]
            what = "no command" if found["name"] == "COMMAND" else f"no {found['name']}"
            closest = closest_name(found["written"], known)
            hint = f"did you mean {closest}?" if closest else f"there are: {', '.join(known)}"
            message = f"{found['written']} is {what}: {hint}"
        self.exit(2, f"trioserve: {message}\n")


def _refuse(parser: argparse.ArgumentParser, command: str, unknown: Sequence[str]) -> NoReturn:
    """Raise StartupError for the first unknown flag, or for all unknown words if none of them is a flag."""
    flag = next((word for word in unknown if word.startswith("-")), None)
    if flag is None:
        raise StartupError(f"{command} does not accept {' '.join(unknown)}: see `trioserve {command} --help`")
    name = flag.partition("=")[0]
    closest = closest_name(name, _flags(parser, command))
    hint = f": did you mean {closest}?" if closest else f"; `trioserve {command} --help` lists them"
    raise StartupError(f"{name} is not an option of {command}{hint}")


def _flags(parser: argparse.ArgumentParser, command: str) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for own in action.choices[command]._actions:
                yield from (flag for flag in own.option_strings if flag.startswith("--"))
