"""Histories of a real engine core with a real runner: arrivals, chunks, batches, prefix hits, preemptions, draft
tokens, overlapping steps and aborts.

Tests compare the response of each request with its response when it runs alone.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import msgspec

from trioserve.contracts.events import PromptLogprobs, RequestFinished, TokenLogprob, TokensReady
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.step import ScheduledChunk, StateSpan, StepPlan
from trioserve.core.engine import EngineCore
from trioserve.core.settings import CoreSettings
from trioserve.model.runner import ModelRunner

__all__ = ["Arrival", "History", "Response", "alone", "play", "request"]

TOP = 20  # number of most probable tokens in logprobs
STEPS_MAX = 3_000
SNAPSHOTS = 4  # state slots for copies, few enough that some copies are evicted


class Arrival(msgspec.Struct, frozen=True):
    """Arrival of one request.

    Attributes:
        step: the request arrives before this step.
        aborted_at: the request is aborted before this step. None: it is not aborted.
        known: number of output tokens that are already known, because the response began at another engine.
    """

    request: EngineRequest
    step: int = 0
    aborted_at: int | None = None
    known: int = 0


class History(msgspec.Struct, frozen=True):
    """Arrivals of requests, and settings of the core.

    Attributes:
        block_seed: seed of the order of the pool's blocks in memory.
    """

    arrivals: tuple[Arrival, ...]
    step_tokens_max: int = 512
    max_num_seqs: int = 8
    block_count: int = 200
    enable_prefix_caching: bool = True
    overlap_steps: bool = False
    draft_tokens_max: int = 0
    block_seed: int = 0


class Response(msgspec.Struct):
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    is_complete: bool = False


class Played(msgspec.Struct):
    """Responses, and events of the history, so that a test can check that they occurred."""

    responses: dict[str, Response] = {}
    preemptions: int = 0
    hit_tokens: int = 0
    drafts: int = 0
    steps_ahead: int = 0
    largest_batch: int = 0


def request(
    name: str,
    prompt: Sequence[int],
    output_tokens: int,
    *,
    seed: int = 0,
    temperature: float = 0.0,
    prompt_logprobs: bool = False,
) -> EngineRequest:
    sampling = SamplingParams(
        temperature=temperature, top_p=0.95, logprobs=TOP, prompt_logprobs=TOP if prompt_logprobs else None
    )
    return EngineRequest(
        id=name,
        prompt_token_ids=tuple(prompt),
        sampling=sampling,
        output_tokens_max=output_tokens,
        stop_token_ids=frozenset(),
        seed=seed,
    )


def alone(runner: ModelRunner, subject: EngineRequest) -> Response:
    """Return the response of a request without any other request: the whole prompt in one step, then one token per
    step.
    """
    history = History((Arrival(subject),), enable_prefix_caching=False, block_count=runner.block_count)
    return play(runner, history).responses[subject.id]


def play(runner: ModelRunner, history: History) -> Played:
    has_states = runner.config.state_bytes > 0
    core = EngineCore(
        CoreSettings(
            block_count=min(history.block_count, runner.block_count),
            block_size=runner.block_size,
            context_tokens_max=min(runner.config.context_tokens_max, history.block_count * runner.block_size),
            max_num_seqs=history.max_num_seqs,
            step_tokens_max=max(history.step_tokens_max, history.max_num_seqs),
            enable_prefix_caching=history.enable_prefix_caching,
            overlap_steps=history.overlap_steps,
            draft_tokens_max=0 if has_states else history.draft_tokens_max,
            state_slot_count=history.max_num_seqs if has_states else 0,
            snapshot_slot_count=SNAPSHOTS if has_states else 0,
            wide_prompt_stretch=math.inf,  # The plans of a history depend on its seed, not on the time of steps.
        )
    )
    places = list(range(runner.block_count))
    random.Random(history.block_seed).shuffle(places)
    states = list(range(runner.state_slot_count + runner.snapshot_slot_count))
    random.Random(history.block_seed).shuffle(states)
    played = Played(responses={arrival.request.id: Response() for arrival in history.arrivals})
    to_come = sorted(history.arrivals, key=lambda arrival: arrival.step)
    out: list[tuple[StepPlan, object]] = []
    for step in range(STEPS_MAX):
        while to_come and to_come[0].step <= step:
            core.add(to_come.pop(0).request)
        core.abort([one.request.id for one in history.arrivals if one.aborted_at == step], now=0.0)
        if not out:
            plan = core.schedule(0.0)
            if plan is None:
                if to_come:
                    continue
                break
            out.append((plan, runner.launch(_moved(plan, places, states))))
        if history.overlap_steps and (ahead := core.schedule_ahead(0.0)) is not None:
            played.steps_ahead += 1
            out.append((ahead, runner.launch(_moved(ahead, places, states))))
        plan, finish = out.pop(0)
        result = finish()
        assert not result.errors, result.errors
        played.largest_batch = max(played.largest_batch, len(plan.chunks))
        for event in core.update_from_output(plan, result, 0.0):
            response = played.responses[event.request_id]
            if isinstance(event, TokensReady):
                response.token_ids += event.token_ids
                response.logprobs += event.logprobs or ()
            elif isinstance(event, PromptLogprobs):
                response.prompt_logprobs += event.logprobs
            elif isinstance(event, RequestFinished):
                response.is_complete = True
    else:
        raise AssertionError(f"after {STEPS_MAX} steps some request has not finished")
    stats = core.stats()
    played.preemptions = stats.preemptions_total
    played.hit_tokens = stats.prefix_hit_tokens_total
    played.drafts = stats.accepted_tokens_total
    return played


def _moved(plan: StepPlan, places: list[int], states: list[int]) -> StepPlan:
    """Return the plan with other block indices and state slots."""

    def moved(chunk: ScheduledChunk) -> ScheduledChunk:
        spans = tuple(
            StateSpan(span.count, None if span.reads is None else states[span.reads], states[span.writes])
            for span in chunk.states
        )
        return msgspec.structs.replace(chunk, block_table=[places[block] for block in chunk.block_table], states=spans)

    return msgspec.structs.replace(plan, chunks=tuple(map(moved, plan.chunks)))
