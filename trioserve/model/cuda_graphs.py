"""CUDA graphs as recordings: what a function launches is captured once, and replayed with one call."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trioserve.model.static_decode import Recording

__all__ = ["CudaGraphRecorder"]


class CudaGraphRecorder:
    """A Recorder. Its graphs keep their intermediate results in one pool, so that together they take little more than
    the largest of them."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Callable[[], Tensor]) -> Recording:
        # A library makes its workspace for each stream, so it is the stream of the capture that has to be warm.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            compute()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # In torch's default mode a capture fails when any thread of the process asks CUDA for what cannot be captured,
        # memory for instance. What other threads do meanwhile is no part of this stream.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            output = compute()
        return Recording(output, graph.replay)
