"""Records of the adapters and images that the requests inside the engine use.

The engine must count a use until the request has ended. After the core has released the request, the engine must no
longer count the use.

This module also makes the prompts with images: the text that a client sends, and the tokens and rows that the model
gets.
"""

from __future__ import annotations

import functools
import math
import struct
import zlib
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

import trio

from trioserve.contracts.errors import AdapterRefused, UnknownModel
from trioserve.contracts.media import GivenRows, ImageLimits, ImagePlan
from trioserve.contracts.prompt import ChatPrompt, Prompt
from trioserve.contracts.weights import AdapterRef
from trioserve.engine.request_stream import RequestStream
from trioserve.simulation.stack.plan import Client, Load, Stage, Unload
from trioserve.testing.byte_tokenizer import byte_tokenizer
from trioserve.testing.fake_engine import FakeEngine, fake_adapter_digest
from trioserve.testing.fake_image_encoder import FAKE_IMAGES, FAKE_TILE_BYTES, rows_of
from trioserve.text.tokenizer import Tokenizer
from trioserve.vision.families.registry import tiles_of
from trioserve.vision.image_prompt import ImageReader, ImageSource

__all__ = ["Lending", "bytes_of", "encoded_prompt", "image_tokenizer", "prompt_of"]

TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
)
SIGNS = (
    "<fake_token_around_image>",
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)),
)
HEIGHTS = (8, 16, 8, 16)  # heights of the images in pixels. Each image is 16 pixels wide.
TILES = (3, 5, 3, 5)  # number of tiles of each image


def prompt_of(client: Client) -> Prompt:
    """Return the prompt that a client sends."""
    if not client.images:
        return list(client.prompt)
    parts: list[dict[str, Any]] = [{"type": "image", "image": _image(number)} for number in client.images]
    return ChatPrompt(messages=[{"role": "user", "content": [*parts, {"type": "text", "text": _text(client.prompt)}]}])


def encoded_prompt(client: Client) -> tuple[tuple[int, ...], tuple[GivenRows, ...]]:
    """Return the model's input: the tokens and the image rows. The digests of the rows have no meaning.

    Args:
        client: planned client, with its prompt and images.
    """
    return _encoded(client.prompt, client.images) if client.images else (client.prompt, ())


def bytes_of(pictures: Collection[int]) -> int:
    """Return the size of the encoder outputs of images.

    Args:
        pictures: numbers of the images.
    """
    return sum(TILES[image] for image in pictures) * FAKE_TILE_BYTES


@functools.cache
def image_tokenizer() -> Tokenizer:
    """Return a tokenizer in which each marker around tiles is one token, so that prompts are short."""
    return byte_tokenizer(TEMPLATE, has_images=True, signs=SIGNS)


@functools.lru_cache(maxsize=1024)
def _encoded(prompt: tuple[int, ...], pictures: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[GivenRows, ...]]:
    reader = ImageReader(FAKE_IMAGES, ImageLimits())
    images = reader.read([ImageSource(f"picture {number}", _image(number)) for number in pictures])
    text = reader.expand(FAKE_IMAGES.sign * len(images) + _text(prompt), images)
    token_ids = image_tokenizer().encode(text, add_special_tokens=False)
    given = []
    for one in reader.locate(token_ids, images):
        assert isinstance(one.image.plan, ImagePlan), "only images are sent"
        tiles = tiles_of(one.image.content, FAKE_IMAGES, one.image.plan, one.image.place)
        given += [GivenRows(start, count, b"", rows_of(tiles, tile)) for tile, (start, count) in enumerate(one.runs)]
    return tuple(token_ids), tuple(given)


def _text(prompt: tuple[int, ...]) -> str:
    return "".join(chr(ord("a") + token_id % 26) for token_id in prompt)


@functools.cache
def _image(number: int) -> bytes:
    """Return a grey PNG in which all tiles are different."""
    width, height = 16, HEIGHTS[number]
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    lines = b"".join(b"\0" + bytes(50 * number + 3 * column + row for column in range(width)) for row in range(height))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in ((b"IHDR", header), (b"IDAT", zlib.compress(lines)), (b"IEND", b""))
    )


