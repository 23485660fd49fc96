"""Makes the HTTP app of an engine from the options, for the native front end and for other hosts such as ASGI."""

from __future__ import annotations

import msgspec

from trioserve.api.caller import AccessRules
from trioserve.api.limits import BackgroundSettings, BatchSettings, DetachSettings
from trioserve.api.page.settings import PageSettings
from trioserve.api.routes import App
from trioserve.commands.serving import access_rules, page_settings
from trioserve.config import Config
from trioserve.contracts.tracing import NO_TRACER, Tracer
from trioserve.engine.engine import Engine
from trioserve.store.settings import StoreSettings
from trioserve.store.store import Store

__all__ = ["engine_app", "store_settings"]


def engine_app(
    engine: Engine,
    config: Config,
    store: Store | None,
    *,
    tracer: Tracer = NO_TRACER,
    is_behind_router: bool = False,
    is_mounted: bool = False,
) -> App:
    """Make the HTTP app of an engine.

    Args:
        engine: open engine.
        config: options of the server.
        store: keeps responses, files and batches. None keeps nothing after a request.
        tracer: records spans of requests.
        is_behind_router: True if a router in this process checks API keys, shows the page and logs requests.
        is_mounted: True if another program listens. Its address is unknown, so other machines may reach the app.
    """
    return App(
        engine,
        api_keys=() if is_behind_router else config.api_key,
        admin_api_key=None if is_behind_router else config.admin_api_key,
        access=None if is_behind_router else _access_rules(config, is_mounted=is_mounted),
        trust_request_chat_template=config.trust_request_chat_template,
        tenant_header=config.tenant_header,
        store=store,
        background=_background_settings(config),
        batches=_batch_settings(config),
        detaching=_detach_settings(config),
        router_grace=_router_grace(config),
        page=PageSettings(is_shown=False) if is_behind_router else page_settings(config),
        tracer=tracer,
        logs_requests=config.access_log and not is_behind_router,
    )


def _access_rules(config: Config, *, is_mounted: bool) -> AccessRules:
    rules = msgspec.structs.replace(access_rules(config), loads_adapters=config.allow_runtime_lora_updating)
    if is_mounted:
        rules = msgspec.structs.replace(rules, operates_without_key=config.allow_operator_without_key)
    return rules


def store_settings(config: Config) -> StoreSettings:
    return StoreSettings(
        bytes_max=config.store_max_bytes, objects_max=config.store_max_objects, seconds_max=config.store_ttl
    )


def _background_settings(config: Config) -> BackgroundSettings:
    count = config.max_background_responses
    return BackgroundSettings(
        responses_max=count, responses_of_one_max=(count + 1) // 2, seconds_max=config.background_timeout
    )


def _batch_settings(config: Config) -> BatchSettings:
    count = config.max_batches
    return BatchSettings(batches_max=count, batches_of_one_max=(count + 3) // 4, lines_at_once=config.batch_concurrency)


def _router_grace(config: Config) -> DetachSettings:
    count = config.max_router_streams
    return DetachSettings(seconds_max=config.router_grace, streams_max=count, streams_of_one_max=count)


def _detach_settings(config: Config) -> DetachSettings:
    count = config.max_detached_streams
    return DetachSettings(seconds_max=config.detach_timeout_max, streams_max=count, streams_of_one_max=(count + 1) // 2)
