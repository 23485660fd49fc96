"""The limits of the engine, each with its unit and its reason."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from trioserve.contracts.errors import StartupError

__all__ = ["CoreSettings", "DraftSourceName", "check_overlap", "check_states"]

DraftSourceName = Literal["text", "model", "head"]


def check_overlap(overlap_steps: bool, draft_tokens_max: int, source: DraftSourceName = "text") -> None:
    """Raises StartupError for both of them together."""
    if overlap_steps and draft_tokens_max > 0:
        drafts = _drafts(draft_tokens_max, source)
        raise StartupError(
            f"--overlap-steps plans a step before the one in flight has come back, and {drafts} has to know what that "
            "one brought: give one of them"
        )


def check_states(state_slot_count: int, draft_tokens_max: int, source: DraftSourceName = "text") -> None:
    """Raises StartupError for drafts of a model whose layers keep a state."""
    if state_slot_count > 0 and draft_tokens_max > 0:
        raise StartupError(
            f"this model's layers keep a state that a wrong draft token would have changed for good, so "
            f"{_drafts(draft_tokens_max, source)} cannot be had with it: leave it out"
        )


def _drafts(token_count_max: int, source: DraftSourceName) -> str:
    return f"--speculative-ngram {token_count_max}" if source == "text" else "a draft model"


class CoreSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine core may use.

    block_count: KV blocks in the pool. block_size: tokens a block holds.
    context_tokens_max: prompt and output of one request together.
    max_num_seqs: sequences in the batch. Each costs a row in every step.
    overtakes_max: how many may start before a request that was there before them, since its prompt does not fit the
        pool and they do. After so many the blocks that come free are left for it. About as many as run at a time: what
        it waits longer is about what those take that it finds running.
    step_tokens_max: tokens computed in one step; a longer prompt is computed in chunks, so that the others' next token
        does not wait for all of it.
    wide_prompt_stretch: how much longer, as a factor, a step may last for the chunks of prompts that need several
        steps, while others decode in it.
    enable_prefix_caching: full blocks stay findable by their tokens after their request has gone.
    overlap_steps: a step may be planned while the one before it is in flight (EngineCore.schedule_ahead). Not with
        drafts: what a step with draft tokens brings is not one token. steps_apart: two steps that are in flight have no
        request in common, each at most half of those that run: where a model's stages compute different steps at a
        time, the first one begins before the last one has chosen a token. draft_tokens_max: draft tokens that a decode
        may compute beside its last token; 0 turns drafts off. draft_step_tokens_max: tokens of a step with drafts. Up
        to here a CPU waits for the weights anyway, and a draft token costs a twentieth of a step; beyond, it costs as
        much as it can save. draft_source: where draft tokens come from, a request's own text, a draft model, or a head
        that reads the model's hidden states, so that it has to compute along.
    draft_context_tokens_max: of a draft model; None: as many as the model's own. draft_catch_up_tokens_max: tokens that
        the draft model computes in one step of those that it has not seen, so that the others do not wait for it.
    hold_seconds_max: how long a connector may keep the blocks of a request that is over before they are taken back.
    remote_kv_seconds_max: how long a request waits for KV from elsewhere.
    held_share_max: share of the pool that connectors may hold of requests that asked for it; beyond that a request is
        answered without being held. (So that one reader that is slow does not take the others' room.)
    window_tokens: where every layer has a sliding window the largest of them, in tokens, a token's own position among
        them, and at least 2, so that the last token before a place is in reach; None where some layer sees all. What no
        window reaches any more is given back while the request runs, so that a context may be longer than the pool.
    keeps_kv: False for a model that attends to all tokens of a prompt at once and keeps nothing (an encoder): nobody
        has blocks, there need not be any, and every request is pooled and computed whole.
    state_slot_count: slots for the state of layers that keep one for a whole sequence, in the place of keys and values
        for each token. Every sequence in the batch has one, so no more than these run. 0: the model has no such layers.
    snapshot_slot_count: further slots, for copies of such states as they were at the end of a block that the prefix
        cache has: a prefix that is found there can only be gone on with where there is one. 0: nothing is found.
    load_failure_policy: whether a request whose KV does not come computes it here, or ends with an error.
    Raises StartupError when the limits contradict each other.
    """

    block_count: int
    block_size: int = 16
    context_tokens_max: int
    max_num_seqs: int = 64
    overtakes_max: int = 64
    step_tokens_max: int = 512
    wide_prompt_stretch: float = 1.5
    enable_prefix_caching: bool = True
    overlap_steps: bool = False
    steps_apart: bool = False
    draft_tokens_max: int = 0
    draft_step_tokens_max: int = 16
    draft_source: DraftSourceName = "text"
    draft_context_tokens_max: int | None = None
    draft_catch_up_tokens_max: int = 256
    hold_seconds_max: float = 10.0  # many times what a transfer takes, and short enough to wait for after a lost peer
    remote_kv_seconds_max: float = 10.0
    held_share_max: float = 0.5
    load_failure_policy: Literal["recompute", "fail"] = "recompute"
    keeps_kv: bool = True
    state_slot_count: int = 0
    snapshot_slot_count: int = 0
    window_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("block_count", "block_size", "context_tokens_max", "max_num_seqs", "step_tokens_max"):
            value = getattr(self, name)
            if value < (1 if name != "block_count" or self.keeps_kv else 0):
                raise StartupError(f"{name} is {value}, it must be at least 1")
        for name in (
            "draft_tokens_max",
            "draft_step_tokens_max",
            "overtakes_max",
            "state_slot_count",
            "snapshot_slot_count",
        ):
            if getattr(self, name) < 0:
                raise StartupError(f"{name} is {getattr(self, name)}, it must be at least 0")
        if not self.wide_prompt_stretch > 1:
            raise StartupError(f"wide_prompt_stretch is {self.wide_prompt_stretch}, it must be above 1")
        if self.draft_source not in get_args(DraftSourceName):
            raise StartupError(f'draft_source is "{self.draft_source}", it may be "text", "model" or "head"')
        if self.draft_catch_up_tokens_max < 1:
            raise StartupError(f"draft_catch_up_tokens_max is {self.draft_catch_up_tokens_max}, it must be at least 1")
        assert self.overlap_steps or not self.steps_apart, "one step alone is apart from nothing"
        check_overlap(self.overlap_steps, self.draft_tokens_max, self.draft_source)
        check_states(self.state_slot_count, self.draft_tokens_max, self.draft_source)
        assert self.state_slot_count > 0 or self.snapshot_slot_count == 0, "snapshots of what nobody has"
        for name in ("hold_seconds_max", "remote_kv_seconds_max"):
            seconds = getattr(self, name)
            if not 0 < seconds <= 3600:
                raise StartupError(f"{name} is {seconds}, it must be above 0 and at most 3600 seconds")
        if not 0 < self.held_share_max <= 1:
            raise StartupError(f"held_share_max is {self.held_share_max}, it must be above 0 and at most 1")
        if self.load_failure_policy not in ("recompute", "fail"):
            raise StartupError(f'load_failure_policy is "{self.load_failure_policy}", it may be "recompute" or "fail"')
        if self.step_tokens_max < self.max_num_seqs:
            raise StartupError(
                f"a step may compute {self.step_tokens_max} tokens, but {self.max_num_seqs} requests may run "
                "and each needs one: raise --max-num-batched-tokens or lower --max-num-seqs"
            )
        if not self.keeps_kv and self.enable_prefix_caching:
            raise StartupError("a model that keeps no KV has no prefix cache: turn enable_prefix_caching off")
        if self.window_tokens is not None and self.window_tokens < 2:
            raise StartupError(f"window_tokens is {self.window_tokens}, it must be at least 2")
        assert self.window_tokens is None or self.draft_source == "text", "a draft model may see more than the model"
        held_max = self.blocks_held_max(self.context_tokens_max)
        if held_max > self.block_count and self.window_tokens is not None:
            raise StartupError(
                f"the KV cache has {self.block_count} blocks of {self.block_size} tokens, and a full context needs "
                f"{held_max} at a time, for a window of {self.window_tokens} tokens and {self.step_tokens_max} that a "
                "step computes: lower --max-num-batched-tokens or --max-model-len, or give it more memory"
            )
        if held_max > self.block_count:
            raise StartupError(
                f"the KV cache holds {self.block_count * self.block_size} tokens, less than the "
                f"{self.context_tokens_max} of one full context: lower --max-model-len or give it more memory"
            )

    @property
    def whole_tokens_max(self) -> int:
        """Tokens of a prompt that has to be computed in one step. Beside those that decode there is always room for as
        many, sooner or later."""
        return self.step_tokens_max - (self.max_num_seqs - 1 if self.keeps_kv else 0)

    def blocks_for(self, token_count: int) -> int:
        """Places of a block table that has so many tokens; none where nobody has KV."""
        return -(-token_count // self.block_size) if self.keeps_kv else 0

    def first_block_read(self, position: int) -> int:
        """The first place of a block table that is read when the token at `position` is computed."""
        return 0 if self.window_tokens is None else max(0, position - self.window_tokens + 1) // self.block_size

    def first_block_kept(self, computed_count: int) -> int:
        """The first place of a block table that has a block when so many tokens are computed. The last of them can be
        computed again: another engine that goes on with them has to."""
        return self.first_block_read(computed_count - 1)

    def blocks_held_max(self, token_count: int) -> int:
        """Blocks that a request has at a time, at most, until so many tokens are computed: all of them, or those of a
        window and a step."""
        needed = self.blocks_for(token_count)
        if self.window_tokens is None:
            return needed
        # So many tokens in a row begin and end inside of blocks.
        return min(needed, -(-(self.window_tokens + self.step_tokens_max - 1) // self.block_size) + 1)
