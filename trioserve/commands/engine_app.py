"""Creates the HTTP app of an engine from the options, for the native front end and for other hosts such as ASGI."""

from __future__ import annotations

import msgspec

from trioserve.api.caller import AccessRules
from trioserve.api.page.page import PageSettings
from trioserve.api.routes import App
from trioserve.commands.serving import access_rules, page_settings
from trioserve.config import Config
from trioserve.contracts.tracing import NO_TRACER, Tracer
from trioserve.engine.engine import Engine
from trioserve.store.store import Store

__all__ = ["engine_app"]


def engine_app(
    engine: Engine,
    config: Config,
    store: Store | None,
    *,
    tracer: Tracer = NO_TRACER,
    is_behind_router: bool = False,
    is_mounted: bool = False,
) -> App:
    """Create the HTTP app of an engine.

    Args:
        engine: open engine.
        config: options of the server.
        store: keeps responses, files and batches. None keeps nothing after a request.
        tracer: records spans of requests.
        is_behind_router: True if a router in this process checks API keys, shows the page and logs requests.
        is_mounted: True if another program listens for the app. Other machines may reach the app, because the address
            is unknown.
    """
    return App(
        engine,
        api_keys=() if is_behind_router else config.api_key,
        admin_api_key=None if is_behind_router else config.admin_api_key,
        access=None if is_behind_router else _access_rules(config, is_mounted=is_mounted),
        trust_request_chat_template=config.trust_request_chat_template,
        tenant_header=config.tenant_header,
        store=store,
        background=config.background_settings(),
        connections=config.connection_settings(),
        batches=config.batch_settings(),
        detaching=config.detach_settings(),
        router_grace=config.router_grace_settings(),
        page=PageSettings(is_shown=False) if is_behind_router else page_settings(config),
        tracer=tracer,
        logs_requests=config.access_log and not is_behind_router,
    )


def _access_rules(config: Config, *, is_mounted: bool) -> AccessRules:
    rules = msgspec.structs.replace(access_rules(config), loads_adapters=config.allow_runtime_lora_updating)
    if is_mounted:
        rules = msgspec.structs.replace(rules, operates_without_key=config.allow_operator_without_key)
    return rules
