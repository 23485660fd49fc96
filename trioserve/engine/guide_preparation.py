"""Compiles the guides of requests in a thread while the requests wait for their turn, and shows metrics of guides.

A request whose client leaves during the compilation leaves at once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import trio

from trioserve.admission.text_threads import TextThreads
from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.sampling import SamplingParams
from trioserve.metrics.registry import Metrics
from trioserve.text.form_compiler import FormCompiler
from trioserve.text.guide_factory import GuideFactory, PreparedGuides, is_guided

__all__ = ["GuidePreparation"]


class MaskTotals(Protocol):
    """Totals of a MaskMaker: seconds spent on filling masks, and rows filled."""

    seconds_total: float
    rows_total: int


def show_forms(metrics: Metrics, compiler: FormCompiler) -> None:
    seen = [0, 0]

    def show() -> None:
        compiled, hits = compiler.compiles_total, compiler.hits_total
        metrics.forms_compiled_total.inc(compiled - seen[0])
        metrics.form_cache_hits_total.inc(hits - seen[1])
        seen[:] = compiled, hits

    metrics.on_scrape(show)


def show_masks(metrics: Metrics, totals: MaskTotals) -> Callable[[], None]:
    """Returns what ends it."""
    seen = [0.0, 0.0]

    def show() -> None:
        rows, seconds = totals.rows_total, totals.seconds_total
        metrics.mask_rows_total.inc(rows - seen[0])
        metrics.mask_seconds_total.inc(seconds - seen[1])
        seen[:] = rows, seconds

    return metrics.on_scrape(show)


class GuidePreparation:
    """Compiles guides of requests.

    Args:
        factory: None if this engine cannot restrain tokens.
        threads: run the compilation, tenants in turn.
        metrics: get the seconds of each compilation.
    """

    def __init__(self, factory: GuideFactory | None, threads: TextThreads, metrics: Metrics) -> None:
        self._factory = factory
        self._threads = threads
        self._metrics = metrics
        if factory is not None:
            show_forms(metrics, factory.compiler)

    async def prepare(
        self, sampling: SamplingParams, cache_salt: str | None, *, tenant: str | None
    ) -> PreparedGuides | None:
        """Compile the guides of a request, in turn with other tenants.

        Returns:
            The guides, or None if the request does not restrain its tokens.

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
