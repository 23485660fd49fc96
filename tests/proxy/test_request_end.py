"""Tests the log lines and metrics of a router and its endpoints for passed deadlines."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
from trio.testing import wait_all_tasks_blocked

PATH = "/v1/completions"
BODY = {"model": "fake", "prompt": "hello", "max_tokens": 50, "ignore_eos": True}


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG, logger="trioserve")
    return lambda: [record.getMessage() for record in caplog.records]


def ends_of(lines: list[str]) -> list[dict[str, str]]:
    """Return the log fields of each ended request with this path. The endpoint's fields come before the router's
    fields.
    """
    return [
        dict(re.findall(r"(\w+)=(\S+)", line))
        for line in lines
        if line.startswith("request ended") and f"path={PATH}" in line
    ]


def finished(server: Any) -> dict[str, float]:
    """Return request_success_total by reason, without zeros."""
    return {
        sample.labels["finished_reason"]: sample.value
        for family in server.engine.metrics.registry.collect()
        for sample in family.samples
        if sample.name.endswith("request_success_total") and sample.value
    }


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("whose", ["endpoint", "request"])
async def test_deadline_that_passes_after_some_tokens_does_not_count_as_a_refusal(
    open_setup, lines, autojump_clock, whose, stream
):
    """A deadline in the request applies at the router and at the endpoint. A default deadline of the endpoint applies
    only at the endpoint.
    """
    options: dict[str, Any] = {"step_seconds": 1.0}
    fields: dict[str, Any] = {}
    if whose == "endpoint":
        options["request_timeout"] = 10.5
    else:
        fields["timeout"] = 10.5
    async with open_setup("a", engine=options) as setup:
        async with setup.client().ask(PATH, {**BODY, **fields, "stream": stream}) as response:
            status = await response.head()
            if stream:
                error = [event async for event in response][-1]["error"]
            else:
                error = (await response.json())["error"]
            assert (status, error["code"]) == (200 if stream else 504, "timeout")
        await wait_all_tasks_blocked()
        await setup.assert_all_free()
        at_router = [end for end in ends_of(lines()) if "endpoint" in end]
        assert [(end["outcome"], end["reason"], end["status"]) for end in at_router] == [
            ("deadline", "timeout", str(status))
        ]
        assert not [line for line in lines() if line.startswith("refused")]
        if whose == "endpoint":
            assert finished(setup.servers["a"]) == {"deadline": 1}
            [at_endpoint] = [end for end in ends_of(lines()) if "endpoint" not in end]
            assert (at_endpoint["outcome"], at_endpoint["reason"]) == ("deadline", "timeout")
        page = await (await setup.client().get("/metrics")).read()
        assert not re.search(rb"rejections_total\{[^}]*\} [1-9]", page)


@pytest.mark.parametrize(("body", "status"), [({"temperature": -1}, 400), ({"max_tokens": 10**6}, 400)])
async def test_refusal_by_the_endpoint_counts_as_a_refusal_by_the_router(open_setup, lines, body, status):
    async with open_setup("a") as setup:
        assert (await setup.client().post(PATH, {**BODY, **body})).status == status
        await wait_all_tasks_blocked()
        [end] = [end for end in ends_of(lines()) if "endpoint" in end]
        assert (end["outcome"], end["status"]) == ("refused", str(status))
