"""Flags of command lines for vLLM that are no options here: what changes nothing is taken, the rest refused by name."""

from __future__ import annotations

from collections.abc import Sequence

from trioserve.contracts.errors import StartupError

__all__ = ["without_vllm_flags"]

ONE_DEVICE = "one model is computed by one device here: start a server for each device, and `route` before them"

TAKEN = frozenset(
    {
        "--trust-remote-code",  # nothing of a checkpoint is ever run
        "--disable-log-requests",  # no prompt is ever logged
        "--no-enable-log-requests",
        "--disable-log-stats",
        "--enable-chunked-prefill",  # always on
    }
)
"""Without a value, and without a meaning here."""

TAKEN_AT = {
    "--data-parallel-size": ("1", ONE_DEVICE),
    "--load-format": ("auto", "a checkpoint's format is found out: leave it out"),
    "--tokenizer-mode": ("auto", "a tokenizer's kind is found out: leave it out"),
}
"""With this one value, which changes nothing; what another would need is not there."""

REFUSED = {
    "--no-enable-chunked-prefill": "prompts are always computed in chunks: leave it out",
    "--fully-sharded-loras": ONE_DEVICE,
    "--mm-processor-kwargs": "images are prepared as the checkpoint's own files say: leave it out",
    "--allowed-local-media-path": "files of the server are not read for requests: leave it out",
    "--cpu-offload-gb": "weights stay where they are computed with: take a smaller or a quantized model",
    "--swap-space": "preempted requests are computed anew: leave it out, or keep KV in host memory with "
    """--kv-transfer-config '{"kv_connector": "host"}'""",
    "--hf-overrides": "a checkpoint's config.json counts as it is: change a copy of it",
    "--rope-scaling": "a checkpoint's config.json counts as it is: change a copy of it",
    "--chat-template-content-format": "it is found out from the template: leave it out",
    "--response-role": "a response is the assistant's: leave it out",
    "--enable-sleep-mode": "an engine does not sleep: stop it, and start it when it is needed",
    "--max-log-len": "no prompt is ever logged: leave it out",
    "--enable-log-requests": "no prompt is ever logged; --log-level debug tells of each request without it",
    "--disable-frontend-multiprocessing": "there is one process: leave it out",
    "--api-server-count": "there is one process: leave it out, or start several servers",
    "--tool-parser-plugin": "parsers are files of trioserve: name one of its families with --tool-call-parser",
    "--guided-decoding-backend": "there is one backend: leave it out",
    "--middleware": "no code of yours is loaded into the server: put a proxy before it",
    "--scheduling-policy": "priorities always count, and equals come in turn: leave it out",
}
"""By name, with the reason and what to do."""


def without_vllm_flags(arguments: Sequence[str]) -> list[str]:
    """The command line without what changes nothing here, and with - where vLLM takes _, too. Raises StartupError for
    a flag that cannot be honoured."""
    kept: list[str] = []
    values = iter(arguments)
    for argument in values:
        if not argument.startswith("--"):
            kept.append(argument)
            continue
        name, equals, value = argument.partition("=")
        name = name.replace("_", "-")
        if name in REFUSED:
            raise StartupError(f"{name} cannot be honoured: {REFUSED[name]}")
        if name in TAKEN_AT:
            allowed, reason = TAKEN_AT[name]
            given = value if equals else next(values, "")
            if given != allowed:
                raise StartupError(f"{name} is {given!r}, and only {allowed} can be honoured: {reason}")
        elif name not in TAKEN:
            kept.append(name + equals + value)
    return kept
