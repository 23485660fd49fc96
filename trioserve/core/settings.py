"""Limits and options of the engine cores."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from trioserve.contracts.errors import StartupError

__all__ = ["CoreSettings", "DraftSourceName", "check_overlap", "check_states", "IterativeSettings"]


DraftSourceName = Literal["text", "model", "head"]


def check_overlap(overlap_steps: bool, draft_tokens_max: int, source: DraftSourceName = "text") -> None:
    """Refuse the combination of overlapping steps and draft tokens.

    Args:
        overlap_steps: True if the engine plans a step while the previous step runs.
        draft_tokens_max: number of draft tokens per decode. 0 if drafts are disabled.
        source: source of draft tokens. The error message names the option that selects this source.

    Raises:
        StartupError: both options are enabled.
    """
    if overlap_steps and draft_tokens_max > 0:
        drafts = _drafts(draft_tokens_max, source)
        raise StartupError(
            f"--overlap-steps plans a step before the results of the running step are known, but {drafts} needs "
            "these results: use only one of the two options"
        )


def check_states(state_slot_count: int, draft_tokens_max: int, source: DraftSourceName = "text") -> None:
    """Refuse the combination of draft tokens and a model whose layers keep a state per sequence.

    Args:
        state_slot_count: number of slots for such states. 0 if the model has no such layers.
        draft_tokens_max: number of draft tokens per decode. 0 if drafts are disabled.
        source: source of draft tokens. The error message names the option that selects this source.

    Raises:
        StartupError: both are used. A wrong draft token would change the state, and this change cannot be undone.
    """
    if state_slot_count > 0 and draft_tokens_max > 0:
        raise StartupError(
            "this model's layers keep a state, and the change by a wrong draft token cannot be undone: "
            f"remove {_drafts(draft_tokens_max, source)}"
        )


def _drafts(token_count_max: int, source: DraftSourceName) -> str:
    return f"--speculative-ngram {token_count_max}" if source == "text" else "a draft model"


class CoreSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits and options of one engine core.

    Attributes:
        block_count: number of KV blocks in the pool.
        block_size: tokens per block.
        context_tokens_max: highest number of tokens of one request, prompt and output together.
        max_num_seqs: highest number of sequences in the batch. Each sequence needs a row in every step.
        overtakes_max: number of later requests that may start before a request whose blocks do not fit into the pool.
            After that, freed blocks are kept for the waiting request. A good value is the usual number of running
            requests.
        step_tokens_max: highest number of tokens in one step. A longer prompt is computed in chunks, so that other
            requests do not wait for the whole prompt.
        wide_prompt_stretch: factor by which prompts may lengthen a step while other requests decode in it. The fixed
            time of a step with prompt tokens comes on top, and 16 prompt tokens are always allowed. The default keeps
            gaps between two tokens below four steps of decodes where short prompts arrive together.
        enable_prefix_caching: True to keep the full blocks of finished requests, so that later requests can reuse them.
        overlap_steps: True to plan a step while the previous step is in flight (EngineCore.schedule_ahead). This
            excludes draft tokens, because the number of new tokens would be unknown.
        steps_apart: True if two steps in flight have no common request. Each step then has at most half of the running
            requests. Used with pipeline stages, where the second step starts before the first one has sampled a token.
        draft_tokens_max: highest number of draft tokens per decode, in addition to its last token. 0 disables drafts.
        draft_step_tokens_max: highest number of tokens in a step with draft tokens. Up to the default value, a CPU
            waits for the weights anyway, and a draft token costs about a twentieth of a step. Above the default value,
            a draft token costs as much time as it saves.
        draft_source: "text" copies tokens from the request's own text. "model" uses a draft model. "head" uses a head
            that reads the model's hidden states, and therefore computes in every step.
        draft_context_tokens_max: context of the draft model, in tokens. None: the same as the model's context.
        draft_catch_up_tokens_max: highest number of missed tokens that the draft model computes per step. This limits
            how long other requests wait for the draft model.
        hold_seconds_max: seconds for which a connector may hold the blocks of a finished request.
        remote_kv_seconds_max: seconds for which a request waits for KV from another engine.
        held_share_max: fraction of the pool, above 0 and at most 1, that connectors may hold for other engines. Above
            this limit, a request still gets its response, but its blocks are not held. So one slow reader cannot fill
            the pool.
        load_failure_policy: what happens if a load fails. "recompute" computes the KV here. "fail" ends the request.
        session_retention: True to evict the blocks of sessions that wait for their next turn later than other blocks.
            False to evict all blocks by recency.
        sessions_max: highest number of open sessions. Above this limit, the engine forgets the session that was idle
            for the longest time, and its blocks are evicted by recency. An open session costs about 1 KB.
        session_share_max: fraction of the pool, above 0 and at most 1, that the sessions of one tenant may retain.
            Blocks above this limit are evicted by recency.
        cold_turn_seconds: highest number of seconds for which a cold turn of a session waits before it may evict the
            blocks of sessions that are expected to return soon (DeferredTurns). 0: cold turns do not wait.
        session_prefetch: True to load the evicted blocks of a waiting session before its next turn, if a hint names its
            time and the connector has the blocks. It has no effect with a sliding window.
        keeps_kv: False for an encoder, which attends to all prompt tokens at once and stores no KV. Then requests have
            no blocks, block_count may be 0, and every request is pooled and computed in one step.
        state_slot_count: number of slots for layers that store one state per sequence instead of KV per token. Each
            running sequence needs one slot, so this also limits the batch. 0: the model has no such layers.
        snapshot_slot_count: number of additional slots for copies of such states at the end of cached blocks. A cached
            prefix can be reused only where a snapshot exists. 0: prefixes are never reused.
        window_tokens: the largest sliding window in tokens, including the token itself, at least 2. None if some layer
            attends to all tokens. Blocks that no window reaches are freed while the request runs, so a context may be
            longer than the pool.

    Raises:
        StartupError: a value is out of range, or values contradict each other.
    """

    block_count: int
    block_size: int = 16
    context_tokens_max: int
    max_num_seqs: int = 64
    overtakes_max: int = 64
    step_tokens_max: int = 512
    wide_prompt_stretch: float = 3.0
    enable_prefix_caching: bool = True
    overlap_steps: bool = False
    steps_apart: bool = False
    draft_tokens_max: int = 0
    draft_step_tokens_max: int = 16
    draft_source: DraftSourceName = "text"
    draft_context_tokens_max: int | None = None
    draft_catch_up_tokens_max: int = 256
    # Many times longer than a transfer takes, but still a short wait if the other engine is lost.
    hold_seconds_max: float = 10.0
    remote_kv_seconds_max: float = 10.0
    held_share_max: float = 0.5
    load_failure_policy: Literal["recompute", "fail"] = "recompute"
    session_retention: bool = True
    sessions_max: int = 8192
    session_share_max: float = 0.75
    cold_turn_seconds: float = 5.0
    session_prefetch: bool = False
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
        if self.sessions_max < 1:
            raise StartupError(f"sessions_max is {self.sessions_max}, it must be at least 1")
        if not self.wide_prompt_stretch > 1:
            raise StartupError(f"wide_prompt_stretch is {self.wide_prompt_stretch}, it must be above 1")
        if self.draft_source not in get_args(DraftSourceName):
            raise StartupError(f'draft_source is "{self.draft_source}", it may be "text", "model" or "head"')
        if self.draft_catch_up_tokens_max < 1:
            raise StartupError(f"draft_catch_up_tokens_max is {self.draft_catch_up_tokens_max}, it must be at least 1")
        assert self.overlap_steps or not self.steps_apart, "steps_apart needs overlap_steps"
        check_overlap(self.overlap_steps, self.draft_tokens_max, self.draft_source)
        check_states(self.state_slot_count, self.draft_tokens_max, self.draft_source)
        assert self.state_slot_count > 0 or self.snapshot_slot_count == 0, "snapshot slots need state slots"
        for name in ("hold_seconds_max", "remote_kv_seconds_max"):
            seconds = getattr(self, name)
            if not 0 < seconds <= 3600:
                raise StartupError(f"{name} is {seconds}, it must be above 0 and at most 3600 seconds")
        if not 0 <= self.cold_turn_seconds <= 3600:
            raise StartupError(f"cold_turn_seconds is {self.cold_turn_seconds}, it must be from 0 to 3600 seconds")
        for name in ("held_share_max", "session_share_max"):
            share = getattr(self, name)
            if not 0 < share <= 1:
                raise StartupError(f"{name} is {share}, it must be above 0 and at most 1")
        if self.load_failure_policy not in ("recompute", "fail"):
            raise StartupError(f'load_failure_policy is "{self.load_failure_policy}", it may be "recompute" or "fail"')
        if self.step_tokens_max < self.max_num_seqs:
            raise StartupError(
                f"a step may compute {self.step_tokens_max} tokens, but {self.max_num_seqs} requests may run "
                "and each needs one token: raise --max-num-batched-tokens or lower --max-num-seqs"
            )
        if not self.keeps_kv and self.enable_prefix_caching:
            raise StartupError("a model that keeps no KV has no prefix cache: turn off enable_prefix_caching")
        if self.window_tokens is not None and self.window_tokens < 2:
            raise StartupError(f"window_tokens is {self.window_tokens}, it must be at least 2")
        assert self.window_tokens is None or self.draft_source == "text", "a window needs draft_source text"
        held_max = self.blocks_held_max(self.context_tokens_max)
        if held_max > self.block_count and self.window_tokens is not None:
            raise StartupError(
                f"the KV cache has {self.block_count} blocks of {self.block_size} tokens, and a full context needs "
                f"{held_max} at a time, for a window of {self.window_tokens} tokens and a step of "
                f"{self.step_tokens_max} tokens: lower --max-num-batched-tokens or --max-model-len, or give the KV "
                "cache more memory"
            )
        if held_max > self.block_count:
            raise StartupError(
                f"the KV cache holds {self.block_count * self.block_size} tokens, less than the "
                f"{self.context_tokens_max} of one full context: lower --max-model-len or give the KV cache more "
                "memory"
            )

    @property
    def whole_tokens_max(self) -> int:
        """Return the length of the longest prompt that can be computed in one step, in tokens.

        Some later step always has this many tokens available, even if all other batch slots decode.
        """
        return self.step_tokens_max - (self.max_num_seqs - 1 if self.keeps_kv else 0)

    def blocks_for(self, token_count: int) -> int:
        """Return the length of a block table for a number of tokens.

        Args:
            token_count: number of tokens in the sequence.

        Returns:
            Number of blocks. 0 if the model keeps no KV.
        """
        return -(-token_count // self.block_size) if self.keeps_kv else 0

    def first_block_read(self, position: int) -> int:
        """Return the smallest index in the block table that the computation of one token reads.

        Args:
            position: position of the token in its sequence.
        """
        return 0 if self.window_tokens is None else max(0, position - self.window_tokens + 1) // self.block_size

    def first_block_kept(self, computed_count: int) -> int:
        """Return the smallest index in the block table that must still have a block.

        Args:
            computed_count: number of tokens whose KV is computed.

        Returns:
            The first block that the window of the last computed token reaches. If another engine resumes the sequence,
            it computes this token again.
        """
        return self.first_block_read(computed_count - 1)

    def blocks_held_max(self, token_count: int) -> int:
        """Return the highest number of blocks that a request owns at one time.

        Args:
            token_count: total number of tokens that the request computes.

        Returns:
            The number of blocks for all tokens. With a sliding window, at most the blocks of one window and one step.
        """
        needed = self.blocks_for(token_count)
        if self.window_tokens is None:
            return needed
        # The tokens of a window and a step may begin and end inside a block, so one more block may be needed.
        return min(needed, -(-(self.window_tokens + self.step_tokens_max - 1) // self.block_size) + 1)


class IterativeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a core for iterative requests.

    Attributes:
        slot_count: number of latent slots, which is also the most requests that run at a time.
        kept_slot_count: further slots for the latents of preempted requests. While all are taken, no request is
            preempted.
        step_work_max: work of one forward pass at most, in the units of IterativeRequest. This limits how long an abort
            waits for the step in flight.

    Raises:
        StartupError: a value is out of range.
    """

    slot_count: int
    kept_slot_count: int = 0
    step_work_max: int

    def __post_init__(self) -> None:
        for name, low in (("slot_count", 1), ("kept_slot_count", 0), ("step_work_max", 1)):
            if getattr(self, name) < low:
                raise StartupError(f"{name} is {getattr(self, name)}, it must be at least {low}")
