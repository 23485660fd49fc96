"""Tests engines that Ray places on two nodes, and a router with `--endpoints-ray` that sends requests to them.

Streams and the group of engines must survive a killed process and a killed node. The processes, the model, the router
and Ray are not fakes.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from .conftest import MARK, SECONDS_MAX, Program, marked_processes, node_of, ray_nodes, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SERVING = re.compile(r"serving a router at http://(\S+) ")
ENGINE = "ray::EngineActor"


class Nodes:
    """The cluster of two_nodes.py, and commands that use it."""

    def __init__(self, program: Program, environment: dict[str, str]) -> None:
        self.order = program.order
        self._environment = environment

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run `trioserve ray` with these arguments to its end."""
        return subprocess.run(
            [sys.executable, "-m", "trioserve", "ray", *words],
            capture_output=True,
            text=True,
            timeout=SECONDS_MAX,
            check=False,
            env=self._environment,
        )

    def begun(self, *words: str) -> subprocess.Popen[str]:
        """Start `trioserve ray` with these arguments, and do not wait for its end."""
        return subprocess.Popen(
            [sys.executable, "-m", "trioserve", "ray", *words],
            stderr=subprocess.PIPE,
            text=True,
            env=self._environment,
        )

    def processes(self, title: str) -> list[int]:
        return marked_processes(self._environment[MARK], title)

    def listed(self) -> dict[str, str | None]:
        """Return the URL of each engine, by name of its actor. The URL is None while the engine does not serve."""
        ran = self.run("list", "--json")
        assert ran.returncode == 0, ran.stderr
        return {row["name"]: row["url"] for row in json.loads(ran.stdout)["data"]}

    @contextmanager
    def router(self, group: str) -> Iterator[Router]:
        with subprocess.Popen(
            [sys.executable, "-m", "trioserve", "route", "--port", "0", "--endpoints-ray", group],
            stderr=subprocess.PIPE,
            text=True,
            env=self._environment,
        ) as process:
            assert process.stderr is not None
            while (found := SERVING.search(process.stderr.readline())) is None:
                assert process.poll() is None
            lines: list[str] = []
            reader = threading.Thread(target=lines.extend, args=(process.stderr,))
            reader.start()
            try:
                yield Router(found[1], lines)
            finally:
                process.terminate()
                process.wait(SECONDS_MAX)
                reader.join()
        wait_until(lambda: not self.watches(group), "for the process that asks Ray to end with its router")

    def watches(self, group: str) -> list[int]:
        """Return the ids of the processes that watch a group for a router."""
        return self.processes(f"ray_watch\0{group}\0")


class Router:
    """A running router process.

    Args:
        address: HOST:PORT.
        lines: lines of its log so far.
    """

    def __init__(self, address: str, lines: list[str]) -> None:
        self.address = address
        self.lines = lines

    def endpoints(self) -> dict[str, dict[str, Any]]:
        return {endpoint["url"]: endpoint for endpoint in get(self.address, "/endpoints")["data"]}

    def serving(self) -> set[str]:
        return {url for url, endpoint in self.endpoints().items() if endpoint["health"] == "healthy"}

    def busy(self) -> set[str]:
        return {url for url, endpoint in self.endpoints().items() if endpoint["leases"]}


def get(address: str, path: str) -> dict[str, Any]:
    with closing(http.client.HTTPConnection(address, timeout=60)) as connection:
        connection.request("GET", path)
        return dict(json.loads(connection.getresponse().read()))


def address_of(url: str) -> str:
    return url.removeprefix("http://")


@contextmanager
def started_stream(address: str, max_tokens: int) -> Iterator[http.client.HTTPResponse]:
    """Start a stream and read its first event. At the end, the client disconnects."""
    with closing(http.client.HTTPConnection(address, timeout=SECONDS_MAX)) as connection:
        body = {"prompt": "Once upon a time", "stream": True, "ignore_eos": True, "max_tokens": max_tokens}
        body |= {"stream_options": {"include_usage": True}}
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        with connection.getresponse() as response:
            assert response.status == 200
            assert response.readline().startswith(b"data: ")
            yield response


