"""Replaces the weights of a running model.

New weights are checked before the first weight is written. Then they are read and written piece by piece, so they are
never in memory twice. If a replacement fails in the middle, the model has a mixture of old and new weights. The model
must then not compute until a later replacement has succeeded completely.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from trioserve.contracts.errors import InvalidRequest, ModelLoadError
from trioserve.contracts.weights import ReplacementState, SharedWeights
from trioserve.model.loading.checkpoint import Checkpoint, open_checkpoint
from trioserve.model.loading.default_model import weight_files
from trioserve.model.loading.described_tensors import ArrivingTensor, check_same_model, described_tensors
from trioserve.model.loading.fields import one_line
from trioserve.model.loading.safetensors import tensors_in_file
from trioserve.model.loading.stored_tensor import PLAIN_DTYPES, FileTensor, StoredTensor
from trioserve.model.model_config import ModelConfig
from trioserve.model.number_formats import Values
from trioserve.model.weights import fill_slot, fill_slots, paired

if TYPE_CHECKING:
    from trioserve.model.runner import ModelRunner

__all__ = ["SEGMENTS", "ArrivingWeights", "DividedModel", "StoredWeights"]


SEGMENTS = Path("/dev/shm")
"""Folder in which Linux shows POSIX shared memory segments as files."""

NAME_CHARACTERS_MAX = 200


def shared_file(name: str) -> Path:
    """Return the file of a shared memory segment, which need not exist.

    Args:
        name: name of the segment.

    Raises:
        ModelLoadError: the name is not a valid name of a segment.
    """
    if not name or len(name) > NAME_CHARACTERS_MAX or name != Path(name).name or not name.isprintable():
        raise ModelLoadError("the name of a shared memory segment must be a plain name without slashes")
    return SEGMENTS / name


def shared_tensors(name: str) -> dict[str, FileTensor]:
    """Read the tensors of a shared memory segment whose content is a safetensors file.

    Args:
        name: name of the segment, which another process of this machine has filled.

    Returns:
        Tensors by their names in the segment.

    Raises:
        ModelLoadError: the segment does not exist, or its content is not a safetensors file.
    """
    path = shared_file(name)
    try:
        return tensors_in_file(path, tuple(PLAIN_DTYPES))
    except FileNotFoundError:
        raise ModelLoadError(f"there is no segment {name} of shared memory on this machine") from None
    except OSError as error:
        raise ModelLoadError(f"cannot read the segment {name} of shared memory: {error.strerror or error}") from error


class FileIdentity(NamedTuple):
    """Identity of a file's content. It changes when the file is written or replaced."""

    device: int
    inode: int
    byte_count: int
    written_ns: int


