"""A group of engines that Ray places: detached actors, each a whole `trioserve serve` at a port of its node.

Settled here is what Ray is told: where the engines of a group may be, what each needs, and that one that dies is
started anew. Ray places and restarts them, and carries no request: clients and routers speak HTTP with them. Which of
them a router knows is for trioserve/proxy/discovery/ray.py. Needs the extra `ray`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import msgspec
import ray
import trio
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from trioserve.asyncio.thread_event import ThreadEvent, Waiters
from trioserve.commands.log_lines import logging_to
from trioserve.commands.program_end import EXIT_FAILED
from trioserve.config import Config
from trioserve.contracts.errors import StartupError, TrioserveError
from trioserve.trio_tools.interpreter import freeze_loaded_objects, prepare_interpreter

__all__ = [
    "EngineActor",
    "EngineState",
    "GroupPlan",
    "Placement",
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

NAMESPACE = "trioserve"  # of Ray, in which the names of groups count
ORDERS_MAX = 8
AGAIN_SECONDS = 5.0  # before an engine that failed is started anew: one that fails at once is not loaded all day long
STATE_SECONDS_MAX = 10.0  # in which an actor that is well says how it is
LOOK_SECONDS = 1.0
CONNECT_SECONDS_MAX = 5.0

Placement = Literal["pack", "spread", "strict-pack", "strict-spread"]
"""Ray's: on few nodes, on many, on one alone, each on another."""


class EngineState(NamedTuple):
    """url: at which it serves; None: it does not yet, or not any more. failure: why it never will, or stopped.
    node: the address of the node that it is on."""

    url: str | None
    failure: str | None
    node: str


class GroupPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What Ray is to place. replicas: engines. cpus, gpus: of one of them, all on one node: what computes one model
    together is never spread."""

    name: str
    replicas: int = 1
    cpus: float = 1.0
    gpus: float = 0.0
    placement: Placement = "spread"

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name:
            raise StartupError(f'the name of a group is "{self.name}", it must not be empty, and have no "/"')
        if self.replicas < 1:
            raise StartupError(f"--replicas is {self.replicas}, allowed is a whole number of at least 1")
        if self.cpus <= 0 or self.gpus < 0:
            raise StartupError(f"--num-cpus is {self.cpus:g} and --num-gpus {self.gpus:g}, both must be amounts")

    @property
    def bundle(self) -> dict[str, float]:
        """What one engine needs, in Ray's words."""
        return {"CPU": self.cpus} | ({"GPU": self.gpus} if self.gpus else {})

    def actor(self, index: int) -> str:
        return f"{self.name}/{index}"


class EngineActor:
    """One engine, in a process that Ray has started. config: JSON. Its host and port are chosen here.

    It serves in a thread with a Trio loop, since Ray's own is asyncio's. Every method is async: Ray can end a wait only
    of those.
    """

    def __init__(self, config: bytes) -> None:
        node = ray.util.get_node_ip_address()
        self._config = msgspec.structs.replace(msgspec.json.decode(config, type=Config), host=node, port=0)
        self._state = EngineState(None, None, node)
        self._changes = Waiters()
        self._is_over = ThreadEvent()
        self._stops = False
        self._end: Callable[[], None] = lambda: None
        self._token: trio.lowlevel.TrioToken | None = None
        threading.Thread(target=self._work, name="trioserve", daemon=True).start()

    async def state(self, known: EngineState | None, seconds: float) -> EngineState:
        """As soon as it is another one than `known`, and when so much time is over."""
        change = self._changes.add()
        if self._state == known:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(change, seconds)
        return self._state

    async def stop(self) -> None:
        """Drain: requests may end within the engine's --drain-timeout. Returns when nobody is served any more."""
        self._stops = True
        self._set(self._state._replace(url=None))
        if self._token is not None:
            with contextlib.suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._end)
        await self._is_over.wait()

    def _work(self) -> None:
        """In the thread, to the end of the engine."""
        prepare_interpreter()
        failure = "the server ended by itself"
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
        os._exit(EXIT_FAILED)  # which is what Ray restarts an actor for

    async def _serve(self) -> None:
        sender, orders = trio.open_memory_channel[object](ORDERS_MAX)
        with trio.CancelScope() as loading:
            self._end = loading.cancel
            self._token = trio.lowlevel.current_trio_token()
            if self._stops:
                return
            from trioserve.commands.serve import serve_configured  # who only asks for engines needs none

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
    """Inside of a connection to a cluster that runs already. address: as ray.init takes it; None: what RAY_ADDRESS
    says, or this machine's. What Ray prints goes to stderr. Raises StartupError."""
    with contextlib.redirect_stdout(sys.stderr):  # where it would tell of dead nodes, between the lines of a command
        _connect(address)
        try:
            yield
        finally:
            ray.shutdown()


