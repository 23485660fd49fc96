"""`doctor` examines the machine without importing torch, and gives advice for missing parts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trioserve.cli import main
from trioserve.commands import doctor
from trioserve.commands.processor import processor_name
from trioserve.contracts.errors import ModelLoadError
from trioserve.contracts.extras import install_command
from trioserve.model import device
from trioserve.model.loading.checkpoint import open_checkpoint
from trioserve.model.loading.default_model import find_default_model
from trioserve.model.loading.stored_tensor import StoredTensor
from trioserve.model.settings import ModelSettings
from trioserve_kernels import build

SIZING = Path(__file__).parents[2] / "docs" / "guides" / "sizing.md"


def found(name: str) -> doctor.Finding:
    [finding] = [finding for finding in doctor.findings() if finding.name == name]
    return finding


def test_doctor_reports_a_missing_part_with_advice(monkeypatch: Any):
    monkeypatch.setattr(doctor, "find_default_model", lambda name: None)
    assert found("bundled model").mend == "trioserve pull smollm2"
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(build, "PREBUILT", Path("nowhere"))
    monkeypatch.setattr(build, "supported_levels", lambda: ("avx2",))
    monkeypatch.setattr(doctor, "_version", lambda package: "1")
    assert "no-such-compiler" in found("compiler").what
    assert (found("compiler").state, found("compiler").mend) == ("absent", "apt install g++")
    monkeypatch.setattr(doctor, "_version", lambda package: None)
    assert found("huggingface_hub").mend == install_command("hub")
    assert found("torch").state == "absent"
    assert found("compiler").state == "missing"
    assert doctor.run_doctor(as_json=False) == 1


def test_precompiled_kernels_need_no_compiler(tmp_path: Path, monkeypatch: Any):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(build, "supported_levels", lambda: ("avx2",))
    monkeypatch.setattr(build, "brought_library", lambda level: tmp_path)
    assert found("native kernels").what == "came with the package, compiled for avx2"
    assert "compiler" not in [finding.name for finding in doctor.findings()]


def test_doctor_reports_a_port_in_use(monkeypatch: Any):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(doctor, "PORT", taken.getsockname()[1])
        assert found("port").mend == "use another port: --port N"


def test_doctor_prints_a_table_or_json_and_imports_no_torch():
    script = (
        "import sys; from trioserve.cli import main; code = main(['doctor', '--json']); "
        "assert not {'torch', 'trio'} & sys.modules.keys(); sys.exit(code)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    names = [finding["name"] for finding in json.loads(result.stdout)]
    assert {"processor", "compiler", "memory", "port"} <= set(names)


def test_doctor_names_the_processor_as_in_cpuinfo(tmp_path: Path):
    (tmp_path / "cpuinfo").write_text("processor : 0\nmodel name\t: Some  CPU @ 2 GHz\n")
    assert processor_name(tmp_path / "cpuinfo").startswith("Some CPU @ 2 GHz, ")
    assert " core" in processor_name(tmp_path / "none")


def model_lines(name: str) -> dict[str, str]:
    return {finding.name: finding.what for finding in doctor.model_findings(name)}


def test_doctor_computes_the_memory_in_the_sizing_guide_for_the_default_model(monkeypatch: Any, capsys: Any):
    monkeypatch.setattr(doctor, "free_host_bytes", lambda: 17 * 2**30)
    monkeypatch.setattr(device, "free_host_bytes", lambda: 17 * 2**30)
    monkeypatch.setattr(build, "supported_levels", lambda: ("avx2",))
    assert doctor.run_doctor(as_json=False, model="smollm2") == 0
    assert capsys.readouterr().out in SIZING.read_text(encoding="utf-8")


def test_doctor_computes_the_memory_of_a_model_without_reading_its_weights(tmp_path: Path, monkeypatch: Any):
    assert main(["random-checkpoint", "tiny", str(tmp_path / "tiny")]) == 0
    [weights] = (tmp_path / "tiny").glob("*.safetensors")
    content = weights.read_bytes()
    header_bytes = 8 + int.from_bytes(content[:8], "little")
    weights.write_bytes(content[:header_bytes])
    os.truncate(weights, len(content))  # The weights are zeros in a sparse file, which takes no disk space.
    monkeypatch.setattr(doctor, "free_host_bytes", lambda: 2**30)
    monkeypatch.setattr(device, "free_host_bytes", lambda: 2**30)
    config = open_checkpoint(tmp_path / "tiny").config
    tokens = 2**28 // device.kv_block_bytes(config, 16, "bfloat16") * 16
    assert f"{tokens:,} tokens" in model_lines(str(tmp_path / "tiny"))["by default"]


@pytest.mark.parametrize(
    ("block_type", "kept_bytes"), [("MXFP4", 17 * 64), ("Q4_0", 18 * 64), ("Q4_F32", 24 * 64), ("Q8_0", 0)]
)
def test_doctor_says_which_weights_stay_quantized_on_a_gpu(block_type: str, kept_bytes: int):
    """A quantized matrix of 64 blocks of 32 numbers, and one plain matrix of 1,024 numbers."""
    pytest.importorskip("torch")
    mebi = 2**20

    def stored(name: str, rows: int, kind: str | None) -> StoredTensor:
        return StoredTensor(name, (rows * mebi, 1), "float32", lambda _: pytest.fail("read"), bytes, kind)

    class Opened:
        config = open_checkpoint(find_default_model("smollm2")).config

        def tensors(self) -> Any:
            return iter((stored("a.weight", 64 * 32, block_type), stored("b.weight", 1024, None)))

    [finding] = doctor._weights_on_gpu(Opened(), ModelSettings())  # type: ignore[arg-type]
    kept, expanded = kept_bytes / 1024, 0 if kept_bytes else 4
    assert finding.what == f"{kept:.3g} GiB stay in 4 bits with Triton, {expanded} GiB are expanded to bfloat16"


def test_doctor_reports_a_model_that_does_not_fit_into_memory(monkeypatch: Any):
    monkeypatch.setattr(doctor, "free_host_bytes", lambda: 2**28)
    monkeypatch.setattr(device, "free_host_bytes", lambda: 2**28)
    assert doctor.run_doctor(as_json=True, model="smollm2") == 1


def test_doctor_refuses_a_model_that_is_not_on_this_machine(tmp_path: Path):
    with pytest.raises(ModelLoadError, match="is not on this machine"):
        model_lines(str(tmp_path / "none"))
