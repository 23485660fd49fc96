"""Loads a model into ranks on this machine, on configured machines, or on nodes that Ray selects."""

from __future__ import annotations

import logging
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import msgspec
import trio

from trioserve.assemble_compute import Computing, image_encoder_of
from trioserve.assemble_model import LoadProgress, LoadReport, ModelFiles
from trioserve.contracts.errors import StartupError
from trioserve.engine.engine_metrics import show_ranks
from trioserve.metrics.registry import Metrics
from trioserve.model.loading.checkpoint import Checkpoint
from trioserve.model.loading.encoder_directory import EncoderDirectory
from trioserve.model.model_config import ModelConfig
from trioserve.model.parallel.shares import share_of
from trioserve.model.parallel.stages import cache_shares, stage_configs
from trioserve.model.trainer_groups import TrainerGroups
from trioserve.options.engine import EngineOptions
from trioserve.proxy.discovery.ray import check_ray_is_installed
from trioserve.ranks.group import open_ranks
from trioserve.ranks.host import free_port, host_ranks
from trioserve.ranks.link import wait_for_ranks
from trioserve.ranks.messages import DraftSetup, Progress, RankSetup
from trioserve.ranks.placed import PlacedRanks, RanksRequest, placed_ranks
from trioserve.ranks.ranked_runner import RankedRunner, RankedWeights
from trioserve.trio_tools.interrupts import uninterrupted
from trioserve.trio_tools.worker_thread import WorkerThread

if TYPE_CHECKING:
    from trioserve.model.drafts.checkpoints import DraftSource

__all__ = ["RankedModel"]

logger = logging.getLogger("trioserve.assemble")


