"""Tests of sessions: what a turn adds to its prompt, which turns count, and what an ended session leaves behind."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import tokenizers
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.contracts.deadlines import Deadlines
from trioserve.contracts.errors import (
    AlreadyEnded,
    DeadlinePassed,
    InvalidRequest,
    Overloaded,
    RequestAborted,
    UnknownModel,
)
from trioserve.contracts.events import FinishReason
from trioserve.contracts.page import PrefetchResult
from trioserve.contracts.prompt import ChatPrompt
from trioserve.contracts.request import EngineRequest, Retention
from trioserve.contracts.sampling import SamplingParams
from trioserve.engine.session import Session, common_count
from trioserve.engine.sessions import LiveSession, SessionEnd, SessionName, ToolTimes
from trioserve.testing.byte_tokenizer import BYTE_VOCAB_SIZE, END_TOKEN, END_TOKEN_ID, byte_backend, byte_tokenizer
from trioserve.testing.fake_engine import FakeEngine, open_fake_engine
from trioserve.testing.scripted_connector import ScriptedConnector
from trioserve.text.tokenizer import Tokenizer
from trioserve.text.tokenizer_parts import TokenizerParts

USER = "Hello, engine."
TOOL = {"type": "function", "function": {"name": "look"}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"a": 1}}\n</tool_call>'
ENDING = "{{ message.role }}: {{ message.content }}" + END_TOKEN + "\n"
APPENDING = (
    f"{{% for message in messages %}}{ENDING}{{% endfor %}}{{% if add_generation_prompt %}}assistant: {{% endif %}}"
)
COUNTING = "{{ messages | length }} messages\n" + APPENDING
"""A template that is not append-only: its first line changes with each turn."""
SHORT_REASONING = APPENDING.replace("{{ message.content }}", "{{ message.content.split('</think>')[-1] }}")


def text_of(token_ids: tuple[int, ...]) -> str:
    return bytes(token_id for token_id in token_ids if token_id < 256).decode()


def turns_counted(engine: FakeEngine, prompt: str) -> int:
    return int(engine.metrics.session_turns_total.labels(prompt)._value.get())


async def read(stream: Any) -> str:
    async with stream:
        return "".join([delta.text async for delta in stream])


async def test_turn_sends_only_new_messages() -> None:
    prompts: list[str] = []

    def respond(prompt: str) -> str:
        prompts.append(prompt)
        return f"answer {len(prompts)}"

    async with open_fake_engine(response=respond) as engine:
        async with engine.session() as session:
            assert (await session.respond("one")).content == "answer 1"
            reply = await session.respond([{"role": "user", "content": "two"}])
            assert reply.content == "answer 2"
            assert reply.finish_reason is FinishReason.STOP
            assert [message["content"] for message in session.messages] == ["one", "answer 1", "two", "answer 2"]
        assert prompts[-1] == "user: one\nassistant: answer 1\nuser: two\nassistant: "
        engine.assert_all_free()


@pytest.mark.parametrize(
    ("options", "names"),
    [({}, ["look", "look"]), ({"parallel_tool_calls": False}, ["look"]), ({"tool_choice": "none"}, [])],
    ids=["default", "not parallel", "none"],
)
async def test_reply_has_the_allowed_number_of_tool_calls(options: dict[str, Any], names: list[str]) -> None:
    async with open_fake_engine(response=f"{CALL}\n{CALL}") as engine, engine.session() as session:
        reply = await session.respond(USER, tools=[TOOL], **options)
        assert [call.name for call in reply.tool_calls] == names
        assert [call["function"]["name"] for call in session.messages[-1].get("tool_calls", ())] == names
        assert (CALL in reply.content) is (not names)


async def test_turn_of_text_is_appended_to_the_tokens_of_all_turns() -> None:
    async with open_fake_engine(response="!") as engine, engine.session() as session:
        await read(session.generate("one"))
        first = session.token_ids
        assert text_of(first) == "one!"
        await read(session.generate(list(b"two")))
        assert session.token_ids[: len(first)] == first
        assert text_of(session.token_ids) == "one!two!"
        assert session.messages == ()
        assert turns_counted(engine, "first") == turns_counted(engine, "appended") == 1


async def test_append_only_template_reuses_the_whole_history() -> None:
    async with open_fake_engine(response="A long answer.", tokenizer=byte_tokenizer(APPENDING)) as engine:
        async with engine.session() as session:
            await session.respond(USER)
            history = session.token_ids
            reply = await session.respond("And now?")
            assert session.token_ids[: len(history)] == history
            block_size = engine.core.settings.block_size
            assert reply.cached_token_count == (len(history) - 1) // block_size * block_size
        assert turns_counted(engine, "appended") == 1
        assert engine.metrics.session_rewritten_tokens_total._value.get() == 0


@pytest.mark.parametrize(
    ("template", "response", "kept"),
    [
        (COUNTING, "Yes.", ""),
        (SHORT_REASONING, "<think>Hm.</think>Yes.", f"user: {USER}\nassistant: "),
    ],
)
async def test_rewritten_history_is_counted(template: str, response: str, kept: str) -> None:
    async with open_fake_engine(response=response, tokenizer=byte_tokenizer(template)) as engine:
        async with engine.session() as session:
            await session.respond(USER)
            history = session.token_ids
            await session.respond("And now?")
            common = common_count(history, session.token_ids)
            assert text_of(session.token_ids[:common]) == kept
        assert turns_counted(engine, "rewritten") == 1
        assert engine.metrics.session_rewritten_tokens_total._value.get() == len(history) - 1 - common


def merging_tokenizer() -> Tokenizer:
    """Return a byte tokenizer whose first token is not the byte 0, but the text "an"."""
    parts = json.loads(byte_backend(BYTE_VOCAB_SIZE).to_str())
    vocab = parts["model"]["vocab"]
    del vocab[next(text for text, token_id in vocab.items() if token_id == 0)]
    vocab["an"] = 0
    parts["model"]["merges"] = [["a", "n"]]
    backend = tokenizers.Tokenizer.from_str(json.dumps(parts))
    return Tokenizer(
        TokenizerParts(
            backend=backend, bos_token=None, eos_token=END_TOKEN, chat_template=APPENDING, tool_chat_template=None
        )
    )


async def test_history_keeps_the_tokens_that_the_model_chose_for_its_text() -> None:
    """The model writes a text byte by byte, for which the tokenizer would choose another token."""
    async with open_fake_engine(response="an answer", tokenizer=merging_tokenizer()) as engine:
        assert await engine.encode("an") == [0]
        async with engine.session() as session:
            await session.respond("One")
            history = session.token_ids
            await session.respond("an answer?")
            assert session.token_ids[: len(history)] == history
            assert 0 in session.token_ids[len(history) :]
        assert turns_counted(engine, "appended") == 1


async def test_control_token_spelled_as_text_is_another_history() -> None:
    async with open_fake_engine(tokenizer=byte_tokenizer(APPENDING)) as engine:
        history = [*b"user: Hi", END_TOKEN_ID, *b"x"]
        spliced = engine.session()._conversation._spliced
        assert spliced(history, [*history, *b"more"], 8) == [*history, *b"more"]
        assert spliced(history, [*b"user: Hi", *END_TOKEN.encode(), *b"x", *b"more"], 8) is None
        assert spliced(history, [*b"user: No", END_TOKEN_ID, *b"x"], 6) is None


# --- one turn at a time, and turns that do not count ---


async def test_second_turn_is_refused_while_one_runs() -> None:
    async with open_fake_engine(response="!", paused=True) as engine, engine.session() as session:
        async with session.generate("one", request_id="first"):
            with pytest.raises(InvalidRequest, match="first is a turn of this session and has not ended"):
                await read(session.generate("two"))
        engine.resume()
        await read(session.generate("two"))
        assert text_of(session.token_ids) == "two!"


async def leave_early(engine: FakeEngine, session: Session) -> None:
    async with session.generate("lost", SamplingParams(ignore_eos=True)) as stream:
        await anext(stream)


async def be_aborted(engine: FakeEngine, session: Session) -> None:
    async with session.generate("lost", SamplingParams(ignore_eos=True), request_id="lost") as stream:
        engine.abort(["lost"])
        assert [delta.finish_reason async for delta in stream][-1] is FinishReason.ABORT


async def be_refused(engine: FakeEngine, session: Session) -> None:
    with pytest.raises(InvalidRequest):
        await read(session.generate([999_999]))


@pytest.mark.parametrize("fail", [leave_early, be_aborted, be_refused])
async def test_incomplete_turn_changes_nothing_and_may_be_sent_again(fail: Callable[..., Any]) -> None:
    async with open_fake_engine(response="!") as engine, engine.session() as session:
        await read(session.generate("one"))
        before = session.token_ids
        await fail(engine, session)
        assert session.token_ids == before
        await read(session.generate("two"))
        assert text_of(session.token_ids) == "one!two!"


async def test_prompt_of_another_kind_is_refused() -> None:
    async with open_fake_engine(response="!") as engine:
        async with engine.session() as session:
            await read(session.generate("one"))
            with pytest.raises(InvalidRequest, match="prompt is a ChatPrompt, but the earlier turns"):
                session.generate(ChatPrompt(messages=[{"role": "user", "content": "two"}]))
        async with engine.session() as session:
            await session.respond("one")
            with pytest.raises(InvalidRequest, match="prompt is no ChatPrompt, but the earlier turns"):
                session.generate("two")


async def test_several_choices_are_refused() -> None:
    async with open_fake_engine() as engine, engine.session() as session:
        with pytest.raises(InvalidRequest, match="n is 2"):
            session.generate("one", SamplingParams(n=2))


async def test_failed_turn_raises_in_respond(autojump_clock: trio.testing.MockClock) -> None:
    async with open_fake_engine(step_seconds=1) as engine, engine.session() as session:
        with pytest.raises(DeadlinePassed):
            await session.respond("one", SamplingParams(ignore_eos=True), deadlines=Deadlines(timeout=3))
        assert session.messages == ()


# --- the end of a session ---


async def in_queue(engine: FakeEngine) -> None:
    await wait_all_tasks_blocked()


async def in_prefill(engine: FakeEngine) -> None:
    await engine.step(1)


async def in_decode(engine: FakeEngine) -> None:
    await engine.step(20)


@pytest.mark.parametrize("reach", [in_queue, in_prefill, in_decode])
async def test_leaving_the_scope_ends_the_turn_in_every_phase(reach: Callable[[FakeEngine], Any]) -> None:
    ends: list[FinishReason | None] = []
    async with open_fake_engine(paused=True, max_num_batched_tokens=64) as engine, trio.open_nursery() as nursery:

        async def turn(session: Session) -> None:
            async with session.generate("word " * 40, SamplingParams(ignore_eos=True)) as stream:
                async for delta in stream:
                    ends.append(delta.finish_reason)

        async with engine.session() as session:
            nursery.start_soon(turn, session)
            await wait_all_tasks_blocked()
            await reach(engine)
            used_before = engine.stats().blocks_used
        assert ends == [] or used_before
        await wait_all_tasks_blocked()
        assert ends[-1] is FinishReason.ABORT
        assert engine.stats().blocks_used == 0
        assert len(engine.sessions) == 0
        engine.assert_all_free()


async def test_leaving_the_scope_during_a_step_frees_the_blocks_after_the_step() -> None:
    async with open_fake_engine(paused=True) as engine, trio.open_nursery() as nursery:
        session = engine.session()
        await session.__aenter__()

        async def turn() -> None:
            with pytest.raises(RequestAborted):
                await session.respond(USER, SamplingParams(ignore_eos=True))

        nursery.start_soon(turn)
        await wait_all_tasks_blocked()
        async with engine.held_step():
            await session.__aexit__(None, None, None)
            assert engine.stats().blocks_used > 0
        await engine.finish_step()
        assert engine.stats().blocks_used == 0
        engine.assert_all_free()


async def test_session_is_usable_only_inside_its_scope() -> None:
    async with open_fake_engine(response="!") as engine:
        session = engine.session()
        with pytest.raises(AlreadyEnded, match="is not entered"):
            session.generate("one")
        async with session:
            stream = session.generate("one")
        with pytest.raises(AlreadyEnded, match="has ended"):
            session.generate("one")
        with pytest.raises(AlreadyEnded, match="has ended"):
            await read(stream)
        with pytest.raises(AlreadyEnded, match="entered before"):
            await session.__aenter__()
        engine.assert_all_free()


async def test_sessions_have_a_bound() -> None:
    async with open_fake_engine(sessions_max=2) as engine:
        async with engine.session(tenant="a"), engine.session(tenant="b"):
            with pytest.raises(Overloaded, match="2 sessions are open"):
                async with engine.session(tenant="c"):
                    pytest.fail("was entered")
        async with engine.session(tenant="c"):
            pass


async def test_callers_without_an_identity_may_use_all_session_slots_and_other_callers_half() -> None:
    async with open_fake_engine(sessions_max=4) as engine:
        lives = [engine.sessions.open() for _ in range(4)]
        with pytest.raises(Overloaded, match="4 of them by this caller"):
            engine.sessions.open()
        for live in lives:
            live.end()
        [engine.sessions.open(SessionName(name="", identity="a")) for _ in range(2)]
        with pytest.raises(Overloaded, match="2 of them by this caller"):
            engine.sessions.open(SessionName(name="", identity="a"))


async def test_session_that_waits_for_its_next_turn_holds_no_blocks() -> None:
    async with open_fake_engine(response="!") as engine:
        async with engine.session() as session:
            await session.respond("one " * 20)
            stats = engine.stats()
            assert (stats.sessions_waiting, stats.blocks_used) == (1, 0)
            assert stats.blocks_cached > 0
        stats = engine.stats()
        assert (stats.sessions_waiting, stats.blocks_retained) == (0, 0)
        engine.assert_all_free()


async def test_session_and_its_tenant_reach_the_core() -> None:
    calls: list[tuple[Any, ...]] = []
    async with open_fake_engine(response="!") as engine:
        core = engine.current_core
        for name in ("open_session", "end_session", "hint_session"):
            called = getattr(core, name)

            def note(*arguments: Any, name: str = name, called: Callable[..., None] = called) -> None:
                calls.append((name, *arguments[:-1]))
                called(*arguments)

            setattr(core, name, note)
        async with engine.session(tenant="t", retention=Retention(idle_seconds=5)) as session:
            live = engine.sessions.find(session.id, identity="t")
            assert live is not None
            await read(session.generate("one"))
            session.expect_turn(2.5)
        assert calls == [
            ("open_session", live.id, Retention(idle_seconds=5)),
            ("hint_session", live.id, 2.5),
            ("end_session", live.id),
        ]


async def test_sessions_are_opened_in_the_core_of_a_reopened_engine() -> None:
    async with open_fake_engine(response="!", engine_restarts=1) as engine, engine.session() as session:
        await read(session.generate("one"))
        engine.break_next_step()
        await read(session.generate("two"))
        assert text_of(session.token_ids) == "one!two!"
        assert engine.stats().sessions_waiting == 1


@pytest.mark.slow
async def test_sessions_closed_at_random_moments_leak_nothing(autojump_clock: trio.testing.MockClock) -> None:
    random = Random(27)
    async with open_fake_engine(
        response="An answer.",
        step_seconds=0.01,
        max_num_seqs=8,
        block_count=400,
        max_num_batched_tokens=64,
        max_queued_requests=500,
    ) as engine:

        async def agent(number: int) -> None:
            await trio.sleep(random.expovariate(2))
            with trio.move_on_after(random.expovariate(1)):
                async with engine.session(tenant=f"{number % 7}") as session:
                    while True:
                        await session.respond("word " * random.randrange(20), SamplingParams(max_tokens=20))
                        session.expect_turn(0.2)
                        await trio.sleep(random.expovariate(5))

        async with trio.open_nursery() as nursery:
            for number in range(40):
                nursery.start_soon(agent, number)
        await engine.wait_all_free()
        stats = engine.stats()
        assert (len(engine.sessions), stats.sessions_active, stats.sessions_waiting) == (0, 0, 0)
        assert (stats.blocks_used, stats.blocks_retained) == (0, 0)
        assert turns_counted(engine, "appended") > 20
        engine.assert_all_free()


async def test_refused_turn_is_no_turn_in_flight() -> None:
    async with open_fake_engine() as engine, engine.session(adapter="missing") as session:
        with pytest.raises(UnknownModel):
            await session.respond("one")
        live = engine.sessions.find(session.id)
        assert live is not None
        assert live.turns == []


# --- sessions by name ---


async def named_turn(engine: FakeEngine, name: SessionName, max_tokens: int = 1) -> LiveSession | None:
    await read(engine.generate("prompt", SamplingParams(max_tokens=max_tokens), session=name))
    return engine.sessions.find(name.name, identity=name.identity)


async def test_named_session_ends_after_its_idle_time(autojump_clock: trio.testing.MockClock) -> None:
    async with open_fake_engine(step_seconds=1, session_idle_seconds=60) as engine:
        live = await named_turn(engine, SessionName(name="mine"))
        assert live is not None
        for _ in range(3):
            await trio.sleep(59)
            assert await named_turn(engine, SessionName(name="mine")) is live
        assert live.turn_count == 4
        await trio.sleep(61)
        assert live.is_ended
        assert len(engine.sessions) == 0


async def test_session_is_not_idle_while_a_turn_runs(autojump_clock: trio.testing.MockClock) -> None:
    async with open_fake_engine(step_seconds=1, session_idle_seconds=60) as engine:
        live = await named_turn(engine, SessionName(name="mine"), max_tokens=300)
        assert live is not None
        assert not live.is_ended


async def test_longer_retention_extends_the_idle_time(autojump_clock: trio.testing.MockClock) -> None:
    async with open_fake_engine(session_idle_seconds=60) as engine:
        await named_turn(engine, SessionName(name="mine"))
        live = await named_turn(engine, SessionName(name="mine", retention=Retention(idle_seconds=3600)))
        await trio.sleep(3500)
        assert live is not None
        assert not live.is_ended
        await trio.sleep(200)
        assert live.is_ended


async def test_callers_do_not_share_sessions_of_one_name() -> None:
    async with open_fake_engine() as engine:
        lives = [await named_turn(engine, SessionName(name="s", identity=who)) for who in ("", "a", "b", "a/s")]
        assert len({live.id for live in lives if live is not None}) == 4
        crafted = await named_turn(engine, SessionName(name="a/s", identity=""))
        assert crafted is not None
        assert crafted.id not in {live.id for live in lives if live is not None}


async def test_new_session_displaces_the_one_that_was_idle_for_longest() -> None:
    async with open_fake_engine(sessions_max=4) as engine:
        lives = [await named_turn(engine, SessionName(name=f"{n}", identity=f"{n % 2}")) for n in range(4)]
        assert await named_turn(engine, SessionName(name="0", identity="0")) is lives[0]
        assert await named_turn(engine, SessionName(name="new", identity="0")) is not None
        # The caller has used half of all places, so its own session is displaced.
        assert [live.is_ended for live in lives if live is not None] == [False, False, True, False]
        assert await named_turn(engine, SessionName(name="new", identity="2")) is not None
        assert [live.is_ended for live in lives if live is not None] == [False, True, True, False]


async def test_request_is_served_without_its_session_if_all_session_slots_are_busy() -> None:
    async with open_fake_engine(sessions_max=2) as engine:
        async with engine.session(tenant="a"), engine.session(tenant="b"):
            assert await named_turn(engine, SessionName(name="c")) is None
        assert engine.metrics.sessions_refused_total._value.get() == 1


async def test_ended_session_aborts_all_of_its_turns() -> None:
    async with open_fake_engine(paused=True) as engine, trio.open_nursery() as nursery:
        ends: list[FinishReason | None] = []

        async def turn(name: str) -> None:
            sampling = SamplingParams(ignore_eos=True, max_tokens=8)
            async with engine.generate("prompt", sampling, session=SessionName(name=name)) as stream:
                async for delta in stream:
                    if delta.finish_reason is not None:
                        ends.append(delta.finish_reason)

        nursery.start_soon(turn, "mine")
        nursery.start_soon(turn, "mine")
        nursery.start_soon(turn, "other")
        await wait_all_tasks_blocked()
        await engine.step(2)
        live = engine.sessions.find("mine")
        assert live is not None
        live.end(SessionEnd.DELETED)
        live.end(SessionEnd.DELETED)
        await wait_all_tasks_blocked()
        assert ends == [FinishReason.ABORT] * 2
        engine.resume()
    assert ends[-1] is FinishReason.LENGTH
    assert engine.metrics.sessions_ended_total.labels("deleted")._value.get() == 1


def has_prefetches(request: EngineRequest, computed_count: int) -> int:
    """Return the tokens of a connector that has the KV of every prefetch, and of no request."""
    return len(request.prompt_token_ids) - computed_count if request.id.startswith("prefetch-") else 0


async def test_lost_blocks_are_loaded_shortly_before_the_expected_turn(autojump_clock: trio.testing.MockClock) -> None:
    async with open_fake_engine(response="!", connector=ScriptedConnector, session_prefetch=True) as engine:
        connector = engine.connector
        assert isinstance(connector, ScriptedConnector)
        connector.matched_count = has_prefetches
        async with engine.session() as session:
            await read(session.generate("a" * 100))
            engine.current_core.forget_prefixes()
            session.expect_turn(30)
            await trio.sleep(27)
            assert not connector.loads
            await trio.sleep(2)
            assert len(connector.loads) == 1
            connector.load_all()
            await trio.sleep(0.5)
            await read(session.generate("b"))
            stats = engine.stats()
            assert stats.session_prefetched_tokens_total >= 96
            assert stats.session_hit_tokens_total == stats.session_prefetched_tokens_total
        assert stats.session_prefetches_total[PrefetchResult.LOADED] == 1
        engine.assert_all_free()


@pytest.mark.parametrize("ending", ["cold_turn_seconds", "end of the other session", "abort"])
async def test_cold_turn_wakes_the_engine_when_its_wait_ends(
    ending: str, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_fake_engine(response="!", block_count=12, max_model_len=48, cold_turn_seconds=5) as engine:

        async def return_often(task_status: trio.TaskStatus[None]) -> None:
            async with engine.session() as session:
                for text in ("aaaa", "bbbb", "cccc"):
                    await read(session.generate(text, SamplingParams(max_tokens=1)))
                    await trio.sleep(1)
                task_status.started()
                await trio.sleep(2 if ending == "end of the other session" else 20)

        async with trio.open_nursery() as nursery, engine.session() as cold:
            await nursery.start(return_often)
            begun_at = trio.current_time()
            with trio.move_on_after(3 if ending == "abort" else math.inf):
                await read(cold.generate("z" * 42, SamplingParams(max_tokens=1)))
            waited = trio.current_time() - begun_at
            assert waited == pytest.approx({"cold_turn_seconds": 5, "end of the other session": 2, "abort": 3}[ending])
            assert engine.core.stats().turns_deferred_total == 1
            assert engine.core.stats().blocks_used == 0
        engine.assert_all_free()


async def test_the_time_of_a_tool_is_learned_from_earlier_pauses(autojump_clock: trio.testing.MockClock) -> None:
    async with open_fake_engine(response="!", connector=ScriptedConnector, session_prefetch=True) as engine:
        connector = engine.connector
        assert isinstance(connector, ScriptedConnector)
        connector.matched_count = has_prefetches
        async with engine.session() as session:
            await read(session.generate("a" * 100))
            live = engine.sessions.find(session.id)
            assert live is not None
            live.await_tools(["search"])
            await trio.sleep(20)
            await read(session.generate("b"))
            live.await_tools(["search", "search"])
            engine.current_core.forget_prefixes()
            await trio.sleep(17.5)
            assert not connector.loads
            await trio.sleep(1)
            assert len(connector.loads) == 1
            connector.load_all()
            await trio.sleep(0.5)
        async with engine.session() as other:
            await read(other.generate("c" * 100))
            live = engine.sessions.find(other.id)
            assert live is not None
            live.await_tools(["search", "unknown"])  # The next turn needs both results.
            assert engine.current_core.next_deadline() is None
            live.await_tools(["search"])
            assert engine.current_core.next_deadline() == pytest.approx(trio.current_time() + 18)
        engine.assert_all_free()


async def test_complete_tool_calls_of_a_response_are_awaited() -> None:
    async with (
        open_fake_engine(response=CALL, connector=ScriptedConnector, session_prefetch=True) as engine,
        engine.session() as session,
    ):
        await session.respond(USER, tools=[TOOL])
        live = engine.sessions.find(session.id)
        assert live is not None
        assert live.awaited_tools == ("look",)


def test_typical_time_of_a_tool_follows_its_pauses() -> None:
    times = ToolTimes(2)
    assert times.typical("a") is None
    times.note("a", 10.0)
    assert times.typical("a") == pytest.approx(10.0)
    for _ in range(20):
        times.note("a", 1.0)
    assert times.typical("a") == pytest.approx(1.0, rel=0.01)
    times.note("b", 3.0)
    times.note("c", 0.0)
    assert times.typical("a") is None, "two tools are remembered"
    assert times.typical("c") == pytest.approx(0.001)
