"""Tests of the runner: a failure ends one request only, an abandoned step ends early, and latents become images."""

from __future__ import annotations

import msgspec
import pytest
import torch

from trioserve.contracts.events import IterativePhase
from trioserve.contracts.image_generation import IterativePlan, LatentMove, RGBImage
from trioserve.contracts.step import IsAbandoned
from trioserve.model.diffusion.components import image_of, image_tensor, mask_tensor
from trioserve.model.diffusion.runner import Abandoned, Abandoning
from trioserve.model.diffusion.solvers import Solver

ENCODE, DENOISE, DECODE = IterativePhase.ENCODE, IterativePhase.DENOISE, IterativePhase.DECODE


@pytest.fixture
def dit(runner):
    return runner("dit")


def pictures(driver, count, **keywords):
    return [
        driver.request(f"r{index}", index, **{"size": (8, 8), "sampler": "ddim", "seed": index, **keywords})
        for index in range(count)
    ]


def test_other_images_continue_if_one_request_cannot_be_encoded(driver, dit):
    good, bad = pictures(driver, 2)[1], driver.request("bad", 1000, size=(8, 8), sampler="ddim")
    text = driver.request("text", "a cat", size=(8, 8), sampler="ddim")
    sampler = driver.request("sampler", 3, size=(8, 8), sampler="heun")
    many = driver.request("many", 3, size=(8, 8), sampler="ddim", steps=1001)
    result = driver.Driver(dit, [good, bad, text, sampler, many]).run(ENCODE, [bad, good, text, sampler, many])
    assert set(result.errors) == {"bad", "text", "sampler", "many"}
    assert "classes 0 to 999" in result.errors["bad"]
    assert "ddim, dpm++, euler" in result.errors["sampler"]
    assert "1001 steps" in result.errors["many"]
    assert dit.slots[0] is not None


@pytest.mark.parametrize(("sampler", "steps"), [("dpm++", 1000), ("ddim", 1000), ("dpm++", 3000)])
def test_other_images_continue_if_one_request_has_impossible_steps(driver, tiny, tmp_path, sampler, steps):
    """Use step counts for which diffusers' schedulers give two equal noise levels, or a step after the last one."""
    path = tiny.save_dit(tmp_path / "dit", timestep_spacing="leading", steps_offset=1)
    runner = driver.load(path, slot_count=2)
    good, many = pictures(driver, 1)[0], driver.request("many", 3, size=(8, 8), sampler=sampler, steps=steps)
    result = driver.Driver(runner, [good, many]).run(ENCODE, [good, many])
    assert list(result.errors) == ["many"]
    assert f"{steps} steps are not possible with {sampler}" in result.errors["many"]


def test_trailing_schedule_has_the_requested_number_of_steps():
    """Check counts for which diffusers' own schedule with "trailing" spacing has one step more."""
    solver = Solver("ddim", {"num_train_timesteps": 1000, "timestep_spacing": "trailing"})
    assert all(len(solver.schedule(count, 0, 1).steps) == count for count in range(1, 251))


def test_latent_with_nan_fails_only_its_own_request(driver, dit):
    one, other = pictures(driver, 2)
    (expected,) = driver.latents(dit, [other])
    running = driver.Driver(dit, [one, other])
    running.run(ENCODE, [one, other])
    with torch.inference_mode():
        dit.slots[0].latent[0, 0, 0, 0] = torch.nan
    result = running.run(DENOISE, [one, other])
    assert list(result.errors) == [one.id]
    assert "NaN or infinite" in result.errors[one.id]
    running.finish([other])
    assert torch.equal(running.latent(other), expected)


def test_image_that_decodes_to_nan_fails_only_its_own_request(driver, dit, monkeypatch):
    one, other = pictures(driver, 2, steps=1, partial_every=1)
    running = driver.Driver(dit, [one, other])
    running.run(ENCODE, [one, other])
    decode, broken = dit._autoencoder.decode, [True, False, True, False]
    monkeypatch.setattr(
        dit._autoencoder, "decode", lambda latent: decode(latent) * (torch.nan if broken.pop(0) else 1.0)
    )
    partials = running.run(DENOISE, [one, other]).partials
    assert partials[one.id].rgb == bytes(192)
    result = running.run(DECODE, [one, other])
    assert "decoding gave NaN or infinite values" in result.errors[one.id]
    assert result.outputs == {other.id: partials[other.id]}


class LeftAt(IsAbandoned):
    """Reports that the step is abandoned after a number of calls."""

    def __init__(self, count: int) -> None:
        super().__init__(1)
        self.count = count

    def __call__(self) -> bool:
        self.count -= 1
        return self.count < 0


def looks(driver, dit, requests, phase) -> int:
    """Return how often a step of these requests checks whether it is abandoned."""
    counting = LeftAt(10**6)
    assert driver.Driver(dit, requests).run(phase, requests, is_abandoned=counting) is not None
    return 10**6 - counting.count


