"""Loads the components of a diffusers directory onto a device, and creates the state of a request with them.

diffusers and transformers load the components. `Beginning` creates the network inputs, the schedule and the first
latent. Each request has its own random generator, and draws its numbers in the order in which diffusers' pipelines draw
them. Therefore, a seed gives the same image as in diffusers.

The VAE converts images to latents of about unit variance, and latents to images. It converts one image at a time,
because it needs more memory than all other components.
"""

from __future__ import annotations

import functools
import importlib
import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
import transformers
from PIL import Image

from trioserve.contracts.errors import ModelLoadError
from trioserve.contracts.image_generation import ImageTask, IterativeRequest, RGBImage
from trioserve.model.diffusion.directory import ImageDirectory
from trioserve.model.diffusion.family import MASKED, BadTask, Family, LatentState, Original, Parts, Schedule
from trioserve.model.diffusion.solvers import Solver
from trioserve.model.loading.fields import one_line

__all__ = ["Autoencoder", "Beginning", "image_of", "image_tensor", "load_parts", "make_family", "mask_tensor"]

logger = logging.getLogger(__name__)


PARAMETERS_SPARE = 256  # number of parameters that may be missing in the stored weights, such as tables of positions
ELEMENTS_SPARE = 2**24
PARAMETERS_PER_CHECK = 64


def load_parts(
    directory: ImageDirectory,
    device: torch.device,
    dtype: torch.dtype,
    check_tokenizer: Callable[[Any, Path], None],
    progress: Callable[[str], None] = lambda component: None,
) -> Parts:
    """Load all components. Nothing is downloaded, and no code of the checkpoint runs.

    Args:
        directory: the diffusers directory.
        device: device of the networks.
        dtype: dtype of the networks. A VAE that overflows in float16 is loaded as float32.
        check_tokenizer: raises ModelLoadError for an unsafe tokenizer of the tokenizers library. Its second argument is
            the tokenizer's folder.
        progress: called with a component's name before the component is read, and during reading. An exception ends
            the loading.

    Raises:
        ModelLoadError: a file is damaged, or a tensor is missing. transformers would replace a missing tensor by random
            numbers.
    """
    components: dict[str, Any] = {}
    transformers.utils.logging.disable_progress_bar()  # The server's terminal must not show a library's progress bar.
    for name in directory.pipeline.classes:
        progress(name)
        try:
            if "tokenizer" in name:
                components[name] = _tokenizer(directory, name, check_tokenizer)
            else:
                components[name] = _load(directory, name, device, dtype, functools.partial(progress, name))
        except ModelLoadError:
            raise
        except Exception as error:  # Libraries do not validate the files, so a bad file can raise any exception.
            raise ModelLoadError(f"{directory.path / name} cannot be loaded: {one_line(str(error))}") from error
    return Parts(components, directory.options, device, dtype)


def make_family(directory: ImageDirectory, parts: Parts) -> Family:
    """Create the family of a directory from its loaded components.

    Args:
        directory: the diffusers directory.
        parts: its components.
    """
    module = importlib.import_module(f"trioserve.model.diffusion.families.{directory.pipeline.file}")
    family: Family = module.Model(parts)
    return family


def _tokenizer(directory: ImageDirectory, name: str, check: Callable[[Any, Path], None]) -> Any:
    directory.check_tokenizer_sizes(name)
    tokenizer = _class_of(directory, name).from_pretrained(str(directory.path / name), local_files_only=True)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:  # Tokenizers that transformers 4 implements in Python read no rules from their files.
        check(backend, directory.path / name)
    return tokenizer


def _class_of(directory: ImageDirectory, name: str) -> Any:
    library, class_name = directory.component(name)
    return getattr(diffusers if library == "diffusers" else transformers, class_name)


