"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter: LoRA adapters come and go while the server runs, as in vLLM.

Both are the admin's, and there only where the operator says so: whoever may load names a directory of the server's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trioserve.api.caller import check_is_admin
from trioserve.api.error_responses import refusal
from trioserve.api.openai.request_types import LoadAdapterBody, UnloadAdapterBody
from trioserve.contracts.errors import AdapterRefused, ModelLoadError

if TYPE_CHECKING:
    from trioserve.api.request_context import RequestContext

__all__ = ["load_adapter", "unload_adapter"]


async def load_adapter(context: RequestContext) -> None:
    """Responds when requests may use it."""
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
    """Responds when nobody uses it any more, and its memory is free."""
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
            "this server loads no lora adapters while it runs: start it with --enable-lora and "
            "--allow-runtime-lora-updating",
        )
    check_is_admin(context.caller, "lora adapters are loaded with the admin's API key: see --admin-api-key")


async def _respond(context: RequestContext, sentence: str) -> None:
    await context.respond_bytes(sentence.encode(), "text/plain; charset=utf-8")
