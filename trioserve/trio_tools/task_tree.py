"""Which tasks live, who their parents are, and where each of them waits: a look at a Trio program from inside.

Names of functions and lines of code, and nothing that a variable holds.
"""

from __future__ import annotations

import os
from collections import deque
from types import FrameType
from typing import Any

import msgspec
import trio

__all__ = ["TASKS_MAX", "TaskTree", "TaskView", "task_tree"]

TASKS_MAX = 512  # a look takes some ten microseconds for each, in which nothing else runs
FRAMES_MAX = 12  # of one task, the innermost
DEPTH_MAX = 64  # of tasks in tasks, as JSON has them


class TaskView(msgspec.Struct, omit_defaults=True):
    """waits_in: where in this package, or in what else runs in the program, it waits; waits_for: the function of Trio
    that it waits in there. is_running: it is the one that looks. frames: from the outermost to the innermost, as
    `file:line function`. nurseries: the tasks in each one that is open."""

    name: str
    waits_in: str | None = None
    waits_for: str | None = None
    is_running: bool = False
    frames: list[str] = []
    nurseries: list[list[TaskView]] = []


class TaskTree(msgspec.Struct):
    """task_count: of all that live. shown_count: of those in the tree, at most TASKS_MAX, the outermost first."""

    task_count: int
    shown_count: int
    root: TaskView | None


def task_tree(tasks_max: int = TASKS_MAX) -> TaskTree:
    """As it is now. Must be called in a task."""
    root = trio.lowlevel.current_root_task()
    living = trio.lowlevel.current_statistics().tasks_living
    if root is None:
        return TaskTree(living, 0, None)
    current = trio.lowlevel.current_task()
    top, shown = _view(root, current), 1
    queue: deque[tuple[trio.lowlevel.Task, TaskView, int]] = deque([(root, top, 0)])
    while queue:
        task, view, depth = queue.popleft()
        if depth == DEPTH_MAX:
            continue
        for nursery in task.child_nurseries:
            children: list[TaskView] = []
            for child in nursery.child_tasks:
                if shown == tasks_max:
                    break
                shown += 1
                children.append(_view(child, current))
                queue.append((child, children[-1], depth + 1))
            view.nurseries.append(children)
    return TaskTree(living, shown, top)


def _view(task: trio.lowlevel.Task, current: trio.lowlevel.Task) -> TaskView:
    if task is current:
        return TaskView(task.name, is_running=True)
    frames: deque[tuple[Any, int]] = deque(maxlen=FRAMES_MAX)
    for frame, line in task.iter_await_frames():
        frames.append((frame, line))
    waits_in = waits_for = None
    for frame, line in frames:
        if _is_trio(frame):
            waits_for = waits_for or f"trio.{frame.f_code.co_qualname}"
        else:
            waits_in, waits_for = _place(frame, line), None
    return TaskView(
        task.name, waits_in=waits_in, waits_for=waits_for, frames=[_place(frame, line) for frame, line in frames]
    )


def _is_trio(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in ("trio", "outcome")


def _place(frame: FrameType, line: int) -> str:
    """Where a package's file is on this machine is nobody's business."""
    module = str(frame.f_globals.get("__name__", ""))
    file = os.path.basename(frame.f_code.co_filename)
    folder = module.rpartition(".")[0].replace(".", "/")
    return f"{folder}/{file}:{line} {frame.f_code.co_qualname}".lstrip("/")
