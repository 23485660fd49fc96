"""Tests the dashboards and rules of examples/observability with a real Prometheus.

Prometheus scrapes a server, a router before the server, and a prefill-decode pair with its router.
"""

from __future__ import annotations

import concurrent.futures
import datetime
import json
import math
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from .conftest import ServerProcess

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is missing: apt-get install prometheus"),
]

EXAMPLE = Path(__file__).parents[2] / "examples" / "observability"
DASHBOARDS = sorted((EXAMPLE / "grafana" / "dashboards").glob("*.json"))
ADMIN_KEY = "the-key-of-the-admin"
SECONDS_MAX = 60.0
STORY = "Once upon a time there was a keeper who wrote down each ship that passed, its flag and its colours. " * 4
BUILT_IN = {"$__rate_interval": "1m", "$__range": "5m"}  # variables that Grafana itself defines

# Metrics that have no value while there is no fault, each with the reason. All other metrics must have a value.
EMPTY_WHILE_ALL_IS_WELL = {
    "stream_pause_seconds": "no endpoint broke while a stream ran",
}
# On a slow machine, one transfer may time out. Among the few requests of this test, that is a large share.
PENDING_ON_A_SLOW_MACHINE = {"PairsFallBack", "TransfersFail"}


def wait_until(condition: Callable[[], Any], what: str) -> Any:
    """Poll until the condition holds, because another process has no event to wait for.

    Args:
        condition: called again and again until its result is true.
        what: what the caller waits for, for the error message.

    Returns:
        The result of the condition.
    """
    deadline = time.monotonic() + SECONDS_MAX
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what} never came"
        time.sleep(0.05)
    return value


class PrometheusProcess:
    """Runs Prometheus with the configuration of the example, but with other targets and shorter intervals.

    Args:
        directory: folder for the configuration and the data.
        targets: URL of each server, by (job, role).
    """

    def __init__(self, directory: Path, targets: dict[tuple[str, str], str]) -> None:
        config = yaml.safe_load((EXAMPLE / "prometheus" / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(EXAMPLE / "prometheus" / name) for name in config["rule_files"]]
        left = dict(targets)
        for scrape in config["scrape_configs"]:
            for group in scrape["static_configs"]:
                url = left.pop((scrape["job_name"], group.get("labels", {}).get("role", "")))
                group["targets"] = [url.removeprefix("http://")]
        # The example has one router, but this test has two.
        config["scrape_configs"][-1]["static_configs"] += [
            {"targets": [url.removeprefix("http://")]} for url in left.values()
        ]
        (directory / "metrics-key").write_text(ADMIN_KEY)
        (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
        self.url = ""
        self.lines: list[str] = []
        self._is_serving = threading.Event()
        self.process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={directory / 'prometheus.yml'}",
                f"--storage.tsdb.path={directory / 'data'}",
                "--web.listen-address=127.0.0.1:0",
            ],
            stderr=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_until_serving(self) -> None:
        assert self._is_serving.wait(SECONDS_MAX), "".join(self.lines)
        assert self.url, "".join(self.lines)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(SECONDS_MAX)
        self._reader.join(SECONDS_MAX)
        assert self.process.stderr is not None
        self.process.stderr.close()

    def get(self, path: str, **parameters: str | list[str]) -> Any:
        """Ask the HTTP API of Prometheus and return the data. Fail with its message if it refuses the query."""
        query = urllib.parse.urlencode(parameters, doseq=True)
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=SECONDS_MAX) as response:
                return json.load(response)["data"]
        except urllib.error.HTTPError as error:
            pytest.fail(f"{parameters}: {json.load(error)['error']}")

    def samples(self, query: str) -> list[Any]:
        return self.get("query", query=query)["result"]

    def values(self, query: str) -> list[float]:
        return [float(sample["value"][1]) for sample in self.samples(query)]

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if found := re.search(r'"Listening on" address=(\S+)', line):
                self.url = f"http://{found[1]}"
            elif "Server is ready" in line:
                self._is_serving.set()
        self._is_serving.set()


def ask(url: str, prompt: str, *, leaves_after: int | None = None, **fields: object) -> int:
    """Send a streamed completion and read its response.

    Args:
        url: base URL of the server or router.
        prompt: text of the prompt.
        leaves_after: how many lines to read before closing. None reads the whole response.
        fields: further fields of the request.

    Returns:
        The HTTP status.
    """
    body = {"prompt": prompt, "max_tokens": 24, "ignore_eos": True, "stream": True, **fields}
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=SECONDS_MAX) as response:
            for count, _line in enumerate(response):
                if count == leaves_after:
                    break
            return response.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def burst(url: str, **fields: object) -> list[int]:
    """Send twelve completions at a time and return their statuses."""
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        return list(pool.map(lambda number: ask(url, f"{number} {STORY}", **fields), range(12)))


