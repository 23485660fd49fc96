"""Tests that pixels, prompts, rows, logits and greedy tokens of images equal those of transformers, natively and in
torch, for any chunks of a prompt.

Everything is float32, so only the order of sums differs.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.pixtral.image_processing_pil_pixtral import (
    PixtralImageProcessorPil,
    get_resize_output_image_size,
)

from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.media import GivenRows, ImageLimits
from trioserve.contracts.prompt import ChatPrompt
from trioserve.contracts.sampling import SamplingParams
from trioserve.model.loading.checkpoint import open_checkpoint
from trioserve.text.tokenizer import Tokenizer
from trioserve.vision.families.pixtral import LightOnProcessing, PixtralProcessing
from trioserve.vision.families.registry import tiles_of
from trioserve.vision.image_prompt import ImageReader, split_media

LOGPROB_TOLERANCE = 2e-4
ALL_LOGPROBS = SamplingParams(temperature=0.0, logprobs=20, prompt_logprobs=20)


def data_url(content: bytes) -> dict[str, Any]:
    url = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def opened(content: bytes) -> Image.Image:
    import io

    return Image.open(io.BytesIO(content))


@pytest.fixture(scope="module")
def vision_checkpoint(tiny_vision: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    made: dict[tuple[str, int], Path] = {}

    def checkpoint(kind: str, image_size: int = 32) -> Path:
        key = (kind, image_size)
        if key not in made:
            made[key] = tmp_path_factory.mktemp(kind)
            tiny_vision.write_checkpoint(made[key], kind, image_size=image_size)
        return made[key]

    return checkpoint


class Prompted:
    """A chat with images, prepared by this code."""

    def __init__(self, path: Path, messages: list[dict[str, Any]]) -> None:
        checkpoint = open_checkpoint(path)
        assert checkpoint.vision is not None
        self.processing = checkpoint.vision.processing
        self.reader = ImageReader(self.processing, ImageLimits())
        tokenizer = Tokenizer.from_directory(path)
        marked, sources = split_media(messages)
        read = self.reader.read(sources)
        assert tokenizer.chat_template is not None
        text = self.reader.expand(tokenizer.chat_template.render(ChatPrompt(messages=marked)), read)
        self.token_ids = tokenizer.encode(text, add_special_tokens=False)
        self.images = self.reader.locate(self.token_ids, read)
        self.tiles = [tiles_of(image.content, self.processing, image.plan, image.place) for image in read]

    def given(self, runner: Any) -> tuple[GivenRows, ...]:
        rows: list[GivenRows] = []
        for image, tiles in zip(self.images, self.tiles, strict=True):
            encoding = runner.vision.begin(tiles, image.image.plan)
            while not encoding.advance():
                pass
            first = 0
            for run, (start, count) in enumerate(image.runs):
                own = encoding.rows[first : first + count]
                is_bidirectional = self.processing.is_bidirectional
                rows.append(GivenRows(start, count, bytes([run] * 16), own, is_bidirectional=is_bidirectional))
                first += count
        return tuple(rows)


class Expected:
    """The chat's results in transformers."""

    def __init__(self, path: Path, processor: Any, messages: list[dict[str, Any]], files: list[bytes]) -> None:
        from transformers import AutoModelForImageTextToText

        self.processor = processor
        marked, _ = split_media(messages)
        text = processor.apply_chat_template(marked, add_generation_prompt=True)
        pictures = [opened(file) for file in files]
        self.inputs = processor(images=[pictures], text=[text], return_tensors="pt")
        self.model: Any = AutoModelForImageTextToText.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        )

    @property
    def token_ids(self) -> list[int]:
        return self.inputs["input_ids"][0].tolist()

    @property
    def pixels(self) -> list[np.ndarray[Any, Any]]:
        """Return the pixels of each tile, without padding."""
        pixels = self.inputs["pixel_values"]
        tiles = pixels.reshape(-1, *pixels.shape[-3:]).numpy()
        if not isinstance(self.processor.image_processor, PixtralImageProcessorPil):
            return list(tiles)
        sizes = self.inputs["image_sizes"].tolist()
        return [tile[:, :height, :width] for tile, (height, width) in zip(tiles, sizes, strict=True)]

    def rows(self) -> torch.Tensor:
        images = {
            name: values for name, values in self.inputs.items() if name.startswith(("pixel_", "image_", "batch_"))
        }
        with torch.no_grad():
            out = self.model.get_image_features(**images)
        return torch.cat(list(out.pooler_output))

    def logprobs(self, tokens: list[int]) -> torch.Tensor:
        with torch.no_grad():
            given = {**self.inputs, "input_ids": torch.tensor([tokens])}
            given["attention_mask"] = torch.ones_like(given["input_ids"])
            if "token_type_ids" in given:  # 1 for tokens of images
                more = (0, len(tokens) - given["token_type_ids"].shape[1])
                given["token_type_ids"] = torch.nn.functional.pad(given["token_type_ids"], more)
            return self.model(**given, use_cache=False).logits[0].log_softmax(-1)

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logprobs(tokens)[-1].argmax()))
        return tokens[len(prompt) :]


