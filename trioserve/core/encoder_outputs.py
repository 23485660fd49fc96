"""Ownership of encoder outputs such as image embeddings: which requests use each output, and when its memory is free.

This module only counts the bytes of each output, and computes nothing. The total number of bytes is limited. An output
is in one of three states:

    expected  claimed but not computed yet. Its bytes are reserved
    used      computed, and claimed by one or more live requests
    cached    computed, without claims. Evicted if bytes are needed, least recently used first

    (absent) ──claim──► expected ──put──► used ──last release──► cached ──claim──► used
             ◄──last release──            cached ──evict──► (absent)

A request claims all of its outputs at once, or waits in a queue until there is memory for all of them. If requests
claimed their outputs one by one, two requests could wait for each other forever. One call releases all claims of a
request, whatever its state.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping

from trioserve.contracts.errors import InvalidRequest

__all__ = ["EncoderOutputs", "OutputClaim"]


class _Output:
    __slots__ = ("byte_count", "claim_count", "values")

    def __init__(self, byte_count: int) -> None:
        self.byte_count = byte_count
        self.claim_count = 0
        self.values: object | None = None  # None means that the output is expected.


class OutputClaim:
    """The claim of one request on all of its outputs.

    Args:
        wanted: size of each output in bytes, by the output's name.
        on_granted: called once when a waiting claim is granted. It must not call the EncoderOutputs.
    """

    __slots__ = ("is_granted", "is_released", "on_granted", "wanted")

    def __init__(self, wanted: Mapping[bytes, int], on_granted: Callable[[], None]) -> None:
        self.wanted = dict(wanted)
        self.on_granted = on_granted
        self.is_granted = False
        self.is_released = False


class EncoderOutputs:
    """All encoder outputs of an engine.

    Args:
        bytes_max: highest number of bytes of all outputs together.

    Cost:
        O(1) for each output. Releasing a claim that still waits is O(waiting claims).
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self._outputs: dict[bytes, _Output] = {}
        self._cached: OrderedDict[bytes, None] = OrderedDict()  # The least recently used output comes first.
        self._queue: deque[OutputClaim] = deque()
        self.bytes_total = 0
        self._cached_bytes = 0
        self.query_count = 0  # Number of outputs that requests have claimed.
        self.hit_count = 0  # Number of claimed outputs that were already computed.

    @property
    def cached_bytes(self) -> int:
        """Return the number of bytes of outputs without claims."""
        return self._cached_bytes

    @property
    def claimed_bytes(self) -> int:
        """Return the number of bytes of outputs that are used or expected."""
        return self.bytes_total - self._cached_bytes

    @property
    def waiting_count(self) -> int:
        return len(self._queue)

    def claim(self, wanted: Mapping[bytes, int], on_granted: Callable[[], None]) -> OutputClaim:
        """Claim outputs, or put the claim into the queue. The caller must later release the claim.

        Args:
            wanted: size of each output in bytes, by the output's name.
            on_granted: called once when a waiting claim is granted. Not called if the claim is granted at once.

        Raises:
            InvalidRequest: the outputs exceed the limit. Nothing is claimed.
        """
        byte_count = sum(wanted.values())
        if byte_count > self.bytes_max:
            raise InvalidRequest(
                f"the embeddings of this prompt's images need {byte_count} bytes, but the engine has {self.bytes_max} "
                "bytes for them: send fewer or smaller images",
                param="messages",
            )
        claim = OutputClaim(wanted, on_granted)
        if self._queue or not self._grant(claim):
            self._queue.append(claim)
        return claim

    def values(self, name: bytes) -> object | None:
        """Return the values of an output. None if the output is absent or not computed yet.

        Args:
            name: name of the output.
        """
        output = self._outputs.get(name)
        return None if output is None else output.values

    def put(self, name: bytes, values: object) -> None:
        """Store the values of an expected output. The values are dropped if no request claims the output any more.

        Args:
            name: name of the output.
            values: result of the encoder.
        """
        output = self._outputs.get(name)
        if output is not None and output.values is None:
            output.values = values

    def release(self, claim: OutputClaim) -> None:
        """Release all outputs of a claim, or remove the claim from the queue. Call this once for each claim.

        Args:
            claim: result of claim().
        """
        assert not claim.is_released, "a claim is released twice"
        claim.is_released = True
        if not claim.is_granted:
            self._queue.remove(claim)
        else:
            for name in claim.wanted:
                self._release_output(name)
        while self._queue and self._grant(self._queue[0]):
            self._queue.popleft().on_granted()

    def _grant(self, claim: OutputClaim) -> bool:
        missing = sum(size for name, size in claim.wanted.items() if name not in self._outputs)
        spared = sum(self._outputs[name].byte_count for name in claim.wanted if name in self._cached)
        if self.claimed_bytes + spared + missing > self.bytes_max:
            return False
        for name in claim.wanted:
            if name in self._cached:
                del self._cached[name]
                self._cached_bytes -= self._outputs[name].byte_count
        while self.bytes_total + missing > self.bytes_max:
            evicted, _none = self._cached.popitem(last=False)
            byte_count = self._outputs.pop(evicted).byte_count
            self.bytes_total -= byte_count
            self._cached_bytes -= byte_count
        for name, size in claim.wanted.items():
            output = self._outputs.get(name)
            self.query_count += 1
            if output is None:
                output = self._outputs[name] = _Output(size)
                self.bytes_total += size
            elif output.values is not None:
                self.hit_count += 1
            output.claim_count += 1
        claim.is_granted = True
        return True

    def _release_output(self, name: bytes) -> None:
        output = self._outputs[name]
        output.claim_count -= 1
        assert output.claim_count >= 0, "an output has a negative claim count"
        if output.claim_count:
            return
        if output.values is None:
            del self._outputs[name]
            self.bytes_total -= output.byte_count
        else:
            self._cached[name] = None
            self._cached_bytes += output.byte_count

    def check(self) -> None:
        """Assert that every output is in one state and the byte counts are right. The cost is O(outputs), so only tests
        and simulations call this.
        """
        assert self.bytes_total == sum(output.byte_count for output in self._outputs.values())
        assert self._cached_bytes == sum(self._outputs[name].byte_count for name in self._cached)
        assert 0 <= self._cached_bytes <= self.bytes_total <= self.bytes_max, "more bytes than allowed"
        for name, output in self._outputs.items():
            assert (output.claim_count == 0) == (name in self._cached), "neither claimed nor cached, or both"
            assert name not in self._cached or output.values is not None, "an output without claims is not computed"
        assert not any(claim.is_granted or claim.is_released for claim in self._queue)
        assert not self._queue or self.claimed_bytes > 0, "a claim waits although no bytes are claimed"
