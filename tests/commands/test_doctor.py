"""`doctor` examines the machine without importing torch, and gives advice for missing parts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from trioserve.commands import doctor
from trioserve.commands.doctor import processor_name
from trioserve.contracts.extras import install_command
from trioserve_kernels import build


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
