"""Tests that latents equal those of diffusers' pipelines, for all families and samplers."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import diffusers
import numpy as np
import pytest
import torch

from trioserve.contracts.image_generation import RGBImage, network_steps
from trioserve.model.diffusion.directory import ImageDirectory, describe
from trioserve.model.diffusion.families.flux import packed
from trioserve.model.diffusion.runner import DiffusionRunner

pytestmark = pytest.mark.slow

SCHEDULERS = {
    "ddim": "DDIMScheduler",
    "dpm++": "DPMSolverMultistepScheduler",
    "euler": "EulerDiscreteScheduler",
    "euler-ancestral": "EulerAncestralDiscreteScheduler",
    "flow-euler": "FlowMatchEulerDiscreteScheduler",
    "pndm": "PNDMScheduler",
}
SEED = 2**40 + 5


class Case:
    """A pipeline of diffusers and our runner, loaded from the same directory."""

    def __init__(self, path: Path, driver: ModuleType, runner: DiffusionRunner, pipeline: str) -> None:
        self.driver = driver
        self.runner = runner
        self.description = describe(ImageDirectory(path), served_names=("tiny",), source="tiny")
        self.pipeline = getattr(diffusers, pipeline).from_pretrained(path)
        self.pipeline.set_progress_bar_config(disable=True)
        self.config = dict(self.pipeline.scheduler.config)

    def use(self, sampler: str) -> None:
        # DDIM that is created from another scheduler's config would clamp clean latents. No model here was trained for
        # that.
        config = {"clip_sample": False, **self.config, "skip_prk_steps": True}
        self.pipeline.scheduler = getattr(diffusers, SCHEDULERS[sampler]).from_config(config)

    def theirs(self, *arguments: Any, **keywords: Any) -> torch.Tensor:
        generator = torch.Generator().manual_seed(SEED)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found: torch.Tensor = self.pipeline(
                *arguments, generator=generator, output_type="latent", **keywords
            ).images
        return found

    def ours(self, prompt: str | int, **keywords: Any) -> torch.Tensor:
        keywords.setdefault("size", (self.description.width, self.description.height))
        keywords["steps"] = network_steps(keywords["sampler"], keywords["steps"])
        (found,) = self.driver.latents(self.runner, [self.driver.request("r", prompt, seed=SEED, **keywords)])
        return found


def check(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Compare latents. Latents of random networks grow, so the tolerance grows with them."""
    assert ours.shape == theirs.shape
    assert float((ours - theirs).abs().max()) <= 1e-4 * max(1.0, float(theirs.abs().max()) / 10)


FAMILIES = {
    "stable-diffusion-xl": "StableDiffusionXLPipeline",
    "pixart": "PixArtAlphaPipeline",
    "pixart-sigma": "PixArtSigmaPipeline",
    "pixart-large": "PixArtAlphaPipeline",
    "flux": "FluxPipeline",
    "flux-distilled": "FluxPipeline",
}
PIXART = {"negative_prompt": "dog", "use_resolution_binning": False}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "stable-diffusion-xl": {"negative_prompt": "dog"},
    "pixart": PIXART,
    "pixart-sigma": PIXART,
    "pixart-large": PIXART,
    "flux": {},
    "flux-distilled": {"max_sequence_length": 256},
}


@pytest.fixture(scope="module", params=FAMILIES)
def other(request, checkpoint: Callable[[str], Path], driver: ModuleType, runner: Callable[[str], DiffusionRunner]):
    name = request.param
    return name, Case(checkpoint(name), driver, runner(name), FAMILIES[name])


@pytest.mark.parametrize("guidance", [1.0, 4.0])
@pytest.mark.parametrize("steps", [2, 5])
def test_each_image_family_gives_the_latents_of_its_pipeline(other, steps, guidance):
    name, case = other
    for sampler in case.description.samplers:
        if sampler == "euler-ancestral":
            continue  # Pipelines draw other noise in a step. A test below replaces this noise.
        case.use(sampler)
        theirs = case.theirs(
            "a cat", guidance_scale=guidance, num_inference_steps=steps, width=24, height=16, **ARGUMENTS[name]
        )
        ours = case.ours(
            "a cat",
            negative=ARGUMENTS[name].get("negative_prompt"),
            steps=steps,
            guidance=guidance,
            sampler=sampler,
            size=(24, 16),
            has_guided_rows=case.description.has_guided_rows,
        )
        check(packed(ours) if name.startswith("flux") else ours, theirs)


