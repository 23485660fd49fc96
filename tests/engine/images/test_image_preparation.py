"""Tests that options which an image model does not support are refused before admission. Messages name allowed
values.
"""

from __future__ import annotations

import msgspec
import pytest

from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.image_generation import ImageParams, ImageRequestLimits, RGBImage
from trioserve.engine.open_image import ImagePreparation
from trioserve.testing.fake_image_engine import FAKE_CLASSES, FAKE_IMAGE_MODEL, open_fake_image_engine

IMAGE = RGBImage(20, 12, bytes(3 * 20 * 12))
OF_CLASSES = {"classes": FAKE_CLASSES, "takes_negative": False, "takes_images": False}


def model_of(**changes):
    return msgspec.structs.replace(FAKE_IMAGE_MODEL, **changes)


def wanted_of(prompt: str = "a cat", params: ImageParams | None = None, limits=None, **changes):
    """Prepare an image request, and return the description of its images."""
    model = model_of(**changes)
    preparation = ImagePreparation(model, limits or ImageRequestLimits(), step_work_max=8)
    return preparation.spec(prompt, params or ImageParams(), priority=0)


@pytest.mark.parametrize(
    ("asked", "changes", "param", "says"),
    [
        ({"width": 20}, {}, "width", "width is 20, fake takes multiples of 8 from 8 to 64"),
        ({"height": 72}, {}, "height", "height is 72, fake takes multiples of 8 from 8 to 64"),
        ({"width": 4}, {}, "width", "from 8 to 64"),
        ({"width": 24}, {"side_min": 16, "side_max": 16}, "width", "width is 24, fake takes 16 alone"),
        ({"steps": 300}, {}, "steps", "steps is 300, at most 250 denoising steps"),
        ({"n": 11}, {}, "n", "n is 11, at most 10 images"),
        ({"guidance": 2.0}, {"takes_guidance": False}, "guidance", "guidance is 2, and fake does not support guidance"),
        ({"negative_prompt": "no"}, {"takes_negative": False}, "negative_prompt", "leave negative_prompt out"),
        ({"negative_prompt": "no", "guidance": 1.0}, {}, "negative_prompt", "guidance above 1, and guidance is 1"),
        ({"negative_prompt": "n" * 32_001, "guidance": 2.0}, {}, "negative_prompt", "has 32001 characters"),
        ({"negative_prompt": "no"}, OF_CLASSES, "prompt", "fake generates images of 5 classes"),
        ({"image": IMAGE}, {"takes_images": False}, "image", "cannot change images: leave image out"),
        ({"image": IMAGE, "mask": IMAGE}, {"takes_images": False}, "mask", "cannot change images: leave mask out"),
        ({"sampler": "ddpm"}, {}, "sampler", "sampler is 'ddpm', fake has euler, ddim"),
        ({"width": 64, "height": 64}, {}, "width", "costs 16 per step, and a step may cost 8"),
        ({"width": 32, "height": 48, "guidance": 3.0}, {}, "width", "32 x 48 with guidance costs 12 per step"),
    ],
)
async def test_error_of_an_unsupported_image_option_names_the_option(asked, changes, param, says, autojump_clock):
    async with open_fake_image_engine(model=model_of(**changes)) as fake:
        with pytest.raises(InvalidRequest) as refusal:
            await fake.generate_image("a cat", ImageParams(**asked))
        assert refusal.value.param == param
        assert says in str(refusal.value)
        fake.assert_all_free()


def test_operator_limit_of_pixels_is_enforced():
    with pytest.raises(InvalidRequest, match=r"16 \* 24 = 384, at most 256 pixels") as refusal:
        wanted_of(params=ImageParams(height=24), limits=ImageRequestLimits(pixels_max=256))
    assert refusal.value.param == "width"


@pytest.mark.parametrize(
    ("prompt", "expect"), [("two", 2), (" TWO ", 2), ("3", 3), ("0", 0), ("Shetland  sheepdog", 5), ("7", 6)]
)
def test_image_class_may_be_given_by_name_or_index(prompt, expect):
    spec = wanted_of(prompt, **{**OF_CLASSES, "classes": (*FAKE_CLASSES, "Shetland sheepdog", "7")})
    assert spec.task.prompt == expect


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("thre", 'did you mean "three"?'),
        ("5", "0 to 4; one of zero, one, two, three, four"),
        ("-1", "is none of them"),
        ("", "'' is none of them"),
        ("²", "is none of them"),
        pytest.param("1" * 5000, "is none of them", id="a number that Python does not read"),
    ],
)
def test_unknown_class_is_refused_with_the_nearest_name(prompt, says):
    with pytest.raises(InvalidRequest) as refusal:
        wanted_of(prompt, **OF_CLASSES)
    assert refusal.value.param == "prompt"
    assert says in str(refusal.value)


def test_length_of_an_image_prompt_is_limited():
    with pytest.raises(InvalidRequest, match="the prompt has 32001 characters, at most 32000 are allowed"):
        wanted_of("p" * 32_001)
    assert (wanted_of("p" * 32_000)).task.prompt == "p" * 32_000


