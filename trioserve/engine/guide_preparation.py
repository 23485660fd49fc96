"""Compiles the grammars of requests in a thread while the requests wait for their turn, and shows metrics of grammars.

If a client leaves during the compilation, its request ends at once.
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
from trioserve.text.grammar_compiler import GrammarCompiler
from trioserve.text.guide_factory import GuideFactory, PreparedGuides, is_guided

__all__ = ["GuidePreparation"]


class MaskTotals(Protocol):
    """Totals of a MaskMaker: seconds spent on filling masks, and rows filled."""

    seconds_total: float
    rows_total: int


def show_grammars(metrics: Metrics, compiler: GrammarCompiler) -> None:
    seen = [0, 0]

    def show() -> None:
        compiled, hits = compiler.compiles_total, compiler.hits_total
        metrics.forms_compiled_total.inc(compiled - seen[0])
        metrics.form_cache_hits_total.inc(hits - seen[1])
        seen[:] = compiled, hits

    metrics.on_scrape(show)


def show_masks(metrics: Metrics, totals: MaskTotals) -> Callable[[], None]:
    """Update the metrics of token masks at every scrape.

    Args:
        metrics: registry to update.
        totals: source of the counts.

    Returns:
        A function that stops the updates.
    """
    seen = [0.0, 0.0]

    def show() -> None:
        rows, seconds = totals.rows_total, totals.seconds_total
        metrics.mask_rows_total.inc(rows - seen[0])
        metrics.mask_seconds_total.inc(seconds - seen[1])
        seen[:] = rows, seconds

    return metrics.on_scrape(show)


class GuidePreparation:
    """Compiles the grammars of requests.

    Args:
        factory: compiles grammars. None: this engine does not support structured output.
        threads: run the compilation, tenants in turn.
        metrics: receive the duration of each compilation.
    """

    def __init__(self, factory: GuideFactory | None, threads: TextThreads, metrics: Metrics) -> None:
        self._factory = factory
        self._threads = threads
        self._metrics = metrics
        if factory is not None:
            show_grammars(metrics, factory.compiler)

    async def prepare(
        self, sampling: SamplingParams, cache_salt: str | None, *, tenant: str | None
    ) -> PreparedGuides | None:
        """Compile the grammars of a request, in turn with other tenants.

        Args:
            sampling: sampling options of the request.
            cache_salt: separates caches of different users.
            tenant: the tenant.

        Returns:
            The guides, or None if the request does not restrain its tokens.

        Raises:
            InvalidRequest: its grammar or schema cannot be compiled.
            Overloaded: too many grammars of this tenant wait.
        """
        if not is_guided(sampling):
            return None
        factory = self._factory
        if factory is None:
            raise InvalidRequest("this engine does not support structured output", param="structured")
        prepared = factory.find(sampling, cache_salt)
        if prepared is not None:
            return prepared
        began_at = trio.current_time()
        try:
            return await self._threads.run_compile(partial(factory.prepare, sampling, cache_salt), tenant=tenant)
        finally:
            self._metrics.form_preparation_seconds.observe(trio.current_time() - began_at)
