"""The open sessions of an engine: their owners, their turns in flight, and their ends.

A session groups the requests of one conversation. Between two turns, the prefix cache prefers to keep the session's
blocks (see `Retention`). A session ends with the scope that opened it, by its name, or after a time without turns.
Ending is one synchronous call: it aborts the turns in flight, and releases the session in the core.
"""

from __future__ import annotations

import enum
import functools
import math
import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import trio

from trioserve.contracts.errors import AlreadyEnded, Overloaded
from trioserve.contracts.events import FinishReason
from trioserve.contracts.request import Retention
from trioserve.trio_tools.deadline_keeper import Alarm
from trioserve.trio_tools.interrupts import uninterrupted

if TYPE_CHECKING:
    from trioserve.core.engine import EngineCore
    from trioserve.engine.lifecycle.core_delivery import CoreDelivery
    from trioserve.engine.lifecycle.request_scope import AnyScope
    from trioserve.engine.settings import EngineSettings
    from trioserve.metrics.registry import Metrics

__all__ = ["LiveSession", "SessionEnd", "SessionName", "SessionTable", "ToolTimes"]

SESSIONS_FULL = "sessions_full"
"""Reason of a refusal."""

PAUSE_WEIGHT = 0.25  # Weight of the last pause in a typical pause, so that about four pauses count.
PAUSE_SECONDS_MIN = 1e-3
SESSION_TOOLS_MAX = 16  # Tools whose pauses one session remembers.
TOOLS_MAX = 4096  # Tools of all callers whose pauses the server remembers.


class SessionEnd(enum.Enum):
    """Reasons why a session ends."""

    LEFT = "left"  # The caller left the scope or closed the connection.
    DELETED = "deleted"
    IDLE = "idle"
    DISPLACED = "displaced"  # A newer session took its place.


class SessionName(msgspec.Struct, frozen=True, kw_only=True):
    """A session that opens with its first request, and ends after a time without requests.

    Attributes:
        name: name that the caller chose.
        identity: identity of the caller. Callers with different identities never share a session.
        owner: user who may see and end the session. None: not restricted.
        retention: how the prefix cache keeps the session's blocks. None: unchanged, at first the default.
    """

    name: str
    identity: str = ""
    owner: str | None = None
    retention: Retention | None = None


class ToolTimes:
    """Learns how long a client typically needs between a tool call and the next turn.

    Pauses are log-normal at best, so the mean of their logarithms is used, which is near their median.

    Args:
        tools_max: tools that are remembered. The tool that was used least recently is forgotten.
    """

    def __init__(self, tools_max: int) -> None:
        self._tools_max = tools_max
        self._logs: OrderedDict[str, float] = OrderedDict()  # Mean logarithm of the pauses, in seconds.

    def note(self, tool: str, seconds: float) -> None:
        """Note a pause.

        Args:
            tool: name of the tool.
            seconds: time from the end of the call to the next turn.
        """
        log = math.log(max(seconds, PAUSE_SECONDS_MIN))
        mean = self._logs.pop(tool, log)
        self._logs[tool] = mean + PAUSE_WEIGHT * (log - mean)
        if len(self._logs) > self._tools_max:
            self._logs.popitem(last=False)

    def typical(self, tool: str) -> float | None:
        """Return the typical pause in seconds. None for an unknown tool.

        Args:
            tool: name of the tool.
        """
        log = self._logs.get(tool)
        return None if log is None else math.exp(log)


