"""`serve` of a model that makes pictures: which options it takes, and that it drains as every server does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import trio

from trioserve.commands.option_groups import GROUPS
from trioserve.commands.serve_images import NO_USE, REFUSED, check_options, serve_images
from trioserve.config import Config, make_config
from trioserve.contracts.errors import StartupError
from trioserve.testing.fake_image_engine import FakeImageEngine, open_fake_image_engine

CAT = {"prompt": "a cat", "steps": 3}


def test_every_option_has_a_meaning_here_or_is_named() -> None:
    of_every_server = {*GROUPS["server"], *GROUPS["keys and TLS"], *GROUPS["queue and deadlines"]}
    taken = {"model", "dtype", "device", "threads", "max_num_seqs", *GROUPS["pictures"], *GROUPS["faults"]}
    others = {"log_format", "access_log", "otlp_endpoint", "trace_sample"}
    known = {name for names in GROUPS.values() for name in names}
    assert known - of_every_server - taken - set(REFUSED) - set(NO_USE) - others == set()
    assert taken.isdisjoint({*REFUSED, *NO_USE})


@pytest.mark.parametrize(
    "options",
    [{"tensor_parallel_size": 2}, {"endpoint": ("http://a:1",)}, {"quantization": "int8"}, {"batch_invariant": True}],
    ids=lambda options: next(iter(options)),
)
def test_what_pictures_cannot_do_is_refused_by_its_flag(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(StartupError, match="makes pictures") as refused:
        check_options(make_config(model="dit", **options))
    assert "--" + name.replace("_", "-") in str(refused.value)


def test_what_is_of_texts_alone_is_told_and_ignored(caplog: pytest.LogCaptureFixture) -> None:
    check_options(make_config(model="dit", block_size=32, chat_template="x", port=1, api_key=("k",), max_images=2))
    [record] = caplog.records
    assert record.getMessage().endswith("options=block_size,chat_template")


async def test_it_serves_and_drains() -> None:
    opened: list[FakeImageEngine] = []

    @asynccontextmanager
    async def open_engine(config: Config, *, on_progress: Any) -> AsyncIterator[FakeImageEngine]:
        async with open_fake_image_engine(paused=True) as engine:
            opened.append(engine)
            yield engine

    config = make_config(model="dit", port=0, api_key=("k",))
    order, orders = trio.open_memory_channel[object](1)
    urls: list[str] = []
    is_serving = trio.Event()

    def announce(served: list[str]) -> None:
        urls.extend(served)
        is_serving.set()

    async with trio.open_nursery() as nursery:

        async def serve() -> None:
            await serve_images(config, orders, on_serving=announce, open_engine=open_engine)

        nursery.start_soon(serve)
        await is_serving.wait()
        [engine] = opened
        async with httpx.AsyncClient(base_url=urls[0], headers={"x-api-key": "k"}, timeout=60) as client:
            assert (await client.get("/v1/models")).json()["data"][0]["id"] == "fake"
            responses: list[httpx.Response] = []

            async def ask() -> None:
                responses.append(await client.post("/v1/images/generations", json=CAT))

            async with trio.open_nursery() as asking:
                asking.start_soon(ask)
                with trio.fail_after(60):
                    while not engine.stats().waiting_count:
                        await trio.lowlevel.checkpoint()
                    order.send_nowait("stop")
                    while not engine.draining:
                        await trio.lowlevel.checkpoint()
                # It has not begun to run, so it is refused.
            assert responses[0].status_code == 503
    engine.assert_all_free()
