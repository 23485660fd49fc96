"""Tests of the measurement of structured output: requests, counters, verdicts, and sets of schemas."""

from __future__ import annotations

import io
import json

import pytest
import trio

from trioserve.bench.runner import CannotMeasure, Measured
from trioserve.bench.schema_set import Judge, Verdict, read_schemas
from trioserve.bench.settings import StructuredBenchSettings
from trioserve.bench.structured import measure_structured, structured_json, structured_text
from trioserve.contracts.errors import StartupError

POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
    "required": ["x", "y"],
    "additionalProperties": False,
}


async def measured(server, **settings):
    settings = StructuredBenchSettings(
        **{"rounds": 2, "concurrency": 4, "requests": 8, "output_tokens": 10, **settings}
    )
    outcome = await measure_structured(settings, open_stream=server.open_stream, progress=io.StringIO())
    assert isinstance(outcome, Measured)
    return outcome.report, outcome.exit_code


async def test_rows_are_compared_within_their_rounds(start_server, autojump_clock):
    """The server takes 0.1 s for each token of free text and 0.05 s for each token of JSON. So the report must say that
    JSON is twice as fast, both for single requests and for simultaneous requests.
    """

    async def answer(call):
        await call.start(200)
        seconds = 0.05 if "response_format" in call.body else 0.1
        for _ in range(call.body["max_tokens"]):
            await trio.sleep(seconds)
            await call.chunk({"choices": [{"delta": {"content": "x"}}]})
        await call.chunk({"choices": [{"delta": {}, "finish_reason": "length"}]})
        await call.done({"prompt_tokens": 1, "completion_tokens": call.body["max_tokens"]})

    server = start_server(answer, http=1)
    report, exit_code = await measured(server)
    assert exit_code == 0
    rows = {row.name: row for row in report.rows}
    assert [len(row.rounds) for row in rows.values()] == [2] * 6
    assert rows["free"].rounds[0].tokens_per_second == pytest.approx(4 / 0.1)
    assert rows["schema"].rounds[1].tokens_per_second == pytest.approx(4 / 0.05)
    assert rows["forced, alone"].rounds[0].tokens_per_second == pytest.approx(1 / 0.05)
    lines = structured_text(report).splitlines()
    assert sum(" 2.000" in line for line in lines) == 4
    assert json.loads(structured_json(report))["rows"][0]["rounds"][0]["tokens"] == 80
    prompts = {call.body["messages"][0]["content"] for call in server.calls if call.method == "POST"}
    assert len(prompts) == 8  # All rows have the same prompts.


async def test_failed_request_is_reported_and_removes_only_its_round(start_server, autojump_clock):
    async def answer(call):
        await call.start(200)
        await call.chunk({"choices": [{"delta": {"content": "x"}}]})
        is_good = "response_format" not in call.body
        await call.chunk({"choices": [{"delta": {}, "finish_reason": "stop" if is_good else "error"}]})
        await trio.sleep(0.1)
        await call.done({"prompt_tokens": 1, "completion_tokens": 1})

    report, exit_code = await measured(start_server(answer, http=1))
    assert exit_code == 1
    assert {row.name for row in report.rows} == {"free", "free, alone"}
    assert "finish_reason error" in structured_text(report)


async def test_structured_measurement_reports_an_unreachable_server(start_server):
    async def refuse():
        raise OSError("nobody")

    outcome = await measure_structured(StructuredBenchSettings(), open_stream=refuse, progress=io.StringIO())
    assert isinstance(outcome, CannotMeasure)
    assert outcome.exit_code == 2


