"""Disaggregated requests: one endpoint computes the prompt, and another endpoint computes the response.

First, the router asks a prefill endpoint for one token. The prefill endpoint holds the KV blocks and returns
kv_transfer_params, with which another engine can read the blocks. The decode endpoint gets the client's own body with
these parameters, and its response goes to the client.

A trioserve endpoint streams its prefill response, and ends the stream when it no longer holds the blocks. So the router
holds the blocks by keeping the stream open. Closing the connection releases the blocks at once. The router closes it at
the first token of the response, or when the client leaves. Other servers have other rules for the release.

If the split fails, one endpoint computes the whole request without kv_transfer_params (see router/core). The router
prefers an endpoint whose prefix cache has the prompt.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec
import trio

from trioserve.api.openai.chat_prompt import AS_FITS
from trioserve.api.openai.request_types import COMPLETION_TOKENS_DEFAULT, Int32, decode_body
from trioserve.contracts.endpoint import EndpointId, PairOutcome, Stage
from trioserve.contracts.errors import EndpointLost, InvalidRequest, RequestAborted
from trioserve.proxy.proxied_request import Refused, check_status, error_code
from trioserve.proxy.relay import attempt, handle_failure
from trioserve.proxy.response_shape import InvalidAnswer, check_head, is_error
from trioserve.proxy.routed_body import CHAT_PATH, COMPLETIONS_PATH, TRANSFER_PARAMS, RoutedBody, rewritten
from trioserve.proxy.router_context import request_headers
from trioserve.trio_tools.errors_unwrapped import errors_unwrapped

if TYPE_CHECKING:
    from trioserve.proxy.proxied_request import ProxiedRequest
    from trioserve.proxy.remote_endpoint import RemoteRequest, RemoteResponse

__all__ = ["can_be_disaggregated", "prefill_body", "serve_disaggregated"]

# All keys are present, because some servers check whether a key exists.
ASKED_OF_PREFILL: dict[str, object] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class _DisaggregatedBody(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that decide whether a request can be disaggregated, in addition to those of RoutedBody."""

    max_tokens: Int32 | None = None
    max_completion_tokens: Int32 | None = None
    min_tokens: Int32 | None = None
    best_of: Int32 | None = None
    echo: bool | None = None
    prompt_logprobs: Int32 | None = None
    truncate_prompt_tokens: Int32 | None = None


def can_be_disaggregated(path: str, raw: bytes, body: RoutedBody) -> bool:
    """Return True if prompt and response can be computed at two endpoints.

    Only the KV of the prompt moves between the endpoints. So the request must have one prompt and one response of more
    than one token, and must not ask for data about the prompt.

    Args:
        path: Path of the request.
        raw: Body of the request.
        body: Fields that the router has read from `raw`.
    """
    if path not in (CHAT_PATH, COMPLETIONS_PATH) or (body.n or 1) != 1 or body.prompt_count != 1:
        return False
    if bytes(body.resume):  # A request that resumes a response is not split into two stages.
        return False
    try:
        fields = decode_body(raw, _DisaggregatedBody)
    except InvalidRequest:
        return False  # The endpoint reports the error to the client.
    tokens_max = fields.max_tokens
    if path == CHAT_PATH:
        tokens_max = fields.max_tokens if fields.max_completion_tokens is None else fields.max_completion_tokens
    elif tokens_max is None:
        tokens_max = COMPLETION_TOKENS_DEFAULT
    # In the prefill stage, the response has one token. So the endpoint would truncate the prompt less than for the full
    # response.
    is_cut_to_fit = fields.truncate_prompt_tokens == AS_FITS
    asks_for_prompt = fields.echo or fields.prompt_logprobs is not None or is_cut_to_fit
    return (tokens_max is None or tokens_max > 1) and (fields.best_of or 1) == 1 and not asks_for_prompt


