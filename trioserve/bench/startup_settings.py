"""Which servers are started, and how often."""

from __future__ import annotations

import pathlib

import msgspec

from trioserve.bench.settings import check_integer, check_number, check_writable
from trioserve.contracts.errors import StartupError

__all__ = ["StartupSettings"]


class StartupSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Raises StartupError, one sentence, when a value is out of range.

    checkouts: folders with other versions of this project, started in turn with this one, so that a noisy machine is
    noisy for all. server_flags: what `serve` is given besides its port. cold_path: a model's folder or file, which
    before each start is dropped from memory, read alone, and dropped again, so that the start reads it from the disk;
    None: it is found where the system keeps it. memory_at_hand_gib: of memory that is taken and let go again right
    before each reading and each start, so that a virtual machine need not ask its host for it then.
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
            raise StartupError(f"--cold {self.cold_path} is not there: name the folder or file of a model")
        check_writable(self.json_path)