@uninterrupted
class LiveSession:
    """One open session.

    Args:
        table: all open sessions.
        name: name, owner and retention of the session.
        idle_seconds: time without a turn after which the session ends. None: it ends by `end` only.

    Attributes:
        id: name of the session in the core. It is unique per caller.
        turns: requests of the session that are in the queue, in preparation, or in the core.
        turn_count: number of turns so far.
        used_at: time of the last change in `turns`.
        tool_times: typical pauses after this session's tool calls.
        awaited_tools: tools that the last response called. Empty after the next turn has begun.
        awaited_at: time at which the caller got these calls.
        retention: how the prefix cache keeps the session's blocks.
        new_request: creates the requests whose prompts continue the earlier turns, with the arguments of
            `OpenRequest`. None: every request contains its whole prompt.
    """

    def __init__(self, table: SessionTable, name: SessionName, idle_seconds: float | None) -> None:
        self.id = session_id(name.identity, name.name)
        self.name = name.name
        self.identity = name.identity
        self.owner = name.owner
        self.retention = name.retention or Retention(tenant=name.identity)
        self.idle_seconds = idle_seconds
        self.new_request: Callable[..., Any] | None = None
        self.turns: list[AnyScope] = []
        self.turn_count = 0
        self.opened_at = self.used_at = trio.current_time()
        self.is_ended = False
        self.tool_times: ToolTimes | None = None
        self.awaited_tools: tuple[str, ...] = ()
        self.awaited_at = 0.0
        self.alarm: Alarm | None = None
        self._table = table

    @property
    def may_be_displaced(self) -> bool:
        """True if no turn is in flight, and no scope owns the session."""
        return self.idle_seconds is not None and not self.turns

    @property
    def retained_block_count(self) -> int:
        """Number of cached blocks that the prefix cache prefers to keep for the session."""
        return self._table.retained_block_count(self)

    def retain(self, retention: Retention) -> None:
        """Change how the prefix cache keeps the session's blocks. No effect if the session has ended.

        Args:
            retention: the new preference.
        """
        self._table.retain(self, retention)

    def end(self, reason: SessionEnd = SessionEnd.LEFT) -> None:
        """Abort the turns in flight, and end the session. Never waits. No effect if the session has ended.

        Args:
            reason: reason for the metrics.
        """
        self._table.end(self, reason)

    def expect_turn(self, seconds: float) -> None:
        """Note that the caller expects to send the next turn in some seconds.

        Args:
            seconds: estimated time until the next turn.
        """
        self._table.expect_turn(self, seconds)

    def await_tools(self, tools: Sequence[str]) -> None:
        """Note the tools that a complete response calls. The next turn is expected after their typical time.

        Args:
            tools: names of the called tools, at least one.
        """
        self._table.await_tools(self, tools)


def session_id(identity: str, name: str) -> str:
    """Return the id of a session in the core.

    The length of the identity is part of the id, so that no caller can choose a name that gives another caller's id.

    Args:
        identity: identity of the caller.
        name: name that the caller chose.
    """
    return f"{len(identity)}/{identity}/{name}"


