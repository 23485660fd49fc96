"""Options of a server with several models, which are loaded on demand."""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from trioserve.contracts.errors import StartupError
from trioserve.model.settings import lora_modules
from trioserve.options.option import Option, about
from trioserve.router.settings import HostedModelsSettings

__all__ = [
    "GIB",
    "KV_CACHE_GIB",
    "MEMORY_SHARE",
    "OWN_OPTIONS",
    "HostedModelOptions",
    "HostingOptions",
    "hosted_model_text",
]

HOSTED = HostedModelsSettings(memory_bytes=0)
MODEL_SPELLING = "NAME=PATH or NAME=PATH,OPTION=VALUE,..."
NEXT_OPTION = re.compile(r",(?=[a-z][a-z_-]*=)")
GIB = 2**30
MEMORY_SHARE = 0.8  # share of the free memory that hosted models may use by default
KV_CACHE_GIB = 1.0  # size of the KV cache of a hosted model without kv_cache_memory


class HostedModelOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of one model.

    Attributes:
        name: name of the model.
        path: directory, .gguf file, or name of a model.
        aliases: further names.
        preload: True if it is loaded at the start.
        pinned: True if it is loaded at the start and never unloaded for another model or for being idle.
        keep_alive: seconds after the last request until it is unloaded. None: the server's default.
        memory: GiB that it needs while it is loaded. None: computed from its files.
        priority: a model with a lower number is loaded earlier, and gives way later.
        group: at most one model of a group is loaded. None: the model has no group.
        engine: options of its engine, by name.
        is_found: True if it was found in a directory. It is left out if it cannot be read.
    """

    name: str
    path: str
    aliases: tuple[str, ...] = ()
    preload: bool = False
    pinned: bool = False
    keep_alive: Annotated[float, Meta(ge=0)] | None = None
    memory: Annotated[float, Meta(gt=0)] | None = None
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0
    group: str | None = None
    engine: dict[str, Any] = {}
    is_found: bool = False

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the LoRA adapters of the model.

        Raises:
            StartupError: an adapter has no name or no path.
        """
        return tuple(module.name for module in lora_modules(self.engine.get("lora_modules", ())))

    @classmethod
    def of_table(cls, name: str, table: Mapping[str, Any], *, path_key: str = "path") -> HostedModelOptions:
        """Create the options from a table.

        Args:
            name: name of the model.
            table: own options and engine options by name, in which `_` may be spelled `-`.
            path_key: key of the model's path in the table.

        Raises:
            StartupError: the path is missing, or an own option has a wrong value.
        """
        values = {key.replace("-", "_"): value for key, value in table.items()}
        path = values.pop(path_key, None)
        if not isinstance(path, str):
            raise StartupError(
                f'the hosted model "{name}" has no {path_key}: set it to a directory, a .gguf file or a name'
            )
        if isinstance(values.get("aliases"), str):
            values["aliases"] = [values["aliases"]]
        own = {
            key: Option(key, OWN_OPTIONS[key], None).convert(f'{key} of the hosted model "{name}"', value, strict=True)
            for key, value in values.items()
            if key in OWN_OPTIONS
        }
        engine = {key: value for key, value in values.items() if key not in OWN_OPTIONS}
        if "lora_modules" in engine:
            modules = engine["lora_modules"]
            modules = modules if isinstance(modules, list | tuple) else [modules]
            engine["lora_modules"] = [each if isinstance(each, str) else json.dumps(each) for each in modules]
        return cls(name=name, path=path, **own, engine=engine)


OWN_OPTIONS = {
    name: hint
    for name, hint in typing.get_type_hints(HostedModelOptions, include_extras=True).items()
    if name not in ("name", "path", "engine", "is_found")
}
"""Types of the options of a model that are not options of its engine, by name."""


