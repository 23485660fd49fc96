"""Which weights an engine computes with, and how they are replaced between two steps. What computes writes them.

    one at a time:  look at what is offered ─► begin no step ─► the step in flight ends ─► replace ─► go on

Until it is replaced nothing has changed. From then on nothing may be computed until all of it is: one that ends halfway
leaves an engine that holds everything up until another one is whole, or the model is read anew.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable
from typing import Protocol

import trio

from trioserve.contracts.arguments import refuse, to_float, to_int, to_str
from trioserve.contracts.errors import InvalidRequest, RankLost, WeightsLost
from trioserve.contracts.weights import (
    INITIAL_WEIGHTS,
    BroadcastWeights,
    ReplacementState,
    SharedWeights,
    WeightGroup,
    WeightSource,
)
from trioserve.engine.shell.pausing import Pausing
from trioserve.engine.shell.step_gate import StepGate

__all__ = ["IN_FLIGHT", "GivenSource", "WEIGHTS_REPLACED", "Replacement", "WeightPlace", "WeightUpdates"]

logger = logging.getLogger(__name__)

IN_FLIGHT = ("keep", "recompute", "abort")
WEIGHTS_REPLACED = "weights_replaced"
VERSION_CHARACTERS_MAX = 256
ENDED_MEANWHILE = "the engine ended meanwhile; one that is opened anew has the weights that it began with"
GROUP_SECONDS_MAX = 3600  # the time in which a trainer that has died may hold an engine up

GivenSource = str | os.PathLike[str] | SharedWeights | BroadcastWeights


class Replacement(Protocol):
    """Weights that can take the place of those that are there. state: how far they have."""

    @property
    def state(self) -> ReplacementState: ...

    async def replace(self) -> None:
        """Write them, with nothing computing meanwhile. Those that lie somewhere are written to the end also when
        cancelled; of others, who sends them may have gone. Raises ModelLoadError, WeightsLost, RankLost, and what comes
        of a model that is closed meanwhile."""
        ...


class WeightPlace(Protocol):
    """What computes, for new weights."""

    async def check(self, source: WeightSource) -> Replacement:
        """Look at what is offered, without a change to anything. Raises InvalidRequest, and RankLost."""
        ...

    async def join_group(self, group: WeightGroup) -> None:
        """Returns when all are there. Raises InvalidRequest."""
        ...

    async def leave_group(self, name: str) -> None:
        """Raises InvalidRequest if there is none."""
        ...


class WeightUpdates:
    """place: of what computes; a sentence where nothing can be replaced. version: what is computed with; None: what the
    engine was opened with. turn: to be had by whoever takes away what computes.

    computes: whether there is what steps need. check_may_replace: raises what refuses it now. end_begun: what has begun
    ends with what it has. take_weights(version, recomputes): steps compute with them from here on, and none is in
    flight. note_ended: it goes on as before, or nothing is computed until an update is whole.
    """

    def __init__(
        self,
        place: WeightPlace | str,
        pausing: Pausing,
        gate: StepGate,
        *,
        computes: Callable[[], bool],
        check_may_replace: Callable[[], None],
        end_begun: Callable[[], None],
        take_weights: Callable[[str, bool], None],
        note_ended: Callable[[], None],
    ) -> None:
        self._computes = computes
        self._check_may_replace = check_may_replace
        self._end_begun = end_begun
        self._take_weights = take_weights
        self._note_ended = note_ended
        self._pausing = pausing
        self._gate = gate
        self._place = place
        self.turn = trio.Lock()
        self.version: str | None = None
        self.is_half = False
        self._has_replaced = False
        self._count = 0

    @property
    def shown_version(self) -> str:
        return INITIAL_WEIGHTS if self.version is None else self.version

    @property
    def stamped_version(self) -> str | None:
        """What deltas say of new tokens. None: nothing, since weights were never replaced."""
        return self.shown_version if self._has_replaced else None

    @property
    def is_under_way(self) -> bool:
        """Whether an update keeps steps from beginning, for a while."""
        return self._pausing.is_replacing and not self.is_half

    def install(self, place: WeightPlace | str) -> bool:
        """What computes may be another. Returns whether it is, with the weights that it was opened with."""
        if place is self._place:
            return False
        self._place = place
        self.version, self.is_half = None, False
        self._pausing.set_replacing(False)
        return True

    async def join_group(self, group: WeightGroup) -> None:
        """See Engine.init_weights_update_group."""
        for param in ("rank", "world_size", "master_port"):
            to_int(param, getattr(group, param))
        if not 0 < group.rank < group.world_size:
            raise InvalidRequest(
                f"rank is {group.rank} of {group.world_size}, and rank 0 is the trainer's: it is 1 or more",
                param="rank",
            )
        if not 0 < group.master_port < 65536:
            refuse("master_port", group.master_port, "1 to 65535")
        if not 0 < to_float("seconds_max", group.seconds_max) <= GROUP_SECONDS_MAX:
            refuse("seconds_max", group.seconds_max, f"up to {GROUP_SECONDS_MAX}")
        self._check_may_replace()
        await self._known_place().join_group(group)

    async def leave_group(self, name: str) -> None:
        """See Engine.destroy_weights_update_group."""
        async with self.turn:
            await self._known_place().leave_group(to_str("group_name", name))

    def _known_place(self) -> WeightPlace:
        """Raises InvalidRequest."""
        if isinstance(self._place, str):
            raise InvalidRequest(f"{self._place}: they cannot be replaced while it computes")
        return self._place

    async def update(self, source: GivenSource, version: str | None, in_flight: str) -> str:
        """See Engine.update_weights."""
        new = self._checked_version(version)
        checked = _checked_source(source)
        if in_flight not in IN_FLIGHT:
            refuse("in_flight", in_flight, f"one of {', '.join(IN_FLIGHT)}")
        async with self.turn:
            place, replacement = await self._looked_at(checked)
            try:
                self._pausing.set_replacing(True)
                if in_flight == "abort":
                    self._end_begun()
                await self._gate.wait_until_at_rest()
                self._check_may_replace()
                await self._write(replacement, place)
            finally:
                if place is self._place:
                    self._note_end(replacement.state, new, recomputes=in_flight == "recompute")
        return new

    async def _looked_at(self, source: WeightSource) -> tuple[WeightPlace, Replacement]:
        """By what computes when it returns: looking takes its time, and the engine may be opened anew meanwhile."""
        while True:
            self._check_may_replace()
            place = self._known_place()
            try:
                replacement = await place.check(source)
            except RankLost as error:  # the engine's affair, which ends with it
                raise WeightsLost(ENDED_MEANWHILE) from error
            except Exception:
                if self._is_there(place):
                    raise
                continue  # what it looked with may be gone, and that is nothing of the weights'
            self._check_may_replace()
            if self._is_there(place):
                return place, replacement

    async def _write(self, replacement: Replacement, place: WeightPlace) -> None:
        try:
            await replacement.replace()
        except Exception as error:
            self._check_is_there(place)
            if isinstance(error, RankLost):
                raise WeightsLost(ENDED_MEANWHILE) from error
            if replacement.state is ReplacementState.BEGUN:
                raise WeightsLost(
                    f"the new weights came only in part, and the engine pauses until an update is whole: {error}"
                ) from error
            raise
        self._check_is_there(place)

    def _note_end(self, state: ReplacementState, version: str, *, recomputes: bool) -> None:
        if state is ReplacementState.GONE:
            return  # until the engine knows it, too, no step begins
        if state is ReplacementState.WHOLE:
            self.is_half = False
            self.version, self._has_replaced = version, True
            logger.info("weights replaced version=%s", version)
            self._take_weights(version, recomputes)
        elif state is ReplacementState.BEGUN:
            self.is_half = True
            logger.error("weights half replaced: nothing is computed until an update is whole version=%s", version)
        self._pausing.set_replacing(self.is_half)
        self._note_ended()

    def _is_there(self, place: WeightPlace) -> bool:
        return place is self._place and self._computes()

    def _check_is_there(self, place: WeightPlace) -> None:
        """Raises WeightsLost."""
        if not self._is_there(place):
            raise WeightsLost(ENDED_MEANWHILE)

    def _checked_version(self, version: str | None) -> str:
        if version is None:
            self._count += 1
            return f"update-{self._count}-{secrets.token_hex(4)}"
        if not 0 < len(to_str("version", version, "a text (str), or None")) <= VERSION_CHARACTERS_MAX:
            raise InvalidRequest(
                f"version has {len(version)} characters, allowed are 1 to {VERSION_CHARACTERS_MAX}", param="version"
            )
        if version == INITIAL_WEIGHTS:
            raise InvalidRequest(
                f'version is "{version}", which names the weights that the engine was opened with: take another name',
                param="version",
            )
        return version


def _checked_source(source: object) -> WeightSource:
    if isinstance(source, SharedWeights | BroadcastWeights):
        return source
    if not isinstance(source, str | os.PathLike):
        refuse("source", source, "a path, a SharedWeights, or a BroadcastWeights")
    path = os.fspath(source)
    if not path:
        raise InvalidRequest("model_path is empty: name the directory with the new weights", param="model_path")
    return path
