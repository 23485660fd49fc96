"""Tests that images of the vision models of Qwen, GLM and PaddleOCR-VL give the tokens, pixels, rows and logprobs of
transformers, natively and in torch, for images of any aspect ratio.

Everything is float32, so only the order of sums differs.
"""

from __future__ import annotations

import io
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from trioserve.assemble import open_engine
from trioserve.contracts.errors import InvalidRequest, ModelLoadError, StartupError
from trioserve.contracts.media import ImageLimits
from trioserve.contracts.prompt import ChatPrompt
from trioserve.contracts.sampling import SamplingParams
from trioserve.model.loading.checkpoint import open_checkpoint
from trioserve.model.parallel.stages import StageCheckpoint
from trioserve.model.vision.qwen_tower import GridTower
from trioserve.model.vision.qwen_vl import GridConfig
from trioserve.testing.accounting import assert_all_free
from trioserve.vision.families.qwen_vl import QwenVLProcessing

pytestmark = pytest.mark.slow

LOGPROB_TOLERANCE = 1e-3
WITHOUT_GRID = ("exaone4_5", "hyperclovax_vision_v2")
KINDS = (
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_5",
    "glm4v",
    "glm4v_moe",
    "glm46v",
    "glm_ocr",
    "paddleocr_vl",
    *WITHOUT_GRID,
)