def identities_of(paths: Iterable[Path]) -> dict[Path, FileIdentity]:
    """Read the identities of files without opening them.

    Args:
        paths: files. The result does not contain files that do not exist.
    """
    found = {}
    for path in paths:
        try:
            status = os.stat(path)
        except OSError:
            continue
        found[path] = FileIdentity(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    return found


class DividedModel(NamedTuple):
    """A model that several processes compute together.

    Attributes:
        config: config of the whole model.
        part_of: function that selects this process's shards of the whole model's tensors.
    """

    config: ModelConfig
    part_of: Callable[[Iterable[StoredTensor]], Iterable[StoredTensor]]


class StoredWeights:
    """New weights in files, or in a shared memory segment that has the format of one file.

    Offsets in a file are read from its header when it is opened. If the file was overwritten later, these offsets would
    be wrong. Therefore, the file's identity is checked before and after the replacement.

    Args:
        runner: model whose weights are replaced.
        source: path of a checkpoint, or a shared memory segment.
        context_tokens: context length with which the model was opened, see open_checkpoint.
        divided: describes this process's shard, if several processes compute the model. None: there is one process.

    Attributes:
        state: progress of the replacement.
        checkpoint: the whole new model, if the weights are in files.

    Raises:
        InvalidRequest: the new weights do not fit the model. Only headers were read.
    """

    def __init__(
        self,
        runner: ModelRunner,
        source: Path | SharedWeights,
        *,
        context_tokens: int | None = None,
        divided: DividedModel | None = None,
    ) -> None:
        self._runner = runner
        self.state = ReplacementState.CHECKED
        self.checkpoint: Checkpoint | None = None
        _check_can_be_replaced(runner)
        whole = _whole(runner, divided)
        self._param = "name" if isinstance(source, SharedWeights) else "model_path"
        try:
            files = [shared_file(source.name)] if isinstance(source, SharedWeights) else weight_files(source)
            # Identities are read before any content, so that every later change is noticed.
            identities = identities_of(files)
            if isinstance(source, SharedWeights):
                given = _by_name(described_tensors(whole.config, shared_tensors(source.name)))
            else:
                self.checkpoint = _like(whole.config, source, context_tokens)
                files, given = [*self.checkpoint.files], [*self.checkpoint.tensors()]
            tensors = [*whole.part_of(given)]
            paired(runner.slots(), tensors)
        except ModelLoadError as error:
            raise InvalidRequest(one_line(str(error)), param=self._param) from error
        self._tensors = tensors
        self._files = {path: identities.get(path) for path in files}

    def confirm(self) -> None:
        """Check that the files have not changed since they were opened.

        Raises:
            InvalidRequest: a file was changed or removed.
        """
        try:
            self._check_are_the_same()
        except ModelLoadError as error:
            raise InvalidRequest(one_line(str(error)), param=self._param) from error

    def replace(self) -> None:
        """Replace the weights. Call this method once, in the computing thread.

        Raises:
            InvalidRequest: a file was changed before the replacement. No weight has changed.
            ModelLoadError: a file was changed during the replacement, or cannot be read.
        """
        self.confirm()
        self.state = ReplacementState.BEGUN
        fill_slots(
            self._runner.slots(),
            self._tensors,
            bytes_total=0,
            progress=None,
            thread_count=self._runner.loading_threads,
        )
        self._check_are_the_same()
        self.state = ReplacementState.WHOLE

    def _check_are_the_same(self) -> None:
        """Raise ModelLoadError if a weight file was changed or removed since the check."""
        found = identities_of(self._files)
        for path, identity in self._files.items():
            if path not in found or found[path] != identity:
                raise ModelLoadError(
                    f"cannot load {path}: it was {'overwritten' if path in found else 'removed'} after the update "
                    "began. Do not change files of weights until the update has ended, and write new ones elsewhere"
                )


class ArrivingWeights:
    """New weights that another process sends one after the other, by name.

    Args:
        runner: model whose weights are replaced.
        tensors: description of each tensor that will arrive, by name.
        divided: see StoredWeights.

    Attributes:
        state: progress of the replacement.
        forms: name, shape and dtype of each tensor, in the order of `tensors`.

    Raises:
        InvalidRequest: the new weights do not fit the model.
    """

    def __init__(
        self, runner: ModelRunner, tensors: Mapping[str, ArrivingTensor], *, divided: DividedModel | None = None
    ) -> None:
        self._runner = runner
        self.state = ReplacementState.CHECKED
        _check_can_be_replaced(runner)
        whole = _whole(runner, divided)
        try:
            described = described_tensors(whole.config, tensors)
            given = {name: [*whole.part_of(tensors_of_name)] for name, tensors_of_name in described.items()}
            pairs = paired(runner.slots(), _by_name(given))
        except ModelLoadError as error:
            raise InvalidRequest(one_line(str(error)), param="names") from error
        slots = {tensor.name: slot for slot, tensor in pairs}
        self._pairs = {
            name: [(slots[tensor.name], tensor) for tensor in tensors_of_name]
            for name, tensors_of_name in given.items()
        }
        self._tensors = dict(tensors)
        self.forms = [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]

    def put(self, name: str, values: Values) -> None:
        """Write a received tensor into its loading slots. Call this method in the computing thread.

        Args:
            name: name of the tensor.
            values: values of the tensor. They are not referenced after the call.
        """
        self._runner.check_open()  # Other code may already use the memory of a closed model.
        tensor = self._tensors.pop(name)
        self.state = ReplacementState.BEGUN
        tensor.values = values
        for pair in self._pairs[name]:
            fill_slot(pair)
        tensor.values = None
        if not self._tensors:
            self.state = ReplacementState.WHOLE


def _check_can_be_replaced(runner: ModelRunner) -> None:
    if runner.why_fixed is not None:
        raise InvalidRequest(f"the weights of this model cannot be replaced: {runner.why_fixed}")


def _whole(runner: ModelRunner, divided: DividedModel | None) -> DividedModel:
    return DividedModel(runner.config, lambda tensors: tensors) if divided is None else divided


def _like(config: ModelConfig, path: Path, context_tokens: int | None) -> Checkpoint:
    checkpoint = open_checkpoint(path, context_tokens=context_tokens, uses_further_layers=True)
    try:
        check_same_model(config, checkpoint.config)
    except ModelLoadError as error:
        raise ModelLoadError(f"cannot load {path}: {error}") from error
    return checkpoint


def _by_name(given: Mapping[str, Sequence[StoredTensor]]) -> list[StoredTensor]:
    return [tensor for tensors_of_name in given.values() for tensor in tensors_of_name]
