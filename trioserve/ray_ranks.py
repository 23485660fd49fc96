"""Runs the ranks of one model with Ray, while one engine is open. Each rank is an actor, and Ray uses few nodes.

This module describes to Ray what each rank needs, and that Ray must place either all ranks or none. Ray transfers no
plans of steps. Each rank connects to its server with a socket, as all ranks on other machines do, and trioserve/ranks
handles the connection. This module runs in the process of trioserve/commands/ray_place.py, and in the actors. It needs
the extra `ray`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import ray
import trio
from ray.exceptions import RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from trioserve.asyncio.trio_thread import ThreadEvent
from trioserve.commands.log_lines import logging_to
from trioserve.contracts.errors import StartupError
from trioserve.model.loading.default_model import DOWNLOAD_THREAD, resolve_model
from trioserve.ranks.host import free_port, keep_ranks
from trioserve.ranks.placed import RankDoor, RankNode, RanksWanted
from trioserve.ray_engines import amounts
from trioserve.trio_tools.errors_unwrapped import errors_unwrapped
from trioserve.trio_tools.worker_thread import call_abandonable

__all__ = ["RankActor", "RayPlaces"]

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

    def __init__(self, wanted: RanksWanted) -> None:
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
        found = [_answer(rank, asked) for rank, asked in enumerate(self._asked) if asked in answered]
        return None if waiting else found

    def send(self, door: RankDoor) -> None:
        self._kept = [actor.keep.remote(door.host, door.port, door.key) for actor in self._actors]

    def watch(self, seconds_max: float) -> None:
        ended, _ = ray.wait(self._kept, timeout=seconds_max)
        for rank, kept in enumerate(self._kept):
            if kept in ended:
                raise StartupError(f"rank {rank} cannot run: {_answer(rank, kept)}")

    def remove(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
        if self._group is not None:
            ray.util.remove_placement_group(self._group)


def _answer(rank: int, asked: Any) -> Any:
    """Return the result of a call to an actor. Raises StartupError if the actor has ended."""
    try:
        return ray.get(asked)
    except RayError as error:
        reason = " ".join(str(error).split())[:REASON_CHARACTERS_MAX]
        raise StartupError(f"the actor of rank {rank} is gone: {reason}") from None