@dataclass(frozen=True, kw_only=True)
class HostingOptions:
    """Options of a server with several models, which are loaded on demand."""

    # fmt: off
    models_dir: Annotated[str | None, about(
        "directory whose models are loaded when a request asks for them: each .gguf file, and each subdirectory with a "
        "config.json, under its own name; default: none", "DIR")] = None
    host_model: Annotated[tuple[str, ...], about(
        "models that are loaded when a request asks for them, each as NAME=PATH or NAME=PATH,OPTION=VALUE,...; OPTION "
        "is any option of the engine, aliases, preload, pinned, priority, group, keep_alive (seconds) or memory (GiB). "
        "--model NAME=PATH is the same; default: none", "MODEL")] = ()
    models_memory: Annotated[Annotated[float, Meta(gt=0)] | None, about(
        "GiB that the weights and KV caches of all hosted models may use together; default: 80 % of the free memory",
        "GIB")] = None
    model_keep_alive: Annotated[Annotated[float, Meta(ge=0)] | None, about(
        "seconds after the end of its last request until an idle hosted model is unloaded; default: it stays until "
        "another model needs its memory", "SECONDS")] = None
    model_turn: Annotated[float, about(
        "seconds that a hosted model with requests keeps its memory before it must give way to a model that waits; "
        "the other model waits for at least as long", "SECONDS", ge=0, le=86400)] = HOSTED.turn_seconds
    max_model_loads: Annotated[int, about(
        "hosted models that load at a time", "N", ge=1, le=64)] = HOSTED.loads_max
    model_load_timeout: Annotated[float, about(
        "seconds without progress after which the load of a hosted model is stopped; requests that wait for it get 503",
        "SECONDS", ge=1, le=86400)] = HOSTED.stall_seconds
    model_processes: Annotated[bool, about(
        "run each loaded model in a process of its own, so that its crash ends no other model; without processes, "
        "models load faster and need less memory")] = True
    # fmt: on

    def hosted_models(self) -> list[HostedModelOptions]:
        """Return the models that are loaded on demand.

        Raises:
            StartupError: a text has a wrong format, a name is used twice, or the directory cannot be read.
        """
        models = [_parsed(text) for text in self.host_model]
        if self.models_dir is not None:
            named = {model.name for model in models}
            models += [model for model in _found_in(Path(self.models_dir)) if model.name not in named]
        names: set[str] = set()
        for model in models:
            for name in (model.name, *model.aliases, *model.adapters):
                if name in names:
                    raise StartupError(f'there are two hosted models with the name "{name}": give each its own')
                names.add(name)
        return models

    @property
    def hosts_models(self) -> bool:
        return bool(self.host_model or self.models_dir is not None)


def hosted_model_text(name: str, options: Mapping[str, Any]) -> str:
    """Spell the table `[models.NAME]` of a config file as one text.

    Args:
        name: name of the model.
        options: keys and values of the table.

    Raises:
        StartupError: the table has no path.
    """
    if not isinstance(options, Mapping) or not isinstance(options.get("path"), str):
        raise StartupError(f'[models.{name}] has no path: add path = "DIRECTORY, .gguf FILE OR NAME"')
    spelled = (
        f",{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in options.items()
        if key != "path"
    )
    return f"{name}={options['path']}{''.join(spelled)}"


def _parsed(text: str) -> HostedModelOptions:
    """Parse `NAME=PATH,OPTION=VALUE,...`. Values are JSON, or texts if they are not JSON."""
    first, *rest = NEXT_OPTION.split(text)
    name, equals, path = first.partition("=")
    if not (name and equals and path):
        raise StartupError(f'a hosted model is "{text}", it must be {MODEL_SPELLING}')
    table: dict[str, Any] = {"path": path}
    for each in rest:
        key, _, value = each.partition("=")
        try:
            table[key] = json.loads(value)
        except ValueError:
            table[key] = value
    return HostedModelOptions.of_table(name, table)


def _found_in(directory: Path) -> list[HostedModelOptions]:
    try:
        entries = sorted(directory.iterdir())
    except OSError as error:
        raise StartupError(f"--models-dir {directory} cannot be read: {error.strerror}") from None
    found = []
    for entry in entries:
        if entry.suffix == ".gguf" and entry.is_file():
            found.append(HostedModelOptions(name=entry.stem, path=str(entry), is_found=True))
        elif (entry / "config.json").is_file() or (entry / "model_index.json").is_file():
            found.append(HostedModelOptions(name=entry.name, path=str(entry), is_found=True))
    if not found:
        raise StartupError(
            f"--models-dir {directory} has no models: put .gguf files into it, or directories with a config.json"
        )
    return found
