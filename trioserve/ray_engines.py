"""A group of engines that Ray runs: detached actors, each with a complete `trioserve serve` at a port of its node.

This module describes the group to Ray: where the engines may run, which resources each engine needs, and that Ray must
restart a failed engine. Ray transfers no requests, because clients and routers use HTTP.
trioserve/proxy/discovery/ray.py finds the engines for a router. The module needs the extra `ray`.

`RayPlaces` runs the ranks of one model while one engine is open. Each rank is an actor, and Ray must place either all
ranks or none, on few nodes. Ray transfers no plans of steps. Each rank connects to its server with a socket, as all
ranks on other machines do, and trioserve/ranks handles the connection. This part runs in the process of
trioserve/commands/ray_place.py, and in the actors.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple

import msgspec
import ray
import trio
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from trioserve.asyncio.trio_thread import ThreadEvent, Waiters
from trioserve.commands.log_lines import logging_to
from trioserve.commands.program_end import EXIT_FAILED
from trioserve.config import Config
from trioserve.contracts.errors import StartupError, TrioserveError
from trioserve.model.loading.default_model import DOWNLOAD_THREAD, resolve_model
from trioserve.ranks.host import free_port, keep_ranks
from trioserve.ranks.placed import RankDoor, RankNode, RanksRequest
from trioserve.trio_tools.errors_unwrapped import errors_unwrapped
from trioserve.trio_tools.interpreter import freeze_loaded_objects, prepare_interpreter
from trioserve.trio_tools.worker_thread import call_abandonable

__all__ = [
    "EngineActor",
    "EngineState",
    "GroupPlan",
    "Placement",
    "RankActor",
    "RayPlaces",
    "amounts",
    "connected",
    "engine_states",
    "engines_in_words",
    "engines_of",
    "handle_of",
    "start_engines",
    "stop_engines",
]

logger = logging.getLogger(__name__)


NAMESPACE = "trioserve"  # namespace in Ray for the names of groups
ORDERS_MAX = 8
# Delay before a failed engine restarts, so that an engine that fails at once does not load the model all the time.
AGAIN_SECONDS = 5.0
STATE_SECONDS_MAX = 10.0  # longest wait for the answer of an actor; a healthy actor answers earlier
LOOK_SECONDS = 1.0
CONNECT_SECONDS_MAX = 5.0

Placement = Literal["pack", "spread", "strict-pack", "strict-spread"]
"""Ray's placement strategies: few nodes, many nodes, exactly one node, one node per engine."""


class EngineState(NamedTuple):
    """State of one engine.

    Attributes:
        url: URL of the engine. None if the engine does not serve yet, or has stopped.
        failure: reason why the engine did not start, or why it stopped. None for no failure.
        node: address of the engine's node.
    """

    url: str | None
    failure: str | None
    node: str


class GroupPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Description of a group that Ray must place.

    Attributes:
        name: name of the group.
        replicas: number of engines.
        cpus: CPUs of one engine, all on one node.
        gpus: GPUs of one engine, all on one node. The ranks of one model are never spread over nodes.
        placement: how Ray distributes the engines over nodes.
    """

    name: str
    replicas: int = 1
    cpus: float = 1.0
    gpus: float = 0.0
    placement: Placement = "spread"

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name:
            raise StartupError(f'the name of a group is "{self.name}", it must not be empty or contain "/"')
        if self.replicas < 1:
            raise StartupError(f"--replicas is {self.replicas}, allowed is a whole number of at least 1")
        if self.cpus <= 0 or self.gpus < 0:
            raise StartupError(
                f"--num-cpus is {self.cpus:g} and --num-gpus is {self.gpus:g}: CPUs must be above 0, GPUs 0 or more"
            )

    @property
    def bundle(self) -> dict[str, float]:
        """Resources of one engine, in Ray's format."""
        return {"CPU": self.cpus} | ({"GPU": self.gpus} if self.gpus else {})

    def actor(self, index: int) -> str:
        return f"{self.name}/{index}"


