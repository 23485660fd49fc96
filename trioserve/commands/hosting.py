"""`serve` with several models: a router without endpoints of its own, and a process for each loaded model."""

from __future__ import annotations

import json
import logging
import os
import secrets
import signal
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import msgspec
import trio

from trioserve.admission.model_runs import ModelRuns
from trioserve.api.limits import BatchSettings
from trioserve.assemble_engines import memory_budget, model_spec
from trioserve.commands.child_processes import (
    PARENT_SOCKET,
    child_sockets,
    relay_lines,
    relay_progress,
    start_child,
)
from trioserve.commands.serving import optional_path
from trioserve.config import Config
from trioserve.contracts.errors import StartupError
from trioserve.model.settings import lora_modules
from trioserve.options.engine import EngineOptions, ImageOptions
from trioserve.options.hosting import KV_CACHE_GIB, HostedModelOptions
from trioserve.options.option import ENVIRONMENT_PREFIX, checked, options_of
from trioserve.proxy.fleet import EndpointSpec
from trioserve.router.settings import HostedModelsSettings
from trioserve.store.store import Store, open_store

__all__ = ["Hosting", "ModelProcesses", "hosted_models"]

logger = logging.getLogger(__name__)

STOP_SECONDS_MAX = 10.0  # A process that has not ended this long after SIGTERM is killed.
NOT_OF_ENGINES = frozenset({"model", "served_model_name"})
PASSED_ON = (
    "allow_runtime_lora_updating",
    "allowed_lora_path",
    "trust_request_chat_template",
    "tenant_header",
    "max_body_bytes",
    "max_response_bytes",
    "max_responses_bytes",
    "store_max_bytes",
    "store_max_objects",
    "store_ttl",
    "max_background_responses",
    "background_timeout",
)
"""Options of the server that also apply to the process of each model."""


def hosted_models(config: Config) -> list[HostedModelOptions]:
    """Return the models that the server loads on demand, and check their options.

    Args:
        config: options of the server.

    Raises:
        StartupError: an option is wrong.
    """
    known = {**options_of(EngineOptions), **options_of(ImageOptions)}
    models = config.hosted_models()
    if config.lora_modules:
        raise StartupError("--lora-modules is set, but there are several models: set lora_modules of one of them")
    for model in models:
        for key in model.engine:
            if key not in known or key in NOT_OF_ENGINES:
                raise StartupError(f'the hosted model "{model.name}" has the option {key}, which is no engine option')
        spelled = {key: (f'{key} of the hosted model "{model.name}"', value) for key, value in model.engine.items()}
        checked(Config, {"model": ("the path", model.path), **spelled}, strict=False)
    return models


