"""Tests that a request's result does not depend on other requests in the plan. In float32 all bits are equal."""

from __future__ import annotations

import pytest
import torch

from trioserve.contracts.events import IterativePhase
from trioserve.contracts.image_generation import LatentMove
from trioserve.model.diffusion.runner import RowByRow, UnknownFunction

FAMILIES = (
    "dit",
    "stable-diffusion",
    "inpainting",
    "stable-diffusion-xl",
    "pixart",
    "pixart-large",
    "flux",
    "flux-distilled",
)
DENOISE = IterativePhase.DENOISE


def different_requests(driver, tiny, family, runner):
    """Return five requests that differ in numbers of steps, samplers, guidance, prompts and seeds."""
    samplers = tuple(runner.beginning.solvers)
    size = tiny.SIZES.get(family, (16, 24))
    return [
        driver.request(
            f"r{index}",
            prompt,
            seed=11 * index,
            steps=(3, 5, 4, 6, 3)[index],
            guidance=(1.0, 3.0, 7.5, 1.0, 2.0)[index],
            has_guided_rows=tiny.has_guided_rows(family),
            sampler=samplers[index % len(samplers)],
            size=size,
            partial_every=2,
        )
        for index, prompt in enumerate(tiny.prompts(family))
    ]


def outcome(driver, runner, requests, batches):
    """Return all latents and images of the first request. `batches` lists the other requests of each step."""
    first = driver.Driver(runner, requests)
    seen = []
    result = first.run(IterativePhase.ENCODE, requests)
    seen.append(first.latent(requests[0]))
    for others in batches:
        result = first.run(DENOISE, [*others[:1], requests[0], *others[1:]])
        assert not result.errors
        seen.append(first.latent(requests[0]))
        seen.append(result.partials.get(requests[0].id))
    result = first.run(IterativePhase.DECODE, [requests[0]])
    seen.append(result.outputs[requests[0].id])
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_image_request_gives_the_same_bytes_alone_and_beside_others(driver, tiny, runner, family):
    made = runner(family)
    requests = different_requests(driver, tiny, family, made)
    for first in range(len(requests)):
        one, *others = requests[first:] + requests[:first]
        steps = one.step_count
        alone = outcome(driver, made, [one, *others], [[]] * steps)
        # The others are one or more steps ahead, and their number changes from step to step.
        among = outcome(
            driver, made, [one, *others], [others[: 4 - step % 2] for step in range(min(steps, 3))] + [[]] * (steps - 3)
        )
        for before, after in zip(alone, among, strict=True):
            if isinstance(before, torch.Tensor):
                assert before.numpy().tobytes() == after.numpy().tobytes()
            else:
                assert before == after


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_image_networks_never_need_the_row_by_row_fallback(driver, tiny, runner, family):
    """Check the fallback flag. With an unknown function, each row would be computed alone, which is slower."""
    made = runner(family)
    driver.latents(made, different_requests(driver, tiny, family, made))
    assert not made.computes_rows_alone


def test_matrix_product_is_computed_for_each_row():
    weight, rows = torch.randn(7, 5), torch.randn(4, 3, 5)
    with RowByRow(4):
        found = torch.nn.functional.silu(torch.nn.functional.linear(rows, weight)) + 1
    for row, alone in zip(found, rows, strict=True):
        assert torch.equal(
            row, torch.nn.functional.silu(torch.nn.functional.linear(alone[None].clone(), weight))[0] + 1
        )


def test_unknown_torch_function_is_refused():
    with RowByRow(2), pytest.raises(UnknownFunction, match="logsumexp"):
        torch.logsumexp(torch.ones(2, 3), 1)


def test_product_of_a_tensor_without_rows_is_refused():
    with RowByRow(2), pytest.raises(UnknownFunction, match="does not have 2 rows"):
        torch.nn.functional.linear(torch.ones(3, 4), torch.ones(2, 4))


def test_network_with_an_unknown_function_is_called_once_per_row(driver, tiny, checkpoint, caplog):
    made = driver.load(checkpoint("dit"))
    requests = different_requests(driver, tiny, "dit", made)
    expected = [driver.latents(made, [one])[0] for one in requests]
    made.family.network.transformer_blocks[0].register_forward_hook(
        lambda _m, _i, out: out + 0 * out.logsumexp(-1)[..., None]
    )
    assert all(torch.equal(a, b) for a, b in zip(driver.latents(made, requests), expected, strict=True))
    assert made.computes_rows_alone
    assert "logsumexp" in caplog.text


@pytest.mark.slow
def test_moved_request_continues_with_its_state(driver, tiny, runner):
    made = runner("stable-diffusion")
    one, other = different_requests(driver, tiny, "stable-diffusion", made)[:2]
    (expected,) = driver.latents(made, [one])
    moving = driver.Driver(made, [one, other])
    moving.run(IterativePhase.ENCODE, [one, other])
    moving.run(DENOISE, [one, other])
    moving.slots[one.id] = 6  # The request is moved to a slot for kept latents.
    moving.run(DENOISE, [other], moves=(LatentMove(0, 6),))
    assert made.slots[0] is None
    moving.slots[one.id] = 0
    moving.run(DENOISE, [one], moves=(LatentMove(6, 0),))
    moving.finish([one])
    assert torch.equal(moving.latent(one), expected)