def uncut(given: tuple[GivenRows, ...], start: int, count: int) -> int:
    """Return `count`, or a larger count with which the chunk ends after an image whose tokens attend to each other."""
    for rows in given:
        if rows.is_bidirectional and rows.start < start + count < rows.end:
            return rows.end - start
    return count


def chat(*files: bytes) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": [*(data_url(file) for file in files), {"type": "text", "text": "What is it?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "A hill."}]},
        {"role": "user", "content": [{"type": "text", "text": "And this: "}, data_url(files[0])]},
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, image_size, sizes",
    [
        ("idefics3", 32, [(60, 33), (20, 20)]),
        ("smolvlm", 32, [(60, 33), (20, 20)]),
        ("smolvlm", 48, [(60, 33), (20, 20)]),
        ("gemma3", 32, [(60, 33), (20, 20)]),
        ("gemma3_crops", 32, [(70, 33), (25, 60)]),
        ("llava", 32, [(60, 33), (20, 41)]),
        ("llava_next", 32, [(150, 61)]),
        ("llava_next", 32, [(31, 28), (27, 30)]),
        ("llava_next_video", 32, [(150, 61)]),
        ("llava_onevision", 32, [(60, 33), (20, 41)]),
        ("llava_onevision", 32, [(150, 61)]),
        ("llava_onevision", 32, [(33, 35)]),
        ("internvl", 32, [(150, 61), (20, 41)]),
        ("qianfan_ocr", 32, [(150, 61), (20, 41)]),
        ("aya_vision", 32, [(150, 61), (20, 41)]),
        ("cohere2_vision", 32, [(150, 61), (20, 41)]),
        ("mistral3", 32, [(150, 61), (20, 41), (9, 64)]),
        ("pixtral", 32, [(60, 33), (20, 3)]),
        ("lighton_ocr", 32, [(150, 61), (20, 41), (9, 64)]),
    ],
)
def test_images_prompts_and_tokens_equal_those_of_transformers(
    kind: str,
    image_size: int,
    sizes: list[tuple[int, int]],
    cpu_kernels: str,
    vision_checkpoint: Callable[..., Path],
    tiny_vision: ModuleType,
    step_driver: ModuleType,
) -> None:
    path = vision_checkpoint(kind, image_size)
    files = [tiny_vision.image_file(*size, seed=seed) for seed, size in enumerate(sizes)]
    messages = chat(*files)
    if len(files) == 1:  # Some families cut an image into tiles only if it is the only one.
        messages = messages[:1]
    prompted = Prompted(path, messages)
    expected = Expected(path, tiny_vision.processor(kind), messages, [*files, files[0]] if len(files) > 1 else files)
    assert prompted.token_ids == expected.token_ids
    runner = step_driver.load_runner(path, cpu_kernels=cpu_kernels)
    pixels = [runner.vision.pixels(tile) for tiles in prompted.tiles for tile in tiles]
    assert all(np.array_equal(*pair) for pair in zip(pixels, expected.pixels, strict=True))
    given = prompted.given(runner)
    rows = np.concatenate([one.values for one in given])
    np.testing.assert_allclose(rows, expected.rows().numpy(), atol=1e-4, rtol=1e-4)

    driver = step_driver.StepDriver(runner)
    prompt = prompted.token_ids
    wanted = expected.logprobs(prompt)
    # Both chunk sizes divide tiles, the second one almost everywhere.
    for name, size in (("whole", len(prompt)), ("chunks", 7)):
        driver.add(name, prompt, ALL_LOGPROBS, given=given)
        entries: list[Any] = []
        while (left := driver.left(name)) > 0 and len(driver.tokens[name]) == len(prompt):
            count = uncut(given, len(prompt) - left, min(left, size))
            entries.extend(driver.step({name: count}).prompt_logprobs[name])
        assert len(entries) == len(prompt) - 1
        for row, entry in enumerate(entries):
            assert entry.logprob == pytest.approx(float(wanted[row, entry.token_id]), abs=LOGPROB_TOLERANCE)
            for token, logprob in entry.top:
                assert logprob == pytest.approx(float(wanted[row, token]), abs=LOGPROB_TOLERANCE)
    # The batch also has a text without image embeddings.
    driver.add("text", prompt[:20])
    driver.step({"text": 20, "whole": 1, "chunks": 1})
    for _ in range(6):
        driver.step({"chunks": 1, "text": 1, "whole": 1})
    for name in ("whole", "chunks"):
        output = driver.tokens[name][len(prompt) :]
        assert output == expected.greedy(prompt, len(output))
    driver.add("blind", prompt)
    driver.step({"blind": len(prompt)})
    runner.close()