def check_is_whole(response: http.client.HTTPResponse, max_tokens: int) -> None:
    """Read a stream to its end, and check that it has each token exactly once and no error."""
    events = [line.removeprefix(b"data: ") for line in response.read().splitlines() if line.startswith(b"data: ")]
    assert events.pop() == b"[DONE]"
    read = [json.loads(event) for event in events]
    assert not [event for event in read if "error" in event]
    assert read[-1]["usage"]["completion_tokens"] == max_tokens


def process_at(url: str, candidates: list[int]) -> int:
    """Return the id of the candidate process that listens at the URL."""
    port = int(url.rpartition(":")[2])
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    [inode] = [row[9] for row in rows if row[3] == "0A" and int(row[1].partition(":")[2], 16) == port]
    for process_id in candidates:
        for entry in Path(f"/proc/{process_id}/fd").iterdir():
            if entry.is_symlink() and os.readlink(entry) == f"socket:[{inode}]":
                return process_id
    raise AssertionError(f"none of {candidates} listens at {url}")


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with ray_nodes() as (program, environment):
        yield Nodes(program, environment)


@pytest.fixture(scope="module")
def group(nodes: Nodes) -> Nodes:
    ran = nodes.run("up", "llm", "--replicas", "2", "--placement", "strict-spread", "--max-num-seqs", "8")
    assert ran.returncode == 0, ran.stderr
    return nodes


@pytest.fixture(scope="module")
def router(group: Nodes) -> Iterator[Router]:
    with group.router("llm") as router:
        wait_until(lambda: len(router.serving()) == 2, "for two endpoints")
        yield router


def test_engines_of_a_group_are_placed_on_both_nodes_and_become_endpoints(group: Nodes, router: Router):
    endpoints = router.endpoints()
    assert set(endpoints) == set(group.listed().values())
    assert {endpoint["source"] for endpoint in endpoints.values()} == {"ray:llm"}
    engines = group.processes(ENGINE)
    assert {node_of(process_at(url, engines)) for url in endpoints} == set(group.order(raylets=True)["ids"])


def test_blocks_and_lease_of_a_stream_are_freed_when_its_client_disconnects(router: Router):
    urls = router.serving()
    assert [get(address_of(url), "/load")["kv_usage"] for url in urls] == [0, 0]
    with started_stream(router.address, max_tokens=4000):
        [url] = router.busy()
        assert get(address_of(url), "/load")["kv_usage"] > 0
    wait_until(lambda: not router.busy(), "for the lease")
    wait_until(lambda: get(address_of(url), "/load")["running"] == 0, "for the request to end")
    assert get(address_of(url), "/load")["kv_usage"] == 0


def check_streams_survive(nodes: Nodes, router: Router, *, kill_node: bool) -> None:
    before = router.serving()
    with (
        started_stream(router.address, max_tokens=400) as one,
        started_stream(router.address, max_tokens=400) as two,
    ):
        assert router.busy() == before, "one is at each"
        lost = min(before)
        process_id = process_at(lost, nodes.processes(ENGINE))
        if kill_node:
            nodes.order(kill=node_of(process_id))
        else:
            os.kill(process_id, signal.SIGKILL)
        wait_until(lambda: lost not in router.endpoints(), "for the lost engine to be gone")
        check_is_whole(one, 400)
        check_is_whole(two, 400)
    assert sum(endpoint["moved_to"] for endpoint in router.endpoints().values()) >= 1
    with started_stream(router.address, max_tokens=8) as response:
        check_is_whole(response, 8)
    if kill_node:
        assert len(router.serving()) == 1, "each is to be on another node, and there is one"
        nodes.order(add=True)
    wait_until(lambda: len(router.serving()) == 2, "for the group to be whole again")
    assert lost not in router.serving()
    for url in router.serving():
        with started_stream(address_of(url), max_tokens=8) as response:
            check_is_whole(response, 8)


def test_streams_survive_a_kill_of_their_engine_and_ray_starts_another(group: Nodes, router: Router):
    check_streams_survive(group, router, kill_node=False)


def test_streams_survive_a_kill_of_their_node_and_the_engine_moves_to_a_new_node(group: Nodes, router: Router):
    check_streams_survive(group, router, kill_node=True)


