"""Tests the policy kv_aware with real engines. A request goes to the endpoint that cached a prefix of its prompt."""

from __future__ import annotations

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.api.caller import AccessRules
from trioserve.contracts.endpoint import RoutedRequest
from trioserve.proxy import routed_body
from trioserve.proxy.routed_body import PromptBlocks
from trioserve.testing.byte_tokenizer import byte_tokenizer
from trioserve.testing.memory_server import open_memory_server

pytestmark = pytest.mark.slow

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ENGINE = {"kv_events_max": 1000, "block_count": 32}
BEGINNING = "once upon a time there was "


def text_body(prompt: str) -> dict[str, object]:
    return {"prompt": prompt}


def ids_body(prompt: str) -> dict[str, object]:
    return {"prompt": list(prompt.encode())}


def ids_in_lists_body(prompt: str) -> dict[str, object]:
    return {"prompt": [list(prompt.encode()), [1, 2]]}


def chat_body(prompt: str) -> dict[str, object]:
    return {"messages": [{"role": "system", "content": prompt[:27]}, {"role": "user", "content": prompt[27:]}]}


@pytest.fixture
def open_routed(open_setup):
    def opened(*ids, engine=None, **options):
        return open_setup(
            *ids, engine={**ENGINE, **(engine or {})}, policy="kv_aware", tokenizer=byte_tokenizer(), **options
        )

    return opened


async def known(setup, *ids: str) -> None:
    """Wait until the router knows the cache content of these endpoints."""
    policy = setup.router.dispatch.core.policy
    for _ in range(100):
        await wait_all_tasks_blocked()
        if all(policy.resident_count(id) is not None for id in ids or setup.servers):
            return
        await trio.sleep(0.1)  # Wait until the router asks for the cache content again.
    raise AssertionError("they do not tell")


async def ask(setup, body: dict[str, object], *, at: str | None = None, key: str | None = None) -> str:
    """Send a request and return its endpoint."""
    headers = None if key is None else {"authorization": f"Bearer {key}"}
    path = (CHAT if "messages" in body else COMPLETIONS) + (f"?id={at}" if at else "")
    response = await setup.client(headers=headers).post(path, {"max_tokens": 1, **body})
    assert response.status == 200, response.body
    await wait_all_tasks_blocked()
    return response.headers["x-trioserve-endpoint"]


async def cold_and_warm(setup, *, key: str | None = None) -> tuple[str, str]:
    """Return the endpoint of a request without cached blocks, and the other endpoint of the two."""
    cold = await ask(setup, text_body("nobody has this"), key=key)
    return cold, "b" if cold == "a" else "a"


async def assert_all_free(setup) -> None:
    """Check that no request is left at the router and the engines. The router still reads the engines' cache events."""
    await setup.router.assert_all_free()
    for server in setup.servers.values():
        server.engine.assert_all_free()


@pytest.mark.parametrize("body", [text_body, ids_body, ids_in_lists_body, chat_body])
@pytest.mark.parametrize("salt", [None, "mine"])
@pytest.mark.parametrize("home", ["a", "b"])
async def test_prompt_goes_to_the_endpoint_that_cached_its_beginning(open_routed, body, salt, home, autojump_clock):
    async with open_routed() as setup:
        await known(setup)
        salted = {} if salt is None else {"cache_salt": salt}
        await ask(setup, {**body(BEGINNING + "a king"), **salted}, at=home)
        assert await ask(setup, {**body(BEGINNING + "a queen"), **salted}) == home
        hits = setup.servers[home].engine.stats().prefix_hit_tokens_total
        assert hits >= len(BEGINNING) // 4 * 4
        await assert_all_free(setup)


async def test_block_names_of_the_router_match_those_of_the_engine(open_routed, autojump_clock):
    """The engine has all blocks that the router names. The router expects no cache hit that the engine cannot have."""
    async with open_routed("ab") as setup:
        await known(setup)
        for length in range(1, 40):
            prompt = "x" * length
            await ask(setup, ids_body(prompt), at="a")
            names = routed_body.block_names(prompt.encode(), 4, None)
            policy = setup.router.dispatch.core.policy
            before = setup.servers["a"].engine.stats().prefix_hit_tokens_total
            expected = policy._resident.matched_tokens("a", {4: names})
            await ask(setup, ids_body(prompt), at="a")
            assert setup.servers["a"].engine.stats().prefix_hit_tokens_total - before == expected == len(names) * 4


