"""Tests that a request of an asyncio program frees all its resources, in whichever phase and way its body ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from trioserve.contracts.sampling import SamplingParams

from .conftest import Fake, open_fake, until

PROMPT = "a prompt that takes three steps"  # The prompt has 31 tokens, of which one step computes 12.
ENDLESS = SamplingParams(max_tokens=60, ignore_eos=True)


class Left(Exception):
    """Error that a test raises to end the body of a request."""


class Request:
    """A request with a body that the test can end.

    Attributes:
        leave: the test sets this event. Then the body leaves the scope of the request.
        patience: timeout scope around the body.
        has_begun: the body sets this event when it has read the first delta.
    """

    def __init__(self, fake: Fake) -> None:
        self.fake = fake
        self.leave = asyncio.Event()
        self.has_begun = asyncio.Event()
        self.patience = asyncio.timeout(None)

    async def read(self, *, slowly: bool = False) -> None:
        """Read the response to its end. With `slowly`, read only the first delta until `leave` is set."""
        async with self.patience, self.fake.engine.generate(PROMPT, ENDLESS) as stream:
            async for _ in stream:
                self.has_begun.set()
                if slowly:
                    await self.leave.wait()
                if self.leave.is_set():
                    break

    async def stay(self) -> None:
        """Stay in the scope of the request without reading the response."""
        async with self.patience, self.fake.engine.generate(PROMPT, ENDLESS):
            self.has_begun.set()
            await self.leave.wait()

    async def stay_and_raise(self) -> None:
        async with self.fake.engine.generate(PROMPT, ENDLESS):
            await self.leave.wait()
            raise Left


# --- ways to end the body of a request. Each way gets a body, and a function that brings the request into a phase ---

Body = Callable[[Request], Awaitable[None]]
Reach = Callable[[asyncio.Task[None]], Awaitable[None]]


async def cancel(request: Request, body: Body, reach: Reach) -> None:
    task = asyncio.create_task(body(request))
    await reach(task)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def time_out(request: Request, body: Body, reach: Reach) -> None:
    task = asyncio.create_task(body(request))
    await reach(task)
    request.patience.reschedule(asyncio.get_running_loop().time())
    with pytest.raises(TimeoutError):
        await task


async def fail_in_the_group(request: Request, body: Body, reach: Reach) -> None:
    try:
        async with asyncio.TaskGroup() as group:
            await reach(group.create_task(body(request)))
            raise Left
    except* Left:
        pass


async def reach_the_end(request: Request, body: Body, reach: Reach) -> None:
    task = asyncio.create_task(body(request))
    await reach(task)
    request.leave.set()
    with suppress(Left):
        await task


async def close_the_engine(request: Request, body: Body, reach: Reach) -> None:
    """Close the engine without cancelling the request's task."""
    task = asyncio.create_task(body(request))
    await reach(task)
    request.fake.engine.abort_all("a test ends them all")
    request.leave.set()
    await task


WAYS = [cancel, time_out, fail_in_the_group]


# --- the phases ---


@asynccontextmanager
async def full_queue(fake: Fake):
    """Enter as many requests as the engine accepts, so that the next one waits in the queue inside of `__aenter__`."""
    async with asyncio.TaskGroup() as group:
        requests = [Request(fake) for _ in range(5)]  # One request runs, and four requests are prepared.
        for request in requests:
            group.create_task(request.stay())
        await fake.until_queued(5)
        yield
        for request in requests:
            request.leave.set()


async def check_queue(way, body):
    async with open_fake(paused=True, max_num_seqs=1) as fake, full_queue(fake):
        request = Request(fake)
        dispatch = fake.fake.dispatch

        async def reach(task: asyncio.Task[None]) -> None:
            await fake.until_queued(6)
            assert fake.engine.thread.call(dispatch.core.stats).waiting == 1
            assert not request.has_begun.is_set()

        await way(request, body, reach)
        assert len(fake.engine.live_requests()) == 5
        assert fake.engine.thread.call(dispatch.core.stats).waiting == 0
    assert fake.blocks_used == 0