def _connect(address: str | None) -> None:
    address = address or os.environ.get("RAY_ADDRESS") or "auto"
    try:
        if match := re.fullmatch(r"(?:ray://)?\[?([^\[\]/]+?)\]?:(\d+)", address):
            # Ray itself goes on trying for minutes, and then ends the process.
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
            f"there is no Ray at {place}: start it with `ray start --head`, or name the cluster with --ray-address "
            f"HOST:PORT ({_first_line(error)})"
        ) from None


def engines_of(group: str) -> list[str]:
    """Names of the actors of a group that are there, or are to be again."""
    return sorted(name for name in ray.util.list_named_actors() if name.rpartition("/")[0] == group)


def groups() -> list[str]:
    return sorted({name.rpartition("/")[0] for name in ray.util.list_named_actors()})


def engine_states(group: str) -> dict[str, EngineState | None]:
    """By the name of its actor, how each engine of a group is; None: Ray has not placed it, or is starting it anew."""
    asked = {name: _ask(name, None) for name in engines_of(group)}
    deadline = time.monotonic() + STATE_SECONDS_MAX
    return {name: _answer(call, deadline - time.monotonic()) for name, call in asked.items()}


def start_engines(
    plan: GroupPlan, config: Config, *, seconds_max: float, tell: Callable[[str], None] = lambda sentence: None
) -> dict[str, str]:
    """The group, placed and serving: each engine's URL by the name of its actor. It outlives this program, until
    stop_engines. Who leaves before all serve, by an error or by Ctrl-C, leaves none behind.

    config: of each engine; what says where it listens is not heeded. tell: is given sentences for people, meanwhile.

    Raises StartupError: there is such a group, Ray finds no room in time, or an engine does not start.
    """
    if config.data_dir is not None and plan.replicas > 1:
        raise StartupError("data_dir belongs to one engine: leave it out, or have one replica")
    if engines_of(plan.name) or _placement_group(plan.name) is not None:
        raise StartupError(f'there is a group "{plan.name}" already: end it with `ray down {plan.name}`')
    deadline = time.monotonic() + seconds_max
    try:
        return _started(plan, config, deadline, tell)
    except BaseException:
        stop_engines(plan.name, seconds_max=0)
        raise


def stop_engines(group: str, *, seconds_max: float) -> int | None:
    """Drain the engines of a group, for so long at most, and end them; how many there were. None: no such group."""
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


def _started(plan: GroupPlan, config: Config, deadline: float, tell: Callable[[str], None]) -> dict[str, str]:
    needs = f"{engines_in_words(plan.replicas)} with {amounts(plan.bundle)} each, placed {plan.placement}"
    tell(f"waiting for room for {needs}; free in the cluster: {amounts(ray.available_resources())}")
    group = ray.util.placement_group(
        [plan.bundle] * plan.replicas,
        strategy=plan.placement.replace("-", "_").upper(),
        name=plan.name,
        lifetime="detached",
    )
    if not group.wait(max(0.0, deadline - time.monotonic())):
        raise StartupError(
            f"Ray has no room for {needs}: the nodes have {amounts(ray.cluster_resources())} together; ask for less "
            "with --replicas, --num-cpus or --num-gpus, or for another --placement, or add nodes"
        )
    encoded = msgspec.json.encode(config)
    for index in range(plan.replicas):
        _placed(plan, group, index, encoded)
    urls: dict[str, str] = {}
    while len(urls) < plan.replicas:
        if time.monotonic() >= deadline:
            raise StartupError(
                "the engines did not start in time: give them more with --timeout, or look at Ray's logs"
            )
        for name, state in engine_states(plan.name).items():
            if state is not None and state.failure is not None:
                raise StartupError(f"the engine {name} on {state.node} did not start: {state.failure}")
            if state is not None and state.url is not None and name not in urls:
                urls[name] = state.url
                tell(f"{name} serves at {state.url}")
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
        return None  # it has gone meanwhile


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
    """Of processors, in words."""
    return (
        " and ".join(f"{resources.get(name, 0.0):g} {name}" for name in ("CPU", "GPU") if resources.get(name)) or "none"
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
