"""Tests that wrong arguments are refused by name, and do not affect the engine or other requests."""

from __future__ import annotations

import math

import numpy as np
import pytest
import trio

from trioserve.contracts.deadlines import Deadlines
from trioserve.contracts.errors import AlreadyEnded, InvalidRequest
from trioserve.contracts.events import AbortOutcome, FinishReason
from trioserve.contracts.prompt import ChatPrompt
from trioserve.contracts.request import KVTransferParams
from trioserve.contracts.sampling import SamplingParams
from trioserve.engine import request_preparation
from trioserve.engine.lifecycle import engine_lifecycle
from trioserve.testing.fake_engine import FakeEngine, open_fake_engine

MESSAGES = [{"role": "user", "content": "Hello"}]


async def response_of(fake: FakeEngine, prompt: object = "a prompt", **arguments: object) -> list[int]:
    async with fake.generate(prompt, SamplingParams(max_tokens=3, temperature=0), **arguments) as stream:
        return [token_id async for delta in stream for token_id in delta.token_ids]


@pytest.mark.parametrize(
    ("arguments", "param", "words"),
    [
        ({"prompt": None}, "prompt", r"prompt is None \(NoneType\), allowed is a text"),
        ({"prompt": b"bytes"}, "prompt", r"prompt is b'bytes' \(bytes\)"),
        ({"prompt": 5}, "prompt", r"prompt is 5 \(int\)"),
        ({"prompt": {1: 2}}, "prompt", r"\(dict\)"),
        ({"prompt": {1, 2}}, "prompt", r"\(set\)"),
        ({"prompt": (number for number in range(3))}, "prompt", r"\(generator\)"),
        ({"prompt": [1.5, 2]}, "prompt", r"prompt holds 1\.5 \(float\), allowed is a list of token ids \(int\)"),
        ({"prompt": [True, "a"]}, "prompt", r"prompt holds 'a' \(str\)"),
        ({"prompt": [None]}, "prompt", r"prompt holds None"),
        ({"prompt": [[1, 2]]}, "prompt", r"prompt holds \[1, 2\] \(list\)"),
        ({"prompt": np.ones((2, 2), int)}, "prompt", r"\(ndarray\)"),
        ({"prompt": np.array(5)}, "prompt", r"prompt is array\(5\) \(ndarray\)"),
        ({"prompt": np.ones(2)}, "prompt", r"\(float64\)"),
        ({"prompt": ChatPrompt(messages=None)}, "messages", r"messages is None"),
        ({"prompt": ChatPrompt(messages=["Hello"])}, "messages", r"messages holds 'Hello' \(str\)"),
        ({"prompt": ChatPrompt(messages=MESSAGES, tools=[5])}, "tools", r"tools holds 5"),
        ({"prompt": ChatPrompt(messages=MESSAGES, chat_template=5)}, "chat_template", r"is 5 \(int\)"),
        ({"prompt": ChatPrompt(messages=MESSAGES, template_arguments=[])}, "template_arguments", r"is \[\] \(list\)"),
        ({"prompt": ChatPrompt(messages=MESSAGES, template_arguments={1: 2})}, "template_arguments", r"holds 1"),
        ({"prompt": ChatPrompt(messages=MESSAGES, add_generation_prompt=1)}, "add_generation_prompt", r"True or False"),
        ({"sampling": {"n": 2}}, "sampling", r"sampling is \{'n': 2\} \(dict\), allowed is a SamplingParams, or None"),
        ({"sampling": {}}, "sampling", r"\(dict\)"),
        ({"request_id": ["r"]}, "request_id", r"request_id is \['r'\] \(list\), allowed is a text \(str\), or None"),
        ({"request_id": 5}, "request_id", r"\(int\)"),
        ({"priority": "high"}, "priority", r"priority is 'high' \(str\), allowed is a whole number"),
        ({"priority": 1.5}, "priority", r"\(float\)"),
        ({"priority": None}, "priority", r"\(NoneType\)"),
        ({"priority": 1000}, "priority", r"priority is 1000, allowed is -100 to 100"),
        ({"cache_salt": 5}, "cache_salt", r"\(int\)"),
        ({"cache_salt": b"salt"}, "cache_salt", r"\(bytes\)"),
        ({"add_special_tokens": None}, "add_special_tokens", r"True or False"),
        ({"deadlines": 5.0}, "deadlines", r"deadlines is 5\.0 \(float\), allowed is a Deadlines, or None"),
        ({"deadlines": {}}, "deadlines", r"\(dict\)"),
        ({"owner": ["x"]}, "owner", r"\(list\)"),
        ({"tenant": 5}, "tenant", r"\(int\)"),
        ({"kv_transfer": {"do_remote_decode": True}}, "kv_transfer", r"\(dict\), allowed is a KVTransferParams"),
        ({"kv_transfer": KVTransferParams(remote_port="80")}, "kv_transfer", r"remote_port"),
        ({"kv_transfer": KVTransferParams(remote_block_ids=object())}, "kv_transfer", r"remote_block_ids"),
    ],
)
async def test_error_of_a_wrong_argument_names_it_and_no_slot_is_used(arguments, param, words, autojump_clock):
    async with open_fake_engine(max_num_seqs=1, max_queued_requests=0) as fake:
        expected = await response_of(fake)
        for _ in range(2):  # The only slot is free again.
            with pytest.raises(InvalidRequest, match=words) as raised:
                async with fake.generate(**{"prompt": "a prompt", **arguments}):
                    pass
            assert raised.value.param == param
        fake.assert_all_free()
        assert await response_of(fake) == expected


