"""diffusers' schedulers as weights: a schedule for each number of steps, which its scheduler is asked for once.

Timesteps and noise levels come from the scheduler, with all that its file says of spacing, shift and training; what it
does with them in `step` is written out here, since a scheduler object computes one request and has a state.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import diffusers
import numpy as np

from trioserve.contracts.errors import ModelLoadError
from trioserve.contracts.image_generation import PNDM
from trioserve.model.diffusion.solver_steps import Schedule, SolverStep

__all__ = ["Solver"]

SCHEDULES_MAX = 256  # kept; a schedule of 50 steps is about 20 KiB and takes a millisecond to make

Weights = tuple[float, float]


class Solver:
    """name: of the sampler. config: of a scheduler of any class, what diffusers' from_config takes. Raises
    ModelLoadError for what is not computed here."""

    def __init__(self, name: str, config: dict[str, Any]) -> None:
        class_name, self._steps = _SOLVERS[name]
        self.name = name
        try:
            self._scheduler: Any = getattr(diffusers, class_name).from_config(config, **_SETTINGS.get(name, {}))
        except Exception as error:  # it believes what the file says
            raise ModelLoadError(f"scheduler_config.json: {class_name} cannot be made of it: {error}") from error
        self._schedules: dict[tuple[int, int, int], Schedule] = {}
        self._check()

    def schedule(self, step_count: int, start: int, token_count: int) -> Schedule:
        """step_count: of the whole schedule, of which the first `start` are left out. token_count: of the picture, on
        which some models' noise depends. Raises ValueError for more steps than there are."""
        key = (step_count, start, token_count)
        found = self._schedules.get(key)
        if found is None:
            if len(self._schedules) >= SCHEDULES_MAX:
                self._schedules.clear()
            try:
                found = self._steps(self._scheduler, step_count, start, token_count)
            except (ArithmeticError, IndexError) as error:  # two steps at one noise level, or one behind the last
                raise ValueError(f"noise levels lie too close: {error}") from error
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
                    f"scheduler_config.json: {field} is {value!r}, and sampler {self.name} takes "
                    f"{' or '.join(repr(one) for one in allowed if one is not None) or 'none'}: change it in the file"
                )
        if "prediction_type" in config:
            _clean(config.prediction_type, 0.5, 0.5)
        if config.get("algorithm_type") == "sde-dpmsolver++" and config.solver_order > 2:
            raise ModelLoadError(
                "scheduler_config.json: sde-dpmsolver++ is computed up to solver_order 2: change it there"
            )


def _ddim(scheduler: Any, step_count: int, start: int, _token_count: int) -> Schedule:
    """arXiv 2010.02502, formula 12, without noise (eta 0)."""
    scheduler.set_timesteps(step_count)
    config = scheduler.config
    # Spaced by "trailing" there is one more for some numbers of steps, since diffusers adds up what was rounded.
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
        # Of the noise that the network sees, not of what is left of it when the picture was cut.
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
    """arXiv 2206.00364, algorithm 2 without churn: latents are a picture plus sigma times noise."""
    return _sigma_steps(scheduler, step_count, start, lambda sigma, next_sigma: (next_sigma, 0.0))


def _euler_ancestral(scheduler: Any, step_count: int, start: int, _token_count: int) -> Schedule:
    """The same, but each step goes further down, and adds noise up to the next sigma, as k-diffusion does."""

    def down_and_up(sigma: float, next_sigma: float) -> Weights:
        up = next_sigma * math.sqrt(sigma**2 - next_sigma**2) / sigma
        return math.sqrt(next_sigma**2 - up**2), up

    return _sigma_steps(scheduler, step_count, start, down_and_up)


