"""Converts diffusers' schedulers to the coefficients of denoising steps (`SolverStep`).

Timesteps and noise levels come from the scheduler, including the spacing, shift and training values of its config. The
scheduler's `step` method is not called, because a scheduler object has a state and serves only one request. This module
computes the coefficients of the linear combination that `step` would compute.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import diffusers
import numpy as np

from trioserve.contracts.errors import ModelLoadError
from trioserve.contracts.image_generation import PNDM
from trioserve.model.diffusion.family import Schedule, SolverStep

__all__ = ["Solver"]

# Schedules in the cache. A schedule of 50 steps needs about 20 KiB and takes a millisecond to compute.
SCHEDULES_MAX = 256

Weights = tuple[float, float]


class Solver:
    """One sampler with the noise levels of a model.

    Args:
        name: name of the sampler.
        config: config of any diffusers scheduler, in the format that `from_config` accepts.

    Raises:
        ModelLoadError: the config is damaged, or uses an option that is not implemented.
    """

    def __init__(self, name: str, config: dict[str, Any]) -> None:
        class_name, self._steps = _SOLVERS[name]
        self.name = name
        try:
            self._scheduler: Any = getattr(diffusers, class_name).from_config(config, **_SETTINGS.get(name, {}))
        except Exception as error:  # diffusers does not validate the file, so a bad file can raise any exception.
            raise ModelLoadError(f"scheduler_config.json: {class_name} cannot be created from it: {error}") from error
        self._schedules: dict[tuple[int, int, int], Schedule] = {}
        self._check()

    def schedule(self, step_count: int, start: int, token_count: int) -> Schedule:
        """Return the denoising steps of a request.

        Args:
            step_count: steps of the whole schedule.
            start: number of first steps that are skipped.
            token_count: network tokens of the image. The noise levels of some models depend on it.

        Raises:
            ValueError: there are more steps than noise levels.
        """
        key = (step_count, start, token_count)
        found = self._schedules.get(key)
        if found is None:
            if len(self._schedules) >= SCHEDULES_MAX:
                self._schedules.clear()
            try:
                found = self._steps(self._scheduler, step_count, start, token_count)
            # ArithmeticError: two noise levels are equal. IndexError: a step is after the last noise level.
            except (ArithmeticError, IndexError) as error:
                raise ValueError(f"noise levels are too close: {error}") from error
            self._schedules[key] = found
        return found

    def _check(self) -> None:
        config = self._scheduler.config
        for field, allowed in (
            ("thresholding", (False, None)),
            ("variance_type", (None, "fixed_small", "fixed_large")),
            ("algorithm_type", ("dpmsolver++", "sde-dpmsolver++", None)),
            ("stochastic_sampling", (False, None)),
            ("invert_sigmas", (False, None)),
        ):
            value = config.get(field)
            if value not in allowed:
                raise ModelLoadError(
                    f"scheduler_config.json: {field} is {value!r}, but sampler {self.name} supports "
                    f"{' or '.join(repr(one) for one in allowed if one is not None) or 'none'}: change it in the file"
                )
        if "prediction_type" in config:
            _clean(config.prediction_type, 0.5, 0.5)
        if config.get("algorithm_type") == "sde-dpmsolver++" and config.solver_order > 2:
            raise ModelLoadError(
                "scheduler_config.json: sde-dpmsolver++ supports solver_order 1 and 2: change it in the file"
            )


def _ddim(scheduler: Any, step_count: int, start: int, _token_count: int) -> Schedule:
    """Compute the steps of DDIM without noise (arXiv 2010.02502, formula 12, eta 0)."""
    scheduler.set_timesteps(step_count)
    config = scheduler.config
    # "trailing" spacing gives one timestep too many for some counts, because diffusers adds up a rounded stride.
    timesteps = [int(timestep) for timestep in scheduler.timesteps][:step_count]
    stride = config.num_train_timesteps // step_count
    limit = config.clip_sample_range if config.clip_sample else None
    steps: list[SolverStep] = []
    noised: list[Weights] = []
    for timestep in timesteps[start:]:
        alpha = float(scheduler.alphas_cumprod[timestep])
        before = timestep - stride
        next_alpha = float(scheduler.alphas_cumprod[before] if before >= 0 else scheduler.final_alpha_cumprod)
        signal, noise = math.sqrt(alpha), math.sqrt(1 - alpha)
        clean = _clean(config.prediction_type, signal, noise)
        # The step uses the noise that the network predicts, even if the clean latent was clamped.
        noise_of_latent, noise_of_output = _noise(config.prediction_type, signal, noise)
        left = math.sqrt(1 - next_alpha)
        steps.append(
            SolverStep(
                timestep=timestep,
                clean_of_latent=clean[0],
                clean_of_output=clean[1],
                clean_limit=limit,
                next_of_latent=left * noise_of_latent,
                next_of_output=left * noise_of_output,
                next_of_clean=math.sqrt(next_alpha),
            )
        )
        noised.append((signal, noise))
    return Schedule(steps=tuple(steps), initial_scale=1.0, noised=tuple(noised))


def _euler(scheduler: Any, step_count: int, start: int, _token_count: int) -> Schedule:
    """Compute Euler steps (arXiv 2206.00364, algorithm 2 without churn). A latent is image + sigma * noise."""
    return _sigma_steps(scheduler, step_count, start, lambda sigma, next_sigma: (next_sigma, 0.0))


def _euler_ancestral(scheduler: Any, step_count: int, start: int, _token_count: int) -> Schedule:
    """Compute ancestral Euler steps, as k-diffusion does: each step goes below the next sigma, then adds noise."""

    def down_and_up(sigma: float, next_sigma: float) -> Weights:
        up = next_sigma * math.sqrt(sigma**2 - next_sigma**2) / sigma
        return math.sqrt(next_sigma**2 - up**2), up

    return _sigma_steps(scheduler, step_count, start, down_and_up)


def _sigma_steps(scheduler: Any, step_count: int, start: int, aims_at: Callable[[float, float], Weights]) -> Schedule:
    """Compute steps from one sigma to a lower one.

    Args:
        scheduler: a scheduler of diffusers.
        step_count: steps of the whole schedule.
        start: number of first steps that are skipped.
        aims_at: function of a sigma and the next sigma. It returns the sigma after the step, and the sigma of the noise
            that is then added.
    """
    scheduler.set_timesteps(step_count)
    sigmas = [float(sigma) for sigma in scheduler.sigmas]
    steps: list[SolverStep] = []
    for index in range(start, step_count):
        sigma = sigmas[index]
        scale = 1 / math.sqrt(sigma**2 + 1)
        # The network's input has unit variance, and its noise has the standard deviation sigma / sqrt(sigma^2 + 1).
        of_latent, of_output = _clean(scheduler.config.prediction_type, scale, sigma * scale)
        aim, added = aims_at(sigma, sigmas[index + 1])
        kept = aim / sigma
        steps.append(
            SolverStep(
                timestep=float(scheduler.timesteps[index]),
                input_scale=scale,
                clean_of_latent=of_latent * scale,
                clean_of_output=of_output,
                next_of_latent=kept,
                next_of_clean=1 - kept,
                next_of_noise=added,
            )
        )
    return Schedule(
        steps=tuple(steps),
        initial_scale=float(scheduler.init_noise_sigma),
        noised=tuple((1.0, sigma) for sigma in sigmas[start:step_count]),
    )


def _dpm(scheduler: Any, step_count: int, start: int, _token_count: int) -> Schedule:
    """Compute steps of DPM-Solver++ up to the third order, from clean latents of earlier steps (arXiv 2211.01095)."""
    scheduler.set_timesteps(step_count)
    config = scheduler.config
    levels = [_level(float(sigma), is_flow=config.use_flow_sigmas) for sigma in scheduler.sigmas]
    steps: list[SolverStep] = []
    for index in range(start, step_count):
        signal, noise, _ = levels[index]
        clean = _clean(config.prediction_type, signal, noise)
        order = _dpm_order(config, index, step_count, index - start)
        steps.append(
            SolverStep(
                timestep=float(scheduler.timesteps[index]),
                clean_of_latent=clean[0],
                clean_of_output=clean[1],
                **_dpm_weights(config, levels, index, order),
            )
        )
    return Schedule(
        steps=tuple(steps),
        initial_scale=float(scheduler.init_noise_sigma),
        noised=tuple((signal, noise) for signal, noise, _ in levels[start:step_count]),
        history_count=config.solver_order - 1,
    )


def _flow(scheduler: Any, step_count: int, start: int, token_count: int) -> Schedule:
    """Compute Euler steps of a flow model.

    A latent is (1 - sigma) * image + sigma * noise, and the network predicts noise - image. The shift of the sigmas
    depends on the size of the image (arXiv 2403.03206).
    """
    config = scheduler.config
    arguments: dict[str, Any] = {"sigmas": np.linspace(1.0, 1 / step_count, step_count)}
    if config.use_dynamic_shifting:
        slope = (config.max_shift - config.base_shift) / (config.max_image_seq_len - config.base_image_seq_len)
        arguments["mu"] = config.base_shift + slope * (token_count - config.base_image_seq_len)
    scheduler.set_timesteps(**arguments)
    sigmas = [float(sigma) for sigma in scheduler.sigmas]
    steps = tuple(
        SolverStep(
            timestep=float(scheduler.timesteps[index]),
            clean_of_latent=1.0,
            clean_of_output=-sigmas[index],
            next_of_latent=1.0,
            next_of_output=sigmas[index + 1] - sigmas[index],
        )
        for index in range(start, step_count)
    )
    noised = tuple((1 - sigma, sigma) for sigma in sigmas[start:step_count])
    return Schedule(steps=steps, initial_scale=1.0, noised=noised)


def _pndm(scheduler: Any, step_count: int, start: int, _token_count: int) -> Schedule:
    """Compute steps of a linear multistep method over network outputs (arXiv 2202.09778, no Runge-Kutta steps).

    The steps match diffusers' PNDMScheduler with skip_prk_steps. The first step is computed twice. The second time, it
    uses the mean of the network's outputs before and after the step. Therefore, the network is called once more than
    there are noise levels (see network_steps).

    If an image is edited, the first steps are skipped. As in diffusers, the first two remaining steps are then computed
    like the repeated first step, even if their noise levels differ.
    """
    levels_count = step_count - 1 if step_count > 1 else 1
    scheduler.set_timesteps(levels_count)
    config = scheduler.config
    timesteps = [int(timestep) for timestep in scheduler.timesteps][:step_count]
    stride = config.num_train_timesteps // levels_count
    steps: list[SolverStep] = []
    noised: list[Weights] = []
    first: Weights = (1.0, 0.0)  # Weights of the first latent and of the first output in the second latent.
    for index, timestep in enumerate(timesteps[start:]):
        signal, noise = _signal_and_noise(scheduler, timestep)
        from_timestep = timestep + stride if index == 1 else timestep
        of_latent, of_output = _pndm_weights(scheduler, from_timestep, from_timestep - stride)
        weights: dict[str, Any]
        # The step with index 1 starts at the first latent again, and computes this latent from the second latent.
        if index == 1:
            of_second = of_latent / first[0]
            of_first_output = of_output / 2 - of_second * first[1]
            weights = {"of_latent": of_second, "of_output": of_output / 2, "of_earlier": (of_first_output,)}
        else:
            of_this, *of_earlier = (of_output * share for share in _PNDM_SHARES[min(index, 5)])
            weights = {"of_latent": of_latent, "of_output": of_this, "of_earlier": tuple(of_earlier)}
        if index == 0:
            first = of_latent, of_output
        clean = _clean(config.prediction_type, signal, noise)
        steps.append(
            SolverStep(
                timestep=timestep,
                clean_of_latent=clean[0],
                clean_of_output=clean[1],
                **{f"next_{name}": weight for name, weight in weights.items()},
            )
        )
        noised.append((signal, noise))
    return Schedule(
        steps=tuple(steps), initial_scale=1.0, noised=tuple(noised), history_count=4, remembers_outputs=True
    )


# Weights of network outputs, newest first, by the index of a step. The entry 5 is also used for all later steps. The
# output of step 1 has the weight 0 in all other steps.
_PNDM_SHARES: dict[int, tuple[float, ...]] = {
    0: (1.0,),
    2: (3 / 2, 0.0, -1 / 2),
    3: (23 / 12, -16 / 12, 0.0, 5 / 12),
    4: (55 / 24, -59 / 24, 37 / 24, 0.0, -9 / 24),
    5: (55 / 24, -59 / 24, 37 / 24, -9 / 24),
}


def _pndm_weights(scheduler: Any, timestep: int, next_timestep: int) -> Weights:
    """Return the weights of a latent and of a network output in a step (arXiv 2202.09778, formula 9)."""
    signal, noise = _signal_and_noise(scheduler, timestep)
    next_signal, next_noise = _signal_and_noise(scheduler, next_timestep)
    of_latent = next_signal / signal
    of_noise = -(next_signal**2 - signal**2) / (signal**2 * next_noise + signal * noise * next_signal)
    latent_of_noise, output_of_noise = _noise(scheduler.config.prediction_type, signal, noise)
    return of_latent + of_noise * latent_of_noise, of_noise * output_of_noise


def _signal_and_noise(scheduler: Any, timestep: int) -> Weights:
    alpha = float(scheduler.alphas_cumprod[timestep] if timestep >= 0 else scheduler.final_alpha_cumprod)
    return math.sqrt(alpha), math.sqrt(1 - alpha)


_SETTINGS: dict[str, dict[str, Any]] = {PNDM: {"skip_prk_steps": True}}
"""Config fields that override the file."""

_SOLVERS: dict[str, tuple[str, Callable[[Any, int, int, int], Schedule]]] = {
    "ddim": ("DDIMScheduler", _ddim),
    "dpm++": ("DPMSolverMultistepScheduler", _dpm),
    "euler": ("EulerDiscreteScheduler", _euler),
    "euler-ancestral": ("EulerAncestralDiscreteScheduler", _euler_ancestral),
    "flow-euler": ("FlowMatchEulerDiscreteScheduler", _flow),
    PNDM: ("PNDMScheduler", _pndm),
}


def _clean(prediction: str, signal: float, noise: float) -> Weights:
    """Return the weights of a latent and of a network output in the predicted clean image.

    Args:
        prediction: prediction_type of the scheduler.
        signal: weight of the image in the latent.
        noise: weight of the noise in the latent.
    """
    if prediction == "epsilon":
        return 1 / signal, -noise / signal
    if prediction == "v_prediction":
        return signal, -noise
    if prediction == "flow_prediction":
        return 1.0, -noise
    if prediction in ("sample", "original_sample"):
        return 0.0, 1.0
    raise ModelLoadError(
        f"scheduler_config.json: prediction_type is {prediction!r}, allowed are epsilon, v_prediction, sample"
    )


def _noise(prediction: str, signal: float, noise: float) -> Weights:
    """Return the weights of a latent and of a network output in the predicted noise. For arguments see `_clean`."""
    if prediction == "epsilon":
        return 0.0, 1.0
    if prediction == "v_prediction":
        return noise, signal
    return 1 / noise, -signal / noise


def _level(sigma: float, *, is_flow: bool) -> tuple[float, float, float]:
    """Return the weights of image and noise in a latent, and the logarithm of their ratio."""
    signal = 1 - sigma if is_flow else 1 / math.sqrt(sigma**2 + 1)
    noise = sigma if is_flow else sigma * signal
    if noise <= 0:
        return signal, noise, math.inf
    return signal, noise, math.log(signal) - math.log(noise) if signal > 0 else -math.inf


def _dpm_order(config: Any, index: int, step_count: int, steps_done: int) -> int:
    """Return the order of a DPM-Solver++ step.

    First steps have a lower order, because few earlier results exist. Last steps have a lower order, because the noise
    level falls fast.
    """
    is_few = config.lower_order_final and step_count < 15
    if index == step_count - 1 and (config.euler_at_final or is_few or config.final_sigmas_type == "zero"):
        return 1
    order_max = 2 if index == step_count - 2 and is_few else 3
    return min(int(config.solver_order), steps_done + 1, order_max)


def _dpm_weights(config: Any, levels: list[tuple[float, float, float]], index: int, order: int) -> dict[str, Any]:
    """Return the `next_of_*` weights of a step from noise level `index` to the next noise level."""
    (_, noise, level), (next_signal, next_noise, next_level) = levels[index], levels[index + 1]
    width = next_level - level
    is_sde = config.algorithm_type == "sde-dpmsolver++"
    # The step of the stochastic variant is twice as long, and then adds noise.
    reach = 2 * width if is_sde else width
    of_latent = next_noise / noise * (math.exp(-width) if is_sde else 1.0)
    first = -next_signal * math.expm1(-reach)
    weights: dict[str, Any] = {
        "next_of_latent": of_latent,
        "next_of_noise": next_noise * math.sqrt(-math.expm1(-2 * width)) if is_sde else 0.0,
    }
    if order == 1:
        return {**weights, "next_of_clean": first}
    ratio = (level - levels[index - 1][2]) / width
    linear = next_signal * (math.expm1(-reach) / reach + 1.0)
    if order == 2:
        slope = (0.5 * first if config.solver_type == "midpoint" else linear) / ratio
        return {**weights, "next_of_clean": first + slope, "next_of_earlier": (-slope,)}
    earlier_ratio = (levels[index - 1][2] - levels[index - 2][2]) / width
    square = -next_signal * ((math.expm1(-reach) + reach) / reach**2 - 0.5)
    # The paper's D1 is near + ratio / span * (near - far), and D2 is (near - far) / span. `near` and `far` stand for
    # differences of clean latents.
    span = ratio + earlier_ratio
    of_near = linear * (1 + ratio / span) + square / span
    of_far = -linear * ratio / span - square / span
    near, far = of_near / ratio, of_far / earlier_ratio
    return {**weights, "next_of_clean": first + near, "next_of_earlier": (far - near, -far)}
