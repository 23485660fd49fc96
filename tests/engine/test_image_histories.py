"""Tests random histories of chat requests with images, which arrive, are cancelled, and wait for image memory.

At the end, all resources are free. Each request that did not leave has the same response as if it had run alone.
"""

from __future__ import annotations

import io
import random
from typing import Any

import pytest
import trio
import trio.lowlevel
from PIL import Image
from trio.testing import wait_all_tasks_blocked

from trioserve.contracts.media import ImageLimits
from trioserve.contracts.prompt import ChatPrompt
from trioserve.contracts.sampling import SamplingParams
from trioserve.core.encoder_outputs import EncoderOutputs
from trioserve.engine.image_encoding import ImageEncoding
from trioserve.testing.fake_engine import FakeEngine, open_fake_engine
from trioserve.testing.fake_image_encoder import FAKE_TILE_BYTES
from trioserve.testing.invariants import check_core

TEN = SamplingParams(max_tokens=10, ignore_eos=True, temperature=0.0)
OPTIONS: dict[str, Any] = {"block_count": 300, "block_size": 4, "max_model_len": 900, "max_num_batched_tokens": 64}


def image(colour: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (16, 16), (colour * 40, 40, 0)).save(file, "PNG")
    return file.getvalue()


PICTURES = [image(colour) for colour in range(4)]


def chat(colours: tuple[int, ...]) -> ChatPrompt:
    images: list[dict[str, Any]] = [{"type": "image", "image": PICTURES[colour]} for colour in colours]
    return ChatPrompt(messages=[{"role": "user", "content": [*images, {"type": "text", "text": "What?"}]}])


async def said(fake: FakeEngine, colours: tuple[int, ...]) -> str:
    async with fake.generate(chat(colours), TEN) as stream:
        return "".join([delta.text async for delta in stream])


async def play(seed: int, expected: dict[tuple[int, ...], str], rooms: tuple[int, ...] = (10, 12, 40)) -> None:
    """Play one history.

    Args:
        seed: seed of the history.
        expected: responses by the images of a request.
        rooms: possible limits of image memory, in tiles. Each holds at least two images.
    """
    rng = random.Random(seed)
    limits = ImageLimits(outputs_bytes_max=rng.choice(rooms) * FAKE_TILE_BYTES)
    async with open_fake_engine(image_limits=limits, max_queued_requests=50, **OPTIONS) as fake:
        scopes: list[trio.CancelScope] = []
        ends = 0

        async def ask(colours: tuple[int, ...], scope: trio.CancelScope) -> None:
            nonlocal ends
            with scope:
                assert await said(fake, colours) == expected[colours]
                ends += 1

        async with trio.open_nursery() as nursery:
            for _ in range(14):
                colours = tuple(rng.randrange(4) for _ in range(rng.randrange(1, 3)))
                scopes.append(trio.CancelScope())
                nursery.start_soon(ask, colours, scopes[-1])
                if rng.random() < 0.3:
                    fake.image_encoder.hold()
                for _ in range(rng.choice((0, 1, 3, 30))):
                    await trio.lowlevel.checkpoint()
                    assert fake.image_outputs.bytes_total <= limits.outputs_bytes_max
                if rng.random() < 0.4:
                    rng.choice(scopes).cancel()
                if rng.random() < 0.7:
                    fake.image_encoder.release()
                fake.image_outputs.check()
                check_core(fake.core)
            fake.image_encoder.release()
        await wait_all_tasks_blocked()
        fake.assert_all_free()
        assert ends


async def answers() -> dict[tuple[int, ...], str]:
    asked = [(first,) for first in range(4)] + [(first, second) for first in range(4) for second in range(4)]
    async with open_fake_engine(image_limits=ImageLimits(), **OPTIONS) as fake:
        return {colours: await said(fake, colours) for colours in asked}


@pytest.mark.slow
async def test_history_of_image_requests_frees_everything() -> None:
    expected = await answers()
    assert len(set(expected.values())) == len(expected)
    for seed in range(12):
        await play(seed, expected)


@pytest.mark.parametrize("bug", ["never released", "released early", "values of another"])
async def test_image_history_detects_a_planted_ownership_bug(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = await answers()
    if bug == "never released":
        monkeypatch.setattr(ImageEncoding, "release", lambda self, request: None)
    elif bug == "released early":
        prepare = ImageEncoding.prepare

        async def then_release(self: ImageEncoding, request: Any) -> None:
            await prepare(self, request)
            given = request.given
            self.release(request)
            request.given = given

        monkeypatch.setattr(ImageEncoding, "prepare", then_release)
    else:
        monkeypatch.setattr(EncoderOutputs, "values", _anybodys)
    with pytest.raises((AssertionError, ExceptionGroup)) as found:
        for seed in range(30):
            await play(seed, expected, rooms=(40,))  # There is enough memory, so that no request waits forever.
            if bug == "released early":  # Count the embeddings that running requests use.
                paused = open_fake_engine(image_limits=ImageLimits(), paused=True, **OPTIONS)
                async with paused as fake, fake.generate(chat((0,)), TEN):
                    assert fake.image_outputs.claimed_bytes
    error = found.value
    assert isinstance(error, AssertionError) or error.split(AssertionError)[1] is None, "something else is wrong"


def _anybodys(outputs: EncoderOutputs, name: bytes) -> object:
    """Return the embeddings of any image, as a planted bug."""
    found = [output.values for output in outputs._outputs.values() if output.values is not None]
    return found[0] if found else None