@pytest.mark.parametrize("phase", [ENCODE, DENOISE, DECODE], ids=["encode", "denoise", "decode"])
def test_abandoned_image_step_ends_between_two_network_blocks(driver, dit, phase):
    requests = pictures(driver, 2, steps=1)

    def ready():
        running = driver.Driver(dit, requests)
        running.run(ENCODE, requests)
        if phase is DECODE:
            running.run(DENOISE, requests)
        return running

    counting = LeftAt(10**6)
    assert ready().run(phase, requests, is_abandoned=counting) is not None
    asked = 10**6 - counting.count
    # The step checks once per request or group, and at each block of a network.
    assert asked >= 2 + (phase is not ENCODE) * 2
    for count in range(asked):
        assert ready().run(phase, requests, is_abandoned=LeftAt(count)) is None
    (expected,) = driver.latents(dit, requests[:1])  # The next requests are computed as usual.
    assert torch.isfinite(expected).all()


def test_missing_network_block_gets_no_hook():
    network = torch.nn.Module()
    # This network is like an autoencoder without attention.
    network.blocks = torch.nn.ModuleList([torch.nn.Linear(1, 1), None])
    abandoning = Abandoning([network])
    network.blocks[0](torch.ones(1))
    abandoning.begin(LeftAt(0))
    with pytest.raises(Abandoned):
        network.blocks[0](torch.ones(1))


def test_latents_are_moved_even_in_an_abandoned_step(driver, dit):
    (one,) = pictures(driver, 1)
    running = driver.Driver(dit, [one])
    running.run(ENCODE, [one])
    state = dit.slots[0]
    assert dit.execute(IterativePlan(1, DENOISE, (), 0, (LatentMove(0, 5),)), LeftAt(0)) is not None
    assert dit.slots[5] is state
    assert dit.slots[0] is None


def test_freed_and_abandoned_image_slots_are_emptied(driver, dit):
    one, other, gone = pictures(driver, 3)
    running = driver.Driver(dit, [one, other, gone])
    running.run(ENCODE, [one, other, gone])
    state = dit.slots[0]
    assert dit.execute(IterativePlan(1, DENOISE, (), 0, (LatentMove(0, 5),), freed=(2, 5))) is not None
    assert [dit.slots[slot] for slot in (0, 2, 5)] == [None, None, state]
    assert running.run(DENOISE, [other], is_abandoned=LeftAt(1)) is None
    assert dit.slots[1] is None


def test_request_becomes_an_image_and_releases_its_slot(driver, dit):
    (one,) = pictures(driver, 1, partial_every=2, steps=4)
    running = driver.Driver(dit, [one])
    running.run(ENCODE, [one])
    partials = [running.run(DENOISE, [one]).partials for _ in range(4)]
    assert [list(found) for found in partials] == [[], [one.id], [], [one.id]]
    image = running.run(DECODE, [one]).outputs[one.id]
    assert (image.width, image.height, len(image.rgb)) == (8, 8, 192)
    assert partials[3][one.id] == image  # The clean latent of the last step is the final latent.
    assert partials[1][one.id] != image
    assert dit.slots[0] is None


def test_seed_of_a_request_decides_its_image(driver, dit):
    one, other, again = (
        driver.request("a", 3, seed=seed, size=(8, 8), sampler="ddim") for seed in (2**64 - 1, 5, 2**64 - 1)
    )
    found = [driver.latents(dit, [request])[0] for request in (one, other, again)]
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])


def test_image_converts_to_a_tensor_and_back():
    image = RGBImage(2, 1, bytes((0, 128, 255, 1, 2, 3)))
    assert image_of(image_tensor(image, 2, 1)[0]) == image
    assert image_of(torch.full((3, 1, 1), 7.0)).rgb == b"\xff\xff\xff"
    resized = image_of(image_tensor(image, 8, 4)[0])
    assert (resized.width, resized.height) == (8, 4)


def test_inpainting_mask_contains_the_bright_pixels():
    mask = RGBImage(4, 1, bytes((128, 128, 128, 127, 127, 127, 255, 129, 0, 255, 128, 0)))
    assert mask_tensor(mask, 4, 1, 1).flatten().tolist() == [1, 0, 1, 0]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "family", ["dit", "stable-diffusion", "inpainting", "stable-diffusion-xl", "pixart-large", "flux"]
)
def test_latents_in_16_bits_are_close_to_float32(driver, tiny, runner, checkpoint, family, dtype):
    exact = runner(family)
    requests = [
        driver.request(
            f"r{index}",
            prompt,
            guidance=2.0,
            seed=index,
            size=tiny.SIZES.get(family, (24, 16)),
            sampler=next(iter(exact.beginning.solvers)),
            has_guided_rows=tiny.has_guided_rows(family),
        )
        for index, prompt in enumerate(tiny.prompts(family)[:2])
    ]
    # Both runs start from the noise of the 16-bit run, so that they do not compare two different draws.
    made = driver.load(checkpoint(family), dtype=dtype)
    running = driver.Driver(made, requests)
    assert not running.run(ENCODE, requests).errors
    comparing = driver.Driver(exact, requests)
    comparing.run(ENCODE, requests)
    for slot in (0, 1):
        exact.slots[slot] = msgspec.structs.replace(exact.slots[slot], latent=made.slots[slot].latent)
    running.finish(requests)
    comparing.finish(requests)
    for request in requests:
        found, expected = running.latent(request), comparing.latent(request)
        assert found.dtype is torch.float32
        assert float((found - expected).abs().max()) < 0.1 * float(expected.abs().max())
    assert set(running.run(DECODE, requests).outputs) == {"r0", "r1"}