def test_xl_without_negative_prompt_is_guided_by_zero_embeddings(checkpoint, driver, runner):
    case = Case(checkpoint("stable-diffusion-xl"), driver, runner("stable-diffusion-xl"), "StableDiffusionXLPipeline")
    theirs = case.theirs("a cat", guidance_scale=4.0, num_inference_steps=3)
    check(case.ours("a cat", steps=3, guidance=4.0, sampler="euler"), theirs)


@pytest.fixture(scope="module")
def dit(checkpoint: Callable[[str], Path], driver: ModuleType, runner: Callable[[str], DiffusionRunner]) -> Case:
    return Case(checkpoint("dit"), driver, runner("dit"), "DiTPipeline")


@pytest.fixture(scope="module")
def sd(checkpoint: Callable[[str], Path], driver: ModuleType, runner: Callable[[str], DiffusionRunner]) -> Case:
    return Case(checkpoint("stable-diffusion"), driver, runner("stable-diffusion"), "StableDiffusionPipeline")


@pytest.mark.parametrize("guidance", [1.0, 4.0])
@pytest.mark.parametrize("steps", [1, 2, 5, 20])
@pytest.mark.parametrize("sampler", ["ddim", "dpm++", "pndm"])
def test_dit_gives_the_latents_of_its_pipeline(dit, sampler, steps, guidance, monkeypatch):
    dit.use(sampler)
    decoded: list[torch.Tensor] = []
    decode = dit.pipeline.vae.decode
    # This pipeline has no output_type "latent", so its input of the VAE is recorded.
    monkeypatch.setattr(dit.pipeline.vae, "decode", lambda latent: (decoded.append(latent), decode(latent))[1])
    dit.pipeline(
        [3],
        guidance_scale=guidance,
        num_inference_steps=steps,
        generator=torch.Generator().manual_seed(SEED),
        output_type="np",
    )
    ours = dit.ours(3, steps=steps, guidance=guidance, sampler=sampler)
    check(ours, decoded[0] * dit.pipeline.vae.config.scaling_factor)


def test_dit_with_euler_scales_the_first_noise_by_its_schedule(dit):
    """Compare with a loop over the scheduler, because DiTPipeline forgets to scale the first latent."""
    dit.use("euler")
    scheduler, network = dit.pipeline.scheduler, dit.pipeline.transformer
    scheduler.set_timesteps(6)
    latent = torch.randn((1, 4, 4, 4), generator=torch.Generator().manual_seed(SEED)) * scheduler.init_noise_sigma
    with torch.no_grad():
        for timestep in scheduler.timesteps:
            predicted = network(
                scheduler.scale_model_input(latent, timestep), timestep=timestep[None], class_labels=torch.tensor([3])
            ).sample[:, :4]
            latent = scheduler.step(predicted, timestep, latent).prev_sample
    check(dit.ours(3, steps=6, sampler="euler"), latent)


@pytest.mark.parametrize("guidance", [1.0, 4.0])
@pytest.mark.parametrize("steps", [1, 2, 5, 20])
@pytest.mark.parametrize("sampler", ["ddim", "dpm++", "euler", "pndm"])
def test_stable_diffusion_gives_the_latents_of_its_pipeline(sd, sampler, steps, guidance):
    sd.use(sampler)
    theirs = sd.theirs(
        "a cat", negative_prompt="dog", guidance_scale=guidance, num_inference_steps=steps, width=24, height=16
    )
    check(sd.ours("a cat", negative="dog", steps=steps, guidance=guidance, sampler=sampler, size=(24, 16)), theirs)


