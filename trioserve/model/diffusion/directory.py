"""A directory that diffusers has saved: what it holds, read without torch and without diffusers."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import reprlib
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from trioserve.contracts.errors import ModelLoadError, StartupError
from trioserve.model.diffusion.registry import Pipeline, find_pipeline
from trioserve.model.loading.file_tensor import STORAGE_BYTES, FileTensor
from trioserve.model.loading.safetensors import tensors_in_file
from trioserve.model.model_config import Dtype

__all__ = ["ImageDirectory", "check_image_extra", "is_image_model"]

INDEX_NAME = "model_index.json"
JSON_BYTES_MAX = 16 * 2**20  # a description is small; labels of some thousand classes are a tenth of this
TOKENIZER_BYTES_MAX = 64 * 2**20  # of each file of a tokenizer; those of CLIP and T5 have up to 3 MB
WEIGHT_NAMES = ("diffusion_pytorch_model", "model")
WHOLE_MAX = 65_536  # of a number in a description, if no tensor of the weights has a larger side
SCHEDULER_WHOLE_MAX = 100_000  # timesteps that a scheduler was trained with are 1000
# Numbers of a description that no network has at 0, by how their names end. An encoder has no use for a decoder's.
POSITIVE_ENDINGS = ("_channels", "_dim", "_distance", "_groups", "_heads", "_kernel", "_layers", "_size")
POSITIVE_NAMES = ("d_ff", "d_kv", "d_model", "layers_per_block")
BLOCKS_MAX = 16  # each halves an image's sides; real ones are 3 to 5
DTYPES: dict[str, Dtype] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


DIGEST_BYTES = 8
SAMPLES, SAMPLE_BYTES = 64, 4096  # of each file, all over it


def is_image_model(directory: str | Path) -> bool:
    """Whether it is a directory of a model that makes pictures, of a kind that is served or of another."""
    try:
        return (Path(directory) / INDEX_NAME).is_file()
    except OSError:  # such as a name that is too long for a file
        return False


def check_image_extra() -> None:
    """Raises StartupError where what computes pictures is not installed. Imports nothing."""
    for package in ("torch", "diffusers", "transformers", "PIL"):
        if importlib.util.find_spec(package) is None:
            raise StartupError(
                f"a model that makes pictures needs {package}, which is not installed: pip install 'trioserve[image]'"
            )


class ImageDirectory:
    """Raises ModelLoadError if it is none, or one of a kind that is not served.

    fills_in: its network is told what is masked.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not is_image_model(self.path):
            raise ModelLoadError(
                f"{path} has no {INDEX_NAME}: name a directory that diffusers' save_pretrained has written"
            )
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
        found = self._index.get("id2label")
        if not isinstance(found, dict):
            return {}
        try:
            return {int(index): str(label) for index, label in found.items()}
        except ValueError:
            raise ModelLoadError(f"{self.path / INDEX_NAME}: id2label has an index that is no number") from None

    @property
    def options(self) -> dict[str, Any]:
        """All of the index that is no component."""
        return {name: value for name, value in self._index.items() if not isinstance(value, list)}

    @property
    def vae_scale(self) -> int:
        """Pixels in a side of what the VAE makes one latent pixel of."""
        channels: list[int] = self._field("vae", self.vae, "block_out_channels", list)
        if len(channels) > BLOCKS_MAX:
            raise ModelLoadError(
                f"{self.path / 'vae' / 'config.json'}: block_out_channels has {len(channels)} entries, at most "
                f"{BLOCKS_MAX} are read"
            )
        return 1 << (len(channels) - 1)

    @property
    def latent_sides(self) -> tuple[int, int]:
        """Height and width that it was made for, in latent pixels."""
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
        """Of the network that denoises."""
        variant = self.variant(self.pipeline.denoiser)
        ending = "" if variant is None else f".{variant}"
        folder = self.path / self.pipeline.denoiser
        for name in WEIGHT_NAMES:
            # Whole, or in parts such as "...-00001-of-00002.safetensors". Beside them others may lie, in other formats.
            for pattern in (f"{name}{ending}.safetensors", f"{name}{ending}-?????-of-?????.safetensors"):
                for path in sorted(folder.glob(pattern)):
                    return _stored_dtype(path)
        raise ModelLoadError(f"{folder}: the weights that its index names are missing: the directory is not complete")

    def variant(self, component: str) -> str | None:
        """Which of the weights that a component may have are there; None: the plain ones. Raises ModelLoadError if
        there are none that can be read without running code."""
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
        """Its library and its class."""
        library, class_name = self._index[name]
        return library, class_name

    def config(self, component: str) -> dict[str, Any]:
        return _read_json(self.path / component / "config.json")

    def stored_shapes(self, component: str) -> list[tuple[int, ...]]:
        """The shapes of all tensors in a component's weights, as the headers of its files say."""
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
        raise ModelLoadError(f"{folder}: the weights that its index names are missing: the directory is not complete")

    def check_tokenizer_sizes(self, component: str) -> None:
        """Compare the sizes of a tokenizer's files with what is allowed, before a library reads them.

        Raises:
            ModelLoadError: a file is larger.
        """
        for path in (self.path / component).iterdir():
            if path.is_file() and (size := path.stat().st_size) > TOKENIZER_BYTES_MAX:
                raise ModelLoadError(f"{path} has {size} bytes, at most {TOKENIZER_BYTES_MAX} are read: it is damaged")

    def check_sizes(self, component: str) -> None:
        """Compare the numbers of a component's description with its weights, before a library makes a network of them.

        Raises:
            ModelLoadError: a number is negative, or 0 where there must be something, or larger than any network with
                these weights could need.
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
                what = "its weights have so many tensors" if "layer" in name else "the longest side of its tensors"
                raise ModelLoadError(
                    f"{self.path / component / 'config.json'}: {name} is {reprlib.repr(value)}, at most {whole_max} is "
                    f"allowed ({what}): the file is damaged, or another model's"
                )

    def _check_component(self, component: str, allowed: tuple[str, ...]) -> None:
        entry = self._index.get(component)
        found = entry[1] if isinstance(entry, list) and len(entry) == 2 else None
        if found not in allowed:
            raise ModelLoadError(
                f"{self.path / INDEX_NAME}: {component} is {found or 'missing'}, and a {self.pipeline.family} model "
                f"takes {' or '.join(allowed)}: take a checkpoint that has one"
            )

    def _fills_in(self) -> bool:
        """Whether the network takes a mask and the latent of what is around it, too, as inpainting ones of nine
        channels do. Raises ModelLoadError for one that takes anything else."""
        channels = self.vae.get("latent_channels", 4)  # what diffusers takes where nothing is said
        if not isinstance(channels, int):
            raise ModelLoadError(f"{self.path / 'vae' / 'config.json'}: latent_channels is {channels!r}, and no number")
        latent = channels * self.pipeline.packed_count
        taken = self.denoiser.get("in_channels", latent)
        if taken == latent:
            return False
        if self.pipeline.takes_images and taken == 2 * latent + 1:
            return True
        raise ModelLoadError(
            f"{self.path / self.pipeline.denoiser}: in_channels is {taken}, and latents have {latent}: take a "
            "checkpoint that makes pictures of a prompt"
        )

    def _scheduler(self) -> dict[str, Any]:
        entry = self._index.get("scheduler")
        if not (isinstance(entry, list) and len(entry) == 2 and isinstance(entry[1], str)):
            raise ModelLoadError(f"{self.path / INDEX_NAME} names no scheduler: save the pipeline with one")
        config = _read_json(self.path / "scheduler" / "scheduler_config.json")
        for name, value in _wholes(config):
            if value > SCHEDULER_WHOLE_MAX:
                raise ModelLoadError(
                    f"{self.path / 'scheduler' / 'scheduler_config.json'}: {name} is {reprlib.repr(value)}, at most "
                    f"{SCHEDULER_WHOLE_MAX} is allowed"
                )
        config["_class_name"] = entry[1]
        if entry[1] != "DDIMScheduler":
            config.setdefault("clip_sample", False)  # of another scheduler's file DDIM would take True
        if self.pipeline.corrects_scheduler:
            config = {**config, "steps_offset": 1, "clip_sample": False}
            if self._index["_class_name"] == "StableDiffusionInpaintPipeline":
                config["skip_prk_steps"] = True
        return config

    def _field(self, component: str, config: dict[str, Any], name: str, kind: type) -> Any:
        value = config.get(name)
        if not isinstance(value, kind) or not value:
            raise ModelLoadError(f"{self.path / component / 'config.json'}: {name} is {value!r}, which says nothing")
        return value


def _least(name: str) -> float:
    if name.endswith(("_id", "_ids")):
        return -math.inf  # of tokens: some files have -1 for none
    is_positive = name in POSITIVE_NAMES or name.endswith(POSITIVE_ENDINGS)
    return 1 if is_positive and "decoder" not in name else 0


def _wholes(config: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """All whole numbers with the names of their fields, those in lists and objects included."""
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
            raise ModelLoadError(f"{path} has {path.stat().st_size} bytes, at most {JSON_BYTES_MAX} are read")
        # Not by msgspec: schedulers' files have numbers such as -Infinity.
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read ({error.strerror}): the directory is not complete") from None
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} is not a JSON object: {error}") from None
    if not isinstance(found, dict):
        raise ModelLoadError(f"{path} is not a JSON object: it is {type(found).__name__}")
    return found


def _stored_dtype(path: Path) -> Dtype:
    """Of the first tensor with numbers of its own; float32 where the file does not say."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > JSON_BYTES_MAX:
                raise ModelLoadError(f"{path}: the header has {length} bytes, at most {JSON_BYTES_MAX} are read")
            header = msgspec.json.decode(file.read(length), type=dict[str, dict[str, Any]])
    except (OSError, struct.error, msgspec.MsgspecError) as error:
        raise ModelLoadError(f"{path} is no file of safetensors ({error}): the download may not be complete") from None
    for name, entry in header.items():
        if name != "__metadata__" and entry.get("dtype") in DTYPES:
            return DTYPES[entry["dtype"]]
    return "float32"


def name_of_weights(directory: ImageDirectory) -> str:
    """Name the weights by their family and a digest of samples of all files.

    Reading all bytes would take as long as loading. Training changes all weights, so samples are enough.

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
