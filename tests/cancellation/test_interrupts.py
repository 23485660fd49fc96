"""Tests Ctrl-C at each instruction of a Trio program that opens, uses and closes an engine."""

from __future__ import annotations

import dis
import gc
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import trio

import trioserve
from trioserve import SamplingParams
from trioserve.commands.random_checkpoint import run_random_checkpoint
from trioserve.testing.accounting import assert_all_free
from trioserve.testing.fake_engine import open_fake_engine

pytestmark = pytest.mark.slow

INTERRUPTS = int(os.environ.get("TRIOSERVE_INTERRUPTS", "28"))
"""How many interrupts each test tries, evenly spread over the program. 0 interrupts at every possible instruction."""

OURS = (f"{os.sep}trioserve{os.sep}", __file__)


def is_ours(frame: FrameType | None) -> bool:
    """Return True for code of trioserve or of this test, and for code of contextlib that this code has called."""
    while frame is not None and frame.f_code.co_filename.endswith(f"{os.sep}contextlib.py"):
        frame = frame.f_back
    return frame is not None and any(part in frame.f_code.co_filename for part in OURS)


@cache
def interruptible_offsets(code: CodeType) -> frozenset[int]:
    """Return the bytecode offsets at which CPython handles signals.

    They follow a call, a jump back, and the start of a function.
    """
    offsets, follows = set(), False
    for instruction in dis.get_instructions(code):
        if follows:
            offsets.add(instruction.offset)
        follows = instruction.opname in ("RESUME", "JUMP_BACKWARD") or instruction.opname.startswith("CALL")
    return frozenset(offsets)


class Interrupter:
    """Counts the instructions at which a signal can be handled, and sends SIGINT at one of them.

    Args:
        place: number of the instruction that gets SIGINT, counted from 1. None only counts.
    """

    def __init__(self, place: int | None) -> None:
        self.place = place
        self.count = 0
        self.where = ""

    @contextmanager
    def installed(self) -> Iterator[None]:
        sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if not is_ours(frame):
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        if event == "opcode" and frame.f_lasti in interruptible_offsets(frame.f_code):
            self.count += 1
            if self.count == self.place:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_qualname}"
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return self._trace


def leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for each in error.exceptions for leaf in leaves(each)]
    return [error]


def remains() -> tuple[int, list[str]]:
    """Return the number of open files, and the names of trioserve's threads."""
    names = sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("trioserve"))
    return len(os.listdir("/proc/self/fd")), names


def sweep(program: Callable[[], Awaitable[None]], count: int) -> list[str]:
    """Run the program again and again, each time with one interrupt at another instruction.

    Args:
        program: an async function without arguments.
        count: how many interrupts to try, evenly spread. 0 tries every instruction.

    Returns:
        A line for each interrupt that did not end in KeyboardInterrupt alone, or that leaked files or threads.
    """
    trio.run(program)  # The first run fills imports and caches.
    trio.run(program)
    counter = Interrupter(None)
    with counter.installed():
        trio.run(program)
    before = remains()
    unraisable: list[str] = []
    usual_hook, sys.unraisablehook = sys.unraisablehook, lambda entry: unraisable.append(repr(entry.exc_value))
    problems = []
    stride = 1 if count == 0 else max(1, counter.count // count)
    try:
        for place in range(1, counter.count + 1, stride):
            interrupter = Interrupter(place)
            outcome: list[BaseException] = []
            try:
                with interrupter.installed():
                    trio.run(program)
            except BaseException as error:
                outcome = leaves(error)
            gc.collect()
            if not interrupter.where:
                continue  # The timing of threads varies, so this run had fewer instructions.
            if not outcome or any(type(error) is not KeyboardInterrupt for error in outcome):
                problems.append(f"{interrupter.where}: raised {[*map(repr, outcome)] or 'nothing'}")
            if remains()[1] != before[1] or remains()[0] > before[0]:
                problems.append(f"{interrupter.where}: left {remains()}, before {before}")
                before = remains()
            if unraisable:
                problems.append(f"{interrupter.where}: ignored {unraisable}")
                unraisable.clear()
    finally:
        sys.unraisablehook = usual_hook
    return problems


@pytest.fixture
def own_signals() -> Iterator[None]:
    """Restore Python's own SIGINT handler, because Trio raises KeyboardInterrupt only if no other handler is
    installed.
    """
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, usual)


async def use_fake_engine() -> None:
    async with open_fake_engine() as engine:

        async def read() -> None:
            async with engine.generate("ab", SamplingParams(max_tokens=3)) as response:
                async for _ in response:
                    pass

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            nursery.start_soon(read)
        async with engine.generate("abc", SamplingParams(max_tokens=9)) as response:
            await anext(response)
    assert_all_free(engine)


def test_interrupted_fake_engine_leaks_nothing(own_signals: None) -> None:
    assert sweep(use_fake_engine, INTERRUPTS) == []


def test_interrupted_real_engine_leaks_nothing(own_signals: None, tmp_path: Path) -> None:
    checkpoint = tmp_path / "tiny"
    run_random_checkpoint("tiny", checkpoint, seed=0)

    async def use() -> None:
        async with (
            trioserve.open_engine(str(checkpoint), threads=1, kv_cache_memory=0.004) as engine,
            engine.generate([1, 2, 3], SamplingParams(max_tokens=2)) as response,
        ):
            async for _ in response:
                pass

    assert sweep(use, INTERRUPTS // 4) == []
