"""New weights in a rank. A separate thread checks them during steps, and the computing thread writes them.

Each rank selects its own shards from the whole model. The model does not change until the order to write arrives. If
that order does not arrive, the next check replaces the checked weights.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from trioserve.contracts.errors import InvalidRequest, ModelLoadError, WeightsLost
from trioserve.model.fingerprint import weights_name
from trioserve.model.loading.described_tensors import ArrivingTensor
from trioserve.model.loading.fields import one_line
from trioserve.model.number_formats import values_of
from trioserve.model.trainer_groups import arriving_tensors
from trioserve.model.weight_replacement import ArrivingWeights, DividedModel, StoredWeights
from trioserve.ranks.messages import CheckWeights, ConfirmWeights, PutWeights, Refusal, WriteWeights

if TYPE_CHECKING:
    from trioserve.model.runner import ModelRunner

__all__ = ["OfferedWeights"]

OnFound = Callable[[str | Refusal | None], None]
OnBroken = Callable[[BaseException], None]


class _Sent(NamedTuple):
    weights: ArrivingWeights
    tensors: dict[str, ArrivingTensor]


class OfferedWeights:
    """The new weights of the latest check in this rank.

    Args:
        runner: the model whose weights are replaced.
        divided: selects this rank's shards, see StoredWeights.
        context_tokens: see StoredWeights.
    """

    def __init__(self, runner: ModelRunner, divided: DividedModel, context_tokens: int | None) -> None:
        self._runner = runner
        self._context_tokens = context_tokens
        self._divided = divided
        self._lock = threading.Lock()
        self._offer = 0  # number of the latest check; results of earlier checks are dropped
        self._found: StoredWeights | _Sent | None = None
        self._bytes = bytearray()  # the bytes of the current tensor that have arrived

    # --- methods for the computing thread ---

    def begin_check(self, order: CheckWeights, on_found: OnFound, on_broken: OnBroken) -> None:
        """Start a thread that checks new weights. The thread calls `on_found` or `on_broken`.

        Args:
            order: describes the weights.
            on_found: called with the answer to the order.
            on_broken: called with an unexpected exception.
        """
        with self._lock:
            self._offer, self._found = order.offer, None
        self._bytes = bytearray()
        threading.Thread(target=self._check, args=(order, on_found, on_broken), name="weights", daemon=True).start()

    def confirm(self, order: ConfirmWeights) -> Refusal | None:
        try:
            self._stored(order.offer).confirm()
        except InvalidRequest as error:
            return Refusal(str(error), error.param)
        return None

    def write(self, order: WriteWeights) -> None:
        """Replace the model's weights by the checked weights.

        Args:
            order: contains the number of the check.

        Raises:
            WeightsLost: the weights cannot be read any more, or have changed. Other ranks may already have written
                their shards.
        """
        found = self._stored(order.offer)
        self._found = None
        try:
            found.replace()
        except (InvalidRequest, ModelLoadError) as error:
            raise WeightsLost(f"the new weights were written only in part: {error}") from error

    def _stored(self, offer: int) -> StoredWeights:
        found = self._found
        assert offer == self._offer, "only the last check can be written"
        assert isinstance(found, StoredWeights), "weights are written after their check has ended"
        return found

    def put(self, order: PutWeights) -> None:
        found = self._found
        assert order.offer == self._offer, "only tensors of the last check can arrive"
        assert isinstance(found, _Sent), "tensors arrive after their check has ended"
        self._bytes += order.part
        if not order.is_last:
            return
        tensor = found.tensors[order.name]
        content, self._bytes = np.frombuffer(self._bytes, dtype=np.uint8), bytearray()
        found.weights.put(order.name, values_of(content, tensor.dtype).reshape(tensor.shape))

    # --- methods for the thread that checks weights ---

    def _check(self, order: CheckWeights, on_found: OnFound, on_broken: OnBroken) -> None:
        answer: str | Refusal | None
        try:
            found = self._checked(order)
            answer = _name(found) if order.is_named else None
            with self._lock:
                if self._offer == order.offer:
                    self._found = found
        except InvalidRequest as error:
            answer = Refusal(str(error), error.param)
        except BaseException as error:
            on_broken(error)
            return
        on_found(answer)

    def _checked(self, order: CheckWeights) -> StoredWeights | _Sent:
        """Check the weights, or raise InvalidRequest."""
        if order.sent is not None:
            tensors = arriving_tensors(order.sent)
            return _Sent(ArrivingWeights(self._runner, tensors, divided=self._divided), tensors)
        source = order.shared if order.path is None else Path(order.path)
        assert source is not None, "an order has a path or shared weights"
        return StoredWeights(self._runner, source, context_tokens=self._context_tokens, divided=self._divided)


def _name(found: StoredWeights | _Sent) -> str | None:
    """Return the name of weights in files. Raise InvalidRequest if the files cannot be read."""
    if not isinstance(found, StoredWeights) or found.checkpoint is None:
        return None
    try:
        return weights_name(found.checkpoint)
    except ModelLoadError as error:
        raise InvalidRequest(one_line(str(error)), param="model_path") from error
