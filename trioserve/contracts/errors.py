"""The whole exception tree. The type says whose fault it was; the message what came, what is allowed, what to do."""

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
    """Everything that trioserve raises on purpose."""


# --- the caller's ---------------------------------------------------------------------------------------------------


class InvalidRequest(TrioserveError):
    """The request cannot be served as it stands. `param` names the field at fault, in the caller's spelling."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextTooLong(InvalidRequest):
    """Prompt, or prompt and response together, do not fit the model's context. The message begins as OpenAI's does,
    "This model's maximum context length is": clients look for it, and send less then."""


class ResumeMismatch(InvalidRequest):
    """A response cannot be gone on with, since its prompt is another one here: a chat template that prints today's date
    does that."""


class UnknownModel(InvalidRequest):
    """The request names a model that is not served here."""


class AdapterRefused(InvalidRequest):
    """A LoRA adapter cannot be loaded or unloaded as was asked. `reason` is short and machine-readable."""

    def __init__(self, message: str, *, reason: str, param: str | None = "lora_name") -> None:
        super().__init__(message, param=param)
        self.reason = reason


class AlreadyEnded(InvalidRequest):
    """A request stream was used again after its scope was left."""


class WrongLoop(TrioserveError, RuntimeError):
    """Called outside of the loop that it belongs to: in an asyncio task, another thread or another run, where no loop
    runs, or in a forked child of the process that opened the engine. The message says what to do."""


class StartupError(TrioserveError):
    """The server cannot start as configured (a port in use, a flag out of range). One sentence, no traceback."""


class ModelLoadError(StartupError):
    """No model could be read from what was named: wrong path, no weights, a damaged file, an unknown architecture."""


# --- the world's ----------------------------------------------------------------------------------------------------


class Overloaded(TrioserveError):
    """Refused because a bound is reached; nothing is held. `reason` is short and machine-readable."""

    def __init__(self, message: str, *, reason: str, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after_seconds = retry_after_seconds


class Draining(Overloaded):
    """Refused because the server is leaving; another one may take the request."""


class StepOverdue(Overloaded):
    """Refused because the engine's step in flight is older than it may get: nobody can say when it ends."""


class EngineReopening(Overloaded):
    """Refused because the engine broke and is being opened anew."""


class NoEndpoint(Overloaded):
    """Refused because no endpoint that serves the model takes requests now."""


class QueueWaitOver(TrioserveError):
    """The request's own time to wait in the queue has passed; nothing was sent anywhere."""


class DeadlinePassed(TrioserveError):
    """A deadline of the request has passed before all of its results were there."""


class RequestAborted(TrioserveError):
    """Somebody has aborted the request by its id."""


class WeightsLost(TrioserveError):
    """New weights came only in part, or what computes was opened anew while they came. The message says which weights
    are there, and what to do."""


class StoreFull(TrioserveError):
    """There is no room for what was to be kept: a bound is reached, or the disk is full. Nothing of it was kept."""


class DiskFull(StoreFull):
    """The store's disk is full. There may be room again later, without anybody asking the server for it."""


class EndpointLost(TrioserveError):
    """The endpoint failed while it served this request, and no other could take it over."""


class RequestPoisoned(EndpointLost):
    """One endpoint after the other, or one engine again and again, broke while it served this request: nobody tries it
    once more."""


# --- ours -----------------------------------------------------------------------------------------------------------


class RequestFailed(TrioserveError):
    """The engine could not go on with this one request. Others are not touched."""


class StoreFault(TrioserveError):
    """What is kept could not be read or written. Nothing of what was to be written is there."""


class RankLost(TrioserveError):
    """One of the processes that compute a model together has ended, hangs, or has other results than the rest."""


class EngineFault(TrioserveError):
    """The engine itself broke: it rises in the engine's own task and ends every request with an error."""


# --- of libraries ---------------------------------------------------------------------------------------------------


def is_library_panic(error: BaseException) -> bool:
    """Whether Rust code of a library broke (tokenizers, llguidance, safetensors).

    PyO3 derives its PanicException from BaseException, so `except Exception` lets it pass. Each library has a class of
    its own, and none offers a name to catch it by.
    """
    return type(error).__name__ == "PanicException" and not isinstance(error, Exception)


def is_request_fault(error: BaseException) -> bool:
    """Whether an error fails one request: an Exception or a panic, not a cancellation and no Ctrl-C."""
    return isinstance(error, Exception) or is_library_panic(error)


@contextmanager
def panics_become_failures() -> Iterator[None]:
    """Raise RequestFailed where a library's Rust code panics, so that the panic fails one request alone.

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
