"""Tests of the queue before the local engine: order, limits, and the moment at which the next request gets a lease."""

from __future__ import annotations

from functools import partial

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.admission.local_endpoint import local_request
from trioserve.contracts.errors import Overloaded
from trioserve.contracts.prompt import ChatPrompt
from trioserve.contracts.resume import Resume
from trioserve.contracts.sampling import SamplingParams
from trioserve.testing.fake_engine import FakeEngine, open_fake_engine
from trioserve.testing.memory_server import open_memory_server


def shown(fake: FakeEngine, name: str) -> float:
    lines = fake.metrics.expose().decode().splitlines()
    (value,) = (line.rpartition(" ")[2] for line in lines if line.startswith((name + "{", name + " ")))
    return float(value)


async def test_burst_of_one_tenant_does_not_delay_another_tenant(autojump_clock):
    async with open_fake_engine(max_num_seqs=1, max_queued_requests=20, step_seconds=0.01) as fake:
        ended: list[str] = []

        async def ask(tenant: str) -> None:
            async with fake.generate("prompt", SamplingParams(max_tokens=2), tenant=tenant) as response:
                async for _ in response:
                    pass
            ended.append(tenant)

        async with trio.open_nursery() as nursery:
            for _ in range(16):
                nursery.start_soon(ask, "burst")
                await wait_all_tasks_blocked()
            nursery.start_soon(ask, "steady")
        # One request ran, four were prepared, and the steady tenant had one of the first two turns in the queue.
        assert ended.index("steady") <= 6
        fake.assert_all_free()


async def test_queue_limits_estimated_prompt_tokens(autojump_clock):
    async with open_fake_engine(max_num_seqs=1, max_queued_requests=2, max_queued_tokens=20) as fake:

        async def ask(prompt: list[int]) -> None:
            async with fake.generate(prompt) as response:
                async for _ in response:
                    pass

        fake.steps.hold()
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(ask, [1] * 15)
            await wait_all_tasks_blocked()
            assert fake.dispatch.core.stats().waiting_prompt_tokens == 15
            with pytest.raises(Overloaded, match="1 requests wait") as refused:
                await ask([1])
            assert refused.value.reason == "queue_full"
            nursery.cancel_scope.cancel()
        fake.steps.release()


async def test_known_output_of_a_resumed_response_counts_as_prompt_tokens(autojump_clock):
    resume = Resume(token_ids=((65,) * 10, (65,) * 5), finished=(False, True))
    sampling = SamplingParams(n=2, max_tokens=12)
    async with open_fake_engine(max_num_seqs=1, max_queued_requests=2, max_queued_tokens=20) as fake:
        fake.steps.hold()
        async with trio.open_nursery() as nursery:

            async def ask(**options: object) -> None:
                async with fake.generate([1], **options) as response:
                    async for _ in response:
                        pass

            for _ in range(2):
                nursery.start_soon(ask)
            await wait_all_tasks_blocked()
            nursery.start_soon(partial(ask, sampling=sampling, resume=resume))
            await wait_all_tasks_blocked()
            assert fake.dispatch.core.stats().waiting_prompt_tokens == 16
            nursery.cancel_scope.cancel()
        fake.steps.release()


async def test_waiting_requests_are_refused_after_waiting_seconds_max(autojump_clock, caplog):
    caplog.set_level("INFO", logger="trioserve.engine")
    async with open_memory_server(max_num_seqs=1, max_queued_requests=1, max_queue_wait=5.0) as server:
        server.engine.steps.hold()
        async with server.engine.generate("in the way"):
            client = server.client()
            response = await client.post("/v1/completions", {"prompt": "waits"})
            assert trio.current_time() == pytest.approx(5.0)
            assert (response.status, response.headers["x-trioserve-reason"]) == (429, "queue_wait_over")
            assert int(response.headers["retry-after"]) >= 1
            line = f"refused request={response.headers['x-request-id']} reason=queue_wait_over"
            assert [record.getMessage() for record in caplog.records] == [line]
        server.engine.steps.release()
        await server.assert_all_free()


async def test_next_request_gets_the_lease_only_when_the_blocks_are_free(autojump_clock):
    """The client leaves while a step reads its blocks. The next request waits until that step has ended."""
    async with open_fake_engine(max_num_seqs=1, max_queued_requests=1, max_model_len=128) as fake:
        fake.steps.hold()
        async with trio.open_nursery() as nursery:
            async with fake.generate("first"):
                await fake.steps.entered()
                nursery.start_soon(fake.generate("second").__aenter__)
                await wait_all_tasks_blocked()
                assert shown(fake, "trioserve_router:queued_requests") == 1
            assert shown(fake, "trioserve_router:queued_requests") == 1
            fake.steps.release()
            await wait_all_tasks_blocked()
            assert shown(fake, "trioserve_router:queued_requests") == 0
            assert shown(fake, "vllm_router:admissions_total") == 2
            nursery.cancel_scope.cancel()


async def test_request_header_sets_the_tenant(autojump_clock):
    async with open_memory_server(max_num_seqs=1, max_queued_requests=20) as server:
        tenants: list[str] = []
        begin = server.engine.dispatch.begin

        def watched(request):
            tenants.append(request.tenant)
            return begin(request)

        server.engine.dispatch.begin = watched
        client = server.client()
        for headers in ({"x-tenant-id": "blue"}, {}):
            response = await client.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, headers=headers)
            assert response.status == 200
        assert tenants == ["blue", ""]


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ("x" * 400, 101),
        ([5] * 30, 30),
        (ChatPrompt(messages=[{"role": "user", "content": "x" * 40}]), 11),
        (ChatPrompt(messages=[{"role": "user", "content": [{"type": "text", "text": "x" * 40}, 7]}, {}]), 11),
    ],
)
def test_prompt_tokens_are_estimated_from_the_length(prompt, tokens):
    assert local_request([prompt], tenant="", priority=0, sequences=1).prompt_tokens == tokens