def _load(
    directory: ImageDirectory, name: str, device: torch.device, dtype: torch.dtype, check: Callable[[], None]
) -> Any:
    folder = str(directory.path / name)
    if name == "vae" and dtype is torch.float16 and directory.vae.get("force_upcast"):
        dtype = torch.float32  # Activations of this VAE overflow in float16.
    directory.check_sizes(name)
    with _bounded_network(folder, directory.stored_shapes(name), check):
        network, found = _class_of(directory, name).from_pretrained(
            folder,
            torch_dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            variant=directory.variant(name),
            output_loading_info=True,
        )
    missing = sorted(found["missing_keys"])
    if missing:
        raise ModelLoadError(
            f"{folder} lacks {len(missing)} tensors of its weights, such as {missing[0]}: the download may be "
            "incomplete, or config.json belongs to another model"
        )
    if (further := _further_layer(network, found["unexpected_keys"])) is not None:
        raise ModelLoadError(
            f"{folder} contains {further}, but its config.json describes a network with fewer layers: config.json is "
            "damaged or belongs to another model"
        )
    return network.to(device).eval().requires_grad_(False)


def _further_layer(network: torch.nn.Module, unused: Iterable[str]) -> str | None:
    """Return the name of a stored tensor whose layer index is beyond the layers of the network, or None.

    Args:
        network: the loaded network.
        unused: stored tensors that the network did not use. Unused tensors outside of layers are harmless.
    """
    modules = dict(network.named_modules())
    for name in sorted(unused):
        parts = name.split(".")
        inside = max(count for count in range(len(parts)) if ".".join(parts[:count]) in modules)
        if isinstance(modules[".".join(parts[:inside])], torch.nn.ModuleList) and parts[inside].isdecimal():
            return name
    return None


@contextmanager
def _bounded_network(folder: str, shapes: Sequence[tuple[int, ...]], check: Callable[[], None]) -> Iterator[None]:
    """Limit the size of the networks that a library builds in this thread while the context is open.

    The limit is computed from the stored weights, so no field of a config can exceed it. If the library builds a larger
    network, ModelLoadError is raised inside the library.

    Args:
        folder: folder of the component, for the error text.
        shapes: shapes of the stored tensors.
        check: called repeatedly during loading. An exception ends the loading.
    """
    # A library registers a parameter when it builds the network, and again when it reads the tensor. Tied tensors
    # are registered more than twice.
    count_max = 4 * len(shapes) + PARAMETERS_SPARE
    elements_max = 4 * sum(map(math.prod, shapes)) + ELEMENTS_SPARE
    thread_id, count, elements = threading.get_ident(), 0, 0

    def note(_module: torch.nn.Module, _name: str, parameter: torch.nn.Parameter | None) -> None:
        nonlocal count, elements
        if threading.get_ident() != thread_id or parameter is None:
            return
        count += 1
        elements += parameter.numel()
        if count > count_max or elements > elements_max:
            raise ModelLoadError(
                f"{folder}: config.json describes a network with more than {count} parameters of {elements} numbers, "
                f"but its weights contain {len(shapes)} tensors of {sum(map(math.prod, shapes))} numbers: the file is "
                "damaged or belongs to another model"
            )
        if count % PARAMETERS_PER_CHECK == 0:
            check()

    hook = torch.nn.modules.module.register_module_parameter_registration_hook(note)
    try:
        yield
    finally:
        hook.remove()


MASK_BRIGHT = 128  # Brightness from 0 to 255. Where a mask has at least this brightness, the image may change.


def image_of(values: torch.Tensor) -> RGBImage:
    """Convert a tensor to an image.

    Args:
        values: [3, height, width], from -1 to 1. Values outside are clamped, and NaN becomes black.
    """
    pixels = (
        (values.float().nan_to_num(-1.0) / 2 + 0.5).clamp(0, 1).mul(255).round().to(torch.uint8).permute(1, 2, 0).cpu()
    )
    height, width, _ = pixels.shape
    return RGBImage(width, height, pixels.contiguous().numpy().tobytes())


