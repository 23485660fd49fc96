"""What clients inside have borrowed, by books of the simulation's own: which adapter, in which loading, which images.

Every loan ends with its request: while it lasts the engine counts it, and when the core has nothing of the request any
more it counts it no longer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import trio

from trioserve.contracts.adapter import AdapterRef
from trioserve.contracts.errors import AdapterRefused, UnknownModel
from trioserve.contracts.images import ImageLimits
from trioserve.engine.request_stream import RequestStream
from trioserve.simulation.stack.pictures import bytes_of, picture_tokenizer
from trioserve.simulation.stack.plan import Client, Load, Stage, Unload
from trioserve.testing.fake_engine import FakeEngine, fake_adapter_digest
from trioserve.testing.fake_image_encoder import FAKE_IMAGES

__all__ = ["Lending"]


class _Loan(NamedTuple):
    """adapter: the loading that it has; None: none. deadline: when it is ended, since its adapter is unloaded."""

    client: Client
    stream: RequestStream
    adapter: AdapterRef | None
    deadline: float = math.inf


class Lending:
    """tell, count: of the simulation."""

    def __init__(self, stage: Stage, *, tell: Callable[[str], None], count: Callable[[str], None]) -> None:
        self._stage = stage
        self._tell = tell
        self._count = count
        self._named: dict[str, AdapterRef] = {}  # what each name leads to
        self._loading: dict[
            str, list[str]
        ] = {}  # by name, of those under way, whether "ready" or "retired" comes of it
        self._loans: dict[int, _Loan] = {}  # of the clients that are inside, by their numbers
        self._leaving: list[_Loan] = []  # of those that have left, and that the core is not done with yet

    def engine_options(self) -> dict[str, Any]:
        stage = self._stage
        options: dict[str, Any] = {"max_loras": stage.adapters_max, "adapter_seconds": stage.load_seconds}
        if stage.room_tiles:
            options["image_limits"] = ImageLimits(outputs_bytes_max=stage.room_tiles * FAKE_IMAGES.tile_bytes)
            options |= {
                "tile_seconds": stage.tile_seconds,
                "tokenizer": picture_tokenizer(),
            }
        return options

    # --- clients ---

    def begin(self, client: Client, stream: RequestStream) -> None:
        """It is about to enter."""
        self._loans[client.number] = _Loan(client, stream, self._named.get(client.adapter))

    def check_refused(self, client: Client) -> None:
        """It was told that its adapter is not there."""
        assert client.adapter, f"client {client.number} asked for no adapter"
        assert self._loans[client.number].adapter is None, f"client {client.number}: {client.adapter} is there"

    def end(self, client: Client) -> None:
        """It has left, however that came."""
        loan = self._loans.pop(client.number)
        self._leaving = [left for left in (*self._leaving, loan) if left.stream._request.core_count]

    def adapter_of(self, client: Client) -> AdapterRef | None:
        """Of one that has entered."""
        loan = self._loans[client.number]
        assert not client.adapter or loan.adapter is not None, f"client {client.number} was let in without an adapter"
        return loan.adapter

    def may_be_ended(self, client: Client) -> bool:
        """Whether its adapter was unloaded so long ago."""
        return trio.current_time() >= self._loans[client.number].deadline

    # --- operators ---

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
            assert not must_be_refused, f"{name} is loaded a second time"
            assert under_way[place] == "ready", f"{name} was unloaded while it was loaded, and is there"
            loaded = fake.adapters.book.get(name)
            assert loaded is not None
            assert loaded.ref is not None
            assert loaded.ref.digest == fake_adapter_digest(path), f"{name} is something else than {path}"
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
            assert not is_there, f"{name} was there, and could not be unloaded"
            self._note("unload", name, "unknown")
            return
        assert is_there, f"{name} was unloaded, and had not been there"
        if before is not None:
            assert not any(loan.adapter == before for loan in self._open()), f"{name} is gone, and in use"
            is_left = fake.sleep_level != 2 and before.id in fake.executor.adapters  # asleep so deep, nothing is there
            assert not is_left, f"{name} is gone, and takes memory"
        self._note("unload", name, "done")
        self.check(fake)

    def _note(self, what: str, name: str, outcome: str) -> None:
        self._tell(f"{what} {name}: {outcome}")
        self._count(f"{what}s: {outcome}")

    # --- what has to hold at any moment ---

    def check(self, fake: FakeEngine) -> None:
        """Loans as the engine counts them."""
        self._leaving = [loan for loan in self._leaving if loan.stream._request.core_count]
        if fake.fault is None:
            self._check_adapters(fake)
            self._check_images(fake)
        now = trio.current_time()
        for loan in self._open():
            assert now <= loan.deadline, f"client {loan.client.number} goes on with an adapter that is to be gone"

    def check_step(self, fake: FakeEngine, adapters: Iterable[AdapterRef | None]) -> None:
        """A step computes with these."""
        for adapter in adapters:
            assert adapter is None or adapter.id in fake.executor.adapters, f"a step misses adapter {adapter}"

    def _open(self) -> list[_Loan]:
        return [loan for loan in self._loans.values() if not loan.stream.is_finished]

    def _check_adapters(self, fake: FakeEngine) -> None:
        book = fake.adapters.book
        book.check()
        named = {adapter.name: adapter.ref for adapter in book}
        assert named == self._named, f"names lead to {named}, and ought to lead to {self._named}"
        everybody = [*self._loans.values(), *self._leaving]
        refs = {loan.adapter for loan in everybody if loan.adapter is not None} | {*self._named.values()}
        for ref in refs:
            least = sum(loan.adapter == ref for loan in self._open())
            most = sum(loan.adapter == ref for loan in everybody)
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
        """Everybody has left."""
        self.check(fake)
        ids = {ref.id for ref in self._named.values()}
        assert fake.executor.adapters == ids, f"adapters {fake.executor.adapters} are in memory, {ids} have names"


def _bytes_of(loans: Iterable[_Loan]) -> int:
    """Return the bytes of all their images. One that is used with two salts is encoded twice."""
    used = {(loan.client.salt, picture) for loan in loans for picture in loan.client.images}
    return bytes_of([picture for _, picture in used])
