"""Who has which adapter: a name leads to one loading, and a loading stays until its last lease is given back."""

from __future__ import annotations

import random

import pytest

from trioserve.contracts.adapter import AdapterRef, adapter_salt
from trioserve.contracts.errors import AdapterRefused
from trioserve.core.adapters import AdapterBook, AdapterState


def loaded(book: AdapterBook, name: str, digest: str = "d0", *, replaces: bool = False) -> int:
    id = book.begin_load(name, f"/adapters/{name}", replaces=replaces)
    assert book.finish_load(id, digest) is not None
    book.check()
    return id


def test_a_name_leads_nowhere_until_its_adapter_is_there():
    book = AdapterBook(2)
    id = book.begin_load("a", "/a")
    assert book.acquire("a") is None
    assert book.names == ()
    book.finish_load(id, "d0")
    lease = book.acquire("a")
    assert lease is not None
    assert lease.ref == AdapterRef(id, "d0")
    assert book.lease_count == 1


def test_what_is_used_is_let_go_of_when_its_last_lease_is_back():
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
    assert not book.knows(id)
    assert book.retire("a") == []


def test_a_lease_is_given_back_once():
    book = AdapterBook(1)
    loaded(book, "a")
    lease = book.acquire("a")
    lease.release()
    with pytest.raises(AssertionError, match="given back twice"):
        lease.release()
    assert book.lease_count == 0


def test_who_has_a_lease_keeps_what_another_one_takes_the_name_of():
    book = AdapterBook(1)
    first_id = loaded(book, "a", "old")
    lease = book.acquire("a")
    second_id = book.begin_load("a", "/new", replaces=True)
    assert book.acquire("a").ref.digest == "old", "until the new one is there"
    book.finish_load(second_id, "new")
    assert book.acquire("a").ref.digest == "new"
    assert lease.ref.digest == "old"
    assert book.idle() == []
    lease.release()
    assert book.idle() == []
    assert book.user_count(first_id) == 1, "two had the old one"


def test_a_name_is_taken_once():
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


def test_names_are_bounded_and_so_is_what_is_retired():
    book = AdapterBook(1)
    loaded(book, "a")
    with pytest.raises(AdapterRefused, match="no more are allowed"):
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
def test_one_that_is_unloaded_while_it_is_loaded_stays_until_its_loader_has_ended(ends_well: bool):
    book = AdapterBook(2)
    id = book.begin_load("a", "/a")
    assert book.retire("a") == [id]
    assert book.idle() == [], "its loader may be about to put it into memory"
    other = book.begin_load("a", "/a")
    if ends_well:
        assert book.finish_load(id, "d0") is None
    else:
        book.fail_load(id)
    assert book.idle() == [id]
    book.finish_load(other, "d1")
    assert book.acquire("a").ref.digest == "d1"
    book.check()


def test_a_load_that_fails_leaves_the_name_as_it_was():
    book = AdapterBook(1)
    loaded(book, "a", "old")
    id = book.begin_load("a", "/new", replaces=True)
    book.fail_load(id)
    assert book.acquire("a").ref.digest == "old"
    assert book.idle() == [id]


def play(seed: int, book: AdapterBook, steps: int = 300) -> None:
    """Any order of calls, judged by books of its own."""
    rng = random.Random(seed)
    names = ["a", "b", "c"]
    ready: dict[str, int] = {}
    loading: dict[int, tuple[str, bool]] = {}  # and whether it is still wanted
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
                assert id not in {*ready.values(), *loading}, "it is there, or on its way"
                assert all(used != id for _, used in leases), "somebody has it"
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
    assert set(book.idle()) == known, "all that is known can be let go of"
    assert book.count_of(AdapterState.RETIRED) == len(known)


def test_any_history_leaves_nothing():
    for seed in range(150):
        play(seed, AdapterBook(random.Random(seed).randint(1, 3)))


def test_no_salt_of_a_caller_is_that_of_an_adapter():
    digests = (None, "ab", "cd", "none")
    salts = (None, "", "x", "adapter:", "adapter:ab", "adapter:ab=x", "adapter:none:adapter:ab", "adapter:ab=", "none:")
    made = [(salt, digest) for salt in salts for digest in digests]
    assert len({adapter_salt(*pair) for pair in made}) == len(made)
    assert adapter_salt("x", None) == "x"
    assert adapter_salt(None, None) is None