class _Loan(NamedTuple):
    """The use of an adapter and of images by one client.

    Attributes:
        client: the client.
        stream: the client's stream.
        adapter: the loaded adapter. None: the client uses no adapter.
        deadline: time at which the request is ended because its adapter is unloaded.
    """

    client: Client
    stream: RequestStream
    adapter: AdapterRef | None
    deadline: float = math.inf


class Lending:
    """Records of adapters and images in use.

    Args:
        stage: the engine.
        log_line: receives trace lines.
        count: counts occurrences.
    """

    def __init__(self, stage: Stage, *, log_line: Callable[[str], None], count: Callable[[str], None]) -> None:
        self._stage = stage
        self._log_line = log_line
        self._count = count
        self._named: dict[str, AdapterRef] = {}  # the current adapter of each name
        self._loading: dict[
            str, list[str]
            # For each name, the states of its running loads. A load is "ready" if it may succeed, and "retired" if the
            # name was unloaded meanwhile.
        ] = {}
        self._loans: dict[int, _Loan] = {}  # uses of the clients inside, by number of the client
        self._leaving: list[_Loan] = []  # uses of clients that are gone while the core still has their request

    def engine_options(self) -> dict[str, Any]:
        stage = self._stage
        options: dict[str, Any] = {"max_loras": stage.adapters_max, "adapter_seconds": stage.load_seconds}
        if stage.room_tiles:
            options["image_limits"] = ImageLimits(outputs_bytes_max=stage.room_tiles * FAKE_TILE_BYTES)
            options |= {
                "tile_seconds": stage.tile_seconds,
                "tokenizer": image_tokenizer(),
            }
        return options

    # --- Clients ---

    def begin(self, client: Client, stream: RequestStream) -> None:
        """Record that a client is about to enter.

        Args:
            stream: the client's stream.
        """
        self._loans[client.number] = _Loan(client, stream, self._named.get(client.adapter))

    def check_refused(self, client: Client) -> None:
        """Check that a client was rightly refused because its adapter is not loaded."""
        assert client.adapter, f"client {client.number} has no adapter"
        assert self._loans[client.number].adapter is None, (
            f"client {client.number} was refused, but {client.adapter} is loaded"
        )

    def end(self, client: Client) -> None:
        """Record that a client has left."""
        loan = self._loans.pop(client.number)
        self._leaving = [left for left in (*self._leaving, loan) if left.stream._request.core_count]

    def adapter_of(self, client: Client) -> AdapterRef | None:
        """Return the adapter of a client inside."""
        loan = self._loans[client.number]
        assert not client.adapter or loan.adapter is not None, f"client {client.number} entered without its adapter"
        return loan.adapter

    def may_be_ended(self, client: Client) -> bool:
        """Return True if the client's adapter was unloaded, and the deadline for its requests has passed."""
        return trio.current_time() >= self._loans[client.number].deadline

    # --- Operators ---

    async def load(self, fake: FakeEngine, order: Load) -> None:
        await trio.sleep(order.at)
        name, path = order.name, f"/{order.content}"
        under_way = self._loading.setdefault(name, [])
        must_be_refused = "ready" in under_way or (name in self._named and not order.replaces)
        under_way.append("ready")
        place = len(under_way) - 1
        refusal = None
        try:
            await fake.load_adapter(name, path, replaces=order.replaces)
        except AdapterRefused as error:
            refusal = error
        if refusal is not None:
            self._note("load", name, refusal.reason)
            is_right = must_be_refused or under_way[place] == "retired" or refusal.reason == "too_many"
            assert is_right, f"{name} is not loaded: {refusal}"
        else:
            assert not must_be_refused, f"{name} was loaded a second time"
            assert under_way[place] == "ready", f"{name} was unloaded during its load, but is loaded"
            loaded = fake.adapters.book.get(name)
            assert loaded is not None
            assert loaded.ref is not None
            assert loaded.ref.digest == fake_adapter_digest(path), f"{name} has other weights than {path}"
            self._named[name] = loaded.ref
            self._note("load", name, "ready")
        under_way[place] = "done"
        if {*under_way} == {"done"}:
            del self._loading[name]
        self.check(fake)

    async def unload(self, fake: FakeEngine, order: Unload) -> None:
        await trio.sleep(order.at)
        name = order.name
        before = self._named.pop(name, None)
        under_way = self._loading.get(name, [])
        is_there = before is not None or "ready" in under_way
        under_way[:] = ["retired" if state == "ready" else state for state in under_way]
        deadline = math.inf if order.seconds is None else trio.current_time() + order.seconds
        for number, loan in self._loans.items():
            if before is not None and loan.adapter == before:
                self._loans[number] = loan._replace(deadline=min(deadline, loan.deadline))
        try:
            await fake.unload_adapter(name, seconds=order.seconds)
        except UnknownModel:
            assert not is_there, f"{name} was loaded, but could not be unloaded"
            self._note("unload", name, "unknown")
            return
        assert is_there, f"{name} was unloaded, but was not loaded"
        if before is not None:
            assert not any(loan.adapter == before for loan in self._open()), f"{name} is unloaded, but still in use"
            # At sleep level 2, no adapter is in memory.
            is_left = fake.sleep_level != 2 and before.id in fake.executor.adapters
            assert not is_left, f"{name} is unloaded, but still in memory"
        self._note("unload", name, "done")
        self.check(fake)

    def _note(self, what: str, name: str, outcome: str) -> None:
        self._log_line(f"{what} {name}: {outcome}")
        self._count(f"{what}s: {outcome}")

    # --- Rules that must hold at any time ---

    def check(self, fake: FakeEngine) -> None:
        """Compare the recorded uses with the engine's counts.

        Args:
            fake: the engine.
        """
        self._leaving = [loan for loan in self._leaving if loan.stream._request.core_count]
        if fake.fault is None:
            self._check_adapters(fake)
            self._check_images(fake)
        now = trio.current_time()
        for loan in self._open():
            assert now <= loan.deadline, (
                f"client {loan.client.number} still runs after the deadline of its unloaded adapter"
            )

    def check_step(self, fake: FakeEngine, adapters: Iterable[AdapterRef | None]) -> None:
        """Check that the adapters of a step are in memory.

        Args:
            fake: the engine.
            adapters: adapters of the step.
        """
        for adapter in adapters:
            assert adapter is None or adapter.id in fake.executor.adapters, f"a step lacks adapter {adapter}"

    def _open(self) -> list[_Loan]:
        return [loan for loan in self._loans.values() if not loan.stream.is_finished]

    def _check_adapters(self, fake: FakeEngine) -> None:
        book = fake.adapters.book
        book.check()
        named = {adapter.name: adapter.ref for adapter in book}
        assert named == self._named, f"the names have the adapters {named}, expected are {self._named}"
        all_loans = [*self._loans.values(), *self._leaving]
        refs = {loan.adapter for loan in all_loans if loan.adapter is not None} | {*self._named.values()}
        for ref in refs:
            least = sum(loan.adapter == ref for loan in self._open())
            most = sum(loan.adapter == ref for loan in all_loans)
            count = book.user_count(ref.id)
            assert least <= count <= most, f"adapter {ref} has {count} users, expected are {least} to {most}"

    def _check_images(self, fake: FakeEngine) -> None:
        outputs = fake.image_outputs
        if outputs is None:
            return
        outputs.check()
        least = _bytes_of(loan for loan in self._open() if loan.stream._request.core_count)
        most = _bytes_of([*self._loans.values(), *self._leaving])
        claimed = outputs.claimed_bytes
        assert least <= claimed <= most, f"{claimed} bytes of images are in use, expected are {least} to {most}"

    def check_end(self, fake: FakeEngine) -> None:
        """Check the rules that must hold after all clients have left.

        Args:
            fake: the engine.
        """
        self.check(fake)
        ids = {ref.id for ref in self._named.values()}
        assert fake.executor.adapters == ids, f"adapters {fake.executor.adapters} are in memory, but {ids} have names"


def _bytes_of(loans: Iterable[_Loan]) -> int:
    """Return the bytes of all images in use. An image that is used with two cache salts is encoded twice."""
    used = {(loan.client.salt, image) for loan in loans for image in loan.client.images}
    return bytes_of([image for _, image in used])