def test_existing_group_is_not_started_again(group: Nodes):
    ran = group.run("up", "llm")
    assert (ran.returncode, ran.stderr) == (
        1,
        'trioserve: the group "llm" exists already: end it with `ray down llm`\n',
    )


@pytest.mark.parametrize(
    ("flags", "expect"),
    [
        (["--model", "/no/such/model"], "ModelLoadError: the model '/no/such/model' is not found"),
        (["--num-cpus", "50", "--timeout", "2"], "Ray has no free nodes for 1 engine with 50 CPU each"),
    ],
)
def test_group_that_cannot_start_leaves_no_engine(group: Nodes, flags: list[str], expect: str):
    engines = group.processes(ENGINE)
    ran = group.run("up", "bad", *flags)
    assert ran.returncode == 1
    assert expect in ran.stderr
    assert not [name for name in group.listed() if name.startswith("bad/")]
    wait_until(lambda: group.processes(ENGINE) == engines, "for its processes to end")


def test_ctrl_c_while_a_group_waits_for_free_nodes_leaves_no_group(group: Nodes):
    with group.begun("up", "late", "--num-cpus", "50") as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("waiting for free nodes for 1 engine with 50 CPU each")
        process.send_signal(signal.SIGINT)
        process.communicate()
    assert process.returncode == 130
    assert group.run("down", "late").stderr.startswith('trioserve: there is no group "late"')


def test_ray_down_completes_streams_and_leaves_no_process(nodes: Nodes):
    engines = nodes.processes(ENGINE)
    ran = nodes.run("up", "going", "--max-num-seqs", "8")
    assert ran.returncode == 0, ran.stderr
    [url] = [url for name, url in nodes.listed().items() if name == "going/0"]
    assert url is not None
    with nodes.router("going") as router:
        wait_until(lambda: router.serving() == {url}, "for its endpoint")
        with started_stream(address_of(url), max_tokens=500) as response:
            ran = nodes.run("down", "going")
            assert ran.returncode == 0, ran.stderr
            check_is_whole(response, 500)
        wait_until(lambda: not router.endpoints(), "for its router to know of none")
    wait_until(lambda: nodes.processes(ENGINE) == engines, "for its process to end")
    assert nodes.run("down", "going").returncode == 1


def test_ranks_end_with_their_killed_engine_and_ray_restarts_all_of_them(nodes: Nodes):
    flags = ["--tensor-parallel-size", "2", "--num-cpus", "1", "--max-num-seqs", "2", "--kv-cache-memory", "0.3"]
    engines = nodes.processes(ENGINE)
    ran = nodes.run("up", "ranks", *flags)
    assert ran.returncode == 0, ran.stderr
    ranks = set(nodes.processes("rank_process"))
    assert len(ranks) == 2
    [process_id] = set(nodes.processes(ENGINE)) - set(engines)
    os.kill(process_id, signal.SIGKILL)
    wait_until(lambda: not ranks & set(nodes.processes("rank_process")), "for the ranks to end")
    with nodes.router("ranks") as router:
        wait_until(lambda: len(router.serving()) == 1, "for the engine that Ray started anew")
        with started_stream(router.address, max_tokens=8) as response:
            check_is_whole(response, 8)
    assert nodes.run("down", "ranks").returncode == 0
    wait_until(lambda: not nodes.processes("rank_process"), "for the others to end")


def test_list_without_a_ray_cluster_prints_how_to_start_one(nodes: Nodes):
    ran = nodes.run("list", "--ray-address", "127.0.0.1:9")
    assert ran.returncode == 1
    assert ran.stderr.startswith("trioserve: there is no Ray at 127.0.0.1:9: start it with `ray start --head`")


def test_router_keeps_its_endpoints_when_ray_is_unreachable(group: Nodes, router: Router):
    """This test must be the last test of the file, because it destroys the cluster."""
    before = router.serving()
    with started_stream(router.address, max_tokens=300) as response:
        group.order(kill_head=True)
        for process_id in group.watches("llm"):
            os.kill(process_id, signal.SIGKILL)
        wait_until(
            lambda: any("endpoints kept source=ray:llm" in line for line in router.lines), "for the router to know"
        )
        check_is_whole(response, 300)
    assert router.serving() == before
    with started_stream(router.address, max_tokens=8) as response:
        check_is_whole(response, 8)
