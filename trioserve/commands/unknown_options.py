"""What a person may have meant who misspelt a command or a flag."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from typing import NoReturn

from trioserve.contracts.errors import StartupError
from trioserve.contracts.spelling import closest_name

__all__ = ["Parser", "refuse_unknown"]

CHOICE = re.compile(r"argument (?P<name>\S+): invalid choice: '(?P<written>[^']*)' \(choose from (?P<known>.*)\)")


class Parser(argparse.ArgumentParser):
    """argparse's, whose errors are one sentence with what was meant."""

    def error(self, message: str) -> NoReturn:
        """Leaves the program with 2, as argparse does."""
        found = CHOICE.fullmatch(message)
        if found is not None:
            known = [name.strip("'\" ") for name in found["known"].split(",")]
            what = "no command" if found["name"] == "COMMAND" else f"no {found['name']}"
            closest = closest_name(found["written"], known)
            hint = f"did you mean {closest}?" if closest else f"there are: {', '.join(known)}"
            message = f"{found['written']} is {what}: {hint}"
        self.exit(2, f"trioserve: {message}\n")


def refuse_unknown(parser: argparse.ArgumentParser, command: str, unknown: Sequence[str]) -> NoReturn:
    """unknown: what the command's parser did not take. Raises StartupError."""
    flag = next((word for word in unknown if word.startswith("-")), None)
    if flag is None:
        raise StartupError(
            f"{command} does not take {' '.join(unknown)}: `trioserve {command} --help` shows what it does"
        )
    name = flag.partition("=")[0]
    closest = closest_name(name, _flags(parser, command))
    hint = f": did you mean {closest}?" if closest else f"; `trioserve {command} --help` lists them"
    raise StartupError(f"{name} is no option of {command}{hint}")


def _flags(parser: argparse.ArgumentParser, command: str) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for own in action.choices[command]._actions:
                yield from (flag for flag in own.option_strings if flag.startswith("--"))
