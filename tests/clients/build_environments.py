"""Builds the environments of clients.toml: `python build_environments.py FOLDER`. Existing environments are kept."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import venv
from pathlib import Path

HERE = Path(__file__).parent


def main(folder: Path) -> None:
    clients = tomllib.loads((HERE / "clients.toml").read_text(encoding="utf-8"))
    for name, packages in clients["environments"].items():
        place = folder / name
        if (place / ".ready").exists():
            continue
        print(f"building {place}: {', '.join(packages)}", flush=True)
        venv.create(place, with_pip=True)
        pip = [place / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *packages], check=True)
        (place / ".ready").touch()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
