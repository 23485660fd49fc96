"""Tests the engine in an asyncio program: results, errors, and the end of the engine."""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import signal
import subprocess
import sys
import threading

import pytest

import trioserve
import trioserve.asyncio
from trioserve.asyncio.engine import Engine, in_a_thread
from trioserve.asyncio.streams import DeltaBox
from trioserve.asyncio.trio_thread import TrioThread
from trioserve.contracts.deadlines import Deadlines
from trioserve.contracts.errors import (
    AlreadyEnded,
    ContextTooLong,
    Draining,
    EngineFault,
    InvalidRequest,
    ModelLoadError,
    Overloaded,
)
from trioserve.contracts.events import AbortOutcome, FinishReason
from trioserve.contracts.output import Delta
from trioserve.contracts.prompt import ChatPrompt
from trioserve.contracts.sampling import SamplingParams
from trioserve.engine.engine import Engine as TrioEngine
from trioserve.engine.image_engine import ImageEngine as TrioImageEngine
from trioserve.engine.image_engine import ImageStream as TrioImageStream
from trioserve.engine.request_stream import PoolingStream as TrioPoolingStream
from trioserve.engine.request_stream import RequestStream as TrioStream
from trioserve.testing.fake_engine import InjectedFault, open_fake_engine
from trioserve.text.output import merge
from trioserve.text.response_parts import ContentText, ToolCallBegin, ToolCallEnd

from .conftest import open_fake, until

ENDLESS = SamplingParams(max_tokens=60, ignore_eos=True)
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
NOT_FOR_PROGRAMS = {
    # Other packages of trioserve call these methods.
    *("run", "close", "reopen", "reopening_failed", "keep_deadlines", "wake", "call_at", "tokenizing", "sleep_on"),
    *("wait_until_admitted", "wait_until_open"),
}


async def text_of(engine: Engine, prompt: str = "a prompt", sampling: SamplingParams | None = None, **more) -> str:
    async with engine.generate(prompt, sampling or SamplingParams(max_tokens=20), **more) as stream:
        return "".join([delta.text async for delta in stream])


# --- the same API ---


def test_asyncio_engine_has_every_method_of_the_trio_engine_with_equal_parameters():
    """Covers the public methods of the Trio engine, except those that other packages use to drive the engine."""
    pairs = (
        (Engine, TrioEngine),
        (trioserve.asyncio.ImageEngine, TrioImageEngine),
        (trioserve.asyncio.Engines, trioserve.Engines),
    )
    for ours, theirs in pairs:
        for name, method in inspect.getmembers(theirs, inspect.isfunction):
            if not name.startswith("_") and name not in NOT_FOR_PROGRAMS:
                parameters = inspect.signature(getattr(ours, name)).parameters
                assert list(parameters) == list(inspect.signature(method).parameters), name
                assert getattr(ours, name).__doc__, name


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (trioserve.asyncio.RequestStream, TrioStream),
        (trioserve.asyncio.PoolingStream, TrioPoolingStream),
        (trioserve.asyncio.ImageStream, TrioImageStream),
    ],
)
def test_asyncio_stream_has_every_public_name_of_the_trio_stream(ours, theirs):
    public = {name for name in dir(theirs) if not name.startswith("_")}
    assert public <= set(dir(ours))


def test_open_engine_accepts_the_parameters_of_the_trio_version():
    for name in ("open_engine", "open_engines", "open_image_engine"):
        assert inspect.signature(getattr(trioserve.asyncio, name)) == inspect.signature(getattr(trioserve, name))
    with pytest.raises(TypeError, match="port"):
        trioserve.asyncio.open_engine("smollm2", port=80)


# --- results ---


