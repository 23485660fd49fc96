"""Handlers of POST /v1/images/generations and /v1/images/edits: generate images from a prompt, whole or streamed.

Before a whole response is sent, its request's scope is left and the edited image is freed. During a stream, the request
keeps its lease. The engine has already released the resources of an image that is being encoded or sent.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import trio

from trioserve.api.error_responses import foreign_end
from trioserve.api.form import INLINE_BYTES_MAX, parsed_form
from trioserve.api.images.image_context import ImageContext, UnsentShare
from trioserve.api.images.image_responses import EventKind, ImageWriter
from trioserve.api.images.request_types import ImageBody, ImageEditBody, ImageGenerationBody
from trioserve.api.openai.request_types import deadlines_of, wrong_field
from trioserve.api.sse import KEEP_ALIVE
from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.image_generation import PROMPT_CHARACTERS_MAX, ImageDelta, ImageParams
from trioserve.contracts.output import Delta

if TYPE_CHECKING:
    from trioserve.engine.image_engine import ImageStream

__all__ = ["EDITS_PATH", "GENERATIONS_PATH", "create_images", "edit_images", "parsed_edit"]

IMAGE, MASK = "image", "mask"
IMAGE_NAMES = (IMAGE, "image[]", "image[0]")  # OpenAI's clients use each of these names for a single image.
STREAM_OPTIONS = "stream_options["
TEXT_BYTES_MAX = 4 * PROMPT_CHARACTERS_MAX  # The size of the longest prompt in UTF-8.


class EditForm(msgspec.Struct, frozen=True):
    """A form that edits an image.

    Attributes:
        body: The text fields.
        image: Image file.
        mask: Mask file. None if the form has none.
    """

    body: ImageEditBody
    image: bytes
    mask: bytes | None


def parsed_edit(raw: bytes, content_type: str | None) -> EditForm:
    """Parse a form.

    Args:
        raw: Body of the request.
        content_type: Header Content-Type, which has the boundary of the form.

    Raises:
        InvalidRequest: The form is invalid. The error names the field.
    """
    form = parsed_form(raw, content_type, files=(*IMAGE_NAMES, MASK), field_bytes_max=TEXT_BYTES_MAX)
    several = [name for name in (*form.files, *form.texts) if name.startswith("image[")]
    images = [form.files[name] for name in IMAGE_NAMES if name in form.files]
    if len(images) > 1 or len(several) > 1:
        raise InvalidRequest("the form has more than one image: send one", param=IMAGE)
    if not images or not images[0].content:
        raise InvalidRequest('the form has no image: send a PNG, JPEG or WebP file as the part "image"', param=IMAGE)
    mask = form.files.get(MASK)
    return EditForm(_body(form.texts), images[0].content, mask.content if mask and mask.content else None)


def _body(texts: dict[str, str]) -> ImageEditBody:
    """Return the body for the text fields. All values are strings. An empty string means "not given"."""
    values: dict[str, Any] = {name: text for name, text in texts.items() if text}
    options = {
        name.removeprefix(STREAM_OPTIONS).rstrip("]"): values.pop(name)
        for name in list(values)
        if name.startswith(STREAM_OPTIONS)
    }
    if options:
        values["stream_options"] = options
    if "prompt" not in values:
        raise InvalidRequest("prompt is missing: describe the image that you want", param="prompt")
    try:
        return msgspec.convert(values, ImageEditBody, strict=False)
    except msgspec.ValidationError as error:
        raise wrong_field(error) from error


GENERATIONS_PATH = "/v1/images/generations"
EDITS_PATH = "/v1/images/edits"


async def create_images(context: ImageContext) -> None:
    body = await context.body(ImageGenerationBody)
    model = context.model_name(body.model)
    body.check()
    with context.services.unsent.share() as share:
        made = await _made(context, body, body.params(), "image_generation", model, share)
        await _finish(context, made)


async def edit_images(context: ImageContext) -> None:
    """Answer with images that are made from an image and a prompt.

    Args:
        context: The request.

    Raises:
        InvalidRequest: The form is invalid. If the model cannot edit images, the error is raised before an image is
            decoded.
    """
    if not context.engine.model.takes_images:
        raise InvalidRequest(
            f"the model {context.engine.model.name} generates images from prompts only and cannot edit images: use "
            f"{GENERATIONS_PATH}",
            param="image",
        )
    raw = await context.exchange.body()
    with context.services.unsent.share() as share:
        with context.services.edits.taken(context.tenant):
            made = await _changed(context, raw, share)
        await _finish(context, made)


async def _changed(context: ImageContext, raw: bytes, share: UnsentShare) -> WholeResponse | None:
    content_type = context.exchange.headers.get("content-type")
    if len(raw) <= INLINE_BYTES_MAX:
        image_form = parsed_edit(raw, content_type)
    else:
        image_form = await context.in_thread(partial(parsed_edit, raw, content_type))
    model = context.model_name(image_form.body.model)
    image_form.body.check()
    if not image_form.body.stream:
        context.exchange.fill_silence()
    decoder = context.services.decoder
    async with decoder.turn(context.tenant):
        image = await decoder.image(image_form.image, "image")
        mask = None if image_form.mask is None else await decoder.image(image_form.mask, "mask", is_mask=True)
    return await _made(context, image_form.body, image_form.body.edit_params(image, mask), "image_edit", model, share)


class WholeResponse(NamedTuple):
    """A whole response that is ready to be sent.

    Attributes:
        begin: Bytes before the images.
        entries: One JSON object for each image.
        end: Bytes after the images.
    """

    begin: bytes
    entries: list[bytes]
    end: bytes


async def _made(
    context: ImageContext, body: ImageBody, params: ImageParams, kind: EventKind, model: str, share: UnsentShare
) -> WholeResponse | None:
    """Generate the images, and leave the request's scope afterwards.

    Args:
        share: Counts the bytes that are not sent yet.

    Returns:
        The response for _finish to send, or None if the images were streamed.
    """
    image_format = body.image_format()
    deadlines = deadlines_of(body, context.exchange.headers)
    created_at = context.clock_and_ids.unix_seconds()
    entries: list[bytes] = []
    try:
        async with context.generate_image(body, params, deadlines) as stream:
            writer = ImageWriter(
                context.engine.model,
                kind,
                image_format,
                created_at=created_at,
                seeds=stream.seeds,
                size=stream.size,
                given=params.image,
            )
            if body.stream:
                await _stream(context, stream, writer, share, sends_progress=body.wants_progress)
            else:
                entries = await _collect(context, stream, writer, share)
    except InvalidRequest as error:
        raise body.as_sent(error) from None
    if body.stream:
        return None
    begin, end = writer.around(f"img-{context.request_id}", model, steps=sum(context.steps_done.values()))
    return WholeResponse(begin, entries, end)


async def _finish(context: ImageContext, made: WholeResponse | None) -> None:
    """Send the rest of the response.

    The request's scope is left already, so a slow client does not hold the engine's resources.
    """
    if made is None:
        await context.finish()
    else:
        await _send_whole(context, made)


async def _collect(context: ImageContext, stream: ImageStream, writer: ImageWriter, share: UnsentShare) -> list[bytes]:
    """Return the images as objects of a whole response, in order.

    An image is encoded while the engine computes the other images.
    """
    entries: dict[int, bytes] = {}
    async for delta in stream:
        _note(context, delta)
        if delta.finish_reason is not None:
            entry = entries[delta.index] = await context.in_thread(partial(writer.entry, delta))
            share.hold(share.byte_count + len(entry))
    return [entries[index] for index in sorted(entries)]


async def _send_whole(context: ImageContext, made: WholeResponse) -> None:
    """Send a whole response in pieces, because it may be large."""
    await context.start_bytes("application/json")
    for index, entry in enumerate(made.entries):
        await context.exchange.send(b"," + entry if index else made.begin + entry)
    await context.finish(made.end)


async def _stream(
    context: ImageContext, stream: ImageStream, writer: ImageWriter, share: UnsentShare, *, sends_progress: bool
) -> None:
    """Send events until the last image is sent. Send KEEP_ALIVE after each long silence."""

    async def wait_until_begun() -> None:
        end = await stream.wait_until_begun()
        if end is not None:
            _note(context, end)

    await context.begin_events(wait_until_begun, context.start_events)
    silent_seconds_max = context.services.rules.keep_alive_seconds
    send = context.exchange.send
    partial_counts: Counter[int] = Counter()
    left_count = len(stream.seeds)  # The number of images that were not sent yet.
    deltas = aiter(stream)
    keep_alive_at = trio.current_time() + silent_seconds_max
    while True:
        delta: ImageDelta | None = None
        event = KEEP_ALIVE
        try:
            with trio.move_on_at(keep_alive_at):
                delta = await anext(deltas)
        except StopAsyncIteration:
            return
        if delta is not None:
            _note(context, delta)
            if delta.finish_reason is not None:
                event = await context.in_thread(partial(writer.completed, delta))
            elif delta.image is not None:
                event = await context.in_thread(partial(writer.partial, delta, partial_counts[delta.index]))
                partial_counts[delta.index] += 1
            elif sends_progress:
                event = writer.progress(delta)
            elif trio.current_time() < keep_alive_at:
                continue
        share.hold(len(event) * left_count)  # The images that wait after this one probably have the same size.
        await send(event)
        share.hold(0)
        left_count -= delta is not None and delta.finish_reason is not None
        keep_alive_at = trio.current_time() + silent_seconds_max


def _note(context: ImageContext, delta: ImageDelta) -> None:
    """Record the progress of an image, which the list of running requests shows.

    Raises:
        TrioserveError: The image was aborted or failed. See foreign_end.
    """
    context.steps_done[delta.index] = delta.steps_done
    if delta.finish_reason is None:
        return
    end = foreign_end(
        Delta(
            index=delta.index,
            text="",
            token_ids=(),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            message=delta.message,
        )
    )
    if end is not None:
        raise end
