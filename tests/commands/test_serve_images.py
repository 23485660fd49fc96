"""Tests of the command `serve` with an image model: its accepted options and its drain."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import trio

from trioserve.commands.option_groups import GROUPS
from trioserve.commands.serve_images import NO_USE, REFUSED, check_options, serve_images
from trioserve.config import Config, make_config
from trioserve.contracts.errors import EngineFault, StartupError
from trioserve.testing.fake_image_engine import FakeImageEngine, open_fake_image_engine
from trioserve.trio_tools.errors_unwrapped import errors_unwrapped

PATH = "/v1/images/generations"
CAT = {"prompt": "a cat", "steps": 3}
SECONDS_MAX = 60


def test_every_option_is_used_refused_or_ignored_explicitly_with_an_image_model() -> None:
    of_every_server = {*GROUPS["server"], *GROUPS["keys and TLS"], *GROUPS["queue and deadlines"]}
    taken = {"model", "dtype", "device", "threads", "max_num_seqs", *GROUPS["pictures"], *GROUPS["faults"]}
    taken.add("image_decode_timeout")
    taken |= set(GROUPS["several models"])  # With these options, the image model has a process without them.
    others = {"log_format", "access_log", "otlp_endpoint", "trace_sample"}
    known = {name for names in GROUPS.values() for name in names}
    assert known - of_every_server - taken - set(REFUSED) - set(NO_USE) - others == set()
    assert taken.isdisjoint({*REFUSED, *NO_USE})


@pytest.mark.parametrize(
    "options",
    [{"tensor_parallel_size": 2}, {"endpoint": ("http://a:1",)}, {"quantization": "int8"}, {"batch_invariant": True}],
    ids=lambda options: next(iter(options)),
)
def test_options_that_image_models_cannot_fulfil_are_refused(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(StartupError, match="generates images") as refused:
        check_options(make_config(model="dit", **options))
    assert "--" + name.replace("_", "-") in str(refused.value)


def test_options_of_language_models_are_logged_and_ignored(caplog: pytest.LogCaptureFixture) -> None:
    check_options(make_config(model="dit", block_size=32, chat_template="x", port=1, api_key=("k",), max_images=2))
    [record] = caplog.records
    assert record.getMessage().endswith("options=block_size,chat_template")


class Served:
    """A server with a fake engine.

    Attributes:
        engine: set once the server accepts requests.
    """

    engine: FakeImageEngine

    def __init__(self) -> None:
        self.config = make_config(model="dit", port=0, api_key=("k",))
        self.order, self._orders = trio.open_memory_channel[object](1)
        self._urls: list[str] = []
        self._is_serving = trio.Event()

    async def run(self) -> None:
        await serve_images(self.config, self._orders, on_serving=self._announce, open_engine=self._open_engine)

    @asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        """Return a client once the server accepts requests."""
        with trio.fail_after(SECONDS_MAX):
            await self._is_serving.wait()
        headers = {"x-api-key": "k"}
        async with httpx.AsyncClient(base_url=self._urls[0], headers=headers, timeout=SECONDS_MAX) as client:
            yield client

    def _announce(self, urls: list[str]) -> None:
        self._urls = urls
        self._is_serving.set()

    @asynccontextmanager
    async def _open_engine(self, config: Config, *, on_progress: Any) -> AsyncIterator[FakeImageEngine]:
        async with open_fake_image_engine(paused=True) as self.engine:
            yield self.engine


async def until(condition: Callable[[], object]) -> None:
    with trio.fail_after(SECONDS_MAX):
        while not condition():
            await trio.lowlevel.checkpoint()


async def test_server_of_an_image_model_accepts_requests_and_drains() -> None:
    served = Served()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(served.run)
        async with served.client() as client:
            assert (await client.get("/v1/models")).json()["data"][0]["id"] == "fake"
            responses: list[httpx.Response] = []

            async def ask() -> None:
                responses.append(await client.post(PATH, json=CAT))

            async with trio.open_nursery() as asking:
                asking.start_soon(ask)
                await until(lambda: served.engine.stats().waiting_count)
                served.order.send_nowait("stop")
            assert responses[0].status_code == 503, "the request had not begun to run"
    served.engine.assert_all_free()


async def test_engine_fault_is_reported_to_clients_and_ends_the_server() -> None:
    served = Served()
    said: list[str] = []

    async def ask() -> None:
        async with served.client() as client, client.stream("POST", PATH, json={**CAT, "stream": True}) as response:
            said.extend([line async for line in response.aiter_lines()])

    with pytest.raises(EngineFault), errors_unwrapped():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(served.run)
            nursery.start_soon(ask)
            async with served.client():
                await until(lambda: served.engine.stats().waiting_count)
                await served.engine.step()
                await until(lambda: served.engine.stats().running_count)
                served.engine.break_next_step()
                served.engine.resume()
                await trio.sleep_forever()
    assert "engine_fault" in "".join(said)
