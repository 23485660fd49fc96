"""`serve` with several models: a router without endpoints of its own, and a process for each loaded model."""

from __future__ import annotations

import argparse
import json
import logging
import os
import secrets
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec
import trio

from trioserve.admission.model_runs import ModelRuns
from trioserve.api.limits import BatchSettings
from trioserve.assemble_engines import memory_budget, model_spec
from trioserve.assemble_model import LoadProgress, LoadReport
from trioserve.commands.child_processes import (
    PARENT_SOCKET,
    child_sockets,
    ended_with_scope,
    open_child,
    relay_lines,
    relay_progress,
)
from trioserve.commands.program_end import STANDBY_COMMAND
from trioserve.commands.serving import optional_path
from trioserve.config import Config, add_arguments, config_from
from trioserve.contracts.arguments import closest_name
from trioserve.contracts.errors import StartupError, TrioserveError
from trioserve.model.settings import lora_modules
from trioserve.options.engine import EngineOptions, ImageOptions
from trioserve.options.hosting import KV_CACHE_GIB, OWN_OPTIONS, HostedModelOptions
from trioserve.options.option import ENVIRONMENT_PREFIX, checked, options_of
from trioserve.proxy.fleet import EndpointSpec
from trioserve.router.hosted_models import ModelSpec
from trioserve.router.settings import HostedModelsSettings
from trioserve.store.store import Store, open_store
from trioserve.trio_tools.errors_unwrapped import errors_unwrapped
from trioserve.trio_tools.interpreter import return_memory

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
                closest = closest_name(key, (known.keys() - NOT_OF_ENGINES) | OWN_OPTIONS.keys())
                hint = f"did you mean {closest}?" if closest else f"it may have {', '.join(OWN_OPTIONS)}"
                raise StartupError(
                    f'the hosted model "{model.name}" has the option {key}, which neither a model nor its engine has: '
                    f"{hint}"
                )
        spelled = {key: (f'{key} of the hosted model "{model.name}"', value) for key, value in model.engine.items()}
        checked(Config, {"model": ("the path", model.path), **spelled}, strict=False)
    return models


