"""Opens several engines in one program, each one when a request asks for it, within one memory budget."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import trio

from trioserve.admission.model_runs import ModelFollower, ModelRuns, ModelStatus
from trioserve.assemble import open_configured_engine
from trioserve.assemble_model import LoggedProgress
from trioserve.asyncio.engine import Engine as AsyncioEngine
from trioserve.asyncio.engine import OnTrio, awaited, called, for_asyncio
from trioserve.contracts.errors import StartupError, TrioserveError
from trioserve.engine.engine import Engine
from trioserve.model.device import free_host_bytes
from trioserve.model.drafts.checkpoints import DraftSource, draft_source
from trioserve.model.estimate import estimate_model
from trioserve.model.loading.checkpoint import Checkpoint
from trioserve.model.loading.default_model import resolve_model
from trioserve.options.engine import EngineOptions
from trioserve.options.hosting import GIB, KV_CACHE_GIB, MEMORY_SHARE, HostedModelOptions
from trioserve.options.option import checked, options_of
from trioserve.router.hosted_models import ModelSpec
from trioserve.router.settings import HostedModelsSettings
from trioserve.trio_tools.errors_unwrapped import errors_unwrapped
from trioserve.trio_tools.interpreter import return_memory
from trioserve.trio_tools.own_run import check_is_in_trio, opened_once

__all__ = [
    "AsyncioEngines",
    "Engines",
    "engine_options_of",
    "memory_budget",
    "model_spec",
    "open_asyncio_engines",
    "open_engines",
]


def engine_options_of(model: HostedModelOptions, common: Mapping[str, Any]) -> EngineOptions:
    """Return the options of a hosted model's engine.

    Args:
        common: engine options of all models. The options of the model override them.

    Raises:
        StartupError: an option is unknown or has a wrong value.
    """
    known = options_of(EngineOptions)
    values = {"kv_cache_memory": KV_CACHE_GIB, **{name: value for name, value in common.items() if name in known}}
    spelled = {name: (name, value) for name, value in {**values, **model.engine}.items()}
    try:
        return checked(EngineOptions, {**spelled, "model": ("model", model.path)}, strict=False)
    except StartupError as error:
        raise StartupError(f'the hosted model "{model.name}": {error}') from None


def model_spec(model: HostedModelOptions, common: Mapping[str, Any], *, keep_alive: float | None) -> ModelSpec:
    """Describe a hosted model. Its files are looked for, and fetched from the hub if they are missing.

    Args:
        common: engine options of all models.
        keep_alive: seconds after which an idle model is unloaded. None: no limit. The model's own value overrides it.

    Raises:
        StartupError: an option is wrong, or the model cannot be read.
    """
    seconds = keep_alive if model.keep_alive is None else model.keep_alive
    sizes: dict[str, int] = {}
    if model.memory is not None:
        sizes["bytes"] = int(model.memory * GIB)
    else:
        known = options_of(EngineOptions)
        own = {name: value for name, value in model.engine.items() if name in known}
        options = engine_options_of(HostedModelOptions(name=model.name, path=model.path, engine=own), common)
        try:
            estimate = estimate_model(resolve_model(model.path), options.model_settings(), partial(_draft, options))
        except TrioserveError as error:
            raise StartupError(f'the hosted model "{model.name}" cannot be read: {error}') from None
        sizes["bytes"] = estimate.total_bytes
        if estimate.device == "cpu" and estimate.kv_tokens:  # Otherwise, the cache keeps its size.
            tokens = sizes["kv_block_tokens"] = options.block_size
            sizes["kv_blocks"] = estimate.kv_tokens // tokens
            sizes["kv_blocks_min"] = min(-(-estimate.context_tokens_max // tokens), sizes["kv_blocks"])
            sizes["kv_block_bytes"] = estimate.kv_token_bytes * tokens
    return ModelSpec(
        name=model.name,
        adapters=model.adapters,
        **sizes,
        keep_alive_seconds=math.inf if seconds is None else seconds,
        is_pinned=model.pinned,
        priority=model.priority,
        group=model.group,
    )


def _draft(options: EngineOptions, target: Checkpoint) -> DraftSource | None:
    """Open the draft model of a hosted model. None if draft tokens come from the text, or there are none."""
    drafts = options.drafts()
    if drafts is None or drafts.source == "text":
        return None
    path = None if drafts.model is None else resolve_model(drafts.model, revision=drafts.revision)
    settings = drafts.settings_of_draft(options.model_settings())
    return draft_source(drafts.model or drafts.source, path, target, settings, drafts.token_count)


def memory_budget(memory_gib: float | None) -> int:
    """Return the memory of all hosted models together, in bytes.

    Args:
        memory_gib: the memory in GiB. None: MEMORY_SHARE of the free memory.
    """
    return int(MEMORY_SHARE * free_host_bytes()) if memory_gib is None else int(memory_gib * GIB)


class Engines:
    """Several engines of one program. `open_engines` creates it.

    Args:
        runs: runs of the engines.
    """

    def __init__(self, runs: ModelRuns[Engine]) -> None:
        self._runs = runs

    @asynccontextmanager
    async def engine(self, name: str) -> AsyncIterator[Engine]:
        """Wait until an engine is open, and keep it open inside of the scope.

        If the last caller leaves while the engine is being opened, the opening is cancelled.

        Args:
            name: name of the model.

        Raises:
            KeyError: there is no such model.
            InvalidRequest: the model does not fit into the memory.
            NoEndpoint: the model could not be loaded, now or a short time ago. `retry_after_seconds` says when it may
                be loaded again.
        """
        if name not in self._runs:
            raise KeyError(f"there is no model {name!r}; models are: {', '.join(sorted(self._runs.names))}")
        async with self._runs.leased(name) as engine:
            yield engine

    def load(self, name: str) -> None:
        """Begin to open an engine, as if a caller waited for it.

        Args:
            name: name of the model.

        Raises:
            InvalidRequest: the model does not fit into the memory.
        """
        self._runs.load(name)

    def unload(self, name: str) -> None:
        """Close an engine when its last caller has left.

        Args:
            name: name of the model.
        """
        self._runs.unload(name)

    async def wait_until_settled(self, name: str) -> ModelStatus:
        """Wait until an engine is neither being opened nor closed.

        Args:
            name: name of the model.

        Returns:
            The state at the end.
        """
        return await self._runs.wait_until_settled(name)

    def statuses(self) -> Mapping[str, ModelStatus]:
        """Return the states of all models by name."""
        return self._runs.statuses()

    @property
    def held_bytes(self) -> int:
        """Memory of all models that are open, being opened or being closed, in bytes."""
        return self._runs.held_bytes


class AsyncioEngines(OnTrio[Engines]):
    """Several engines of one asyncio program, created by trioserve.asyncio.open_engines. See OnTrio."""

    load = called(Engines.load)
    unload = called(Engines.unload)
    wait_until_settled = awaited(Engines.wait_until_settled)
    statuses = called(Engines.statuses)

    @asynccontextmanager
    async def engine(self, name: str) -> AsyncIterator[AsyncioEngine]:
        """Wait until an engine is open, and keep it open inside of the scope. See trioserve.Engines.engine.

        Args:
            name: name of the model.
        """
        async with self.thread.entered(partial(self.on_trio.engine, name)) as engine:
            yield AsyncioEngine(self.thread, engine)

    @property
    def held_bytes(self) -> int:
        """Memory of all models that are open, being opened or being closed, in bytes."""
        return self.thread.call(lambda: self.on_trio.held_bytes)


@opened_once
async def open_engines(
    models: Mapping[str, Mapping[str, Any]],
    *,
    memory: float | None = None,
    keep_alive: float | None = None,
    turn: float = 10.0,
    max_loads: int = 1,
    load_timeout: float = 300.0,
    **options: Any,
) -> AsyncIterator[Engines]:
    """Offer several engines in the scope of an `async with`, and open each one when the program asks for it.

    Engines without callers are closed when another one needs their memory. See docs/guides/models.md for the rules.
    The exit of the scope closes all engines.

    Args:
        models: options of each engine by name: those of `open_engine`, of which `model` is required, and `keep_alive`
            (seconds), `pinned`, `preload`, `priority`, `group` and `memory` (GiB).
        memory: GiB for weights and KV caches of all open engines. None: 80 % of the free memory.
        keep_alive: seconds after its last use until an engine is closed. None: when its memory is needed.
        turn: seconds that an engine in use keeps its memory before it must give way to one that is waited for.
        max_loads: engines that are opened at the same time.
        load_timeout: seconds without progress after which the opening of an engine is stopped.
        options: options of all engines that do not set them, as of `open_engine`.

    Raises:
        StartupError: an option is wrong, a model cannot be read, or the pinned models do not fit.
    """
    check_is_in_trio("trioserve.open_engines")
    hosted = [HostedModelOptions.of_table(name, table, path_key="model") for name, table in models.items()]
    configured = {model.name: engine_options_of(model, options) for model in hosted}
    specs = [
        await trio.to_thread.run_sync(partial(model_spec, model, options, keep_alive=keep_alive)) for model in hosted
    ]
    settings = HostedModelsSettings(
        memory_bytes=memory_budget(memory), turn_seconds=turn, loads_max=max_loads, stall_seconds=load_timeout
    )
    runs = ModelRuns[Engine](settings, specs, partial(_run_engine, configured))
    runs.follower = _EngineFollower()
    for model in hosted:
        if model.preload:
            runs.load(model.name)
    with errors_unwrapped():
        async with trio.open_nursery() as nursery:
            await nursery.start(runs.run)
            yield Engines(runs)
            nursery.cancel_scope.cancel()


open_asyncio_engines = for_asyncio(open_engines, AsyncioEngines)
"""The function `trioserve.asyncio.open_engines`."""


class _EngineFollower(ModelFollower[Engine]):
    async def resize(self, loaded: Engine, tokens: int) -> None:
        await loaded.limit_kv_cache(tokens)

    async def set_asleep(self, loaded: Engine, asleep: bool) -> None:
        await (loaded.sleep(1, "wait") if asleep else loaded.wake_up())


async def _run_engine(
    configured: Mapping[str, EngineOptions],
    name: str,
    *,
    on_loaded: Callable[[Engine], None],
    on_progress: Callable[[str, float | None], None],
    stopping: trio.Event,
) -> str:
    """Open an engine, and close it when it has to end. See RunModel."""
    is_open = False
    progress = LoggedProgress(lambda progress: on_progress(progress.what, progress.share))

    async def cancel_opening(scope: trio.CancelScope) -> None:
        await stopping.wait()
        if not is_open:
            scope.cancel()

    try:
        with errors_unwrapped():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(cancel_opening, nursery.cancel_scope)
                async with open_configured_engine(configured[name], on_progress=progress) as engine:
                    is_open = True
                    on_loaded(engine)
                    await stopping.wait()
    except TrioserveError as error:
        return str(error)
    await return_memory()
    return "it was closed"
