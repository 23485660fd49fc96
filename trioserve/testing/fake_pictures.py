"""A model of pictures that is not one: each picture has one colour, which follows from what was asked, from its seed
and from the steps that it has taken, and from nothing else.
"""

from __future__ import annotations

import zlib

import msgspec

from trioserve.contracts.image_generation import ImageTask, Picture
from trioserve.contracts.iterative import IterativeRequest
from trioserve.testing.fake_iterative_executor import FakeIterativeExecutor, denoised

__all__ = ["FakePictureExecutor", "picture_after"]


def picture_after(request: IterativeRequest, steps_done: int) -> Picture:
    """What a picture is when so many steps are done, whatever else runs. request: its task is an ImageTask."""
    return _picture(request, denoised(request, _encoded(request), steps_done))


class FakePictureExecutor(FakeIterativeExecutor):
    """See FakeIterativeExecutor: a slot that has two owners, or was given away too early, is an AssertionError."""

    def encoded(self, request: IterativeRequest) -> int:
        return _encoded(request)

    def shown(self, request: IterativeRequest, latent: int) -> Picture:
        return _picture(request, latent)


def _encoded(request: IterativeRequest) -> int:
    task = request.task
    assert isinstance(task, ImageTask), f"{request.id} asks for no picture"
    asked = msgspec.msgpack.encode((request.seed, request.step_count, request.is_guided, task))
    return zlib.crc32(asked)


def _picture(request: IterativeRequest, latent: int) -> Picture:
    task = request.task
    assert isinstance(task, ImageTask)
    return Picture(task.width, task.height, latent.to_bytes(4, "big")[1:] * (task.width * task.height))