async def test_token_ids_may_be_integers_of_any_library(autojump_clock):
    async with open_fake_engine() as fake:
        expected = await response_of(fake, [104, 105, 106])
        for prompt in ((104, 105, 106), range(104, 107), np.arange(104, 107), [np.int32(104), np.uint8(105), 106]):
            assert await response_of(fake, prompt, priority=np.int64(1)) == expected


async def test_error_while_a_request_enters_frees_its_queue_position(autojump_clock, monkeypatch):
    async with open_fake_engine(max_num_seqs=1, max_queued_requests=0) as fake:
        for file, name in (
            (request_preparation, "ChoiceOutput"),
            (engine_lifecycle, "functools"),
        ):  # The engine calls this while it creates the choices and sets the alarms.
            monkeypatch.setattr(file, name, None)
            with pytest.raises((TypeError, AttributeError)):
                await response_of(fake, deadlines=Deadlines(timeout=5))
            monkeypatch.undo()
            fake.assert_all_free()
        assert len(await response_of(fake)) == 3


@pytest.mark.parametrize("arguments", [{"request_ids": [5]}, {"request_ids": ["r", None]}, {"reason": "abort"}])
async def test_abort_with_a_wrong_argument_ends_no_request(arguments, autojump_clock):
    async with open_fake_engine(step_seconds=0.01) as fake:
        async with fake.generate("a prompt", SamplingParams(max_tokens=3), request_id="r") as stream:
            with pytest.raises(InvalidRequest):
                fake.abort(**{"request_ids": ["r"], **arguments})
            assert [delta.finish_reason async for delta in stream][-1] is FinishReason.LENGTH
        fake.assert_all_free()


async def test_abort_of_a_single_string_means_one_request_id(autojump_clock):
    async with open_fake_engine(paused=True) as fake, fake.generate("a prompt", request_id="r-1"):
        assert fake.abort("r-1") == {"r-1": AbortOutcome.ABORTED}


@pytest.mark.parametrize(
    ("arguments", "param"), [((math.nan, print), "at"), (("soon", print), "at"), ((5.0, None), "function")]
)
async def test_deadline_of_a_wrong_type_does_not_end_the_deadline_task(arguments, param, autojump_clock):
    async with open_fake_engine() as fake:
        with pytest.raises(InvalidRequest) as raised:
            fake.call_at(*arguments)
        assert raised.value.param == param
        rung = trio.Event()
        fake.call_at(trio.current_time() + 1, rung.set)
        with trio.fail_after(2):
            await rung.wait()


async def test_arguments_of_encode_and_decode_are_checked(autojump_clock):
    async with open_fake_engine() as fake:
        for wrong in (None, b"text", [1.5], {1}):
            with pytest.raises(InvalidRequest) as raised:
                await fake.encode(wrong)
            assert raised.value.param == "prompt"


async def test_stream_of_a_refused_request_has_ended(autojump_clock):
    async with open_fake_engine() as fake:
        stream = fake.generate([1.5])
        with pytest.raises(InvalidRequest):
            async with stream:
                pass
        with pytest.raises(AlreadyEnded):
            await anext(stream)


@pytest.mark.parametrize("value", ["5", math.nan, math.inf, 10**400, True, [1.0], 0])
@pytest.mark.parametrize("name", ["queue_timeout", "ttft_timeout", "timeout"])
def test_request_deadlines_are_given_in_seconds(name, value):
    with pytest.raises(InvalidRequest) as raised:
        Deadlines(**{name: value})
    assert raised.value.param == name


def test_deadlines_may_be_numbers_of_any_library():
    deadlines = Deadlines(timeout=np.int32(5), ttft_timeout=np.float32(0.5))
    assert (deadlines.timeout, deadlines.ttft_timeout) == (5.0, 0.5)
    assert {type(deadlines.timeout), type(deadlines.ttft_timeout)} == {float}