@pytest.mark.parametrize(
    "settings",
    [
        {"solver_order": 3},
        {"solver_order": 1},
        {"solver_type": "heun", "use_karras_sigmas": True},
        {"lower_order_final": False, "final_sigmas_type": "sigma_min"},
        {"timestep_spacing": "trailing", "prediction_type": "v_prediction"},
        {"euler_at_final": True, "prediction_type": "sample"},
    ],
    ids=["third-order", "first-order", "heun-karras", "to-the-least-sigma", "v", "sample"],
)
@pytest.mark.parametrize("steps", [4, 16])
def test_dpm_settings_of_the_scheduler_config_are_used(sd, driver, settings, steps):
    from trioserve.model.diffusion.solvers import Solver

    config = {**sd.config, **settings}
    theirs_scheduler = diffusers.DPMSolverMultistepScheduler.from_config(config)
    sd.pipeline.scheduler = theirs_scheduler
    theirs = sd.theirs("a cat", guidance_scale=1.0, num_inference_steps=steps)
    solvers, sd.runner.beginning.solvers = sd.runner.beginning.solvers, {"dpm++": Solver("dpm++", config)}
    try:
        check(sd.ours("a cat", steps=steps, sampler="dpm++"), theirs)
    finally:
        sd.runner.beginning.solvers = solvers


@pytest.mark.parametrize("spacing", ["leading", "trailing", "linspace"])
@pytest.mark.parametrize("steps", [2, 3, 4, 7, 13])
def test_pndm_spacing_of_the_scheduler_config_is_used(sd, spacing, steps):
    from trioserve.model.diffusion.solvers import Solver

    config = {**sd.config, "timestep_spacing": spacing, "skip_prk_steps": True}
    sd.pipeline.scheduler = diffusers.PNDMScheduler.from_config(config)
    theirs = sd.theirs("a cat", guidance_scale=1.0, num_inference_steps=steps)
    solvers, sd.runner.beginning.solvers = sd.runner.beginning.solvers, {"pndm": Solver("pndm", config)}
    try:
        check(sd.ours("a cat", steps=steps, sampler="pndm"), theirs)
    finally:
        sd.runner.beginning.solvers = solvers


@pytest.mark.parametrize(
    ("sampler", "prediction"),
    [
        *itertools.product(["ddim", "euler"], ["epsilon", "v_prediction", "sample"]),
        *itertools.product(["pndm"], ["epsilon", "v_prediction"]),
    ],
)
def test_prediction_type_of_the_scheduler_config_is_used(sd, sampler, prediction):
    from trioserve.model.diffusion.solvers import Solver

    config = {
        **sd.config,
        "prediction_type": prediction,
        "clip_sample": prediction == "epsilon",
        "skip_prk_steps": True,
    }
    sd.pipeline.scheduler = getattr(diffusers, SCHEDULERS[sampler]).from_config(config)
    theirs = sd.theirs("a cat", guidance_scale=1.0, num_inference_steps=6)
    solvers, sd.runner.beginning.solvers = sd.runner.beginning.solvers, {sampler: Solver(sampler, config)}
    try:
        check(sd.ours("a cat", steps=6, sampler=sampler), theirs)
    finally:
        sd.runner.beginning.solvers = solvers


@pytest.mark.parametrize(
    ("sampler", "module", "settings"),
    [
        ("euler-ancestral", "scheduling_euler_ancestral_discrete", {}),
        ("dpm++", "scheduling_dpmsolver_multistep", {"algorithm_type": "sde-dpmsolver++"}),
        ("dpm++", "scheduling_dpmsolver_multistep", {"algorithm_type": "sde-dpmsolver++", "solver_type": "heun"}),
    ],
    ids=["ancestral", "sde", "sde-heun"],
)
def test_stochastic_step_adds_noise_of_seed_and_step(sd, sampler, module, settings, monkeypatch):
    from trioserve.model.diffusion.runner import step_noise
    from trioserve.model.diffusion.solvers import Solver

    config = {**sd.config, **settings}
    sd.pipeline.scheduler = getattr(diffusers, SCHEDULERS[sampler]).from_config(config)
    steps = iter(range(100))
    monkeypatch.setattr(
        getattr(diffusers.schedulers, module),
        "randn_tensor",
        lambda shape, **_: step_noise(SEED, next(steps), torch.empty(shape)),
    )
    theirs = sd.theirs("a cat", guidance_scale=2.0, num_inference_steps=7)
    solvers, sd.runner.beginning.solvers = sd.runner.beginning.solvers, {sampler: Solver(sampler, config)}
    try:
        check(sd.ours("a cat", steps=7, guidance=2.0, sampler=sampler), theirs)
    finally:
        sd.runner.beginning.solvers = solvers
    assert next(steps) == 7