class Hosting:
    """The models of a server, checked and measured before it starts. Models of the hub are downloaded.

    Args:
        config: options of the server.

    Raises:
        StartupError: an option is wrong, or a model cannot be read.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._models = hosted_models(config)
        common = _common_options(config)
        self._specs = [model_spec(model, common, keep_alive=config.model_keep_alive) for model in self._models]
        self._memory_bytes = memory_budget(config.models_memory)

    @property
    def what(self) -> str:
        """The models, for status messages."""
        return f"{len(self._models)} models on demand"

    @property
    def aliases(self) -> dict[str, str]:
        """Names of models by their further names."""
        return {alias: model.name for model in self._models for alias in model.aliases}

    @property
    def batch_settings(self) -> BatchSettings:
        """Limits of batches."""
        return self._config.batch_settings()

    def open_store(self) -> AbstractAsyncContextManager[Store]:
        """Open the store of files and batches, which may use all models."""
        return open_store(optional_path(self._config.data_dir), self._config.store_settings())

    def runs(self) -> ModelRuns[EndpointSpec]:
        """Create the runs of the models. Models that have to be preloaded are loaded once they run.

        Raises:
            StartupError: the pinned models do not fit into the memory.
        """
        config = self._config
        settings = HostedModelsSettings(
            memory_bytes=self._memory_bytes, turn_seconds=config.model_turn, loads_max=config.max_model_loads
        )
        processes = ModelProcesses(config, self._models)
        runs = ModelRuns(settings, self._specs, processes.run)
        runs.on_adapter = processes.set_adapter
        for model in self._models:
            if model.preload:
                runs.load(model.name)
        return runs


def _common_options(config: Config) -> dict[str, Any]:
    """Return the engine options that apply to all models: those that were set, and the size of the KV cache."""
    names = {**options_of(EngineOptions), **options_of(ImageOptions)}.keys() - NOT_OF_ENGINES
    return {"kv_cache_memory": KV_CACHE_GIB, **_set_options(config, sorted(names))}


def _set_options(config: Config, names: Iterable[str]) -> dict[str, Any]:
    """Return the options of these names that have another value than the default."""
    known = options_of(Config)
    return {name: getattr(config, name) for name in names if getattr(config, name) != known[name].default}


class ModelProcesses:
    """Runs one process of `trioserve serve` for each loaded model.

    The processes listen at 127.0.0.1, and accept only requests with a key that this program makes at its start.

    Args:
        config: options of the server. Engine options that were set apply to all models.
        models: the models.
    """

    def __init__(self, config: Config, models: Sequence[HostedModelOptions]) -> None:
        self._common = _common_options(config)
        self._config = config
        self._models = {model.name: model for model in models}
        self._key = secrets.token_urlsafe(32)
        self._loads = 0

    def command(self, name: str) -> list[str]:
        """Return the arguments of trioserve for the process of a model.

        Args:
            name: the model.
        """
        model, config = self._models[name], self._config
        flags = ["serve", "--model", model.path, "--served-model-name", name, "--host", "127.0.0.1", "--port", "0"]
        flags += ["--no-ui", "--no-access-log", "--log-level", config.log_level, "--drain-delay", "0"]
        if config.data_dir is not None:
            flags += ["--data-dir", str(Path(config.data_dir) / "models" / name.replace("/", "--"))]
        passed_on = _set_options(config, PASSED_ON)
        return flags + flags_of({**passed_on, **self._common, **model.engine})

    def set_adapter(self, name: str, adapter: str, path: str | None) -> None:
        """Load a model with a LoRA adapter from its next load on, or without it.

        Args:
            name: the model.
            adapter: name of the adapter.
            path: its directory. None: the model has it no more.
        """
        model = self._models[name]
        others = [each for each in lora_modules(model.engine.get("lora_modules", ())) if each.name != adapter]
        kept = [*((each.name, each.path) for each in others), *([] if path is None else [(adapter, path)])]
        modules = [json.dumps({"name": each, "path": str(where)}) for each, where in kept]
        self._models[name] = msgspec.structs.replace(model, engine={**model.engine, "lora_modules": modules})

    async def run(
        self,
        name: str,
        *,
        on_loaded: Callable[[EndpointSpec], None],
        on_progress: Callable[[str, float | None], None],
        stopping: trio.Event,
    ) -> str:
        """Run the process of a model, see RunModel.

        Args:
            name: the model.
            on_loaded: called once the process accepts requests.
            on_progress: called with the progress of the load.
            stopping: the process gets SIGTERM when this event is set.

        Returns:
            How the process ended.
        """
        self._loads += 1
        id = f"{name}#{self._loads}"
        key = {f"{ENVIRONMENT_PREFIX}API_KEY": self._key, f"{ENVIRONMENT_PREFIX}ADMIN_API_KEY": self._key}
        model, last_line = self._models[name], ""
        ours, theirs = child_sockets()

        def note_progress(activity: str, share: float | None) -> None:
            on_progress(activity.replace(model.path, name), share)  # Clients see the activity, but no paths.

        on_progress(f"starting the process of {name}", None)
        with ours, theirs:
            async with trio.open_nursery() as nursery:
                process = await start_child(
                    nursery,
                    ["-m", "trioserve", *self.command(name)],
                    stderr=subprocess.PIPE,
                    env=_environment({**key, PARENT_SOCKET: str(theirs.fileno())}),
                    pass_fds=(theirs.fileno(),),
                )
                nursery.start_soon(relay_progress, trio.socket.from_stdlib_socket(ours), note_progress)
                nursery.start_soon(_stop, process, stopping)
                assert process.stderr is not None

                def note_serving(url: str) -> None:
                    names = {served: served for served in (name, *model.adapters)}
                    on_loaded(EndpointSpec(url=url, id=id, api_key=self._key, models=names))

                last_line = await relay_lines(name, process.stderr, note_serving)
                code = await process.wait()
                nursery.cancel_scope.cancel()
        return f"its process ended with code {code}: {last_line}" if code else "its process ended"


def flags_of(options: Mapping[str, Any]) -> list[str]:
    """Spell options of `serve` as flags.

    Args:
        options: values by the names of the options.
    """
    known = options_of(Config)
    flags: list[str] = []
    for name, value in options.items():
        flag = known[name].flag
        if isinstance(value, bool):
            flags.append(flag if value else flag.replace("--", "--no-", 1))
        elif isinstance(value, list | tuple):
            flags += [flag, *map(str, value)] if value else []
        elif value is not None:
            flags += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    return flags


def _environment(own: Mapping[str, str]) -> dict[str, str]:
    """Return this process's variables without options of trioserve, which reach the models as flags."""
    names = {option.variable for option in options_of(Config).values()}
    return {name: value for name, value in os.environ.items() if name not in names} | dict(own)


async def _stop(process: trio.Process, stopping: trio.Event) -> None:
    await stopping.wait()
    process.send_signal(signal.SIGTERM)
    await trio.sleep(STOP_SECONDS_MAX)
    logger.warning("process killed, it did not stop in %s s pid=%s", STOP_SECONDS_MAX, process.pid)
    process.kill()