def make_traffic(prometheus: PrometheusProcess, server: str, router: str, pair: str) -> None:
    """Cause traffic of each kind: responses, aborts, refusals, grammars, draft tokens and prefix cache hits."""
    for url in (server, router, pair):
        assert [ask(url, f"{number % 2} {STORY}") for number in range(4)] == [200] * 4
    assert ask(server, "One, two, three: ", structured_outputs={"regex": "[a-z]{12}"}) == 200
    assert ask(server, "ab " * 40, max_tokens=60, temperature=0) == 200
    for url in (server, router):  # The server refuses some of these requests, because only fewer may run and wait.
        wait_until(lambda url=url: 429 in burst(url, max_tokens=200), "a refusal")

    def leave_and_look() -> bool:
        for url in (server, router, pair):
            ask(url, STORY, leaves_after=2, max_tokens=400)
        return sum(prometheus.values('trioserve:aborts_total{phase="decode"}')) > 0

    wait_until(leave_and_look, "an abort")


class Stand:
    """Runs a server, a router before the server, and a prefill-decode pair with a second router."""

    def __init__(self, directory: Path) -> None:
        model = directory / "model"
        subprocess.run([sys.executable, "-m", "trioserve", "random-checkpoint", "tiny", model], check=True)
        self._flags = (f"--model={model}", "--served-model-name=tiny", "--kv-cache-memory=0.02", "--threads=1")
        self._model = model
        self._processes: list[ServerProcess] = []

    def start(self) -> dict[tuple[str, str], str]:
        """Start all processes and return their URLs, by the job and role that Prometheus has for them."""
        transfer = json.dumps({"kv_connector": "tcp", "kv_connector_extra_config": {"key": "a secret of some length"}})
        pair = (*self._flags, f"--kv-transfer-config={transfer}")
        server, prefill, decode = self._start_all(
            (
                *self._flags,
                "--max-num-seqs=2",
                "--max-queued-requests=1",
                "--speculative-ngram=3",
                "--kv-events",
                "--metrics-need-key",
                "--api-key=the-key-of-somebody",
                f"--admin-api-key={ADMIN_KEY}",
            ),
            ("--role=prefill", *pair),
            ("--role=decode", *pair),
        )
        router, pair_router = self._start_all(
            (
                f"--endpoint=a={server}",
                f"--endpoint-api-key={ADMIN_KEY}",
                "--policy=kv_aware",
                f"--tokenizer={self._model}",
                "--endpoint-max-requests=2",
                "--max-queued-requests=1",
            ),
            (f"--prefill-endpoint=p={prefill}", f"--decode-endpoint=d={decode}"),
            command="route",
        )
        return {
            ("trioserve", ""): server,
            ("trioserve", "prefill"): prefill,
            ("trioserve", "decode"): decode,
            ("trioserve-router", ""): router,
            ("trioserve-router", "pair"): pair_router,
        }

    def stop(self) -> None:
        for process in self._processes:
            process.stop(signal.SIGKILL)

    def _start_all(self, *flags: tuple[str, ...], command: str = "serve") -> list[str]:
        started = [ServerProcess(*each, command=command) for each in flags]
        self._processes += started
        for process in started:
            process.wait_until_serving()
        return [process.url for process in started]


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrometheusProcess]:
    """Give a Prometheus that has scraped some traffic and evaluated its rules."""
    directory = tmp_path_factory.mktemp("observability")
    stand = Stand(directory)
    prometheus: PrometheusProcess | None = None
    try:
        targets = stand.start()
        prometheus = PrometheusProcess(directory, targets)
        prometheus.wait_until_serving()
        wait_until(lambda: prometheus.values("up") == [1.0] * len(targets), "the first scrape")
        server, _prefill, _decode, router, pair = targets.values()
        make_traffic(prometheus, server, router, pair)
        seen = time.time()
        wait_until(lambda: prometheus.values("min(timestamp(up))")[0] > seen, "a scrape of everything")
        rule_groups = prometheus.get("rules")["groups"]
        assert rule_groups
        seen = time.time()
        wait_until(lambda: all(evaluated_at(group) > seen for group in prometheus.get("rules")["groups"]), "the rules")
        yield prometheus
    finally:
        if prometheus is not None:
            prometheus.stop()
        stand.stop()


def evaluated_at(group: dict[str, Any]) -> float:
    return datetime.datetime.fromisoformat(re.sub(r"\.\d+", "", group["lastEvaluation"])).timestamp()


# --- Dashboards ---


