"""Tests when the router treats a response as lost although the connection is open."""

from __future__ import annotations

import pytest

from trioserve.contracts.endpoint import EndpointLoad
from trioserve.contracts.errors import StartupError
from trioserve.router.settings import SilenceSettings
from trioserve.router.silence import LOOK_SECONDS, AwaitedResponse, SilenceWatch


class Endpoint:
    """A SilenceWatch with a manual clock."""

    def __init__(self, **settings: float) -> None:
        self.watch = SilenceWatch(SilenceSettings(**settings))
        self.responses: list[AwaitedResponse] = []
        self.now = 100.0
        self.lost: list[tuple[AwaitedResponse, str]] = []

    def read(self, *, beats: bool = False, has_body: bool = False, instance: str | None = None) -> AwaitedResponse:
        response = AwaitedResponse(self.now, computes=True)
        response.is_waiting, response.beats, response.has_body = True, beats, has_body
        response.instance = instance
        self.responses.append(response)
        return response

    def report(self, **load: object) -> None:
        load = {"running": 1, "waiting": 0, **load}
        self.watch.note_load(EndpointLoad(**load), self.responses, self.now, self.now)

    def find_lost(self) -> None:
        for loss in self.watch.find_lost(self.responses, self.now):
            self.lost.append((loss.response, loss.reason))
            self.responses.remove(loss.response)

    def wait(self, seconds: float, *, alive: tuple[AwaitedResponse, ...] = (), **load: object) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += LOOK_SECONDS
            for response in alive:
                response.pieces += 1
            if load:
                self.report(**load)
            self.find_lost()

    @property
    def reasons(self) -> list[str]:
        return [reason for _, reason in self.lost]


@pytest.mark.parametrize("is_begun", [False, True])
def test_response_whose_promised_heartbeats_stop_is_lost(is_begun):
    endpoint = Endpoint()
    endpoint.watch.sends_beats = not is_begun
    silent = endpoint.read(beats=is_begun, has_body=is_begun)
    other = endpoint.read(beats=is_begun, has_body=is_begun)
    endpoint.wait(19, alive=(other,))
    assert endpoint.lost == []
    endpoint.wait(2, alive=(other,))
    assert endpoint.lost == [(silent, "silent")]


def test_response_to_a_slow_prompt_is_not_lost_if_no_heartbeats_were_promised():
    endpoint = Endpoint()
    endpoint.read()
    endpoint.wait(3600, running=1)
    assert endpoint.lost == []


def test_silence_does_not_count_while_no_reader_waits():
    endpoint = Endpoint()
    slow = endpoint.read(beats=True, has_body=True)
    slow.is_waiting = False
    endpoint.wait(100)
    slow.is_waiting = True
    endpoint.wait(19)
    assert endpoint.lost == []


def test_router_that_was_suspended_treats_no_response_as_lost():
    endpoint = Endpoint()
    endpoint.read(beats=True, has_body=True)
    endpoint.find_lost()
    endpoint.now += 10_000
    endpoint.find_lost()
    endpoint.wait(15)
    assert endpoint.lost == []


def test_silence_is_ignored_while_the_endpoint_reports_a_hung_step():
    endpoint = Endpoint()
    endpoint.watch.is_hung = True
    endpoint.read(beats=True, has_body=True)
    endpoint.wait(100)
    assert endpoint.lost == []
    endpoint.watch.is_hung = False
    endpoint.wait(21)
    assert endpoint.reasons == ["silent"]


def test_response_is_lost_if_the_endpoint_does_not_read_its_request():
    endpoint = Endpoint()
    endpoint.read().is_sending = True
    endpoint.wait(21)
    assert endpoint.reasons == ["silent"]


def test_all_responses_of_a_process_are_lost_when_another_process_answers():
    endpoint = Endpoint()
    endpoint.report(instance="a")
    old = [endpoint.read(beats=True, has_body=True, instance="a") for _ in range(20)]
    unknown = endpoint.read()
    endpoint.now += 1
    endpoint.report(instance="a")  # Requests that were sent before this report are at process a.
    endpoint.now += 1
    endpoint.report(instance="b")
    new = endpoint.read(beats=True, instance="b")
    endpoint.wait(2, alive=(new,), instance="b")
    assert endpoint.lost == [(response, "replaced") for response in [*old, unknown]]


