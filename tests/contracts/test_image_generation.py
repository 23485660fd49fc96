from typing import Any

import numpy as np
import pytest

from trioserve.contracts.errors import InvalidRequest, StartupError
from trioserve.contracts.image_generation import ImageParams, ImageRequestLimits, RGBImage


def picture(width: int, height: int) -> RGBImage:
    return RGBImage(width, height, bytes(3 * width * height))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("width", 0),
        ("height", "8"),
        ("steps", 0),
        ("n", 0),
        ("n", True),
        ("partial_images", 17),
        ("partial_images", -1),
        ("seed", 2**64),
        ("guidance", -0.5),
        ("guidance", float("nan")),
        ("guidance", "7"),
        ("negative_prompt", 3),
        ("sampler", 3),
        ("image", b"png"),
    ],
)
def test_error_of_an_invalid_image_parameter_names_it(name: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=name) as refused:
        ImageParams(**{name: value})  # type: ignore[arg-type]  # wrong types are the purpose of this test
    assert refused.value.param == name


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ((0, 8, b""), "width"),
        ((-1, -1, b"abc"), "width"),
        ((1, 0, b""), "height"),
        ((1.0, 1, b"abc"), "width"),
        ((1, 1, [1, 2, 3]), "rgb"),
        ((1, 1, bytearray(b"abc")), "rgb"),
        ((2, 2, b"abc"), "rgb"),
    ],
)
def test_invalid_input_images_are_refused(fields: tuple[Any, Any, Any], param: str) -> None:
    with pytest.raises(InvalidRequest, match=param) as refused:
        RGBImage(*fields)
    assert refused.value.param == param


@pytest.mark.parametrize("strength", [0, -1, 1.01, float("nan")])
def test_strength_is_above_0_and_up_to_1(strength: float) -> None:
    with pytest.raises(InvalidRequest, match="strength"):
        ImageParams(image=picture(8, 8), strength=strength)
    assert ImageParams(image=picture(8, 8), strength=1.0).strength == 1


def test_mask_and_strength_require_an_image() -> None:
    for name, value in (("mask", picture(8, 8)), ("strength", 0.5)):
        with pytest.raises(InvalidRequest, match="without an image") as refused:
            ImageParams(**{name: value})  # type: ignore[arg-type]
        assert refused.value.param == name


def test_mask_must_have_the_size_of_its_image() -> None:
    with pytest.raises(InvalidRequest, match="8x16"):
        ImageParams(image=picture(8, 16), mask=picture(16, 8))


def test_image_limits_below_1_are_refused() -> None:
    with pytest.raises(StartupError, match="n_max is 0"):
        ImageRequestLimits(n_max=0)


def test_numpy_numbers_in_image_parameters_become_python_numbers():
    params = ImageParams(
        width=np.int64(16), n=np.uint8(2), seed=np.uint64(2**63), guidance=np.float32(2), strength=None
    )
    assert [type(value) for value in (params.width, params.n, params.seed, params.guidance)] == [int, int, int, float]
    assert (params.width, params.n, params.seed, params.guidance) == (16, 2, 2**63, 2.0)
