"""Tests of reading a diffusers directory: the description of the model, and the errors for unsupported ones."""

from __future__ import annotations

import json
import shutil

import pytest
import sentencepiece
import transformers
from safetensors.torch import load_file, save_file

from trioserve.contracts.errors import ModelLoadError, StartupError
from trioserve.model.diffusion import directory as directory_file
from trioserve.model.diffusion.directory import (
    ImageDirectory,
    ImageModelSettings,
    check_image_extra,
    describe,
    is_image_model,
)
from trioserve.model.diffusion.runner import DiffusionRunner
from trioserve.text.tokenizer_directory import check_tokenizer


def describe_at(path):
    return describe(ImageDirectory(path), served_names=("tiny",), source=str(path))


@pytest.fixture
def changed(checkpoint, tmp_path):
    """Return changed(family, file, **fields), which copies a model and sets fields in one of its JSON files."""

    def change(family, file, **fields):
        path = tmp_path / "changed"
        shutil.copytree(checkpoint(family), path)
        content = json.loads((path / file).read_text())
        content.update(fields)
        (path / file).write_text(json.dumps({name: value for name, value in content.items() if value is not None}))
        return path

    return change


def test_class_conditional_model_is_described(checkpoint):
    found = describe_at(checkpoint("dit"))
    assert (found.family, found.width, found.height, found.side_min, found.side_max) == ("dit", 8, 8, 8, 8)
    assert (found.steps, found.guidance) == (50, 4.0)
    assert found.samplers == ("ddim", "dpm++", "euler", "euler-ancestral", "pndm")
    assert found.classes is not None
    assert (len(found.classes), found.classes[1]) == (1000, "b1")
    assert not found.takes_negative
    assert not found.takes_images


def test_text_conditional_model_is_described(checkpoint):
    found = describe_at(checkpoint("stable-diffusion"))
    assert (found.family, found.width, found.height, found.side_multiple) == ("stable-diffusion", 16, 16, 2)
    assert (found.steps, found.guidance, found.classes) == (50, 7.5, None)
    assert found.takes_negative
    assert found.takes_images


def test_class_without_a_name_is_named_by_its_number(changed):
    path = changed("dit", "model_index.json", id2label={"2": "owl"})
    assert describe_at(path).classes[:4] == ("0", "1", "owl", "3")


def test_unnamed_classes_after_the_last_named_class_are_not_offered(changed):
    path = changed("dit", "model_index.json", id2label={"1": "owl", "0": "cat"})
    assert describe_at(path).classes == ("cat", "owl")


def test_checkpoint_with_an_unsupported_scheduler_can_use_other_samplers(changed):
    path = changed("stable-diffusion", "model_index.json", scheduler=["diffusers", "HeunDiscreteScheduler"])
    assert describe_at(path).samplers == ("ddim", "dpm++", "euler", "euler-ancestral", "pndm")


def test_log_names_the_replacement_of_an_unsupported_scheduler(changed, caplog):
    path = changed("dit", "model_index.json", scheduler=["diffusers", "HeunDiscreteScheduler"])
    DiffusionRunner.load(ImageDirectory(path), ImageModelSettings(), check_tokenizer=check_tokenizer)
    assert "scheduler=HeunDiscreteScheduler sampler=ddim" in caplog.text


@pytest.mark.parametrize(
    ("pipeline", "fields", "samplers"),
    [
        ("StableDiffusionPipeline", {"skip_prk_steps": True}, ("pndm", "ddim")),
        ("StableDiffusionPipeline", {"skip_prk_steps": False}, ("ddim", "dpm++")),
        ("StableDiffusionPipeline", {}, ("ddim", "dpm++")),
        ("StableDiffusionInpaintPipeline", {}, ("pndm", "ddim")),
        ("StableDiffusionPipeline", {"skip_prk_steps": True, "prediction_type": "sample"}, ("ddim", "dpm++")),
    ],
    ids=["as-published", "runge-kutta", "left-out", "corrected", "sample"],
)
def test_pndm_is_offered_without_runge_kutta_steps(changed, pipeline, fields, samplers):
    """Check skip_prk_steps, which diffusers sets in every inpainting pipeline."""
    index = {"_class_name": pipeline, "scheduler": ["diffusers", "PNDMScheduler"]}
    path = changed("stable-diffusion", "model_index.json", **index)
    file = path / "scheduler" / "scheduler_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
    found = describe_at(path).samplers
    assert found[:2] == samplers
    assert ("pndm" in found) == (fields.get("prediction_type") != "sample")