def prefill_body(path: str, raw: bytes, fields: dict[str, object], *, stream: bool) -> bytes:
    """Make the body that asks an endpoint to compute the prompt: the client's body, limited to one token.

    Args:
        path: Path of the request.
        raw: Body of the client.
        fields: New values by field name.
        stream: Whether the prefill response is streamed.
    """
    fields = {**fields, "stream": stream, "max_tokens": 1, TRANSFER_PARAMS: ASKED_OF_PREFILL}
    if path == CHAT_PATH:
        fields["max_completion_tokens"] = 1
    if (decode_body(raw, _DisaggregatedBody).min_tokens or 0) > 1:
        fields["min_tokens"] = 1
    return rewritten(raw, fields, without=("stream_options", "return_partial"))


logger = logging.getLogger(__name__)

# The limit is enough for the ids of 100,000 blocks. A response of one token is never longer.
PREFILL_BYTES_MAX = 1024 * 1024
ERROR_BYTES_SHOWN = 200
EVENT_END = b"\n\n"


async def serve_disaggregated(proxied: ProxiedRequest) -> None:
    """Serve a disaggregated request. Its first stage is the prefill.

    The exceptions are the same as for a request that runs at a single endpoint.

    Args:
        proxied: The request.
    """
    with errors_unwrapped():
        async with trio.open_nursery() as nursery:
            request = _DisaggregatedRequest(proxied, nursery)
            try:
                await request.serve()
            finally:
                request.release()
            nursery.cancel_scope.cancel()


class _Hold:
    """A prefill request, and the blocks that the endpoint holds while its stream is open."""

    def __init__(self, request: RemoteRequest) -> None:
        self.request = request
        self.watching = trio.CancelScope()

    def close(self) -> None:
        self.watching.cancel()
        self.request.end()


class _DisaggregatedRequest:
    """State of one disaggregated request. `release` releases the blocks of its prefill."""

    def __init__(self, proxied: ProxiedRequest, nursery: trio.Nursery) -> None:
        self._proxied = proxied
        self._context = proxied.context
        self._admission = proxied.admission
        self._nursery = nursery
        self._hold: _Hold | None = None
        self._params = b""

    async def serve(self) -> None:
        context, admission = self._context, self._admission
        while True:
            id = await self._proxied.lease()
            if admission.stage is Stage.PREFILL:
                if await self._prefill(id):
                    return
                continue
            context.prefill_endpoint = admission.prefilled_by if admission.stage is Stage.DECODE else None
            params: dict[str, object] = {}
            if admission.stage is Stage.DECODE:
                params = {TRANSFER_PARAMS: msgspec.Raw(self._params)}
            else:
                self.release()  # Release the blocks first, because the same prompt is sent again with the same id.
                self._log_not_disaggregated()
            if await attempt(self._proxied, id, self._proxied.body_for(id, params), on_begin=self.release):
                return

    def release(self) -> None:
        """Release the blocks at the prefill endpoint."""
        hold, self._hold = self._hold, None
        if hold is not None:
            hold.close()

    async def _prefill(self, id: EndpointId) -> bool:
        """Have the prompt computed.

        Returns:
            True if the request is over, because the client has got an error.
        """
        context, admission = self._context, self._admission
        is_ours = context.services.fleet.reports_role(id)
        fields = {**self._proxied.model_field(id), **self._proxied.clock.left()}
        sent = prefill_body(context.exchange.path, self._proxied.asked.raw, fields, stream=is_ours)
        try:
            with context.asking(id, admission.stage), admission.attempt():
                headers = request_headers(context, admission.stage)
                request = context.services.fleet.remote(id).request(
                    context.exchange.method, context.target, headers, sent, computes=True
                )
                hold = self._hold = _Hold(request)
                response = await request.begin()
                outcome = await self._read(id, response)
        except (Refused, EndpointLost) as failure:
            self.release()
            return await handle_failure(self._proxied, id, failure)
        self._proxied.clock.note_served(trio.current_time() - admission.leased_at)
        if outcome is not None:
            self.release()
        elif is_ours:
            self._nursery.start_soon(self._watch, hold, response)
        admission.prefilled(outcome=outcome)
        return False

    async def _read(self, id: EndpointId, response: RemoteResponse) -> PairOutcome | None:
        """Read the kv_transfer_params from a prefill response.

        Returns:
            None if the endpoint holds the blocks. Otherwise the reason why not.

        Raises:
            EndpointLost: The endpoint failed, or sent no valid response.
            Refused: The endpoint refuses the request.
        """
        await check_status(response, Stage.PREFILL)
        kind = response.header("content-type")
        if response.status != 200:
            said = await response.whole(PREFILL_BYTES_MAX) or b""
            if response.status < 400 or not is_error(kind, said):
                raise InvalidAnswer(id, f"status_{response.status}", f"status {response.status}, {said[:80]!r}")
            return PairOutcome.NOT_HELD  # The next endpoint gets the client's own body, and decides about the error.
        check_head(id, response.status, kind)
        if (kind or "").startswith("text/event-stream"):
            end = await _last_event(id, response)
        else:
            whole = await response.whole(PREFILL_BYTES_MAX)
            end = None if whole is None else _parsed(id, whole)
        if end is None or not end.is_held:
            return PairOutcome.FINISHED if end is not None and end.is_finished else PairOutcome.NOT_HELD
        self._params = bytes(end.kv_transfer_params)
        return None

    async def _watch(self, hold: _Hold, response: RemoteResponse) -> None:
        """Wait until the endpoint no longer holds the blocks."""
        with hold.watching:
            try:
                while await response.next_piece() is not None:
                    pass
            except EndpointLost:
                pass
            hold.request.end()
            self._admission.hold_lost()

    def _log_not_disaggregated(self) -> None:
        context, outcome = self._context, self._admission.pair_outcome
        assert outcome is not None
        if outcome is PairOutcome.PAIRED:
            return  # The two endpoints worked as planned. The response now resumes at another endpoint.
        logger.info(
            "not disaggregated request=%s endpoint=%s reason=%s", context.request_id, context.endpoint, outcome.value
        )


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _PrefillResponse(msgspec.Struct):
    """Prefill response of one token, or an event of it."""

    choices: list[_Choice] = []
    kv_transfer_params: msgspec.Raw = msgspec.Raw()
    error: msgspec.Raw = msgspec.Raw()

    @property
    def is_over(self) -> bool:
        return any(choice.finish_reason is not None for choice in self.choices)

    @property
    def is_finished(self) -> bool:
        """True if the response is complete with its first token, and was not cut at the limit of one token."""
        return any(choice.finish_reason not in (None, "length") for choice in self.choices)

    @property
    def is_held(self) -> bool:
        return bytes(self.kv_transfer_params).startswith(b"{") and not self.is_finished


