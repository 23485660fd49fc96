"""Tests the bodies of image requests: the meaning of fields, and the refusal of invalid fields."""

from __future__ import annotations

import json
from typing import Any

import pytest

from trioserve.api.images.handlers import parsed_edit
from trioserve.api.images.request_types import REFUSED, ImageGenerationBody
from trioserve.api.openai.request_types import decode_body
from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.image_generation import ImageParams, RGBImage
from trioserve.vision.image_file import ImageFormat

from .forms import multipart

IMAGE = ("image", b"an image", "a.png")


def body(**fields: Any) -> ImageGenerationBody:
    return decode_body(json.dumps({"prompt": "a cat", **fields}).encode(), ImageGenerationBody)


@pytest.mark.parametrize(
    ("fields", "expect"),
    [
        ({}, {}),
        ({"size": "auto"}, {}),
        ({"size": "512x256"}, {"width": 512, "height": 256}),
        ({"width": 512, "height": 256}, {"width": 512, "height": 256}),
        ({"width": 512, "height": 256, "size": "auto"}, {"width": 512, "height": 256}),
        ({"num_inference_steps": 7}, {"steps": 7}),
        ({"steps": 7, "num_inference_steps": 7}, {"steps": 7}),
        ({"guidance_scale": 2.5}, {"guidance": 2.5}),
        ({"guidance": 0}, {"guidance": 0.0}),
        ({"negative_prompt": ""}, {}),
        ({"negative_prompt": "fog", "seed": 2**64 - 1, "n": 3, "sampler": "ddim"}, None),
        ({"stream": True, "partial_images": 16}, {"partial_images": 16}),
        ({"user": "u", "moderation": "low", "quality": "standard", "background": "opaque", "new_field": 1}, {}),
        ({"style": None, "svg": {}, "response_format": "b64_json"}, {}),
    ],
)
def test_fields_of_an_image_body_become_image_params(fields: dict[str, Any], expect: dict[str, Any] | None) -> None:
    asked = body(**fields)
    asked.check()
    assert asked.params() == ImageParams(**(fields if expect is None else expect))


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"size": "big"}, "size", "allowed is auto, or a width and a height"),
        ({"size": "0x512"}, "size", "width is 0"),
        ({"size": "512x512", "width": 512}, "size", "send size, or width and height"),
        ({"width": 512}, "height", "send both"),
        ({"width": -1, "height": 5}, "width", "1 or more"),
        ({"n": 0}, "n", "1 or more"),
        ({"n": 2**40}, "n", "Expected `int` <= 2147483647"),
        ({"steps": 0}, "steps", "1 or more"),
        ({"num_inference_steps": 0}, "num_inference_steps", "1 or more"),
        ({"steps": 5, "num_inference_steps": 6}, "num_inference_steps", "steps is 5 and num_inference_steps 6"),
        ({"guidance_scale": 101}, "guidance_scale", "0 to 100"),
        ({"seed": 2**64}, "seed", "allowed is"),
        ({"seed": "5"}, "seed", "Expected `int"),
        ({"stream": True, "partial_images": 17}, "partial_images", "0 to 16"),
        ({"partial_images": 2}, "partial_images", "when stream is true"),
        ({"stream_options": {"include_progress": True}}, "stream_options", "when stream is true"),
        ({"response_format": "url"}, "response_format", "stores no images"),
        ({"output_format": "gif"}, "output_format", "png, jpeg, webp"),
        ({"output_compression": 50}, "output_compression", "PNG is lossless"),
        ({"output_format": "jpeg", "output_compression": 101}, "output_compression", "<= 100"),
        ({"quality": "high"}, "quality", "steps and size"),
        ({"background": "transparent"}, "background", "cannot generate transparency"),
        *(({field: "x"}, field, "is not supported") for field in REFUSED),
        *(({field: "x"}, field, "/v1/images/edits") for field in ("image", "mask", "strength")),
    ],
)
def test_invalid_field_is_refused_under_the_name_that_was_sent(fields: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as refused:
        asked = body(**fields)
        asked.check()
        asked.params()
        asked.image_format()
    assert refused.value.param == param


def test_default_format_of_generated_images_is_png() -> None:
    assert body().image_format() == ImageFormat("png", 100)
    assert body(output_format="webp", output_compression=0).image_format() == ImageFormat("webp", 0)


def test_edit_form_is_parsed_into_text_fields_and_files() -> None:
    parts = [("prompt", "a dög"), ("n", "2"), ("strength", "0.5"), ("seed", ""), ("stream", "true")]
    more = [("stream_options[include_progress]", "true"), ("partial_images", "1"), ("new_field", "1")]
    asked = parsed_edit(*multipart(*parts, *more, IMAGE, ("mask", b"a mask", "m.png")))
    assert (asked.image, asked.mask) == (b"an image", b"a mask")
    asked.body.check()
    assert asked.body.wants_progress
    image = RGBImage(2, 1, bytes(6))
    params = asked.body.edit_params(image, None)
    assert params == ImageParams(n=2, strength=0.5, partial_images=1, image=image)


def test_image_can_be_the_only_entry_of_a_list() -> None:
    for name in ("image[]", "image[0]"):
        assert parsed_edit(*multipart(("prompt", "p"), (name, b"it", "a.png"))).image == b"it"


@pytest.mark.parametrize(
    ("parts", "param", "says"),
    [
        ([("prompt", "p")], "image", "has no image"),
        ([("prompt", "p"), ("image", b"", "a.png")], "image", "has no image"),
        ([("prompt", "p"), IMAGE, ("image[]", b"2", "b.png")], "image", "more than one image"),
        ([("prompt", "p"), ("image[]", b"1", "a.png"), ("image[]", b"2", "b.png")], "image[]", "twice"),
        ([("prompt", "p"), ("image[0]", b"1", "a.png"), ("image[1]", b"2", "b.png")], "image", "more than one image"),
        ([IMAGE], "prompt", "prompt is missing"),
        ([("prompt", "p"), IMAGE, ("n", "two")], "n", "Expected `int"),
        ([("prompt", "p"), IMAGE, ("stream", "perhaps")], "stream", "Expected `bool"),
        ([("prompt", "p"), IMAGE, ("strength", "0")], "strength", "above 0, up to 1"),
        ([("prompt", "p"), IMAGE, ("input_fidelity", "high")], "input_fidelity", "strength"),
        ([("prompt", "p" * 200_000), IMAGE], "prompt", "bytes"),
    ],
)
def test_invalid_form_of_an_image_edit_is_refused(parts: Any, param: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as refused:
        asked = parsed_edit(*multipart(*parts))
        asked.body.check()
        asked.body.edit_params(RGBImage(2, 1, bytes(6)), None)
    assert refused.value.param == param