def test_scheduler_of_the_directory_is_the_default_sampler(changed):
    path = changed("stable-diffusion", "model_index.json", scheduler=["diffusers", "EulerDiscreteScheduler"])
    assert describe_at(path).samplers == ("euler", "ddim", "dpm++", "euler-ancestral", "pndm")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"_class_name": "ShapEPipeline"}, "is a ShapEPipeline, but supported are DiTPipeline"),
        ({"transformer": ["diffusers", "AuraFlowTransformer2DModel"]}, "needs DiTTransformer2DModel or Transformer2D"),
        ({"vae": None}, "vae is missing"),
        ({"scheduler": None}, "does not name a scheduler"),
        ({"id2label": {"x": "owl"}}, "an index that is not a number"),
        ({"id2label": {"1000": "owl"}}, "the network has 1000"),
    ],
    ids=["family", "class", "missing", "scheduler", "label", "labels"],
)
def test_unsupported_model_index_of_diffusers_is_refused(changed, fields, says):
    with pytest.raises(ModelLoadError, match=says):
        describe_at(changed("dit", "model_index.json", **fields))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"thresholding": True}, "thresholding is True"),
        ({"algorithm_type": "dpmsolver"}, "algorithm_type is 'dpmsolver'"),
        ({"prediction_type": "colour"}, "prediction_type is 'colour'"),
    ],
    ids=["thresholding", "algorithm", "prediction"],
)
def test_unsupported_scheduler_setting_is_refused(changed, fields, says):
    path = changed("dit", "scheduler/scheduler_config.json", **fields)
    with pytest.raises(ModelLoadError, match=says):
        DiffusionRunner.load(ImageDirectory(path), ImageModelSettings(), check_tokenizer=check_tokenizer)


def test_network_with_additional_input_channels_is_refused(changed):
    with pytest.raises(ModelLoadError, match="in_channels is 8, but latents have 4"):
        ImageDirectory(changed("stable-diffusion", "unet/config.json", in_channels=8))


def test_pickled_weights_are_refused(changed):
    path = changed("dit", "model_index.json")
    weights = path / "vae" / "diffusion_pytorch_model.safetensors"
    weights.rename(weights.with_suffix(".bin"))
    with pytest.raises(ModelLoadError, match="safe_serialization"):
        DiffusionRunner.load(ImageDirectory(path), ImageModelSettings(), check_tokenizer=check_tokenizer)


def test_image_model_has_the_dtype_of_the_loaded_variant(changed):
    """Store two variants side by side, as hubs do. The "fp16" file name sorts first."""
    path = changed("dit", "model_index.json")
    weights = path / "transformer" / "diffusion_pytorch_model.safetensors"
    header = b'{"x":{"dtype":"F16","shape":[0],"data_offsets":[0,0]}}'
    half = len(header).to_bytes(8, "little") + header
    weights.with_suffix(".fp16.safetensors").write_bytes(half)
    assert ImageDirectory(path).dtype == "float32"
    weights.unlink()
    assert ImageDirectory(path).dtype == "float16"


@pytest.mark.parametrize("content", [b"", b"\x05\0\0\0\0\0\0\0{", b"version https://git-lfs.github.com/spec/v1"])
def test_incomplete_weight_file_is_refused(changed, content):
    path = changed("dit", "model_index.json")
    (path / "transformer" / "diffusion_pytorch_model.safetensors").write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"diffusion_pytorch_model.safetensors.*(complete|bytes)"):
        DiffusionRunner.load(ImageDirectory(path), ImageModelSettings(), check_tokenizer=check_tokenizer)


def tensors_of(path):
    weights = path / "model.safetensors"
    return weights if weights.is_file() else path / "diffusion_pytorch_model.safetensors"


@pytest.mark.parametrize("component", ["text_encoder", "unet", "vae"])
def test_image_model_with_a_missing_tensor_is_refused(changed, component):
    path = changed("stable-diffusion", "model_index.json")
    weights = tensors_of(path / component)
    tensors = load_file(weights)
    name = sorted(tensors)[-1]
    del tensors[name]
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=rf"{component} lacks 1 tensors of its weights, such as .*{name}"):
        DiffusionRunner.load(ImageDirectory(path), ImageModelSettings(), check_tokenizer=check_tokenizer)


@pytest.mark.parametrize("component", ["text_encoder", "unet", "vae"])
def test_truncated_weight_file_is_refused(changed, component):
    path = changed("stable-diffusion", "model_index.json")
    weights = tensors_of(path / component)
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    with pytest.raises(ModelLoadError, match=r"lies at bytes .* the file has"):
        DiffusionRunner.load(ImageDirectory(path), ImageModelSettings(), check_tokenizer=check_tokenizer)


