"""New weights in a rank: looked at in threads of their own, beside the steps, and written in the one that computes.

Each of them finds for itself what of the whole model it has. Until it is told to write, nothing has changed, and
whoever is told nothing more forgets what it has found with the next ones.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from trioserve.contracts.errors import InvalidRequest, ModelLoadError, WeightsLost
from trioserve.model.loading.arriving_tensor import ArrivingTensor
from trioserve.model.loading.fields import one_line
from trioserve.model.loading.weights_name import weights_name
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
    """divided, context_tokens: see StoredWeights."""

    def __init__(self, runner: ModelRunner, divided: DividedModel, context_tokens: int | None) -> None:
        self._runner = runner
        self._context_tokens = context_tokens
        self._divided = divided
        self._lock = threading.Lock()
        self._offer = 0  # the last one: of others nothing is kept
        self._found: StoredWeights | _Sent | None = None
        self._bytes = bytearray()  # of the tensor that is coming

    # To be called where the model computes:

    def look(self, order: CheckWeights, on_found: OnFound, on_broken: OnBroken) -> None:
        """Begin to. One of them is called in the thread that looks: with what is to be answered, or with what nobody
        has foreseen."""
        with self._lock:
            self._offer, self._found = order.offer, None
        self._bytes = bytearray()
        threading.Thread(target=self._look, args=(order, on_found, on_broken), name="weights", daemon=True).start()

    def confirm(self, order: ConfirmWeights) -> Refusal | None:
        try:
            self._stored(order.offer).confirm()
        except InvalidRequest as error:
            return Refusal(str(error), error.param)
        return None

    def write(self, order: WriteWeights) -> None:
        """Raises WeightsLost if what was there cannot be read any more, or is something else by now."""
        found = self._stored(order.offer)
        self._found = None
        try:
            found.replace()
        except (InvalidRequest, ModelLoadError) as error:
            raise WeightsLost(f"the new weights came only in part: {error}") from error  # other ranks write theirs

    def _stored(self, offer: int) -> StoredWeights:
        found = self._found
        assert offer == self._offer, "what is written was looked at last"
        assert isinstance(found, StoredWeights), "what is written was found"
        return found

    def put(self, order: PutWeights) -> None:
        found = self._found
        assert order.offer == self._offer, "what is put was looked at last"
        assert isinstance(found, _Sent), "what is put was found"
        self._bytes += order.part
        if not order.is_last:
            return
        tensor = found.tensors[order.name]
        content, self._bytes = np.frombuffer(self._bytes, dtype=np.uint8), bytearray()
        found.weights.put(order.name, values_of(content, tensor.dtype).reshape(tensor.shape))

    # In a thread that looks:

    def _look(self, order: CheckWeights, on_found: OnFound, on_broken: OnBroken) -> None:
        said: str | Refusal | None
        try:
            found = self._looked_at(order)
            said = _name(found) if order.is_named else None
            with self._lock:
                if self._offer == order.offer:
                    self._found = found
        except InvalidRequest as error:
            said = Refusal(str(error), error.param)
        except BaseException as error:
            on_broken(error)
            return
        on_found(said)

    def _looked_at(self, order: CheckWeights) -> StoredWeights | _Sent:
        """Raises InvalidRequest."""
        if order.sent is not None:
            tensors = arriving_tensors(order.sent)
            return _Sent(ArrivingWeights(self._runner, tensors, divided=self._divided), tensors)
        source = order.shared if order.path is None else Path(order.path)
        assert source is not None, "one of them says where they are"
        return StoredWeights(self._runner, source, context_tokens=self._context_tokens, divided=self._divided)


def _name(found: StoredWeights | _Sent) -> str | None:
    """Of what stands in the files. Raises InvalidRequest if they cannot be read."""
    if not isinstance(found, StoredWeights) or found.checkpoint is None:
        return None
    try:
        return weights_name(found.checkpoint)
    except ModelLoadError as error:
        raise InvalidRequest(one_line(str(error)), param="model_path") from error
