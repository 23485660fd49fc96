"""Tests of the exception tree, in which the type of an error shows who caused the error."""

from __future__ import annotations

import inspect

import pytest

from trioserve.contracts import errors

TREE = """
    TrioserveError
        InvalidRequest
            ContextTooLong
            ResumeMismatch
            UnknownModel
            AdapterRefused
            AlreadyEnded
        WrongLoop
        StartupError
            ModelLoadError
        Overloaded
            Draining
            EngineReopening
            NoEndpoint
            StepOverdue
        QueueWaitOver
        RequestAborted
        DeadlinePassed
        WeightsLost
        StoreFull
            DiskFull
        StoreFault
        EndpointLost
            RequestPoisoned
        RequestFailed
        RankLost
        GpuLost
        EngineFault
"""


def parents() -> dict[str, str]:
    """Return the parent of each name in an indented tree."""
    line_of: dict[int, str] = {-1: "Exception"}
    result = {}
    for line in TREE.strip("\n").splitlines():
        depth = (len(line) - len(line.lstrip())) // 4 - 1
        line_of[depth] = line.strip()
        result[line.strip()] = line_of[depth - 1]
    return result


def test_exception_classes_form_the_documented_tree():
    classes = {
        name: value
        for name, value in vars(errors).items()
        if inspect.isclass(value) and value.__module__ == errors.__name__
    }
    assert {name: value.__base__.__name__ for name, value in classes.items()} == parents()
    assert classes.keys() <= set(errors.__all__)


@pytest.mark.parametrize("error", [errors.InvalidRequest, errors.ContextTooLong, errors.UnknownModel])
def test_errors_of_the_caller_name_the_field(error):
    assert error("no", param="prompt").param == "prompt"
    assert error("no").param is None


@pytest.mark.parametrize("error", [errors.Overloaded, errors.Draining])
def test_refusal_errors_have_a_reason_and_a_retry_time(error):
    raised = error("no", reason="queue_full", retry_after_seconds=1.5)
    assert (str(raised), raised.reason, raised.retry_after_seconds) == ("no", "queue_full", 1.5)
