"""Tests the records of both sides of a KV transfer between two processes, step by step."""

from __future__ import annotations

import inspect

import msgspec
import pytest

from trioserve.connectors.settings import StreamOptions
from trioserve.connectors.stream.frames import Notice
from trioserve.connectors.stream.policy import RETRIES_MAX, Load, StreamPolicy, proof_of
from trioserve.connectors.stream.signature import Source, origin_of, signed
from trioserve.contracts.events import FinishReason
from trioserve.contracts.ids import BlockIndex, RequestId
from trioserve.contracts.kv_transfer import (
    ConnectorSetup,
    HoldKind,
    KVConnector,
    Loaded,
    LoadFailed,
    Released,
    StillRead,
)
from trioserve.contracts.request import EngineRequest, KVTransferParams
from trioserve.contracts.sampling import SamplingParams
from trioserve.metrics.registry import CATALOGUE
from trioserve.testing.connector_conformance.side import MemoryPages

HERE = Source("127.0.0.1", 7000, "far")
KEY = b"of all engines"
FROM_THERE = signed(
    KVTransferParams(
        do_remote_prefill=True,
        remote_engine_id="far",
        remote_request_id="theirs",
        remote_block_ids=(4, 2, 0),
        remote_host="127.0.0.1",
        remote_port=7000,
        remote_block_size=4,
        remote_num_tokens=10,
    ),
    KEY,
)
FOR_THERE = KVTransferParams(do_remote_decode=True)


def request(name: str, params: KVTransferParams | None, prompt_count: int = 11) -> EngineRequest:
    return EngineRequest(
        id=RequestId(name),
        prompt_token_ids=tuple(range(prompt_count)),
        sampling=SamplingParams(temperature=0.0),
        output_tokens_max=3,
        stop_token_ids=frozenset(),
        seed=0,
        kv_transfer=params,
    )


NINE = proof_of(None, range(9))


