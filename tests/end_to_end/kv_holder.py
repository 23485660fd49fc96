"""Holds KV blocks for other processes: python kv_holder.py CONNECTOR REQUESTS BLOCKS.

The program prints the transfer parameters of each request as a line of JSON. Then it prints "released ID" for each hold
that another process releases. The program ends when its standard input ends.
"""

from __future__ import annotations

import sys
from functools import partial

import msgspec
import trio

from trioserve.connectors.settings import find_connector
from trioserve.contracts.events import FinishReason
from trioserve.contracts.ids import BlockIndex, RequestId
from trioserve.contracts.kv_transfer import ConnectorSetup, KVLayout, Released
from trioserve.contracts.request import EngineRequest, KVTransferParams
from trioserve.contracts.sampling import SamplingParams
from trioserve.testing.connector_conformance.side import MemoryPages

LAYOUT = KVLayout(model="m", layer_count=6, block_size=16, kv_head_count=3, head_dim=64, dtype="bfloat16")
SEED = 11


async def hold(connector_name: str, request_count: int, block_count: int) -> None:
    pages = MemoryPages(block_count, LAYOUT)
    blocks = [BlockIndex(block) for block in range(block_count)]
    pages.fill(blocks, SEED)
    woken = trio.Event()
    setup = ConnectorSetup(engine_id="holder", role="prefill", pages=pages, options={}, wake=lambda: woken.set())
    connector = find_connector(connector_name)(setup)

    async def run(*, task_status: trio.TaskStatus[None]) -> None:
        await connector.run(task_status=task_status)

    async with trio.open_nursery() as nursery:
        await nursery.start(run)
        token_count = block_count * LAYOUT.block_size
        for index in range(request_count):
            request = EngineRequest(
                id=RequestId(f"held-{index}"),
                prompt_token_ids=(1,) * token_count,
                sampling=SamplingParams(temperature=0.0),
                output_tokens_max=1,
                stop_token_ids=frozenset(),
                seed=0,
                kv_transfer=KVTransferParams(do_remote_decode=True),
            )
            assert connector.request_finished(request, blocks, request.prompt_token_ids, FinishReason.LENGTH)
            print(msgspec.json.encode(connector.transfer_params(request.id)).decode(), flush=True)
        nursery.start_soon(partial(_end_with_input, nursery.cancel_scope))
        while True:
            woken = trio.Event()
            for report in connector.progress():
                if isinstance(report, Released):
                    print(f"released {report.request_id}", flush=True)
            await woken.wait()


async def _end_with_input(scope: trio.CancelScope) -> None:
    await trio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)
    scope.cancel()


if __name__ == "__main__":
    trio.run(hold, sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
