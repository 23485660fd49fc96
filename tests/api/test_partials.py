"""Tests aborted completions and chats with return_partial: clients get the partial result, and can resume it later."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio

from trioserve.testing.memory_server import MemoryServer, open_memory_server

BODY = {"prompt": "one", "max_tokens": 30, "temperature": 1, "seed": 3, "ignore_eos": True, "return_partial": True}
CHAT = {key: value for key, value in BODY.items() if key != "prompt"} | {
    "messages": [{"role": "user", "content": "say it"}],
}
LOGPROBS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"logprobs": 2},
    "/v1/chat/completions": {"logprobs": True, "top_logprobs": 2},
}
PATHS = pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", BODY), ("/v1/chat/completions", CHAT)], ids=["completions", "chat"]
)


async def ask(server: MemoryServer, path: str, body: object, request_id: str = "r") -> tuple[int, Any]:
    async with server.client(headers={"x-request-id": request_id}).ask(path, body) as response:
        return await response.head(), await response.json()


async def aborted(server: MemoryServer, path: str, body: object, how: str) -> tuple[int, Any]:
    """Return the response to a request that is aborted after some steps."""
    answers: list[tuple[int, Any]] = []

    async def one() -> None:
        answers.append(await ask(server, path, body))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(one)
        await trio.sleep(0.085)
        if how == "abort":
            server.engine.abort("r")
        elif how == "pause":
            await server.engine.pause_generation()
            server.engine.resume_generation()
    return answers[0]


@pytest.mark.parametrize("how", ["abort", "pause", "deadline"])
@PATHS
async def test_an_aborted_whole_response_has_its_partial_result_and_can_be_resumed(autojump_clock, path, body, how):
    body = {**body, **LOGPROBS[path], "n": 2, "return_token_ids": True}
    async with open_memory_server(step_seconds=0.01) as server:
        _, whole = await ask(server, path, body)
        limit = {"timeout": 0.08} if how == "deadline" else {}
        status, partial = await aborted(server, path, {**body, **limit}, how)
        assert status == 200
        for index, choice in enumerate(partial["choices"]):
            expected = whole["choices"][index]
            assert choice["finish_reason"] == "abort"
            assert choice["stop_reason"] == {"abort": None, "pause": "paused", "deadline": "timeout"}[how]
            assert 0 < len(choice["token_ids"]) < len(expected["token_ids"])
            assert choice["token_ids"] == expected["token_ids"][: len(choice["token_ids"])]
        resume = partial["resume"]
        assert resume["token_ids"] == [choice["token_ids"] for choice in partial["choices"]]
        assert resume["finished"] == [False, False]
        assert [len(entries) for entries in resume["logprobs"]] == [len(ids) for ids in resume["token_ids"]]
        status, continued = await ask(server, path, {**body, "resume": resume})
        assert status == 200
        assert continued["choices"] == whole["choices"]
        assert "resume" not in continued
        assert continued["created"] == partial["created"]
        server.engine.assert_all_free()


@PATHS
async def test_aborted_completion_without_return_partial_is_an_error(autojump_clock, path, body):
    async with open_memory_server(step_seconds=0.01) as server:
        status, said = await aborted(server, path, {**body, "return_partial": False}, "pause")
        assert (status, said["error"]["code"]) == (503, "paused")


@PATHS
async def test_a_request_aborted_in_the_queue_has_an_empty_partial_result(autojump_clock, path, body):
    async with open_memory_server(step_seconds=0.01, max_num_seqs=1) as server:
        _, whole = await ask(server, path, body)
        answers = []

        async def one(request_id: str) -> None:
            answers.append((request_id, *await ask(server, path, body, request_id)))

        async with trio.open_nursery() as nursery:
            for number in range(8):
                nursery.start_soon(one, f"other-{number}")
                await trio.sleep(0.001)
            nursery.start_soon(one, "r")
            await trio.sleep(0.01)
            server.engine.abort("r")
            await trio.sleep(0.01)
            server.engine.abort([f"other-{number}" for number in range(8)])
        request_id, status, partial = answers[0]
        assert (request_id, status) == ("r", 200)
        assert partial["choices"][0]["finish_reason"] == "abort"
        assert partial["resume"]["token_ids"] == [[]]
        _, continued = await ask(server, path, {**body, "resume": partial["resume"]})
        assert continued["choices"] == whole["choices"]


async def read_events(server: MemoryServer, path: str, body: dict[str, Any], how: str) -> list[Any]:
    events = []

    async def one() -> None:
        async with server.client(headers={"x-request-id": "r"}).ask(path, {**body, "stream": True}) as response:
            assert await response.head() == 200
            lines = (await response.read()).decode().splitlines()
            events.extend(line.removeprefix("data: ") for line in lines if line.startswith("data: "))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(one)
        await trio.sleep(0.085)
        if how == "abort":
            server.engine.abort("r")
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


def shown_text(events: list[Any]) -> str:
    choices = [choice for event in events for choice in event["choices"]]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


@PATHS
async def test_an_aborted_stream_ends_with_the_field_resume(autojump_clock, path, body):
    body = {**body, "stop": ["never comes"]}
    async with open_memory_server(step_seconds=0.01) as server:
        whole = await read_events(server, path, body, "end")
        first = await read_events(server, path, body, "abort")
        last = first.pop()
        assert last["choices"] == []
        assert last["resume"]["finished"] == [False]
        assert [choice["finish_reason"] for event in first[-1:] for choice in event["choices"]] == ["abort"]
        second = await read_events(server, path, {**body, "resume": last["resume"]}, "end")
        assert shown_text(first) + shown_text(second) == shown_text(whole)
        assert 0 < len(shown_text(first)) < len(shown_text(whole))


async def test_several_prompts_are_aborted_and_resumed_together(autojump_clock):
    body = {**BODY, "prompt": ["one", "two"], "n": 2, "logprobs": 0}
    async with open_memory_server(step_seconds=0.01) as server:
        _, whole = await ask(server, "/v1/completions", body)
        _, partial = await aborted(server, "/v1/completions", body, "abort")
        assert len(partial["resume"]["token_ids"]) == 4
        _, continued = await ask(server, "/v1/completions", {**body, "resume": partial["resume"]})
        assert continued["choices"] == whole["choices"]


@pytest.mark.parametrize(
    ("path", "order"),
    [
        ("/v1/requests/abort", {"ids": ["r", "nobody"]}),
        ("/abort_request", {"rid": "r"}),
        ("/abort_request", {"abort_all": True}),
    ],
    ids=["ours", "sglang's", "sglang's for all"],
)
async def test_an_abort_responds_with_the_partial_result(autojump_clock, path, order):
    body = {**BODY, "n": 2, "logprobs": 1, "return_token_ids": True}
    answers = []
    async with open_memory_server(step_seconds=0.01) as server:

        async def one() -> None:
            answers.append(await ask(server, "/v1/completions", body))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one)
            await trio.sleep(0.085)
            status, said = await ask(server, path, {**order, "return_partial": True}, "another")
        assert status == 200
        row, *others = said["data"]
        assert (row["id"], row["result"]) == ("r", "aborted")
        assert [other["partials"] for other in others] == [[]] * len(others)
        [partial] = row["partials"]
        [(_, given)] = answers
        assert [choice["token_ids"] for choice in partial["choices"]] == given["resume"]["token_ids"]
        assert [choice["logprobs"] for choice in partial["choices"]] == given["resume"]["logprobs"]
        assert [choice["finish_reason"] for choice in partial["choices"]] == ["abort", "abort"]
        del given["resume"]["created"]
        assert partial["resume"] == given["resume"]
        if "abort_all" not in order:
            _, said = await ask(server, path, order, "another")
            assert said["data"][0] == {"id": "r", "object": "request.abort", "result": "already_finished"}


async def test_an_abort_needs_either_an_id_or_abort_all(autojump_clock):
    async with open_memory_server() as server:
        for order in ({}, {"rid": "r", "abort_all": True}):
            assert (await ask(server, "/abort_request", order))[0] == 400


async def test_best_of_does_not_hide_partial_choices(autojump_clock):
    body = {**BODY, "best_of": 6, "ignore_eos": False, "stop": ["e", "t", "a"], "return_token_ids": True}
    async with open_memory_server(step_seconds=0.01) as server:
        seen = set()
        for seed in range(12):
            _, partial = await aborted(server, "/v1/completions", {**body, "seed": seed}, "abort")
            finished = partial.get("resume", {}).get("finished")
            shown = partial["choices"][0]["finish_reason"]
            seen.add((shown, finished is not None))
            if finished is not None:
                assert len(finished) == 6
                status, continued = await ask(
                    server, "/v1/completions", {**body, "seed": seed, "resume": partial["resume"]}
                )
                assert (status, continued["choices"]) == (
                    200,
                    (await ask(server, "/v1/completions", {**body, "seed": seed}))[1]["choices"],
                )
        assert ("stop", True) in seen, seen
        server.engine.assert_all_free()


async def test_a_resumed_request_may_have_a_weight_version_per_token(autojump_clock):
    """The client sends the versions in `resume`. The resumed request takes no more time than other requests."""
    body = {**BODY, "max_tokens": 3100, "return_token_ids": True}
    versions = [["ab"[place % 2], 1] for place in range(3000)]
    resume = {"token_ids": [[97, 98] * 1500], "finished": [False], "weight_versions": [versions]}
    async with open_memory_server(max_model_len=4096, block_count=1100) as server:
        status, said = await ask(server, "/v1/completions", {**body, "resume": resume})
        assert status == 200
        [choice] = said["choices"]
        assert choice["weight_versions"] == [*versions, ["default", 100]]
        assert len(choice["token_ids"]) == 3100


async def test_known_log_probabilities_are_kept_after_a_weight_update(autojump_clock):
    """The client's log probabilities are kept, even if the new weights would result in other values."""
    body = {**BODY, "logprobs": 0}
    async with open_memory_server(step_seconds=0.01) as server:
        _, partial = await aborted(server, "/v1/completions", body, "abort")
        resume = partial["resume"]
        [entries] = resume["logprobs"]
        for entry in entries:
            entry["logprob"] = -0.125
        resume["weight_versions"] = [[["step 7", len(entries)]]]
        _, continued = await ask(server, "/v1/completions", {**body, "resume": resume})
        values = continued["choices"][0]["logprobs"]["token_logprobs"]
        assert values[: len(entries)] == [-0.125] * len(entries)
        assert len(values) == 30
        assert -0.125 not in values[len(entries) :]


