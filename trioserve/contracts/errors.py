"""All exceptions. The type says whose fault the error is. The message says what was received and what is allowed.

The index of errors in the documents has the first paragraph and the remedy of each docstring.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = [
    "AdapterRefused",
    "AlreadyEnded",
    "ContextTooLong",
    "DeadlinePassed",
    "DiskFull",
    "Draining",
    "EndpointLost",
    "EngineFault",
    "EngineReopening",
    "GpuLost",
    "InvalidRequest",
    "ModelLoadError",
    "NoEndpoint",
    "Overloaded",
    "QueueWaitOver",
    "RankLost",
    "RequestAborted",
    "RequestFailed",
    "RequestPoisoned",
    "ResumeMismatch",
    "StartupError",
    "StepOverdue",
    "StoreFault",
    "StoreFull",
    "TrioserveError",
    "UnknownModel",
    "WeightsLost",
    "WrongLoop",
    "is_library_panic",
    "is_request_fault",
    "panics_become_failures",
]


class TrioserveError(Exception):
    """Base class of all exceptions that trioserve raises on purpose.

    Remedy: catch it where any error of trioserve is handled alike.
    """


# --- errors that the caller causes ---------------------------------------------------------------------------------


class InvalidRequest(TrioserveError):
    """The request cannot be served in this form.

    Remedy: correct the field that the message names. The same request fails again.

    Args:
        message: What was received, what is allowed and what to do.
        param: Name of the wrong field, in the caller's spelling. None if no single field is wrong.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextTooLong(InvalidRequest):
    """The prompt, or prompt and response together, do not fit the model's context.

    The message begins like OpenAI's message, "This model's maximum context length is". Clients search for this text to
    know that they must shorten the request.

    Remedy: shorten the prompt or lower `max_tokens`, or serve with a higher `--max-model-len`.
    """


class ResumeMismatch(InvalidRequest):
    """A response cannot resume because the server computes another prompt for the request.

    One cause is a chat template that prints today's date.

    Remedy: send the request again without `resume`.
    """


class UnknownModel(InvalidRequest):
    """The request names a model that this server does not serve.

    Remedy: use a name that `/v1/models` lists.
    """


class AdapterRefused(InvalidRequest):
    """A LoRA adapter cannot be loaded or unloaded as requested.

    Remedy: correct the name or the path of the adapter, or unload another adapter first.

    Args:
        message: What was received, what is allowed and what to do.
        reason: Short machine-readable code.
        param: Name of the wrong field. None if no single field is wrong.
    """

    def __init__(self, message: str, *, reason: str, param: str | None = "lora_name") -> None:
        super().__init__(message, param=param)
        self.reason = reason


class AlreadyEnded(InvalidRequest):
    """A request stream was used again after its scope was left.

    Remedy: read the stream inside of its scope, or make a new request.
    """


class WrongLoop(TrioserveError, RuntimeError):
    """A call came from outside of the loop that owns the object.

    Examples: from an asyncio task, from another thread or another Trio run, without a running loop, or from a forked
    child of the process that opened the engine. The message says what to do.

    Remedy: call from the loop that opened the engine, or use `trioserve.asyncio` in an asyncio program.
    """


class StartupError(TrioserveError):
    """The server cannot start as configured: a port is in use, or a flag is out of range. Printed as one sentence,
    without a traceback.

    Remedy: correct the option that the message names, or install what it says.
    """


class ModelLoadError(StartupError):
    """The model cannot be read: wrong path, missing weights, damaged file or unknown architecture.

    Remedy: check the path and the files of the model. `trioserve models --check` reads their headers.
    """


# --- errors that the environment causes: load, disk, network, other servers ----------------------------------------


