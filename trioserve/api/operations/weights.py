"""SGLang's /update_weights_from_disk and its like: other weights for a running engine, and which ones it has.

They are the admin's: whoever may replace the weights decides what everybody is told.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from trioserve.api.caller import check_is_admin
from trioserve.api.openai.request_types import InFlight, SharedWeightsBody, WeightsOnDiskBody
from trioserve.contracts.errors import InvalidRequest, WeightsLost
from trioserve.contracts.weights import SharedWeights, WeightSource

if TYPE_CHECKING:
    from trioserve.api.request_context import RequestContext

__all__ = ["read_weight_version", "update_weights_from_disk", "update_weights_from_shared_memory"]

logger = logging.getLogger(__name__)


async def update_weights_from_disk(context: RequestContext) -> None:
    """Responds when steps are computed with the new ones."""
    _check_may(context)
    body = await context.body(WeightsOnDiskBody)
    if body.load_format not in (None, "auto", "safetensors"):
        raise InvalidRequest(
            f"load_format is {body.load_format}, and weights are read as the model was: leave it out",
            param="load_format",
        )
    if body.is_async:
        raise InvalidRequest("the response comes when the weights are there: leave is_async out", param="is_async")
    await _update(context, body.model_path, body)


async def update_weights_from_shared_memory(context: RequestContext) -> None:
    """The same from a segment of shared memory, by its name."""
    _check_may(context)
    body = await context.body(SharedWeightsBody)
    await _update(context, SharedWeights(body.name), body)


async def read_weight_version(context: RequestContext) -> None:
    await context.respond_json({"weight_version": context.engine.weight_version})


async def _update(context: RequestContext, source: WeightSource, body: WeightsOnDiskBody | SharedWeightsBody) -> None:
    in_flight: InFlight = body.in_flight or ("abort" if body.abort_all_requests else "keep")
    if body.abort_all_requests and in_flight != "abort":
        raise InvalidRequest(
            f"abort_all_requests is true, and in_flight is {in_flight}: send one of them", param="in_flight"
        )
    try:
        version = await context.engine.update_weights(source, version=body.weight_version, in_flight=in_flight)
    except InvalidRequest as refusal:
        await context.respond_json({"success": False, "message": str(refusal)}, status=400)
        return
    except WeightsLost as error:
        await context.respond_json({"success": False, "message": str(error)}, status=500)
        return
    if body.flush_cache:  # nobody would find it any more, and its blocks are the first to be of use
        context.engine.reset_prefix_cache()
    message = f"The weights were replaced: their version is {version}."
    await context.respond_json({"success": True, "message": message, "weight_version": version})


def _check_may(context: RequestContext) -> None:
    check_is_admin(context.caller, "weights are replaced with the admin's API key: see --admin-api-key")
