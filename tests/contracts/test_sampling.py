"""Tests of sampling parameters: values in range are accepted, and the error for other values names the parameter."""

from __future__ import annotations

import math

import numpy as np
import pytest

from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.sampling import TEMPERATURE_MIN, SamplingParams


def check(name: str, value: object, *, allowed: bool, **others: object) -> None:
    if allowed:
        assert getattr(SamplingParams(**{name: value}, **others), name) == value
        return
    with pytest.raises(InvalidRequest) as raised:
        SamplingParams(**{name: value}, **others)
    assert raised.value.param == name
    assert name.rstrip("s") in str(raised.value).replace("a stop string", "stop")


@pytest.mark.parametrize(
    ("name", "allowed", "refused"),
    [
        ("n", [1, 128], [0, -1, 129]),
        ("temperature", [0.0, TEMPERATURE_MIN, 1.0, 100.0], [-0.1, 100.1, math.nan, math.inf]),
        ("top_p", [1e-9, 0.5, 1.0], [0.0, -0.1, 1.1, math.nan]),
        ("top_k", [-1, 0, 1, 10**9], [-2, -100]),
        ("min_p", [0.0, 0.5, 1.0], [-0.1, 1.1, math.nan]),
        ("presence_penalty", [-2.0, 0.0, 2.0], [-2.1, 2.1, math.nan]),
        ("frequency_penalty", [-2.0, 0.0, 2.0], [-2.1, 2.1, math.inf]),
        ("repetition_penalty", [0.01, 1.0, 100.0], [0.0, -1.0, 100.1, math.nan]),
        ("seed", [None, -(2**63), 0, 2**64 - 1], [-(2**63) - 1, 2**64, 10**400]),
        ("max_tokens", [None, 0, 1, 10**9], [-1]),
        ("min_tokens", [0, 1, 10**9], [-1]),
        ("logprobs", [None, 0, 20], [-1, 21]),
        ("prompt_logprobs", [None, 0, 20], [-1, 21]),
        ("stop", [(), ("a",), ("a" * 256,), ("a",) * 16], [("",), ("a", ""), ("a" * 257,), ("a",) * 17]),
        ("stop_token_ids", [(), (0, 2**31 - 1), (1,) * 128], [(-1,), (1, 2**31), (1,) * 129]),
        (
            "logit_bias",
            [None, {}, {0: -100.0, 2**31 - 1: 100.0}, dict.fromkeys(range(1024), 1.0)],
            [{-1: 0.0}, {2**31: 0.0}, {1: 100.1}, {1: -100.1}, {1: math.nan}, dict.fromkeys(range(1025), 1.0)],
        ),
    ],
)
def test_each_parameter_accepts_only_values_in_its_range(name, allowed, refused):
    for value in allowed:
        check(name, value, allowed=True)
    for value in refused:
        check(name, value, allowed=False)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("n", ["2", 2.0, None, True, b"2", [2], object()]),
        ("max_tokens", [1.5, "5", math.nan, True]),
        ("min_tokens", [1.5, None]),
        ("top_k", [2.5, None, "5"]),
        ("seed", [1.5, "x"]),
        ("logprobs", [2.5, True]),
        ("prompt_logprobs", [0.0]),
        ("temperature", ["hot", None, True, 1j, 10**400, np.ones(3), object()]),
        ("top_p", ["0.5", None, b"1"]),
        ("stop", ["ab", b"x", None, 5, (5,), ("a", None), [b"x"], {"a"}, {"a": 1}, iter("a")]),
        ("stop_token_ids", [(1.5,), 5, None, "1", {1}, ("1",), [None], np.ones(2), np.array(5)]),
        ("logit_bias", [{"5": 1.0}, {1.5: 1.0}, {1: "a"}, {1: None}, {None: 1.0}, [1], "a", 5]),
        ("ignore_eos", [1, None, "yes"]),
        ("skip_special_tokens", [0]),
        ("include_stop_str_in_output", ["no"]),
    ],
)
def test_error_of_a_sampling_value_of_a_wrong_type_names_the_field(name, wrong):
    for value in wrong:
        with pytest.raises(InvalidRequest, match=f"^{name} (is|holds) .*, allowed is ") as raised:
            SamplingParams(**{name: value})
        assert raised.value.param == name


@pytest.mark.parametrize(
    ("name", "given", "kept"),
    [
        ("n", np.int64(2), 2),
        ("temperature", np.float32(0.5), 0.5),
        ("temperature", 1, 1.0),
        ("stop", ["a", "b"], ("a", "b")),
        ("stop_token_ids", np.array([3, 4]), (3, 4)),
        ("logit_bias", {np.int32(3): np.float64(1.5)}, {3: 1.5}),
    ],
)
def test_numpy_numbers_and_lists_in_sampling_parameters_become_python_types(name, given, kept):
    own = getattr(SamplingParams(**{name: given}), name)
    assert repr(own) == repr(kept)


def test_later_changes_of_the_callers_dict_do_not_change_logit_bias():
    bias = {1: 1.0}
    params = SamplingParams(logit_bias=bias)
    bias[-5] = "a"
    assert params.logit_bias == {1: 1.0}


def test_sampling_numbers_with_too_many_digits_to_print_are_refused():
    check("seed", 10**5000, allowed=False)
    check("min_tokens", 10**5001, allowed=False, max_tokens=10**5000)


def test_min_tokens_above_max_tokens_are_refused():
    check("min_tokens", 5, allowed=True, max_tokens=5)
    check("min_tokens", 6, allowed=False, max_tokens=5)


@pytest.mark.parametrize("temperature", [5e-324, 1e-9, TEMPERATURE_MIN / 2])
def test_a_positive_temperature_never_becomes_greedy_by_overflow(temperature):
    assert SamplingParams(temperature=temperature).temperature == TEMPERATURE_MIN


def test_default_sampling_parameters_are_those_of_the_api():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.max_tokens, params.stop) == (1, 1.0, 1.0, None, ())


def test_sampling_parameters_are_immutable():
    with pytest.raises(AttributeError):
        SamplingParams().n = 0