@uninterrupted
class SessionTable:
    """All open sessions of an engine, the least recently used first.

    Args:
        settings: limits.
        sessions_max: highest number of open sessions. A caller with an identity may have half of them.
        metrics: counts sessions.
    """

    def __init__(self, settings: EngineSettings, sessions_max: int, metrics: Metrics) -> None:
        self._settings = settings
        self._sessions_max = sessions_max
        self._metrics = metrics
        self._sessions: dict[str, LiveSession] = {}
        self._tool_times = ToolTimes(TOOLS_MAX)
        self._counts: Counter[str] = Counter()  # Number of sessions by identity.
        self._core: EngineCore
        self._delivery: CoreDelivery[Any, Any, Any, Any]
        self._call_at: Callable[[float, Callable[[], None]], Alarm]

    def attach(self, call_at: Callable[[float, Callable[[], None]], Alarm]) -> None:
        """Store the function that sets alarms. This is called once, before all other methods.

        Args:
            call_at: see `Engine.call_at`.
        """
        self._call_at = call_at

    def install(self, core: EngineCore, delivery: CoreDelivery[Any, Any, Any, Any]) -> None:
        """Use a new core, and open all sessions there.

        Args:
            delivery: ends requests of that core.
        """
        self._core, self._delivery = core, delivery
        now = trio.current_time()
        for session in self._sessions.values():
            core.open_session(session.id, session.retention, now)

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[LiveSession]:
        return iter(list(self._sessions.values()))

    # --- opening ---

    def open(self, name: SessionName | None = None) -> LiveSession:
        """Open a session that its caller ends with `LiveSession.end`.

        Args:
            name: owner and retention of the session. Its name must be unique. None: a new name, without an owner.

        Raises:
            Overloaded: too many sessions are open.
        """
        name = name or SessionName(name="")
        if not name.name:
            name = msgspec.structs.replace(name, name=f"session-{secrets.token_hex(8)}")
        if not self._make_room(name.identity):
            self._metrics.requests_rejected_total.labels(SESSIONS_FULL).inc()
            own_count, own_max = self._counts[name.identity], self._max_of(name.identity)
            raise Overloaded(
                f"{len(self._sessions)} sessions are open (allowed: {self._sessions_max}), {own_count} of them by this "
                f"caller (allowed: {own_max}): end one",
                reason=SESSIONS_FULL,
                retry_after_seconds=5,
            )
        return self._add(LiveSession(self, name, None))

    def find(self, name: str, *, identity: str = "") -> LiveSession | None:
        """Return an open session, or None.

        Args:
            name: name that the caller chose.
            identity: identity of the caller.
        """
        return self._sessions.get(session_id(identity, name))

    def _named(self, name: SessionName) -> LiveSession | None:
        """Return a session by its name. Open it if necessary.

        Return None if too many sessions are open. The request is then served without a session, because a session does
        not change the response.
        """
        found = self._sessions.get(session_id(name.identity, name.name))
        if found is not None:
            if name.retention is not None:
                self.retain(found, name.retention)
            return found
        if not self._make_room(name.identity):
            self._metrics.sessions_refused_total.inc()
            return None
        return self._add(LiveSession(self, name, self._idle_seconds(name.retention)))

    def retain(self, session: LiveSession, retention: Retention) -> None:
        """See `LiveSession.retain`.

        Args:
            retention: the new preference.
        """
        if session.is_ended or session.retention == retention:
            return
        session.retention = retention
        if session.idle_seconds is not None:
            session.idle_seconds = self._idle_seconds(retention)
        self._core.open_session(session.id, retention, trio.current_time())

    def _idle_seconds(self, retention: Retention | None) -> float:
        """Return after how many idle seconds a session ends: not before its retention, if its caller chose one."""
        seconds = self._settings.session_idle_seconds
        return seconds if retention is None else max(seconds, retention.idle_seconds)

    def _add(self, session: LiveSession) -> LiveSession:
        self._sessions[session.id] = session
        self._counts[session.identity] += 1
        self._core.open_session(session.id, session.retention, session.opened_at)
        self._set_alarm(session)
        return session

    def _max_of(self, identity: str) -> int:
        """Return how many sessions one caller may have. Callers without an identity are not distinguished."""
        return max(1, self._sessions_max // 2) if identity else self._sessions_max

    def _make_room(self, identity: str) -> bool:
        """End the least recently used idle session if a limit is reached. Return False if there is none."""
        is_own_limit = self._counts[identity] >= self._max_of(identity)
        if not is_own_limit and len(self._sessions) < self._sessions_max:
            return True
        for session in self._sessions.values():
            if session.may_be_displaced and (session.identity == identity or not is_own_limit):
                self.end(session, SessionEnd.DISPLACED)
                return True
        return False

    # --- turns ---

    def begin_turn(self, request: AnyScope, asked: LiveSession | SessionName) -> LiveSession | None:
        """Note that a request has entered as a turn of a session.

        Args:
            asked: the session. A `SessionName` opens the session if necessary.

        Returns:
            The session, or None.

        Raises:
            AlreadyEnded: the session has ended.
        """
        session = self._named(asked) if isinstance(asked, SessionName) else asked
        if session is None:
            return None
        if session.is_ended:
            raise AlreadyEnded(f"the session {session.name} has ended: open another one")
        if session.awaited_tools and not session.turns:
            self._note_pause(session)
        session.turns.append(request)
        session.turn_count += 1
        self._note_use(session)
        return session

    def end_turn(self, request: AnyScope, session: LiveSession) -> None:
        """Note that no sequence of a turn is in the core any more.

        Args:
            request: the turn.
            session: the session that `begin_turn` returned.
        """
        session.turns.remove(request)
        if not session.is_ended:
            self._note_use(session)

    def expect_turn(self, session: LiveSession, seconds: float) -> None:
        """See `LiveSession.expect_turn`.

        Args:
            seconds: estimated time until the next turn.
        """
        if not session.is_ended:
            self._core.hint_session(session.id, seconds, trio.current_time())
            self._delivery.wake()  # The core may plan a prefetch.

    def await_tools(self, session: LiveSession, tools: Sequence[str]) -> None:
        """See `LiveSession.await_tools`.

        Args:
            tools: names of the called tools.
        """
        if session.is_ended or not self._core.prefetches.is_on:
            return
        session.awaited_tools = tuple(dict.fromkeys(tools))
        session.awaited_at = trio.current_time()
        typical = [self._typical_pause(session, tool) for tool in session.awaited_tools]
        known = [seconds for seconds in typical if seconds is not None]
        if len(known) == len(typical):  # The next turn needs the results of all tools.
            self.expect_turn(session, max(known))

    def _typical_pause(self, session: LiveSession, tool: str) -> float | None:
        own = None if session.tool_times is None else session.tool_times.typical(tool)
        return self._tool_times.typical(session_id(session.identity, tool)) if own is None else own

    def _note_pause(self, session: LiveSession) -> None:
        """Learn from the pause that ends now. With several tools, it is unknown which of them needed the time."""
        tools, session.awaited_tools = session.awaited_tools, ()
        if len(tools) == 1:
            seconds = trio.current_time() - session.awaited_at
            session.tool_times = session.tool_times or ToolTimes(SESSION_TOOLS_MAX)
            session.tool_times.note(tools[0], seconds)
            self._tool_times.note(session_id(session.identity, tools[0]), seconds)

    def _note_use(self, session: LiveSession) -> None:
        session.used_at = trio.current_time()
        self._sessions[session.id] = self._sessions.pop(session.id)

    def retained_block_count(self, session: LiveSession) -> int:
        """See `LiveSession.retained_block_count`."""
        return self._core.sessions.retained_count(session.id)

    # --- ending ---

    def end(self, session: LiveSession, reason: SessionEnd) -> None:
        """See `LiveSession.end`.

        Args:
            reason: reason for the metrics.
        """
        if session.is_ended:
            return
        session.is_ended = True
        del self._sessions[session.id]
        self._counts -= Counter({session.identity: 1})  # An identity without sessions is removed.
        self._metrics.sessions_ended_total.labels(reason.value).inc()
        if session.alarm is not None:
            session.alarm.cancel()
        for request in list(session.turns):
            if not request.is_finished:
                message = "the session of this request was ended"
                self._delivery.end_with_final_delta(request, FinishReason.ABORT, message)
        self._core.end_session(session.id, trio.current_time())
        self._delivery.wake()  # A turn of another session may be deferred for this session's blocks.

    def _set_alarm(self, session: LiveSession) -> None:
        if session.idle_seconds is not None:
            since = trio.current_time() if session.turns else session.used_at
            look = functools.partial(self._end_if_idle, session)
            session.alarm = self._call_at(since + session.idle_seconds, look)

    def _end_if_idle(self, session: LiveSession) -> None:
        """End a session that was idle for its whole idle time. Otherwise set the next alarm.

        An alarm per turn would cost more than one alarm per idle time.
        """
        assert session.idle_seconds is not None
        if not session.turns and session.used_at + session.idle_seconds <= trio.current_time():
            self.end(session, SessionEnd.IDLE)
        else:
            self._set_alarm(session)