async def test_each_schema_gets_one_judged_request(start_server, tmp_path, autojump_clock):
    answers = {
        "good": ('{"x": 1, "y": 2}', "stop"),
        "cut": ('{"x": 1, "y"', "length"),
        "wrong": ('{"x": 1}', "stop"),
        "wrong and cut": ('{"x": 1, "z', "length"),
        "no json": ("{", "stop"),
        "refused": None,
    }
    for name in answers:
        (tmp_path / f"{name}.json").write_text(json.dumps({**POINT, "title": name}))

    async def answer(call):
        schema = call.body["response_format"]["json_schema"]["schema"]
        given = answers[schema["title"]]
        if given is None:
            await call.respond(400, {"error": {"message": "cannot be compiled"}})
            return
        await call.start(200)
        await call.chunk({"choices": [{"delta": {"content": given[0]}}]})
        await call.chunk({"choices": [{"delta": {}, "finish_reason": given[1]}]})
        await call.done({"prompt_tokens": 1, "completion_tokens": 5})

    report, exit_code = await measured(start_server(answer, http=1), schemas=str(tmp_path))
    assert exit_code == 1
    assert {one.name.removesuffix(".json"): one.verdict for one in report.schemas} == {
        "good": Verdict.VALID,
        "cut": Verdict.CUT,
        "wrong": Verdict.INVALID,
        "wrong and cut": Verdict.INVALID,
        "no json": Verdict.INVALID,
        "refused": Verdict.REFUSED,
    }
    text = structured_text(report)
    assert "wrong.json: $: 'y' is a required property" in text
    assert "refused.json: status 400: cannot be compiled" in text


@pytest.mark.parametrize(
    "text, is_cut, verdict",
    [
        ('{"x": 1, "y": 2}', False, Verdict.VALID),
        ('{"x": 1, "y": "2"}', False, Verdict.INVALID),
        ("", True, Verdict.CUT),
        ('{"x": -', True, Verdict.CUT),
        ('{"x": 1.', True, Verdict.INVALID),
    ],
)
def test_judge_tells_valid_json_from_invalid_and_cut_off_json(text, is_cut, verdict):
    assert Judge().judge(POINT, text, is_cut=is_cut)[0] is verdict


def test_text_that_ends_within_a_character_is_a_valid_beginning():
    assert Judge().judge({"type": "string"}, '"caf\ufffd', is_cut=True)[0] is Verdict.CUT


def test_schema_with_a_broken_reference_gives_an_invalid_verdict():
    verdict, reason = Judge().judge({"$ref": "#/nowhere"}, "1", is_cut=False)
    assert verdict is Verdict.INVALID
    assert "cannot be judged" in reason


def test_every_layout_of_schema_sets_is_read(tmp_path):
    (tmp_path / "Github").mkdir()
    (tmp_path / "Github" / "one.json").write_text(json.dumps(POINT))
    (tmp_path / "mask.json").write_text(json.dumps({"schema": POINT, "tests": []}))
    (tmp_path / "suite.json").write_text(json.dumps([{"schema": True}, {"schema": POINT}]))
    lines = [{"json_schema": json.dumps(POINT), "unique_id": "a"}, {"type": "object", "properties": {"schema": {}}}]
    (tmp_path / "table.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = {(schema.group, schema.name): schema.schema for schema in read_schemas(tmp_path)}
    assert found == {
        ("Github", "Github/one.json"): POINT,
        (tmp_path.name, "mask.json"): POINT,
        ("suite", "suite.json[0]"): True,
        ("suite", "suite.json[1]"): POINT,
        ("table", "table.jsonl[0]"): POINT,
        ("table", "table.jsonl[1]"): lines[1],
    }
    assert [schema.schema for schema in read_schemas(tmp_path / "mask.json")] == [POINT]


def test_unreadable_schema_set_is_refused_in_one_sentence(tmp_path):
    with pytest.raises(StartupError, match="holds no schema"):
        read_schemas(tmp_path)
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(StartupError, match=r"broken\.json cannot be read"):
        read_schemas(tmp_path)
    with pytest.raises(StartupError, match="does not exist"):
        StructuredBenchSettings(schemas=str(tmp_path / "nothing"))
