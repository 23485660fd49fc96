"""Tests of the options of models that are loaded on demand, and of the command lines of their processes."""

from __future__ import annotations

import argparse
import json
import signal
from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.assemble_model import LoadProgress
from trioserve.commands.child_processes import ParentProcess, child_sockets, relay_progress
from trioserve.commands.hosting import STOP_SECONDS_MAX, Hosting, ModelProcesses, hosted_models
from trioserve.config import Config, add_arguments, config_from, make_config
from trioserve.contracts.errors import EngineFault, StartupError
from trioserve.model.settings import lora_modules
from trioserve.options.hosting import HostedModelOptions
from trioserve.proxy.fleet import EndpointSpec


def config(*flags: str, environment: dict[str, str] | None = None) -> Config:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return config_from(parser.parse_args(flags), environment or {}, kind=Config)


def test_repeated_model_flag_with_names_hosts_models():
    made = config(
        "--model",
        "a=/x/a.gguf",
        "--model",
        'b=/x/b,max_model_len=2k,aliases=["bb","b2"],pinned=true,priority=-2,group=gpu',
    )
    assert made.model == make_config().model
    a, b = made.hosted_models()
    assert a == HostedModelOptions(name="a", path="/x/a.gguf")
    assert (b.name, b.aliases, b.pinned, b.engine) == ("b", ("bb", "b2"), True, {"max_model_len": "2k"})
    assert (b.priority, b.group) == (-2, "gpu")
    assert config("--model", "./dir=1/model").model == "./dir=1/model"


def test_tables_of_a_config_file_host_models(tmp_path: Path):
    file = tmp_path / "c.toml"
    file.write_text('[models.a]\npath = "/x"\nkeep_alive = 30\n[models."b/c"]\npath = "/y"\nthreads = 2\n')
    a, b = config("--config", str(file)).hosted_models()
    assert (a.name, a.path, a.keep_alive) == ("a", "/x", 30)
    assert (b.name, b.path, b.engine) == ("b/c", "/y", {"threads": 2})
    file.write_text("[models.a]\nkeep_alive = 30\n")
    with pytest.raises(StartupError, match=r"\[models.a\] has no path"):
        config("--config", str(file))


@pytest.mark.parametrize(
    "given",
    ["fr=/l/fr", '["fr=/l/fr"]', '[{"name": "fr", "path": "/l/fr"}]', '{"name": "fr", "path": "/l/fr"}'],
)
def test_hosted_model_has_the_names_of_its_adapters(given):
    made = make_config(host_model=(f"a=/x,lora_modules={given}",))
    [model] = hosted_models(made)
    assert model.adapters == ("fr",)
    flags = ModelProcesses(made, [model]).command("a")
    assert "fr" in flags[flags.index("--lora-modules") + 1]


def test_process_of_a_model_gets_the_adapters_that_were_loaded_while_it_ran():
    made = make_config(host_model=("a=/x,lora_modules=fr=/l/fr",), allow_runtime_lora_updating=True)
    processes = ModelProcesses(made, hosted_models(made))
    processes.set_adapter("a", "de", "/l/de")
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    read = config_from(parser.parse_args(processes.command("a")[1:]), {}, kind=Config)
    assert {module.name: module.path for module in lora_modules(read.lora_modules)} == {"fr": "/l/fr", "de": "/l/de"}
    assert read.allow_runtime_lora_updating
    processes.set_adapter("a", "fr", None)
    read = config_from(parser.parse_args(processes.command("a")[1:]), {}, kind=Config)
    assert [module.name for module in lora_modules(read.lora_modules)] == ["de"]


def test_models_of_a_directory_have_the_names_of_their_files(tmp_path: Path):
    (tmp_path / "one.gguf").touch()
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "config.json").touch()
    (tmp_path / "notes.txt").touch()
    made = make_config(models_dir=str(tmp_path), host_model=("two=/elsewhere",))
    assert {model.name: model.path for model in made.hosted_models()} == {
        "one": str(tmp_path / "one.gguf"),
        "two": "/elsewhere",
    }
    with pytest.raises(StartupError, match="has no models: put"):
        make_config(models_dir=str(tmp_path / "two")).hosted_models()


