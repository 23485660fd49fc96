"""New weights in the places of those that a model computes with: checked before anything is written, and then read and
put there part by part, so that nothing is there twice.

Where it ends halfway, the model has weights of both, and nobody may compute with it until a replacement was whole.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from trioserve.contracts.errors import InvalidRequest, ModelLoadError
from trioserve.contracts.weights import ReplacementState, SharedWeights
from trioserve.model.loading.arriving_tensor import ArrivingTensor
from trioserve.model.loading.checkpoint import Checkpoint, open_checkpoint
from trioserve.model.loading.described_tensors import check_same_model, described_tensors
from trioserve.model.loading.fields import one_line
from trioserve.model.loading.file_tensor import PLAIN_DTYPES, FileTensor
from trioserve.model.loading.read_ahead import weight_files
from trioserve.model.loading.safetensors import tensors_in_file
from trioserve.model.loading.stored_tensor import StoredTensor
from trioserve.model.model_config import ModelConfig
from trioserve.model.number_formats import Values
from trioserve.model.weights import fill_slot, fill_slots, paired

if TYPE_CHECKING:
    from trioserve.model.runner import ModelRunner

__all__ = ["SEGMENTS", "ArrivingWeights", "DividedModel", "StoredWeights"]


SEGMENTS = Path("/dev/shm")
"""Where Linux shows the segments of POSIX shared memory as files."""

NAME_CHARACTERS_MAX = 200


def shared_file(name: str) -> Path:
    """Return the file of a segment of shared memory, which need not exist.

    Args:
        name: of the segment.

    Raises:
        ModelLoadError: the name cannot be one of a segment.
    """
    if not name or len(name) > NAME_CHARACTERS_MAX or name != Path(name).name or not name.isprintable():
        raise ModelLoadError("a segment of shared memory is called by a plain name, without slashes")
    return SEGMENTS / name


def shared_tensors(name: str) -> dict[str, FileTensor]:
    """Read the tensors of a segment of shared memory, whose content is that of a safetensors file.

    Args:
        name: of the segment, into which another process of this machine has put weights.

    Returns:
        Tensors by their names in the segment.

    Raises:
        ModelLoadError: there is no such segment, or it holds something else.
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
        paths: files. One that does not exist is left out of the result.
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
    """A model of which others compute parts, too. config: of all of it. part_of: what of its tensors is computed
    here."""

    config: ModelConfig
    part_of: Callable[[Iterable[StoredTensor]], Iterable[StoredTensor]]


class StoredWeights:
    """Weights that lie in files, or in memory that is shared as one. state: how far they are in the model's places.
    checkpoint: the whole model, if they lie in files.

    What lies where is known from the headers, so a file that is written anew meanwhile would be read as another one.
    """

    def __init__(
        self,
        runner: ModelRunner,
        source: Path | SharedWeights,
        *,
        context_tokens: int | None = None,
        divided: DividedModel | None = None,
    ) -> None:
        """context_tokens: see open_checkpoint; as the model was opened. divided: None: all of it is here. Reads headers
        only. Raises InvalidRequest if they cannot take the place of those that are there."""
        self._runner = runner
        self.state = ReplacementState.CHECKED
        self.checkpoint: Checkpoint | None = None
        _check_can_be_replaced(runner)
        whole = _whole(runner, divided)
        self._param = "name" if isinstance(source, SharedWeights) else "model_path"
        try:
            files = [shared_file(source.name)] if isinstance(source, SharedWeights) else weight_files(source)
            identities = identities_of(files)  # before anything of them is believed
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
        """Raises InvalidRequest if the files are others by now."""
        try:
            self._check_are_the_same()
        except ModelLoadError as error:
            raise InvalidRequest(one_line(str(error)), param=self._param) from error

    def replace(self) -> None:
        """To be called once, where the model computes. Raises InvalidRequest, and has changed nothing, if the files are
        others by now; ModelLoadError if they have become others meanwhile, or cannot be read any more."""
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
        """Raises ModelLoadError."""
        found = identities_of(self._files)
        for path, identity in self._files.items():
            if path not in found or found[path] != identity:
                raise ModelLoadError(
                    f"cannot load {path}: it was {'written anew' if path in found else 'removed'} since the update "
                    "began. Leave weights alone until the update has ended, and put the next ones elsewhere"
                )


class ArrivingWeights:
    """Weights that come one after the other, each by its name. state: as of StoredWeights. forms: name, shape and type
    of each, in their order."""

    def __init__(
        self, runner: ModelRunner, tensors: Mapping[str, ArrivingTensor], *, divided: DividedModel | None = None
    ) -> None:
        """divided: see StoredWeights. Raises InvalidRequest if they cannot take the place of those that are there."""
        self._runner = runner
        self.state = ReplacementState.CHECKED
        _check_can_be_replaced(runner)
        whole = _whole(runner, divided)
        try:
            described = described_tensors(whole.config, tensors)
            given = {name: [*whole.part_of(of_one)] for name, of_one in described.items()}
            pairs = paired(runner.slots(), _by_name(given))
        except ModelLoadError as error:
            raise InvalidRequest(one_line(str(error)), param="names") from error
        slots = {tensor.name: slot for slot, tensor in pairs}
        self._pairs = {name: [(slots[tensor.name], tensor) for tensor in of_one] for name, of_one in given.items()}
        self._tensors = dict(tensors)
        self.forms = [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]

    def put(self, name: str, values: Values) -> None:
        """One has come: into its places, where the model computes. `values` are not kept."""
        self._runner.check_open()  # its memory is another's, once it is closed
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
    return [tensor for of_one in given.values() for tensor in of_one]
