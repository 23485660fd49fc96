"""One running batch: sends several lines at a time as requests in its owner's name.

When the scope of a batch is cancelled, the engine frees the blocks of its lines at the latest one step later.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import msgspec
import trio

from trioserve.api.batches.batch_book import BatchBook, BatchDeleted, DoneLine
from trioserve.api.batches.batch_record import BatchError, BatchStatus, BatchUsage
from trioserve.api.batches.input_lines import (
    InputDeleted,
    InputLine,
    InternalExchange,
    LineReader,
    LineRequest,
    ResponseTooLarge,
    custom_id_of,
    line_request,
)
from trioserve.api.error_responses import REASON_HEADER
from trioserve.api.limits import BatchSettings
from trioserve.api.surface import MESSAGES_PATH
from trioserve.contracts.errors import StoreFault, StoreFull
from trioserve.store.store import Store
from trioserve.trio_tools.fair_slots import FairSlots

__all__ = ["CANCELLED_CODE", "EXPIRED_CODE", "BatchRun"]

logger = logging.getLogger(__name__)

CANCELLED_CODE = "batch_cancelled"
EXPIRED_CODE = "batch_expired"
RETRY_SECONDS_MIN = 1.0
RETRY_SECONDS_MAX = 30.0
LINES_BETWEEN_TURNS = 64  # After this number of lines, other tasks run. Reading a line takes a few microseconds.
DROPPED_LINES_AT_ONCE = 256  # One write to the store has at most this number of dropped lines.
# A line is retried after a refusal for one of these reasons, which concern the server and not the line.
RETRIED_REASONS = frozenset(
    {"draining", "paused", "step_overdue", "engine_reopening", "no_endpoint", "queue_wait_over"}
)
# After a refusal for one of these reasons, the server must be restarted. The line waits for the next start.
SERVER_BROKEN_REASONS = frozenset({"engine_fault"})


class _Postponed(Exception):
    """Raised if the server shuts down. The next start of the server runs the rest of the batch."""


class BatchRun:
    """One running batch.

    Args:
        store: Holds the batch, its files and its results.
        book: The stored part of the batch.
        settings: Limits.
        serve: Answers an exchange in the owner's name.
        headers: Headers for all requests of the batch.
        running: Limits the batches that run at a time.
        lines_under_way: Limits the running lines of all batches.
        count_line: Called for each finished line, with "output" or "error".

    Attributes:
        done: Event that is set when the batch has ended, or when only the next start of the server can continue the
            batch.
    """

    def __init__(
        self,
        store: Store,
        book: BatchBook,
        settings: BatchSettings,
        serve: Callable[[InternalExchange], Awaitable[None]],
        *,
        headers: list[tuple[str, str]],
        running: FairSlots,
        lines_under_way: FairSlots,
        count_line: Callable[[str], None],
    ) -> None:
        self.book = book
        self.done = trio.Event()
        self._scope = trio.CancelScope()
        self._store = store
        self._settings = settings
        self._serve = serve
        self._headers = headers
        self._running = running
        self._lines_under_way = lines_under_way
        self._count_line = count_line
        self._first_with_id: dict[int, int] = {}
        self._reading = trio.Lock()
        self._reader: LineReader | None = None
        self._is_draining = False
        self._failure: Exception | None = None

    def cancel(self) -> None:
        """Cancel the running lines. Never waits."""
        self._scope.cancel()

    def drain(self) -> None:
        """Send no further line. Running lines may finish. The next start with this store runs the remaining lines."""
        self._is_draining = True
        self.book.drain()

    async def work(self) -> None:
        """Run the batch to its end, or until the server shuts down."""
        book = self.book
        try:
            try:
                await self._work()
            except InputDeleted:
                error = BatchError(code="input_file_gone", message="the input file is gone", param="input_file_id")
                await self._break_off(error)
            except BatchDeleted:
                await self._break_off(BatchError(code="file_gone", message="a file of this batch is gone"))
            except (StoreFull, StoreFault) as failure:
                if self._is_draining:
                    raise _Postponed from None
                code = "store_full" if isinstance(failure, StoreFull) else "store_fault"
                await self._break_off(BatchError(code=code, message=str(failure)))
            except _Postponed:
                raise
            except Exception:
                # The exception is handled here, because it would otherwise cancel the other batches in the nursery.
                logger.exception("batch broke off batch=%s", book.batch_id)
                await self._break_off(BatchError(code="internal_error", message="the server failed on this batch"))
        except _Postponed:
            logger.info("batch left for the next start batch=%s", book.batch_id)
        except BatchDeleted:
            logger.info("batch deleted batch=%s", book.batch_id)
        except (StoreFull, StoreFault) as error:
            logger.error("batch not finished batch=%s error=%s", book.batch_id, error)
        except Exception:
            logger.exception("batch not finished batch=%s", book.batch_id)
        finally:
            self.done.set()

    async def _break_off(self, error: BatchError) -> None:
        """End the batch early. The batch gets the status cancelled if a cancellation was requested, and otherwise the
        status failed.
        """
        if self.book.record.status is BatchStatus.CANCELLING:
            await self.book.close(BatchStatus.CANCELLED)
        else:
            await self.book.fail(error)

    async def _work(self) -> None:
        book = self.book
        if not book.record.status.is_ending:
            seconds_left = book.record.expires_at - self._store.now()
            with self._scope, trio.move_on_after(max(0.0, seconds_left)) as window:
                async with self._running.place(self.book.owner):
                    if not await self._validate():
                        return
                    await self._send_lines()
            if self._scope.cancelled_caught:
                await book.move(BatchStatus.CANCELLING)
            elif self._is_draining and not window.cancelled_caught and not book.is_whole:
                raise _Postponed
            else:
                await book.move(BatchStatus.FINALIZING, is_expired=window.cancelled_caught)
        if book.record.status is BatchStatus.CANCELLING:
            # Anthropic's API reports a result for each request of a cancelled batch.
            if book.record.endpoint == MESSAGES_PATH:
                await self._drop_remaining(BatchError(code=CANCELLED_CODE, message="the batch was cancelled"))
            await book.close(BatchStatus.CANCELLED)
            return
        if book.record.is_expired:
            message = "the time limit of the batch passed before this line was sent"
            await self._drop_remaining(BatchError(code=EXPIRED_CODE, message=message))
        await book.close(BatchStatus.EXPIRED if book.record.is_expired else BatchStatus.COMPLETED)

    async def _validate(self) -> bool:
        """Read all lines, count them, and record their ids. At the first start of the batch, also begin the batch.

        Returns:
            False if the input is invalid and the batch has failed.
        """
        lines_max = self._settings.lines_max
        reader = self._new_reader()
        total = 0
        while (line := await reader.next()) is not None:
            total += 1
            if total % LINES_BETWEEN_TURNS == 0:
                await trio.lowlevel.checkpoint()
            custom_id = custom_id_of(line.raw)
            if custom_id is not None:
                self._first_with_id.setdefault(hash(custom_id), line.number)
            if total > lines_max:
                break
        if self.book.record.status is not BatchStatus.VALIDATING:
            return True
        if 1 <= total <= lines_max:
            await self.book.begin(total)
            return True
        if total:
            error = BatchError(code="too_many_lines", message=f"the input has more than {lines_max} lines")
        else:
            error = BatchError(code="empty_file", message="the input has no line")
        await self.book.fail(msgspec.structs.replace(error, param="input_file_id"))
        return False

    # --- lines ---

    async def _send_lines(self) -> None:
        """Send all remaining lines. Return early if the server shuts down.

        Raises:
            StoreFull: An output could not be written.
            StoreFault: An output could not be written.
            BatchDeleted: A file of the batch was deleted.
            InputDeleted: The input file is gone.
        """
        record = self.book.record
        self._reader = self._new_reader(number=record.line_next, offset=record.offset_next)
        self._failure = None
        async with trio.open_nursery() as nursery:
            for _ in range(self._settings.lines_at_once):
                nursery.start_soon(self._send_next_lines, nursery)
        if self._failure is not None:
            raise self._failure

    async def _send_next_lines(self, nursery: trio.Nursery) -> None:
        try:
            while (line := await self._next_line()) is not None:
                done = await self._send_line(line)
                if done is None:
                    return
                await self.book.note(done)
                self._count_line("error" if done.is_error else "output")
        except (StoreFull, StoreFault, BatchDeleted, InputDeleted) as failure:
            # The error is raised outside of the nursery, because the nursery would wrap it in an exception group.
            self._failure = failure
            nursery.cancel_scope.cancel()

    async def _next_line(self) -> InputLine | None:
        assert self._reader is not None
        async with self._reading:
            while not self._is_draining:
                line = await self._reader.next()
                if line is None:
                    return None
                if not self.book.is_done(line.number):
                    await self.book.wait_for_room(line.number)
                    return line
                self.book.pass_over(line.number, line.end)
        return None

    async def _send_line(self, line: InputLine) -> DoneLine | None:
        """Send a line. Return its output, or None if the server shuts down before the line is done."""
        record = self.book.record
        request = line_request(line, record.endpoint, line_bytes_max=self._settings.line_bytes_max)
        if isinstance(request, BatchError):
            return self._error_line(line, request)
        if self._first_with_id.get(hash(request.custom_id)) != line.number:
            message = "an earlier line has the same custom_id: send a different one for each line"
            return self._error_line(line, BatchError(code="duplicate_custom_id", message=message, param="custom_id"))
        wait_seconds = RETRY_SECONDS_MIN
        while not self._is_draining:
            exchange = InternalExchange(
                record.endpoint,
                [*self._headers, ("x-request-id", f"{self.book.batch_id}-{line.number}")],
                request.body,
                response_bytes_max=self._settings.response_bytes_max,
            )
            async with self._lines_under_way.place(self.book.owner):
                try:
                    await self._serve(exchange)
                except ResponseTooLarge:
                    message = f"the response has more than {self._settings.response_bytes_max} bytes"
                    return self._error_line(line, BatchError(code="response_too_large", message=message))
            reason = exchange.response_headers.get(REASON_HEADER)
            if reason in SERVER_BROKEN_REASONS:
                self._is_draining = True
            if self._is_draining and exchange.status != 200:
                return None
            if exchange.status != 429 and reason not in RETRIED_REASONS:
                return self._response_line(line, request, exchange)
            retry_after = exchange.response_headers.get("retry-after") or ""
            server_seconds = float(retry_after) if retry_after.isdecimal() else 0.0
            await trio.sleep(max(wait_seconds, min(RETRY_SECONDS_MAX, server_seconds)))
            wait_seconds = min(RETRY_SECONDS_MAX, wait_seconds * 2)
        return None

    def _response_line(self, line: InputLine, request: LineRequest, exchange: InternalExchange) -> DoneLine:
        is_error = exchange.status != 200
        response = {
            "status_code": exchange.status,
            "request_id": exchange.response_headers.get("x-request-id"),
            # The line breaks are removed, because one line is one result. The model may write line breaks in the
            # arguments of a tool call.
            "body": msgspec.Raw(msgspec.json.format(exchange.response, indent=-1)),
        }
        output = self._output_line(line, request.custom_id, response=response)
        usage = BatchUsage() if is_error else usage_of(exchange.response)
        return DoneLine(number=line.number, end=line.end, output=output, is_error=is_error, usage=usage)

    def _error_line(self, line: InputLine, error: BatchError) -> DoneLine:
        output = self._output_line(line, custom_id_of(line.raw), error=error)
        return DoneLine(number=line.number, end=line.end, output=output, is_error=True)

    def _output_line(
        self, line: InputLine, custom_id: str | None, *, response: object = None, error: BatchError | None = None
    ) -> bytes:
        value = {
            "id": f"batch_req_{self.book.batch_id.removeprefix('batch_')}_{line.number}",
            "custom_id": custom_id,
            "response": response,
            "error": None if error is None else {"code": error.code, "message": error.message, "line": line.number + 1},
        }
        return msgspec.json.encode(value) + b"\n"

    async def _drop_remaining(self, error: BatchError) -> None:
        """Write an error for each line that is not done."""
        record = self.book.record
        if not record.total:
            return
        reader = self._new_reader(number=record.line_next, offset=record.offset_next)
        dropped: list[DoneLine] = []
        while (line := await reader.next()) is not None:
            if self.book.is_done(line.number):
                self.book.pass_over(line.number, line.end)
                continue
            dropped.append(msgspec.structs.replace(self._error_line(line, error), is_dropped=True))
            if len(dropped) == DROPPED_LINES_AT_ONCE:
                await self.book.settle_lines(*dropped)
                dropped = []
        await self.book.settle_lines(*dropped)

    def _new_reader(self, *, number: int = 0, offset: int = 0) -> LineReader:
        return LineReader(
            self._store,
            self.book.record.input_file_id,
            self.book.owner,
            line_bytes_max=self._settings.line_bytes_max,
            number=number,
            offset=offset,
            kind=self.book.file_kind,
        )


class _Details(msgspec.Struct):
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class _Usage(msgspec.Struct):
    """Token counts in the formats of chat completions, text completions, and responses."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None


class _Used(msgspec.Struct):
    usage: _Usage | None = None


def usage_of(response: bytes) -> BatchUsage:
    """Return the token counts of a response.

    Args:
        response: Body of the response.
    """
    usage = msgspec.json.decode(response, type=_Used).usage or _Usage()
    read = usage.prompt_tokens_details or usage.input_tokens_details or _Details()
    written = usage.completion_tokens_details or usage.output_tokens_details or _Details()
    return BatchUsage(
        input_tokens=usage.prompt_tokens or usage.input_tokens,
        cached_tokens=read.cached_tokens,
        output_tokens=usage.completion_tokens or usage.output_tokens,
        reasoning_tokens=written.reasoning_tokens,
    )