async def test_request_with_a_salt_matches_no_blocks_of_requests_with_other_salts(open_routed, autojump_clock):
    async with open_routed() as setup:
        await known(setup)
        cold, warm = await cold_and_warm(setup)
        await ask(setup, {**text_body(BEGINNING), "cache_salt": "yours"}, at=warm)
        assert await ask(setup, {**text_body(BEGINNING), "cache_salt": "mine"}) == cold


@pytest.mark.parametrize("endpoint_keys", [False, True])
@pytest.mark.parametrize("salt", [None, "mine"])
async def test_prompt_goes_to_the_endpoint_with_blocks_of_the_same_key(
    open_routed, endpoint_keys, salt, autojump_clock
):
    """The router derives the salt from the caller's key, and the engine names blocks with this salt. This also works at
    endpoints that need a key. The router reads their events with the admin key.
    """
    engine, options = {}, {}
    if endpoint_keys:
        engine = {"api_keys": ("e-key",), "admin_api_key": "e-admin", "access": AccessRules(load_needs_key=True)}
        options = {"endpoint_api_key": "e-admin"}
    async with open_routed("ab", engine=engine, api_keys=("alice", "bob"), **options) as setup:
        await known(setup)
        assert all(state.load is not None for state in setup.router.dispatch.core.endpoints.values())
        salted = {} if salt is None else {"cache_salt": salt}
        cold, warm = await cold_and_warm(setup, key="bob")
        await ask(setup, {**text_body(BEGINNING + "a king"), **salted}, at=warm, key="alice")
        hits = setup.servers[warm].engine.stats().prefix_hit_tokens_total
        assert await ask(setup, {**text_body(BEGINNING + "a queen"), **salted}, key="bob") == cold
        assert await ask(setup, {**text_body(BEGINNING + "a queen"), **salted}, key="alice") == warm
        assert setup.servers[warm].engine.stats().prefix_hit_tokens_total - hits >= len(BEGINNING) // 4 * 4
        await assert_all_free(setup)


async def test_request_follows_blocks_after_an_eviction(open_routed, autojump_clock):
    async with open_routed() as setup:
        await known(setup)
        await ask(setup, text_body(BEGINNING), at="a")
        assert await ask(setup, text_body(BEGINNING + "a king")) == "a"
        for index in range(4):
            await ask(setup, text_body(f"{index}" * 100), at="a")
        await ask(setup, text_body(BEGINNING), at="b")
        assert await ask(setup, text_body(BEGINNING + "a queen")) == "b"
        assert await ask(setup, text_body("3" * 90)) == "a"


async def test_cache_of_a_restarted_engine_counts_as_unknown(open_routed, autojump_clock):
    async with open_memory_server(**ENGINE) as again, open_routed() as setup:
        await known(setup)
        await ask(setup, text_body(BEGINNING), at="b")
        page = (await setup.client().get("/metrics")).body.decode()
        assert f'\ntrioserve_router:endpoint_resident_blocks{{endpoint="b"}} {len(BEGINNING) // 4}.0\n' in page
        old, setup.servers["b"] = setup.servers["b"], again
        await old.hang_up()
        await wait_all_tasks_blocked()
        policy = setup.router.dispatch.core.policy
        assert policy.resident_count("b") is None
        assert 'resident_blocks{endpoint="b"}' not in (await setup.client().get("/metrics")).body.decode()
        await known(setup)
        assert policy.resident_count("b") == 0
        await ask(setup, text_body(BEGINNING), at="a")
        assert await ask(setup, text_body(BEGINNING + "a king")) == "a"


async def test_endpoint_without_cache_events_gets_prompts_that_it_got_before(open_routed, autojump_clock):
    async with open_routed(engine={"kv_events_max": 0, "block_count": 64, "max_model_len": 256}) as setup:
        long_text = BEGINNING * 5  # For this endpoint, the router guesses in blocks of 128 bytes.
        await ask(setup, text_body(long_text), at="b")
        assert await ask(setup, text_body(long_text + "a king")) == "b"
        assert setup.router.dispatch.block_sizes(RoutedRequest(model="fake")) == frozenset()
        listed = (await (await setup.client().get("/endpoints")).json())["data"]
        assert [each["resident_blocks"] for each in listed] == [None, None]


async def test_router_stops_reading_the_cache_events_of_a_removed_endpoint(open_routed, autojump_clock):
    async with open_routed() as setup:
        await known(setup)
        setup.router.fleet.drain("b")
        await wait_all_tasks_blocked()
        assert setup.servers["b"].engine.kv_events._reader_count == 0
        assert setup.router.dispatch.block_sizes(RoutedRequest(model="fake")) == frozenset(), (
            "with one endpoint, there is no choice"
        )


