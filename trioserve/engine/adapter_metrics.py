"""Which LoRA adapters there are and who has them, as metrics: read at every scrape. Their names are the operator's."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable

from trioserve.core.adapters import AdapterState
from trioserve.engine.adapters import Adapters
from trioserve.engine.open_request import OpenRequest
from trioserve.metrics.registry import Metrics

__all__ = ["show_adapters"]


def show_adapters(metrics: Metrics, adapters: Adapters, requests: Iterable[OpenRequest]) -> None:
    """requests: those that are entered and not left."""

    def show() -> None:
        if not adapters.is_enabled:
            return
        for state in AdapterState:
            metrics.adapters.labels(state.value).set(adapters.count_of(state))
        metrics.adapter_bytes.set(adapters.byte_count)
        running: Counter[str] = Counter()
        waiting: Counter[str] = Counter()
        for request in requests:
            if request.adapter_lease is not None:
                (running if request.has_run else waiting)[request.adapter_lease.name] += 1
        metrics.adapter_requests.clear()
        for name in {*adapters.names, *running, *waiting}:
            metrics.adapter_requests.labels(name).set(running[name] + waiting[name])
        metrics.lora_requests_info.clear()
        names = (str(adapters.book.adapters_max), ",".join(sorted(waiting)), ",".join(sorted(running)))
        metrics.lora_requests_info.labels(*names).set(time.time())

    metrics.on_scrape(show)
