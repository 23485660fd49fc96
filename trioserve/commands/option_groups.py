"""Parser of command lines, and groups of options: headings for the help text, and the options of smaller commands.

The parser suggests the right spelling of commands and flags.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from trioserve.config import Config
from trioserve.contracts.arguments import closest_name
from trioserve.contracts.errors import StartupError
from trioserve.options.option import options_of

__all__ = ["CHECK_OPTIONS", "GROUPS", "PLACED_OPTIONS", "Parser", "TERMINAL_OPTIONS"]


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


GROUPS = {
    "model": _words(
        "model tokenizer revision chat_template control_tokens_in_text generation_config override_generation_config "
        "max_model_len dtype limit_mm_per_prompt image_decode_timeout max_audio_seconds "
        "audio_decode_timeout allowed_media_domains "
        "quantization tool_call_parser tool_call_leniency reasoning_parser enable_auto_tool_choice"
    ),
    "several models": _words("host_model models_dir models_memory model_keep_alive model_turn max_model_loads"),
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
