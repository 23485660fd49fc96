"""Tests of a tiny checkpoint that reads images, served by an engine: decoding, encoding between steps, and the
decoder's own kernels.
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import trio
from PIL import Image

from trioserve.assemble import open_engine
from trioserve.contracts.errors import InvalidRequest, ModelLoadError
from trioserve.contracts.prompt import ChatPrompt
from trioserve.contracts.sampling import SamplingParams
from trioserve.model.loading.checkpoint import open_checkpoint
from trioserve.testing.accounting import assert_all_free

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def chat(*files: bytes, text: str = "What is it?") -> ChatPrompt:
    images: list[dict[str, Any]] = [{"type": "image", "image": file} for file in files]
    return ChatPrompt(messages=[{"role": "user", "content": [*images, {"type": "text", "text": text}]}])


def expected_tokens(path: Path, processor: Any, file: bytes, count: int) -> list[int]:
    from transformers import AutoModelForImageTextToText

    model: Any = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}]
    text = processor.apply_chat_template(messages, add_generation_prompt=True)
    inputs = processor(images=[[Image.open(io.BytesIO(file))]], text=[text], return_tensors="pt")
    with torch.no_grad():
        out = model.generate(**inputs, max_new_tokens=count, min_new_tokens=count, do_sample=False)
    return out[0, inputs["input_ids"].shape[1] :].tolist()


@pytest.fixture(scope="module")
def seeing(tiny_vision: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("seeing")
    tiny_vision.write_checkpoint(path, "smolvlm")
    return path


@pytest.fixture(scope="module")
def vision_checkpoint(tiny_vision: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def checkpoint(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            tiny_vision.write_checkpoint(made[kind], kind)
        return made[kind]

    return checkpoint


@pytest.mark.parametrize(
    "options", [{}, {"overlap_steps": True}, {"tensor_parallel_size": 2, "threads": 2}], ids=["", "overlap", "ranks"]
)
async def test_response_about_an_image_equals_that_of_transformers(
    options: dict[str, Any], cpu_kernels: str, seeing: Path, tiny_vision: ModuleType
) -> None:
    file = tiny_vision.image_file(60, 33)
    expected = expected_tokens(seeing, tiny_vision.processor(), file, 8)
    async with open_engine(
        str(seeing), dtype="float32", cpu_kernels=cpu_kernels, max_num_batched_tokens=64, **options
    ) as engine:
        for _ in range(2):  # The second request hits the prefix cache, so no image is encoded.
            tokens: list[int] = []
            async with engine.generate(chat(file), GREEDY) as stream:
                async for delta in stream:
                    tokens += delta.token_ids
            assert tokens == expected
        assert stream.cached_token_count > 0
        assert engine.image_outputs is not None
        assert engine.image_outputs.hit_count == 1
        engine.image_outputs.check()
        assert_all_free(engine)


async def test_cached_blocks_that_end_inside_an_image_give_the_same_response(
    cpu_kernels: str, tiny_vision: ModuleType, tmp_path: Path
) -> None:
    tiny_vision.write_checkpoint(tmp_path, "gemma3")
    file = tiny_vision.image_file(60, 33)
    expected = expected_tokens(tmp_path, tiny_vision.processor("gemma3"), file, 8)
    async with open_engine(
        str(tmp_path), dtype="float32", cpu_kernels=cpu_kernels, max_num_seqs=4, max_num_batched_tokens=32, block_size=8
    ) as engine:
        for text in ("What is it?", "Why?", "What is it?"):
            tokens: list[int] = []
            async with engine.generate(chat(file, text=text), GREEDY) as stream:
                async for delta in stream:
                    tokens += delta.token_ids
        assert tokens == expected
        assert stream.cached_token_count > 0
        assert_all_free(engine)


async def test_texts_continue_while_an_image_is_encoded(seeing: Path, tiny_vision: ModuleType) -> None:
    async with open_engine(str(seeing), dtype="float32", limit_mm_per_prompt={"image": 4}) as engine:
        between = 0

        async def read_on(task_status: trio.TaskStatus[None]) -> None:
            nonlocal between
            sampling = SamplingParams(max_tokens=1000, ignore_eos=True)
            async with engine.generate("Tell.", sampling) as stream:
                await stream.wait_until_begun()
                task_status.started()
                async for _ in stream:
                    between += 1

        async with trio.open_nursery() as nursery:
            await nursery.start(read_on)
            before = between
            async with engine.generate(chat(*(tiny_vision.image_file(seed=seed) for seed in range(4))), GREEDY):
                pass
            # Four images of five tiles in two layers each, with at least one step between two pieces of work.
            assert between - before > 10
            nursery.cancel_scope.cancel()
        with pytest.raises(InvalidRequest, match="at most 4"):
            async with engine.generate(chat(*[tiny_vision.image_file()] * 5), GREEDY):
                pass


def test_error_names_missing_files_of_a_model_that_reads_images(
    tiny_vision: ModuleType, tmp_path: Path, seeing: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(seeing, copy)
    for name in ("preprocessor_config.json", "processor_config.json"):
        (copy / name).unlink(missing_ok=True)
    with pytest.raises(ModelLoadError, match=r"has no preprocessor_config\.json"):
        open_checkpoint(copy)
    (copy / "preprocessor_config.json").write_text(json.dumps({"max_image_size": {"longest_edge": 30}}))
    with pytest.raises(ModelLoadError, match="tiles of 30 pixels"):
        open_checkpoint(copy)


def test_files_of_transformers_before_5_are_equivalent(seeing: Path, tmp_path: Path) -> None:
    copy = tmp_path / "old"
    shutil.copytree(seeing, copy)
    whole = open_checkpoint(seeing).vision
    saved = json.loads((copy / "processor_config.json").read_text())
    inner = saved.get("image_processor", saved)
    (copy / "processor_config.json").unlink()
    (copy / "preprocessor_config.json").write_text(json.dumps(inner))
    old = open_checkpoint(copy).vision
    assert whole is not None
    assert old is not None
    assert old.processing == whole.processing


@pytest.mark.parametrize("name", ["vision_model.post_layernorm.weight", "connector.modality_projection.proj.weight"])
def test_error_names_the_missing_tensor_of_an_image_encoder(name: str, seeing: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    copy = tmp_path / "lacking"
    shutil.copytree(seeing, copy)
    tensors: Callable[..., Any] = load_file(copy / "model.safetensors")
    save_file({key: value for key, value in tensors.items() if not key.endswith(name)}, copy / "model.safetensors")
    with pytest.raises(ModelLoadError, match=name):
        open_checkpoint(copy)


SIZE_OF_ENCODER = "the image_size of the vision_config, 32"


@pytest.mark.parametrize(
    "kind, file, place, value, message",
    [
        ("gemma3", "config.json", "mm_tokens_per_image", 17, "a square number"),
        ("gemma3", "config.json", "mm_tokens_per_image", 9, "no multiple of the 3 rows"),
        ("gemma3", "config.json", "text_config.sliding_window", 8, "more than the sliding_window"),
        ("gemma3_crops", "processor_config.json", "image_processor.pan_and_scan_max_num_crops", 17, "2 to 16"),
        ("gemma3_crops", "processor_config.json", "image_processor.pan_and_scan_min_crop_size", 3, "at least 4"),
        ("gemma3", "processor_config.json", "image_processor.size.height", 64, SIZE_OF_ENCODER),
        ("llava", "config.json", "vision_feature_layer", -4, "one layer, -3 to 3"),
        ("llava", "config.json", "vision_feature_layer", [-2, -1], "a whole number"),
        ("llava", "config.json", "vision_feature_select_strategy", "full", "it must be default"),
        ("llava", "config.json", "projector_hidden_act", "relu", "it must be gelu"),
        ("llava", "config.json", "vision_config.num_channels", 4, "it must be 3"),
        ("llava", "config.json", "vision_config.hidden_act", "relu", "it must be gelu or"),
        ("llava", "config.json", "vision_config.image_size", [32, 16], "a square"),
        ("llava", "processor_config.json", "image_processor.size.shortest_edge", 16, SIZE_OF_ENCODER),
        ("llava", "processor_config.json", "image_processor.crop_size.width", 16, SIZE_OF_ENCODER),
        ("llava", "processor_config.json", "image_processor.do_normalize", False, "it must be true"),
        ("llava_next", "config.json", "image_grid_pinpoints", [[32, 32]], "the same as in"),
        ("llava_next", "config.json", "vision_feature_select_strategy", "full", "it must be default"),
        ("llava_next", "processor_config.json", "image_processor.crop_size.width", 16, SIZE_OF_ENCODER),
        ("llava_onevision", "config.json", "vision_aspect_ratio", "pad", "anyres_max_1 to anyres_max_100"),
        ("llava_onevision", "config.json", "image_grid_pinpoints", [[32, 32]], "the same as in"),
        ("internvl", "config.json", "projector_hidden_act", "relu", "it must be gelu"),
        ("internvl", "config.json", "vision_feature_layer", -2, "it must be -1"),
        ("internvl", "config.json", "vision_feature_select_strategy", "full", "it must be default"),
        ("internvl", "config.json", "downsample_ratio", 0.4, "1 divided by a whole number"),
        ("internvl", "config.json", "downsample_ratio", 0.2, "no multiple of 5"),
        ("internvl", "config.json", "vision_config.use_mean_pooling", False, "it must be true"),
        ("internvl", "config.json", "vision_config.use_mask_token", True, "it must be false"),
        ("internvl", "preprocessor_config.json", "size.width", 64, SIZE_OF_ENCODER),
        ("internvl", "preprocessor_config.json", "max_patches", 65, "min_patches to 64"),
        ("qianfan_ocr", "config.json", "vision_config.use_mean_pooling", False, "it must be true"),
        ("aya_vision", "config.json", "vision_feature_select_strategy", "default", "it must be full"),
        ("aya_vision", "config.json", "vision_feature_layer", -4, "one layer, -2 to 2"),
        ("aya_vision", "config.json", "downsample_factor", 3, "no multiple of 3"),
        ("aya_vision", "config.json", "alignment_intermediate_size", 35, "no multiple of 2"),
        ("aya_vision", "config.json", "adapter_layer_norm_eps", 0.0, "a small number"),
        ("aya_vision", "processor_config.json", "image_processor.size.width", 64, SIZE_OF_ENCODER),
        ("cohere2_vision", "preprocessor_config.json", "patch_size", 16, "it must be 4, the square root"),
        ("cohere2_vision", "preprocessor_config.json", "max_patches", 65, "min_patches to 64"),
        ("mistral3", "config.json", "spatial_merge_size", 17, "allowed is 1 to 16"),
        ("mistral3", "config.json", "projector_hidden_act", "relu", "it must be gelu"),
        ("mistral3", "config.json", "vision_config.rope_parameters.rope_type", "yarn", "it must be axial"),
        ("mistral3", "config.json", "vision_config.num_attention_heads", 3, "a multiple of 4"),
        ("mistral3", "preprocessor_config.json", "size", {"height": 64, "width": 64}, "lacks longest_edge"),
        ("mistral3", "preprocessor_config.json", "size.longest_edge", 5000, "it must be 1 to 4096"),
        ("pixtral", "config.json", "vision_feature_select_strategy", "default", "it must be full"),
        ("lighton_ocr", "preprocessor_config.json", "patch_size", 6, "a multiple of 4, the patch_size of the"),
        ("lighton_ocr", "preprocessor_config.json", "patch_size", {"height": 4, "width": 8}, "a square"),
        ("lighton_ocr", "preprocessor_config.json", "patch_size", 0, "allowed is 1 to 4096"),
    ],
)
def test_unsupported_field_of_an_image_encoder_is_refused_by_name(
    kind: str,
    file: str,
    place: str,
    value: object,
    message: str,
    vision_checkpoint: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(vision_checkpoint(kind), copy)
    assert open_checkpoint(copy).vision is not None
    change(copy / file, place, value)
    with pytest.raises(ModelLoadError, match=message):
        open_checkpoint(copy)


@pytest.mark.parametrize(
    "kind, place, value",
    [
        ("llava", "vision_config.model_type", "dinov3_vit"),
        ("internvl", "vision_config.use_qk_norm", True),
        ("internvl", "vision_config.norm_type", "rms_norm"),
        ("mistral3", "vision_config.model_type", "siglip_vision_model"),
        ("aya_vision", "vision_config.model_type", "siglip2_vision_model"),
    ],
)
def test_model_with_unknown_image_encoder_reads_texts_only(
    kind: str,
    place: str,
    value: object,
    vision_checkpoint: Callable[[str], Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(vision_checkpoint(kind), copy)
    change(copy / "config.json", place, value)
    assert open_checkpoint(copy).vision is None
    assert "images are not served: " in caplog.text
    assert place.removeprefix("vision_config.") in caplog.text


@pytest.mark.parametrize("kind", ["llava", "internvl", "mistral3"])
def test_unread_field_of_an_image_encoder_is_named_in_a_warning(
    kind: str, vision_checkpoint: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(vision_checkpoint(kind), copy)
    open_checkpoint(copy)
    assert caplog.text == ""
    change(copy / "config.json", "vision_config.hidden_sise", 8)
    open_checkpoint(copy)
    assert "vision_config in config.json has 1 fields that are not read here" in caplog.text
    assert "hidden_sise" in caplog.text


def change(file: Path, place: str, value: object) -> None:
    """Set a field of a JSON file. place: names of nested fields, separated by dots."""
    content = inner = json.loads(file.read_text())
    *outer, last = place.split(".")
    for name in outer:
        inner = inner[name]
    inner[last] = value
    file.write_text(json.dumps(content))