class Overloaded(TrioserveError):
    """A request was refused because a limit is reached. The server stores nothing for it.

    Remedy: try again after `retry_after_seconds`, raise the limit, or add a server.

    Args:
        message: The limit, its value, and what to do.
        reason: Short machine-readable code.
        retry_after_seconds: Seconds after which a retry may succeed.
    """

    def __init__(self, message: str, *, reason: str, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after_seconds = retry_after_seconds


class Draining(Overloaded):
    """A request was refused because the server drains. Another server may accept it.

    Remedy: send the request to another server.
    """


class StepOverdue(Overloaded):
    """A request was refused because the engine's current step takes too long, and its end cannot be predicted.

    Remedy: send the request to another server. If no step ends, restart this one.
    """


class EngineReopening(Overloaded):
    """A request was refused because the engine failed and is being restarted.

    Remedy: try again after `retry_after_seconds`.
    """


class NoEndpoint(Overloaded):
    """A request was refused because no endpoint of its model accepts requests now.

    Remedy: try again after `retry_after_seconds`, and check the endpoints with `trioserve endpoints`.
    """


class QueueWaitOver(TrioserveError):
    """The request's queue deadline passed. It was not sent to an endpoint.

    Remedy: try again later, or allow more time with `queue_timeout`.
    """


class DeadlinePassed(TrioserveError):
    """A deadline of the request passed before its results were complete.

    Remedy: allow more time, or ask for fewer tokens.
    """


class RequestAborted(TrioserveError):
    """The request was aborted by its id.

    Remedy: send the request again if its response is still wanted.
    """


class WeightsLost(TrioserveError):
    """New weights arrived only in part, or the executor restarted while they arrived.

    The message says which weights are loaded now, and what to do.

    Remedy: update the weights again.
    """


class StoreFull(TrioserveError):
    """An object cannot be stored: a limit is reached, or the disk is full. No part of the object was stored.

    Remedy: delete stored objects, or raise `--store-max-bytes` or `--store-max-objects`.
    """


class DiskFull(StoreFull):
    """The store's disk is full. Other programs may free space later, without any request to the server.

    Remedy: free space on the disk of `--data-dir`.
    """


class EndpointLost(TrioserveError):
    """The endpoint failed while it served this request, and no other endpoint could resume it.

    Remedy: send the request again.
    """


class RequestPoisoned(EndpointLost):
    """Several endpoints in a row, or one engine several times, broke while serving this request. The request is not
    retried.

    Remedy: do not send the request again. Report it with the logs of the servers.
    """


# --- errors that this program causes --------------------------------------------------------------------------------


class RequestFailed(TrioserveError):
    """The engine could not continue this one request. Other requests are not affected.

    Remedy: change the request. If it is valid, report it with the log of the server.
    """


class StoreFault(TrioserveError):
    """Stored content could not be read or written. A failed write changes nothing in the store.

    Remedy: check the disk of `--data-dir`.
    """


class RankLost(TrioserveError):
    """A rank has ended, hangs, or returned results that differ from those of the other ranks.

    Remedy: read the log of the rank that the message names. The engine reopens by itself, `engine_restarts` times.
    """


class GpuLost(TrioserveError):
    """The GPU reported an error, such as an illegal address, after which this process can no longer use it.

    Remedy: restart the server, whose new process can use the GPU again. If it happens again, read the kernel's log
    (`dmesg`) for the GPU's Xid error, and report it with the log of the server.
    """


class EngineFault(TrioserveError):
    """The engine itself failed. The error leaves the engine's own task and ends every request with an error.

    Remedy: open the engine again, or restart the server. Report it with the log.
    """


# --- errors in libraries --------------------------------------------------------------------------------------------


def is_library_panic(error: BaseException) -> bool:
    """Return True for a panic in a library's Rust code (tokenizers, llguidance, safetensors).

    PyO3 derives its PanicException from BaseException, so `except Exception` does not catch it. Each library has its
    own PanicException class, and no library exports this class.

    Args:
        error: The exception that was caught.
    """
    return type(error).__name__ == "PanicException" and not isinstance(error, Exception)


def is_request_fault(error: BaseException) -> bool:
    """Return True for an error that fails one request: an Exception or a panic, but no cancellation and no Ctrl-C.

    Args:
        error: The exception that was caught.
    """
    return isinstance(error, Exception) or is_library_panic(error)


@contextmanager
def panics_become_failures() -> Iterator[None]:
    """Raise RequestFailed if a library's Rust code panics, so that the panic fails only one request.

    Raises:
        RequestFailed: a library panicked.
    """
    try:
        yield
    except BaseException as error:
        if not is_library_panic(error):
            raise
        raise RequestFailed(
            f"a library of the server broke on this request ({str(error)[:200]}): change its text or schema"
        ) from error
