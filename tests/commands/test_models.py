"""Tests of the commands that download a model, list local models, and check whether a model runs."""

from __future__ import annotations

import http.server
import importlib.util
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from trioserve import cli
from trioserve.commands import models
from trioserve.model import device
from trioserve.model.loading.checkpoint import open_checkpoint
from trioserve.model.loading.default_model import find_default_model
from trioserve.model.loading.stored_tensor import StoredTensor
from trioserve.model.settings import ModelSettings
from trioserve_kernels import build

SIZING = Path(__file__).parents[2] / "docs" / "guides" / "sizing.md"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the cache of models on a machine without any model."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(models, "_of_hub", list)
    return tmp_path / "trioserve" / "models"


def test_local_model_is_not_downloaded(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = cache / "smollm2" / "SmolLM2.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GGUF")
    assert cli.main(["pull", "smollm2"]) == 0
    assert capsys.readouterr().out.strip() == str(path)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["pull", "llama"], "there is no model 'llama' to download"),
        (["pull", "smollm2", "--revision", "main"], "smollm2 has no revisions"),
    ],
)
def test_failed_model_download_is_reported_in_one_sentence(
    cache: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert cli.main(arguments) != 0
    assert said in capsys.readouterr().err


def test_models_command_lists_local_models(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models"]) == 0
    assert "not here yet" in capsys.readouterr().out
    path = cache / "smollm2" / "SmolLM2.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GGUF")
    assert cli.main(["models", "--json"]) == 0
    [model] = json.loads(capsys.readouterr().out)
    assert (model["name"], model["path"], model["byte_count"]) == ("smollm2", str(path), 4)


def model_lines(name: str) -> dict[str, str]:
    return {finding.name: finding.what for finding in models.check_model(name).findings}


def test_check_prints_the_memory_in_the_sizing_guide_for_the_default_model(monkeypatch: Any, capsys: Any):
    monkeypatch.setattr(models, "free_host_bytes", lambda: 17 * 2**30)
    monkeypatch.setattr(device, "free_host_bytes", lambda: 17 * 2**30)
    monkeypatch.setattr(build, "supported_levels", lambda: ("avx2",))
    assert models.run_check("smollm2", as_json=False) == 0
    assert capsys.readouterr().out in SIZING.read_text(encoding="utf-8")


def test_check_computes_the_memory_of_a_model_without_reading_its_weights(tmp_path: Path, monkeypatch: Any):
    assert cli.main(["random-checkpoint", "tiny", str(tmp_path / "tiny")]) == 0
    [weights] = (tmp_path / "tiny").glob("*.safetensors")
    content = weights.read_bytes()
    header_bytes = 8 + int.from_bytes(content[:8], "little")
    weights.write_bytes(content[:header_bytes])
    os.truncate(weights, len(content))  # The weights are zeros in a sparse file, which takes no disk space.
    monkeypatch.setattr(models, "free_host_bytes", lambda: 2**30)
    monkeypatch.setattr(device, "free_host_bytes", lambda: 2**30)
    config = open_checkpoint(tmp_path / "tiny").config
    tokens = 2**28 // device.kv_block_bytes(config, 16, "bfloat16") * 16
    assert f"{tokens:,} tokens" in model_lines(str(tmp_path / "tiny"))["by default"]


@pytest.mark.parametrize(
    ("block_type", "kept_bytes"), [("MXFP4", 17 * 64), ("Q4_0", 18 * 64), ("Q4_F32", 24 * 64), ("Q8_0", 0)]
)
def test_check_says_which_weights_stay_quantized_on_a_gpu(block_type: str, kept_bytes: int):
    """A quantized matrix of 64 blocks of 32 numbers, and one plain matrix of 1,024 numbers."""
    pytest.importorskip("torch")
    mebi = 2**20

    def stored(name: str, rows: int, kind: str | None) -> StoredTensor:
        return StoredTensor(name, (rows * mebi, 1), "float32", lambda _: pytest.fail("read"), bytes, kind)

    class Opened:
        config = open_checkpoint(find_default_model("smollm2")).config

        def tensors(self) -> Any:
            return iter((stored("a.weight", 64 * 32, block_type), stored("b.weight", 1024, None)))

    [finding] = models._weights_on_gpu(Opened(), ModelSettings())  # type: ignore[arg-type]
    kept, expanded = kept_bytes / 1024, 0 if kept_bytes else 4
    assert finding.what == f"{kept:.3g} GiB stay in 4 bits with Triton, {expanded} GiB are expanded to bfloat16"


def test_check_reports_a_model_that_does_not_fit_into_memory(monkeypatch: Any):
    monkeypatch.setattr(models, "free_host_bytes", lambda: 2**28)
    monkeypatch.setattr(device, "free_host_bytes", lambda: 2**28)
    assert models.run_check("smollm2", as_json=True) == 1


def test_check_refuses_a_model_that_is_not_on_this_machine(tmp_path: Path, capsys: Any):
    assert cli.main(["doctor", "--model", str(tmp_path / "none")]) == 1
    assert "is not on this machine" in capsys.readouterr().out


def written(folder: Path) -> Path:
    """Write a tiny checkpoint with a tokenizer."""
    assert cli.main(["random-checkpoint", "tiny", str(folder)]) == 0
    return folder


def change_config(folder: Path, **changes: Any) -> None:
    """Change fields of config.json. None removes a field."""
    config = json.loads((folder / "config.json").read_text()) | changes
    config = {name: value for name, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json"),
        (lambda folder: (folder / "config.json").unlink(), "config.json"),
        (lambda folder: next(folder.glob("*.safetensors")).write_bytes(b"damaged"), "safetensors is damaged"),
        (lambda folder: change_config(folder, hidden_size=None), "hidden_size"),
        (lambda folder: change_config(folder, alibi=True), "alibi in config.json is True"),
        (lambda folder: change_config(folder, architectures=["NewForCausalLM"]), "architecture is NewForCausalLM"),
    ],
    ids=["tokenizer", "config", "weights", "missing field", "unsupported field", "class"],
)
def test_check_names_the_file_or_field_that_prevents_a_model_from_running(
    tmp_path: Path, break_it: Callable[[Path], object], reason: str, capsys: Any
):
    folder = written(tmp_path / "tiny")
    break_it(folder)
    capsys.readouterr()
    assert cli.main(["models", "--check", str(folder), "--json"]) == 1
    check = json.loads(capsys.readouterr().out)
    assert not check["runs"]
    assert reason in check["reason"]


