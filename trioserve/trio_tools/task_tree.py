"""The tasks of a Trio program, their parents, and the line where each task waits.

The tree contains names of functions and lines of code, but no values of variables.
"""

from __future__ import annotations

import os
from collections import deque
from types import FrameType
from typing import Any

import msgspec
import trio

__all__ = ["TASKS_MAX", "TaskTree", "TaskView", "task_tree"]

TASKS_MAX = 512  # To read one task takes about ten microseconds, and no other task runs meanwhile.
FRAMES_MAX = 12  # maximum number of stack frames that are shown of one task, the innermost ones
DEPTH_MAX = 64  # maximum nesting of tasks, because the tree is sent as nested JSON


class TaskView(msgspec.Struct, omit_defaults=True):
    """One task.

    Attributes:
        name: Name of the task.
        waits_in: Innermost line outside of Trio where the task waits.
        waits_for: Function of Trio in which the task waits.
        is_running: True for the task that creates the tree.
        frames: The task's stack frames as `file:line function`, outermost first.
        nurseries: For each open nursery of the task, the child tasks.
    """

    name: str
    waits_in: str | None = None
    waits_for: str | None = None
    is_running: bool = False
    frames: list[str] = []
    nurseries: list[list[TaskView]] = []


class TaskTree(msgspec.Struct):
    """The tasks of the program.

    Attributes:
        task_count: Number of all tasks.
        shown_count: Number of tasks in the tree, at most TASKS_MAX. The outermost tasks are shown first.
        root: Trio's root task, or None outside of a Trio run.
    """

    task_count: int
    shown_count: int
    root: TaskView | None


def task_tree(tasks_max: int = TASKS_MAX) -> TaskTree:
    """Return the current tree of tasks. Call this in a Trio task.

    Args:
        tasks_max: Maximum number of tasks to show.
    """
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
    """Return file, line and function of a frame, without the path of the package on this machine."""
    module = str(frame.f_globals.get("__name__", ""))
    file = os.path.basename(frame.f_code.co_filename)
    folder = module.rpartition(".")[0].replace(".", "/")
    return f"{folder}/{file}:{line} {frame.f_code.co_qualname}".lstrip("/")