def picture(width: int, height: int, seed: int) -> RGBImage:
    return RGBImage(width, height, np.random.default_rng(seed).integers(0, 256, 3 * width * height, np.uint8).tobytes())


def half_mask(width: int, height: int) -> RGBImage:
    return RGBImage(
        width,
        height,
        b"".join(b"\xff" * 3 if x < width // 2 else b"\0" * 3 for _ in range(height) for x in range(width)),
    )


def as_image(given: RGBImage) -> Any:
    from PIL import Image

    return Image.frombytes("RGB", (given.width, given.height), given.rgb)


@pytest.mark.parametrize("strength", [0.5, 0.9, 1.0])
@pytest.mark.parametrize("is_masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize(
    ("family", "sampler"),
    [
        ("StableDiffusion", "ddim"),
        ("StableDiffusion", "dpm++"),
        ("StableDiffusion", "euler"),
        ("StableDiffusion", "pndm"),
        ("StableDiffusionXL", "euler"),
        ("StableDiffusionXL", "dpm++"),
    ],
)
def test_edited_image_equals_that_of_the_pipelines(checkpoint, driver, runner, family, sampler, is_masked, strength):
    name = {"StableDiffusion": "stable-diffusion", "StableDiffusionXL": "stable-diffusion-xl"}[family]
    case = Case(checkpoint(name), driver, runner(name), f"{family}Pipeline")
    case.use(sampler)
    kind = getattr(diffusers, f"{family}{'Inpaint' if is_masked else 'Img2Img'}Pipeline")
    components = {**case.pipeline.components, "scheduler": case.pipeline.scheduler}
    pipeline = kind(**components, **({"requires_safety_checker": False} if family == "StableDiffusion" else {}))
    pipeline.set_progress_bar_config(disable=True)
    given, mask = picture(16, 16, 1), half_mask(16, 16)
    more = {"mask_image": as_image(mask), "width": 16, "height": 16} if is_masked else {}
    theirs = pipeline(
        "a cat",
        image=as_image(given),
        strength=strength,
        guidance_scale=3.0,
        num_inference_steps=6,
        generator=torch.Generator().manual_seed(SEED),
        output_type="latent",
        **more,
    ).images
    ours = case.ours(
        "a cat",
        steps=6,
        skipped=6 - int(6 * strength),
        guidance=3.0,
        sampler=sampler,
        image=given,
        mask=mask if is_masked else None,
    )
    check(ours, theirs)


@pytest.mark.parametrize("strength", [0.5, 1.0])
@pytest.mark.parametrize("sampler", ["ddim", "euler", "pndm"])
def test_inpainting_network_reads_the_mask(checkpoint, driver, runner, sampler, strength):
    case = Case(checkpoint("inpainting"), driver, runner("inpainting"), "StableDiffusionInpaintPipeline")
    case.use(sampler)
    given, mask = picture(16, 16, 1), half_mask(16, 16)
    settings = {"guidance_scale": 3.0, "num_inference_steps": 6, "width": 16, "height": 16, "strength": strength}
    theirs = case.theirs("a cat", image=as_image(given), mask_image=as_image(mask), **settings)
    skipped = 6 - int(6 * strength)
    ours = case.ours("a cat", steps=6, skipped=skipped, guidance=3.0, sampler=sampler, image=given, mask=mask)
    check(ours, theirs)


def test_inpainting_network_without_input_image_makes_a_whole_image(checkpoint, driver, runner):
    case = Case(checkpoint("inpainting"), driver, runner("inpainting"), "StableDiffusionInpaintPipeline")
    white = RGBImage(16, 16, b"\xff" * 768)
    theirs = case.theirs(
        "a cat",
        image=as_image(white),
        mask_image=as_image(white),
        guidance_scale=3.0,
        num_inference_steps=4,
        width=16,
        height=16,
    )
    check(case.ours("a cat", steps=4, guidance=3.0, sampler="ddim"), theirs)