def test_asyncio_engine_returns_text_chats_parts_embeddings_and_tokens(run):
    def response(prompt: str) -> str:
        return '<tool_call>{"name": "look", "arguments": {}}</tool_call>' if "tools" in prompt else "a response"

    async def program() -> None:
        async with open_fake(response=response, max_model_len=400, block_count=200) as fake:
            engine = fake.engine
            assert await text_of(engine) == "a response"
            chat = ChatPrompt(messages=[{"role": "user", "content": "Hello"}])
            assert await text_of(engine, chat) == "a response"
            parts = []
            async with engine.generate("with tools", SamplingParams(max_tokens=80)) as stream:
                async for found in engine.read_parts(stream, tools=TOOLS):
                    parts += found.parts
            assert {type(part) for part in parts} >= {ToolCallBegin, ToolCallEnd}
            assert not any(isinstance(part, ContentText) for part in parts)
            vectors = await engine.embed(["one text", "another one"])
            assert len(vectors) == 2
            async with engine.embed("a text") as pooled:
                assert len(await pooled.results()) == len(pooled.pooled) == 1
                assert pooled.input_token_counts == (6,)
            assert await engine.decode(await engine.encode("a text")) == "a text"
            assert engine.model.name == "fake"
            assert engine.ready
            assert engine.fault is None
            assert engine.load().running == 0
            await engine.wait_until_idle()
            fake.assert_all_free()

    run(program)


def test_stream_properties_describe_its_request(run):
    async def program() -> None:
        async with open_fake(response="abcdef") as fake:
            async with fake.engine.generate(
                "a prompt", SamplingParams(max_tokens=4, seed=7), request_id="mine"
            ) as stream:
                assert await stream.wait_until_begun() is None
                deltas = [delta async for delta in stream]
                assert stream.id == "mine"
                assert stream.choice_count == 1
                assert stream.seed == 7
                assert stream.prompt_token_count == len(stream.prompt_token_ids) == 8
                assert stream.completion_token_count == 4
                assert stream.is_finished
                assert not stream.is_held
                await stream.wait_until_released()
            assert deltas[-1].finish_reason is FinishReason.LENGTH
            with pytest.raises(AlreadyEnded, match="can be read only inside"):
                await anext(stream)
            with pytest.raises(AlreadyEnded, match="was entered before"):
                await stream.__aenter__()

    run(program)


def test_each_delta_of_a_shared_stream_goes_to_one_task(run):
    async def program() -> None:
        async with open_fake(next_token=lambda _ids: 97) as fake:
            texts = []

            async def read(stream) -> None:
                texts.extend([delta.text async for delta in stream])

            async with fake.engine.generate("x", ENDLESS) as stream, asyncio.TaskGroup() as group:
                for _ in range(3):
                    group.create_task(read(stream))
            assert "".join(texts) == "a" * 60

    run(program)


def test_cancelled_wait_loses_no_delta(run):
    async def program() -> None:
        async with open_fake(paused=True, next_token=lambda ids: 97 + len(ids) % 26) as fake:
            async with fake.engine.generate("x", SamplingParams(max_tokens=20, ignore_eos=True)) as stream:
                text = ""
                for _ in range(20):
                    waiting = asyncio.ensure_future(anext(stream))
                    await asyncio.sleep(0)
                    stepping = asyncio.create_task(fake.step())
                    await asyncio.sleep(0)
                    waiting.cancel()
                    await stepping
                    await asyncio.wait([waiting])
                    if not waiting.cancelled():
                        text += waiting.result().text
                text += "".join([delta.text async for delta in stream])
            assert text == "".join(chr(97 + count % 26) for count in range(1, 21))

    run(program)


def test_unread_tokens_are_computed_again_after_a_resume(run):
    async def program() -> None:
        sampling = SamplingParams(max_tokens=12, ignore_eos=True)
        async with open_fake(paused=True, next_token=lambda ids: 97 + len(ids) % 26) as fake:
            async with fake.engine.generate("x", sampling) as stream:
                await fake.until_queued(1)
                await fake.step(3)
                text = (await anext(stream)).text
                await fake.step(4)
                state = stream.resume_state()  # Four more tokens have arrived, but the program has not read them.
            assert text == "bcd"
            assert state.token_ids == ((98, 99, 100),)
            fake.engine.thread.call(fake.fake.resume)
            text += await text_of(fake.engine, "x", sampling, resume=state)
            assert text == "bcdefghijklm"

    run(program)