async def check_steps(way, body, steps: int, *, blocks: int, begins: bool = False):
    async with open_fake(paused=True, max_num_batched_tokens=12, next_token=lambda _ids: 97) as fake:
        request = Request(fake)

        async def reach(task: asyncio.Task[None]) -> None:
            await fake.until_queued(1)
            if begins:
                await fake.step(3)
                await asyncio.wait(
                    [task, asyncio.create_task(request.has_begun.wait())], return_when=asyncio.FIRST_COMPLETED
                )
                await fake.step(steps - 3)
            else:
                await fake.step(steps)
            assert not task.done()
            assert fake.blocks_used == blocks

        await way(request, body, reach)
        await fake.settle()
        assert fake.blocks_used == 0
        fake.assert_all_free()


@pytest.mark.parametrize("body", [Request.read, Request.stay], ids=["reads", "stays"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_request_that_ends_in_the_queue_frees_everything(run, way, body):
    run(lambda: check_queue(way, body))


@pytest.mark.parametrize("body", [Request.read, Request.stay], ids=["reads", "stays"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_request_that_ends_before_its_first_step_frees_everything(run, way, body):
    run(lambda: check_steps(way, body, 0, blocks=0))


@pytest.mark.parametrize("body", [Request.read, Request.stay], ids=["reads", "stays"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_request_that_ends_during_prefill_frees_everything(run, way, body):
    run(lambda: check_steps(way, body, 2, blocks=6))


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_request_that_ends_during_decode_frees_everything(run, way):
    run(lambda: check_steps(way, Request.read, 8, blocks=9, begins=True))


async def read_slowly(request: Request) -> None:
    await request.read(slowly=True)


@pytest.mark.parametrize("way", [*WAYS, reach_the_end, close_the_engine], ids=lambda way: way.__name__)
def test_request_that_ends_with_unread_deltas_frees_everything(run, way):
    run(lambda: check_steps(way, read_slowly, 20, blocks=12, begins=True))


@pytest.mark.parametrize("body", [Request.stay, Request.stay_and_raise], ids=["returns", "raises"])
@pytest.mark.parametrize(("steps", "blocks"), [(0, 0), (2, 6), (8, 9)])
def test_request_frees_everything_at_the_end_of_its_body(run, body, steps, blocks):
    run(lambda: check_steps(reach_the_end, body, steps, blocks=blocks))


def test_request_frees_everything_after_a_break_out_of_its_loop(run):
    async def program() -> None:
        async with open_fake(next_token=lambda _ids: 97) as fake:
            async with fake.engine.generate(PROMPT, ENDLESS) as stream:
                async for _ in stream:
                    break
                assert not stream.is_finished or stream.completion_token_count == 60
            await fake.settle()
            fake.assert_all_free()

    run(program)


def test_request_that_ends_during_a_forward_pass_frees_its_blocks_after_the_pass(run):
    async def program() -> None:
        async with open_fake(paused=True, max_num_batched_tokens=12, next_token=lambda _ids: 97) as fake:
            request = Request(fake)
            task = asyncio.create_task(request.read())
            await fake.until_queued(1)
            await fake.step()
            steps = fake.fake.steps
            fake.engine.thread.call(steps.hold)
            fake.engine.thread.call(fake.fake.resume)
            await fake.engine.thread.run(steps.entered)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task  # The end of the body does not wait for the step.
            assert fake.blocks_used > 0, "the forward pass still reads them"
            fake.engine.thread.call(steps.release)
            await fake.settle()
            fake.assert_all_free()

    run(program)


def test_abandoned_async_generator_ends_its_request(run):
    async def program() -> None:
        async with open_fake(next_token=lambda _ids: 97) as fake:

            async def texts():
                async with fake.engine.generate(PROMPT, ENDLESS) as stream:
                    async for delta in stream:
                        yield delta.text

            async for _ in texts():
                break  # The loop does not close the generator. Asyncio closes it in another task.
            await until(lambda: not fake.engine.live_requests())
            await fake.settle()
            fake.assert_all_free()

    run(program)


def test_requests_that_begin_and_end_rapidly_leak_nothing(run):
    async def program() -> None:
        async with open_fake(next_token=lambda _ids: 97) as fake:

            async def ask(number: int) -> None:
                for turn in range(10):
                    with suppress(TimeoutError):
                        async with asyncio.timeout(0.0002 * ((number + turn) % 7)):
                            async with fake.engine.generate(f"{number} {turn}", ENDLESS) as stream:
                                async for _ in stream:
                                    pass

            async with asyncio.TaskGroup() as group:
                for number in range(8):
                    group.create_task(ask(number))
            await fake.settle()
            fake.assert_all_free()

    run(program)