def _sigma_steps(scheduler: Any, step_count: int, start: int, aims_at: Callable[[float, float], Weights]) -> Schedule:
    """aims_at: from a sigma and the next one, the sigma that a step goes to, and that of the noise it adds."""
    scheduler.set_timesteps(step_count)
    sigmas = [float(sigma) for sigma in scheduler.sigmas]
    steps: list[SolverStep] = []
    for index in range(start, step_count):
        sigma = sigmas[index]
        scale = 1 / math.sqrt(sigma**2 + 1)
        # The network predicts for a latent of unit variance, of which sigma / sqrt(sigma^2 + 1) is noise.
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
    """arXiv 2211.01095: DPM-Solver++ of up to the third order, from what earlier steps expected."""
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
    """Euler steps along a flow from noise to a picture: a latent is (1 - sigma) picture + sigma noise, and the network
    predicts noise less picture. How the sigmas are shifted depends on the picture's size (arXiv 2403.03206)."""
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
    """arXiv 2202.09778 without its Runge-Kutta steps: a linear multistep method over what the network made, as
    diffusers' scheduler computes it with skip_prk_steps. It does the first step twice, the second time with the mean of
    both ends: so it asks the network once more than it has noise levels (see network_steps).

    Of a picture that is changed the first steps are left out, and the two that it begins with are counted from there,
    also where they are not at one noise level: that is how diffusers does it.
    """
    levels_count = step_count - 1 if step_count > 1 else 1
    scheduler.set_timesteps(levels_count)
    config = scheduler.config
    timesteps = [int(timestep) for timestep in scheduler.timesteps][:step_count]
    stride = config.num_train_timesteps // levels_count
    steps: list[SolverStep] = []
    noised: list[Weights] = []
    first: Weights = (1.0, 0.0)  # of the first latent, and of what the network made of it, in the second one
    for index, timestep in enumerate(timesteps[start:]):
        signal, noise = _signal_and_noise(scheduler, timestep)
        from_timestep = timestep + stride if index == 1 else timestep
        of_latent, of_output = _pndm_weights(scheduler, from_timestep, from_timestep - stride)
        weights: dict[str, Any]
        if index == 1:  # again from the first latent, which is what the second one is, less what was put to it
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


# What counts of the network's outputs, the last one first, in the first step, in the third and so on. That of the
# second step is not used again.
_PNDM_SHARES: dict[int, tuple[float, ...]] = {
    0: (1.0,),
    2: (3 / 2, 0.0, -1 / 2),
    3: (23 / 12, -16 / 12, 0.0, 5 / 12),
    4: (55 / 24, -59 / 24, 37 / 24, 0.0, -9 / 24),
    5: (55 / 24, -59 / 24, 37 / 24, -9 / 24),
}


def _pndm_weights(scheduler: Any, timestep: int, next_timestep: int) -> Weights:
    """Formula 9 there: how a step between two noise levels weighs a latent and what the network made."""
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
"""What is so whatever the file says."""

_SOLVERS: dict[str, tuple[str, Callable[[Any, int, int, int], Schedule]]] = {
    "ddim": ("DDIMScheduler", _ddim),
    "dpm++": ("DPMSolverMultistepScheduler", _dpm),
    "euler": ("EulerDiscreteScheduler", _euler),
    "euler-ancestral": ("EulerAncestralDiscreteScheduler", _euler_ancestral),
    "flow-euler": ("FlowMatchEulerDiscreteScheduler", _flow),
    PNDM: ("PNDMScheduler", _pndm),
}


def _clean(prediction: str, signal: float, noise: float) -> Weights:
    """What of a latent, signal * picture + noise * noise, and of what a network predicts makes the picture."""
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
    """The same for the noise."""
    if prediction == "epsilon":
        return 0.0, 1.0
    if prediction == "v_prediction":
        return noise, signal
    return 1 / noise, -signal / noise


def _level(sigma: float, *, is_flow: bool) -> tuple[float, float, float]:
    """How much of a latent is signal, how much is noise, and half the logarithm of the ratio of their squares."""
    signal = 1 - sigma if is_flow else 1 / math.sqrt(sigma**2 + 1)
    noise = sigma if is_flow else sigma * signal
    if noise <= 0:
        return signal, noise, math.inf
    return signal, noise, math.log(signal) - math.log(noise) if signal > 0 else -math.inf


def _dpm_order(config: Any, index: int, step_count: int, steps_done: int) -> int:
    """Lower at the beginning, where nothing came before, and at the end, where the noise level falls too far."""
    is_few = config.lower_order_final and step_count < 15
    if index == step_count - 1 and (config.euler_at_final or is_few or config.final_sigmas_type == "zero"):
        return 1
    order_max = 2 if index == step_count - 2 and is_few else 3
    return min(int(config.solver_order), steps_done + 1, order_max)


def _dpm_weights(config: Any, levels: list[tuple[float, float, float]], index: int, order: int) -> dict[str, Any]:
    """next_of_* of a step from noise level `index` to the next."""
    (_, noise, level), (next_signal, next_noise, next_level) = levels[index], levels[index + 1]
    width = next_level - level
    is_sde = config.algorithm_type == "sde-dpmsolver++"
    # The stochastic variant goes twice as far and adds noise again.
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
    # D1 = near + ratio / span * (near - far) and D2 = (near - far) / span, of differences between expectations.
    span = ratio + earlier_ratio
    of_near = linear * (1 + ratio / span) + square / span
    of_far = -linear * ratio / span - square / span
    near, far = of_near / ratio, of_far / earlier_ratio
    return {**weights, "next_of_clean": first + near, "next_of_earlier": (far - near, -far)}
