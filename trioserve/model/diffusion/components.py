"""Reads the components of a directory, with diffusers and transformers, onto a device."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

import diffusers
import torch
import transformers

from trioserve.contracts.errors import ModelLoadError
from trioserve.model.diffusion.directory import ImageDirectory
from trioserve.model.diffusion.family import Family, Parts

__all__ = ["load_parts", "make_family"]

logger = logging.getLogger(__name__)


def load_parts(
    directory: ImageDirectory,
    device: torch.device,
    dtype: torch.dtype,
    progress: Callable[[str], None] = lambda component: None,
) -> Parts:
    """progress: told of each component before it is read; what it raises rises here. Nothing is downloaded, and no code
    of the checkpoint is run. Raises ModelLoadError, also where a tensor is missing, of which transformers would make up
    one."""
    components: dict[str, Any] = {}
    transformers.utils.logging.disable_progress_bar()  # of its own, on the terminal of whoever serves
    for name in directory.pipeline.classes:
        progress(name)
        try:
            components[name] = _load(directory, name, device, dtype)
        except ModelLoadError:
            raise
        except Exception as error:  # what a bad file makes of libraries that believe it: anything
            raise ModelLoadError(f"{directory.path / name} cannot be loaded: {error}") from error
    return Parts(components, directory.options, device, dtype)


def make_family(directory: ImageDirectory, parts: Parts) -> Family:
    module = importlib.import_module(f"trioserve.model.diffusion.families.{directory.pipeline.file}")
    family: Family = module.Model(parts)
    return family


def _load(directory: ImageDirectory, name: str, device: torch.device, dtype: torch.dtype) -> Any:
    library, class_name = directory.component(name)
    kind = getattr(diffusers if library == "diffusers" else transformers, class_name)
    folder = str(directory.path / name)
    if "tokenizer" in name:
        return kind.from_pretrained(folder, local_files_only=True)
    if name == "vae" and dtype is torch.float16 and directory.vae.get("force_upcast"):
        dtype = torch.float32  # its numbers do not fit
    network, found = kind.from_pretrained(
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
            f"{folder} lacks {len(missing)} tensors of its weights, such as {missing[0]}: the download may not be "
            "complete, or its config.json is another model's"
        )
    return network.to(device).eval().requires_grad_(False)