@pytest.mark.parametrize(
    ("file", "fields", "says"),
    [
        ("scheduler/scheduler_config.json", {"beta_start": {}}, "scheduler_config.json: DDIMScheduler"),
        ("scheduler/scheduler_config.json", {"beta_schedule": "steep"}, "scheduler_config.json: DDIMScheduler"),
        ("text_encoder/config.json", {"vocab_size": "many"}, "text_encoder cannot be loaded"),
        ("vae/config.json", {"act_fn": 5}, "vae cannot be loaded"),
        ("vae/config.json", {"scaling_factor": []}, r"scaling_factor is \[\]"),
        ("vae/config.json", {"shift_factor": "none"}, "shift_factor is 'none'"),
        ("vae/config.json", {"latent_channels": "4"}, "latent_channels is '4'"),
    ],
)
def test_error_names_the_file_with_a_wrong_value(changed, file, fields, says):
    with pytest.raises(ModelLoadError, match=says):
        DiffusionRunner.load(
            ImageDirectory(changed("stable-diffusion", file, **fields)),
            ImageModelSettings(),
            check_tokenizer=check_tokenizer,
        )


def test_weights_with_other_shapes_are_refused(changed):
    path = changed("dit", "transformer/config.json", num_layers=3, num_attention_heads=4)
    with pytest.raises(ModelLoadError, match="transformer cannot be loaded"):
        DiffusionRunner.load(ImageDirectory(path), ImageModelSettings(), check_tokenizer=check_tokenizer)


@pytest.mark.parametrize(
    ("kind", "component", "fields", "says"),
    [
        ("stable-diffusion", "text_encoder", {"num_hidden_layers": 0}, "num_hidden_layers is 0, at least 1 is allowed"),
        ("stable-diffusion", "text_encoder", {"num_attention_heads": -1}, "num_attention_heads is -1, at least 1"),
        ("pixart", "text_encoder", {"num_layers": -3}, "num_layers is -3, at least 1 is allowed"),
        ("stable-diffusion", "vae", {"norm_num_groups": -1}, "norm_num_groups is -1, at least 1 is allowed"),
        ("stable-diffusion", "unet", {"freq_shift": -1}, "freq_shift is -1, at least 0 is allowed"),
        ("stable-diffusion", "text_encoder", {"num_hidden_layers": 1}, r"encoder\.layers\.1\..*fewer layers"),
        ("pixart", "text_encoder", {"num_layers": 1}, r"encoder\.block\.1\..*fewer layers"),
        ("dit", "transformer", {"num_layers": 1}, r"transformer_blocks\.1\..*fewer layers"),
    ],
)
def test_image_model_config_with_fewer_layers_than_the_weights_is_refused(changed, kind, component, fields, says):
    path = changed(kind, f"{component}/config.json", **fields)
    with pytest.raises(ModelLoadError, match=says):
        DiffusionRunner.load(ImageDirectory(path), ImageModelSettings(), check_tokenizer=check_tokenizer)


def test_unused_tensor_outside_of_layers_is_accepted(changed):
    path = changed("stable-diffusion", "text_encoder/config.json", pad_token_id=-1)
    weights = tensors_of(path / "text_encoder")
    tensors = load_file(weights)
    first = sorted(tensors)[0]
    save_file({**tensors, "other.0.weight": tensors[first].clone()}, weights, metadata={"format": "pt"})
    DiffusionRunner.load(ImageDirectory(path), ImageModelSettings(), check_tokenizer=check_tokenizer)


def test_directory_without_a_readable_index_is_refused(tmp_path):
    assert not is_image_model(tmp_path)
    assert not is_image_model("x" * 5000)
    with pytest.raises(ModelLoadError, match="has no model_index"):
        ImageDirectory(tmp_path)
    (tmp_path / "model_index.json").write_text("{")
    assert is_image_model(tmp_path)
    with pytest.raises(ModelLoadError, match="is not a JSON object"):
        ImageDirectory(tmp_path)


def test_error_of_a_missing_extra_names_the_command_to_install(monkeypatch):
    monkeypatch.setattr(directory_file.importlib.util, "find_spec", lambda name: None if name == "diffusers" else name)
    with pytest.raises(StartupError, match=r"needs diffusers.*pip install .*\[image\]'"):
        check_image_extra()


def test_settings_error_names_the_field_out_of_range():
    with pytest.raises(StartupError, match="slot_count is 0"):
        ImageModelSettings(slot_count=0)
    with pytest.raises(StartupError, match="device is 'tpu'"):
        ImageModelSettings(device="tpu")


def test_sentencepiece_tokenizer_is_read(checkpoint, driver, tmp_path):
    path = tmp_path / "pixart"
    shutil.copytree(checkpoint("pixart"), path)
    (path / "tokenizer" / "tokenizer.json").unlink()
    (path / "tokenizer" / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "T5Tokenizer"}))
    text = tmp_path / "text"
    text.write_text("a cat sat on the mat\n" * 10)
    sentencepiece.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(path / "tokenizer" / "spiece"),
        vocab_size=14,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        minloglevel=2,
    )
    one = driver.request("one", "a cat", size=(16, 16), sampler="dpm++", steps=2)
    assert driver.latents(driver.load(path), [one])[0].isfinite().all()