class Hosting:
    """The models of a server, checked and measured before it starts. Models of the hub are downloaded.

    Args:
        config: options of the server.
        serve_model: serves a model in this process.

    Raises:
        StartupError: an option is wrong, or a model cannot be read.
    """

    def __init__(self, config: Config, serve_model: ServeModel) -> None:
        self._config = config
        self._serve_model = serve_model
        self._models = hosted_models(config)
        common = _common_options(config)
        self._specs = _readable(self._models, common, config.model_keep_alive)
        names = {spec.name for spec in self._specs}
        self._models = [model for model in self._models if model.name in names]
        self._memory_bytes = memory_budget(config.models_memory)
        self._processes = ModelProcesses(config, self._models)

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

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep a process on standby for the next load inside of the scope."""
        if not self._config.model_processes:
            yield
            return
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._processes.keep_standby)
            yield
            nursery.cancel_scope.cancel()

    def runs(self) -> ModelRuns[EndpointSpec]:
        """Create the runs of the models. Models that have to be preloaded are loaded once they run.

        Raises:
            StartupError: the pinned models do not fit into the memory.
        """
        config = self._config
        settings = HostedModelsSettings(
            memory_bytes=self._memory_bytes,
            turn_seconds=config.model_turn,
            loads_max=config.max_model_loads,
            stall_seconds=config.model_load_timeout,
        )
        processes = self._processes
        run = processes.run if config.model_processes else partial(processes.run_inside, self._serve_model)
        runs = ModelRuns(settings, self._specs, run)
        runs.on_adapter = processes.set_adapter
        for model in self._models:
            if model.preload:
                runs.load(model.name)
        return runs


def _readable(
    models: Sequence[HostedModelOptions], common: Mapping[str, Any], keep_alive: float | None
) -> list[ModelSpec]:
    """Describe the models, without those of a directory that cannot be read.

    Raises:
        StartupError: a model that the user named cannot be read, or no model can be read.
    """
    specs = []
    for model in models:
        try:
            specs.append(model_spec(model, common, keep_alive=keep_alive))
        except StartupError as error:
            # A download that was interrupted, or a file of another program, must not stop the other models.
            if not model.is_found:
                raise
            failure = str(error)
            logger.warning("model left out model=%s reason=%s", model.name, failure)
    if not specs:
        raise StartupError(f"no model of --models-dir can be read: {failure}")
    return specs


def _common_options(config: Config) -> dict[str, Any]:
    """Return the engine options that apply to all models: those that were set, and the size of the KV cache."""
    names = {**options_of(EngineOptions), **options_of(ImageOptions)}.keys() - NOT_OF_ENGINES
    return {"kv_cache_memory": KV_CACHE_GIB, **_set_options(config, sorted(names))}


def _set_options(config: Config, names: Iterable[str]) -> dict[str, Any]:
    """Return the options of these names that have another value than the default."""
    known = options_of(Config)
    return {name: getattr(config, name) for name in names if getattr(config, name) != known[name].default}


class ServeModel(Protocol):
    """Type of functions that serve one model until `orders` yields an item, such as `serve_configured`."""

    async def __call__(
        self,
        config: Config,
        orders: trio.MemoryReceiveChannel[object],
        *,
        on_serving: Callable[[list[str]], None],
        on_progress: LoadReport,
    ) -> None: ...


class _Child:
    """A process that has imported the modules of a server, and waits for its arguments.

    Args:
        process: the process. Its standard input takes the arguments.
        connection: socket on which the process reports its progress. If the socket is closed, the process stops.
    """

    def __init__(self, process: trio.Process, connection: socket.socket) -> None:
        self.process = process
        self.connection = connection

    @classmethod
    async def start(cls, keys: Mapping[str, str]) -> _Child:
        """Start a process.

        Args:
            keys: variables with the keys of its server.
        """
        ours, theirs = child_sockets()
        with theirs:
            try:
                process = await open_child(
                    ["-m", "trioserve", STANDBY_COMMAND],
                    stdin=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env=_environment({**keys, PARENT_SOCKET: str(theirs.fileno())}),
                    pass_fds=(theirs.fileno(),),
                )
            except BaseException:
                ours.close()
                raise
        return cls(process, ours)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Own the process inside of the scope. It is killed at the end if it still runs."""
        with self.connection:
            async with ended_with_scope(self.process):
                yield

    async def begin(self, arguments: list[str]) -> None:
        """Let the process run a command of trioserve.

        Args:
            arguments: arguments of the command.
        """
        assert self.process.stdin is not None
        async with self.process.stdin as stdin:
            with suppress(trio.BrokenResourceError):  # The process has ended, which its exit code explains.
                await stdin.send_all(msgspec.json.encode(arguments))


