"""Computes IterativePlans with the components of a diffusers directory.

A denoising step is one forward pass for all requests whose latents and inputs have equal shapes. Their timesteps,
numbers of steps, solvers and guidance may differ. Guidance adds a second row for a request. A slot holds the complete
state of its request, so moving the slot's content moves the request.

In a pass over several rows, the bits of a row do not depend on the other rows. Matrix products, convolutions and norms
choose the order of their sums by the size of their input. exp and sin compute the last numbers of a tensor with
different code than the rest. All these functions are called once for each row. Elementwise sums and products, and
copies, round equally at every position of a tensor. They are called once for all rows, so the pass is almost as fast as
an ordinary pass over all rows.

This module lists the functions of both groups. If the network calls a function in neither list, UnknownFunction ends
the pass.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import torch
from torch.overrides import TorchFunctionMode

from trioserve.contracts.events import IterativePhase
from trioserve.contracts.image_generation import ImageTask, IterativePlan, IterativeResult, LatentWork
from trioserve.contracts.step import IsAbandoned, never_abandoned
from trioserve.model.device import default_thread_count, lost_gpu, pick_device, set_torch_threads, takes_every_cpu
from trioserve.model.diffusion.components import Autoencoder, Beginning, image_of, load_parts, make_family
from trioserve.model.diffusion.directory import SAMPLER_NAMES, ImageDirectory, ImageModelSettings, samplers_of
from trioserve.model.diffusion.family import BadTask, Family, Inputs, LatentState, Parts, SolverStep
from trioserve.model.diffusion.solvers import Solver
from trioserve.model.number_formats import Dtype
from trioserve.model.torch_step.formats import TORCH_DTYPES

__all__ = ["Abandoned", "Abandoning", "DiffusionRunner", "RowByRow", "UnknownFunction", "step_noise"]


# In bytes. torch aligns its allocations to 64 bytes, and a product may use different code at an unaligned address.
ALIGNMENT = 64

FIRST_HOLDS_ROWS = """
__pow__ conv1d conv2d cos gelu group_norm layer_norm linear mean pow rms_norm rsqrt sigmoid silu sin softmax std tanh
var
"""
TWO_HOLD_ROWS = "__matmul__ bmm matmul"
THREE_HOLD_ROWS = "baddbmm scaled_dot_product_attention"
BY_ROW = {
    name: count
    for count, names in enumerate((FIRST_HOLDS_ROWS, TWO_HOLD_ROWS, THREE_HOLD_ROWS), start=1)
    for name in names.split()
}
HOLD_ROWS = frozenset(("attn_mask", "input", "key", "query", "value"))  # keyword arguments whose tensors have rows

EXACT = """
__add__ __eq__ __ge__ __gt__ __iadd__ __imul__ __isub__ __itruediv__ __le__ __lt__ __mul__ __ne__ __neg__ __radd__
__rmul__ __rsub__ __rtruediv__ __sub__ __truediv__ abs add add_ clamp div div_ mul mul_ neg rsub sqrt sub sub_ where
bfloat16 bool cpu double float half int long to type type_as
"""
MOVES = """
__getitem__ __setitem__ cat chunk clone concat contiguous detach dropout einsum embedding expand expand_as flatten
interpolate narrow pad permute pixel_shuffle repeat repeat_interleave reshape select split split_with_sizes squeeze
stack swapaxes t transpose unbind unflatten unsqueeze view view_as
"""
LOOKS = """
__get__ __len__ __set__ dim element_size is_complex is_contiguous is_floating_point ndimension numel size
storage_offset stride
"""
# Functions that create only tensors without rows, such as positions, frequencies and masks. Every pass creates equal
# tensors.
MAKES = "__rpow__ arange as_tensor empty exp full new_ones new_zeros ones outer tensor zeros zeros_like ones_like"
AS_IT_IS = frozenset(" ".join((EXACT, MOVES, LOOKS, MAKES)).split())


class UnknownFunction(Exception):
    """The network called a function that is in neither list, so its result may depend on the other rows."""


class RowByRow(TorchFunctionMode):
    """Context in which the bits of a row do not depend on other rows: `with RowByRow(rows): network(...)`.

    Args:
        rows: number of rows. The first dimension of every tensor is a multiple of this number, and the entries of one
            row are adjacent.
        apart: modules whose output is equal for all rows, and whose input tensors have no rows.
    """

    def __init__(self, rows: int, apart: Iterable[torch.nn.Module] = ()) -> None:
        super().__init__()
        self._rows = rows
        self._apart = tuple(apart)
        self._depth = 0  # number of nested calls of modules in `apart`
        self._handles: list[Any] = []

    def __enter__(self) -> Any:
        for module in self._apart:
            self._handles.append(module.register_forward_pre_hook(self._enter_apart))
            self._handles.append(module.register_forward_hook(self._leave_apart, always_call=True))
        return super().__enter__()  # type: ignore[no-untyped-call]  # torch has no types here

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]  # nor here

    def _enter_apart(self, *_: object) -> None:
        self._depth += 1

    def _leave_apart(self, *_: object) -> None:
        self._depth -= 1

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if self._depth or name in AS_IT_IS:
            self._check(name, args, kwargs)
            return function(*args, **kwargs)
        count = BY_ROW.get(name)
        if count is None:
            raise UnknownFunction(name)
        return self._by_row(function, count, args, kwargs)

    def _check(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise UnknownFunction for arguments with which a function of AS_IT_IS does more than copy."""
        if self._depth == 0 and (
            (name == "einsum" and len(args) > 2)
            or (name == "interpolate" and kwargs.get("mode", "nearest") not in ("nearest", "nearest-exact"))
        ):
            raise UnknownFunction(f"{name} that sums")

    def _by_row(self, function: Callable[..., Any], count: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        parts = [self._parts(argument) for argument in args[:count]]
        named = {
            key: self._parts(value)
            for key, value in kwargs.items()
            if key in HOLD_ROWS and isinstance(value, torch.Tensor)
        }
        if not parts and not named:
            raise UnknownFunction("a call without row tensors")
        rest = args[count:]
        if not named:
            return torch.cat([function(*mine, *rest, **kwargs) for mine in zip(*parts, strict=True)])
        results = []
        for row in range(self._rows):
            mine = {key: named[key][row] if key in named else value for key, value in kwargs.items()}
            results.append(function(*(part[row] for part in parts), *rest, **mine))
        return torch.cat(results)

    def _parts(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        if not isinstance(tensor, torch.Tensor) or tensor.dim() == 0 or tensor.shape[0] % self._rows:
            raise UnknownFunction(f"a call whose tensor does not have {self._rows} rows")
        parts = tensor.chunk(self._rows)
        apart_bytes = tensor.stride(0) * (tensor.shape[0] // self._rows) * tensor.element_size()
        if tensor.data_ptr() % ALIGNMENT == 0 and apart_bytes % ALIGNMENT == 0:
            return parts
        return [part if part.data_ptr() % ALIGNMENT == 0 else part.clone() for part in parts]


logger = logging.getLogger(__name__)

NAN_ADVICE = "use less guidance, another sampler, or serve the model with dtype float32"

Shapes = tuple[tuple[str, tuple[int, ...]], ...]


class Abandoned(Exception):
    """The step is abandoned, because all its requests have ended."""


class Abandoning:
    """Ends the forward pass of an abandoned step early, by raising Abandoned before the next block of a network.

    Args:
        networks: networks whose blocks get a hook.
    """

    def __init__(self, networks: Iterable[torch.nn.Module]) -> None:
        self._is_abandoned = never_abandoned
        for network in networks:
            for module in network.modules():
                if isinstance(module, torch.nn.ModuleList):
                    for block in filter(None, module):  # The list contains None for a missing attention block.
                        block.register_forward_pre_hook(self._look)

    def begin(self, is_abandoned: IsAbandoned) -> None:
        """Set the check for the step that starts now.

        Args:
            is_abandoned: returns True once the step is abandoned.
        """
        self._is_abandoned = is_abandoned

    def check(self) -> None:
        """Raise Abandoned if the step is abandoned."""
        if self._is_abandoned():
            raise Abandoned

    def _look(self, *_: object) -> None:
        self.check()


def step_noise(seed: int, step: int, latent: torch.Tensor) -> torch.Tensor:
    """Draw the normally distributed noise of one step. The CPU draws the noise, so it is equal for all devices.

    Args:
        seed: seed of the image.
        step: number of the denoising step.
        latent: gives shape and device of the result.

    Returns:
        float32, with the shape of `latent` and unit variance.
    """
    digest = hashlib.blake2b(f"{seed} {step}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    return torch.randn(latent.shape, generator=generator).to(latent.device)


class DiffusionRunner:
    """An IterativeExecutor for one image model. All methods are called in one thread.

    In float32, the bytes of an image do not depend on other requests (see row_by_row). In 16-bit formats, other
    requests may change an image slightly.

    Args:
        family: encodes prompts and calls the network.
        parts: loaded components.
        solvers: samplers by name.
        slot_count: number of latent slots, for running requests and for kept states.
        patch_side: latent pixels per side of one network token.
        fills_in: True for an inpainting network.

    Attributes:
        slots: state of the request in each slot. None for an empty slot.
        beginning: creates the first states.
        computes_rows_alone: True after the network called a function that row_by_row does not list.
        takes_every_cpu: True if computing uses all cores.
    """

    def __init__(
        self,
        family: Family,
        parts: Parts,
        solvers: dict[str, Solver],
        *,
        slot_count: int,
        patch_side: int = 1,
        fills_in: bool = False,
    ) -> None:
        self.family = family
        self._autoencoder = Autoencoder(parts["vae"])
        self._device, self._dtype = parts.device, parts.dtype
        self.beginning = Beginning(
            family,
            self._autoencoder,
            solvers,
            parts.device,
            parts.dtype,
            patch_side=patch_side,
            fills_in=fills_in,
        )
        self.slots: list[LatentState | None] = [None] * slot_count
        self._abandoning = Abandoning(parts.networks())
        self._is_row_by_row = parts.dtype is torch.float32
        self.computes_rows_alone = False
        self.device: str = parts.device.type
        self.takes_every_cpu = False

    @classmethod
    def load(
        cls,
        directory: ImageDirectory,
        settings: ImageModelSettings,
        *,
        check_tokenizer: Callable[[Any, Path], None],
        progress: Callable[[str], None] = lambda component: None,
    ) -> DiffusionRunner:
        """Load a model. Call this method in the thread that will compute.

        Args:
            directory: the diffusers directory.
            settings: dtype, device, threads and slots.
            check_tokenizer: see `load_parts`.
            progress: see `load_parts`.

        Raises:
            ModelLoadError: a file is missing, damaged or not supported.
            StartupError: the device is missing.
        """
        placing = settings.placing()
        device = pick_device(placing)
        set_torch_threads(placing)
        dtype = directory.pick_dtype(settings.dtype, device)
        place = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
        own, samplers = directory.scheduler["_class_name"], samplers_of(directory)
        if SAMPLER_NAMES.get(own) != samplers[0]:
            logger.warning(
                "images will differ, because the model's own scheduler is not supported scheduler=%s sampler=%s",
                own,
                samplers[0],
            )
        solvers = {name: Solver(name, directory.scheduler) for name in samplers}
        parts = load_parts(directory, place, TORCH_DTYPES[dtype], check_tokenizer, progress)
        runner = cls(
            make_family(directory, parts),
            parts,
            solvers,
            slot_count=settings.slot_count,
            patch_side=directory.pipeline.patch_side,
            fills_in=directory.fills_in,
        )
        runner.takes_every_cpu = takes_every_cpu(placing, device)
        return runner

    @property
    def dtype(self) -> Dtype:
        return next(name for name, kind in TORCH_DTYPES.items() if kind is self._dtype)

    @property
    def computed_by(self) -> str:
        return f"diffusers ({default_thread_count()} threads)" if self.device == "cpu" else "diffusers"

    def close(self) -> None:
        self.release_latents()

    def release_latents(self) -> None:
        """Free all latents. On a GPU, also free the memory that steps used for intermediate results."""
        self.slots = [None] * len(self.slots)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.inference_mode()
    @lost_gpu()
    def execute(self, plan: IterativePlan, is_abandoned: IsAbandoned = never_abandoned) -> IterativeResult | None:
        for slot in plan.freed:
            self.slots[slot] = None
        for move in plan.moves:
            assert self.slots[move.source] is not None, f"slot {move.source} is moved but empty"
            self.slots[move.target] = self.slots[move.source]
            self.slots[move.source] = None
        result = IterativeResult(outputs={}, partials={}, errors={})
        self._abandoning.begin(is_abandoned)
        try:
            if plan.phase is IterativePhase.ENCODE:
                self._encode(plan.works, result)
            elif plan.phase is IterativePhase.DENOISE:
                self._denoise(plan.works, result)
            else:
                self._decode(plan.works, result)
        except Abandoned:
            # Free the latents now: the next plan, which would free their slots, may arrive much later.
            for work in plan.works:
                self.slots[work.slot] = None
            return None
        finally:
            self._abandoning.begin(never_abandoned)
        return result

    def _encode(self, works: tuple[LatentWork, ...], result: IterativeResult) -> None:
        for work in works:
            self._abandoning.check()
            try:
                self.slots[work.slot] = self.beginning.begin(work.request)
            except BadTask as error:
                self.slots[work.slot] = None
                result.errors[work.request.id] = str(error)

    def _denoise(self, works: tuple[LatentWork, ...], result: IterativeResult) -> None:
        groups: dict[Shapes, list[tuple[LatentWork, LatentState]]] = {}
        for work in works:
            state = self._state(work, work.step)
            groups.setdefault(_shapes(state), []).append((work, state))
        for group in groups.values():
            self._abandoning.check()
            predictions = self._predict([state for _, state in group])
            stepped = [
                _stepped(state, predicted, work) for (work, state), predicted in zip(group, predictions, strict=True)
            ]
            # An infinite value would become NaN in the next step. The whole group is checked at once, because each
            # check waits for the GPU.
            are_numbers = torch.isfinite(torch.cat([after.latent for _, after in stepped])).flatten(1).all(1).tolist()
            for (work, _), (clean, after), is_number in zip(group, stepped, are_numbers, strict=True):
                if not is_number:
                    self.slots[work.slot] = None
                    done = f"step {work.step + 1} of {work.request.step_count}"
                    result.errors[work.request.id] = f"{done} gave NaN or infinite values: {NAN_ADVICE}"
                    continue
                self.slots[work.slot] = after
                if work.wants_partial:
                    self._abandoning.check()
                    result.partials[work.request.id] = image_of(self._autoencoder.decode(clean))

    def _predict(self, states: list[LatentState]) -> list[torch.Tensor]:
        """Call the network once for all rows of the states.

        Returns:
            For each state, float32 [its rows, channels, height, width].
        """
        latents: list[torch.Tensor] = []
        timesteps: list[float] = []
        rows: list[Inputs] = []
        for state in states:
            step = state.schedule.steps[state.steps_done]
            scaled = (state.latent * step.input_scale).to(self._dtype)
            for inputs in state.rows:
                latents.append(scaled)
                timesteps.append(step.timestep)
                rows.append(inputs)
        predicted = self._pass(latents, timesteps, rows)
        found: list[torch.Tensor] = []
        first = 0
        for state in states:
            found.append(predicted[first : first + len(state.rows)])
            first += len(state.rows)
        return found

    def _pass(self, latents: list[torch.Tensor], timesteps: list[float], rows: list[Inputs]) -> torch.Tensor:
        """Call the network once for all rows, or once for each row if a joint pass would change the result of a row.

        Args:
            latents: [1, channels, height, width] of each row, in the network's dtype.
            timesteps: one per row.
            rows: network inputs of each row.

        Returns:
            float32 [rows, channels, height, width].
        """
        times = torch.tensor(timesteps, dtype=torch.float32, device=self._device)
        if self._is_row_by_row and len(rows) > 1:
            if not self.computes_rows_alone:
                try:
                    with RowByRow(len(rows), self.family.apart):
                        return self.family.predict(torch.cat(latents), times, _joined(rows)).float()
                except UnknownFunction as error:
                    # One call for each row is slower, but then a row's result does not depend on other rows.
                    logger.warning("each row is computed alone, the network calls an unknown function=%s", error)
                    self.computes_rows_alone = True
            return torch.cat(
                [
                    self.family.predict(latent, times[row : row + 1].clone(), inputs).float()
                    for row, (latent, inputs) in enumerate(zip(latents, rows, strict=True))
                ]
            )
        return self.family.predict(torch.cat(latents), times, _joined(rows)).float()

    def _decode(self, works: tuple[LatentWork, ...], result: IterativeResult) -> None:
        for work in works:
            self._abandoning.check()
            state = self._state(work, work.request.step_count)
            values = self._autoencoder.decode(state.latent)
            if bool(torch.isfinite(values).all()):
                result.outputs[work.request.id] = image_of(values)
            else:
                result.errors[work.request.id] = f"decoding gave NaN or infinite values: {NAN_ADVICE}"
            self.slots[work.slot] = None

    def _state(self, work: LatentWork, steps_done: int) -> LatentState:
        state = self.slots[work.slot]
        assert state is not None, f"{work.request.id}: slot {work.slot} is empty"
        assert state.request_id == work.request.id, f"{work.request.id}: slot {work.slot} holds {state.request_id}"
        assert state.steps_done == steps_done, f"{work.request.id}: {state.steps_done} steps are done, not {steps_done}"
        return state


def _shapes(state: LatentState) -> Shapes:
    inputs = sorted((name, tuple(tensor.shape)) for name, tensor in state.rows[0].items())
    return (("latent", tuple(state.latent.shape)), *inputs)


def _joined(rows: list[Inputs]) -> Inputs:
    return {name: torch.cat([inputs[name] for inputs in rows]) for name in rows[0]}


def _stepped(state: LatentState, predicted: torch.Tensor, work: LatentWork) -> tuple[torch.Tensor, LatentState]:
    """Apply one denoising step to a state.

    Args:
        state: state before the step.
        predicted: output of the network, float32 [rows of the request, channels, height, width].
        work: the request and the number of the step.

    Returns:
        The predicted clean latent, for a partial image, and the state after the step.
    """
    schedule, latent = state.schedule, state.latent
    step: SolverStep = schedule.steps[state.steps_done]
    output = predicted[:1]
    if len(state.rows) > 1:
        assert isinstance(work.request.task, ImageTask)
        output = predicted[1:] + (output - predicted[1:]) * work.request.task.guidance
    clean = latent * step.clean_of_latent + output * step.clean_of_output
    if step.clean_limit is not None:
        clean = clean.clamp(-step.clean_limit, step.clean_limit)
    after = latent * step.next_of_latent + output * step.next_of_output + clean * step.next_of_clean
    for weight, earlier in zip(step.next_of_earlier, state.earlier, strict=False):
        after = after + earlier * weight
    if step.next_of_noise:
        after = after + step_noise(work.request.seed, work.step, latent) * step.next_of_noise
    original = state.original
    if original is not None:
        kept = original.latent
        if state.steps_done + 1 < len(schedule.steps):
            of_original, of_noise = schedule.noised[state.steps_done + 1]
            kept = kept * of_original + original.noise * of_noise
        after = kept * (1 - original.mask) + after * original.mask
    remembered = output if schedule.remembers_outputs else clean
    history = (remembered, *state.earlier)[: schedule.history_count]
    shown = clean if original is None else original.latent * (1 - original.mask) + clean * original.mask
    return shown, msgspec.structs.replace(state, steps_done=state.steps_done + 1, latent=after, earlier=history)