class EngineActor:
    """One engine, in a process that Ray has started.

    The engine serves in a thread with a Trio loop, because Ray's own loop is asyncio's. Every method is async, because
    Ray can cancel only a wait in an async method.

    Args:
        config: a Config as JSON. The actor chooses host and port itself.
    """

    def __init__(self, config: bytes) -> None:
        node = ray.util.get_node_ip_address()
        self._config = dataclasses.replace(msgspec.json.decode(config, type=Config), host=node, port=0)
        self._state = EngineState(None, None, node)
        self._changes = Waiters()
        self._is_over = ThreadEvent()
        self._stops = False
        self._end: Callable[[], None] = lambda: None
        self._token: trio.lowlevel.TrioToken | None = None
        threading.Thread(target=self._work, name="trioserve", daemon=True).start()

    async def state(self, known: EngineState | None, seconds: float) -> EngineState:
        """Wait until the state differs from a known one, or the time is over. Return the state.

        Args:
            known: the known state. None returns at once.
            seconds: longest time to wait.
        """
        change = self._changes.add()
        if self._state == known:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(change, seconds)
        return self._state

    async def stop(self) -> None:
        """Drain the engine, and return when all requests have ended. Requests get the time `--drain-timeout` to end."""
        self._stops = True
        self._set(self._state._replace(url=None))
        if self._token is not None:
            with contextlib.suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._end)
        await self._is_over.wait()

    def _work(self) -> None:
        """Run the engine in its thread until it ends."""
        prepare_interpreter()
        failure = "the server ended without a request to stop"
        with logging_to(level=self._config.log_level, form=self._config.log_format):
            try:
                trio.run(self._serve)
            except TrioserveError as error:
                failure = f"{type(error).__name__}: {error}"
                logger.error("engine failed: %s", failure)
            except BaseException as error:
                failure = f"{type(error).__name__}: {error}"
                logger.exception("engine failed")
        self._is_over.set()
        if self._stops:
            return
        self._set(self._state._replace(url=None, failure=failure))
        time.sleep(AGAIN_SECONDS)
        os._exit(EXIT_FAILED)  # Ray restarts an actor whose process exits.

    async def _serve(self) -> None:
        sender, orders = trio.open_memory_channel[object](ORDERS_MAX)
        with trio.CancelScope() as loading:
            self._end = loading.cancel
            self._token = trio.lowlevel.current_trio_token()
            if self._stops:
                return
            # Imported here, because programs that only look for engines do not need it.
            from trioserve.commands.serve import serve_configured

            await serve_configured(self._config, orders, on_serving=lambda urls: self._announce(urls, sender))

    def _announce(self, urls: list[str], sender: trio.MemorySendChannel[object]) -> None:
        freeze_loaded_objects()
        self._end = lambda: sender.send_nowait("stop")
        if self._stops:
            self._end()
        else:
            self._set(self._state._replace(url=urls[0]))

    def _set(self, state: EngineState) -> None:
        self._state = state
        self._changes.wake()


@contextmanager
def connected(address: str | None) -> Iterator[None]:
    """Connect to a running Ray cluster while the context is entered. Ray's output goes to stderr.

    Args:
        address: address of the cluster, as for ray.init. None uses RAY_ADDRESS, or the cluster of this machine.

    Raises:
        StartupError: there is no cluster.
    """
    # Without this setting, Ray's messages about dead nodes would be mixed with the output of a command.
    with contextlib.redirect_stdout(sys.stderr):
        _connect(address)
        try:
            yield
        finally:
            ray.shutdown()


