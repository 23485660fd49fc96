"""Flags of vLLM command lines that trioserve does not have.

A flag without an effect in trioserve is accepted and ignored. A flag with another name in trioserve is renamed. Any
other flag or value is refused, with the reason and advice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from trioserve.contracts.errors import StartupError

__all__ = ["FLAGS", "SWITCHES", "without_vllm_flags"]

SWITCHES = frozenset(
    {
        "--trust-remote-code",  # trioserve never runs code of a checkpoint.
        "--disable-log-requests",  # trioserve never logs prompts.
        "--no-enable-log-requests",
        "--disable-log-stats",
        "--enable-chunked-prefill",  # Chunked prefill is always on.
        "--enable-sleep-mode",  # Every engine supports sleep mode.
        "--enable-request-id-headers",  # Every response has the header x-request-id.
        "--enable-server-load-tracking",  # GET /load always works.
        "--enable-prompt-tokens-details",  # The usage in a response always contains cached_tokens.
        "--enable-force-include-usage",
        "--disable-fastapi-docs",
        "--disable-frontend-multiprocessing",  # Front end and engine always run in one process.
        "--disable-uvicorn-access-log",
        "--async-scheduling",
        "--no-async-scheduling",
        "--disable-cascade-attn",
        "--disable-hybrid-kv-cache-manager",
        "--use-tqdm-on-load",
        "--no-use-tqdm-on-load",
    }
)
"""Flags without a value that are accepted and change nothing."""

ANY = None
ONE_DEVICE = "start a server for each replica, and `trioserve route` in front of them"
DETECTED = "it is detected from the model: leave the flag out"
CONFIG_COUNTS = "config.json of the checkpoint is used as it is: change a copy of it"


class Flag(NamedTuple):
    """A flag of vLLM with a value.

    Attributes:
        accepted: values that are accepted and ignored. ANY accepts all values.
        advice: why all other values are refused, and what to do instead.
    """

    accepted: tuple[str, ...] | None
    advice: str = ""


FLAGS = {
    # These flags change the speed or the memory of something that trioserve does not have. So all values are ignored.
    "--swap-space": Flag(ANY),
    "--max-seq-len-to-capture": Flag(ANY),
    "--compilation-config": Flag(ANY),
    "--attention-backend": Flag(ANY),
    "--mm-encoder-attn-backend": Flag(ANY),
    "--guided-decoding-backend": Flag(ANY),
    "--structured-outputs-config": Flag(ANY),
    "--max-log-len": Flag(ANY),
    "--uvicorn-log-level": Flag(ANY),
    "--max-parallel-loading-workers": Flag(ANY),
    "--max-num-partial-prefills": Flag(ANY),
    "--max-long-partial-prefills": Flag(ANY),
    "--long-prefill-token-threshold": Flag(ANY),
    "--mm-processor-cache-gb": Flag(ANY),
    "--prefix-caching-hash-algo": Flag(ANY),
    "--scheduling-policy": Flag(("fcfs", "priority"), "priorities always count, and equals keep their order"),
    # These flags are accepted only with values that match the behaviour of trioserve.
    "--num-scheduler-steps": Flag(("1",), "there are no multi-step schedules: leave the flag out"),
    "--data-parallel-size": Flag(("1",), ONE_DEVICE),
    "--data-parallel-backend": Flag(("mp",), ONE_DEVICE),
    "--api-server-count": Flag(("1",), "one process serves all connections: leave the flag out"),
    "--load-format": Flag(("auto", "safetensors", "gguf"), f"the format of a checkpoint: {DETECTED}"),
    "--tokenizer-mode": Flag(("auto", "hf"), f"the kind of a tokenizer: {DETECTED}"),
    "--config-format": Flag(("auto", "hf"), f"the format of the configuration: {DETECTED}"),
    "--chat-template-content-format": Flag(("auto", "string", "openai"), DETECTED),
    "--task": Flag(("auto", "generate", "embed", "embedding", "score", "classify"), DETECTED),
    "--runner": Flag(("auto", "generate", "pooling"), DETECTED),
    "--convert": Flag(("auto", "none", "embed"), DETECTED),
    "--response-role": Flag(("assistant",), "every response has the role assistant: leave the flag out"),
    "--cpu-offload-gb": Flag(("0",), "weights stay on the device that uses them: use a smaller or a quantized model"),
    # These flags are refused with any value.
    "--hf-token": Flag((), "set the environment variable HF_TOKEN, which other users of the machine cannot read"),
    "--hf-overrides": Flag((), CONFIG_COUNTS),
    "--rope-scaling": Flag((), CONFIG_COUNTS),
    "--rope-theta": Flag((), CONFIG_COUNTS),
    "--mm-processor-kwargs": Flag((), "images are prepared as the checkpoint's files say: leave the flag out"),
    "--allowed-local-media-path": Flag((), "requests cannot read the server's files: send images as data URLs"),
    "--tool-parser-plugin": Flag((), "parsers are part of trioserve: name a family with --tool-call-parser"),
    "--middleware": Flag((), "the server runs no code of yours: put a proxy in front, or mount its ASGI app in yours"),
    "--logits-processors": Flag((), "the server runs no code of yours: use logit_bias or structured output"),
}
"""Flags with a value."""

REFUSED_SWITCHES = {
    "--no-enable-chunked-prefill": "prompts are always computed in chunks: leave the flag out",
    "--fully-sharded-loras": "adapters are split over ranks like the model: leave the flag out",
    "--enable-log-requests": "prompts are never logged: use --log-level debug for a line about each request",
    "--return-tokens-as-token-ids": "set return_token_ids in a request: leave the flag out",
}

CHECKPOINT_QUANTIZATIONS = ("awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "mxfp4", "gguf")


def _gibibytes(value: str) -> str:
    units = {"k": 10, "m": 20, "g": 30, "t": 40}
    scale = units.get(value[-1:].lower(), 0)
    try:
        byte_count = float(value[:-1] if scale else value) * (2**scale if scale else 1)
    except ValueError:
        raise StartupError(
            f"--kv-cache-memory-bytes is {value!r}: write bytes such as 4294967296 or 4G, or --kv-cache-memory GIB"
        ) from None
    return f"{byte_count / 2**30:g}"


def _quantization(value: str) -> str:
    # vLLM users name the quantization method of a checkpoint. trioserve reads the method from the checkpoint's files.
    return "auto" if value.lower() in CHECKPOINT_QUANTIZATIONS else value


REWRITTEN: dict[str, tuple[str, Callable[[str], str]]] = {
    "--kv-cache-memory-bytes": ("--kv-cache-memory", _gibibytes),
    "--quantization": ("--quantization", _quantization),
    "-q": ("--quantization", _quantization),
    "-tp": ("--tensor-parallel-size", str),
    "-pp": ("--pipeline-parallel-size", str),
}


def without_vllm_flags(arguments: Sequence[str]) -> list[str]:
    """Translate a command line that may have been written for vLLM.

    Flags may be spelled with `_` instead of `-`, as vLLM allows.

    Args:
        arguments: arguments of the command line.

    Returns:
        The arguments that are options of trioserve.

    Raises:
        StartupError: a flag or its value is refused. The message says what to do instead.
    """
    kept: list[str] = []
    values = iter(arguments)
    for argument in values:
        name, equals, value = argument.partition("=")
        if argument.startswith("--"):
            name = name.replace("_", "-")
        elif name not in REWRITTEN:
            kept.append(argument)
            continue
        if name in REFUSED_SWITCHES:
            raise StartupError(f"{name} cannot be honoured: {REFUSED_SWITCHES[name]}")
        if name in FLAGS or name in REWRITTEN:
            given = value if equals else next(values, None)
            if given is None:
                raise StartupError(f"{name} has no value")
            if name in REWRITTEN:
                ours, convert = REWRITTEN[name]
                kept += [ours, convert(given)]
            else:
                _check(name, given)
        elif name not in SWITCHES:
            kept.append(name + equals + value)
    return kept


def _check(name: str, value: str) -> None:
    accepted, advice = FLAGS[name]
    if accepted == ():
        raise StartupError(f"{name} cannot be honoured: {advice}")
    if accepted is not ANY and value not in accepted:
        raise StartupError(f"{name} is {value!r}, and only {', '.join(accepted)} can be honoured: {advice}")
