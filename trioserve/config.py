"""Options of the server. A file, environment variables and flags become one frozen Config.

The field `max_model_len` is the flag `--max-model-len`, the variable `TRIOSERVE_MAX_MODEL_LEN`, and
`max_model_len = 4096` in a TOML file. A flag overrides a variable, and a variable overrides the file. In a variable,
the items of a list are separated by commas or blanks.
"""

from __future__ import annotations

import argparse
import os
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

from trioserve.contracts.arguments import closest_name
from trioserve.contracts.errors import StartupError
from trioserve.options.engine import RANKS_MAX, EngineOptions, ImageOptions
from trioserve.options.hosting import HostingOptions, hosted_model_text
from trioserve.options.option import ENVIRONMENT_PREFIX, Option, about, checked, checked_parameters, options_of
from trioserve.options.router import RouterOptions
from trioserve.options.server import ServerOptions, StorageOptions

__all__ = ["Config", "add_arguments", "config_from", "make_config"]

OTHER_VARIABLE = re.compile(r"NATIVE|PARENT_SOCKET|URL|CLIENTS|QWEN_CODER|KV_KEY_DIRECTORY")
"""Variables of trioserve that are not options."""

KUBERNETES_VARIABLE = re.compile(
    r"(.*_)?(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
KUBERNETES_ADDRESS = re.compile(r"(tcp|udp|sctp)://.*")
"""Variables that Kubernetes sets for each service of a namespace. A service may be called trioserve or trioserve-kv."""

ConfigT = TypeVar("ConfigT", bound=ServerOptions)


@dataclass(frozen=True, kw_only=True)
class Config(EngineOptions, ImageOptions, StorageOptions, RouterOptions, HostingOptions):
    """Options of a server with an engine. It also routes if there are other endpoints."""

    # fmt: off
    node_rank: Annotated[int, about(
        "number of this machine among --nnodes; the server is 0, and has the first ranks",
        "N", ge=0, le=RANKS_MAX - 1)] = 0
    headless: Annotated[bool, about(
        "run only ranks of this machine, for the server at --master-addr, and no HTTP server")] = False
    enable_auto_tool_choice: Annotated[bool, about(
        "accepted for command lines of vLLM, and ignored: tool_choice auto is always on")] = False
    allow_runtime_lora_updating: Annotated[bool, about(
        "let the admin load and unload adapters at /v1/load_lora_adapter and /v1/unload_lora_adapter")] = False
    allowed_lora_path: Annotated[tuple[str, ...], about(
        "directories from which the admin may load adapters; default: any directory", "DIR")] = ()
    frontend: Annotated[Literal["native", "hypercorn"], about(
        "HTTP implementation; hypercorn detects fewer ways in which clients leave")] = "native"
    profile: Annotated[str | None, about(
        "directory for a file with the last 1,000 steps, written at each SIGUSR2, in the format of GET /debug/steps, "
        "for ui.perfetto.dev; default: none", "DIR")] = None
    trust_request_chat_template: Annotated[bool, about("let requests bring their own chat template")] = False
    # fmt: on

    def __post_init__(self) -> None:
        if self.router_processes != 1:
            raise StartupError(
                f"router_processes is {self.router_processes}, but the engine of serve runs in one process: leave it "
                "out, or start `route --router-processes` before this server"
            )
        if self.router_peers:
            raise StartupError(
                "router_peers is for routers that share endpoints, but serve does not share its engine: start "
                "`route --router-peers` beside it, with this server as an endpoint"
            )
        self.check_engine(node_rank=self.node_rank, headless=self.headless)

    @property
    def adapter_directories(self) -> tuple[str, ...]:
        return self.allowed_lora_path


def make_config(**values: object) -> Config:
    """Create a Config from Python values.

    Args:
        values: options by their names.

    Raises:
        StartupError: an option is unknown or has a wrong value. The message says what is allowed.
    """
    return checked_parameters(Config, values)


def add_arguments(
    parser: argparse.ArgumentParser,
    kind: type[ServerOptions] = Config,
    *,
    only: Collection[str] | None = None,
    groups: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> None:
    """Add a flag with help and default for each option. `config_from` checks the values, not argparse.

    Args:
        parser: parser to which the flags are added.
        kind: class whose fields are the options.
        only: names of the options to add. None adds all options.
        groups: headings of the help, with the options under each heading. Options without a heading come first.
    """
    parser.add_argument(
        "--config", metavar="FILE", help="TOML file with any of these options, spelled with - or _ (default: none)"
    )
    wanted = {name: option for name, option in options_of(kind).items() if only is None or name in only}
    grouped = {name for names in groups.values() for name in names}
    for name, option in wanted.items():
        if name not in grouped:
            _add_argument(parser, option)
    for title, names in groups.items():
        if not wanted.keys().isdisjoint(names):
            group = parser.add_argument_group(title)
            for name in names:
                if name in wanted:
                    _add_argument(group, wanted[name])


def _add_argument(place: argparse._ActionsContainer, option: Option) -> None:
    flag, unit, shown = option.flag, option.unit, ""
    if "default:" not in option.description and option.default not in (None, ()):
        shown = f" (default: {_spell_value(option.default)})"
    help_text = (option.description + shown).replace("%", "%%")
    if option.is_switch:
        place.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=help_text)
    elif option.is_list:
        # A flag may have several values, and a flag may be repeated.
        place.add_argument(flag, action="extend", nargs="+", metavar=unit, default=None, help=help_text)
    elif option.choices:
        place.add_argument(flag, choices=option.choices, default=None, help=help_text)
    else:
        action = _ModelAction if option.name == "model" else "store"
        place.add_argument(flag, action=action, metavar=unit, default=None, help=help_text)


class _ModelAction(argparse.Action):
    """`--model NAME=PATH` is the same as `--host-model NAME=PATH`."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        assert isinstance(values, str)
        name, equals, _ = values.partition("=")
        if equals and not {"/", "."} & set(name[:1]):
            namespace.host_model = [*(getattr(namespace, "host_model", None) or ()), values]
        else:
            namespace.model = values


def _spell_value(value: object) -> str:
    return str(value) if not isinstance(value, bool) else "on" if value else "off"


def config_from(
    arguments: argparse.Namespace, environment: Mapping[str, str] = os.environ, *, kind: type[ConfigT]
) -> ConfigT:
    """Create the options from a file, environment variables and flags.

    Args:
        arguments: parsed flags. `config` is the path of the file, or None.
        environment: environment variables.
        kind: class of the options.

    Raises:
        StartupError: an option is unknown or has a wrong value. The message contains the option as the user wrote it.
    """
    values: dict[str, tuple[str, object]] = {}  # for each option by name: the spelling of the user, and the value
    if arguments.config is not None:
        values |= _read_file(Path(arguments.config))
    environment = {
        variable: text
        for variable, text in environment.items()
        if variable.startswith(ENVIRONMENT_PREFIX)
        and not KUBERNETES_VARIABLE.fullmatch(variable)
        and not KUBERNETES_ADDRESS.fullmatch(text)
    }
    _refuse_misspelled(environment)
    for name, option in options_of(kind).items():
        text = environment.get(option.variable)
        if text is not None:
            values[name] = option.variable, re.split(r"[,\s]+", text.strip()) if option.is_list else text
        flag_value = getattr(arguments, name, None)
        if flag_value is not None:
            values[name] = option.flag, flag_value
    return checked(kind, values, strict=False)


def _refuse_misspelled(environment: Mapping[str, str]) -> None:
    """Refuse variables whose names look like a misspelled option. Other variables may belong to another program."""
    known = {name.upper() for name in options_of(Config)}
    for variable in environment:
        name = variable.removeprefix(ENVIRONMENT_PREFIX)
        if name == variable or name in known or OTHER_VARIABLE.fullmatch(name):
            continue
        closest = closest_name(name, known)
        if closest is not None:
            raise StartupError(f"{variable} is not an option: did you mean {ENVIRONMENT_PREFIX}{closest}?")


def _read_file(path: Path) -> dict[str, tuple[str, object]]:
    try:
        values = tomllib.loads(path.read_text())
    except OSError as error:
        raise StartupError(f"the config file {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise StartupError(f"the config file {path} is not TOML: {error}") from None
    models = values.pop("models", {})
    if not isinstance(models, dict):
        raise StartupError(f"models in {path} is {models!r}, it must be tables such as [models.NAME]")
    if models:
        key = next((key for key in ("host_model", "host-model") if key in values), "host_model")
        values[key] = [*values.get(key, []), *(hosted_model_text(name, table) for name, table in models.items())]
    return {name.replace("-", "_"): (f"{name} in {path}", value) for name, value in values.items()}