@pytest.mark.slow
def test_crops_of_many_sizes_equal_those_of_transformers(
    vision_checkpoint: Callable[..., Path], tiny_vision: ModuleType
) -> None:
    part = open_checkpoint(vision_checkpoint("gemma3_crops")).vision
    assert part is not None
    image_processor = tiny_vision.processor("gemma3_crops").image_processor
    rng = np.random.default_rng(1)
    for limit in (30, 100, 1000):
        for width, height in rng.integers(1, limit, (300, 2)).tolist():
            crops = image_processor.pan_and_scan(np.broadcast_to(np.uint8(0), (3, height, width)), 16, 4, 1.2)
            plan = part.processing.plan(width, height)
            assert plan.tile_count == 1 + len(crops)
            assert plan.rows * plan.columns == len(crops)
            assert plan.columns >= plan.rows if width >= height else plan.rows >= plan.columns


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llava_next", "llava_onevision", "internvl", "aya_vision"])
def test_token_counts_of_many_sizes_equal_those_of_transformers(
    kind: str, vision_checkpoint: Callable[..., Path], tiny_vision: ModuleType
) -> None:
    part = open_checkpoint(vision_checkpoint(kind)).vision
    assert part is not None
    rng = np.random.default_rng(1)
    sizes = [tuple(map(int, rng.integers(1, limit, 2))) for limit in (100, 1000, 5000) for _ in range(300)]
    expected = tiny_vision.processor(kind)._get_num_multimodal_tokens([(height, width) for width, height in sizes])
    plans = [part.processing.plan(width, height) for width, height in sizes]
    borders = {"internvl": 2, "aya_vision": 2}.get(kind, 0)
    names = 1 if kind == "aya_vision" else 0  # Tokens before the rows of a tile.
    planned = [plan.row_count + borders + names * plan.tile_count for plan in plans]
    assert planned == expected["num_image_tokens"]


@pytest.mark.slow
def test_tiles_of_command_a_vision_enlarge_an_image_least(
    vision_checkpoint: Callable[..., Path], tiny_vision: ModuleType
) -> None:
    part = open_checkpoint(vision_checkpoint("cohere2_vision")).vision
    assert part is not None
    rng = np.random.default_rng(1)
    for limit in (40, 100, 1000):
        for width, height in rng.integers(1, limit, (300, 2)).tolist():
            plan = part.processing.plan(width, height)
            assert (plan.columns, plan.rows) == tiny_vision.cohere2_canvas((height, width), (32, 32), 1, 6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mistral3", "pixtral", "lighton_ocr"])
def test_sizes_of_resized_images_equal_those_of_transformers(kind: str, vision_checkpoint: Callable[..., Path]) -> None:
    part = open_checkpoint(vision_checkpoint(kind)).vision
    assert part is not None
    processing = part.processing
    assert isinstance(processing, PixtralProcessing)
    edge, square = processing.longest_edge, processing.square
    multiple = processing.multiple if isinstance(processing, LightOnProcessing) else square
    rng = np.random.default_rng(1)
    for limit in (10, 100, 1000, 5000):
        for width, height in rng.integers(1, limit, (300, 2)).tolist():
            if max(width, height) > edge * min(width, height):
                with pytest.raises(InvalidRequest, match=f"at most {edge} times its shorter side: cut it"):
                    processing.plan(width, height)
                continue
            image = np.broadcast_to(np.uint8(0), (3, height, width))
            tile_height, tile_width = get_resize_output_image_size(image, edge, multiple)
            if min(tile_height, tile_width) < square:
                with pytest.raises(InvalidRequest, match="each side needs 5 after it is resized"):
                    processing.plan(width, height)
                continue
            plan = processing.plan(width, height)
            assert (plan.tile_height, plan.tile_width) == (tile_height, tile_width)
            lines = (tile_width // square,) * (tile_height // square)
            assert plan.runs == (lines if kind != "lighton_ocr" else (sum(lines),))
            assert plan.row_count * processing.row_bytes <= processing.image_bytes_max
