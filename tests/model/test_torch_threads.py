"""Tests that torch uses the requested number of threads, also beside native kernels, which have their own threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
import torch

from trioserve.assemble import open_engine
from trioserve.contracts.prompt import ChatPrompt
from trioserve.contracts.sampling import SamplingParams
from trioserve.model.drafts.checkpoints import DraftSource, EagleCheckpoint, MtpCheckpoint, open_eagle
from trioserve.model.loading.checkpoint import open_checkpoint
from trioserve.model.runner import ModelRunner
from trioserve.model.vision.tower import VisionTower

THREADS = [1, 3]  # two values, because one of them may be the machine's default


@pytest.fixture(autouse=True)
def torch_threads() -> Iterator[None]:
    """Restore torch's thread count, which applies to the whole process, after the test."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("threads", THREADS)
async def test_image_encoder_uses_the_requested_threads(
    threads: int,
    cpu_kernels: str,
    tiny_vision: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: set[int] = set()
    pixels = VisionTower.pixels

    def counted(tower: VisionTower, tile: Any) -> Any:
        seen.add(torch.get_num_threads())
        return pixels(tower, tile)

    monkeypatch.setattr(VisionTower, "pixels", counted)
    tiny_vision.write_checkpoint(tmp_path)
    image = {"type": "image", "image": tiny_vision.image_file(20, 20)}
    prompt = ChatPrompt(messages=[{"role": "user", "content": [image, {"type": "text", "text": "What is it?"}]}])
    async with (
        open_engine(str(tmp_path), cpu_kernels=cpu_kernels, threads=threads) as engine,
        engine.generate(prompt, SamplingParams(max_tokens=1)) as stream,
    ):
        async for _ in stream:
            pass
    assert seen == {threads}


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("kind", ["eagle", "mtp"])
def test_drafting_heads_use_the_requested_threads(
    kind: str,
    threads: int,
    cpu_kernels: str,
    tiny_checkpoint: Callable[..., Path],
    tiny_eagle: ModuleType,
    tiny_mtp: ModuleType,
    draft_driver: ModuleType,
    tmp_path: Path,
) -> None:
    settings: Any = msgspec.structs.replace(draft_driver.settings(cpu_kernels), threads=threads)
    head: EagleCheckpoint | MtpCheckpoint
    if kind == "eagle":
        checkpoint = open_checkpoint(tiny_checkpoint("smollm3"))
        head = open_eagle(tiny_eagle.write_eagle(tmp_path))
    else:
        checkpoint = open_checkpoint(tiny_mtp.write_mtp(tiny_checkpoint("glm4-moe"), tmp_path))
        head = MtpCheckpoint(checkpoint)
    runner = ModelRunner.load(checkpoint, settings, draft=DraftSource("head", head, settings, 4))
    assert torch.get_num_threads() == threads
    runner.close()
