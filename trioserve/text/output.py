"""Turns the engine events of one choice into text deltas, and finds the stop string that ends the choice.

After a stop string, the caller must abort the sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from trioserve.contracts.events import FinishReason, RequestFinished, TokenLogprob
from trioserve.contracts.output import Delta
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.weights import INITIAL_WEIGHTS, WeightVersions, add_versions, joined_versions
from trioserve.text.stop_strings import StopStringFinder
from trioserve.text.tokenizer import Tokenizer

__all__ = ["ChoiceOutput", "merge"]


class ChoiceOutput:
    """Output of one choice of a request so far.

    Stop strings behave as in vLLM: the text of the first min_tokens tokens cannot complete a stop string, but may
    contain its beginning. Text after a stop string is dropped, and tokens after the token that completes the stop
    string are dropped.

    The response continues the prompt. A leading space is part of the response, so prompt and response can be joined.

    Args:
        tokenizer: Decodes the tokens.
        sampling: Stop strings, and other options that select what the client receives.
        index: Index of the choice within its request.
        cache_salt: Salt of the request. Requests with different salts share no prepared stop strings.

    Attributes:
        token_count: Number of tokens in the response so far, hidden tokens included.
        ended: True after the last delta. If the engine did not end the choice itself, the caller aborts the sequence
            and drops events that still arrive.
    """

    def __init__(
        self, tokenizer: Tokenizer, sampling: SamplingParams, *, index: int, cache_salt: str | None = None
    ) -> None:
        self.ended = False
        self._index = index
        self._sampling = sampling
        self._decoder = tokenizer.new_decoder(sampling.skip_special_tokens, continues_text=True)
        self._stops = StopStringFinder(sampling.stop, cache_salt) if sampling.stop else None
        # This is also False after the choice has ended.
        self._is_plain = self._stops is None and sampling.logprobs is None
        self.token_count = 0
        # These tokens arrived since the last delta. Their text is not complete yet.
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] | None = None if sampling.logprobs is None else []
        self._versions: list[tuple[str, int]] = []
        # Weight version of the next token. It is empty until use_weights is called.
        self._next_version: WeightVersions = ()

    def feed(
        self,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprob, ...] | None,
        finished: RequestFinished | None,
    ) -> Delta | None:
        """Process new tokens, and the end of the sequence if it has ended.

        Pass `finished` in the same call as the last tokens, since the text of a stop token is hidden and shown text
        cannot be retracted. If this raises an exception, the choice cannot continue. Other choices are not affected.

        Args:
            token_ids: The new tokens.
            logprobs: One entry per token, or None if the request has no logprobs.
            finished: The end of the sequence, or None if the sequence continues.

        Returns:
            The next delta, or None if there is no new text and the choice continues.
        """
        if self._is_plain and finished is None and len(token_ids) == 1 and not self._token_ids:
            # This fast path serves almost every token of a choice without stop strings and logprobs. Its result is the
            # same as that of the code below.
            self.token_count += 1
            text = self._decoder.push(token_ids[0])
            if text:
                return Delta(index=self._index, text=text, token_ids=token_ids, weight_versions=self._next_version)
            self._token_ids.append(token_ids[0])
            self._versions = [*self._next_version]
            return None
        if self.ended:
            raise RuntimeError("tokens for a choice that has ended")
        assert logprobs is None or len(logprobs) == len(token_ids), "each token has one logprob entry"
        hidden_index = self._hidden_token_index(len(token_ids), finished)
        text = ""
        for index, token_id in enumerate(token_ids):
            self.token_count += 1
            if self._next_version:
                add_versions(self._versions, len(self._token_ids), self._next_version, 1)
            self._token_ids.append(token_id)
            if self._logprobs is not None and logprobs is not None:
                self._logprobs.append(logprobs[index])
            if index != hidden_index:
                text += self._shown(self._decoder.push(token_id))
            if self._found is not None:
                return self._stopped_by_string(text)
        if finished is not None:
            return self._finish(text, finished)
        return self._delta(text) if text else None

    def use_weights(self, version: str) -> None:
        """Set the weight version of all tokens that are fed after this call.

        Args:
            version: Version of the weights that sample the following tokens.
        """
        if self._token_ids and not self._versions:
            self._versions = [(INITIAL_WEIGHTS, len(self._token_ids))]
        self._next_version = ((version, 1),)

    def weights_of(self, token_count: int) -> WeightVersions:
        """Return the weight versions of the next tokens.

        Args:
            token_count: Number of the next tokens.
        """
        return tuple((version, token_count) for version, _ in self._next_version)

    def take_known(
        self,
        token_ids: Sequence[int],
        finished: RequestFinished | None,
        *,
        logprobs: Sequence[TokenLogprob] | None = None,
        weight_versions: WeightVersions = (),
    ) -> list[Delta]:
        """Process tokens that the client of a resumed response already received. New tokens follow these tokens.

        Tokens after a stop string are ignored.

        Args:
            token_ids: The known tokens.
            finished: The end of the sequence if it is known, otherwise None.
            logprobs: One entry per known token, or None.
            weight_versions: Versions of the weights that sampled the known tokens. If not empty, later tokens count as
                sampled by INITIAL_WEIGHTS.

        Returns:
            The deltas of the known tokens, token by token. The joined deltas have each token once.
        """
        deltas = self._known(token_ids, finished, logprobs, dict(_run_starts(weight_versions)))
        if weight_versions:
            self.use_weights(INITIAL_WEIGHTS)
        return deltas

    def _known(
        self,
        token_ids: Sequence[int],
        finished: RequestFinished | None,
        logprobs: Sequence[TokenLogprob] | None,
        versions: Mapping[int, str],
    ) -> list[Delta]:
        """Implement take_known.

        Args:
            versions: Weight versions by the index of the first token that each version sampled.
        """
        deltas: list[Delta] = []
        last = len(token_ids) - 1
        for place, token_id in enumerate(token_ids):
            if place in versions:
                self.use_weights(versions[place])
            logprob = None if logprobs is None else (logprobs[place],)
            delta = self.feed((token_id,), logprob, finished if place == last else None)
            if delta is not None:
                deltas.append(delta)
                if self.ended:
                    return deltas
        if finished is not None and not self.ended:
            end = self.feed((), None, finished)
            assert end is not None
            deltas.append(end)
        elif self._token_ids:
            deltas.append(self._delta(""))
        return deltas

    @property
    def _found(self) -> str | None:
        return None if self._stops is None else self._stops.found

    def _hidden_token_index(self, token_count: int, finished: RequestFinished | None) -> int | None:
        if finished is None or finished.stop_token_id is None or self._sampling.include_stop_str_in_output:
            return None
        return token_count - 1

    def _shown(self, text: str) -> str:
        if self._stops is None:
            return text
        return self._stops.feed(text, may_complete=self.token_count > self._sampling.min_tokens)

    def _stopped_by_string(self, text: str) -> Delta:
        stop = self._found
        assert stop is not None
        if self._sampling.include_stop_str_in_output:
            text += stop
        return self._last_delta(text, FinishReason.STOP, stop_reason=stop)

    def _finish(self, text: str, finished: RequestFinished) -> Delta:
        text += self._shown(self._decoder.flush())
        if self._found is not None:  # The stop string contains U+FFFD, which flush returned.
            return self._stopped_by_string(text)
        if self._stops is not None:
            text += self._stops.flush()
        stop_token_id = finished.stop_token_id
        stop_reason = stop_token_id if stop_token_id in self._sampling.stop_token_ids else None
        return self._last_delta(text, finished.reason, stop_reason=stop_reason, message=finished.message)

    def _last_delta(
        self, text: str, reason: FinishReason, *, stop_reason: int | str | None, message: str | None = None
    ) -> Delta:
        self.ended = True
        self._is_plain = False
        return self._delta(text, reason, stop_reason, message)

    def _delta(
        self,
        text: str,
        finish_reason: FinishReason | None = None,
        stop_reason: int | str | None = None,
        message: str | None = None,
    ) -> Delta:
        delta = Delta(
            index=self._index,
            text=text,
            token_ids=tuple(self._token_ids),
            logprobs=None if self._logprobs is None else tuple(self._logprobs),
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            message=message,
            weight_versions=tuple(self._versions),
        )
        self._token_ids.clear()
        self._versions.clear()
        if self._logprobs is not None:
            self._logprobs.clear()
        return delta


def _run_starts(versions: WeightVersions) -> Iterator[tuple[int, str]]:
    place = 0
    for version, count in versions:
        yield place, version
        place += count


def merge(first: Delta, second: Delta) -> Delta:
    """Join two deltas of one choice into one.

    Args:
        first: The earlier delta, which must not be the last delta of the choice.
        second: The delta that follows `first`.
    """
    assert first.index == second.index, f"deltas of choices {first.index} and {second.index}"
    assert first.finish_reason is None, "nothing follows a choice's last delta"
    logprobs = None
    if first.logprobs is not None or second.logprobs is not None:
        logprobs = (first.logprobs or ()) + (second.logprobs or ())
    return Delta(
        index=first.index,
        text=first.text + second.text,
        token_ids=first.token_ids + second.token_ids,
        logprobs=logprobs,
        finish_reason=second.finish_reason,
        stop_reason=second.stop_reason,
        message=second.message,
        kv_transfer=second.kv_transfer,
        weight_versions=joined_versions(
            first.weight_versions, len(first.token_ids), second.weight_versions, len(second.token_ids)
        ),
    )