def variables(prometheus: PrometheusProcess, dashboard: dict[str, Any]) -> dict[str, str]:
    """Return the value that Grafana inserts for each variable of a dashboard if "All" is selected."""
    chosen = dict(BUILT_IN)
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            found = re.fullmatch(r"label_values\((.*), (\w+)\)", filled_in(variable["query"]["query"], chosen))
            assert found, variable["name"]
            values = prometheus.get(f"label/{found[2]}/values", **{"match[]": found[1]})
            assert values, f"{variable['name']} has nothing to choose from"
            chosen[f"${variable['name']}"] = variable.get("allValue") or f"({'|'.join(map(re.escape, values))})"
    return chosen


def filled_in(query: str, chosen: dict[str, str]) -> str:
    for name, value in chosen.items():
        query = query.replace(name, value.replace("\\", "\\\\"))
    assert "$" not in query, query
    return query


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_every_query_of_a_dashboard_has_values(prometheus, path):
    dashboard = json.loads(path.read_text())
    chosen = variables(prometheus, dashboard)
    missing = []
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            query = filled_in(target["expr"], chosen)
            samples = prometheus.samples(query)
            labels = {label for sample in samples for label in sample["metric"]}
            has_values = not all(math.isnan(float(sample["value"][1])) for sample in samples)
            is_named = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= labels
            if not (has_values and is_named) and not any(name in query for name in EMPTY_WHILE_ALL_IS_WELL):
                missing.append(f"{panel['title']}: {query} has {samples}")
    assert not missing, "\n".join(missing)


# --- Rules ---


def test_every_rule_is_evaluated_and_no_alert_fires_without_a_fault(prometheus):
    rules = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
    assert {rule["health"] for rule in rules} == {"ok"}, [rule for rule in rules if rule["health"] != "ok"]
    for rule in rules:
        if rule["type"] == "recording":
            assert prometheus.values(rule["name"]), rule["name"]
        else:
            assert rule["state"] == "inactive" or rule["name"] in PENDING_ON_A_SLOW_MACHINE, rule["name"]
            # An alert whose query selects no series could never fire.
            for selector in re.findall(r"[a-z_]+:[a-z_0-9:]+(?:\{[^}]*\})?|\bup\{[^}]*\}", rule["query"]):
                assert prometheus.values(selector), (rule["name"], selector)


# --- Dashboards of vLLM ---


# Metrics of vLLM's own dashboards, except for features that only vLLM has: adapters, KV offloading and so on.
VLLM_HISTOGRAMS = (
    "e2e_request_latency_seconds",
    "inter_token_latency_seconds",
    "iteration_tokens_total",
    "request_decode_time_seconds",
    "request_generation_tokens",
    "request_max_num_generation_tokens",
    "request_prefill_time_seconds",
    "request_prompt_tokens",
    "request_queue_time_seconds",
    "request_time_per_output_token_seconds",
    "time_to_first_token_seconds",
)
VLLM_SERIES = (
    *(f"{name}_{part}" for name in VLLM_HISTOGRAMS for part in ("bucket", "sum", "count")),
    'time_to_first_token_seconds_bucket{le="1.0"}',
    'request_time_per_output_token_seconds_bucket{le="0.1"}',
    "cache_config_info",
    'engine_sleep_state{sleep_state="awake"}',
    'engine_sleep_state{sleep_state="discard_all"}',
    "generation_tokens_total",
    "kv_cache_usage_perc",
    "num_preemptions_total",
    "num_requests_running",
    "num_requests_waiting",
    'num_requests_waiting_by_reason{reason="capacity"}',
    'num_requests_waiting_by_reason{reason="deferred"}',
    "prefix_cache_hits_total",
    "prefix_cache_queries_total",
    'prompt_tokens_by_source_total{source="external_kv_transfer"}',
    'prompt_tokens_by_source_total{source="local_cache_hit"}',
    'prompt_tokens_by_source_total{source="local_compute"}',
    "prompt_tokens_cached_total",
    "prompt_tokens_total",
    'request_success_total{finished_reason="error"}',
    'request_success_total{finished_reason="stop"}',
    "spec_decode_num_accepted_tokens_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_drafts_total",
)
OTHER_SERIES = (
    'http_requests_total{status="2xx", handler="/v1/completions"}',
    'http_request_duration_seconds_sum{handler="/v1/completions"}',
    'http_request_duration_seconds_count{handler="/v1/completions"}',
    "process_cpu_seconds_total",
    "process_max_fds",
    "process_open_fds",
    "process_resident_memory_bytes",
    "process_start_time_seconds",
)


@pytest.mark.parametrize("series", VLLM_SERIES)
def test_series_of_vllm_dashboards_exist(prometheus, series):
    name, _brace, matchers = series.partition("{")
    labels = ", ".join(filter(None, ['job="trioserve"', 'model_name="tiny"', 'engine="0"', matchers.rstrip("}")]))
    assert prometheus.values(f"vllm:{name}{{{labels}}}")


@pytest.mark.parametrize("series", OTHER_SERIES)
def test_process_and_http_series_of_vllm_dashboards_exist(prometheus, series):
    assert prometheus.values(series)