@pytest.fixture
def held_naming(monkeypatch):
    """Return an event. The router cannot finish the block names of any prompt before the event is set."""
    event = trio.Event()
    names = PromptBlocks.names

    async def held(self, *arguments, **options):
        await event.wait()
        return await names(self, *arguments, **options)

    monkeypatch.setattr(PromptBlocks, "names", held)
    return event


async def test_request_whose_prompt_is_being_named_is_counted_and_can_leave(open_routed, held_naming, autojump_clock):
    """Scenario S32 of tests/README.md: if the client leaves while the blocks of its prompt are hashed, its request is
    never sent.
    """
    async with open_routed() as setup:
        await known(setup)
        async with setup.client().ask(COMPLETIONS, text_body(BEGINNING)):
            await wait_all_tasks_blocked()
            assert setup.router.dispatch.core.stats().waiting == 1
        await wait_all_tasks_blocked()
        assert setup.router.dispatch.core.stats().waiting == 0
        held_naming.set()
        await assert_all_free(setup)
        assert not any(server.engine.stats().steps_total for server in setup.servers.values())


async def test_requests_whose_prompts_are_being_named_count_towards_the_queue_limit(
    open_routed, held_naming, autojump_clock
):
    async with open_routed(leases_max=1, queue_requests_max=1) as setup, trio.open_nursery() as nursery:
        await known(setup)
        for _ in range(3):  # There is a lease for one request at each endpoint, and one queue position.
            nursery.start_soon(ask, setup, text_body(BEGINNING))
        await wait_all_tasks_blocked()
        refused = await setup.client().post(COMPLETIONS, text_body(BEGINNING))
        assert (refused.status, refused.headers["x-trioserve-reason"]) == (429, "queue_full")
        assert int(refused.headers["retry-after"]) >= 1
        held_naming.set()


async def test_drain_refuses_requests_whose_prompts_are_being_named(open_routed, held_naming, autojump_clock):
    async with open_routed() as setup:
        await known(setup)
        async with setup.client().ask(COMPLETIONS, text_body(BEGINNING)) as response:
            await wait_all_tasks_blocked()
            setup.router.drain()
            held_naming.set()
            assert await response.head() == 503
        await assert_all_free(setup)


async def test_prompt_is_routed_without_block_names_if_naming_its_blocks_takes_too_long(
    open_routed, autojump_clock, monkeypatch
):
    async def never(self, *arguments, **options):
        await trio.sleep_forever()

    monkeypatch.setattr(PromptBlocks, "_token_ids", never)
    async with open_routed() as setup:
        await known(setup)
        before = trio.current_time()
        await ask(setup, text_body(BEGINNING))
        assert trio.current_time() - before == pytest.approx(routed_body.NAMING_SECONDS_MAX, abs=0.01)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": []}),
        (COMPLETIONS, {"prompt": [[]]}),
        (COMPLETIONS, {"prompt": ["a", 1]}),
        (COMPLETIONS, {"prompt": [-1, 2, 3, 4, 5, 6, 7]}),
        (COMPLETIONS, {"prompt": "a" * 1000}),
        (COMPLETIONS, {"prompt": 7}),
        (CHAT, {"messages": []}),
        (CHAT, {"messages": [{"role": "user", "content": {"no": "text"}}]}),
        (CHAT, {"messages": [{"role": "user", "content": "hi"}], "chat_template": "{{ messages }}"}),
    ],
)
async def test_invalid_prompt_is_refused_by_the_endpoint(open_routed, path, body, autojump_clock):
    async with open_routed() as setup:
        await known(setup)
        routed = await setup.client().post(path, body)
        direct = await setup.servers["a"].client().post(path, body)
        assert routed.status == direct.status == 400
        assert (await routed.json())["error"] == (await direct.json())["error"]


@pytest.mark.parametrize("fields", [{"prompt_logprobs": 1}, {"echo": True, "logprobs": 1}])
async def test_blocks_are_not_named_for_a_request_that_cannot_use_the_cache(open_routed, fields, autojump_clock):
    async with open_routed() as setup:
        await known(setup)
        cold, warm = await cold_and_warm(setup)
        await ask(setup, text_body(BEGINNING), at=warm)
        assert await ask(setup, {**text_body(BEGINNING), **fields}) == cold


async def test_blocks_are_named_only_for_requests_that_generate_text(open_routed, held_naming, autojump_clock):
    async with open_routed() as setup:
        await known(setup)
        response = await setup.client().post("/tokenize", {"prompt": BEGINNING})
        assert response.status == 200
