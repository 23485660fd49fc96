"""Replaces the weights of an engine between two steps. A `WeightTarget` writes the new weights.

    for each update, in turn:  check the source ─► stop steps ─► the step in flight ends ─► replace ─► resume

Nothing changes before the replacement begins. From then on, no step may run until the replacement is complete. If a
replacement fails halfway, the engine blocks all steps until another one is complete, or until the model is loaded
again.
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
from trioserve.engine.lifecycle.pausing import Pausing, StepGate

__all__ = ["IN_FLIGHT", "GivenSource", "WEIGHTS_REPLACED", "Replacement", "WeightTarget", "WeightUpdates"]

logger = logging.getLogger(__name__)

IN_FLIGHT = ("keep", "recompute", "abort")
WEIGHTS_REPLACED = "weights_replaced"
VERSION_CHARACTERS_MAX = 256
ENDED_MEANWHILE = "the engine ended meanwhile; a reopened engine has its first weights"
GROUP_SECONDS_MAX = 3600  # This limits how long a dead trainer can block the engine.

GivenSource = str | os.PathLike[str] | SharedWeights | BroadcastWeights


class Replacement(Protocol):
    """New weights that were checked and can now be written.

    Attributes:
        state: progress of the replacement.
    """

    @property
    def state(self) -> ReplacementState: ...

    async def replace(self) -> None:
        """Write the weights. No step may run meanwhile.

        If the call is cancelled, weights from a file or shared memory are still written completely. Weights that a
        trainer sends are left incomplete, because the trainer may be gone.

        Raises:
            ModelLoadError: the weights cannot be read.
            WeightsLost: the trainer that sends the weights is gone.
            RankLost: a process that computes is lost.
            Exception: the model was closed during the replacement.
        """
        ...


class WeightTarget(Protocol):
    """Replaces the weights of the executor."""

    async def check(self, source: WeightSource) -> Replacement:
        """Check new weights without changing anything.

        Args:
            source: the new weights.

        Raises:
            InvalidRequest: the weights do not fit this model.
            RankLost: a process that computes is lost.
        """
        ...

    async def join_group(self, group: WeightGroup) -> None:
        """Join a group of trainers. Return when all members have joined.

        Args:
            group: address, rank and size of the group.

        Raises:
            InvalidRequest: the members did not join in time.
        """
        ...

    async def leave_group(self, name: str) -> None:
        """Leave a group of trainers.

        Args:
            name: name of the group.

        Raises:
            InvalidRequest: there is no such group.
        """
        ...


class WeightUpdates:
    """Updates the weights of one engine.

    Args:
        place: replaces the weights of the executor. If this is impossible, a sentence that gives the reason.
        pausing: pause state of the engine.
        gate: used to wait until the step in flight has ended.
        computes: returns True if the engine can run steps.
        check_may_replace: raises an error if the weights cannot be replaced now.
        end_begun: ends in-flight requests with their partial results.
        take_weights: called when the weights are replaced and no step is in flight. Its arguments are the version, and
            True if the KV must be computed again.
        note_ended: called when an update has ended, with or without success.

    Attributes:
        version: version of the current weights. None: the weights with which the engine was opened.
        turn: lock for code that releases the executor. Updates hold this lock, too.
        is_half: True if the last replacement failed halfway, so that the weights are a mixture.
    """

    def __init__(
        self,
        place: WeightTarget | str,
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
    def is_possible(self) -> bool:
        """True if weights can be replaced. Otherwise `turn` is not needed."""
        return not isinstance(self._place, str)

    @property
    def shown_version(self) -> str:
        return INITIAL_WEIGHTS if self.version is None else self.version

    @property
    def stamped_version(self) -> str | None:
        """Version that deltas show for new tokens. None if the weights were never replaced."""
        return self.shown_version if self._has_replaced else None

    @property
    def is_updating(self) -> bool:
        """True while an update in progress stops the steps."""
        return self._pausing.is_replacing and not self.is_half

    def install(self, place: WeightTarget | str) -> bool:
        """Use the weight target of newly opened parts.

        Args:
            place: the weight target, or a sentence that says why weights cannot be replaced.

        Returns:
            True if the target is a new object, with the weights with which the engine was opened.
        """
        if place is self._place:
            return False
        self._place = place
        self.version, self.is_half = None, False
        self._pausing.set_replacing(False)
        return True

    async def join_group(self, group: WeightGroup) -> None:
        """Join a group of trainers. See `Engine.init_weights_update_group`.

        Args:
            group: address, rank and size of the group.
        """
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
        """Leave a group of trainers. See `Engine.destroy_weights_update_group`.

        Args:
            name: name of the group.
        """
        async with self.turn:
            await self._known_place().leave_group(to_str("group_name", name))

    def _known_place(self) -> WeightTarget:
        """Return the weight target. Raises InvalidRequest if weights cannot be replaced."""
        if isinstance(self._place, str):
            raise InvalidRequest(f"{self._place}: the weights of a running engine cannot be replaced")
        return self._place

    async def update(self, source: GivenSource, version: str | None, in_flight: str) -> str:
        """Replace the weights. See `Engine.update_weights`.

        Args:
            source: the new weights.
            version: name of the new weights. None: a name is generated.
            in_flight: one of IN_FLIGHT.

        Returns:
            The version.
        """
        new = self._checked_version(version)
        checked = _checked_source(source)
        if in_flight not in IN_FLIGHT:
            refuse("in_flight", in_flight, f"one of {', '.join(IN_FLIGHT)}")
        async with self.turn:
            place, replacement = await self._checked_by_place(checked)
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

    async def _checked_by_place(self, source: WeightSource) -> tuple[WeightTarget, Replacement]:
        """Check a source with the current weight target. Check again if the engine was reopened meanwhile."""
        while True:
            self._check_may_replace()
            place = self._known_place()
            try:
                replacement = await place.check(source)
            except RankLost as error:  # The engine handles the fault of its executor itself.
                raise WeightsLost(ENDED_MEANWHILE) from error
            except Exception:
                if self._is_current(place):
                    raise
                continue  # The check failed because its target was closed, and not because of the weights.
            self._check_may_replace()
            if self._is_current(place):
                return place, replacement

    async def _write(self, replacement: Replacement, place: WeightTarget) -> None:
        try:
            await replacement.replace()
        except Exception as error:
            self._check_is_current(place)
            if isinstance(error, RankLost):
                raise WeightsLost(ENDED_MEANWHILE) from error
            if replacement.state is ReplacementState.BEGUN:
                raise WeightsLost(
                    f"only a part of the new weights arrived; the engine pauses until an update is complete: {error}"
                ) from error
            raise
        self._check_is_current(place)

    def _note_end(self, state: ReplacementState, version: str, *, recomputes: bool) -> None:
        if state is ReplacementState.GONE:
            return  # The lost process also breaks the engine, so no step begins until the engine has handled the fault.
        if state is ReplacementState.WHOLE:
            self.is_half = False
            self.version, self._has_replaced = version, True
            logger.info("weights replaced version=%s", version)
            self._take_weights(version, recomputes)
        elif state is ReplacementState.BEGUN:
            self.is_half = True
            logger.error("weights replaced halfway: no step begins until an update is complete version=%s", version)
        self._pausing.set_replacing(self.is_half)
        self._note_ended()

    def _is_current(self, place: WeightTarget) -> bool:
        return place is self._place and self._computes()

    def _check_is_current(self, place: WeightTarget) -> None:
        """Raise WeightsLost if the weight target was closed or replaced."""
        if not self._is_current(place):
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
                f'version is "{version}", which is the name of the first weights: use another name',
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
        raise InvalidRequest("model_path is empty: set it to the directory with the new weights", param="model_path")
    return path