def test_response_that_may_come_from_the_new_process_is_not_lost():
    endpoint = Endpoint()
    endpoint.report(instance="a")
    endpoint.now += 1
    endpoint.read()
    endpoint.now += 1
    endpoint.report(instance="b")
    endpoint.wait(5)
    assert endpoint.lost == []


def test_response_head_can_reveal_that_another_process_answers():
    endpoint = Endpoint()
    endpoint.report(instance="a")
    old = endpoint.read(beats=True, instance="a")
    endpoint.now += 1
    endpoint.watch.note_instance("b", endpoint.responses, endpoint.now, endpoint.now)
    endpoint.wait(2)
    assert endpoint.lost == [(old, "replaced")]


@pytest.mark.parametrize("comes_back", [False, True])
def test_processes_that_share_an_address_do_not_replace_each_other(comes_back):
    endpoint = Endpoint()
    endpoint.report(instance="a")
    quiet = endpoint.read(beats=True, has_body=True, instance="a")
    busy = endpoint.read(beats=True, has_body=True, instance="a")
    endpoint.now += 1
    endpoint.report(instance="b")
    if comes_back:
        endpoint.report(instance="a")
        endpoint.wait(5)
    else:
        endpoint.wait(5, alive=(busy,))
    assert endpoint.watch.is_shared
    endpoint.report(instance="c")
    endpoint.wait(5, alive=(busy,))
    assert endpoint.lost == []
    assert quiet in endpoint.responses


def test_late_answer_of_the_previous_process_is_ignored():
    endpoint = Endpoint()
    endpoint.report(instance="a")
    sent_at = endpoint.now
    endpoint.now += 1
    endpoint.report(instance="b")
    new = endpoint.read(beats=True, instance="b")
    endpoint.watch.note_instance("a", endpoint.responses, sent_at, endpoint.now)
    endpoint.wait(5)
    assert not endpoint.watch.is_shared
    assert endpoint.responses == [new]


def test_response_is_lost_if_the_endpoint_reports_no_requests():
    endpoint = Endpoint()
    endpoint.read()
    endpoint.wait(59, running=0)
    assert endpoint.lost == []
    endpoint.wait(3, running=0)
    assert endpoint.reasons == ["not_running"]


def test_stream_without_new_tokens_is_lost_if_other_streams_get_thousands_of_tokens():
    endpoint = Endpoint()
    slow, other = endpoint.read(has_body=True), endpoint.read(has_body=True)
    tokens = 0
    for _ in range(90):  # Each of the two sequences gets 100 tokens a second.
        tokens += 200
        endpoint.wait(1, alive=(other,), running=2, generated=tokens)
    assert endpoint.lost == [(slow, "overtaken")]


def test_response_before_its_first_token_is_not_lost_if_other_streams_get_thousands_of_tokens():
    endpoint = Endpoint()
    endpoint.read()
    for second in range(300):
        endpoint.wait(1, running=2, generated=1000 * second)
    assert endpoint.lost == []


@pytest.mark.parametrize(("seconds_max", "reasons"), [(50, ["stalled"]), (0, [])])
def test_stream_without_heartbeats_is_lost_after_stalled_seconds_max(seconds_max, reasons):
    endpoint = Endpoint(stalled_seconds_max=seconds_max)
    endpoint.read(has_body=True)
    endpoint.wait(49, running=1)
    assert endpoint.lost == []
    endpoint.wait(1000, running=1)
    assert endpoint.reasons == reasons


def test_suspended_router_treats_no_response_as_lost_even_with_the_smallest_time_limit():
    endpoint = Endpoint(beat_seconds=0.25, silent_seconds_max=1.5)
    endpoint.read(beats=True, has_body=True)
    endpoint.find_lost()  # A byte arrived just before this look.
    endpoint.now += 10_000
    endpoint.find_lost()
    assert endpoint.lost == []


@pytest.mark.parametrize(("beat_seconds", "least"), [(10, 30), (0.25, 1.5), (0, 1)])
def test_silence_limit_below_the_normal_pause_between_heartbeats_is_refused(beat_seconds, least):
    SilenceSettings(beat_seconds=beat_seconds, silent_seconds_max=least)
    with pytest.raises(StartupError, match=f"allowed are {least} to 86400 s"):
        SilenceSettings(beat_seconds=beat_seconds, silent_seconds_max=least - 0.01)