def load(path):
    return DiffusionRunner.load(ImageDirectory(path), ImageModelSettings(), check_tokenizer=check_tokenizer)


@pytest.mark.parametrize(
    "file, field, value, words",
    [
        ("unet", "layers_per_block", 5000, "the number of stored tensors"),
        ("unet", "layers_per_block", [1, 5000], "the number of stored tensors"),
        ("unet", "block_out_channels", [1_048_576, 1_048_576], "the longest side of stored tensors"),
        ("unet", "cross_attention_dim", 10**12, "the longest side of stored tensors"),
        ("vae", "block_out_channels", [1_048_576, 1_048_576], "the longest side of stored tensors"),
        ("text_encoder", "num_hidden_layers", 20_000, "the number of stored tensors"),
        ("text_encoder", "vocab_size", 2_000_000_000, "the longest side of stored tensors"),
        ("text_encoder", "max_position_embeddings", 10**40, "the longest side of stored tensors"),
    ],
)
def test_config_number_too_large_for_the_weights_is_refused(changed, file, field, value, words):
    with pytest.raises(ModelLoadError, match=f"{file}/config.json: {field} is .* at most .*{words}"):
        load(changed("stable-diffusion", f"{file}/config.json", **{field: value}))


@pytest.mark.parametrize("field", ["num_train_timesteps", "steps_offset", "solver_order"])
def test_scheduler_with_huge_numbers_is_refused(changed, field):
    path = changed("stable-diffusion", "scheduler/scheduler_config.json", **{field: 10**12})
    with pytest.raises(ModelLoadError, match=f"{field} is 1000000000000, at most 100000 is allowed"):
        ImageDirectory(path)


def test_vae_with_too_many_blocks_is_refused(changed):
    with pytest.raises(ModelLoadError, match="block_out_channels has 17 entries, at most 16"):
        describe_at(changed("stable-diffusion", "vae/config.json", block_out_channels=[4] * 17))


@pytest.mark.parametrize(
    "file, fields",
    [
        ("unet", {"layers_per_block": 300}),
        ("unet", {"block_out_channels": [2048, 2048]}),
        ("text_encoder", {"num_hidden_layers": 1000}),
        ("text_encoder", {"intermediate_size": 60_000, "hidden_size": 1024}),
    ],
)
def test_network_much_larger_than_its_weights_is_refused(changed, monkeypatch, file, fields):
    """Skip the check of single fields. The limit on built parameters must hold for any field."""
    monkeypatch.setattr(ImageDirectory, "check_sizes", lambda directory, component: None)
    with pytest.raises(ModelLoadError, match=f"{file}: config.json describes a network with more than"):
        load(changed("stable-diffusion", f"{file}/config.json", **fields))


STALLING = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
DOUBLING = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"pre_tokenizer": STALLING}, "backtrack too long"),
        ({"normalizer": {"type": "Sequence", "normalizers": [DOUBLING] * 8}}, "times as long"),
    ],
)
def test_tokenizer_with_stalling_rules_is_refused(checkpoint, tmp_path, monkeypatch, changes, words):
    def as_the_file_says(folder, **options):  # like transformers 4. Version 5 has the rules in code.
        return transformers.PreTrainedTokenizerFast(tokenizer_file=f"{folder}/tokenizer.json")

    monkeypatch.setattr(transformers.T5Tokenizer, "from_pretrained", as_the_file_says)
    path = tmp_path / "changed"
    shutil.copytree(checkpoint("pixart"), path)
    file = path / "tokenizer" / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(ModelLoadError, match=words):
        load(path)


def test_too_large_tokenizer_file_is_refused(changed, monkeypatch):
    monkeypatch.setattr(directory_file, "TOKENIZER_BYTES_MAX", 100)
    with pytest.raises(ModelLoadError, match=r"tokenizer.* bytes, at most 100 are allowed"):
        load(changed("stable-diffusion", "tokenizer/tokenizer_config.json"))


def test_progress_callback_can_end_the_loading_of_an_image_model(checkpoint):
    class Enough(Exception):
        """The error that the progress callback raises."""

    reported = []

    def progress(name):
        reported.append(name)
        if reported.count("unet") == 2:
            raise Enough

    with pytest.raises(ModelLoadError):
        DiffusionRunner.load(
            ImageDirectory(checkpoint("stable-diffusion")),
            ImageModelSettings(),
            check_tokenizer=check_tokenizer,
            progress=progress,
        )
    assert reported[-1] == "unet"
