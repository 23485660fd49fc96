"""Tests of the adapter book. A name refers to one loaded adapter, which is kept until its last lease is released."""

from __future__ import annotations

import random

import pytest

from trioserve.contracts.errors import AdapterRefused
from trioserve.contracts.weights import AdapterRef, adapter_salt
from trioserve.core.adapters import AdapterBook, AdapterState


def loaded(book: AdapterBook, name: str, digest: str = "d0", *, replaces: bool = False) -> int:
    id = book.begin_load(name, f"/adapters/{name}", replaces=replaces)
    assert book.finish_load(id, digest) is not None
    book.check()
    return id


def test_adapter_lease_is_none_until_the_adapter_is_ready():
    book = AdapterBook(2)
    id = book.begin_load("a", "/a")
    assert book.acquire("a") is None
    assert book.names == ()
    book.finish_load(id, "d0")
    lease = book.acquire("a")
    assert lease is not None
    assert lease.ref == AdapterRef(id, "d0")
    assert book.lease_count == 1


def test_a_retired_adapter_is_idle_after_its_last_release():
    book = AdapterBook(2)
    id = loaded(book, "a")
    first, second = book.acquire("a"), book.acquire("a")
    assert book.retire("a") == [id]
    assert book.acquire("a") is None
    first.release()
    assert book.idle() == []
    second.release()
    assert book.idle() == [id]
    book.forget(id)
    assert not book.has(id)
    assert book.retire("a") == []


def test_second_release_of_an_adapter_lease_is_refused():
    book = AdapterBook(1)
    loaded(book, "a")
    lease = book.acquire("a")
    lease.release()
    with pytest.raises(AssertionError, match="released twice"):
        lease.release()
    assert book.lease_count == 0


def test_adapter_lease_stays_valid_when_its_name_gets_another_adapter():
    book = AdapterBook(1)
    first_id = loaded(book, "a", "old")
    lease = book.acquire("a")
    second_id = book.begin_load("a", "/new", replaces=True)
    assert book.acquire("a").ref.digest == "old", "the old adapter serves until the new one is ready"
    book.finish_load(second_id, "new")
    assert book.acquire("a").ref.digest == "new"
    assert lease.ref.digest == "old"
    assert book.idle() == []
    lease.release()
    assert book.idle() == []
    assert book.user_count(first_id) == 1, "two leases on the old adapter"


def test_adapter_name_is_refused_while_it_is_in_use():
    book = AdapterBook(3)
    loading = book.begin_load("a", "/a")
    for replaces in (False, True):
        with pytest.raises(AdapterRefused, match="is being loaded") as caught:
            book.begin_load("a", "/a", replaces=replaces)
        assert caught.value.reason == "loading"
    book.finish_load(loading, "d0")
    with pytest.raises(AdapterRefused, match="has already been loaded"):
        book.begin_load("a", "/a")
    book.check()


def test_number_of_adapter_names_and_of_retired_adapters_is_bounded():
    book = AdapterBook(1)
    loaded(book, "a")
    with pytest.raises(AdapterRefused, match="which is the maximum"):
        book.begin_load("b", "/b")
    lease = book.acquire("a")
    loaded(book, "a", "d1", replaces=True)
    with pytest.raises(AdapterRefused, match="still used by requests"):
        book.begin_load("a", "/a", replaces=True)
    lease.release()
    [idle] = book.idle()
    book.forget(idle)
    loaded(book, "a", "d2", replaces=True)


@pytest.mark.parametrize("ends_well", [True, False])
def test_an_adapter_retired_while_loading_stays_until_its_loader_reports(ends_well: bool):
    book = AdapterBook(2)
    id = book.begin_load("a", "/a")
    assert book.retire("a") == [id]
    assert book.idle() == [], "its loader may still write it into memory"
    other = book.begin_load("a", "/a")
    if ends_well:
        assert book.finish_load(id, "d0") is None
    else:
        book.fail_load(id)
    assert book.idle() == [id]
    book.finish_load(other, "d1")
    assert book.acquire("a").ref.digest == "d1"
    book.check()


def test_failed_load_of_an_adapter_keeps_the_old_adapter():
    book = AdapterBook(1)
    loaded(book, "a", "old")
    id = book.begin_load("a", "/new", replaces=True)
    book.fail_load(id)
    assert book.acquire("a").ref.digest == "old"
    assert book.idle() == [id]


def play(seed: int, book: AdapterBook, steps: int = 300) -> None:
    """Call the book in random order, and compare it with a simple model of leases."""
    rng = random.Random(seed)
    names = ["a", "b", "c"]
    ready: dict[str, int] = {}
    loading: dict[int, tuple[str, bool]] = {}  # The name, and True if the adapter was not retired.
    leases: list[tuple[object, int]] = []
    known: set[int] = set()
    for _ in range(steps):
        what = rng.choice(["load", "finish", "fail", "acquire", "acquire", "release", "release", "retire", "forget"])
        name = rng.choice(names)
        if what == "load":
            try:
                id = book.begin_load(name, "/x", replaces=rng.random() < 0.5)
            except AdapterRefused:
                pass
            else:
                assert id not in known
                known.add(id)
                loading[id] = name, True
        elif what in ("finish", "fail") and loading:
            id = rng.choice(list(loading))
            of, is_wanted = loading.pop(id)
            if what == "fail":
                book.fail_load(id)
            else:
                assert (book.finish_load(id, f"d{id}") is not None) == is_wanted
                if is_wanted:
                    ready[of] = id
        elif what == "acquire":
            lease = book.acquire(name)
            assert (None if lease is None else lease.ref.id) == ready.get(name)
            if lease is not None:
                assert lease.ref.digest == f"d{lease.ref.id}"
                leases.append((lease, lease.ref.id))
        elif what == "release" and leases:
            lease, _id = leases.pop(rng.randrange(len(leases)))
            lease.release()
        elif what == "retire":
            book.retire(name)
            ready.pop(name, None)
            loading = {id: (of, is_wanted and of != name) for id, (of, is_wanted) in loading.items()}
        elif what == "forget":
            for id in book.idle():
                assert id not in {*ready.values(), *loading}, "it is ready or loading"
                assert all(used != id for _, used in leases), "a lease is on it"
                book.forget(id)
                known.discard(id)
        book.check()
        assert book.lease_count == len(leases)
        assert {adapter.name: adapter.id for adapter in book} == ready
    for lease, _id in leases:
        lease.release()
    for id in list(loading):
        book.fail_load(id)
    for name in names:
        book.retire(name)
    assert set(book.idle()) == known, "all known adapters can be forgotten"
    assert book.count_of(AdapterState.RETIRED) == len(known)


def test_random_histories_leave_no_adapter_and_no_lease():
    for seed in range(150):
        play(seed, AdapterBook(random.Random(seed).randint(1, 3)))


def test_no_client_salt_equals_an_adapter_salt():
    digests = (None, "ab", "cd", "none")
    salts = (None, "", "x", "adapter:", "adapter:ab", "adapter:ab=x", "adapter:none:adapter:ab", "adapter:ab=", "none:")
    made = [(salt, digest) for salt in salts for digest in digests]
    assert len({adapter_salt(*pair) for pair in made}) == len(made)
    assert adapter_salt("x", None) == "x"
    assert adapter_salt(None, None) is None
