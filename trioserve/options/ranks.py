"""Options of ranks, the processes that compute one model together, and their checks."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated, Literal

from trioserve.contracts.errors import StartupError
from trioserve.model.drafts.settings import DraftSettings
from trioserve.options.option import about
from trioserve.options.router import ClusterOptions

__all__ = ["RANKS_MAX", "RankOptions"]

RANKS_MAX = 64  # No supported model has more KV heads that could be distributed.


@dataclass(frozen=True, kw_only=True)
class RankOptions(ClusterOptions):
    """Options of a model that several processes compute together."""

    # fmt: off
    tensor_parallel_size: Annotated[int, about(
        "processes, called ranks, that compute the model together, each with a part of every layer: one per GPU, or on "
        "a CPU one per group of cores", "N", ge=1, le=RANKS_MAX)] = 1
    pipeline_parallel_size: Annotated[int, about(
        "stages into which the model's layers are split; the stages compute one after the other, each with "
        "--tensor-parallel-size ranks", "N", ge=1, le=RANKS_MAX)] = 1
    enable_expert_parallel: Annotated[bool, about(
        "give each rank whole experts of a mixture of experts, instead of a part of each")] = False
    distributed_executor_backend: Annotated[Literal["mp", "ray"], about(
        "how ranks are started: mp starts them on this machine and on those of --nnodes, ray on free nodes of a Ray "
        "cluster; ray needs the extra ray")] = "mp"
    nnodes: Annotated[int, about(
        "number of machines with ranks, each with the same number of ranks; start serve --headless on all but one",
        "N", ge=1, le=RANKS_MAX)] = 1
    master_addr: Annotated[str, about(
        "address or name of the server's machine for ranks on other machines; with a name, the server listens for them "
        "at all of its addresses", "ADDRESS")] = "127.0.0.1"
    master_port: Annotated[int, about(
        "TCP port of the server for ranks; torch.distributed uses the next port, too", "PORT", ge=1, le=65534)] = 29500
    ranks_key: Annotated[str | None, about(
        "shared secret of the server and its ranks on other machines; default: none, and ranks on other machines are "
        "refused", "KEY")] = None
    # fmt: on

    @property
    def rank_count(self) -> int:
        """Number of processes that compute the model together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def check_ranks(self, drafts: DraftSettings | None, *, node_rank: int = 0, headless: bool = False) -> None:
        """Check the options of ranks.

        Args:
            drafts: settings of draft tokens.
            node_rank: number of this machine.
            headless: True if this machine has only ranks.

        Raises:
            StartupError: these options cannot be combined.
        """
        size = self.rank_count
        if self.pipeline_parallel_size > 1:
            self._check_stages(drafts)
        if self.distributed_executor_backend == "ray":
            self._check_ranks_of_ray(drafts, headless)
        if self.nnodes > 1 or headless:
            if size % self.nnodes or size == 1:
                raise StartupError(
                    f"--nnodes is {self.nnodes}, and there are {size} ranks: give each machine the same number of "
                    f"ranks, such as {self.nnodes} in all"
                )
            if node_rank >= self.nnodes:
                raise StartupError(f"--node-rank is {node_rank}, allowed are 0 to {self.nnodes - 1}: see --nnodes")
            if headless != (node_rank > 0):
                raise StartupError(
                    f"--node-rank is {node_rank}, and --headless is {'given' if headless else 'not given'}: "
                    "the server is node 0, and all others are headless"
                )
            if not self.ranks_key:
                raise StartupError(
                    "--ranks-key is not given, so every client that reaches --master-port could act as a rank: give "
                    "all machines the same key, better in the variable TRIOSERVE_RANKS_KEY than on the command line"
                )
        if size > 1 and not sys.platform.startswith("linux"):
            name, count = "--tensor-parallel-size", self.tensor_parallel_size
            if count == 1:
                name, count = "--pipeline-parallel-size", self.pipeline_parallel_size
            raise StartupError(
                f"{name} is {count}, but ranks need Linux, which ends them with the server: leave it out"
            )

    def _check_stages(self, drafts: DraftSettings | None) -> None:
        asked = f"--pipeline-parallel-size is {self.pipeline_parallel_size}"
        if self.rank_count > RANKS_MAX:
            raise StartupError(
                f"{asked} and --tensor-parallel-size {self.tensor_parallel_size}, which are {self.rank_count} ranks: "
                f"at most {RANKS_MAX} are allowed"
            )
        if self.pipeline_parallel_size % self.nnodes:
            raise StartupError(
                f"{asked} and --nnodes {self.nnodes}, but each machine must have the same number of stages: use a "
                f"multiple of {self.nnodes}"
            )
        if drafts is not None and drafts.source != "text":
            raise StartupError(
                f"{asked}, but {drafts.model or drafts.source} can draft only for a model in one stage: leave one of "
                "them out, or use --speculative-ngram"
            )

    def _check_ranks_of_ray(self, drafts: DraftSettings | None, headless: bool) -> None:
        asked = "--distributed-executor-backend is ray, and"
        if self.nnodes > 1 or headless:
            raise StartupError(f"{asked} Ray itself chooses machines: leave out --nnodes, --node-rank and --headless")
        if self.rank_count == 1:
            raise StartupError(
                f"{asked} there is only one rank, which always runs in the server: leave the backend out, or let Ray "
                "place the whole server (`trioserve ray up`)"
            )
        if drafts is not None and drafts.model is not None:
            raise StartupError(
                f"{asked} {drafts.model} would draft, but it is read only on the server's machine: leave one of them "
                "out, or use --speculative-ngram"
            )