def _parsed(id: EndpointId, said: bytes) -> _PrefillResponse:
    """Parse a prefill response.

    Raises:
        EndpointLost: The response is an error.
        InvalidAnswer: The text is not a response.
        RequestAborted: The request was aborted at the endpoint.
    """
    try:
        response = msgspec.json.decode(said, type=_PrefillResponse)
    except msgspec.DecodeError as wrong:
        raise InvalidAnswer(id, "not_json", f"{said[:80]!r} as a prefill response") from wrong
    if bytes(response.error) not in (b"", b"null"):
        error = bytes(response.error)[:ERROR_BYTES_SHOWN].decode(errors="replace")
        if error_code(said) == "request_aborted":
            raise RequestAborted(f'the request was aborted at the endpoint "{id}"')
        raise EndpointLost(f'the endpoint "{id}" failed a prefill: {error}')
    return response


async def _last_event(id: EndpointId, response: RemoteResponse) -> _PrefillResponse | None:
    """Return the event that ends the prefill as soon as it arrives.

    The stream stays open as long as the blocks are held.

    Returns:
        The event, or None if it is too large.

    Raises:
        EndpointLost: The stream ended without this event.
    """
    held = b""
    while (piece := await response.next_piece()) is not None:
        *events, held = (held + piece).split(EVENT_END)
        for event in events:
            for line in event.split(b"\n"):
                data = line.removeprefix(b"data:").strip()
                if line.startswith(b"data:") and data != b"[DONE]":
                    end = _parsed(id, data)
                    if end.is_over:
                        return end
        if len(held) > PREFILL_BYTES_MAX:
            return None
    raise EndpointLost(f'the endpoint "{id}" ended a prefill before its token')
