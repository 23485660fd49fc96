"""Runs trioserve under Ray Serve. Each replica is a process with an engine and the routes of `trioserve serve`.

This module configures Ray Serve: how many requests a replica accepts, how long it may drain, and when it is unhealthy.
Ray places replicas, restarts them and distributes requests. The replica itself owns and releases all resources of a
request, as in any other ASGI host. docs/guides/ray.md has examples. The module needs the extra `ray`.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from typing import Any

import msgspec
from ray import serve

from trioserve.api.error_responses import coded_response
from trioserve.asgi import API_OPTIONS, ENGINE_OPTIONS, AsgiApplication, asgi_app
from trioserve.asyncio.engine import Engine
from trioserve.config import Config, config_from, make_config
from trioserve.contracts.errors import StartupError
from trioserve.http.asgi.exchange import Receive, Send
from trioserve.model.settings import MAX_NUM_SEQS_CPU, MAX_NUM_SEQS_GPU
from trioserve.options.option import ENVIRONMENT_PREFIX, options_of

__all__ = ["app", "build"]

# Ray Serve replaces a replica after three failed checks in a row. With the default of 10 s, this would take half a
# minute.
HEALTH_PERIOD_SECONDS = 2.0
# A replica accepts more requests than its queue can hold. So it can refuse requests with 429, and answer /load and
# /metrics, when the queue is full.
SPARE_REQUESTS = 32
KILL_SPARE_SECONDS = 5.0  # time after the drain for the running step and for closing the engine
PLACING = ("num_replicas", "num_cpus", "num_gpus")
OPTIONS = API_OPTIONS | ENGINE_OPTIONS | {"model"}


def app(args: Mapping[str, Any] | None = None) -> serve.Application:
    """Create the application for `serve run trioserve.ray:app`. Settings are environment variables, as for `trioserve
    serve`.

    Args:
        args: parameters of `build`, which override environment variables. They come from the command line, such as
            `serve run trioserve.ray:app model=NAME`, or from `args` in a config file of Ray Serve. Texts are parsed as
            in an environment variable.

    Raises:
        StartupError: a setting is out of range, or has no effect because Ray Serve listens instead of trioserve.
    """
    given = dict(args or {})
    placing: dict[str, Any] = {name: _count(name, given.pop(name)) for name in PLACING if name in given}
    texts = {ENVIRONMENT_PREFIX + name.upper(): value for name, value in given.items() if isinstance(value, str)}
    others = {name: value for name, value in given.items() if not isinstance(value, str)}
    environment = {**os.environ, **texts}
    config = config_from(argparse.Namespace(config=None, **others), environment, kind=Config)
    names = [name for name, option in options_of(Config).items() if name in others or option.variable in environment]
    return build(**{name: getattr(config, name) for name in names}, **placing)


def build(
    model: str = "smollm2",
    *,
    num_replicas: int | str | None = None,
    num_cpus: float | None = None,
    num_gpus: float | None = None,
    drain_timeout: float = 30.0,
    deployment_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> serve.Application:
    """Create an application for `ray.serve.run`: replicas with one engine each and all routes of `trioserve serve`.

    If a client disconnects, its request releases all resources. A replica that is removed accepts no new requests,
    waits until its requests have ended, and closes its engine. This function opens no engine. The replicas open their
    engines.

    Args:
        model: model to serve. The node of each replica must be able to find the model.
        num_replicas: number of engines, or "auto" for the autoscaling of Ray Serve. The default is one engine.
        num_cpus: CPUs that Ray reserves for one replica. Without the option `threads`, this is also the number of
            threads of a forward pass. The default of Ray Serve is one CPU.
        num_gpus: GPUs that Ray reserves for one replica. The default of Ray Serve is no GPU.
        drain_timeout: longest time in seconds for the requests of a removed replica to end. Then they are aborted.
        deployment_options: further options of `ray.serve.deployment`, such as autoscaling_config. They override the
            settings of this function.
        options: options of trioserve.open_engine and of trioserve.asgi_app.

    Raises:
        StartupError: an option is unknown, is out of range, has no effect under Ray Serve (such as `port`), or cannot
            be used with several replicas.
    """
    deployed = dict(deployment_options or {})
    config = make_config(model=model, drain_timeout=drain_timeout, **options)
    if strangers := sorted(options.keys() - OPTIONS):
        raise StartupError(
            f"{', '.join(strangers)}: Ray Serve listens, logs and routes, so this has no effect here; leave it out"
        )
    replicas = deployed.get("num_replicas", num_replicas)
    if config.data_dir is not None and (replicas not in (None, 1) or "autoscaling_config" in deployed):
        raise StartupError("data_dir belongs to one engine: leave it out, or use one replica")
    if num_cpus is not None and num_cpus >= 1:
        options.setdefault("threads", int(num_cpus))

    def make_app() -> ReplicaApp:
        return ReplicaApp(asgi_app(model, **options))

    make_app()  # This call reports wrong options to the caller. Otherwise, only the log of a replica would show them.
    seats = config.max_num_seqs or (MAX_NUM_SEQS_GPU if num_gpus else MAX_NUM_SEQS_CPU)
    resources = {"num_cpus": num_cpus, "num_gpus": num_gpus}
    settings = {
        "name": "trioserve",
        "num_replicas": replicas,
        "max_ongoing_requests": seats + config.max_queued_requests + SPARE_REQUESTS,
        "max_queued_requests": max(1, config.max_queued_requests),
        "health_check_period_s": HEALTH_PERIOD_SECONDS,
        "graceful_shutdown_wait_loop_s": 0.5,
        "graceful_shutdown_timeout_s": drain_timeout + KILL_SPARE_SECONDS,
        "ray_actor_options": {name: amount for name, amount in resources.items() if amount is not None},
        **deployed,
    }
    settings = {name: value for name, value in settings.items() if value is not None}
    return serve.deployment(serve.ingress(make_app)(_Replica), **settings).bind()


class ReplicaApp:
    """The ASGI application of one replica. It keeps the error of its engine, because Ray Serve does not report it.

    Args:
        llm: the application of the engine.

    Attributes:
        failure: error that prevented the engine from opening, or that ended the engine. None for no error.
    """

    def __init__(self, llm: AsgiApplication) -> None:
        self._llm = llm
        self.failure: Exception | None = None

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif self.failure is not None:
            await self._refuse(send)
        else:
            await self._llm(scope, receive, send)

    def check(self) -> None:
        """Raise RuntimeError if the engine has ended, or hangs in a step."""
        if self.failure is not None:
            raise RuntimeError(f"{type(self.failure).__name__}: {self.failure}")
        engine = self._llm.engine
        assert isinstance(engine, Engine), "Serve runs asyncio"
        watch = engine.on_trio.step_watch
        overdue = engine.thread.call(lambda: watch.overdue() if watch.hangs() else None)
        if overdue is not None:
            raise RuntimeError(overdue)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        has_begun = False
        try:
            async with self._llm.lifespan():
                has_begun = True
                await send({"type": "lifespan.startup.complete"})
                await receive()
        except Exception as error:
            self.failure = error
            if not has_begun:
                # Ray Serve checks the replica's health before it sends requests. That check then raises this error.
                await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})

    async def _refuse(self, send: Send) -> None:
        error = coded_response("engine_reopening", "the engine has ended, and its replica is being replaced")
        body = msgspec.json.encode(error.body())
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": error.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class _Replica:
    """The class that Ray Serve instantiates in a replica. `serve.ingress` sets `app`."""

    app: ReplicaApp

    async def check_health(self) -> None:
        """Raise an error if the replica is unhealthy. Ray Serve replaces a replica after three failures in a row."""
        self.app.check()


def _count(name: str, value: object) -> object:
    """Convert a text of the command line to a number. Other values stay unchanged."""
    if not isinstance(value, str) or value == "auto":
        return value
    try:
        return json.loads(value)
    except ValueError:
        raise StartupError(f"{name} is {value!r}, allowed is a number") from None
