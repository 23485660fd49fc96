"""SGLang's /update_weights_from_disk and its like: other weights for a running engine, and which ones it has.

They are the admin's: whoever may replace the weights decides what everybody is told.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TYPE_CHECKING

from trioserve.api.caller import check_is_admin
from trioserve.api.error_responses import error_response
from trioserve.api.openai.request_types import (
    BroadcastWeightsBody,
    InFlight,
    SharedWeightsBody,
    WeightGroupBody,
    WeightGroupNameBody,
    WeightsBody,
    WeightsOnDiskBody,
)
from trioserve.contracts.errors import InvalidRequest, TrioserveError, WeightsLost
from trioserve.contracts.weights import BroadcastWeights, SharedWeights, WeightGroup, WeightSource

if TYPE_CHECKING:
    from trioserve.api.request_context import RequestContext

__all__ = [
    "destroy_weights_update_group",
    "init_weights_update_group",
    "read_weight_version",
    "read_world_size",
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "update_weights_from_shared_memory",
]


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


async def update_weights_from_distributed(context: RequestContext) -> None:
    """The same from a trainer that sends them in a group which was joined."""
    _check_may(context)
    body = await context.body(BroadcastWeightsBody)
    if body.load_format is not None:
        raise InvalidRequest(
            f"load_format is {body.load_format}, and each tensor is sent for itself: leave it out", param="load_format"
        )
    source = BroadcastWeights(
        names=tuple(body.names),
        dtypes=tuple(body.dtypes),
        shapes=tuple(map(tuple, body.shapes)),
        group_name=body.group_name,
    )
    await _update(context, source, body)


async def init_weights_update_group(context: RequestContext) -> None:
    """Responds when all of the group are there."""
    _check_may(context)
    body = await context.body(WeightGroupBody)
    if body.backend != "gloo":
        raise InvalidRequest(f"backend is {body.backend}, allowed is gloo", param="backend")
    group = WeightGroup(
        master_address=body.master_address,
        master_port=body.master_port,
        rank=body.rank_offset,
        world_size=body.world_size,
        group_name=body.group_name,
        seconds_max=body.seconds_max,
    )
    await _change_group(context, context.engine.init_weights_update_group(group), f"joined {group.group_name}")


async def destroy_weights_update_group(context: RequestContext) -> None:
    _check_may(context)
    name = (await context.body(WeightGroupNameBody)).group_name
    await _change_group(context, context.engine.destroy_weights_update_group(name), f"left {name}")


async def _change_group(context: RequestContext, change: Awaitable[None], done: str) -> None:
    try:
        await change
    except InvalidRequest as refusal:
        await _refuse(context, refusal)
        return
    await context.respond_json({"success": True, "message": f"The engine has {done}."})


async def read_weight_version(context: RequestContext) -> None:
    await context.respond_json({"weight_version": context.engine.weight_version})


async def read_world_size(context: RequestContext) -> None:
    """How many members a group with a trainer has of this engine, whatever its ranks are."""
    await context.respond_json({"world_size": 1})


async def _update(context: RequestContext, source: WeightSource, body: WeightsBody) -> None:
    in_flight: InFlight = body.in_flight or ("abort" if body.abort_all_requests else "keep")
    if body.abort_all_requests and in_flight != "abort":
        raise InvalidRequest(
            f"abort_all_requests is true, and in_flight is {in_flight}: send one of them", param="in_flight"
        )
    try:
        version = await context.engine.update_weights(source, version=body.weight_version, in_flight=in_flight)
    except InvalidRequest as error:
        if error.param == "version":  # as the engine calls what is weight_version here
            error = InvalidRequest(f"weight_{error}", param="weight_version")
        await _refuse(context, error)
        return
    except WeightsLost as error:
        await _refuse(context, error)
        return
    if body.flush_cache:  # nobody would find it any more, and its blocks are the first to be of use
        context.engine.reset_prefix_cache()
    message = f"The weights were replaced: their version is {version}."
    await context.respond_json({"success": True, "message": message, "weight_version": version})


async def _refuse(context: RequestContext, error: TrioserveError) -> None:
    """As SGLang's clients read it, and as ours do."""
    response = error_response(error)
    body = {"success": False, "message": response.message, **response.body()}
    await context.respond_json(body, status=response.status, headers=response.headers)


def _check_may(context: RequestContext) -> None:
    check_is_admin(context.caller, "weights are replaced with the admin's API key: see --admin-api-key")
