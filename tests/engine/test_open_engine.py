"""Tests of opening an engine with a fake model and the real loading code. No thread remains, even if the opening
fails.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import sys
import threading
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
import trio
import trio.testing

from trioserve import assemble, assemble_compute, assemble_model
from trioserve.assemble_model import ModelFiles
from trioserve.config import Config, make_config
from trioserve.connectors import settings as connector_module
from trioserve.contracts.errors import ContextTooLong, ModelLoadError, StartupError
from trioserve.contracts.kv_transfer import ConnectorSetup, KVPages
from trioserve.contracts.prompt import ChatPrompt
from trioserve.contracts.request import KVTransferParams
from trioserve.contracts.sampling import SamplingParams
from trioserve.core.settings import CoreSettings
from trioserve.model.settings import ModelSettings
from trioserve.options.engine import EngineOptions
from trioserve.options.option import options_of
from trioserve.testing.byte_tokenizer import BYTE_VOCAB_SIZE, END_TOKEN_ID, byte_tokenizer
from trioserve.testing.connector_conformance.side import MemoryPages
from trioserve.testing.fake_executor import FakeExecutor
from trioserve.testing.scripted_connector import ScriptedConnector

Report = Callable[[int, int], None]
Compiling = Callable[[str, float], None]


class FakeRunner(FakeExecutor):
    """A model runner without torch.

    `at` maps stages to functions. "compile" and "load" are called with the progress report. "allocate", "warm" and
    "claim" are called without arguments.
    """

    device = "cpu"
    dtype = kv_dtype = "float32"
    kv_cache_bytes = 1
    step_weight_bytes = 1
    token_flops = 1
    attended_token_flops = 1
    state_slot_count = snapshot_slot_count = 0
    takes_every_cpu = is_batch_invariant = False
    launches = False
    max_num_seqs, step_tokens_max = 64, 512
    why_kept = None
    computed_by = arithmetic = "nothing"
    at: ClassVar[dict[str, Callable[..., None]]] = {}
    made: ClassVar[list[FakeRunner]] = []
    settings: ClassVar[object] = None

    def __init__(self) -> None:
        super().__init__(block_count=64, block_size=16)
        self.closed_in: list[str] = []
        self.kv_names: list[str] = []
        self.claims_left = 3
        self.made.append(self)

    @classmethod
    def load(
        cls, _checkpoint: object, settings: ModelSettings, *, draft: object, progress: Report, on_compile: Compiling
    ) -> FakeRunner:
        cls.settings = settings
        cls.max_num_seqs, cls.step_tokens_max = settings.sequences_max, settings.step_tokens_max
        cls.do("compile", on_compile)
        cls.do("load", progress)
        return cls()

    @classmethod
    def do(cls, stage: str, *arguments: object) -> None:
        assert threading.current_thread().name == "trioserve-compute"
        cls.at.get(stage, lambda *_arguments: None)(*arguments)

    def allocate_kv(self, _block_count: int) -> None:
        self.do("allocate")

    def warm_up(self) -> None:
        self.do("warm")

    def claim_memory(self) -> bool:
        assert not self.closed_in
        self.do("claim")
        self.claims_left -= 1
        return self.claims_left > 0

    def kv_pages(self, model_name: str) -> KVPages:
        self.kv_names.append(model_name)
        return MemoryPages(self.block_count)

    def close(self) -> None:
        self.closed_in.append(threading.current_thread().name)


class Checkpoint:
    continues_texts = True
    gguf_metadata = audio = encoder = None
    tokenizer_directory = Path("nowhere")
    sampling_defaults: ClassVar[dict[str, float]] = {"temperature": 0.5}
    weight_bytes = 1
    config = types.SimpleNamespace(
        family="llama",
        vocab_size=BYTE_VOCAB_SIZE,
        eos_token_ids=(END_TOKEN_ID,),
        context_tokens_max=128,
        hidden_size=8,
        state_bytes=0,
        window_max=None,
        common_kv_entry=object(),
    )


@pytest.fixture
def runner_class(monkeypatch):
    """Replace the real runner by FakeRunner, and check that no thread remains afterwards."""
    monkeypatch.setattr(FakeRunner, "at", {})
    monkeypatch.setattr(FakeRunner, "made", [])
    monkeypatch.setitem(sys.modules, "trioserve.model.runner", types.SimpleNamespace(ModelRunner=FakeRunner))
    monkeypatch.setattr(assemble_model, "resolve_model", lambda name, **_options: Path(name))
    monkeypatch.setattr(assemble_model, "open_checkpoint", lambda _path, **_options: Checkpoint)
    monkeypatch.setattr(assemble_model, "weights_name", lambda _checkpoint: "these weights")
    monkeypatch.setattr(assemble_model, "_make_tokenizer", lambda _checkpoint: byte_tokenizer())
    threads_before = set(threading.enumerate())
    yield FakeRunner
    assert not set(threading.enumerate()) - threads_before


def check_closed(runner_class: type[FakeRunner]) -> None:
    assert [runner.closed_in for runner in runner_class.made] == [["trioserve-compute"]]


def report_for_ever(report: Report) -> None:
    while True:
        report(1, 2)


def raising(error: Exception) -> Callable[..., None]:
    def function(*_arguments: object) -> None:
        raise error

    return function


def wait_or_fail(event: threading.Event) -> None:
    assert event.wait(10)


async def test_engine_computes_in_its_threads_and_is_closed_only_once(runner_class):
    async with assemble.open_engine("some/model", max_num_seqs=2) as engine:
        assert engine.model.name == "model"
        assert engine.default_sampling.temperature == 0.5
        async with engine.generate("prompt", SamplingParams(max_tokens=5, ignore_eos=True)) as stream:
            assert sum([len(delta.token_ids) async for delta in stream]) == 5
        assert {"trioserve-compute", "trioserve-text"} <= {thread.name for thread in threading.enumerate()}
        assert runner_class.made[0].closed_in == []
    check_closed(runner_class)
    assert not engine.ready


async def test_engine_seed_makes_request_seeds_repeatable(runner_class):
    async def tokens() -> list[int]:
        async with assemble.open_engine("m", seed=5) as engine:
            found: list[int] = []
            for seed in (None, None, 7):
                sampling = SamplingParams(max_tokens=8, ignore_eos=True, seed=seed)
                async with engine.generate("prompt", sampling) as stream:
                    found += [token async for delta in stream for token in delta.token_ids]
            return found

    first = await tokens()
    assert first == await tokens()
    assert first[:8] != first[8:16]


async def test_chat_template_option_replaces_the_models_template(runner_class, tmp_path):
    for template in ("{{ messages[0].content }}!", str(tmp_path / "t.jinja")):
        (tmp_path / "t.jinja").write_text("{{ messages[0].content }}!")
        async with assemble.open_engine("m", chat_template=template) as engine:
            prompt = ChatPrompt(messages=[{"role": "user", "content": "Hi"}])
            assert engine.tokenizer.decode(await engine.encode(prompt)) == "Hi!"
    with pytest.raises(
        StartupError, match=r"--chat-template .*none cannot be read \(No such file or directory\): name"
    ):
        async with assemble.open_engine("m", chat_template=str(tmp_path / "none")):
            pass


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for message in messages %}{{ message.content }}", r"line 1: Unexpected end of template"),
        ("\n\n{{ messages | shout }}", r"line 3: No filter named 'shout'"),
        ("{{" + " " * 300_000 + "}}", "it has 300004 characters"),
    ],
)
async def test_invalid_chat_template_is_refused_before_the_model_is_loaded(runner_class, tmp_path, template, reason):
    path = tmp_path / "broken.jinja"
    path.write_text(template)
    with pytest.raises(StartupError, match=rf"--chat-template .*broken.jinja is not a valid template \({reason}"):
        async with assemble.open_engine("m", chat_template=str(path)):
            pass
    with pytest.raises(StartupError, match=r"the template of --chat-template is not valid \("):
        async with assemble.open_engine("m", chat_template=template):
            pass
    assert runner_class.made == []


async def test_image_model_is_refused_by_open_engine(runner_class, tmp_path):
    (tmp_path / "model_index.json").write_text("{}")
    with pytest.raises(StartupError, match="generates images, but an engine for text was requested"):
        async with assemble.open_engine(str(tmp_path)):
            pass
    assert runner_class.made == []


async def test_tokenizer_of_another_model_is_refused(runner_class, monkeypatch):
    monkeypatch.setattr(assemble_model, "load_tokenizer", lambda path: types.SimpleNamespace(vocab_size=10**6))
    monkeypatch.setattr(assemble_model, "resolve_model", lambda name, **_options: Path(name))
    with pytest.raises(StartupError, match="--tokenizer other has 1000000 tokens, but the model has"):
        async with assemble.open_engine("m", tokenizer="other"):
            pass


async def test_generation_config_override_sets_defaults_and_limits_every_request(runner_class):
    wanted = {"max_new_tokens": 3}
    async with assemble.open_engine("m", generation_config="vllm", override_generation_config=wanted) as engine:
        assert engine.default_sampling == SamplingParams(max_tokens=3, clamp_max_tokens=True)
        for sampling in (SamplingParams(ignore_eos=True), SamplingParams(ignore_eos=True, max_tokens=20)):
            async with engine.generate("prompt", sampling) as stream:
                assert sum([len(delta.token_ids) async for delta in stream]) == 3
        async with engine.generate("prompt", SamplingParams(ignore_eos=True, max_tokens=2)) as stream:
            assert sum([len(delta.token_ids) async for delta in stream]) == 2


async def test_token_limit_of_all_requests_is_clamped_to_the_context(runner_class):
    wanted = {"max_new_tokens": 1_000_000}
    async with assemble.open_engine("m", generation_config="vllm", override_generation_config=wanted) as engine:
        for sampling in (None, SamplingParams()):
            async with engine.generate("prompt", sampling) as stream:
                await anext(aiter(stream))
        with pytest.raises(ContextTooLong):
            async with engine.generate("prompt", SamplingParams(max_tokens=500_000)) as stream:
                await anext(aiter(stream))


@pytest.mark.parametrize("device", ("cpu", "cuda"))
async def test_readers_write_before_the_next_step_if_steps_use_the_cpu(device, runner_class, monkeypatch):
    asked: list[bool] = []

    class Noted(assemble.Engine):
        def __init__(self, *, readers_first: bool, **rest) -> None:
            asked.append(readers_first)
            super().__init__(readers_first=readers_first, **rest)

    monkeypatch.setattr(assemble, "Engine", Noted)
    monkeypatch.setattr(runner_class, "device", device)
    async with assemble.open_engine("m"):
        assert asked == [device == "cpu"]


@pytest.mark.parametrize("takes_every_cpu", (False, True))
@pytest.mark.parametrize("overlap_steps", (False, True))
async def test_steps_that_use_every_cpu_begin_on_the_cpu_of_the_event_loop(
    overlap_steps, takes_every_cpu, runner_class, monkeypatch
):
    asked: list[bool] = []

    class Noted(assemble_compute.ThreadedExecutor):
        def __init__(self, *arguments, takes_cpu: bool) -> None:
            asked.append(takes_cpu)
            super().__init__(*arguments, takes_cpu=takes_cpu)

    monkeypatch.setattr(assemble_compute, "ThreadedExecutor", Noted)
    monkeypatch.setattr(runner_class, "takes_every_cpu", takes_every_cpu)
    async with assemble.open_engine("m", overlap_steps=overlap_steps):
        assert asked == [takes_every_cpu and not overlap_steps]


@pytest.mark.parametrize(
    "launches, options, overlaps",
    (
        (True, {}, True),
        (True, {"overlap_steps": False}, False),
        (True, {"speculative_ngram": 2}, False),
        (False, {}, False),
    ),
)
async def test_steps_overlap_by_default_where_they_are_launched(launches, options, overlaps, runner_class, monkeypatch):
    asked: list[bool] = []

    class Noted(assemble.EngineCore):
        def __init__(self, settings: CoreSettings, **rest) -> None:
            asked.append(settings.overlap_steps)
            super().__init__(settings, **rest)

    monkeypatch.setattr(assemble, "EngineCore", Noted)
    monkeypatch.setattr(runner_class, "launches", launches)
    async with assemble.open_engine("m", **options):
        assert asked == [overlaps]


async def test_step_limits_depend_on_the_device_and_are_logged_once(runner_class, monkeypatch, caplog):
    load = runner_class.load.__func__

    def load_on_gpu(cls, checkpoint, settings, **rest):
        runner = load(cls, checkpoint, settings, **rest)
        runner.max_num_seqs, runner.step_tokens_max = 256, 2048
        return runner

    monkeypatch.setattr(runner_class, "load", classmethod(load_on_gpu))
    with caplog.at_level(logging.INFO, "trioserve.assemble"):
        async with assemble.open_engine("m") as engine:
            assert engine.load().max_num_seqs == 256
    [line] = [record.getMessage() for record in caplog.records if "max_num_batched_tokens" in record.getMessage()]
    assert "max_num_seqs=256 max_num_batched_tokens=2048 overlap_steps=off" in line


@pytest.mark.parametrize("launches", (False, True))
@pytest.mark.parametrize("overlap_steps", (False, True))
async def test_overlapping_steps_are_launched_on_a_device_with_its_own_queue(
    overlap_steps, launches, runner_class, monkeypatch
):
    launched: list[int] = []

    def launch(runner, plan, is_abandoned):
        launched.append(plan.step_index)
        return lambda: runner.execute(plan, is_abandoned)

    monkeypatch.setattr(runner_class, "launches", launches)
    monkeypatch.setattr(runner_class, "launch", launch, raising=False)
    async with assemble.open_engine("m", overlap_steps=overlap_steps) as engine:
        async with engine.generate("prompt", SamplingParams(max_tokens=3, ignore_eos=True)) as stream:
            assert sum([len(delta.token_ids) async for delta in stream]) == 3
        assert bool(launched) == (overlap_steps and launches)


async def test_closing_the_engine_waits_for_a_running_memory_claim(runner_class):
    token = trio.lowlevel.current_trio_token()
    begun, may_end = trio.Event(), threading.Event()

    def claim() -> None:
        token.run_sync_soon(begun.set)
        wait_or_fail(may_end)

    runner_class.at["claim"] = claim

    async def let_end() -> None:
        await trio.testing.wait_all_tasks_blocked()  # The task that leaves also waits for the thread.
        may_end.set()

    async with trio.open_nursery() as nursery:
        async with assemble.open_engine("m"):
            with trio.fail_after(10):
                await begun.wait()
            nursery.start_soon(let_end)
        check_closed(runner_class)
    assert runner_class.made[0].claims_left == 2


async def test_idle_engine_claims_all_of_its_memory_step_by_step(runner_class):
    token = trio.lowlevel.current_trio_token()
    all_claimed = trio.Event()

    def claim() -> None:
        if runner_class.made[0].claims_left == 1:
            token.run_sync_soon(all_claimed.set)

    runner_class.at["claim"] = claim
    async with assemble.open_engine("m") as engine:
        with trio.fail_after(10):
            await all_claimed.wait()
        async with engine.generate("prompt", SamplingParams(max_tokens=5, ignore_eos=True)) as stream:
            assert sum([len(delta.token_ids) async for delta in stream]) == 5
    assert runner_class.made[0].claims_left == 0


async def test_model_is_prepared_for_the_configured_number_of_sequences(runner_class):
    async with assemble.open_engine("m", max_num_seqs=5, max_model_len=40):
        assert runner_class.settings.max_num_seqs == 5
        assert runner_class.settings.context_tokens_max == 40
        assert not runner_class.settings.enforce_eager
    async with assemble.open_engine("m", enforce_eager=True):
        assert runner_class.settings.context_tokens_max is None
        assert runner_class.settings.enforce_eager


def test_graphs_are_prepared_for_draft_tokens_and_adapters_of_the_model_and_not_of_its_draft_model():
    options = EngineOptions(model="m", speculative_model="d", speculative_tokens=3, enable_lora=True)
    settings = options.model_settings()
    assert (settings.draft_tokens, settings.max_lora_graph_rank) == (3, 256)
    of_draft = ModelFiles(options, None, None).drafts.settings_of_draft(settings)
    assert (of_draft.draft_tokens, of_draft.max_lora_graph_rank) == (0, 0)
    plain = EngineOptions(model="m").model_settings()
    assert (plain.draft_tokens, plain.max_lora_graph_rank) == (0, 0)
    assert EngineOptions(model="m", lora_modules=("a=b",)).model_settings().max_lora_graph_rank == 256


async def test_checkpoint_is_opened_with_the_served_context_length(runner_class, monkeypatch):
    asked: list[int | None] = []

    def opened(_path, *, context_tokens, uses_further_layers):
        assert not uses_further_layers
        asked.append(context_tokens)
        return Checkpoint

    monkeypatch.setattr(assemble_model, "open_checkpoint", opened)
    for max_model_len in (40, None):
        async with assemble.open_engine("m", max_model_len=max_model_len):
            pass
    assert asked == [40, None]


async def test_error_in_the_engine_scope_closes_the_runner_and_is_raised_unchanged(runner_class):
    with pytest.raises(KeyError, match="mine"):
        async with assemble.open_engine("m") as engine, engine.generate("prompt"):
            raise KeyError("mine")
    check_closed(runner_class)


async def test_engine_in_an_outer_nursery_ends_with_it(runner_class):
    async with trio.open_nursery() as nursery:

        async def use_it() -> None:
            async with assemble.open_engine("m") as engine, engine.generate("prompt") as stream:
                await anext(stream)
                nursery.cancel_scope.cancel()
                async for _ in stream:
                    pass

        nursery.start_soon(use_it)
    check_closed(runner_class)


async def test_error_about_wrong_settings_is_raised_after_the_runner_is_closed(runner_class):
    with pytest.raises(StartupError, match="max-model-len is 1000"):
        async with assemble.open_engine("m", max_model_len=1000):
            pytest.fail("was opened")
    check_closed(runner_class)


async def test_error_of_on_loaded_closes_the_runner(runner_class):
    with pytest.raises(BrokenPipeError):
        async with assemble.open_configured_engine(make_config(model="m"), on_loaded=raising(BrokenPipeError())):
            pytest.fail("was opened")
    check_closed(runner_class)


async def test_error_of_on_progress_ends_the_loading(runner_class):
    runner_class.at["load"] = report_for_ever
    with pytest.raises(BrokenPipeError):
        async with assemble.open_configured_engine(make_config(model="m"), on_progress=raising(BrokenPipeError())):
            pytest.fail("was opened")
    assert runner_class.made == []


async def test_progress_of_loading_is_reported(runner_class, monkeypatch):
    def fetched(name: str, *, progress: Report, **_options: object) -> Path:
        progress(5, 10)
        return Path(name)

    monkeypatch.setattr(assemble_model, "resolve_model", fetched)
    runner_class.at["compile"] = lambda on_compile: on_compile("compiling it", 3.0)
    runner_class.at["load"] = lambda report: report(1, 2)
    told: list[assemble_model.LoadProgress] = []
    async with assemble.open_configured_engine(make_config(model="m"), on_progress=told.append):
        pass
    assert told == [
        assemble_model.LoadProgress("fetching m", 5, 10),
        assemble_model.LoadProgress("compiling it", 3.0),
        assemble_model.LoadProgress("loading m", 1, 2),
    ]


@pytest.mark.parametrize("is_reported", [False, True])
async def test_each_activity_of_the_start_is_logged_once_and_reported(runner_class, monkeypatch, caplog, is_reported):
    def fetched(name: str, *, progress: Report, **_options: object) -> Path:
        progress(0, 0)
        progress(5, 10)
        return Path(name)

    def compile_slowly(on_compile: Compiling) -> None:
        on_compile("compiling it", 0.0)
        on_compile("compiling it", 1.0)

    def load(report: Report) -> None:
        report(0, 2)
        report(1, 2)

    monkeypatch.setattr(assemble_model, "resolve_model", fetched)
    runner_class.at.update(compile=compile_slowly, load=load)
    caplog.set_level("INFO", logger="trioserve.assemble")
    reported: list[assemble_model.LoadProgress] = []
    async with assemble.open_engine("m", progress=reported.append if is_reported else None):
        pass
    lines = [record.message for record in caplog.records]
    assert [line for line in lines if line.startswith(("fetching", "compiling", "loading"))] == [
        "fetching m",
        "compiling it",
        "loading m",
    ]
    assert [(progress.what, progress.done, progress.total) for progress in reported] == [
        ("fetching m", 0, None),
        ("fetching m", 5, 10),
        ("compiling it", 0, None),
        ("compiling it", 1, None),
        ("loading m", 0, 2),
        ("loading m", 1, 2),
    ][: len(reported)]
    assert bool(reported) is is_reported


def test_asyncio_engine_reports_the_progress_of_its_start(runner_class):
    runner_class.at["load"] = lambda report: report(1, 2)
    reported: list[assemble_model.LoadProgress] = []

    async def open_it() -> None:
        async with assemble.open_asyncio_engine("m", progress=reported.append):
            pass

    asyncio.run(open_it())
    assert assemble_model.LoadProgress("loading m", 1, 2) in reported


async def test_download_of_a_cancelled_start_ends_when_it_next_receives_bytes(runner_class, monkeypatch):
    scope = trio.CancelScope()
    token = trio.lowlevel.current_trio_token()
    is_left, ended = threading.Event(), trio.Event()
    received: list[int] = []

    def fetch(_name: str, *, progress: Report, **_options: object) -> Path:
        progress(1, 10)
        token.run_sync_soon(scope.cancel)
        wait_or_fail(is_left)
        try:
            progress(2, 10)
            received.append(2)
        finally:
            token.run_sync_soon(ended.set)

    monkeypatch.setattr(assemble_model, "resolve_model", fetch)
    with scope:
        async with assemble.open_engine("m"):
            pytest.fail("was opened")
    is_left.set()
    with trio.fail_after(10):
        await ended.wait()
    assert scope.cancelled_caught
    assert received == []


async def test_cancelled_opening_ends_the_kernel_compiler(runner_class):
    token = trio.lowlevel.current_trio_token()
    begun = trio.Event()

    def compile_for_ever(on_compile: Compiling) -> None:
        token.run_sync_soon(begun.set)
        while True:
            on_compile("compiling it", 1.0)

    runner_class.at["compile"] = compile_for_ever
    async with trio.open_nursery() as nursery:

        async def open_it() -> None:
            async with assemble.open_engine("m"):
                pytest.fail("was opened")

        nursery.start_soon(open_it)
        await begun.wait()
        nursery.cancel_scope.cancel()
    assert runner_class.made == []


async def test_model_load_error_is_raised_unchanged(runner_class):
    runner_class.at["load"] = raising(ModelLoadError("no weights"))
    with pytest.raises(ModelLoadError, match="no weights"):
        async with assemble.open_engine("m"):
            pytest.fail("was opened")


async def test_tokenizer_error_ends_the_loading_of_the_weights(runner_class, monkeypatch):
    loading = threading.Event()

    def load(report: Report) -> None:
        loading.set()
        report_for_ever(report)

    def make_tokenizer(_checkpoint: object) -> None:
        wait_or_fail(loading)
        raise ModelLoadError("no tokenizer")

    runner_class.at["load"] = load
    monkeypatch.setattr(assemble_model, "_make_tokenizer", make_tokenizer)
    with pytest.raises(ModelLoadError, match="no tokenizer"):
        async with assemble.open_engine("m"):
            pytest.fail("was opened")
    assert runner_class.made == []


async def test_model_loading_ends_when_it_is_cancelled(runner_class):
    scope = trio.CancelScope()
    token = trio.lowlevel.current_trio_token()

    def load(report: Report) -> None:
        token.run_sync_soon(scope.cancel)
        report_for_ever(report)

    runner_class.at["load"] = load
    with scope:
        async with assemble.open_engine("m"):
            pytest.fail("was opened")
    assert scope.cancelled_caught
    assert runner_class.made == []


async def test_errors_of_weights_and_tokenizer_are_raised_as_one(runner_class, monkeypatch):
    loading = threading.Event()

    def load(report: Report) -> None:
        loading.set()
        try:
            report_for_ever(report)
        except Exception:
            # The opening was cancelled meanwhile, and this loading task fails while it ends.
            raise ModelLoadError("no weights") from None

    def make_tokenizer(_checkpoint: object) -> None:
        wait_or_fail(loading)
        raise ModelLoadError("no tokenizer")

    runner_class.at["load"] = load
    monkeypatch.setattr(assemble_model, "_make_tokenizer", make_tokenizer)
    with pytest.raises(ModelLoadError, match="no tokenizer"):
        async with assemble.open_engine("m"):
            pytest.fail("was opened")


@pytest.mark.parametrize("stage", ["allocate", "warm"])
async def test_a_runner_that_fails_before_it_is_ready_is_closed(stage, runner_class):
    runner_class.at[stage] = raising(MemoryError("no room"))
    with pytest.raises(MemoryError, match="no room"):
        async with assemble.open_engine("m"):
            pytest.fail("was opened")
    check_closed(runner_class)


@pytest.mark.parametrize("stage", ["allocate", "warm"])
async def test_runner_is_closed_if_another_part_of_the_opening_fails(stage, runner_class, monkeypatch):
    begun, proceed = threading.Event(), threading.Event()

    def make_tokenizer(_checkpoint: object) -> None:
        wait_or_fail(begun)
        proceed.set()
        raise ModelLoadError("no tokenizer")

    def begin() -> None:
        begun.set()
        wait_or_fail(proceed)

    runner_class.at[stage] = begin
    monkeypatch.setattr(assemble_model, "_make_tokenizer", make_tokenizer)
    with pytest.raises(ModelLoadError, match="no tokenizer"):
        async with assemble.open_engine("m"):
            pytest.fail("was opened")
    check_closed(runner_class)


# --- with a connector ---

setups: list[ConnectorSetup] = []


def make_connector(setup: ConnectorSetup) -> ScriptedConnector:
    """Create a connector, like a factory in a package outside of trioserve."""
    if "wrong" in setup.options:
        raise StartupError("the option wrong is wrong")
    setups.append(setup)
    return ScriptedConnector(FakeRunner.made[-1], setup.wake)


@pytest.fixture
def with_connector(runner_class, monkeypatch):
    monkeypatch.setattr(connector_module, "OWN_CONNECTORS", {"mine": "its.own.package:make_connector"})
    monkeypatch.setitem(sys.modules, "its", types.ModuleType("its"))
    monkeypatch.setitem(sys.modules, "its.own", types.ModuleType("its.own"))
    monkeypatch.setitem(sys.modules, "its.own.package", types.SimpleNamespace(make_connector=make_connector))
    setups.clear()
    return runner_class


async def test_a_connector_gets_the_cache_and_its_options_and_wakes_the_engine(with_connector):
    options = {"kv_connector": "mine", "kv_role": "kv_producer", "kv_connector_extra_config": {"port": 5600}}
    async with assemble.open_engine("m", kv_transfer_config=options, kv_hold_timeout=20.0) as engine:
        [setup] = setups
        assert (setup.role, setup.options, engine.load().role) == ("prefill", {"port": 5600}, "prefill")
        assert setup.pages.block_count == 64
        assert with_connector.made[0].kv_names == ["these weights"]
        asked = KVTransferParams(do_remote_decode=True)
        async with engine.generate("prompt", SamplingParams(max_tokens=1), kv_transfer=asked) as stream:
            assert [delta async for delta in stream][-1].kv_transfer is not None
            with trio.fail_after(5):
                engine._connector.release_all()
                await stream.wait_until_released()
    async with assemble.open_engine("m", kv_transfer_config=options):
        assert len({setup.engine_id for setup in setups}) == 2  # Each opening has a new id.
    check_all_closed(with_connector)


def check_all_closed(runner_class: type[FakeRunner]) -> None:
    assert {tuple(runner.closed_in) for runner in runner_class.made} == {("trioserve-compute",)}


async def test_unknown_connector_is_refused_before_the_model_is_loaded(with_connector):
    with pytest.raises(StartupError, match='no connector "pigeon"'):
        async with assemble.open_engine("m", kv_transfer_config={"kv_connector": "pigeon"}):
            pass
    assert with_connector.made == []


async def test_connector_that_refuses_its_options_leaves_no_thread(with_connector):
    config = {"kv_connector": "mine", "kv_connector_extra_config": {"wrong": 1}}
    with pytest.raises(StartupError, match="the option wrong is wrong"):
        async with assemble.open_engine("m", kv_transfer_config=config):
            pass
    check_closed(with_connector)


async def test_limits_of_kv_holds_reach_the_core(with_connector):
    async with assemble.open_engine(
        "m",
        kv_transfer_config={"kv_connector": "mine", "kv_load_failure_policy": "fail"},
        kv_hold_timeout=20.0,
        kv_load_timeout=30.0,
        kv_held_share=0.25,
    ) as engine:
        core = engine._core.settings
        assert (core.hold_seconds_max, core.remote_kv_seconds_max, core.held_share_max) == (20.0, 30.0, 0.25)
        assert core.load_failure_policy == "fail"


async def test_ignored_vllm_keys_of_a_connector_configuration_are_logged(with_connector, caplog):
    async with assemble.open_engine("m", kv_transfer_config={"kv_connector": "mine", "kv_rank": 0}):
        assert any("ignored=kv_rank" in record.getMessage() for record in caplog.records)


def test_parameters_of_open_engine_are_the_options_of_an_engine():
    options, parameters = options_of(EngineOptions), dict(inspect.signature(assemble.open_engine).parameters)
    assert parameters.pop("progress").default is None
    assert parameters.keys() == options.keys()
    assert next(iter(parameters)) == "model"
    # Type hints do not include the bounds of the options.
    types_of_options = typing.get_type_hints(EngineOptions)
    for name, parameter in parameters.items():
        assert (parameter.default, parameter.annotation) == (options[name].default, types_of_options[name]), name
        assert parameter.kind is (parameter.POSITIONAL_OR_KEYWORD if name == "model" else parameter.KEYWORD_ONLY), name
        assert options_of(Config)[name] == options[name], name


def test_options_of_the_server_are_not_parameters_of_open_engine():
    of_the_server = {"port", "drain_timeout", "allowed_lora_path", "node_rank", "data_dir", "endpoint", "max_images"}
    assert of_the_server <= options_of(Config).keys() - options_of(EngineOptions).keys()


def test_each_parameter_of_open_engine_is_documented():
    described = inspect.getdoc(assemble.open_engine).partition("Args:")[2].partition("Raises:")[0]
    names = [line.split(": ")[0].strip() for line in described.splitlines() if ": " in line]
    assert [name for name in inspect.signature(assemble.open_engine).parameters if name not in names] == []
    assert "--" not in described, "parameters have the names of Python, not those of flags"


async def test_parameters_of_open_engine_reach_the_configuration(runner_class, monkeypatch):
    configs: list[EngineOptions] = []

    def watched(config: EngineOptions, **arguments: object) -> object:
        configs.append(config)
        return open_configured_engine(config, **arguments)

    open_configured_engine = assemble.open_configured_engine
    monkeypatch.setattr(assemble, "open_configured_engine", watched)
    async with assemble.open_engine("m", max_num_seqs=5, ttft_timeout=3):
        pass
    async with assemble.open_engine():
        pass
    assert configs == [EngineOptions("m", max_num_seqs=5, ttft_timeout=3.0), EngineOptions()]
    check_all_closed(runner_class)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_num_seqs": "16"}, "max_num_seqs is '16', allowed is a whole number"),
        ({"model": None}, "model is None, allowed is a text"),
        ({"dtype": "float8"}, "dtype is 'float8', allowed is one of auto, bfloat16"),
        ({"request_timeout": 0}, "request_timeout is 0, allowed is a number above 0"),
        ({"kv_transfer_config": 5}, "kv_transfer_config is 5, allowed is a text"),
        ({"override_generation_config": {"top_q": 1}}, "has 'top_q', which it does not accept: did you mean top_p?"),
    ],
)
async def test_parameter_of_a_wrong_type_is_refused_before_the_model_is_loaded(options, words, runner_class):
    with pytest.raises(StartupError, match=words):
        async with assemble.open_engine(**options):
            pass
    assert runner_class.made == []


async def test_server_option_is_not_a_parameter_of_open_engine():
    with pytest.raises(TypeError, match="port"):
        assemble.open_engine(port=8000)


@pytest.mark.parametrize(
    ("computes_so", "options", "promised"),
    (
        (False, {}, False),
        (True, {}, True),
        # The KV may come from an engine that is not batch-invariant.
        (True, {"kv_transfer_config": {"kv_connector": "mine"}}, False),
        (True, {"kv_transfer_config": {"kv_connector": "mine"}, "batch_invariant": True}, True),
    ),
)
async def test_engine_reports_batch_invariance_if_possible(
    computes_so: bool, options: dict[str, object], promised: bool, with_connector, monkeypatch
):
    monkeypatch.setattr(with_connector, "is_batch_invariant", computes_so)
    async with assemble.open_engine("m", **options) as engine:
        assert engine.model.batch_invariant == promised
        shown = [line for line in engine.metrics.expose().splitlines() if line.startswith(b"trioserve:batch_invariant")]
        assert [float(line.split()[-1]) for line in shown] == [promised]
        assert with_connector.settings.batch_invariant == options.get("batch_invariant", False)