def test_stream_read_to_its_end_is_finished(run):
    async def program() -> None:
        async with open_fake(next_token=lambda _ids: 97) as fake, fake.engine.generate("x", ENDLESS) as stream:
            await until(lambda: stream.is_finished)
            await fake.settle()
            assert stream.resume_state().finished == (False,)
            assert [delta.finish_reason async for delta in stream] == [FinishReason.LENGTH]
            assert stream.resume_state().finished == (True,)

    run(program)


# --- a slow reader, and a fast engine ---


def test_unread_deltas_are_merged_per_choice(run):
    async def program() -> None:
        sampling = SamplingParams(max_tokens=60, ignore_eos=True, n=2)
        async with (
            open_fake(next_token=lambda _ids: 97, block_count=200) as fake,
            fake.engine.generate("x", sampling) as stream,
        ):
            await until(lambda: stream.is_finished)
            await fake.settle()
            deltas = [delta async for delta in stream]
            assert sorted(delta.index for delta in deltas) == [0, 1]
            assert {delta.text for delta in deltas} == {"a" * 60}

    run(program)


def test_reader_of_a_fast_engine_lets_other_tasks_run():
    async def program() -> None:
        box, turns = DeltaBox(merge), []
        for _ in range(3):
            box.put(Delta(index=0, text="a", token_ids=(97,)))
            asyncio.get_running_loop().call_soon(turns.append, 1)
            assert (await box.get()).text == "a"
        assert len(turns) == 3

    asyncio.run(program())


# --- errors ---


def test_engine_errors_reach_the_caller(run):
    async def program() -> None:
        async with open_fake(paused=True, max_model_len=128, max_num_seqs=1, max_queued_requests=1) as fake:
            engine = fake.engine
            with pytest.raises(InvalidRequest, match="prompt is 5") as raised:
                engine.generate(5)
            assert raised.value.param == "prompt"
            with pytest.raises(ContextTooLong):
                await text_of(engine, "x" * 1000)
            with pytest.raises(InvalidRequest, match="request_ids holds 5"):
                engine.abort([5])
            async with asyncio.TaskGroup() as group:
                waiting = [group.create_task(text_of(engine)) for _ in range(2)]
                await fake.until_queued(2)
                with pytest.raises(Overloaded):
                    await text_of(engine)
                for task in waiting:
                    task.cancel()
            engine.drain()
            assert not engine.ready
            with pytest.raises(Draining):
                await text_of(engine)
            fake.assert_all_free()

    run(program)


def test_passed_deadline_ends_a_request_and_the_error_names_the_deadline(run):
    async def program() -> None:
        async with open_fake(paused=True) as fake:
            deadlines = Deadlines(ttft_timeout=0.001)
            async with fake.engine.generate("x", ENDLESS, deadlines=deadlines) as stream:
                deltas = [delta async for delta in stream]
            assert [delta.finish_reason for delta in deltas] == [FinishReason.DEADLINE]
            assert deltas[0].stop_reason == "ttft_timeout"
            fake.assert_all_free()

    run(program)


def test_abort_by_id_ends_a_reader_in_another_task(run):
    async def program() -> None:
        async with open_fake(paused=True, next_token=lambda _ids: 97) as fake:

            async def read() -> list[Delta]:
                async with fake.engine.generate("x", ENDLESS, request_id="mine") as stream:
                    return [delta async for delta in stream]

            reader = asyncio.create_task(read())
            await fake.until_queued(1)
            await fake.step(5)
            assert [view.id for view in fake.engine.live_requests()] == ["mine"]
            assert fake.engine.abort("mine") == {"mine": AbortOutcome.ABORTED}
            assert (await reader)[-1].finish_reason is FinishReason.ABORT
            fake.assert_all_free()

    run(program)