def test_image_class_may_be_given_by_any_of_its_names():
    classes = ("goldfish, Carassius auratus", "crane", "crane, Grus", "Carassius")
    for prompt, expect in (("goldfish", 0), ("carassius  auratus", 0), ("Carassius", 3), ("crane", 1), ("Grus", 2)):
        assert wanted_of(prompt, **{**OF_CLASSES, "classes": classes}).task.prompt == expect


@pytest.mark.parametrize("field", ["prompt", "negative_prompt"])
def test_image_prompt_with_half_a_surrogate_pair_is_refused(field):
    texts = {"prompt": "a cat", "negative_prompt": "dog", field: "a \ud83d"}
    with pytest.raises(InvalidRequest, match=r"holds U\+D83D at character 2") as refusal:
        wanted_of(texts["prompt"], ImageParams(negative_prompt=texts["negative_prompt"], guidance=2.0))
    assert refusal.value.param == field


def test_default_steps_stay_within_the_operators_limit():
    assert wanted_of(limits=ImageRequestLimits(steps_max=3)).step_count == 3


def test_encoding_the_image_of_an_edit_costs_as_much_as_decoding():
    assert wanted_of().encode_work == FAKE_IMAGE_MODEL.encode_work
    image = RGBImage(32, 32, bytes(3 * 32 * 32))
    spec = wanted_of(params=ImageParams(image=image))
    assert spec.encode_work == spec.work == 4


@pytest.mark.parametrize(
    ("arguments", "param"),
    [({"prompt": 7}, "prompt"), ({"params": {}}, "params"), ({"priority": "x"}, "priority"), ({"owner": 1}, "owner")],
)
async def test_argument_of_a_wrong_type_is_refused_at_once(arguments, param, autojump_clock):
    async with open_fake_image_engine() as fake:
        with pytest.raises(InvalidRequest) as refusal:
            fake.generate_image(**{"prompt": "a cat", **arguments})
        assert refusal.value.param == param


@pytest.mark.parametrize("priority", [-101, 101])
async def test_priority_out_of_range_is_refused(priority, autojump_clock):
    async with open_fake_image_engine() as fake:
        with pytest.raises(InvalidRequest, match="allowed is -100 to 100"):
            await fake.generate_image("a cat", priority=priority)
        fake.assert_all_free()


def test_missing_options_use_the_models_defaults():
    spec = wanted_of()
    task = spec.task
    assert (task.width, task.height, task.step_count, task.guidance, task.sampler) == (16, 16, 4, 1.0, "euler")
    assert (spec.step_count, spec.is_guided, spec.partial_every, spec.work) == (4, False, None, 1)


@pytest.mark.parametrize(
    ("guidance", "changes", "is_guided"),
    [
        (1.0, {}, False),
        (1.5, {}, True),
        (None, {"guidance": 7.5}, True),
        (3.0, {"has_guided_rows": False}, False),
        (None, {"takes_guidance": False, "guidance": 3.0}, False),
    ],
)
def test_image_with_guidance_has_two_rows(guidance, changes, is_guided):
    spec = wanted_of(params=ImageParams(guidance=guidance), **changes)
    assert spec.is_guided == is_guided


@pytest.mark.parametrize(
    ("asked", "step_count"),
    [
        ({}, 10),
        ({"image": IMAGE}, 8),
        ({"image": IMAGE, "strength": 0.5}, 5),
        ({"image": IMAGE, "strength": 0.01}, 1),
        ({"image": IMAGE, "strength": 1.0}, 10),
        ({"image": IMAGE, "mask": IMAGE}, 10),
    ],
)
def test_strength_of_an_image_edit_skips_the_first_steps(asked, step_count):
    spec = wanted_of(params=ImageParams(steps=10, **asked))
    assert (spec.step_count, spec.task.step_count) == (step_count, 10)


@pytest.mark.parametrize(
    ("asked", "step_count", "of_schedule"),
    [
        ({"steps": 10}, 11, 11),
        ({"steps": 1}, 1, 1),
        ({"steps": 10, "image": IMAGE, "strength": 0.5}, 6, 11),
        ({"steps": 250}, 251, 251),
    ],
)
def test_pndm_has_one_more_step_as_in_its_pipeline(asked, step_count, of_schedule):
    spec = wanted_of(params=ImageParams(**asked), samplers=("pndm",))
    assert (spec.step_count, spec.task.step_count) == (step_count, of_schedule)


@pytest.mark.parametrize(
    ("size", "asked", "expect"),
    [((20, 12), {}, (16, 8)), ((20, 12), {"width": 24}, (24, 8)), ((100, 4), {}, (64, 8)), ((16, 32), {}, (16, 32))],
)
def test_edited_image_keeps_its_size_as_nearly_as_allowed(size, asked, expect):
    image = RGBImage(*size, bytes(3 * size[0] * size[1]))
    spec = wanted_of(params=ImageParams(image=image, **asked))
    assert (spec.task.width, spec.task.height) == expect