def _connect(address: str | None) -> None:
    address = address or os.environ.get("RAY_ADDRESS") or "auto"
    try:
        if match := re.fullmatch(r"(?:ray://)?\[?([^\[\]/]+?)\]?:(\d+)", address):
            # Check first that the port accepts connections, because Ray would retry for minutes and then end the
            # process.
            socket.create_connection((match[1], int(match[2])), CONNECT_SECONDS_MAX).close()
        ray.init(
            address=address,
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except (ConnectionError, OSError, RuntimeError, ValueError, RayError) as error:
        place = "this machine" if address == "auto" else address
        raise StartupError(
            f"there is no Ray at {place}: start it with `ray start --head`, or set --ray-address HOST:PORT to the "
            f"cluster ({_first_line(error)})"
        ) from None


def engines_of(group: str) -> list[str]:
    """Return the names of those actors of a group that run or that Ray will restart.

    Args:
        group: name of the group.
    """
    return sorted(name for name in ray.util.list_named_actors() if name.rpartition("/")[0] == group)


def groups() -> list[str]:
    return sorted({name.rpartition("/")[0] for name in ray.util.list_named_actors()})


def engine_states(group: str) -> dict[str, EngineState | None]:
    """Return the state of each engine of a group.

    Args:
        group: name of the group.

    Returns:
        States by the names of the actors. None if Ray has not placed the actor yet, or is restarting it.
    """
    asked = {name: _ask(name, None) for name in engines_of(group)}
    deadline = time.monotonic() + STATE_SECONDS_MAX
    return {name: _answer(call, deadline - time.monotonic()) for name, call in asked.items()}


def start_engines(
    plan: GroupPlan, config: Config, *, seconds_max: float, report: Callable[[str], None] = lambda sentence: None
) -> dict[str, str]:
    """Start a group of engines, and wait until all engines serve.

    The group continues after the end of this program, until `stop_engines` is called. If this function fails or is
    interrupted, no engine remains.

    Args:
        plan: description of the group.
        config: options of each engine. The options host and port are ignored.
        seconds_max: longest time until all engines serve.
        report: receives sentences that describe the progress.

    Returns:
        URLs of the engines, by the names of their actors.

    Raises:
        StartupError: the group exists already, Ray has too few free nodes, or an engine does not start in time.
    """
    if config.data_dir is not None and plan.replicas > 1:
        raise StartupError("data_dir belongs to one engine: leave it out, or use one replica")
    if engines_of(plan.name) or _placement_group(plan.name) is not None:
        raise StartupError(f'the group "{plan.name}" exists already: end it with `ray down {plan.name}`')
    deadline = time.monotonic() + seconds_max
    try:
        return _started(plan, config, deadline, report)
    except BaseException:
        stop_engines(plan.name, seconds_max=0)
        raise


def stop_engines(group: str, *, seconds_max: float) -> int | None:
    """Drain the engines of a group, and then end them.

    Args:
        group: name of the group.
        seconds_max: longest time for requests to end.

    Returns:
        Number of engines, or None if there is no such group.
    """
    names = engines_of(group)
    handles = [handle for name in names if (handle := handle_of(name)) is not None]
    if handles and seconds_max > 0:
        ends = [handle.stop.remote() for handle in handles]
        ray.wait(ends, num_returns=len(ends), timeout=seconds_max)
    for handle in handles:
        ray.kill(handle, no_restart=True)
    placement_group = _placement_group(group)
    if placement_group is not None:
        ray.util.remove_placement_group(placement_group)
    return len(names) if names or placement_group is not None else None


def _started(plan: GroupPlan, config: Config, deadline: float, report: Callable[[str], None]) -> dict[str, str]:
    needs = f"{engines_in_words(plan.replicas)} with {amounts(plan.bundle)} each, placed {plan.placement}"
    report(f"waiting for free nodes for {needs}; free in the cluster: {amounts(ray.available_resources())}")
    group = ray.util.placement_group(
        [plan.bundle] * plan.replicas,
        strategy=plan.placement.replace("-", "_").upper(),
        name=plan.name,
        lifetime="detached",
    )
    if not group.wait(max(0.0, deadline - time.monotonic())):
        raise StartupError(
            f"Ray has no free nodes for {needs}: the nodes have {amounts(ray.cluster_resources())} together; ask for "
            "less with --replicas, --num-cpus or --num-gpus, choose another --placement, or add nodes"
        )
    encoded = msgspec.json.encode(config)
    for index in range(plan.replicas):
        _placed(plan, group, index, encoded)
    urls: dict[str, str] = {}
    while len(urls) < plan.replicas:
        if time.monotonic() >= deadline:
            raise StartupError(
                "the engines did not start in time: allow more time with --timeout, or look at Ray's logs"
            )
        for name, state in engine_states(plan.name).items():
            if state is not None and state.failure is not None:
                raise StartupError(f"the engine {name} on {state.node} did not start: {state.failure}")
            if state is not None and state.url is not None and name not in urls:
                urls[name] = state.url
                report(f"{name} serves at {state.url}")
        if len(urls) < plan.replicas:
            time.sleep(LOOK_SECONDS)
    return urls


def _placed(plan: GroupPlan, group: Any, index: int, config: bytes) -> Any:
    actor = ray.remote(EngineActor).options(
        name=plan.actor(index),
        lifetime="detached",
        num_cpus=plan.cpus,
        num_gpus=plan.gpus,
        max_restarts=-1,
        max_task_retries=0,
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
    )
    return actor.remote(config)


def _placement_group(group: str) -> Any | None:
    try:
        return ray.util.get_placement_group(group)
    except ValueError:
        return None


def handle_of(name: str) -> Any | None:
    try:
        return ray.get_actor(name)
    except ValueError:
        return None  # The actor has ended in the meantime.


def _ask(name: str, known: EngineState | None) -> Any:
    handle = handle_of(name)
    return None if handle is None else handle.state.remote(known, 0.0)


def _answer(call: Any, seconds_max: float) -> EngineState | None:
    if call is None:
        return None
    try:
        state: EngineState = ray.get(call, timeout=max(0.0, seconds_max))
    except (RayActorError, GetTimeoutError):
        return None
    return state


def engines_in_words(count: int) -> str:
    return f"{count} engine{'' if count == 1 else 's'}"


def amounts(resources: Mapping[str, float]) -> str:
    """Describe amounts of CPUs and GPUs in words.

    Args:
        resources: amounts by Ray's names.
    """
    return (
        " and ".join(f"{resources.get(name, 0.0):g} {name}" for name in ("CPU", "GPU") if resources.get(name)) or "none"
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


REASON_CHARACTERS_MAX = 400  # limit for Ray's description of why an actor ended, which may have several pages


class RankActor:
    """One rank, in a child process of an actor. The rank uses the GPU that Ray assigns to the actor.

    The rank runs in a thread with a Trio loop, because Ray's own loop is asyncio's. Every method is async, because Ray
    can cancel only a wait in an async method.

    Args:
        rank: number of the rank.
        model: model to load.
        revision: branch, tag or commit of a hub model.
    """

    def __init__(self, rank: int, model: str, revision: str | None) -> None:
        self._rank, self._model, self._revision = rank, model, revision
        self._is_over = ThreadEvent()
        self._why = ""

    async def node(self) -> RankNode:
        """Return the node of this actor."""
        address = ray.util.get_node_ip_address()
        return RankNode(ray.get_runtime_context().get_node_id(), address, free_port(address))

    async def keep(self, host: str, port: int, key: str) -> str:
        """Run the rank until it ends.

        Args:
            host: address of the server.
            port: port of the server.
            key: shared secret of ranks and server.

        Returns:
            The reason why the rank ended.
        """
        threading.Thread(target=self._work, args=(host, port, key), name="trioserve", daemon=True).start()
        await self._is_over.wait()
        return self._why

    def _work(self, host: str, port: int, key: str) -> None:
        with logging_to(level="info", form="text"):
            try:
                trio.run(self._keep, host, port, key)
            except BaseException as error:
                self._why = f"{type(error).__name__}: {error}"
        self._is_over.set()

    async def _keep(self, host: str, port: int, key: str) -> None:
        resolve = partial(resolve_model, revision=self._revision)
        path = await call_abandonable(resolve, self._model, thread_name=DOWNLOAD_THREAD)
        with errors_unwrapped():
            await keep_ranks([self._rank], path=path, host=host, port=port, key=key)


class RayPlaces:
    """Places ranks with Ray. Implements `commands.ray_place.RankPlaces`. The connection to Ray must be open.

    Args:
        wanted: number of ranks, and the resources that each rank needs.
    """

    def __init__(self, wanted: RanksRequest) -> None:
        self._wanted = wanted
        self._bundle = {"CPU": float(wanted.cpus)} | ({"GPU": float(wanted.gpus)} if wanted.gpus else {})
        self._group: Any = None
        self._actors: list[Any] = []
        self._asked: list[Any] = []
        self._kept: list[Any] = []

    def reserve(self) -> None:
        self._group = ray.util.placement_group([self._bundle] * self._wanted.count, strategy="PACK")

    def has_room(self, seconds_max: float) -> bool:
        return bool(self._group.wait(seconds_max))

    def shortage(self) -> str:
        return (
            f"waiting until Ray has free nodes for {self._wanted.count} ranks with {amounts(self._bundle)} each; free "
            f"in the cluster: {amounts(ray.available_resources())}"
        )

    def start(self) -> None:
        self._actors = [
            ray.remote(RankActor)
            .options(
                num_cpus=self._wanted.cpus,
                num_gpus=self._wanted.gpus,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank),
            )
            .remote(rank, self._wanted.model, self._wanted.revision)
            for rank in range(self._wanted.count)
        ]
        self._asked = [actor.node.remote() for actor in self._actors]

    def nodes(self, seconds_max: float) -> Sequence[RankNode] | None:
        answered, waiting = ray.wait(self._asked, num_returns=len(self._asked), timeout=seconds_max)
        found = [_rank_answer(rank, asked) for rank, asked in enumerate(self._asked) if asked in answered]
        return None if waiting else found

    def send(self, door: RankDoor) -> None:
        self._kept = [actor.keep.remote(door.host, door.port, door.key) for actor in self._actors]

    def watch(self, seconds_max: float) -> None:
        ended, _ = ray.wait(self._kept, timeout=seconds_max)
        for rank, kept in enumerate(self._kept):
            if kept in ended:
                raise StartupError(f"rank {rank} cannot run: {_rank_answer(rank, kept)}")

    def remove(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
        if self._group is not None:
            ray.util.remove_placement_group(self._group)


def _rank_answer(rank: int, asked: Any) -> Any:
    """Return the result of a call to an actor. Raises StartupError if the actor has ended."""
    try:
        return ray.get(asked)
    except RayError as error:
        reason = " ".join(str(error).split())[:REASON_CHARACTERS_MAX]
        raise StartupError(f"the actor of rank {rank} is gone: {reason}") from None
