"""Parser of command lines, and groups of options: headings for the help text, and the options of smaller commands.

The parser suggests the right spelling of commands and flags.

`without_vllm_flags` handles flags of vLLM command lines that trioserve does not have. A flag without an effect in
trioserve is accepted and ignored. A flag with another name in trioserve is renamed. Any other flag or value is refused,
with the reason and advice.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

from trioserve.config import Config
from trioserve.contracts.arguments import closest_name
from trioserve.contracts.errors import StartupError
from trioserve.options.option import options_of

__all__ = [
    "CHECK_OPTIONS",
    "FLAGS",
    "GROUPS",
    "PLACED_OPTIONS",
    "SWITCHES",
    "TERMINAL_OPTIONS",
    "Parser",
    "without_vllm_flags",
]


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


GROUPS = {
    "model": _words(
        "model tokenizer revision chat_template control_tokens_in_text generation_config override_generation_config "
        "max_model_len dtype limit_mm_per_prompt image_decode_timeout max_audio_seconds "
        "audio_decode_timeout allowed_media_domains "
        "quantization tool_call_parser tool_call_leniency reasoning_parser enable_auto_tool_choice"
    ),
    "several models": _words(
        "host_model models_dir models_memory model_keep_alive model_turn max_model_loads model_load_timeout"
    ),
    "pictures": _words("max_image_pixels max_image_steps max_images"),
    "computing": _words(
        "device threads cpu_kernels gpu_kernels enforce_eager "
        "batch_invariant overlap_steps speculative_ngram speculative_model speculative_tokens "
        "speculative_quantization speculative_config"
    ),
    "ranks": _words(
        "tensor_parallel_size pipeline_parallel_size enable_expert_parallel distributed_executor_backend nnodes "
        "node_rank master_addr master_port ranks_key headless"
    ),
    "memory and batches": _words(
        "kv_cache_memory kv_cache_dtype gpu_memory_utilization block_size max_num_seqs max_num_batched_tokens "
        "wide_prompt_stretch enable_prefix_caching session_retention session_kv_share cold_turn_seconds "
        "session_prefetch"
    ),
    "adapters": _words(
        "enable_lora lora_modules max_loras max_cpu_loras max_lora_rank max_lora_graph_rank "
        "allow_runtime_lora_updating allowed_lora_path"
    ),
    "server": _words(
        "host port ui uds root_path served_model_name cors_origin allowed_host frontend max_connections "
        "max_connections_per_address max_body_bytes body_timeout max_response_bytes max_responses_bytes stall_timeout "
        "vanished_timeout keep_alive_timeout keep_alive_comments keep_alive_json ping_interval ping_timeout "
        "drain_timeout drain_delay require_model log_level"
    ),
    "keys and TLS": _words(
        "api_key admin_api_key gateway_api_key priority_min share_prefix_cache metrics_need_key load_needs_key "
        "allow_operator_without_key trust_request_chat_template tenant_header "
        "ssl_certfile ssl_keyfile ssl_ca_certs ssl_client_certs"
    ),
    "queue and deadlines": _words(
        "max_queued_requests max_queued_tokens max_queue_wait queue_timeout ttft_timeout request_timeout "
        "max_queue_timeout max_ttft_timeout max_request_timeout"
    ),
    "faults": _words("step_timeout engine_restarts seed"),
    "what outlives a request": _words(
        "data_dir store_max_bytes store_max_objects store_ttl max_background_responses background_timeout max_batches "
        "responses_connection_timeout responses_connection_max_bytes "
        "batch_concurrency detach_timeout_max max_detached_streams router_grace max_router_streams "
        "session_idle_seconds"
    ),
    "KV between engines": _words("kv_events kv_transfer_config role kv_hold_timeout kv_load_timeout kv_held_share"),
    "routing": _words(
        "endpoint prefill_endpoint decode_endpoint split_min_tokens endpoints_file endpoints_dns endpoints_kubernetes "
        "endpoints_ray ray_address endpoint_api_key endpoint_ca_certs model_alias policy session_header "
        "endpoint_max_requests max_request_sequences endpoint_max_waiting lease_until max_continuation_bytes "
        "router_peers router_name router_processes health_interval continuations_per_second retry_share "
        "retries_per_second max_request_attempts hang_timeout heartbeat_interval silence_timeout "
        "stalled_timeout move_timeout load_interval"
    ),
}

TERMINAL_OPTIONS = frozenset(
    {*GROUPS["model"], *GROUPS["computing"], *GROUPS["memory and batches"]}
    - {"tool_call_parser", "tool_call_leniency", "reasoning_parser", "enable_auto_tool_choice"}
    | {"tensor_parallel_size", "pipeline_parallel_size", "enable_expert_parallel"}
)

CHECK_OPTIONS = frozenset(
    _words(
        "revision dtype quantization cpu_kernels block_size kv_cache_dtype kv_cache_memory max_model_len max_num_seqs"
    )
)
"""Options of `models --check`: those on which the memory of a model on a CPU depends."""

PLACED_OPTIONS = frozenset(
    options_of(Config).keys()
    - {*GROUPS["routing"], "host", "port", "uds", "root_path", "ui", "profile"}
    - {"distributed_executor_backend", "nnodes", "node_rank", "master_addr", "master_port", "ranks_key", "headless"}
)
"""Options of `serve` for an engine that Ray places.

