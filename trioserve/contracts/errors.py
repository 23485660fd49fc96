"""All exceptions. The type says whose fault the error is. The message says what was received and what is allowed."""

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
    """Base class of all exceptions that trioserve raises on purpose."""


# --- the caller's fault ---------------------------------------------------------------------------------------------


class InvalidRequest(TrioserveError):
    """The request cannot be served in this form.

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
    """


class ResumeMismatch(InvalidRequest):
    """A response cannot resume because the server computes another prompt for the request.

    One cause is a chat template that prints today's date.
    """


class UnknownModel(InvalidRequest):
    """The request names a model that this server does not serve."""


class AdapterRefused(InvalidRequest):
    """A LoRA adapter cannot be loaded or unloaded as requested.

    Args:
        message: What was received, what is allowed and what to do.
        reason: Short machine-readable code.
        param: Name of the wrong field. None if no single field is wrong.
    """

    def __init__(self, message: str, *, reason: str, param: str | None = "lora_name") -> None:
        super().__init__(message, param=param)
        self.reason = reason


class AlreadyEnded(InvalidRequest):
    """A request stream was used again after its scope was left."""


class WrongLoop(TrioserveError, RuntimeError):
    """A call came from outside of the loop that owns the object.

    Examples: from an asyncio task, from another thread or another Trio run, without a running loop, or from a forked
    child of the process that opened the engine. The message says what to do.
    """


class StartupError(TrioserveError):
    """The server cannot start as configured: a port is in use, or a flag is out of range. Printed as one sentence,
    without a traceback.
    """


class ModelLoadError(StartupError):
    """The model cannot be read: wrong path, missing weights, damaged file or unknown architecture."""


# --- the fault of the environment: load, disk, network, other servers -----------------------------------------------


class Overloaded(TrioserveError):
    """A request was refused because a limit is reached. The server stores nothing for it.

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
    """A request was refused because the server drains. Another server may accept it."""


class StepOverdue(Overloaded):
    """A request was refused because the engine's current step takes too long, and its end cannot be predicted."""


class EngineReopening(Overloaded):
    """A request was refused because the engine failed and is being restarted."""


class NoEndpoint(Overloaded):
    """A request was refused because no endpoint of its model accepts requests now."""


class QueueWaitOver(TrioserveError):
    """The request's queue deadline passed. It was not sent to an endpoint."""


class DeadlinePassed(TrioserveError):
    """A deadline of the request passed before its results were complete."""


class RequestAborted(TrioserveError):
    """The request was aborted by its id."""


class WeightsLost(TrioserveError):
    """New weights arrived only in part, or the executor restarted while they arrived.

    The message says which weights are loaded now, and what to do.
    """


class StoreFull(TrioserveError):
    """An object cannot be stored: a limit is reached, or the disk is full. No part of the object was stored."""


class DiskFull(StoreFull):
    """The store's disk is full. Other programs may free space later, without any request to the server."""


class EndpointLost(TrioserveError):
    """The endpoint failed while it served this request, and no other endpoint could resume it."""


class RequestPoisoned(EndpointLost):
    """Several endpoints in a row, or one engine several times, broke while serving this request. The request is not
    retried.
    """


# --- our fault ------------------------------------------------------------------------------------------------------


class RequestFailed(TrioserveError):
    """The engine could not continue this one request. Other requests are not affected."""


class StoreFault(TrioserveError):
    """Stored content could not be read or written. A failed write changes nothing in the store."""


class RankLost(TrioserveError):
    """A rank has ended, hangs, or returned results that differ from those of the other ranks."""


class EngineFault(TrioserveError):
    """The engine itself failed. The error leaves the engine's own task and ends every request with an error."""


# --- faults in libraries --------------------------------------------------------------------------------------------


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