@uninterrupted
class RankedModel:
    """Loads the model into ranks. The compute thread of this process computes image embeddings.

    Args:
        options: the options of the engine.
        files: the model's files.
        compute: the compute thread.
        groups: groups with trainers that send new weights.
        report: receives the progress of loading.
        metrics: metrics that show the state of the ranks.
        shows_kv: True if a connector of this process reads and writes the KV of the ranks.
    """

    def __init__(
        self,
        options: EngineOptions,
        files: ModelFiles,
        compute: WorkerThread,
        groups: TrainerGroups,
        report: LoadReport,
        *,
        metrics: Metrics,
        shows_kv: bool,
    ) -> None:
        self._options = options
        self._files = files
        self._compute = compute
        self._groups = groups
        self._report = report
        self._metrics = metrics
        self._shows_kv = shows_kv

    @asynccontextmanager
    async def loaded(
        self, checkpoint: Checkpoint | EncoderDirectory, draft: DraftSource | None
    ) -> AsyncIterator[Computing]:
        """Load the model, and end the ranks at the end of the scope.

        Args:
            checkpoint: the model.
            draft: ignored. Rank 0 opens the source of draft tokens itself.

        Raises:
            StartupError: the model cannot be divided into this number of ranks.
        """
        options = self._options
        if isinstance(checkpoint, EncoderDirectory):
            name = "--tensor-parallel-size" if options.tensor_parallel_size > 1 else "--pipeline-parallel-size"
            raise StartupError(f"{name} is set, but an encoder runs in one process: leave it out")
        if checkpoint.encoder is not None:
            raise StartupError(
                "a model with an encoder runs in one process: leave out --tensor-parallel-size and "
                "--pipeline-parallel-size"
            )
        stages = stage_configs(checkpoint, options.pipeline_parallel_size)
        for stage in stages:  # Check the division of each stage before any rank starts.
            share_of(stage, 0, options.tensor_parallel_size, expert_parallel=options.enable_expert_parallel)
        async with self._placed() as placed, self._grouped(checkpoint, stages, placed) as computing:
            yield computing

    @asynccontextmanager
    async def _placed(self) -> AsyncIterator[PlacedRanks | None]:
        """Return the ranks that Ray placed. None if the ranks run on this machine and on configured machines."""
        options = self._options
        if options.distributed_executor_backend == "mp":
            yield None
            return
        check_ray_is_installed()
        wanted = RanksRequest(
            count=options.rank_count,
            model=options.model,
            revision=options.revision,
            cpus=_placed_cpus(options),
            gpus=1 if options.device == "cuda" else 0,
            address=options.ray_address,
        )
        async with placed_ranks(wanted) as placed:
            yield placed

    @asynccontextmanager
    async def _grouped(
        self, checkpoint: Checkpoint, stages: Sequence[ModelConfig], placed: PlacedRanks | None
    ) -> AsyncIterator[Computing]:
        options, compute = self._options, self._compute
        weights_come = trio.Event()

        def report(progress: Progress) -> None:
            weights_come.set()
            what = progress.what or f"loading {options.model}"
            self._report(LoadProgress(what, progress.done, progress.total))

        count = options.rank_count
        here = count // options.nnodes
        elsewhere: dict[int, socket.socket] = {}
        setups = self._rank_setups(here, stages) if placed is None else self._placed_setups(placed, stages)
        if placed is not None:
            here, elsewhere = 0, await placed.come(on_wait=self._log_awaited)
        elif options.nnodes > 1:
            assert options.ranks_key is not None, "checked by Config"
            elsewhere = await wait_for_ranks(
                options.master_addr,
                options.master_port,
                range(here, count),
                options.ranks_key,
                on_wait=self._log_awaited,
            )
        with host_ranks(
            here,
            elsewhere=elsewhere,
            shows_kv=self._shows_kv,
            stage_count=len(stages),
            at_once=options.ranks_at_once,
        ) as ranks:
            async with open_ranks(
                setups,
                ranks.make_links,
                answer_seconds_max=options.step_timeout,
                find_missing=ranks.find_missing,
                on_progress=report,
            ) as group:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._files.prepare_texts, checkpoint, weights_come)
                    await group.load()
                    weights_come.set()
                from trioserve.model.loaded_models import load_vision
                from trioserve.model.runner import FIXED_BY_ENCODER

                loaded = group.loaded
                vision = await compute.run(
                    load_vision,
                    checkpoint,
                    options.model_settings(),
                    loaded.dtype,
                    loaded.device if placed is None else "cpu",  # The GPUs that Ray reserves are only for the ranks.
                )
                runner = RankedRunner(
                    loaded,
                    group.ranks,
                    ranks.kv_memories,
                    vision,
                    options.block_size,
                    options.tensor_parallel_size,
                )
                logger.info("the model is in ranks pids=%s", ",".join(map(str, group.pids)))
                image_encoder = image_encoder_of(runner, compute)
                with ExitStack() as scopes:
                    scopes.callback(show_ranks(self._metrics, group))
                    weights = RankedWeights(group, self._groups, why_fixed=None if vision is None else FIXED_BY_ENCODER)
                    yield Computing(runner, group, group, group.claim_memory, weights, image_encoder, group.guard)

    def _log_awaited(self, awaited: list[int]) -> None:
        if awaited:
            logger.info("waiting for ranks of other machines ranks=%s", ",".join(map(str, awaited)))

    def _rank_setups(self, here: int, stages: Sequence[ModelConfig]) -> list[RankSetup]:
        """Return the setup of each rank.

        Args:
            here: number of ranks per machine.
            stages: the layers of the model that each stage computes.
        """
        options, drafts = self._options, self._files.drafts
        whole = options.model_settings()
        stage_size = options.tensor_parallel_size
        settings = [
            msgspec.structs.replace(
                whole,
                threads=None if options.threads is None else max(1, options.threads // options.ranks_at_once),
                kv_cache_bytes=None
                if whole.kv_cache_bytes is None
                else int(whole.kv_cache_bytes * share * len(stages) / here),
                ranks_here=here,
            )
            for share in cache_shares(stages)
        ]
        draft = None
        if drafts is not None and drafts.source != "text":
            draft = DraftSetup(
                name=drafts.model or drafts.source,
                path=None if self._files.draft_path is None else str(self._files.draft_path),
                settings=drafts.settings_of_draft(whole),
                token_count=drafts.token_count,
            )
        is_far = options.nnodes > 1
        is_split = is_far and len(stages) == 1  # True if the ranks of one stage are on several machines.
        meeting_ports = [options.master_port + 1 + stage if is_far else free_port() for stage in range(len(stages))]
        return [
            RankSetup(
                rank=rank,
                size=options.rank_count,
                stage_count=len(stages),
                meeting_host=options.master_addr if is_split else "127.0.0.1",
                meeting_port=meeting_ports[rank // stage_size],
                path=str(self._files.path),
                settings=settings[rank // stage_size],
                context_tokens=options.max_model_len,
                uses_further_layers=drafts is not None and drafts.source == "mtp",
                expert_parallel=options.enable_expert_parallel,
                draft=draft if rank == 0 else None,
                log_level=logging.getLogger("trioserve").getEffectiveLevel(),
            )
            for rank in range(options.rank_count)
        ]

    def _placed_setups(self, placed: PlacedRanks, stages: Sequence[ModelConfig]) -> list[RankSetup]:
        """Return the setup of each rank that Ray placed. Options that apply to a machine are divided among the ranks of
        a node.
        """
        setups: list[RankSetup] = []
        for setup in self._rank_setups(1, stages):
            settings, beside = setup.settings, placed.count_beside(setup.rank)
            settings = msgspec.structs.replace(
                settings,
                device="cuda" if settings.device == "cuda" else "cpu",  # This must be the device that Ray reserved.
                threads=_placed_cpus(self._options),
                kv_cache_bytes=None if settings.kv_cache_bytes is None else settings.kv_cache_bytes // beside,
                ranks_here=beside,
            )
            first = placed.nodes[setup.stage * setup.stage_size]
            setups.append(
                msgspec.structs.replace(setup, settings=settings, meeting_host=first.address, meeting_port=first.port)
            )
        return setups


def _placed_cpus(options: EngineOptions) -> int:
    """Return the CPUs to reserve for each rank. Ray does not enforce the number, so each rank uses as many threads."""
    return 1 if options.threads is None else max(1, options.threads // options.tensor_parallel_size)