def image_file(width: int, height: int, seed: int = 0) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3)).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def messages(files: list[bytes], *, marked: bool = False) -> list[dict[str, Any]]:
    """Return a chat about images. If `marked` is True, images have no data, as in the input of chat templates."""
    images = [{"type": "image"} if marked else {"type": "image", "image": file} for file in files]
    return [
        {"role": "user", "content": [*images[:1], {"type": "text", "text": "What is it?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "A hill."}]},
        {"role": "user", "content": [{"type": "text", "text": "And this: "}, *images[1:]]},
    ]


class Expected:
    """A chat's results in transformers. Its processors of videos need torchvision, so the inputs are built here."""

    def __init__(self, path: Path, tiny: ModuleType, kind: str, files: list[bytes]) -> None:
        from transformers import AutoModelForImageTextToText

        tokenizer = tiny.tokenizer()
        text = tokenizer.apply_chat_template(
            messages(files, marked=True),
            chat_template=tiny.chat_template(kind),
            tokenize=False,
            add_generation_prompt=True,
        )
        images: dict[str, Any] = {}
        if files:
            opened = [Image.open(io.BytesIO(file)) for file in files]
            images = dict(tiny.image_processor(kind)(opened, return_tensors="pt"))
            first, *others = text.split(tiny.image_token(kind))
            counts = (images["image_grid_thw"].prod(-1) // 4).tolist()
            text = first + "".join(
                tiny.image_token(kind) * count + rest for count, rest in zip(counts, others, strict=True)
            )
        ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
        self.inputs = {**images, "input_ids": ids}
        if kind not in WITHOUT_GRID:
            image_token_id = tokenizer.convert_tokens_to_ids(tiny.image_token(kind))
            self.inputs["mm_token_type_ids"] = (ids == image_token_id).int()
        self.model: Any = AutoModelForImageTextToText.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        )

    @property
    def token_ids(self) -> list[int]:
        return self.inputs["input_ids"][0].tolist()

    def logprobs(self, output: list[int]) -> torch.Tensor:
        """Return the logprobs after each token of prompt and output."""
        more = torch.tensor([output], dtype=torch.long)
        given = {**self.inputs, "input_ids": torch.cat((self.inputs["input_ids"], more), 1)}
        given["attention_mask"] = torch.ones_like(given["input_ids"])
        if (kinds := given.get("mm_token_type_ids")) is not None:
            given["mm_token_type_ids"] = torch.cat((kinds, torch.zeros_like(more, dtype=kinds.dtype)), 1)
        with torch.no_grad():
            return self.model(**given, use_cache=False).logits[0].log_softmax(-1)


@pytest.fixture(scope="module")
def qwen_checkpoint(tiny_qwen_vl: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def checkpoint(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            tiny_qwen_vl.write_checkpoint(made[kind], kind)
        return made[kind]

    return checkpoint


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [(), ((100, 37),), ((31, 90), (120, 9))], ids=["no image", "one image", "two images"])
async def test_logprobs_of_images_equal_those_of_transformers(
    kind: str,
    sizes: tuple[tuple[int, int], ...],
    cpu_kernels: str,
    qwen_checkpoint: Callable[[str], Path],
    tiny_qwen_vl: ModuleType,
) -> None:
    files = [image_file(*size, seed=seed) for seed, size in enumerate(sizes)]
    path = qwen_checkpoint(kind)
    expected = Expected(path, tiny_qwen_vl, kind, files)
    count = len(expected.token_ids)
    greedy = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=5)
    prompt = ChatPrompt(messages=messages(files))
    # Most steps end inside an image.
    options: dict[str, Any] = {"cpu_kernels": cpu_kernels, "max_num_batched_tokens": 23, "max_num_seqs": 4}
    async with open_engine(str(path), dtype="float32", **options) as engine:
        read = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=5, prompt_logprobs=5)
        responses = []
        # The first request computes the whole prompt. The last one uses blocks of the second one.
        for sampling in (read, greedy, greedy):
            tokens: list[int] = []
            logprobs: list[Any] = []
            async with engine.generate(prompt, sampling) as stream:
                async for delta in stream:
                    tokens += delta.token_ids
                    logprobs += delta.logprobs
                if sampling is read:
                    assert stream.prompt_token_ids == tuple(expected.token_ids)
                    assert stream.prompt_logprobs is not None
                    logprobs = [*stream.prompt_logprobs[1:], *logprobs]
            responses.append((tokens, logprobs))
        assert stream.cached_token_count > 0
        assert engine.image_outputs is not None
        assert engine.image_outputs.hit_count == 2 * len(files)
        assert_all_free(engine)
    tokens = responses[0][0]
    wanted = expected.logprobs(tokens[:-1])
    for token_ids, entries in responses:
        assert token_ids == tokens
        assert len(entries) in (6, count + 5)
        for row, entry in enumerate(entries, start=len(wanted) - len(entries)):
            for token, logprob in ((entry.token_id, entry.logprob), *entry.top):
                assert logprob == pytest.approx(float(wanted[row, token]), abs=LOGPROB_TOLERANCE)


@pytest.mark.parametrize("size", ["tensor_parallel_size", "pipeline_parallel_size"])
async def test_ranks_give_the_response_of_one_process(
    size: str, cpu_kernels: str, qwen_checkpoint: Callable[[str], Path]
) -> None:
    prompt = ChatPrompt(messages=messages([image_file(31, 90), image_file(120, 9, seed=1)]))
    greedy = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=1, prompt_logprobs=0)
    found = []
    for count in (1, 2):
        options: dict[str, Any] = {"cpu_kernels": cpu_kernels, "max_num_batched_tokens": 23, "max_num_seqs": 4}
        options |= {size: count, "threads": 2}
        async with (
            open_engine(str(qwen_checkpoint("qwen3_vl")), dtype="float32", **options) as engine,
            engine.generate(prompt, greedy) as stream,
        ):
            entries = [entry async for delta in stream for entry in delta.logprobs]
            assert stream.prompt_logprobs is not None
            found.append([entry.logprob for entry in (*stream.prompt_logprobs[1:], *entries) if entry])
    assert found[0] == pytest.approx(found[1], abs=LOGPROB_TOLERANCE)


def test_first_stage_has_the_layers_that_images_change(qwen_checkpoint: Callable[[str], Path]) -> None:
    checkpoint = open_checkpoint(qwen_checkpoint("qwen3_vl"))
    StageCheckpoint(checkpoint, 0, 2)
    with pytest.raises(StartupError, match="first 2 layers, but the first stage has only 1"):
        StageCheckpoint(checkpoint, 0, 3)


async def test_largest_image_of_a_model_fits_into_the_memory_for_images(
    qwen_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(qwen_checkpoint("qwen3_vl"), copy)
    path = copy / "preprocessor_config.json"
    size = {"shortest_edge": 64, "longest_edge": 64 * 400_000}
    path.write_text(json.dumps({**json.loads(path.read_text()), "size": size}))
    async with open_engine(str(copy), dtype="float32") as engine:
        assert engine.image_outputs is not None
        assert engine.image_outputs.bytes_max == 400_000 * 4 * 64 * 3


@pytest.mark.parametrize("kind", KINDS)
def test_pixels_and_token_counts_equal_those_of_transformers(
    kind: str, qwen_checkpoint: Callable[[str], Path], tiny_qwen_vl: ModuleType
) -> None:
    vision = open_checkpoint(qwen_checkpoint(kind)).vision
    assert vision is not None
    assert isinstance(vision.config, GridConfig)
    images = tiny_qwen_vl.image_processor(kind)
    for width in (1, 3, 4, 8, 11, 12, 13, 20, 57, 200, 1000):
        for height in (1, 5, 12, 36, 99, 400, 1001):
            try:
                patch_count = images.get_number_of_image_patches(height, width, {})
            except ValueError:  # The image is too long and thin.
                with pytest.raises(InvalidRequest, match="cut it"):
                    vision.processing.plan(width, height)
                continue
            plan = vision.processing.plan(width, height)
            assert plan.row_count * 4 == patch_count, (width, height)
            assert plan.grid is not None or kind in WITHOUT_GRID
            assert plan.grid is None or math.prod(plan.grid) == plan.row_count
    for width, height in ((100, 37), (3, 90), (240, 240)):
        file = image_file(width, height)
        tiles = vision.processing.tiles(Image.open(io.BytesIO(file)), vision.processing.plan(width, height))
        wanted = images(Image.open(io.BytesIO(file)), return_tensors="pt")["pixel_values"]
        tower = GridTower(vision.config, vision.processing, dtype="float32", device=torch.device("cpu"))
        if kind == "paddleocr_vl":  # Patches are row by row, not square by square.
            columns = tiles.shape[2] // 8
            lines = wanted.view(-1, 2, columns, 2, *wanted.shape[1:])
            wanted = lines.transpose(1, 2).reshape(len(wanted), -1)
        assert torch.equal(tower.patches(tiles[0]), wanted)


def test_token_counts_of_real_sizes_equal_those_of_transformers() -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    rng = np.random.default_rng(0)
    for square, low, high in ((28, 56 * 56, 28 * 28 * 1280), (28, 3136, 12_845_056), (32, 65_536, 16_777_216)):
        processing = QwenVLProcessing(
            square=square,
            pixels_min=low,
            pixels_max=high,
            resample=3,
            mean=(0.5, 0.5, 0.5),
            std=(0.5, 0.5, 0.5),
            rescale_factor=1 / 255,
            embedding_size=8,
            image_token_id=5,
        )
        for _ in range(2000):
            width, height = (int(side) for side in np.exp(rng.uniform(0, math.log(ImageLimits().side_max), 2)))
            if max(width, height) > 200 * min(width, height):
                continue
            plan = processing.plan(width, height)
            assert (plan.tile_height, plan.tile_width) == smart_resize(height, width, square, low, high)
            assert plan.row_count * processing.row_bytes <= processing.image_bytes_max


def test_config_without_text_config_describes_the_same_model(
    qwen_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(qwen_checkpoint("paddleocr_vl"), copy)
    expected = open_checkpoint(copy)
    config = json.loads((copy / "config.json").read_text())
    texts = config.pop("text_config")
    (copy / "config.json").write_text(json.dumps({**texts, **config, "model_type": "paddleocr_vl"}))
    found = open_checkpoint(copy)
    assert found.config == expected.config
    assert found.vision is not None
    assert expected.vision is not None
    assert found.vision.config == expected.vision.config


def test_old_name_of_a_language_model_is_known(qwen_checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(qwen_checkpoint("exaone4_5"), copy)
    expected = open_checkpoint(copy)
    config = json.loads((copy / "config.json").read_text())
    config["text_config"]["model_type"] = "exaone4_5_text"
    (copy / "config.json").write_text(json.dumps(config))
    assert open_checkpoint(copy).config == expected.config


@pytest.mark.parametrize(
    "kind, group, name, value, message",
    [
        ("qwen3_5", "vision_config", "deepstack_visual_indexes", [0], r"it must be \[\] for this family"),
        ("qwen3_5", "text_config", "rope_parameters", {"rope_theta": 10_000.0}, "lacks mrope_section"),
        ("glm4v", "text_config", "rope_parameters", {"mrope_section": [2, 3, 4]}, "three numbers with sum 8"),
        ("glm4v", "vision_config", "hidden_act", "relu", "it must be gelu or"),
        ("glm4v", "vision_config", "rms_norm_eps", 0.0, "it must be a small number"),
        ("glm_ocr", "vision_config", "rope_parameters", {"rope_type": "yarn"}, "it must be axial"),
        ("exaone4_5", "vision_config", "num_key_value_heads", 3, "no multiple of num_key_value_heads 3"),
        ("exaone4_5", "vision_config", "num_key_value_heads", 8, "allowed is 1 to 4"),
        ("hyperclovax_vision_v2", "vision_config", "out_hidden_size", 0, "allowed is 1 to"),
        ("paddleocr_vl", "vision_config", "num_channels", 4, "it must be 3"),
        ("paddleocr_vl", "vision_config", "image_size", 0, "allowed is 1 to 4096"),
        ("paddleocr_vl", "vision_config", "layer_norm_eps", 0.0, "it must be a small number"),
        ("paddleocr_vl", "text_config", "rope_parameters", {"mrope_section": [2, 3, 4]}, "three numbers with sum 8"),
    ],
)
def test_unsupported_field_of_an_image_encoder_is_refused_by_name(
    kind: str,
    group: str,
    name: str,
    value: object,
    message: str,
    qwen_checkpoint: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(qwen_checkpoint(kind), copy)
    config = json.loads((copy / "config.json").read_text())
    config[group][name] = value
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=message):
        open_checkpoint(copy)
