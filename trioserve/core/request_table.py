"""Table of unfinished requests, and of the ids of recently finished requests. The table handles aborts for token
requests and iterative requests.

An abort is allowed at any moment. If no step in flight reads the request's blocks or slot, the request ends at once.
Otherwise the request is marked, and ends when the last of these steps has returned.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from trioserve.contracts.events import AbortOutcome, AbortResult, FinishReason, RequestFinished
from trioserve.contracts.ids import RequestId
from trioserve.core.request_state import RequestLife
from trioserve.core.steps_in_flight import StepsInFlight

__all__ = ["RequestTable"]

# Number of finished ids that are remembered, so that a late abort reports "already finished" and not "unknown".
FINISHED_IDS_MAX = 10_000

Life = TypeVar("Life", bound=RequestLife[Any])


class RequestTable(Generic[Life]):
    """Unfinished requests by id.

    Args:
        flights: the steps in flight.
        finish: ends a request that no step reads. It must release the request's blocks or slot, and call forget().
        on_late_abort: called when an abort names an id that is not live.
    """

    def __init__(
        self,
        flights: StepsInFlight[Any, Life],
        finish: Callable[[Life, FinishReason, float], RequestFinished],
        on_late_abort: Callable[[RequestId, FinishReason], None] = lambda request_id, reason: None,
    ) -> None:
        self._flights = flights
        self._finish = finish
        self._on_late_abort = on_late_abort
        self._live: dict[RequestId, Life] = {}
        self._finished_ids: OrderedDict[RequestId, None] = OrderedDict()
        self.arrivals_total = 0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._live

    def __getitem__(self, request_id: RequestId) -> Life:
        return self._live[request_id]

    def get(self, request_id: RequestId) -> Life | None:
        return self._live.get(request_id)

    def values(self) -> Iterable[Life]:
        """Return the requests in order of arrival."""
        return self._live.values()

    def add(self, live: Life) -> None:
        """Add a new request.

        Args:
            live: the new request. Its arrival_index must be arrivals_total.
        """
        assert live.arrival_index == self.arrivals_total
        self.arrivals_total += 1
        self._live[live.request.id] = live

    def abort(self, request_ids: Iterable[RequestId], reason: FinishReason, now: float) -> dict[RequestId, AbortResult]:
        """End requests in any state.

        Args:
            request_ids: ids to abort. Unknown ids and ids of finished requests are allowed.
            reason: reported as the finish reason. If a request is aborted several times, the first reason is reported.
            now: time in seconds.

        Returns:
            The outcome for each id.
        """
        results = {}
        for request_id in dict.fromkeys(request_ids):
            live = self._live.get(request_id)
            if live is None:
                known = request_id in self._finished_ids
                self._on_late_abort(request_id, reason)
                results[request_id] = AbortResult(AbortOutcome.ALREADY_FINISHED if known else AbortOutcome.UNKNOWN)
            elif live.steps_in_flight:
                # Only mark the request, because a step in flight still reads its blocks or slot.
                # The update of that step ends the request.
                if live.abort_reason is None:
                    live.abort_reason = reason
                    self._flights.leave(live)
                results[request_id] = AbortResult(AbortOutcome.ABORTED)
            else:
                results[request_id] = AbortResult(AbortOutcome.ABORTED, self._finish(live, reason, now))
        return results

    def drop(self, lives: Sequence[Life], now: float) -> list[RequestFinished]:
        """End the requests of an abandoned step that has ended without a result.

        Args:
            lives: requests of the step. All were aborted.
            now: time in seconds.

        Returns:
            The end of each request that is in no other step in flight.
        """
        events = []
        for live in lives:
            live.steps_in_flight -= 1
            assert live.abort_reason is not None
            if live.steps_in_flight == 0:
                events.append(self._finish(live, live.abort_reason, now))
        return events

    def forget(self, request_id: RequestId) -> None:
        """Remove a finished request. Its id is remembered for some time.

        Args:
            request_id: id of the request.
        """
        del self._live[request_id]
        self._finished_ids[request_id] = None
        if len(self._finished_ids) > FINISHED_IDS_MAX:
            self._finished_ids.popitem(last=False)
