"""Tests of the conversion of plans to messages: a decoded plan contains all data that its step reads."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from trioserve.contracts.media import GivenRows
from trioserve.contracts.pooling import Pooling
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.sampling import CHOOSING_FIELDS, SamplingParams
from trioserve.contracts.step import DraftTask, ScheduledChunk, StateSpan, StepPlan
from trioserve.contracts.weights import AdapterRef
from trioserve.ranks.messages import PartialTokens, WirePlan, plan_from_wire, plan_to_wire

BLOCK_SIZE = 4
PROMPT = tuple(range(100, 110))


def over_the_wire(plan: StepPlan) -> StepPlan:
    encoded = msgspec.msgpack.encode(plan_to_wire(plan, BLOCK_SIZE))
    return plan_from_wire(msgspec.msgpack.decode(encoded, type=WirePlan), None)


def request(**fields: object) -> EngineRequest:
    given: dict[str, object] = {
        "id": "r",
        "prompt_token_ids": PROMPT,
        "sampling": SamplingParams(),
        "output_tokens_max": 9,
        "stop_token_ids": frozenset({2}),
        "seed": 2**64 - 1,
        **fields,
    }
    return EngineRequest(**given)  # type: ignore[arg-type]


def chunk_of(asked: EngineRequest, *, start: int, count: int, tokens: list[int], **fields: object) -> ScheduledChunk:
    end = start + count + len(fields.get("draft", ()))  # type: ignore[arg-type]
    table = list(range(50, 50 + -(-end // BLOCK_SIZE) + 1))  # The table has one block more than the chunk needs.
    return ScheduledChunk(asked, tokens, start, count, table, True, **fields)  # type: ignore[arg-type]


def sent(chunk: ScheduledChunk) -> ScheduledChunk:
    (found,) = over_the_wire(StepPlan(7, (chunk,), chunk.row_count)).chunks
    return found


def test_decode_sends_one_token_and_the_sequence_length() -> None:
    tokens = [*PROMPT, 7, 8, 9]
    found = sent(chunk_of(request(), start=12, count=1, tokens=tokens))
    assert len(found.tokens) == 13
    assert list(found.row_tokens) == [9]
    assert list(found.tokens[:12]) == [0] * 12  # These tokens are not sent, because the step does not read them.
    assert list(found.block_table) == [50, 51, 52, 53]
    assert found.request.seed == 2**64 - 1
    assert len(found.request.prompt_token_ids) == len(PROMPT)


@pytest.mark.parametrize(
    ("sampling", "first"),
    [
        (SamplingParams(repetition_penalty=1.1), 0),
        (SamplingParams(frequency_penalty=0.5), len(PROMPT)),
        (SamplingParams(presence_penalty=0.5), len(PROMPT)),
    ],
)
def test_tokens_that_penalties_count_are_sent(sampling: SamplingParams, first: int) -> None:
    tokens = [*PROMPT, 7, 8, 9]
    found = sent(chunk_of(request(sampling=sampling), start=12, count=1, tokens=tokens))
    assert list(found.tokens[first:]) == tokens[first:]
    assert found.request.sampling == sampling


def test_draft_and_draft_model_tokens_are_sent() -> None:
    tokens = [*PROMPT, 7, 8, 9]
    found = sent(chunk_of(request(), start=12, count=1, tokens=tokens, draft=(4, 5), draft_task=DraftTask(11, None, 2)))
    assert list(found.row_tokens) == [9, 4, 5]
    assert list(found.tokens[11:]) == [8, 9]
    assert found.draft_task == DraftTask(11, None, 2)
    assert len([*found.tokens, *found.draft]) == 15


def test_prompt_logprobs_send_the_following_tokens() -> None:
    asked = request(sampling=SamplingParams(prompt_logprobs=1))
    found = sent(chunk_of(asked, start=2, count=4, tokens=list(PROMPT)))
    assert list(found.request.prompt_token_ids[3:7]) == list(PROMPT[3:7])


def test_chunk_at_the_end_of_a_prompt_sends_fewer_following_tokens() -> None:
    asked = request(sampling=SamplingParams(prompt_logprobs=1))
    found = sent(chunk_of(asked, start=8, count=2, tokens=list(PROMPT)))
    assert list(found.request.prompt_token_ids[9:11]) == [PROMPT[9]]


def test_token_that_is_still_being_sampled_is_not_sent_to_ranks() -> None:
    tokens = list(PROMPT)
    found = sent(chunk_of(request(), start=10, count=1, tokens=tokens, awaits_token=True))
    assert found.awaits_token
    assert len(found.tokens) == 10


@pytest.mark.parametrize("name", CHOOSING_FIELDS)
def test_each_sampling_parameter_that_a_sampler_reads_is_sent_to_ranks(name: str) -> None:
    default = getattr(SamplingParams(), name)
    value = {3: -1.5} if name == "logit_bias" else 0.5 if isinstance(default, float) else 1
    sampling = SamplingParams(**{name: value})
    found = sent(chunk_of(request(sampling=sampling), start=0, count=10, tokens=list(PROMPT)))
    assert found.request.sampling == sampling


def test_fields_of_a_chunk_are_sent_to_ranks() -> None:
    sampling = SamplingParams(min_tokens=3, max_tokens=9, logit_bias={3: -1.5}, temperature=0.7, top_k=5, logprobs=2)
    asked = request(
        sampling=sampling,
        adapter=AdapterRef(4, "ab"),  # type: ignore[arg-type]
        pooling=Pooling(task="embed", method="last", normalize=True),
    )
    spans = (StateSpan(2, None, 3), StateSpan(8, 3, 4))
    chunk = chunk_of(asked, start=0, count=10, tokens=list(PROMPT), mask_row=2, states=spans)
    found = sent(chunk)
    assert found.request.stop_token_ids == frozenset({2})
    assert found.request.sampling == msgspec.structs.replace(sampling, max_tokens=None)
    assert (found.request.adapter, found.request.pooling) == (asked.adapter, asked.pooling)
    assert (found.mask_row, found.states) == (2, spans)
    assert found.pools
    assert list(found.row_tokens) == list(PROMPT)


def test_only_image_embeddings_inside_of_the_chunk_are_sent() -> None:
    values = np.arange(1, 25, dtype=np.float32).reshape(4, 6)
    given = (GivenRows(1, 4, b"c" * 16, values), GivenRows(5, 2, b"d" * 16, values[:2]))
    found = sent(chunk_of(request(given=given), start=3, count=1, tokens=list(PROMPT)))
    (rows,) = found.request.given
    assert (rows.start, rows.count, rows.content) == (1, 4, b"c" * 16)
    received = np.frombuffer(rows.values, dtype=np.float32).reshape(4, 6)  # type: ignore[call-overload]
    assert np.array_equal(received[2], values[2])
    assert not received[[0, 1, 3]].any()


def test_grids_before_the_chunk_are_sent_without_embeddings() -> None:
    values = np.ones((4, 6), dtype=np.float32)
    given = (GivenRows(1, 4, b"c" * 16, values, (2, 2)), GivenRows(6, 2, b"d" * 16, values[:2], (1, 2)))
    found = sent(chunk_of(request(given=given), start=5, count=1, tokens=list(PROMPT)))
    assert found.request.given == (GivenRows(1, 4, b"c" * 16, b"", (2, 2)),)


def test_fields_of_the_plan_are_sent_to_ranks() -> None:
    chunk = chunk_of(request(), start=0, count=10, tokens=list(PROMPT))
    found = over_the_wire(StepPlan(7, (chunk,), 10, is_ahead=True))
    assert (found.step_index, found.token_count, found.is_ahead) == (7, 10, True)


def test_partial_token_list_can_be_read_from_both_ends() -> None:
    import array

    tokens = PartialTokens(5, 3, array.array("i", [8, 9]))
    assert list(tokens) == [0, 0, 0, 8, 9]
    assert (tokens[-1], tokens[0], list(tokens[2:5]), list(tokens[4:4])) == (9, 0, [0, 8, 9], [])
    with pytest.raises(IndexError):
        tokens[5]
