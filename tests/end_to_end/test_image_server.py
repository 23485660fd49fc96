"""Tests an image server as users start it: a process with a diffusers checkpoint on a real socket."""

from __future__ import annotations

import base64
import io
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from .conftest import ServerProcess

pytest.importorskip("diffusers")
pytestmark = pytest.mark.slow

CAT = {"prompt": "a cat", "steps": 3, "seed": 5}
SECONDS_MAX = 60


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    from ..model.diffusion.tiny_pipelines import save_stable_diffusion

    directory = save_stable_diffusion(tmp_path_factory.mktemp("models") / "tiny")
    process = ServerProcess("--model", str(directory), "--threads", "1", "--block-size", "32", "--max-images", "3")
    process.wait_until_serving()
    yield process
    assert process.stop() == 0, "".join(process.lines)


def post(server: ServerProcess, path: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(server.url + path, json.dumps(body).encode())
    return urllib.request.urlopen(request, timeout=SECONDS_MAX)


def get(server: ServerProcess, path: str) -> Any:
    with urllib.request.urlopen(server.url + path, timeout=SECONDS_MAX) as response:
        return json.loads(response.read())


def test_same_request_returns_the_same_image(server: ServerProcess) -> None:
    assert get(server, "/v1/models")["data"][0]["id"] == "tiny"
    first, second = (json.loads(post(server, "/v1/images/generations", CAT).read()) for _ in range(2))
    assert first["data"] == second["data"]
    image = Image.open(io.BytesIO(base64.b64decode(first["data"][0]["b64_json"])))
    assert f"{image.width}x{image.height}" == first["size"]
    assert any(low < high for low, high in image.getextrema()), "it is no empty picture"


def test_stream_ends_with_its_image_and_closing_a_stream_frees_its_slots(server: ServerProcess) -> None:
    said = post(server, "/v1/images/generations", {**CAT, "stream": True, "partial_images": 1}).read()
    assert b"event: image_generation.completed\n" in said
    with post(server, "/v1/images/generations", {**CAT, "steps": 250, "n": 3, "stream": True, "partial_images": 9}):
        assert get(server, "/load")["running"] == 3
    deadline = time.monotonic() + SECONDS_MAX
    while get(server, "/load")["running"] and time.monotonic() < deadline:
        """Poll, because another process has no event to wait for."""
    assert get(server, "/load")["running"] == 0
    assert get(server, "/v1/requests")["data"] == []


def test_image_count_limit_is_enforced_and_unused_text_options_are_logged(server: ServerProcess) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        post(server, "/v1/images/generations", {**CAT, "n": 4})
    assert json.loads(refused.value.read())["error"]["param"] == "n"
    assert any("options=block_size" in line for line in server.lines)


def test_option_that_image_models_do_not_support_is_refused_with_one_sentence(
    server: ServerProcess, tmp_path: Path
) -> None:
    (tmp_path / "model_index.json").write_text("{}")
    process = ServerProcess("--model", str(tmp_path), "--tensor-parallel-size", "2")
    assert process.process.wait(SECONDS_MAX) != 0
    process.stop()
    assert "do not support --tensor-parallel-size: remove it" in process.lines[-1]
    assert not any("Traceback" in line for line in process.lines)
