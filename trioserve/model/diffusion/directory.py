"""Reads the descriptions in a diffusers directory, without torch and without diffusers.

`describe` gives the allowed sizes, steps and samplers of the image model, and its defaults.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import reprlib
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from trioserve.contracts.errors import ModelLoadError, StartupError
from trioserve.contracts.extras import install_command
from trioserve.contracts.image_generation import PNDM, ImageModelDescription
from trioserve.model.diffusion.registry import Pipeline, find_pipeline
from trioserve.model.loading.safetensors import tensors_in_file
from trioserve.model.loading.stored_tensor import STORAGE_BYTES, FileTensor
from trioserve.model.model_config import Dtype
from trioserve.model.settings import DeviceName, DtypeName, ModelSettings

__all__ = [
    "SAMPLER_NAMES",
    "ImageDirectory",
    "ImageModelSettings",
    "check_image_extra",
    "describe",
    "is_image_model",
    "samplers_of",
]


INDEX_NAME = "model_index.json"
JSON_BYTES_MAX = 16 * 2**20  # Limit per config file. Labels of some thousand classes need a tenth of this limit.
TOKENIZER_BYTES_MAX = 64 * 2**20  # Limit per file of a tokenizer. Files of CLIP and T5 have up to 3 MB.
WEIGHT_NAMES = ("diffusion_pytorch_model", "model")
WHOLE_MAX = 65_536  # Limit for numbers in a config, unless a stored tensor has a larger dimension.
SCHEDULER_WHOLE_MAX = 100_000  # Limit for numbers in a scheduler's config. Models are trained with 1000 timesteps.
# Fields whose names have these endings must be at least 1. In an encoder's config, fields of a decoder may be 0.
POSITIVE_ENDINGS = ("_channels", "_dim", "_distance", "_groups", "_heads", "_kernel", "_layers", "_size")
POSITIVE_NAMES = ("d_ff", "d_kv", "d_model", "layers_per_block")
BLOCKS_MAX = 16  # Each block halves the sides of an image. Real VAEs have 3 to 5 blocks.
DTYPES: dict[str, Dtype] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


DIGEST_BYTES = 8
SAMPLES, SAMPLE_BYTES = 64, 4096  # samples per file, evenly distributed, and bytes per sample


def is_image_model(directory: str | Path) -> bool:
    """Return True if a directory contains an image model of diffusers, even an unsupported one.

    Args:
        directory: any path.
    """
    try:
        return (Path(directory) / INDEX_NAME).is_file()
    except OSError:  # An example of a cause is a name that is too long.
        return False


def check_image_extra() -> None:
    """Check that the packages for image models are installed, without importing them.

    Raises:
        StartupError: a package is missing.
    """
    for package in ("torch", "diffusers", "transformers", "PIL"):
        if importlib.util.find_spec(package) is None:
            raise StartupError(f"an image model needs {package}, which is not installed: {install_command('image')}")


class ImageDirectory:
    """Configs of an image model.

    Args:
        path: a directory that diffusers' save_pretrained wrote.

    Attributes:
        pipeline: the diffusers pipeline of the model.
        denoiser: config of the network that computes the steps.
        vae: config of the VAE.
        scheduler: config of the scheduler, with its class as `_class_name`.
        fills_in: True for an inpainting network, whose input includes the mask.

    Raises:
        ModelLoadError: the path is not a diffusers directory, or the pipeline is not supported.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not is_image_model(self.path):
            raise ModelLoadError(f"{path} has no {INDEX_NAME}: name a directory written by diffusers' save_pretrained")
        self._index = _read_json(self.path / INDEX_NAME)
        class_name = str(self._index.get("_class_name"))
        self.pipeline: Pipeline = find_pipeline(class_name, str(path))
        for component, allowed in self.pipeline.classes.items():
            self._check_component(component, allowed)
        self.denoiser = self.config(self.pipeline.denoiser)
        self.vae = self.config("vae")
        self.scheduler = self._scheduler()
        self.fills_in = self._fills_in()

    @property
    def labels(self) -> dict[int, str]:
        """Names of classes by number, empty if the model has none."""
        found = self._index.get("id2label")
        if not isinstance(found, dict):
            return {}
        try:
            return {int(index): str(label) for index, label in found.items()}
        except ValueError:
            raise ModelLoadError(f"{self.path / INDEX_NAME}: id2label has an index that is not a number") from None

    @property
    def options(self) -> dict[str, Any]:
        """The entries of model_index.json that are not components."""
        return {name: value for name, value in self._index.items() if not isinstance(value, list)}

    @property
    def vae_scale(self) -> int:
        """Side length of one latent pixel in image pixels."""
        channels: list[int] = self._field("vae", self.vae, "block_out_channels", list)
        if len(channels) > BLOCKS_MAX:
            raise ModelLoadError(
                f"{self.path / 'vae' / 'config.json'}: block_out_channels has {len(channels)} entries, at most "
                f"{BLOCKS_MAX} are allowed"
            )
        return 1 << (len(channels) - 1)

    @property
    def latent_sides(self) -> tuple[int, int]:
        """Height and width that the model was trained for, in latent pixels."""
        size = self.denoiser.get("sample_size", self.pipeline.latent_side)
        sides = [size, size] if isinstance(size, int) else size
        if not (
            isinstance(sides, list) and len(sides) == 2 and all(isinstance(side, int) and side > 0 for side in sides)
        ):
            raise ModelLoadError(
                f"{self.path / self.pipeline.denoiser / 'config.json'}: sample_size is {size!r}, it must be one or two"
            )
        return sides[0], sides[1]

    @property
    def dtype(self) -> Dtype:
        """Stored dtype of the network that computes the steps."""
        variant = self.variant(self.pipeline.denoiser)
        ending = "" if variant is None else f".{variant}"
        folder = self.path / self.pipeline.denoiser
        for name in WEIGHT_NAMES:
            # Weights are in one file, or in several files with names such as "...-00001-of-00002.safetensors".
            for pattern in (f"{name}{ending}.safetensors", f"{name}{ending}-?????-of-?????.safetensors"):
                for path in sorted(folder.glob(pattern)):
                    return _stored_dtype(path)
        raise ModelLoadError(f"{folder}: the weight files are missing: the directory is incomplete")

    def pick_dtype(self, wanted: DtypeName, device: str) -> Dtype:
        """Return the number format in which the model is computed.

        Args:
            wanted: format of the settings. "auto" selects the stored format, or float32 for float16 on a CPU.
            device: device that computes.
        """
        if wanted != "auto":
            return wanted
        stored = self.dtype
        return "float32" if device == "cpu" and stored == "float16" else stored

    def variant(self, component: str) -> str | None:
        """Return the name of the weight variant that a component's folder contains.

        Args:
            component: name of the component.

        Returns:
            "bf16", "fp16", "fp32", or None for weights without a variant.

        Raises:
            ModelLoadError: there are no safetensors files. Other formats could run code.
        """
        folder = self.path / component
        for variant in (None, "bf16", "fp16", "fp32"):
            ending = "" if variant is None else f".{variant}"
            for name in WEIGHT_NAMES:
                if any(
                    (folder / f"{name}{found}").is_file()
                    for found in (f"{ending}.safetensors", f".safetensors.index{ending}.json")
                ):
                    return variant
        raise ModelLoadError(f"{folder} has no weights in safetensors: save the pipeline with safe_serialization=True")

    def component(self, name: str) -> tuple[str, str]:
        """Return the library and the class of a component.

        Args:
            name: name of the component.
        """
        library, class_name = self._index[name]
        return library, class_name

    def config(self, component: str) -> dict[str, Any]:
        """Read the config of a component.

        Args:
            component: name of the component.

        Raises:
            ModelLoadError: config.json is missing or damaged.
        """
        return _read_json(self.path / component / "config.json")

    def stored_shapes(self, component: str) -> list[tuple[int, ...]]:
        """Return the shapes of all stored tensors of a component, read from file headers.

        Args:
            component: name of the component.

        Raises:
            ModelLoadError: files are missing or damaged.
        """
        variant = self.variant(component)
        ending = "" if variant is None else f".{variant}"
        folder = self.path / component
        for name in WEIGHT_NAMES:
            for pattern in (
                f"{name}{ending}.safetensors",
                f"{name}{ending}-?????-of-?????.safetensors",
                f"{name}-?????-of-?????{ending}.safetensors",
            ):
                if files := sorted(folder.glob(pattern)):
                    stored: dict[str, FileTensor] = {}
                    for file in files:
                        stored |= tensors_in_file(file, tuple(STORAGE_BYTES))
                    return [tuple(tensor.shape) for tensor in stored.values()]
        raise ModelLoadError(f"{folder}: the weight files are missing: the directory is incomplete")

    def check_tokenizer_sizes(self, component: str) -> None:
        """Check the file sizes of a tokenizer before a library reads the files.

        Args:
            component: name of the tokenizer.

        Raises:
            ModelLoadError: a file is too large.
        """
        for path in (self.path / component).iterdir():
            if path.is_file() and (size := path.stat().st_size) > TOKENIZER_BYTES_MAX:
                raise ModelLoadError(
                    f"{path} has {size} bytes, at most {TOKENIZER_BYTES_MAX} are allowed: the file is damaged"
                )

    def check_sizes(self, component: str) -> None:
        """Compare the numbers of a component's config with its weights, before a library builds a network from them.

        Args:
            component: name of the component.

        Raises:
            ModelLoadError: a number is too small, or larger than any network with these weights needs.
        """
        shapes = self.stored_shapes(component)
        largest = max(WHOLE_MAX, *(side for shape in shapes for side in shape), 0)
        for name, value in _wholes(self.config(component)):
            if value < (least := _least(name)):
                raise ModelLoadError(
                    f"{self.path / component / 'config.json'}: {name} is {reprlib.repr(value)}, at least {least} is "
                    "allowed: the file is damaged"
                )
            whole_max = len(shapes) if "layer" in name else largest
            if value > whole_max:
                what = "the number of stored tensors" if "layer" in name else "the longest side of stored tensors"
                raise ModelLoadError(
                    f"{self.path / component / 'config.json'}: {name} is {reprlib.repr(value)}, at most {whole_max} is "
                    f"allowed ({what}): the file is damaged or belongs to another model"
                )

    def _check_component(self, component: str, allowed: tuple[str, ...]) -> None:
        entry = self._index.get(component)
        found = entry[1] if isinstance(entry, list) and len(entry) == 2 else None
        if found not in allowed:
            raise ModelLoadError(
                f"{self.path / INDEX_NAME}: {component} is {found or 'missing'}, but a {self.pipeline.family} model "
                f"needs {' or '.join(allowed)}: use a checkpoint that has it"
            )

    def _fills_in(self) -> bool:
        """Return True for an inpainting network, whose input includes a mask and the latent of the unmasked part.

        Inpainting networks of Stable Diffusion have 9 input channels.

        Raises:
            ModelLoadError: the network needs an additional input that is not supported.
        """
        channels = self.vae.get("latent_channels", 4)  # 4 is the default of diffusers.
        if not isinstance(channels, int):
            raise ModelLoadError(
                f"{self.path / 'vae' / 'config.json'}: latent_channels is {channels!r}, must be a number"
            )
        latent = channels * self.pipeline.packed_count
        taken = self.denoiser.get("in_channels", latent)
        if taken == latent:
            return False
        if self.pipeline.takes_images and taken == 2 * latent + 1:
            return True
        raise ModelLoadError(
            f"{self.path / self.pipeline.denoiser}: in_channels is {taken}, but latents have {latent} channels: use a "
            "checkpoint that makes images from a prompt"
        )

    def _scheduler(self) -> dict[str, Any]:
        entry = self._index.get("scheduler")
        if not (isinstance(entry, list) and len(entry) == 2 and isinstance(entry[1], str)):
            raise ModelLoadError(f"{self.path / INDEX_NAME} does not name a scheduler: save the pipeline with one")
        config = _read_json(self.path / "scheduler" / "scheduler_config.json")
        for name, value in _wholes(config):
            if value > SCHEDULER_WHOLE_MAX:
                raise ModelLoadError(
                    f"{self.path / 'scheduler' / 'scheduler_config.json'}: {name} is {reprlib.repr(value)}, at most "
                    f"{SCHEDULER_WHOLE_MAX} is allowed"
                )
        config["_class_name"] = entry[1]
        if entry[1] != "DDIMScheduler":
            config.setdefault("clip_sample", False)  # DDIM clips by default, but other schedulers never clip.
        if self.pipeline.corrects_scheduler:
            config = {**config, "steps_offset": 1, "clip_sample": False}
            if self._index["_class_name"] == "StableDiffusionInpaintPipeline":
                config["skip_prk_steps"] = True
        return config

    def _field(self, component: str, config: dict[str, Any], name: str, kind: type) -> Any:
        value = config.get(name)
        if not isinstance(value, kind) or not value:
            raise ModelLoadError(f"{self.path / component / 'config.json'}: {name} is {value!r}, which is not allowed")
        return value