class ModelProcesses:
    """Runs one server for each loaded model: a process of `trioserve serve`, or tasks of this process.

    The servers listen at 127.0.0.1, and accept only requests with a key that this program makes at its start.

    Args:
        config: options of the server. Engine options that were set apply to all models.
    """

    def __init__(self, config: Config, models: Sequence[HostedModelOptions]) -> None:
        self._common = _common_options(config)
        self._config = config
        self._models = {model.name: model for model in models}
        self._key = secrets.token_urlsafe(32)
        self._loads = 0
        self._standby: _Child | None = None
        self._has_ended_load = trio.Event()

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
            path: its directory. None: the model is loaded without it.
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
        endpoint, last_line = self._new_endpoint(name), ""
        path = self._models[name].path

        def note_progress(activity: str, share: float | None) -> None:
            on_progress(_for_clients(activity, name, path), share)

        on_progress(f"starting the process of {name}", None)
        child = await self._next_child()
        process = child.process

        def note_loaded(url: str) -> None:
            self._has_ended_load.set()
            on_loaded(endpoint(url))

        async with child.running(), trio.open_nursery() as nursery:
            nursery.start_soon(relay_progress, trio.socket.from_stdlib_socket(child.connection), note_progress)
            nursery.start_soon(_stop, process, stopping)
            nursery.start_soon(child.begin, self.command(name))
            assert process.stderr is not None
            last_line = await relay_lines(name, process.stderr, note_loaded)
            code = await process.wait()
            nursery.cancel_scope.cancel()
        self._has_ended_load.set()
        return (
            f"its process ended with code {code}: {_for_clients(last_line, name, path)}"
            if code
            else "its process ended"
        )

    async def keep_standby(self) -> None:
        """Keep one process that has imported the modules of a server, so that the next load takes less time.

        The process starts when a load has ended, because both would share the cores.
        """
        try:
            while True:
                self._has_ended_load = trio.Event()
                if self._standby is None:
                    try:
                        self._standby = await _Child.start(self._keys())
                    except OSError as error:  # The next load tries again, and reports the error.
                        logger.warning("no process on standby: %s", error)
                await self._has_ended_load.wait()
        finally:
            if self._standby is not None:
                async with self._standby.running():
                    pass

    async def _next_child(self) -> _Child:
        """Return the process on standby, or a new one. The caller owns it from now on."""
        child, self._standby = self._standby, None
        if child is not None and child.process.poll() is not None:
            child.connection.close()
            child = None
        return child or await _Child.start(self._keys())

    async def run_inside(
        self,
        serve_model: ServeModel,
        name: str,
        *,
        on_loaded: Callable[[EndpointSpec], None],
        on_progress: Callable[[str, float | None], None],
        stopping: trio.Event,
    ) -> str:
        """Run the server of a model in tasks of this process. See `run`.

        Args:
            serve_model: runs the server until `stopping` is set, or the load fails.
            name: the model.
            on_loaded: called once the server accepts requests.
            on_progress: called with the progress of the load.
            stopping: ends the load at once, or drains the server.

        Returns:
            How the server ended.
        """
        endpoint, path = self._new_endpoint(name), self._models[name].path
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        config = config_from(parser.parse_args(self.command(name)[1:]), self._keys(), kind=Config)
        is_loaded = False

        def note_serving(urls: list[str]) -> None:
            nonlocal is_loaded
            is_loaded = True
            on_loaded(endpoint(urls[0]))

        def note_progress(progress: LoadProgress) -> None:
            on_progress(_for_clients(progress.what, name, path), progress.share)

        async def stop(everything: trio.CancelScope) -> None:
            await stopping.wait()
            if is_loaded:
                sender.send_nowait(signal.SIGTERM)
                await trio.sleep(STOP_SECONDS_MAX)
                logger.warning("model cancelled, it did not stop in %s s model=%s", STOP_SECONDS_MAX, name)
            everything.cancel()

        sender, orders = trio.open_memory_channel[object](1)
        try:
            with errors_unwrapped():
                async with sender, orders, trio.open_nursery() as nursery:
                    nursery.start_soon(stop, nursery.cancel_scope)
                    await serve_model(config, orders, on_serving=note_serving, on_progress=note_progress)
                    nursery.cancel_scope.cancel()
        except TrioserveError as error:
            return _for_clients(str(error), name, path)
        await return_memory()
        return "its server ended"

    def _new_endpoint(self, name: str) -> Callable[[str], EndpointSpec]:
        """Return a function that describes the endpoint of a new load by its URL."""
        self._loads += 1
        id = f"{name}#{self._loads}"
        names = {served: served for served in (name, *self._models[name].adapters)}
        return lambda url: EndpointSpec(url=url, id=id, api_key=self._key, models=names)

    def _keys(self) -> dict[str, str]:
        """Return the variables with the keys of a model's server."""
        return {f"{ENVIRONMENT_PREFIX}{name}": self._key for name in ("API_KEY", "ADMIN_API_KEY")}


def _for_clients(text: str, name: str, path: str) -> str:
    """Replace the path of a model by its name, because clients must not see the directories of the server."""
    return text.replace(path, name) if os.sep in path else text


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