def test_check_names_a_config_field_that_is_not_read_and_a_broken_template(tmp_path: Path):
    folder = written(tmp_path / "tiny")
    change_config(folder, rms_norm_epsilon=1e-6)
    (folder / "chat_template.jinja").write_text("{{ messages.nothing.at.all }}")
    check = models.check_model(str(folder))
    assert check.runs
    lines = {finding.name: finding.what for finding in check.findings}
    assert "rms_norm_epsilon" in lines["note"]
    assert "cannot render a message" in lines["chat template"]


@contextmanager
def stand_in_for_the_hub(folder: Path, requested: list[str]) -> Iterator[str]:
    """Serve the files of a folder as the model org/tiny, with the hub's API, on a port of this machine."""
    sha = "0" * 40

    class Hub(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer(with_body=False)

        def do_GET(self) -> None:
            self.answer(with_body=True)

        def answer(self, *, with_body: bool) -> None:
            path = self.path.partition("?")[0]
            prefix = f"/org/tiny/resolve/{sha}/"
            if path.startswith("/api/models/org/tiny/tree/"):
                files = [{"type": "file", "path": file.name, "size": 1, "oid": sha} for file in folder.iterdir()]
                content = json.dumps(files).encode()
            elif path.startswith("/api/models/org/tiny"):
                siblings = [{"rfilename": file.name} for file in folder.iterdir()]
                content = json.dumps({"id": "org/tiny", "sha": sha, "siblings": siblings}).encode()
            elif path.startswith(prefix) and (folder / path.removeprefix(prefix)).is_file():
                requested.append(path.removeprefix(prefix))
                content = (folder / path.removeprefix(prefix)).read_bytes()
            else:
                self.send_error(404)
                return
            self.send_response(200)
            for name, value in (
                ("Content-Length", str(len(content))),
                ("ETag", f'"{hash(path)}"'),
                ("X-Repo-Commit", sha),
            ):
                self.send_header(name, value)
            self.end_headers()
            if with_body:
                self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def checked_at_hub(url: str, home: Path) -> dict[str, Any]:
    """Check org/tiny in a process, because huggingface_hub reads its variables when it is imported."""
    environment = os.environ | {"HF_ENDPOINT": url, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"}
    environment.pop("HF_HUB_OFFLINE", None)
    command = [sys.executable, "-m", "trioserve", "models", "--check", "org/tiny", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, cwd=home)
    assert result.returncode in (0, 1), result.stderr
    check: dict[str, Any] = json.loads(result.stdout)
    assert check["runs"] == (result.returncode == 0)
    return check


def test_model_at_the_hub_is_checked_from_its_config_alone(tmp_path: Path, monkeypatch: Any):
    pytest.importorskip("huggingface_hub")
    folder = written(tmp_path / "tiny")
    whole = models.check_model(str(folder))
    requested: list[str] = []
    with stand_in_for_the_hub(folder, requested) as url:
        check = checked_at_hub(url, tmp_path)
    assert check["runs"], check
    assert "config.json" in requested
    assert not [name for name in requested if name.endswith(".safetensors")]
    assert whole.estimate is not None
    for name in ("weight_bytes", "kv_token_bytes", "overhead_bytes", "dtype", "path"):
        assert check["estimate"][name] == getattr(whole.estimate, name)


def test_model_at_the_hub_without_safetensors_does_not_run(tmp_path: Path):
    pytest.importorskip("huggingface_hub")
    folder = written(tmp_path / "tiny")
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"pickled")
    with stand_in_for_the_hub(folder, []) as url:
        check = checked_at_hub(url, tmp_path)
    assert not check["runs"]
    assert "pytorch_model.bin" in check["reason"]


def test_check_computes_with_the_options_of_the_server(tmp_path: Path, capsys: Any):
    folder = written(tmp_path / "tiny")
    capsys.readouterr()
    flags = ["--quantization", "int8", "--kv-cache-dtype", "int8", "--max-model-len", "64", "--kv-cache-memory", "0.01"]
    plain, small = (
        json.loads(capsys.readouterr().out)["estimate"]
        for options in ([], flags)
        if cli.main(["models", "--check", str(folder), "--json", *options]) == 0
    )
    assert (small["quantization"], small["context_tokens_max"]) == ("int8", 64)
    assert small["kv_token_bytes"] < plain["kv_token_bytes"]
    assert small["kv_bytes"] <= 0.01 * 2**30
    assert cli.main(["models", "--check", str(folder), "--max-model-len", "1000000"]) == 1
    assert "--max-model-len is 1000000, but the model supports only" in capsys.readouterr().out