def _least(name: str) -> float:
    if name.endswith(("_id", "_ids")):
        return -math.inf  # Fields with token ids may contain -1, which stands for no token.
    is_positive = name in POSITIVE_NAMES or name.endswith(POSITIVE_ENDINGS)
    return 1 if is_positive and "decoder" not in name else 0


def _wholes(config: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield all whole numbers of a config, also in lists and objects, each with the name of its field."""
    waiting: list[tuple[str, Any]] = list(config.items())
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, dict):
            waiting += value.items()
        elif isinstance(value, list):
            waiting += ((name, item) for item in value)
        elif isinstance(value, int) and not isinstance(value, bool):
            yield name, value


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > JSON_BYTES_MAX:
            raise ModelLoadError(f"{path} has {path.stat().st_size} bytes, at most {JSON_BYTES_MAX} are allowed")
        # json is used because msgspec rejects numbers such as -Infinity, which configs of schedulers contain.
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read ({error.strerror}): the directory is incomplete") from None
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} is not a JSON object: {error}") from None
    if not isinstance(found, dict):
        raise ModelLoadError(f"{path} is not a JSON object: it is {type(found).__name__}")
    return found


def _stored_dtype(path: Path) -> Dtype:
    """Return the dtype of the first floating-point tensor, or float32 without floating-point tensors."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > JSON_BYTES_MAX:
                raise ModelLoadError(f"{path}: the header has {length} bytes, at most {JSON_BYTES_MAX} are allowed")
            header = msgspec.json.decode(file.read(length), type=dict[str, dict[str, Any]])
    except (OSError, struct.error, msgspec.MsgspecError) as error:
        raise ModelLoadError(f"{path} is not a safetensors file ({error}): the download may be incomplete") from None
    for name, entry in header.items():
        if name != "__metadata__" and entry.get("dtype") in DTYPES:
            return DTYPES[entry["dtype"]]
    return "float32"


def name_of_weights(directory: ImageDirectory) -> str:
    """Return a name for the weights: their family, and a digest of byte samples from all files.

    Reading all bytes would take as long as loading the model. Samples are enough, because training changes all weights.

    Args:
        directory: a diffusers directory.

    Returns:
        Equal names for equal files.

    Raises:
        ModelLoadError: a file cannot be read.
    """
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    try:
        for path in _files(directory):
            size = path.stat().st_size
            digest.update(f"{path.relative_to(directory.path)} {size}\n".encode())
            with path.open("rb") as file:
                for sample in range(SAMPLES):
                    file.seek(size * sample // SAMPLES)
                    digest.update(file.read(SAMPLE_BYTES))
    except OSError as error:
        raise ModelLoadError(f"{directory.path} cannot be read: {error.strerror}") from None
    return f"{directory.pipeline.family}-{digest.hexdigest()}"


def _files(directory: ImageDirectory) -> Iterator[Path]:
    yield directory.path / "model_index.json"
    for component in sorted([*directory.pipeline.classes, "scheduler"]):
        yield from sorted(path for path in (directory.path / component).iterdir() if path.is_file())


class ImageModelSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of an image model.

    Attributes:
        dtype: "auto" selects the checkpoint's dtype. On a CPU, where float16 is slow, it selects float32 for a float16
            checkpoint. Only float32 guarantees that the bytes of an image do not depend on other requests.
        device: "auto" selects CUDA if there is a GPU.
        threads: CPU threads for computing. None selects torch's default, which is one per core.
        slot_count: number of latent slots, at least 1. Running requests and kept states use them.

    Raises:
        StartupError: a value is not allowed. The error names the field.
    """

    dtype: DtypeName = "auto"
    device: DeviceName = "auto"
    threads: int | None = None
    slot_count: int = 8

    def __post_init__(self) -> None:
        self.placing()
        if self.slot_count < 1:
            raise StartupError(f"slot_count is {self.slot_count}, but must be at least 1")

    def placing(self) -> ModelSettings:
        """Return the settings that image models have in common with text models."""
        return ModelSettings(dtype=self.dtype, device=self.device, threads=self.threads)


# Images may have this many pixels per side, or twice the trained size if that is more. Larger images lose quality.
SIDE_MAX = 2048
STEPS_WITHOUT_GUIDANCE = 4  # Models without guidance are distilled: they need only few steps.
SAMPLER_NAMES = {
    "DDIMScheduler": "ddim",
    "DPMSolverMultistepScheduler": "dpm++",
    "EulerAncestralDiscreteScheduler": "euler-ancestral",
    "EulerDiscreteScheduler": "euler",
    "FlowMatchEulerDiscreteScheduler": "flow-euler",
    "PNDMScheduler": PNDM,
}
PNDM_PREDICTIONS = ("epsilon", "v_prediction")


def samplers_of(directory: ImageDirectory) -> tuple[str, ...]:
    """Return the names of a model's samplers. The sampler of the model's own scheduler is the first.

    If the model's scheduler is not supported, the result contains only the other samplers. Each of them can sample the
    model.

    Args:
        directory: the diffusers directory.
    """
    scheduler = directory.scheduler
    own = SAMPLER_NAMES.get(scheduler["_class_name"])
    if own == PNDM and not scheduler.get("skip_prk_steps", False):
        own = None  # The first steps of this scheduler are Runge-Kutta steps, which are not implemented.
    allowed = directory.pipeline.samplers
    if scheduler.get("prediction_type", "epsilon") not in PNDM_PREDICTIONS:
        allowed = tuple(name for name in allowed if name != PNDM)
    return (own, *(name for name in allowed if name != own)) if own in allowed else allowed


def describe(directory: ImageDirectory, *, served_names: tuple[str, ...], source: str) -> ImageModelDescription:
    """Describe a model.

    Args:
        directory: the diffusers directory.
        served_names: names that requests may use.
        source: path or name that the model was opened by.

    Raises:
        ModelLoadError: the directory's configs contradict each other or the family.
    """
    pipeline = directory.pipeline
    scale = directory.vae_scale
    height, width = (side * scale for side in directory.latent_sides)
    multiple = scale * pipeline.patch_side
    side_min, side_max = multiple, max(SIDE_MAX, 2 * width, 2 * height) // multiple * multiple
    if pipeline.has_one_size:
        if width != height:
            raise ModelLoadError(
                f"{source} makes images of {width}x{height}, but a {pipeline.family} model must make square ones"
            )
        side_min = side_max = width
    takes_guidance = pipeline.has_guided_rows or bool(directory.denoiser.get("guidance_embeds"))
    return ImageModelDescription(
        served_names=served_names,
        source=source,
        family=pipeline.family,
        width=width,
        height=height,
        steps=pipeline.steps if takes_guidance else STEPS_WITHOUT_GUIDANCE,
        guidance=pipeline.guidance if takes_guidance else 1.0,
        samplers=samplers_of(directory),
        side_multiple=multiple,
        side_min=side_min,
        side_max=side_max,
        steps_max=_steps_max(directory),
        classes=None if pipeline.takes_texts else _classes(directory),
        takes_guidance=takes_guidance,
        has_guided_rows=pipeline.has_guided_rows,
        takes_negative=pipeline.takes_texts and pipeline.has_guided_rows,
        takes_images=pipeline.takes_images,
        created_at=int(time.time()),
    )


def _steps_max(directory: ImageDirectory) -> int:
    count = directory.scheduler.get("num_train_timesteps", 1000)  # 1000 is the default of diffusers.
    if not isinstance(count, int) or count < 1:
        raise ModelLoadError(
            f"{directory.path}: scheduler_config.json: num_train_timesteps is {count!r}, but must be at least 1"
        )
    return count


def _classes(directory: ImageDirectory) -> tuple[str, ...]:
    """Return the names of a model's classes. A class without a name is named by its number.

    If only the first classes have names, the model has no other classes. A network has at least 1000 embeddings even if
    it has fewer classes, because DiTPipeline always uses the index 1000 for rows without a class.
    """
    count = directory.denoiser.get("num_embeds_ada_norm", 1000)  # 1000 is the default of diffusers.
    labels = directory.labels
    if not isinstance(count, int) or count < 1 or any(not 0 <= index < count for index in labels):
        raise ModelLoadError(
            f"{directory.path}: id2label names classes up to {max(labels, default=0)}, but the network has {count}"
        )
    if labels and max(labels) == len(labels) - 1:
        count = len(labels)
    return tuple(labels.get(index, str(index)) for index in range(count))