def test_engine_fault_reaches_readers_and_the_scope_that_opened_it(run):
    async def program() -> None:
        seen: list[BaseException] = []

        async def read(engine: Engine) -> None:
            try:
                await text_of(engine)
            except EngineFault as error:
                seen.append(error)

        async with asyncio.TaskGroup() as group:
            with pytest.raises(EngineFault, match="a test broke the engine") as raised:
                async with open_fake(paused=True) as fake:
                    group.create_task(read(fake.engine))
                    await fake.until_queued(1)
                    fake.engine.thread.call(fake.fake.break_next_step)
                    fake.engine.thread.call(fake.fake.resume)
                    try:
                        await asyncio.get_running_loop().create_future()
                    except asyncio.CancelledError as error:
                        seen.append(error)
                        raise
            assert isinstance(raised.value.__cause__, InjectedFault)
        assert {type(error) for error in seen} == {EngineFault, asyncio.CancelledError}
        assert asyncio.current_task().cancelling() == 0

    run(program)


def test_engine_fault_is_raised_if_the_scope_is_left_in_another_task(run):
    """A notebook leaves the scope in another task, because it runs each cell in a task of its own."""

    async def program() -> None:
        opening = in_a_thread(functools.partial(open_fake_engine, paused=True))
        engine = await asyncio.create_task(opening.__aenter__())
        fault = engine.thread.call(lambda: engine.on_trio)
        engine.thread.call(fault.break_next_step)
        engine.thread.call(fault.resume)
        with pytest.raises(EngineFault):
            await text_of(engine)
        with pytest.raises(EngineFault):
            await opening.__aexit__(None, None, None)

    run(program)


def test_failed_engine_start_raises_and_leaves_no_thread(run, tmp_path):
    async def program() -> None:
        with pytest.raises(ModelLoadError):
            async with trioserve.asyncio.open_engine(str(tmp_path / "none.gguf")):
                pass

    run(program)


def test_cancelled_engine_start_leaves_no_thread(run):
    async def program() -> None:
        async def open_it() -> None:
            async with trioserve.asyncio.open_engine("smollm2", cpu_kernels="native"):
                pass

        opening = asyncio.create_task(open_it())
        await until(lambda: any(thread.name == "trioserve-compute" for thread in threading.enumerate()))
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening

    run(program)


def test_closed_engine_accepts_no_calls(run):
    async def program() -> None:
        async with open_fake(next_token=lambda _ids: 97) as fake:
            before = fake.engine.generate("x")
        assert fake.engine.stats().blocks_used == 0
        assert not fake.engine.ready
        for stream in (before, fake.engine.generate("x")):
            with pytest.raises(AlreadyEnded, match="the engine was closed"):
                await stream.__aenter__()

    run(program)


def test_open_requests_end_when_the_engine_closes(run, monkeypatch):
    stop = TrioThread.stop

    def stop_late(thread: TrioThread) -> None:
        """Give all cancelled tasks time to run, since one of them might end a request with another error."""
        for _ in range(20):
            thread.call(lambda: None)
        stop(thread)

    async def program() -> None:
        monkeypatch.setattr(TrioThread, "stop", stop_late)
        async with open_fake(paused=True) as fake:
            reader = asyncio.create_task(text_of(fake.engine))
            await fake.until_queued(1)
        assert fake.engine.stats().blocks_used == 0
        # The error is raised at once, without waiting.
        with pytest.raises(AlreadyEnded, match="ended with its engine"):
            await asyncio.wait_for(reader, 10)

    run(program)


# --- loops ---


def test_one_loop_can_run_two_engines(run):
    async def program() -> None:
        async with open_fake(response="one") as one, open_fake(response="two") as two:
            texts = await asyncio.gather(*(text_of(fake.engine) for fake in (one, two, one, two)))
            assert texts == ["one", "two", "one", "two"]
            one.assert_all_free()
            two.assert_all_free()

    run(program)


