"""trioserve under Ray Serve: a replica is a process with an engine, behind the routes of `trioserve serve`.

Settled here is what Ray Serve is told: how many requests a replica takes, how long it may drain, when it is broken. Ray
places replicas, restarts them and spreads requests. What a request holds, and when that is given back, is settled in
the replica, as in any other ASGI host. docs/ray.md shows it at work. Needs the extra `ray`.
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
from trioserve.config import ENVIRONMENT_PREFIX, Config, config_from, make_config
from trioserve.contracts.errors import StartupError
from trioserve.http.asgi.exchange import Receive, Send

__all__ = ["app", "build"]

HEALTH_PERIOD_SECONDS = 2.0  # Serve believes the third failure in a row; with its own 10 s after half a minute
SPARE_REQUESTS = 32  # of a replica with a full queue: those that are refused with 429, and looks at /load and /metrics
KILL_SPARE_SECONDS = 5.0  # behind the drain: for the step in flight, and for closing the engine
PLACING = ("num_replicas", "num_cpus", "num_gpus")
OPTIONS = API_OPTIONS | ENGINE_OPTIONS | {"model"}


def app(args: Mapping[str, Any] | None = None) -> serve.Application:
    """What `serve run trioserve.ray:app` runs; settings are environment variables, as of `trioserve serve`.

    Args:
        args: parameters of `build`, which go before the environment: `serve run trioserve.ray:app model=NAME`, or
            `args` in a config file of Serve. Texts are read as in an environment variable.

    Raises:
        StartupError: a setting is out of range, or nobody would heed it: Ray Serve listens, and not trioserve.
    """
    given = dict(args or {})
    placing: dict[str, Any] = {name: _count(name, given.pop(name)) for name in PLACING if name in given}
    texts = {_variable(name): value for name, value in given.items() if isinstance(value, str)}
    others = {name: value for name, value in given.items() if not isinstance(value, str)}
    environment = {**os.environ, **texts}
    config = config_from(argparse.Namespace(config=None, **others), environment, kind=Config)
    names = [
        field.name
        for field in msgspec.structs.fields(Config)
        if field.name in others or _variable(field.name) in environment
    ]
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
    """An application for `ray.serve.run`: replicas that each have an engine, behind all routes of `trioserve serve`.

    A client that leaves gives back what its request held. A replica that is to go takes nothing new, lets its requests
    end, and closes its engine. Nothing is opened here: that is done in the replicas.

    Args:
        model: what to serve, as each replica's node finds it.
        num_replicas: how many engines; "auto" for Serve's own scaling. Default: one.
        num_cpus, num_gpus: of one replica, by which Ray places it. With num_cpus and no `threads`, a forward pass has
            so many threads. Default: Serve's, one CPU and no GPU.
        drain_timeout: seconds that the requests of a replica that is to go may take to their end; then they break off.
        deployment_options: what else `ray.serve.deployment` takes, such as autoscaling_config; goes before what is
            chosen here.
        options: those of trioserve.open_engine, and those of trioserve.asgi_app.

    Raises:
        StartupError: there is no such option, it is out of range, it is of no use here, as `port`, or it does not fit
            several replicas.
    """
    deployed = dict(deployment_options or {})
    config = make_config(model=model, drain_timeout=drain_timeout, **options)
    if strangers := sorted(options.keys() - OPTIONS):
        raise StartupError(
            f"{', '.join(strangers)}: Ray Serve listens, logs and routes, so that is of no use here; leave it out"
        )
    replicas = deployed.get("num_replicas", num_replicas)
    if config.data_dir is not None and (replicas not in (None, 1) or "autoscaling_config" in deployed):
        raise StartupError("data_dir belongs to one engine: leave it out, or have one replica")
    if num_cpus is not None and num_cpus >= 1:
        options.setdefault("threads", int(num_cpus))

    def make_app() -> ReplicaApp:
        return ReplicaApp(asgi_app(model, **options))

    make_app()  # what is wrong with the options is said here, and not in the log of a replica
    resources = {"num_cpus": num_cpus, "num_gpus": num_gpus}
    settings = {
        "name": "trioserve",
        "num_replicas": replicas,
        "max_ongoing_requests": config.max_num_seqs + config.max_queued_requests + SPARE_REQUESTS,
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
    """The ASGI application of one replica. Why its engine could not be opened, or is over, is kept in `failure`: Serve
    itself would only say that the lifespan failed."""

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
        """Raises RuntimeError if the engine is over, or hangs in a step."""
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
                # Serve asks for the replica's health before it takes a request, and so gets to know it with the reason.
                await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})

    async def _refuse(self, send: Send) -> None:
        error = coded_response("engine_reopening", "the engine is over, its replica is being replaced")
        body = json.dumps(error.body()).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": error.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class _Replica:
    """What Serve calls. It gets `app` from serve.ingress."""

    app: ReplicaApp

    async def check_health(self) -> None:
        """Serve replaces the replica after the third failure in a row."""
        self.app.check()


def _variable(name: str) -> str:
    return ENVIRONMENT_PREFIX + name.upper()


def _count(name: str, value: object) -> object:
    """Of a command line, where it is a text."""
    if not isinstance(value, str) or value == "auto":
        return value
    try:
        return json.loads(value)
    except ValueError:
        raise StartupError(f"{name} is {value!r}, allowed is a number") from None