def image_tensor(picture: RGBImage, width: int, height: int) -> torch.Tensor:
    """Convert an image to a tensor. The image is resized if its size differs.

    Args:
        picture: the image.
        width: width of the result in pixels.
        height: height of the result in pixels.

    Returns:
        float32 [1, 3, height, width], from -1 to 1.
    """
    values = np.asarray(_resized(picture, width, height), dtype=np.float32) / 255
    return torch.from_numpy(values).permute(2, 0, 1)[None] * 2 - 1


def mask_tensor(mask: RGBImage, width: int, height: int, scale: int) -> torch.Tensor:
    """Convert a mask image to a tensor. The mask is resized if its size differs.

    Args:
        mask: the mask image. The brightness of a pixel is the mean of its colours, see MASK_BRIGHT.
        width: width of the edited image in pixels.
        height: height of the edited image in pixels.
        scale: side length, in image pixels, of the square that one value of the result stands for.

    Returns:
        float32 [1, 1, height / scale, width / scale]: 1 where the image may change, else 0.
    """
    colours = np.asarray(_resized(mask, width, height), dtype=np.float32).mean(axis=2)
    values = torch.from_numpy((colours >= MASK_BRIGHT).astype(np.float32))[None, None]
    return torch.nn.functional.interpolate(values, size=(height // scale, width // scale))


def _resized(picture: RGBImage, width: int, height: int) -> Image.Image:
    image = Image.frombytes("RGB", (picture.width, picture.height), picture.rgb)
    if (picture.width, picture.height) == (width, height):
        return image
    return image.resize((width, height), Image.Resampling.LANCZOS)


class Autoencoder:
    """Encodes and decodes images.

    Args:
        network: an AutoencoderKL of diffusers.

    Attributes:
        scale: image pixels per side of one latent pixel.

    Raises:
        ModelLoadError: the VAE's config does not contain the scale of its latents.
    """

    def __init__(self, network: Any) -> None:
        self._network = network
        config = network.config
        self.scale: int = 2 ** (len(config.block_out_channels) - 1)
        self._dtype = next(network.parameters()).dtype
        means, deviations = getattr(config, "latents_mean", None), getattr(config, "latents_std", None)
        factor = torch.tensor(_number(config, "scaling_factor"))
        shift = torch.tensor(_number(config, "shift_factor") if getattr(config, "shift_factor", None) else 0.0)
        # Means and deviations are lists with one value for each channel.
        if means is not None and deviations is not None:
            shift = torch.tensor(means, dtype=torch.float32).view(1, -1, 1, 1)
            factor = factor / torch.tensor(deviations, dtype=torch.float32).view(1, -1, 1, 1)
        device = next(network.parameters()).device
        self._factor, self._shift = factor.to(device), shift.to(device)

    def encode(self, image: torch.Tensor, noise: torch.Generator) -> torch.Tensor:
        """Encode an image into a latent.

        Args:
            image: [1, 3, height, width], values from -1 to 1.
            noise: random generator that draws the latent from the distribution that the VAE predicts.

        Returns:
            float32 [1, channels, height / scale, width / scale].
        """
        distribution = self._network.encode(image.to(self._dtype)).latent_dist
        latent: torch.Tensor = distribution.sample(generator=noise)
        return (latent.float() - self._shift) * self._factor

    def decode(self, latent: torch.Tensor) -> torch.Tensor:
        """Decode a latent into an image.

        Args:
            latent: float32 [1, channels, height, width].

        Returns:
            [3, height * scale, width * scale] in the VAE's dtype, values from about -1 to 1.
        """
        image: torch.Tensor = self._network.decode(
            (latent / self._factor + self._shift).to(self._dtype), return_dict=False
        )[0]
        return image[0]


def _number(config: Any, name: str) -> float:
    value = getattr(config, name)
    if not isinstance(value, int | float):
        raise ModelLoadError(f"vae/config.json: {name} is {value!r}, but must be a number")
    return float(value)


MASK_SPLIT = 0.5


class Beginning:
    """Creates first states.

    Args:
        family: encodes prompts.
        autoencoder: encodes images that a request edits.
        solvers: samplers by name.
        device: device of the latents.
        dtype: dtype in which noise is drawn.
        patch_side: latent pixels per side of one network token, see `Pipeline`.
        fills_in: True for an inpainting network, whose input includes the mask and the latent of the unmasked part.
    """

    def __init__(
        self,
        family: Family,
        autoencoder: Autoencoder,
        solvers: dict[str, Solver],
        device: torch.device,
        dtype: torch.dtype,
        *,
        patch_side: int = 1,
        fills_in: bool = False,
    ) -> None:
        self.solvers = solvers
        self._family = family
        self._autoencoder = autoencoder
        self._device, self._dtype = device, dtype
        self._patch_side = patch_side
        self._fills_in = fills_in

    def begin(self, request: IterativeRequest) -> LatentState:
        """Create the state of a request.

        Args:
            request: a request with an image task.

        Raises:
            BadTask: the model or the sampler cannot do this task.
        """
        task = request.task
        assert isinstance(task, ImageTask), f"{request.id} has no image task"
        scale = self._autoencoder.scale
        height, width = task.height // scale, task.width // scale
        schedule = self._schedule(task, request.step_count, height * width // self._patch_side**2)
        rows = self._family.encode(task, is_guided=request.is_guided)
        generator = torch.Generator().manual_seed(request.seed)
        begins_with_noise = task.image is None or (task.mask is not None and request.step_count == task.step_count)
        given = None
        if task.image is not None and not (begins_with_noise and self._fills_in):
            given = self._encoded(image_tensor(task.image, task.width, task.height), generator)
        noise = torch.randn((1, self._family.channels, height, width), generator=generator, dtype=self._dtype)
        noise = noise.to(self._device).float()
        latent = noise * schedule.initial_scale
        if not begins_with_noise:
            assert given is not None
            of_given, of_noise = schedule.noised[0]
            latent = given * of_given + noise * of_noise
        original = None
        if self._fills_in:
            masked = self._masked(task, scale, generator).to(self._dtype)
            rows = tuple({**inputs, MASKED: masked} for inputs in rows)
        elif task.mask is not None:
            assert given is not None
            original = Original(given, noise, mask_tensor(task.mask, task.width, task.height, scale).to(self._device))
        return LatentState(
            request_id=request.id, steps_done=0, schedule=schedule, latent=latent, rows=rows, original=original
        )

    def _schedule(self, task: ImageTask, step_count: int, token_count: int) -> Schedule:
        solver = self.solvers.get(task.sampler)
        if solver is None:
            raise BadTask(f"the sampler is {task.sampler!r}, but this model supports {', '.join(self.solvers)}")
        try:
            return solver.schedule(task.step_count, task.step_count - step_count, token_count)
        except ValueError as error:
            raise BadTask(f"{task.step_count} steps are not possible with {task.sampler}: {error}") from None

    def _masked(self, task: ImageTask, scale: int, generator: torch.Generator) -> torch.Tensor:
        """Build the additional input of an inpainting network.

        Without an input image or without a mask, the whole image may change.

        Returns:
            float32 [1, 1 + channels, height, width]: the mask, 1 where the image may change, and the latent of the
            unmasked part.
        """
        shape = (1, 1, task.height, task.width)
        whole = torch.ones(shape) if task.mask is None else mask_tensor(task.mask, task.width, task.height, 1)
        picture = torch.zeros((1, 3, task.height, task.width))
        if task.image is not None:
            picture = image_tensor(task.image, task.width, task.height)
        around = self._encoded(picture * (whole < MASK_SPLIT), generator)
        mask = torch.nn.functional.interpolate(whole, size=(task.height // scale, task.width // scale))
        return torch.cat([mask.to(self._device), around], dim=1)

    def _encoded(self, picture: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return self._autoencoder.encode(picture.to(self._device), generator)
