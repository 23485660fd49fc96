"""Guides of requests, made while these wait for their turn: what takes long is compiled in a thread of its own, and a
request whose client leaves meanwhile leaves at once."""

from __future__ import annotations

from functools import partial

import trio

from trioserve.admission.text_threads import TextThreads
from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.sampling import SamplingParams
from trioserve.engine.guide_metrics import show_forms
from trioserve.metrics.registry import Metrics
from trioserve.text.guide_factory import GuideFactory, PreparedGuides, is_guided

__all__ = ["GuidePreparation"]


class GuidePreparation:
    """factory: None where no tokens can be restrained."""

    def __init__(self, factory: GuideFactory | None, threads: TextThreads, metrics: Metrics) -> None:
        self._factory = factory
        self._threads = threads
        self._metrics = metrics
        if factory is not None:
            show_forms(metrics, factory.compiler)

    async def prepare(
        self, sampling: SamplingParams, cache_salt: str | None, *, tenant: str | None
    ) -> PreparedGuides | None:
        """Compile what restrains a request's tokens, in turn with other tenants. None: nothing does.

        Raises:
            InvalidRequest: its form cannot be compiled.
            Overloaded: too many forms of this tenant wait.
        """
        if not is_guided(sampling):
            return None
        factory = self._factory
        if factory is None:
            raise InvalidRequest("this engine makes no masks, and so no structured output", param="structured")
        prepared = factory.find(sampling, cache_salt)
        if prepared is not None:
            return prepared
        began_at = trio.current_time()
        try:
            return await self._threads.run_compile(partial(factory.prepare, sampling, cache_salt), tenant=tenant)
        finally:
            self._metrics.form_preparation_seconds.observe(trio.current_time() - began_at)