def test_loops_in_two_threads_can_use_one_engine(run):
    async def program() -> None:
        async with open_fake(response="one") as fake:
            in_another = asyncio.to_thread(asyncio.run, text_of(fake.engine))
            assert await asyncio.gather(in_another, text_of(fake.engine)) == ["one", "one"]
        # The asyncio loop keeps its worker threads until the loop ends.
        await asyncio.get_running_loop().shutdown_default_executor()

    run(program)


def test_engine_works_under_uvloop(run):
    uvloop = pytest.importorskip("uvloop")

    async def program() -> None:
        async with open_fake(next_token=lambda _ids: 97) as fake:
            async with asyncio.timeout(30):
                assert await text_of(fake.engine, sampling=ENDLESS) == "a" * 60
            async with fake.engine.generate("x", ENDLESS) as stream:
                async for _ in stream:
                    break
            await fake.settle()
            fake.assert_all_free()

    before = set(threading.enumerate())
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(program())
    assert not set(threading.enumerate()) - before


def test_program_can_exit_while_tasks_still_read_streams(run):
    async def program() -> None:
        async def serve() -> None:
            async with open_fake(paused=True) as fake:
                ready.set_result(fake)
                await text_of(fake.engine)

        ready = asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(serve())
        fake = await ready
        await fake.until_queued(1)
        serving.cancel()  # asyncio.run cancels all remaining tasks in this way when its main task has ended.
        with pytest.raises(asyncio.CancelledError):
            await serving

    run(program)


def test_ctrl_c_ends_the_program_and_leaks_nothing():
    """asyncio.run turns Ctrl-C into a cancellation of the main task."""
    fakes = []

    async def program() -> None:
        async with open_fake(paused=True) as fake:
            fakes.append(fake)
            asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)
            await text_of(fake.engine)

    before = set(threading.enumerate())
    # A program that a shell starts in the background ignores Ctrl-C.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(program())
    finally:
        signal.signal(signal.SIGINT, handler)
    assert not set(threading.enumerate()) - before
    assert fakes[0].engine.stats().blocks_used == 0


def test_abandoned_loop_releases_the_engine():
    """Without asyncio.run, a Ctrl-C leaves the main task unfinished. The task ends when it is garbage collected."""

    async def program() -> None:
        async with open_fake(paused=True) as fake:

            def interrupt() -> None:
                raise KeyboardInterrupt

            asyncio.get_running_loop().call_soon(interrupt)
            await text_of(fake.engine)

    before = set(threading.enumerate())
    loop = asyncio.new_event_loop()
    task = loop.create_task(program())
    task._log_destroy_pending = False
    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(task)
    threads = set(threading.enumerate()) - before
    assert threads
    loop.close()
    del task
    gc.collect()
    for thread in threads:
        thread.join(60)
    assert not set(threading.enumerate()) - before


@pytest.mark.slow
def test_engine_ends_if_its_loop_is_closed_before_its_scope_is_left():
    """After a second Ctrl-C, asyncio closes the loop before the scope is left.

    Then the clean-up of an async generator never runs.
    """
    before = set(threading.enumerate())
    loop = asyncio.new_event_loop()
    scope = open_fake()
    loop.run_until_complete(scope.__aenter__())
    threads = set(threading.enumerate()) - before
    assert threads
    loop.close()
    del scope
    gc.collect()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_process_can_exit_without_closing_its_engine():
    code = """
import asyncio, functools, sys
from trioserve.asyncio.engine import in_a_thread
from trioserve.testing.fake_engine import open_fake_engine
loop = asyncio.new_event_loop()
kept = in_a_thread(functools.partial(open_fake_engine, response="abc"))
engine = loop.run_until_complete(kept.__aenter__())
print(engine.ready)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stdout) == (0, "True\n"), ran.stderr
    assert "Traceback" not in ran.stderr