def test_model_of_a_directory_that_cannot_be_read_is_left_out_and_a_named_one_is_refused(tmp_path: Path, caplog):
    def no_serving(*_: object) -> None:
        raise AssertionError("no model is loaded")

    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "config.json").write_text("{}")
    with pytest.raises(StartupError, match=r"no model of --models-dir can be read: .*no weights"):
        Hosting(make_config(models_dir=str(tmp_path)), no_serving)
    made = make_config(models_dir=str(tmp_path), host_model=("good=/good,memory=1",))
    assert Hosting(made, no_serving).what == "1 models on demand"
    assert "model left out model=part reason=" in caplog.text
    with pytest.raises(StartupError, match='"named" cannot be read'):
        Hosting(make_config(host_model=(f"named={tmp_path / 'part'}",)), no_serving)


@pytest.mark.parametrize(
    ("texts", "sentence"),
    [
        (("a",), 'a hosted model is "a", it must be NAME=PATH'),
        (("a=/x", "b=/y,aliases=a"), 'two hosted models with the name "a"'),
        (("a=/x,lora_modules=b=/l", "b=/y"), 'two hosted models with the name "b"'),
        (("a=/x,lora_modules=fr",), "--lora-modules 'fr' has no name and path"),
        (
            ("a=/x,keep_alive=soon",),
            "keep_alive of the hosted model \"a\" is 'soon', allowed is a number of at",
        ),
        (("a=/x,pinned=1",), 'pinned of the hosted model "a" is 1, allowed is true or false'),
        (("a=/x,priority=200",), "is 200, allowed is a whole number of at least -100 and up to 100"),
        (("a=/x,max_model_length=8",), "has the option max_model_length, .*: did you mean max_model_len?"),
        (("a=/x,pined=true",), "has the option pined, .*: did you mean pinned?"),
        (("a=/x,port=1",), 'the hosted model "a" has the option port, which neither .*: it may have aliases, '),
        (("a=/x,threads=none",), "threads of the hosted model \"a\" is 'none', allowed is a whole number"),
    ],
)
def test_wrong_hosted_model_is_refused_before_anything_starts(texts, sentence):
    with pytest.raises(StartupError, match=sentence):
        hosted_models(make_config(host_model=texts))


def test_process_of_a_model_gets_the_common_options_and_its_own(tmp_path: Path):
    made = make_config(
        host_model=('a=/x,threads=1,max_model_len=2048,override_generation_config={"top_k": 5},enforce_eager=true',),
        threads=2,
        quantization="int8",
        port=1,
        data_dir=str(tmp_path),
        api_key=("secret",),
        trust_request_chat_template=True,
        max_body_bytes=123_456,
    )
    command = ModelProcesses(made, made.hosted_models()).command("a")
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    read = config_from(parser.parse_args(command[1:]), {}, kind=Config)
    assert (read.model, read.served_model_name, read.host, read.port) == ("/x", ("a",), "127.0.0.1", 0)
    assert (read.threads, read.quantization, read.max_model_len, read.enforce_eager) == (1, "int8", 2048, True)
    assert (read.data_dir, read.kv_cache_memory, read.api_key) == (str(tmp_path / "models" / "a"), 1.0, ())
    assert (read.trust_request_chat_template, read.max_body_bytes) == (True, 123_456)
    assert json.loads(str(read.override_generation_config)) == {"top_k": 5}
    assert "secret" not in command


