"""GET /v1/requests of a server that makes pictures: those that live, and how far each has come."""

from __future__ import annotations

from trioserve.api.images.image_context import ImageContext

__all__ = ["list_image_requests"]


async def list_image_requests(context: ImageContext) -> None:
    views = context.engine.live_requests(owner=context.caller.lists)
    await context.respond_json(
        {
            "object": "list",
            "data": [
                {
                    "id": view.id,
                    "object": "request",
                    "state": view.state,
                    "phase": view.phase.value,
                    "priority": view.priority,
                    "age_seconds": round(view.age_seconds, 3),
                    "pictures": view.picture_count,
                    "steps_done": view.steps_done,
                    "step_count": view.step_count,
                }
                for view in views
            ],
        }
    )
