"""`python -m trioserve serve` for a model that generates images: runs an engine and an HTTP front end."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, closing
from typing import Protocol

import trio

from trioserve.admission.file_decoders import ImageDecoder
from trioserve.api.images.image_routes import ImageApp
from trioserve.assemble_images import open_configured_image_engine
from trioserve.assemble_model import LoadReport
from trioserve.commands.log_lines import show_dropped_lines
from trioserve.commands.option_groups import GROUPS
from trioserve.commands.serving import (
    access_rules,
    around_app,
    check_front,
    check_front_end,
    chosen_front_end,
    frontend_limits,
    open_places,
    open_tracing,
    page_settings,
    server_tls,
)
from trioserve.commands.terminal import LoadingBar
from trioserve.config import Config
from trioserve.contracts.errors import StartupError
from trioserve.contracts.media import ImageLimits
from trioserve.engine.image_engine import ImageEngine
from trioserve.options.option import options_of
from trioserve.trio_tools.errors_unwrapped import errors_unwrapped
from trioserve.trio_tools.service import Service

__all__ = ["serve_images"]

logger = logging.getLogger(__name__)

REFUSED = (
    *GROUPS["ranks"],
    *GROUPS["routing"],
    *GROUPS["KV between engines"],
    "quantization",
    "speculative_ngram",
    "speculative_model",
    "speculative_config",
    "enable_lora",
    "lora_modules",
    "batch_invariant",
)
"""Options that an image model cannot fulfil. They are errors, because users would miss their effect."""
NO_USE = (
    *(set(GROUPS["model"]) - {"model", "dtype", "image_decode_timeout"}),
    *(set(GROUPS["computing"]) - {"device", "threads"}),
    *(set(GROUPS["memory and batches"]) - {"max_num_seqs"}),
    *GROUPS["adapters"],
    *GROUPS["what outlives a request"],
    "share_prefix_cache",
    "trust_request_chat_template",
    "max_queued_tokens",
    "profile",
)
"""Options of language models that have no effect here.

They are only logged, because several servers may share one configuration file or environment.
"""


class OpenImageEngine(Protocol):
    """Type of functions that open the engine. They have the signature of `open_configured_image_engine`."""

    def __call__(self, config: Config, *, on_progress: LoadReport) -> AbstractAsyncContextManager[ImageEngine]: ...


async def serve_images(
    config: Config,
    orders: trio.MemoryReceiveChannel[object],
    *,
    on_serving: Callable[[list[str]], None] = lambda urls: None,
    on_progress: LoadReport = lambda progress: None,
    open_engine: OpenImageEngine = open_configured_image_engine,
) -> None:
    """Run the whole server in the caller's scope, until `orders` yields an item and the server has drained.

    Installs no signal handlers. If this function is cancelled, the server ends at once.

    Args:
        config: options of the server.
        orders: stops the server. See `Service.run` for its items.
        on_serving: receives the URLs once the server accepts requests.
        on_progress: receives the progress of loading.
        open_engine: opens the engine. Tests pass another function.

    Raises:
        StartupError: an option is wrong, or the model or the address cannot be used.
    """
    check_front(config)
    check_front_end(config)
    check_options(config)
    limits = frontend_limits(config)
    ssl_context = server_tls(config)
    async with open_places(config, limits) as (listeners, urls), AsyncExitStack() as scopes:
        tracing = await scopes.enter_async_context(open_tracing(config))
        with closing(LoadingBar(config.model, on_progress)) as bar:
            engine = await scopes.enter_async_context(open_engine(config, on_progress=bar.progress))
        # An uploaded image may be as large as a generated image.
        uploads = ImageLimits(pixels_max=engine.limits.pixels_max, decode_seconds_max=config.image_decode_timeout)
        app = ImageApp(
            engine,
            scopes.enter_context(closing(ImageDecoder(uploads, engine.metrics))),
            api_keys=config.api_key,
            admin_api_key=config.admin_api_key,
            access=access_rules(config),
            tenant_header=config.tenant_header,
            page=page_settings(config),
            tracer=tracing.tracer,
            logs_requests=config.access_log,
        )
        tracing.show(engine.metrics)
        show_dropped_lines(engine.metrics)
        handler = around_app(app, config)
        front_end = chosen_front_end(app, handler, listeners, config, ssl_context, engine.metrics)
        service = Service(engine, front_end, config.stopping_settings(), wait_for_rest=engine.wait_until_idle)
        engine.on_fault = service.pass_on_fault
        with errors_unwrapped():
            async with trio.open_nursery() as nursery:
                await nursery.start(service.run, orders)
                on_serving(urls)


def check_options(config: Config) -> None:
    """Refuse options that an image model cannot fulfil, and log options without effect.

    Args:
        config: options of the server.

    Raises:
        StartupError: some options are refused. The message names them.
    """
    given = {name for name, option in options_of(Config).items() if getattr(config, name) != option.default}
    refused = sorted(given.intersection(REFUSED))
    if refused:
        raise StartupError(
            f"{config.model} generates images, and image models do not support {_flags(refused)}: remove "
            f"{'it' if len(refused) == 1 else 'them'}"
        )
    unused = sorted(given.intersection(NO_USE))
    if unused:
        logger.warning("options without effect for an image model options=%s", ",".join(unused))


def _flags(names: list[str]) -> str:
    return ", ".join("--" + name.replace("_", "-") for name in names)