class ModelInside:
    """Runs a model in this process, with a server that a test controls.

    Attributes:
        served: options of each server.
        can_load: set to let the load end.
        fault: error that ends the server once it has loaded. None: it serves until it gets an order.
        orders: orders that the server got.
        loaded: endpoints of loaded models.
        progress: reported progress.
        ended: how the server ended.
    """

    def __init__(self, *, fault: Exception | None = None) -> None:
        made = make_config(host_model=("a=/x,threads=1",), model_processes=False)
        self.served: list[Config] = []
        self.can_load, self.stopping = trio.Event(), trio.Event()
        self.fault = fault
        self.orders: list[object] = []
        self.loaded: list[EndpointSpec] = []
        self.progress: list[tuple[str, float | None]] = []
        self.ended: list[str] = []
        self._processes = ModelProcesses(made, hosted_models(made))

    async def serve_model(self, config, orders, *, on_serving, on_progress):
        self.served.append(config)
        on_progress(LoadProgress("loading /x", 1, 4))
        await self.can_load.wait()
        on_serving(["http://127.0.0.1:1234"])
        if self.fault is not None:
            raise self.fault
        self.orders.append(await orders.receive())

    async def run(self) -> None:
        ended = await self._processes.run_inside(
            self.serve_model,
            "a",
            on_loaded=self.loaded.append,
            on_progress=lambda what, share: self.progress.append((what, share)),
            stopping=self.stopping,
        )
        self.ended.append(ended)


async def test_model_without_a_process_has_the_options_and_keys_of_its_process():
    model = ModelInside()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(model.run)
        model.can_load.set()
        await wait_all_tasks_blocked()
        [served], [endpoint] = model.served, model.loaded
        assert (served.model, served.served_model_name, served.host, served.port) == ("/x", ("a",), "127.0.0.1", 0)
        assert (served.threads, served.api_key, served.admin_api_key) == (1, (endpoint.api_key,), endpoint.api_key)
        assert (endpoint.url, endpoint.models, model.progress) == (
            "http://127.0.0.1:1234",
            {"a": "a"},
            [("loading a", 0.25)],
        )
        assert model.orders == []
        model.stopping.set()
    assert (model.orders, model.ended) == ([signal.SIGTERM], ["its server ended"])


async def test_load_without_a_process_ends_at_once_when_it_is_cancelled():
    model = ModelInside()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(model.run)
        await wait_all_tasks_blocked()
        model.stopping.set()
    assert (model.loaded, model.orders, model.ended) == ([], [], ["its server ended"])


async def test_fault_of_a_model_without_a_process_is_how_it_ended_without_its_path():
    model = ModelInside(fault=EngineFault("a step of /x failed"))
    model.can_load.set()
    with trio.fail_after(10):
        await model.run()
    assert (len(model.loaded), model.ended) == (1, ["a step of a failed"])


async def test_model_without_a_process_that_does_not_stop_is_cancelled(autojump_clock):
    model = ModelInside()
    model.can_load.set()

    async def never_stops(config, orders, *, on_serving, on_progress):
        on_serving(["http://127.0.0.1:1234"])
        await trio.sleep_forever()

    model.serve_model = never_stops
    async with trio.open_nursery() as nursery:
        nursery.start_soon(model.run)
        await wait_all_tasks_blocked()
        began_at = trio.current_time()
        model.stopping.set()
    assert (trio.current_time() - began_at, model.ended) == (STOP_SECONDS_MAX, ["its server ended"])


async def test_progress_of_a_load_reaches_the_parent_process_once_for_each_per_cent():
    ours, theirs = child_sockets()
    parent = ParentProcess(theirs)
    for done in (0, 1, 500, 504, 1000):
        parent.report(LoadProgress("loading /x/a", done, 1000))
    parent.report(LoadProgress("warming up", 3.0))
    theirs.close()
    received: list[tuple[str, float | None]] = []
    with ours, trio.fail_after(10):
        await relay_progress(trio.socket.from_stdlib_socket(ours), lambda *message: received.append(message))
    assert received == [*(("loading /x/a", share) for share in (0.0, 0.5, 1.0)), ("warming up", None)]


def test_report_to_a_slow_or_missing_parent_process_never_waits():
    ours, theirs = child_sockets()
    with ours, theirs:
        parent = ParentProcess(theirs)
        for number in range(10_000):
            parent.report(LoadProgress(f"fetching {number}", 0, 1))
        assert b"fetching 0" in ours.recv(1000)
    ParentProcess(None).report(LoadProgress("loading", 0, 1))
