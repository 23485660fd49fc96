"""Fixtures for an App without a network and a model: exchanges in memory, and an engine whose output a test scripts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import pytest
import trio

from trioserve.admission.file_decoders import AudioDecoder
from trioserve.admission.prompt_encoder import INLINE_CHARACTERS_MAX
from trioserve.api.routes import App
from trioserve.contracts.endpoint import EndpointLoad
from trioserve.contracts.errors import EngineFault, InvalidRequest
from trioserve.contracts.events import AbortOutcome, FinishReason, TokenLogprob
from trioserve.contracts.media import AudioProcessing, AudioPrompt
from trioserve.contracts.output import Delta
from trioserve.contracts.prompt import ChatPrompt, Prompt
from trioserve.contracts.sampling import SamplingParams
from trioserve.engine.adapters import Adapters
from trioserve.engine.lifecycle.load_changes import LoadChanges
from trioserve.engine.lifecycle.step_times import StepWatch
from trioserve.http.exchange import Exchange, HeaderFields, Headers
from trioserve.metrics.registry import Metrics
from trioserve.text.response_parsers.registry import ResponseFamilies
from trioserve.trio_tools.deadline_keeper import DeadlineKeeper

BOS = 1
Step = Delta | Exception | trio.Event
"""One thing a scripted stream does: yield, raise, or wait."""
Script = Callable[[tuple[int, ...], SamplingParams], Iterable[Step]]


class MemoryExchange(Exchange):
    """An exchange that records what was sent. While `gate` is closed, sends wait, as for a full client window."""

    http_version = "2"
    peer = "memory"

    def __init__(self, method: str, path: str, body: bytes, headers: Iterable[tuple[str, str]]) -> None:
        self.method, self.path, self.query = method, path, ""
        self.headers = Headers(headers)
        self.status: int | None = None
        self.response_headers: dict[str, str] = {}
        self.data = b""
        self.write_count = 0
        self.finished = False
        self.head_sent = trio.Event()
        self.gate: trio.Event | None = None
        self.body_error: Exception | None = None
        self.send_error: Exception | None = None
        self._body = body

    @property
    def started(self) -> bool:
        return self.status is not None

    async def body(self) -> bytes:
        await trio.lowlevel.checkpoint()
        if self.body_error is not None:
            raise self.body_error
        return self._body

    async def respond(self, status: int, headers: HeaderFields, body: bytes) -> None:
        await self.start(status, headers)
        if self.method != "HEAD":
            await self.send(body)
        await self.finish()

    async def start(self, status: int, headers: HeaderFields) -> None:
        assert self.status is None, "two responses to one request"
        assert len({name for name, _ in headers}) == len(headers), "a header field is repeated"
        self.status = status
        self.response_headers = dict(headers)
        self.head_sent.set()
        await trio.lowlevel.checkpoint()

    async def send(self, data: bytes) -> None:
        assert self.started
        assert not self.finished
        if self.send_error is not None:
            raise self.send_error
        if self.gate is not None:
            await self.gate.wait()
        await trio.lowlevel.checkpoint()
        self.data += data
        self.write_count += 1

    async def finish(self, last: bytes = b"") -> None:
        if last:
            await self.send(last)
        self.finished = True
        await trio.lowlevel.checkpoint()

    def json(self) -> Any:
        assert self.response_headers["content-type"] == "application/json"
        return json.loads(self.data)

    def events(self) -> list[Any]:
        """Return the data of each event, split as clients split streams. The data is decoded JSON, or the text
        "[DONE]".
        """
        assert self.response_headers["content-type"].startswith("text/event-stream")
        text = self.data.decode()
        events = text.removesuffix("\n\n").split("\n\n")
        assert text.splitlines() == [line for event in events for line in (event, "")]
        values = [event.removeprefix("data: ") for event in events]
        return [value if value == "[DONE]" else json.loads(value) for value in values]


class LetterTokenizer:
    """A tokenizer whose tokens are characters. The id of a token is its code point."""

    chat_template = None

    bos_token, eos_token, pad_token, chat_template = chr(BOS), None, None, None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [BOS] * add_special_tokens + [ord(character) for character in text]

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(chr(token_id) for token_id in token_ids if token_id != BOS)

    def special_ids(self) -> dict[str, int]:
        return {}

    def writes_special(self, token: str) -> bool:
        return False

    def added_token_id(self, text: str) -> int | None:
        return None

    def token_text(self, token_id: int) -> str:
        return chr(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        return chr(token_id).encode()


class ScriptedStream:
    def __init__(self, engine: ScriptedEngine, prompt: Prompt, sampling: SamplingParams, request_id: str) -> None:
        self.id = request_id
        self.prompt = prompt
        self.sampling = sampling
        self.choice_count = sampling.n
        self.prompt_token_ids: tuple[int, ...] = ()
        self.prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
        self.known: tuple[Delta, ...] = ()
        self.ignored_keywords: tuple[str, ...] = ()
        self.cached_token_count = 0
        self.completion_token_count = 0
        self.entered = self.left = False
        self.is_held = False
        self.taken_count = 0
        self._engine = engine
        self._steps: Iterator[Step] = iter(())

    @property
    def prompt_token_count(self) -> int:
        return len(self.prompt_token_ids)

    def await_tools(self, tools: Sequence[str]) -> None:
        self.awaited_tools = tuple(tools)

    async def __aenter__(self) -> ScriptedStream:
        if self._engine.enter_errors:
            error = self._engine.enter_errors.pop(0)
            if error is not None:
                raise error
        if self._engine.queue is not None:
            await self._engine.queue.wait()
        self.entered = True
        self.prompt_token_ids = tuple(await self._engine.encode(self.prompt))
        self.cached_token_count = self._engine.cached_token_count
        if self.sampling.prompt_logprobs is not None:
            self.prompt_logprobs = (None, *(logprob(token_id) for token_id in self.prompt_token_ids[1:]))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.left = True

    def forget_known(self) -> None:
        self.known = ()

    def weight_versions(self, index: int = 0) -> tuple[()]:
        return ()

    async def wait_until_begun(self) -> None:
        await trio.lowlevel.checkpoint()

    def __aiter__(self) -> ScriptedStream:
        self._steps = iter(self._engine.script(self.prompt_token_ids, self.sampling))
        return self

    async def __anext__(self) -> Delta:
        for step in self._steps:
            assert self.entered
            assert not self.left
            await trio.lowlevel.checkpoint()
            if isinstance(step, trio.Event):
                await step.wait()
            elif isinstance(step, Exception):
                raise step
            else:
                self.completion_token_count += len(step.token_ids)
                self.taken_count += 1
                return step
        raise StopAsyncIteration


class Model:
    name = "letters"
    served_names = ("letters", "org/letters")
    source = "./letters"
    context_tokens_max = 100
    batch_invariant = False
    fingerprint: str | None = None
    created_at = 1_700_000_000
    vocab_size = 0x110000
    family: str | None = "alphabet"
    weight_bytes = 26
    pooled = None
    audio: AudioProcessing | None = None


class ScriptedEngine:
    def __init__(self) -> None:
        self.model = Model()
        self.tokenizer = LetterTokenizer()
        self.adapters = Adapters()
        self.families = ResponseFamilies(self.tokenizer)  # type: ignore[arg-type]  # it has the methods that families call
        self.metrics = Metrics("letters")
        self.default_sampling = SamplingParams()
        self.ready, self.draining = True, False
        self.step_watch = StepWatch()
        self.load_changes = LoadChanges()
        self.fault: EngineFault | None = None
        self.reopens_at: float | None = None
        self.blocks_admission = self.is_sleeping = self.has_half_weights = False
        self.weight_version = "default"
        self.instance = "letters-1"
        self.audio_decoder: AudioDecoder | None = None
        self.script: Script = say("Hello", "!")
        self.enter_errors: list[Exception | None] = []
        self.queue: trio.Event | None = None
        self.text_gate: trio.Event | None = None
        self.text_jobs: list[Callable[..., Any]] = []
        self.cached_token_count = 0
        self.call_at = DeadlineKeeper().set  # No alarm fires, because no task runs the keeper.
        self.streams: list[ScriptedStream] = []
        self.options: list[dict[str, Any]] = []

    def generate(
        self, prompt: Prompt, sampling: SamplingParams | None = None, *, request_id: str | None = None, **options: Any
    ) -> ScriptedStream:
        assert request_id is not None
        stream = ScriptedStream(self, prompt, sampling or self.default_sampling, request_id)
        self.streams.append(stream)
        self.options.append(options)
        return stream

    def load(self) -> EndpointLoad:
        return EndpointLoad(running=2, waiting=1, max_num_seqs=8, kv_usage=0.25)

    async def encode(self, prompt: Prompt, *, add_special_tokens: bool = True, cut: object = None) -> list[int]:
        await trio.lowlevel.checkpoint()
        if isinstance(prompt, AudioPrompt):
            return list(prompt.token_ids)
        if isinstance(prompt, ChatPrompt):
            return self.tokenizer.encode(
                "\n".join(f"{message['role']}: {message.get('content')}" for message in prompt.messages)
            )
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
        for token_id in prompt:
            if not 0 <= token_id < self.model.vocab_size:
                raise InvalidRequest(f"token id {token_id}", param="prompt")
        return list(prompt)

    @contextmanager
    def tokenizing(self, *, owner: str | None = None) -> Iterator[ScriptedEngine]:
        yield self

    async def run(self, function: Callable[[], Any], *, size: int) -> Any:
        """Call the function. If the test has set `text_gate`, wait for the gate before a long job."""
        if size > INLINE_CHARACTERS_MAX:
            self.text_jobs.append(function)
            if self.text_gate is not None:
                await self.text_gate.wait()
        await trio.lowlevel.checkpoint()
        return function()

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        await trio.lowlevel.checkpoint()
        return self.tokenizer.decode(token_ids)

    def abort(self, request_ids: Iterable[str], reason: FinishReason = FinishReason.ABORT) -> dict[str, AbortOutcome]:
        return {}


def logprob(token_id: int, top: int = 2) -> TokenLogprob:
    """Return log probabilities: a token is the most probable one, and the ids after it are the alternatives."""
    return TokenLogprob(token_id, -0.5, tuple((token_id + rank, -0.5 - rank) for rank in range(top)))


def say(*texts: str, reason: FinishReason = FinishReason.STOP, message: str | None = None) -> Script:
    """Return a script for an engine: each choice outputs each text as one delta with one token per character, and then
    ends.
    """

    def script(prompt_token_ids: tuple[int, ...], sampling: SamplingParams) -> Iterable[Step]:
        if sampling.max_tokens == 0:
            for index in range(sampling.n):
                yield Delta(index=index, text="", token_ids=(), finish_reason=FinishReason.LENGTH)
            return
        for position, text in enumerate(texts):
            is_last = position == len(texts) - 1
            for index in range(sampling.n):
                yield Delta(
                    index=index,
                    text=text,
                    token_ids=tuple(map(ord, text)),
                    logprobs=None if sampling.logprobs is None else tuple(logprob(ord(letter)) for letter in text),
                    finish_reason=reason if is_last else None,
                    message=message if is_last else None,
                )

    return script


class Api:
    """The app as a client sees it. `exchange` makes a request, and `context` also runs the request to its end."""

    def __init__(self, **options: Any) -> None:
        self.engine = ScriptedEngine()
        self.options = options
        self.say = say
        self.logprob = logprob

    @property
    def app(self) -> App:
        return App(self.engine, **self.options)  # type: ignore[arg-type]  # a scripted engine stands in

    def exchange(
        self, method: str, path: str, body: object = b"", headers: dict[str, str] | None = None
    ) -> MemoryExchange:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return MemoryExchange(method, path, raw, (headers or {}).items())

    async def context(self, method: str, path: str, body: object = b"", **headers: str) -> MemoryExchange:
        exchange = self.exchange(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        await self.app(exchange)
        assert exchange.finished
        return exchange

    async def chat(self, **fields: Any) -> MemoryExchange:
        return await self.context(
            "POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], **fields}
        )

    async def complete(self, **fields: Any) -> MemoryExchange:
        return await self.context("POST", "/v1/completions", {"prompt": "ab", **fields})

    async def check_refused(self, path: str, body: object, *, status: int = 400, param: str | None = None) -> str:
        """Check that the request is refused in OpenAI's format. Returns the message."""
        exchange = await self.context("POST", path, body)
        assert exchange.status == status, exchange.data
        error = exchange.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["param"] == param, error
        return error["message"]

    def left(self) -> bool:
        """Return True if every stream that was entered has been left."""
        return all(stream.left for stream in self.engine.streams if stream.entered)


@pytest.fixture
def api() -> Api:
    return Api()


@pytest.fixture(scope="session")
def make_api() -> Callable[..., Api]:
    return Api