def entry(token_id: int, *top: int) -> dict[str, Any]:
    return {"token_id": token_id, "logprob": -1.0, "top": [[top_id, -1.0] for top_id in top]}


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"logprobs": [[{"token_id": 1, "logprob": -1.0}]]}, "resume.logprobs"),
        ({"logprobs": [[entry(97), entry(-98)]]}, "resume.logprobs"),
        ({"logprobs": [[entry(97), entry(10**9)]]}, "resume.logprobs"),
        ({"logprobs": [[entry(97), entry(98, 10**9)]]}, "resume.logprobs"),
        ({"logprobs": [[entry(97), entry(98, -1)]]}, "resume.logprobs"),
        ({"weight_versions": [[["a", 1]]]}, "resume.weight_versions"),
        ({"weight_versions": [[["a", 3], ["b", -1]]]}, "resume.weight_versions"),
    ],
    ids=str,
)
async def test_an_invalid_resume_is_refused(wrong, param, autojump_clock):
    resume = {"token_ids": [[97, 98]], "finished": [False], **wrong}
    async with open_memory_server() as server:
        status, said = await ask(server, "/v1/completions", {**BODY, "logprobs": 0, "stream": True, "resume": resume})
        assert (status, said["error"]["param"]) == (400, param)


@PATHS
async def test_a_resumable_stream_gets_an_error_when_the_server_shuts_down(autojump_clock, path, body):
    """Requests that are not resumable get their partial result."""
    for is_asked, expected in ((True, "server_stopping"), (False, "[DONE]")):
        said = []
        async with open_memory_server(step_seconds=0.01) as server:

            async def one(server: MemoryServer = server, said: list[bytes] = said, is_asked: bool = is_asked) -> None:
                headers = {"x-trioserve-resumable": "1"} if is_asked else {}
                async with server.client(headers=headers).ask(path, {**body, "stream": True}) as response:
                    said.append(await response.read())

            async with trio.open_nursery() as nursery:
                nursery.start_soon(one)
                await trio.sleep(0.085)
                server.engine.abort_all("the server is leaving")
        assert expected.encode() in said[0]
        assert (b'"resume"' in said[0]) is not is_asked