class Books:
    """A listening policy that counts how often it woke its core and its transport."""

    def __init__(self, **options: object) -> None:
        self.wakes = self.works = 0
        setup = ConnectorSetup(engine_id="here", role="both", pages=MemoryPages(8), options={}, wake=self.wake)
        self.policy = StreamPolicy(setup, msgspec.convert(options, StreamOptions), self.work, key=KEY)
        self.policy.address = ("127.0.0.1", 7001)

    def wake(self) -> None:
        self.wakes += 1

    def work(self) -> None:
        self.works += 1

    def hold(self, name: str = "a", count: int = 9) -> bool:
        return self.policy.request_finished(
            request(name, FOR_THERE), blocks(-(-count // 4)), list(range(count)), FinishReason.LENGTH
        )

    def load(self, name: str = "a", params: KVTransferParams = FROM_THERE, count: int = 10) -> Load | None:
        self.policy.start_load(request(name, params), blocks(3), 0, count)
        new = self.policy.loads.pop_new()
        return new[0] if new else None

    def reports(self) -> list[object]:
        return list(self.policy.progress())

    def releases(self) -> list[str]:
        return [name for notice in self.policy.loads.notices(HERE) for name in notice.release]

    def kept(self) -> list[str]:
        return [name for notice in self.policy.loads.notices(HERE) for name in notice.keep]


def blocks(count: int) -> list[BlockIndex]:
    return [BlockIndex(index) for index in range(count)]


def test_connector_has_every_method_of_the_contract():
    for call in (name for name in vars(KVConnector) if not name.startswith("_")):
        assert inspect.signature(getattr(StreamPolicy, call)) == inspect.signature(getattr(KVConnector, call)), call


# --- holds for other engines ---


@pytest.mark.parametrize("reason", list(FinishReason))
def test_blocks_are_held_if_the_request_ended_normally(reason):
    books = Books()
    ends_well = reason in (FinishReason.STOP, FinishReason.LENGTH)
    for params in (None, KVTransferParams(), FROM_THERE):
        assert not books.policy.request_finished(request("n", params), blocks(1), [1], reason)
    assert not books.policy.request_finished(request("n", FOR_THERE), [], [], reason)
    assert books.policy.request_finished(request("y", FOR_THERE), blocks(1), [1], reason) == ends_well
    assert (books.policy.transfer_params(RequestId("y")) is not None) == ends_well
    assert books.policy.transfer_params(RequestId("n")) is None


def test_no_blocks_are_held_without_a_listening_transport():
    books = Books()
    books.policy.address = None
    assert not books.hold()


def test_transfer_params_contain_what_a_reader_needs():
    books = Books()
    assert books.hold("a", 9)
    params = KVTransferParams(
        do_remote_prefill=True,
        remote_engine_id="here",
        remote_request_id="a",
        remote_block_ids=(0, 1, 2),
        remote_host="127.0.0.1",
        remote_port=7001,
        remote_block_size=4,
        remote_num_tokens=9,
    )
    assert books.policy.transfer_params(RequestId("a")) == signed(params, KEY)


def test_active_reader_extends_a_hold_once_a_second():
    books = Books()
    books.hold("a")
    sends = books.policy.sends
    assert not isinstance(sends.asked("a", 0, 9, NINE, 10.0), str)
    assert books.reports() == [StillRead(RequestId("a"))]
    assert sends.note_still_read(["a", "b"], 10.5) == ("b",)
    assert books.reports() == []
    assert sends.note_still_read(["a"], 11.0) == ()
    assert books.reports() == [StillRead(RequestId("a"))]


@pytest.mark.parametrize(("start", "count"), [(0, 10), (9, 1), (-1, 2), (0, 0), (0, -5), (2**31, 2**31)])
def test_read_of_positions_that_are_not_held_is_refused(start, count):
    books = Books()
    books.hold("a", 9)
    response = books.policy.sends.asked("a", start, count, NINE, 0.0)
    assert isinstance(response, str)
    assert "9 are held" in response
    assert books.reports() == []


def end_by_release(books: Books) -> None:
    books.policy.sends.released(["a", "unknown"])


def end_by_abort(books: Books) -> None:
    books.policy.request_aborted_after_finish(RequestId("a"))


@pytest.mark.parametrize("end", [end_by_release, end_by_abort, lambda books: books.policy.stop()])
def test_end_of_a_hold_is_reported_once_and_stops_its_readers(end):
    books = Books()
    books.hold("a")
    send = books.policy.sends.asked("a", 0, 9, NINE, 0.0)
    assert not isinstance(send, str)
    stopped = []
    send.stops["reader"] = lambda: stopped.append(1)
    end(books)
    end(books)
    assert stopped == [1]
    assert not send.is_alive
    assert books.reports() == [Released(RequestId("a"))]  # An ended hold reports no active reader.
    assert isinstance(books.policy.sends.asked("a", 0, 9, NINE, 0.0), str)
    assert books.policy.transfer_params(RequestId("a")) is None


@pytest.mark.parametrize("end", [None, end_by_release, end_by_abort])
def test_expired_hold_is_not_reported(end):
    books = Books()
    books.hold("a")
    send = books.policy.sends.asked("a", 0, 9, NINE, 0.0)
    assert not isinstance(send, str)
    if end is not None:
        end(books)
    books.policy.hold_expired(RequestId("a"), HoldKind.SEND)
    assert not send.is_alive
    assert books.reports() == []
    books.policy.sends.released(["a"])
    books.policy.sends.sign_of_life(send, 99.0)
    assert books.reports() == []


def test_transfer_reports_wake_the_core_and_orders_wake_the_transport():
    books = Books()
    books.hold("a")
    books.policy.sends.released(["a"])
    assert books.wakes == 1
    books.load("b")
    assert books.works == 1
    books.policy.load_abandoned(RequestId("b"))
    assert (books.wakes, books.works) == (2, 2)


def test_ends_of_kv_sends_are_counted():
    books = Books()
    for name in "abcd":
        books.hold(name)
    for name in "ab":
        send = books.policy.sends.get(name)
        assert send is not None
        send.was_read = name == "a"
        books.policy.sends.released([name])
    books.policy.request_aborted_after_finish(RequestId("c"))
    books.policy.hold_expired(RequestId("d"), HoldKind.SEND)
    counts = books.policy.counts()
    ends = [counts[f"sends_{end}_total"] for end in ("completed", "unwanted", "aborted", "expired", "failed")]
    assert ends == [1, 1, 1, 1, 3]


def test_every_transfer_count_has_its_metric():
    names = {metric.name for metric in CATALOGUE}
    assert {f"kv_transfer_{name}" for name in Books().policy.counts()} <= names


# --- loads from other engines ---


@pytest.mark.parametrize(
    ("prompt_count", "computed_count", "expect"),
    [(11, 0, 10), (100, 0, 10), (100, 4, 6), (8, 0, 7), (1, 0, 0), (5, 8, 0)],
)
def test_matched_tokens_are_held_and_needed_by_the_prompt(prompt_count, computed_count, expect):
    books = Books()
    for _ in range(2):
        assert books.policy.num_matched_tokens(request("a", FROM_THERE, prompt_count), computed_count) == expect
    assert books.policy.num_matched_tokens(request("a", None), 0) == 0
    assert books.policy.num_matched_tokens(request("a", FOR_THERE), 0) == 0
    assert (books.wakes, books.works, books.reports()) == (0, 0, [])


def test_token_count_defaults_to_the_held_blocks():
    params = msgspec.structs.replace(FROM_THERE, remote_num_tokens=None)
    books = Books()
    assert books.policy.num_matched_tokens(request("a", params, 100), 0) == 12
    params = msgspec.structs.replace(params, remote_block_ids=None)
    assert books.policy.num_matched_tokens(request("a", params, 100), 0) == 99


HOSTILE = [
    ({"remote_host": None}, "remote_host"),
    ({"remote_host": ""}, "remote_host"),
    ({"remote_host": "a\nb"}, "remote_host"),
    ({"remote_host": "h" * 10_000}, "remote_host"),
    ({"remote_host": "10.1.2.3"}, "reads from its own machine only"),
    ({"remote_host": "example.org"}, "reads from its own machine only"),
    ({"remote_port": None}, "remote_port"),
    ({"remote_port": 0}, "remote_port 0"),
    ({"remote_port": -7}, "remote_port -7"),
    ({"remote_port": 65_536}, "remote_port 65536"),
    ({"remote_port": 2**70}, "remote_port"),
    ({"remote_engine_id": None}, "remote_engine_id"),
    ({"remote_engine_id": "e" * 201}, "remote_engine_id"),
    ({"remote_request_id": ""}, "remote_request_id"),
    ({"remote_request_id": "r" * 100_000}, "remote_request_id"),
    ({"remote_num_tokens": 0}, "remote_num_tokens 0"),
    ({"remote_num_tokens": -1}, "remote_num_tokens -1"),
    ({"remote_num_tokens": 2**62}, "remote_num_tokens"),
    ({"remote_num_tokens": 13}, "13 tokens in 3 blocks of 4"),
    ({"remote_num_tokens": 8}, "8 tokens in 3 blocks of 4"),
    ({"remote_block_size": 0}, "remote_block_size 0"),
    ({"remote_block_size": 2**62}, "remote_block_size"),
    ({"remote_block_ids": ((0, 1), (2,))}, "several groups"),
    ({"remote_block_ids": ((0, 1), 2)}, "several groups"),
    ({"tp_size": 2}, "tp_size 2"),
]


@pytest.mark.parametrize(("change", "expect"), HOSTILE)
def test_invalid_transfer_params_fail_the_load(change, expect):
    books = Books()
    params = msgspec.structs.replace(FROM_THERE, **change)
    assert books.policy.num_matched_tokens(request("a", params), 0) == 10
    assert books.load("a", params) is None
    (report,) = books.reports()
    assert isinstance(report, LoadFailed)
    assert expect in report.message
    assert len(report.message) < 500
    assert books.releases() == []
    assert not books.policy.request_finished(request("a", params), [], [], FinishReason.ABORT)
    assert books.policy.loads.pop_urgent() == ()


def test_one_group_of_blocks_is_accepted_like_a_plain_list():
    books = Books()
    assert books.load("a", msgspec.structs.replace(FROM_THERE, remote_block_ids=((4, 2, 0),))) is not None


@pytest.mark.parametrize(
    ("options", "host", "may"),
    [
        ({"key": "k" * 16}, "10.1.2.3", False),
        ({"key": "k" * 16}, "::1", True),
        ({"key": "k" * 16, "host": "10.1.2.3"}, "10.1.2.3", True),
        ({"key": "k" * 16, "peers": ["10.1.0.0/16"]}, "10.1.2.3", True),
        ({"key": "k" * 16, "peers": ["10.1.0.0/16"]}, "10.2.0.0", False),
        ({"key": "k" * 16, "peers": ["10.1.0.0/16"]}, "127.0.0.1", False),
        ({"key": "k" * 16, "peers": ["10.1.0.0/16"]}, "node.example", False),
        ({"key": "k" * 16, "peers": ["node.example"]}, "node.example", True),
        ({"key": "k" * 16, "peers": ["*"]}, "198.51.100.7", True),
        ({"peers": ["*"]}, "198.51.100.7", False),  # Without a key, only this machine is allowed.
    ],
)
def test_request_cannot_choose_an_arbitrary_host(options, host, may):
    books = Books(**options)
    load = books.load("a", signed(msgspec.structs.replace(FROM_THERE, remote_host=host), KEY))
    assert (load is not None) == may


@pytest.mark.parametrize(
    "change",
    [
        {"remote_signature": None},
        {"remote_signature": ""},
        {"remote_signature": "0" * 64},
        {"remote_signature": "\ud800"},
        {"remote_port": 22},
        {"remote_host": "localhost"},
        {"remote_engine_id": "other"},
        {"remote_request_id": "other"},
    ],
)
@pytest.mark.parametrize("options", [{}, {"key": "k" * 16, "peers": ["*"]}])
def test_connections_go_only_to_addresses_signed_by_an_engine_of_the_group(options, change):
    books = Books(**options)
    params = msgspec.structs.replace(FROM_THERE, **change)
    assert books.load("a", params) is None
    (failed,) = books.reports()
    assert "remote_signature" in failed.message
    books.policy.request_finished(request("b", params), [], [], FinishReason.ABORT)
    assert books.policy.loads.pop_urgent() == (), "there is no holder to notify"
    assert books.load("c", FROM_THERE) is not None


def test_complete_load_is_reported_to_core_and_holder():
    books = Books()
    load = books.load()
    assert load is not None
    assert books.kept() == ["theirs"]
    assert books.releases() == []
    books.policy.loads.complete(load)
    books.policy.loads.complete(load)
    books.policy.loads.failed(load, "late")
    assert books.reports() == [Loaded(RequestId("a"), 10)]
    assert (books.kept(), books.releases()) == ([], ["theirs"])
    (notice,) = books.policy.loads.notices(HERE)
    books.policy.loads.answered(HERE, notice, ())
    assert books.policy.loads.notices(HERE) == []
    assert not books.policy.request_finished(request("a", FROM_THERE), blocks(3), range(11), FinishReason.STOP)
    assert books.policy.loads.notices(HERE) == []


def test_abandoned_load_ends_at_once_and_is_reported_to_the_holder():
    books = Books()
    load = books.load()
    assert load is not None
    stopped = []
    load.stop = lambda: stopped.append(1)
    books.policy.load_abandoned(RequestId("a"))
    books.policy.load_abandoned(RequestId("a"))
    assert not load.is_alive
    assert stopped == [1]
    assert [type(report) for report in books.reports()] == [LoadFailed]
    assert books.releases() == ["theirs"]
    assert books.policy.loads.broken(load, "late", 0.0) is None
    assert books.reports() == []


@pytest.mark.parametrize("is_abandoned", [False, True])
def test_expired_load_is_not_reported(is_abandoned):
    books = Books()
    load = books.load()
    assert load is not None
    if is_abandoned:
        books.policy.load_abandoned(RequestId("a"))
    books.policy.hold_expired(RequestId("a"), HoldKind.LOAD)
    assert not load.is_alive
    books.policy.loads.complete(load)
    assert books.reports() == []
    assert books.releases() == ["theirs"]


def test_load_abandoned_before_its_start_is_never_started():
    books = Books()
    books.policy.start_load(request("a", FROM_THERE), blocks(3), 0, 10)
    books.policy.load_abandoned(RequestId("a"))
    assert books.policy.loads.pop_new() == ()


def test_holder_is_notified_after_the_last_of_several_loads():
    books = Books()
    first, second = books.load("a"), books.load("b")
    assert first is not None
    assert second is not None
    books.policy.loads.complete(first)
    assert (books.kept(), books.releases()) == (["theirs"], [])
    # A third choice of the same request never needed its own load. The second choice still reads.
    assert not books.policy.request_finished(request("c", FROM_THERE), [], [], FinishReason.ABORT)
    assert books.releases() == []
    books.policy.loads.failed(second, "no")
    assert (books.kept(), books.releases()) == ([], ["theirs"])


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.STOP])
def test_request_without_a_needed_load_notifies_the_holder(reason):
    books = Books()
    assert not books.policy.request_finished(request("a", FROM_THERE), blocks(3), range(11), reason)
    assert books.releases() == ["theirs"]
    assert books.policy.loads.pop_urgent() == (HERE,)
    assert books.policy.loads.pop_urgent() == ()


