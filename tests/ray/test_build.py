"""Tests deployments for Ray Serve and the reports of a replica about its engine, without a cluster."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import threading
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from trioserve.asgi import AsgiApplication, asgi_app
from trioserve.contracts.errors import StartupError
from trioserve.testing.fake_engine import open_fake_engine

from .conftest import why_skipped

if why_skipped() is None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray Serve itself uses deprecated features.
        from trioserve.ray import ReplicaApp, app, build


def deployment(application: Any) -> Any:
    return application._bound_deployment


@asynccontextmanager
async def lifespan(replica: ReplicaApp) -> AsyncIterator[None]:
    """Run the lifespan of a replica in the same way as Ray Serve."""
    received: asyncio.Queue[dict[str, str]] = asyncio.Queue()
    sent: asyncio.Queue[dict[str, str]] = asyncio.Queue()
    task = asyncio.create_task(replica({"type": "lifespan"}, received.get, sent.put))
    received.put_nowait({"type": "lifespan.startup"})
    assert await sent.get() == {"type": "lifespan.startup.complete"}
    yield
    received.put_nowait({"type": "lifespan.shutdown"})
    assert await sent.get() == {"type": "lifespan.shutdown.complete"}
    await task


async def get(replica: ReplicaApp, path: str) -> tuple[int, Any]:
    sent: list[dict[str, Any]] = []
    is_over = asyncio.Event()

    async def receive() -> dict[str, Any]:
        if not sent:
            return {"type": "http.request", "body": b"", "more_body": False}
        await is_over.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "http_version": "1.1", "method": "GET", "path": path, "raw_path": path.encode()}
    scope |= {"scheme": "http", "query_string": b"", "headers": [], "asgi": {"version": "3.0"}, "root_path": ""}
    await replica(scope, receive, send)
    is_over.set()
    return sent[0]["status"], json.loads(b"".join(message.get("body", b"") for message in sent[1:]))


def test_replica_accepts_more_requests_than_its_engine_so_that_the_engine_can_refuse():
    made = deployment(build("smollm2", num_replicas=3, num_gpus=1, max_num_seqs=4, max_queued_requests=6))
    assert made.num_replicas == 3
    assert made.max_ongoing_requests > 10
    assert made.max_queued_requests == 6
    assert made.ray_actor_options["num_gpus"] == 1


def test_shutdown_timeout_of_a_replica_exceeds_the_drain_timeout():
    assert deployment(build(drain_timeout=12.0))._deployment_config.graceful_shutdown_timeout_s > 12


def test_deployment_options_override_derived_options():
    made = deployment(build(deployment_options={"name": "other", "max_ongoing_requests": 7}))
    assert (made.name, made.max_ongoing_requests) == ("other", 7)


def test_arguments_of_a_ray_app_override_settings_from_the_environment(monkeypatch):
    monkeypatch.setenv("TRIOSERVE_MAX_NUM_SEQS", "5")
    monkeypatch.setenv("TRIOSERVE_MAX_QUEUED_REQUESTS", "7")
    made = deployment(app({"max_queued_requests": "9", "num_replicas": "2", "api_key": "a,b"}))
    assert made.max_queued_requests == 9
    assert made.num_replicas == 2
    assert made.max_ongoing_requests == deployment(build(max_num_seqs=5, max_queued_requests=9)).max_ongoing_requests


def test_misspelt_option_of_a_deployment_is_refused_with_a_suggestion():
    with pytest.raises(StartupError, match="did you mean max_num_seqs"):
        build(max_num_seq=3)


@pytest.mark.parametrize(
    ("args", "expect"),
    [
        ({"port": "8000"}, "port: Ray Serve listens"),
        ({"max_num_seqs": "many"}, "TRIOSERVE_MAX_NUM_SEQS is 'many'"),
        ({"max_num_seqs": 0}, "0, allowed is a whole number"),
        ({"num_replicas": "two"}, "num_replicas is 'two', allowed is a number"),
        ({"modle": "smollm2"}, "did you mean TRIOSERVE_MODEL"),
        ({"data_dir": "/tmp", "num_replicas": 2}, "data_dir belongs to one engine"),
    ],
)
def test_invalid_argument_of_a_ray_app_is_refused_before_deployment(args, expect):
    with pytest.raises(StartupError, match=expect):
        app(args)


def check_no_thread_is_left(before: set[threading.Thread]) -> None:
    assert not set(threading.enumerate()) - before


def test_a_replica_opens_and_closes_its_engine():
    before = set(threading.enumerate())

    async def program() -> None:
        replica = ReplicaApp(asgi_app(open_fake_engine))
        async with lifespan(replica):
            replica.check()
            assert (await get(replica, "/health"))[0] == 200

    asyncio.run(program())
    check_no_thread_is_left(before)


def test_failed_engine_fails_the_health_check_and_refuses_requests_with_503():
    before = set(threading.enumerate())

    async def program() -> None:
        llm: AsgiApplication = asgi_app(functools.partial(open_fake_engine, paused=True))
        replica = ReplicaApp(llm)
        async with lifespan(replica):
            engine: Any = llm.engine
            engine.thread.call(engine.on_trio.break_next_step)
            engine.thread.call(engine.on_trio.resume)
            async with engine.generate([1, 2, 3]) as stream:
                with contextlib.suppress(Exception):
                    async for _delta in stream:
                        pass
            while replica.failure is None:  # noqa: ASYNC110
                await asyncio.sleep(0)
            with pytest.raises(RuntimeError, match=r"EngineFault: .*a test broke the engine"):
                replica.check()
            status, body = await get(replica, "/v1/models")
            assert (status, body["error"]["code"]) == (503, "engine_reopening")

    asyncio.run(program())
    check_no_thread_is_left(before)


def test_health_check_reports_why_the_engine_cannot_be_opened():
    async def program() -> None:
        replica = ReplicaApp(asgi_app("/no/such/model"))
        async with lifespan(replica):
            with pytest.raises(RuntimeError, match="ModelLoadError: the model '/no/such/model' is not found"):
                replica.check()

    asyncio.run(program())
