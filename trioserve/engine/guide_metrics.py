"""What forms and masks have cost so far, as metrics: read at every scrape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from trioserve.metrics.registry import Metrics
from trioserve.text.form_compiler import FormCompiler

__all__ = ["MaskTotals", "show_forms", "show_masks"]


class MaskTotals(Protocol):
    """Of a MaskMaker: what filling took so far, and how many rows it were."""

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