def test_ended_hold_fails_its_loads():
    books = Books()
    load = books.load()
    assert load is not None
    books.policy.loads.answered(Source("127.0.0.1", 7000, "another"), Notice(), ("theirs",))
    assert load.is_alive
    books.policy.loads.answered(HERE, Notice(keep=("theirs",)), ("theirs",))
    (report,) = books.reports()
    assert isinstance(report, LoadFailed)
    assert "127.0.0.1:7000: it does not hold the blocks any more" in report.message


def test_broken_load_is_retried_more_often_after_progress():
    books = Books()
    load = books.load()
    assert load is not None
    loads = books.policy.loads
    loads.begun(load, 100.0)
    delays = [loads.broken(load, "cut", 100.0) for _ in range(4)]
    assert delays == [0.0, 0.05, 0.2, 0.5]
    loads.came(load, 101.0)
    assert load.next_chunk == 1
    assert loads.broken(load, "cut", 101.0) == 0.0
    while loads.broken(load, "cut", 101.0) is not None:
        loads.came(load, 101.0)
    assert load.retries == RETRIES_MAX + 1
    (report,) = books.reports()
    assert report == LoadFailed(RequestId("a"), "127.0.0.1:7000: cut")
    assert books.policy.counts()["transfers_resumed_total"] == RETRIES_MAX


