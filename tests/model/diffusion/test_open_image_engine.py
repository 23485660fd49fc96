"""Tests of an image engine over real, tiny networks: results, and no leftovers after a request or an engine ends."""

from __future__ import annotations

import shutil
import threading

import pytest
import trio

import trioserve
from trioserve import assemble_images
from trioserve.assemble_images import open_configured_image_engine, open_image_engine
from trioserve.config import make_config
from trioserve.contracts.errors import InvalidRequest, ModelLoadError, StartupError
from trioserve.contracts.image_generation import ImageParams, RGBImage
from trioserve.model.diffusion.runner import DiffusionRunner

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def leaves_no_thread():
    before = set(threading.enumerate())
    yield
    assert [thread.name for thread in threading.enumerate() if thread not in before] == []


async def test_images_alone_and_together_are_equal(checkpoint):
    async with open_image_engine(checkpoint("stable-diffusion"), max_num_seqs=4, dtype="float32") as engine:
        params = ImageParams(steps=4, seed=1)
        (alone,) = await engine.generate_image("a cat", params)
        others: dict[str, tuple[RGBImage, ...]] = {}

        async def ask(text: str, **more: object) -> None:
            others[text] = await engine.generate_image(text, ImageParams(**{"seed": 1, "steps": 4, **more}))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, "a cat")
            for index, text in enumerate(("two dogs", "trees", "a lake", "night")):
                nursery.start_soon(
                    lambda i=index, t=text: ask(t, steps=3 + i, guidance=1.0 + i, n=1 + i % 2, sampler="euler")
                )
        assert others["a cat"] == (alone,)
        assert len(others["trees"]) == 2
        stats = engine.stats()
        assert (stats.slots_used, stats.kept_used, stats.running_count) == (0, 0, 0)


async def test_class_chosen_by_name_gives_an_image_and_partial_images(checkpoint):
    async with trioserve.open_image_engine(checkpoint("dit"), served_model_name=("digits",)) as engine:
        assert engine.model.name == "digits"
        assert engine.model.fingerprint is not None
        assert engine.model.fingerprint.endswith("+exact")
        params = ImageParams(steps=4, seed=2**64 - 1, partial_images=1)
        async with engine.generate_image("d3", params) as stream:
            deltas = [delta async for delta in stream]
        assert deltas[-1].image is not None
        assert (deltas[-1].image.width, deltas[-1].steps_done) == (8, 4)
        assert await engine.generate_image("3", params) == (deltas[-1].image,)
        with pytest.raises(InvalidRequest, match="1000 classes"):
            await engine.generate_image("a cat", params)


async def test_image_request_that_is_left_releases_its_slot(checkpoint):
    async with open_image_engine(checkpoint("stable-diffusion"), max_num_seqs=2) as engine:
        with trio.move_on_after(30):
            async with engine.generate_image("a cat", ImageParams(steps=200)) as stream:
                async for delta in stream:
                    assert engine.stats().slots_used == 1
                    if delta.steps_done >= 2:
                        break
        await engine.generate_image("b", ImageParams(steps=1))  # After this test step, the step in flight has ended.
        assert engine.stats().slots_used == 0


@pytest.mark.parametrize("level", [1, 2])
async def test_request_that_spans_a_sleep_gives_the_same_image(checkpoint, level):
    params = ImageParams(steps=20, seed=1)
    async with open_image_engine(checkpoint("stable-diffusion"), max_num_seqs=2, dtype="float32") as engine:
        (expected,) = await engine.generate_image("a cat", params)
        async with engine.generate_image("a cat", params) as stream:
            await stream.wait_until_begun()
            await engine.sleep(level, "keep")
            assert (engine.sleep_level, engine.stats().slots_used) == (level, 0)
            await engine.wake_up()
            assert await stream.pictures() == (expected,)
        assert engine.stats().slots_used == 0


async def test_image_request_survives_an_engine_restart(checkpoint, monkeypatch):
    async with open_image_engine(checkpoint("dit"), engine_restarts=1, dtype="float32") as engine:
        params = ImageParams(steps=6, seed=3)
        (expected,) = await engine.generate_image("1", params)
        predict, breaks = DiffusionRunner._predict, [3]

        def breaking(self, states):
            breaks[0] -= 1
            if breaks[0] == 0:
                raise RuntimeError("the device is lost")
            return predict(self, states)

        monkeypatch.setattr(DiffusionRunner, "_predict", breaking)
        assert await engine.generate_image("1", params) == (expected,)
        assert breaks[0] < 0


async def test_image_engine_restart_fails_if_the_weights_have_changed(checkpoint, tiny, tmp_path, monkeypatch):
    path = tmp_path / "model"
    shutil.copytree(checkpoint("dit"), path)
    with pytest.raises(trioserve.EngineFault) as raised:
        async with open_image_engine(path, engine_restarts=1) as engine:
            tiny.save_dit(path, learned_variance=True)

            def breaking(self, states):
                raise RuntimeError("the device is lost")

            monkeypatch.setattr(DiffusionRunner, "_predict", breaking)
            await engine.generate_image("1", ImageParams(steps=2))
    assert "has changed since the engine was opened" in str(raised.value.__cause__ or raised.value)


async def test_cancelled_loading_of_an_image_model_ends(checkpoint):
    loaded = []
    with trio.CancelScope() as scope:
        token = trio.lowlevel.current_trio_token()

        def cancel(progress) -> None:
            loaded.append(progress.what)
            trio.from_thread.run_sync(scope.cancel, trio_token=token)

        config = make_config(model=str(checkpoint("dit")))
        async with open_configured_image_engine(config, on_progress=cancel):
            pytest.fail("it was opened")
    assert scope.cancelled_caught
    assert len(loaded) == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"kept_slots": -1}, "kept_slots is -1"),
        ({"device": "tpu"}, "device"),
        ({"request_timeout": -1}, "timeout"),
    ],
    ids=["slots", "kept", "device", "deadline"],
)
async def test_error_names_the_image_option_out_of_range(checkpoint, options, says):
    with pytest.raises(StartupError, match=says):
        async with open_image_engine(checkpoint("dit"), **options):
            pytest.fail("it was opened")


async def test_missing_image_model_and_missing_extra_are_reported(tmp_path, monkeypatch):
    with pytest.raises(ModelLoadError, match="save_pretrained"):
        async with open_image_engine(tmp_path):
            pytest.fail("it was opened")

    def missing() -> None:
        raise StartupError("pip install 'trioserve[image]'")

    monkeypatch.setattr(assemble_images, "check_image_extra", missing)
    with pytest.raises(StartupError, match="pip install"):
        async with open_image_engine(tmp_path):
            pytest.fail("it was opened")


async def test_step_limit_is_at_most_the_number_of_noise_levels(checkpoint):
    async with open_image_engine(checkpoint("dit"), max_image_steps=5000) as engine:
        assert engine.limits.steps_max == 1000
        with pytest.raises(InvalidRequest, match="steps is 1001, at most 1000 denoising steps are allowed here"):
            await engine.generate_image("d3", ImageParams(steps=1001))
