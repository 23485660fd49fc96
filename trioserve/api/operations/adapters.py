"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as in vLLM: change the LoRA adapters of a running server.

Both need the admin's key, and an option of the operator, since the caller names a directory of the server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trioserve.api.caller import check_is_admin
from trioserve.api.error_responses import refusal
from trioserve.api.openai.request_types import LoadAdapterBody, UnloadAdapterBody
from trioserve.api.route_table import READS_BODY, Operation
from trioserve.contracts.errors import AdapterRefused, ModelLoadError

if TYPE_CHECKING:
    from trioserve.api.request_context import RequestContext

__all__ = ["OPERATIONS", "load_adapter", "unload_adapter"]


async def load_adapter(context: RequestContext) -> None:
    """Load an adapter. Responds when requests may use it.

    Args:
        context: the request.
    """
    _check_may(context)
    body = await context.body(LoadAdapterBody)
    if not body.lora_name or not body.lora_path:
        raise AdapterRefused("Both 'lora_name' and 'lora_path' must be provided.", reason="missing", param=None)
    try:
        await context.engine.adapters.load(body.lora_name, body.lora_path, replaces=body.load_inplace)
    except ModelLoadError as error:
        raise AdapterRefused(str(error), reason="not_loaded", param="lora_path") from None
    await _respond(context, f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def unload_adapter(context: RequestContext) -> None:
    """Unload an adapter. Responds when no request uses it any more, and its memory is free.

    Args:
        context: the request.
    """
    _check_may(context)
    body = await context.body(UnloadAdapterBody)
    if not body.lora_name:
        raise AdapterRefused("'lora_name' needs to be provided to unload a LoRA adapter.", reason="missing", param=None)
    await context.engine.unload_adapter(body.lora_name, seconds=body.timeout)
    await _respond(context, f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _check_may(context: RequestContext) -> None:
    if not (context.rules.loads_adapters and context.engine.adapters.is_enabled):
        raise refusal(
            "adapters_fixed",
            "this server cannot load lora adapters while it runs: start it with --enable-lora and "
            "--allow-runtime-lora-updating",
        )
    check_is_admin(context.caller, "loading lora adapters needs the admin's API key: see --admin-api-key")


async def _respond(context: RequestContext, sentence: str) -> None:
    await context.respond_bytes(sentence.encode(), "text/plain; charset=utf-8")


OPERATIONS: tuple[Operation[RequestContext], ...] = (
    Operation(
        method="POST",
        path="/v1/load_lora_adapter",
        handler=load_adapter,
        summary="Load a LoRA adapter",
        is_operators=True,
        description="Needs the admin's key, and a server with --allow-runtime-lora-updating.",
        body=LoadAdapterBody,
        response="text/plain",
        errors=(*READS_BODY, 403, 404),
    ),
    Operation(
        method="POST",
        path="/v1/unload_lora_adapter",
        handler=unload_adapter,
        summary="Unload a LoRA adapter",
        is_operators=True,
        description="New requests cannot use it. The response is sent when no request uses it any more.",
        body=UnloadAdapterBody,
        response="text/plain",
        errors=(*READS_BODY, 403, 404),
    ),
)