def test_holder_silent_for_the_duration_of_a_hold_counts_as_released():
    books = Books()
    load = books.load()
    assert load is not None
    books.policy.loads.begun(load, 100.0)
    assert books.policy.loads.broken(load, "quiet", 104.0) == 0.0
    assert books.policy.loads.broken(load, "quiet", 107.96) is None
    assert not load.is_alive


def test_load_from_a_holder_that_refuses_connections_soon_fails():
    books = Books()
    load = books.load()
    assert load is not None
    delays = [books.policy.loads.broken(load, "refused", 0.0, is_deaf=True) for _ in range(4)]
    assert delays == [0.0, 0.05, 0.2, None]


def test_reports_to_a_holder_are_limited_and_sent_in_pieces():
    books = Books()
    for index in range(1_200):
        params = signed(msgspec.structs.replace(FROM_THERE, remote_request_id=f"r{index}"), KEY)
        books.policy.request_finished(request(f"a{index}", params), [], [], FinishReason.ABORT)
    notices = books.policy.loads.notices(HERE)
    assert len(books.releases()) == 1_000
    assert all(len(notice.keep) + len(notice.release) <= 100 for notice in notices)
    books.policy.loads.cannot_notify(HERE)
    assert books.policy.loads.notices(HERE) == []


def test_ended_connector_ends_all_holds_and_loads():
    books = Books()
    books.hold("a")
    load = books.load("b")
    books.policy.stop()
    assert load is not None
    assert not load.is_alive
    assert {type(report) for report in books.reports()} == {Released, LoadFailed}
    assert not books.hold("c")


@pytest.mark.parametrize("proof", [proof_of("salt", range(9)), proof_of(None, range(1, 10)), proof_of(None, range(8))])
def test_blocks_of_another_prompt_are_refused(proof):
    books = Books()
    books.hold("a", 9)
    assert "another prompt" in str(books.policy.sends.asked("a", 0, 9, proof, 0.0))
    assert not isinstance(books.policy.sends.asked("a", 2, 5, proof_of(None, range(7)), 0.0), str)


def test_kv_load_sends_a_proof_of_its_tokens():
    books = Books()
    load = books.load("a")
    assert load is not None
    assert load.proof == proof_of(None, request("a", FROM_THERE).prompt_token_ids[:10])


def test_transfer_params_with_too_many_blocks_are_refused_without_reading_them():
    params = msgspec.structs.replace(FROM_THERE, remote_block_ids=(1,) * 100_001)
    assert "100000 are allowed" in str(origin_of(params, StreamOptions(), KEY))
