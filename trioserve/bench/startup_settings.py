"""Settings of the startup measurement."""

from __future__ import annotations

import pathlib

import msgspec

from trioserve.bench.settings import check_integer, check_number, check_writable
from trioserve.contracts.errors import StartupError

__all__ = ["StartupSettings"]


class StartupSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the startup measurement. Raises StartupError if a value is out of range.

    Attributes:
        checkouts: folders with other versions of this project. All versions are started in turn, so that a noisy
            machine affects all of them.
        server_flags: flags of `serve` besides its port.
        cold_path: folder or file of a model. Before each start, it is dropped from memory, read alone, and dropped
            again, so that the start reads it from the disk. None: the start reads it from where the system keeps it.
        memory_at_hand_gib: GiB of memory that are allocated and freed right before each read and each start. So a
            virtual machine need not request memory from its host during the measurement.
        rounds: number of starts of each version.
        timeout_seconds: seconds after which a start has failed.
        json_path: file for the JSON report. "-": standard output.
        label: name of this version in the report.
    """

    checkouts: tuple[str, ...] = ()
    server_flags: tuple[str, ...] = ()
    cold_path: str | None = None
    memory_at_hand_gib: float = 0.0
    rounds: int = 5
    timeout_seconds: float = 120.0
    json_path: str | None = None
    label: str = ""

    def __post_init__(self) -> None:
        check_integer("--rounds", self.rounds, 1, 100)
        check_number("--memory-at-hand", self.memory_at_hand_gib, 0.0, 4096.0)
        check_number("--timeout", self.timeout_seconds, 0.001, 86_400.0)
        for folder in self.checkouts:
            if not pathlib.Path(folder, "trioserve", "__main__.py").is_file():
                raise StartupError(f"--checkout {folder} has no trioserve in it: name a checkout of the project")
        if self.cold_path is not None and not pathlib.Path(self.cold_path).exists():
            raise StartupError(f"--cold {self.cold_path} does not exist: name the folder or file of a model")
        check_writable(self.json_path)
