"""A fake image model. Each image has one colour, which depends only on the request, its seed and the number of steps
done.
"""

from __future__ import annotations

import zlib

import msgspec

from trioserve.contracts.image_generation import ImageTask, RGBImage
from trioserve.contracts.iterative import IterativeRequest
from trioserve.testing.fake_iterative_executor import FakeIterativeExecutor, denoised

__all__ = ["FakeImageExecutor", "image_after"]


def image_after(request: IterativeRequest, steps_done: int) -> RGBImage:
    """Return the image of a request after a number of steps. It does not depend on other requests.

    Args:
        request: a request whose task is an ImageTask.
        steps_done: number of denoising steps.
    """
    return _image(request, denoised(request, _encoded(request), steps_done))


class FakeImageExecutor(FakeIterativeExecutor):
    """Executor of a fake image model.

    Like FakeIterativeExecutor, it raises AssertionError if a slot has wrong content.
    """

    def encoded(self, request: IterativeRequest) -> int:
        return _encoded(request)

    def shown(self, request: IterativeRequest, latent: int) -> RGBImage:
        return _image(request, latent)


def _encoded(request: IterativeRequest) -> int:
    task = request.task
    assert isinstance(task, ImageTask), f"{request.id} does not request an image"
    asked = msgspec.msgpack.encode((request.seed, request.step_count, request.is_guided, task))
    return zlib.crc32(asked)


def _image(request: IterativeRequest, latent: int) -> RGBImage:
    task = request.task
    assert isinstance(task, ImageTask)
    return RGBImage(task.width, task.height, latent.to_bytes(4, "big")[1:] * (task.width * task.height))