Options for the address and for several nodes are missing: Ray chooses the address, and the engine runs on one node.
"""


CHOICE = re.compile(r"argument (?P<name>\S+): invalid choice: '(?P<written>[^']*)' \(choose from (?P<known>.*)\)")


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one sentence with a suggestion. It refuses abbreviated flags.

    Abbreviations are refused because a new option could change their meaning, or make them ambiguous.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs["allow_abbrev"] = False
        super().__init__(*args, **kwargs)

    def parse_known_args(  # type: ignore[override]  # argparse has overloads for namespaces of other types
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse arguments. Unknown arguments are refused, while argparse returns them.

        Args:
            args: arguments without the program's name. None uses the arguments of the process.
            namespace: receives the values. None for a new namespace.

        Raises:
            StartupError: the command does not accept one of the arguments.
        """
        found, unknown = super().parse_known_args(args, namespace)
        if unknown and getattr(found, "command", None):
            _refuse(self, found.command, unknown)
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """Print an error and exit with code 2, as argparse does.

        Args:
            message: message from argparse.
        """
        found = CHOICE.fullmatch(message)
        if found is not None:
            known = [name.strip("'\" ") for name in found["known"].split(",")]
            what = "no command" if found["name"] == "COMMAND" else f"no {found['name']}"
            closest = closest_name(found["written"], known)
            hint = f"did you mean {closest}?" if closest else f"there are: {', '.join(known)}"
            message = f"{found['written']} is {what}: {hint}"
        self.exit(2, f"trioserve: {message}\n")


def _refuse(parser: argparse.ArgumentParser, command: str, unknown: Sequence[str]) -> NoReturn:
    """Raise StartupError for the first unknown flag, or for all unknown words if none of them is a flag."""
    flag = next((word for word in unknown if word.startswith("-")), None)
    if flag is None:
        raise StartupError(f"{command} does not accept {' '.join(unknown)}: see `trioserve {command} --help`")
    name = flag.partition("=")[0]
    closest = closest_name(name, _flags(parser, command))
    hint = f": did you mean {closest}?" if closest else f"; `trioserve {command} --help` lists them"
    raise StartupError(f"{name} is not an option of {command}{hint}")


def _flags(parser: argparse.ArgumentParser, command: str) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for own in action.choices[command]._actions:
                yield from (flag for flag in own.option_strings if flag.startswith("--"))


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
    # The server ignores all values of these flags, because they tune parts that trioserve does not have.
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
    # The server accepts these flags only with values that match its behaviour.
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
    # The server refuses these flags with any value.
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
