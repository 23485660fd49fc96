"""Loads the components of a diffusers directory onto a device, with diffusers and transformers."""

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
import torch
import transformers

from trioserve.contracts.errors import ModelLoadError
from trioserve.model.diffusion.directory import ImageDirectory
from trioserve.model.diffusion.family import Family, Parts
from trioserve.model.loading.fields import one_line

__all__ = ["load_parts", "make_family"]

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
