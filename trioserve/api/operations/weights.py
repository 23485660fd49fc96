"""Weight updates of a running engine, as SGLang's /update_weights_from_disk and similar paths, and the weight version.

These requests need the admin's key, because the weights determine the responses to all callers.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TYPE_CHECKING

from msgspec import UNSET, UnsetType

from trioserve.api.error_responses import Error, error_response
from trioserve.api.openai.request_types import (
    BroadcastWeightsBody,
    InFlight,
    SharedWeightsBody,
    WeightGroupBody,
    WeightGroupNameBody,
    WeightsBody,
    WeightsOnDiskBody,
)
from trioserve.api.response import Response
from trioserve.api.route_table import READS_BODY, Operation
from trioserve.contracts.errors import InvalidRequest, TrioserveError, WeightsLost
from trioserve.contracts.weights import BroadcastWeights, SharedWeights, WeightGroup, WeightSource

if TYPE_CHECKING:
    from trioserve.api.request_context import RequestContext

__all__ = [
    "OPERATIONS",
    "destroy_weights_update_group",
    "init_weights_update_group",
    "read_weight_version",
    "read_world_size",
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "update_weights_from_shared_memory",
]


class WeightUpdate(Response):
    """Result of a weight update.

    Attributes:
        weight_version: version of the new weights, if success is true.
    """

    success: bool
    message: str
    weight_version: str | UnsetType = UNSET


class WeightUpdateError(Error):
    """Error of a weight update.

    Attributes:
        success: false, as in SGLang. Unset if the body could not be read.
        message: reason, as in SGLang. Unset if the body could not be read.
    """

    success: bool | UnsetType = UNSET
    message: str | UnsetType = UNSET


class WeightVersion(Response):
    weight_version: str


class WorldSize(Response):
    """Size of the engine in a group with a trainer.

    Attributes:
        world_size: number of members of the group that belong to this engine.
    """

    world_size: int


async def update_weights_from_disk(context: RequestContext) -> None:
    """Replace the weights from a directory or file. Responds when steps use the new weights.

    Args:
        context: the request.

    Raises:
        InvalidRequest: the body has a bad value.
        Refusal: the caller is not the admin (403).
    """
    body = await context.body(WeightsOnDiskBody)
    if body.load_format not in (None, "auto", "safetensors"):
        raise InvalidRequest(
            f"load_format is {body.load_format}, but weights are read in the model's format: leave load_format out",
            param="load_format",
        )
    if body.is_async:
        raise InvalidRequest(
            "is_async is not supported, since the response is sent after the update: leave it out", param="is_async"
        )
    await _update(context, body.model_path, body)


async def update_weights_from_shared_memory(context: RequestContext) -> None:
    """Replace the weights from a segment of shared memory. Responds when steps use the new weights.

    Args:
        context: the request.

    Raises:
        InvalidRequest: the body has a bad value.
        Refusal: the caller is not the admin (403).
    """
    body = await context.body(SharedWeightsBody)
    await _update(context, SharedWeights(body.name), body)


async def update_weights_from_distributed(context: RequestContext) -> None:
    """Replace the weights from a trainer whose group the engine has joined. Responds when steps use the new weights.

    Args:
        context: the request.

    Raises:
        InvalidRequest: the body has a bad value.
        Refusal: the caller is not the admin (403).
    """
    body = await context.body(BroadcastWeightsBody)
    if body.load_format is not None:
        raise InvalidRequest(
            f"load_format is {body.load_format}, but each tensor is sent separately: leave it out", param="load_format"
        )
    source = BroadcastWeights(
        names=tuple(body.names),
        dtypes=tuple(body.dtypes),
        shapes=tuple(map(tuple, body.shapes)),
        group_name=body.group_name,
    )
    await _update(context, source, body)


async def init_weights_update_group(context: RequestContext) -> None:
    """Join a trainer's group. Responds when all members have joined.

    Args:
        context: the request.

    Raises:
        InvalidRequest: the body has a bad value.
        Refusal: the caller is not the admin (403).
    """
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
    name = (await context.body(WeightGroupNameBody)).group_name
    await _change_group(context, context.engine.destroy_weights_update_group(name), f"left {name}")


async def _change_group(context: RequestContext, change: Awaitable[None], done: str) -> None:
    try:
        await change
    except InvalidRequest as refusal:
        await _refuse(context, refusal)
        return
    await context.respond_json(WeightUpdate(success=True, message=f"The engine has {done}."))


async def read_weight_version(context: RequestContext) -> None:
    await context.respond_json(WeightVersion(weight_version=context.engine.weight_version))


async def read_world_size(context: RequestContext) -> None:
    """Send the number of members of a trainer's group that belong to this engine. The number is one, however many ranks
    the engine has.

    Args:
        context: the request.
    """
    await context.respond_json(WorldSize(world_size=1))


async def _update(context: RequestContext, source: WeightSource, body: WeightsBody) -> None:
    in_flight: InFlight = body.in_flight or ("abort" if body.abort_all_requests else "keep")
    if body.abort_all_requests and in_flight != "abort":
        raise InvalidRequest(
            f"abort_all_requests is true, and in_flight is {in_flight}: send one of them", param="in_flight"
        )
    try:
        version = await context.engine.update_weights(source, version=body.weight_version, in_flight=in_flight)
    except InvalidRequest as error:
        if error.param == "version":  # The engine names the field `version`, and the body names it `weight_version`.
            error = InvalidRequest(f"weight_{error}", param="weight_version")
        await _refuse(context, error)
        return
    except WeightsLost as error:
        await _refuse(context, error)
        return
    if body.flush_cache:  # No request can hit blocks of older weights, so these blocks are freed.
        context.engine.reset_prefix_cache()
    message = f"The weights were replaced: their version is {version}."
    await context.respond_json(WeightUpdate(success=True, message=message, weight_version=version))


async def _refuse(context: RequestContext, error: TrioserveError) -> None:
    """Send an error with the fields of SGLang and with those of this server."""
    response = error_response(error)
    refused = WeightUpdateError(error=response.body().error, success=False, message=response.message)
    await context.respond_json(refused, status=response.status, headers=response.headers)


OPERATIONS: tuple[Operation[RequestContext], ...] = (
    Operation(
        method="POST",
        path="/update_weights_from_disk",
        handler=update_weights_from_disk,
        summary="Replace the model's weights between two steps, from a directory",
        is_operators=True,
        admin_action="replacing weights",
        description="The source has all tensors of the model, with the "
        "names of its checkpoint. If a tensor does not fit, the update is refused and nothing changes. Responds when "
        "steps use the new weights.",
        body=WeightsOnDiskBody,
        response=WeightUpdate,
        error=WeightUpdateError,
        errors=(*READS_BODY, 403, 500, 503),
    ),
    Operation(
        method="POST",
        path="/update_weights_from_shared_memory",
        handler=update_weights_from_shared_memory,
        summary="Replace the model's weights from shared memory on the server's machine",
        is_operators=True,
        admin_action="replacing weights",
        body=SharedWeightsBody,
        response=WeightUpdate,
        error=WeightUpdateError,
        errors=(*READS_BODY, 403, 500, 503),
    ),
    Operation(
        method="POST",
        path="/update_weights_from_distributed",
        handler=update_weights_from_distributed,
        summary="Replace the model's weights from a trainer that sends them by torch.distributed",
        is_operators=True,
        admin_action="replacing weights",
        description="The engine must have joined the trainer's group. The trainer sends after this request.",
        body=BroadcastWeightsBody,
        response=WeightUpdate,
        error=WeightUpdateError,
        errors=(*READS_BODY, 403, 500, 503),
    ),
    Operation(
        method="POST",
        path="/init_weights_update_group",
        handler=init_weights_update_group,
        summary="Join a trainer's group of torch.distributed",
        is_operators=True,
        admin_action="replacing weights",
        description="Responds when all members have joined. The trainer is rank 0, and listens at the address.",
        body=WeightGroupBody,
        response=WeightUpdate,
        error=WeightUpdateError,
        errors=(*READS_BODY, 403, 503),
    ),
    Operation(
        method="POST",
        path="/destroy_weights_update_group",
        handler=destroy_weights_update_group,
        summary="Leave a trainer's group of torch.distributed",
        is_operators=True,
        admin_action="replacing weights",
        body=WeightGroupNameBody,
        response=WeightUpdate,
        error=WeightUpdateError,
        errors=(*READS_BODY, 403),
    ),
    Operation(
        method="GET",
        path="/get_weight_version",
        handler=read_weight_version,
        summary="Read the version of the weights in use",
        response=WeightVersion,
    ),
    Operation(
        method="GET",
        path="/weight_info",
        handler=read_weight_version,
        summary="Read the version of the weights in use (vLLM's name)",
        response=WeightVersion,
    ),
    Operation(
        method="GET",
        path="/get_world_size",
        handler=read_world_size,
        summary="Count the members of a trainer's group that this engine has",
        response=WorldSize,
    ),
)
