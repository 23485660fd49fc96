"""Tests of the chart in deploy/helm: Kubernetes accepts its objects, and they match the program.

The tests compare flags, variables, ports, paths, metrics, rights, directories, and the time to stop.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import trio
import yaml

from trioserve import __version__, cli
from trioserve.api import routes
from trioserve.api.route_table import RouteTable
from trioserve.commands.serving import check_front
from trioserve.config import Config, config_from
from trioserve.contracts.errors import EndpointLost
from trioserve.metrics.registry import CATALOGUE
from trioserve.options.option import options_of
from trioserve.options.router import RouterOptions
from trioserve.proxy import router_app
from trioserve.proxy.discovery.kubernetes import KubernetesSource
from trioserve.proxy.fleet import EndpointSpec
from trioserve.proxy.peers.peer_watch import parse_peers

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "trioserve"
VALUES = [None, *sorted(path.name.removesuffix("-values.yaml") for path in (CHART / "ci").iterdir())]
COMPONENTS = {
    "router": (RouterOptions, RouteTable(router_app.OPERATIONS).routes),
    "engine": (Config, RouteTable(routes.OPERATIONS).routes),
}
OF_OTHERS = {"ScaledObject", "PodMonitor", "LeaderWorkerSet"}  # The schemas of these kinds do not come with Kubernetes.
GROUP = "LeaderWorkerSet", "trioserve-engine-group"
SUPERVISOR_SECONDS = 5  # This time exceeds --drain-timeout, as docs/guides/operations.md requires.
SECRET = "a-key-of-the-secret"

pytestmark = pytest.mark.slow


@pytest.fixture(params=VALUES, ids=str)
def installed(request: Any, manifests: Callable[..., Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return manifests(request.param)


@pytest.fixture(params=COMPONENTS)
def component(request: Any) -> str:
    return request.param


def template_of(installed: dict, component: str) -> dict[str, Any]:
    """Return the pod template of a component.

    The component "worker" is a pod of a multi-node engine that does not serve.
    """
    if component == "router" or GROUP not in installed:
        return installed["Deployment", f"trioserve-{component}"]["spec"]["template"]
    return installed[GROUP]["spec"]["leaderWorkerTemplate"][
        "workerTemplate" if component == "worker" else "leaderTemplate"
    ]


def pod_of(installed: dict, component: str) -> dict[str, Any]:
    return template_of(installed, component)["spec"]


def container_of(installed: dict, component: str) -> dict[str, Any]:
    [container] = pod_of(installed, component)["containers"]
    return container


def environment_of(container: dict[str, Any]) -> dict[str, str]:
    """Return the environment of a container's process, as if every Secret had every key."""
    given = {"secretKeyRef": SECRET, "resourceFieldRef": "4"}
    return {
        one["name"]: one["value"] if "value" in one else given[next(iter(one["valueFrom"]))] for one in container["env"]
    }


def config_of(installed: dict, component: str, worker_index: int = 0) -> Any:
    container = container_of(installed, component)
    added = {}
    if GROUP in installed:  # LeaderWorkerSet adds these variables, see AddLWSVariables in its pkg/utils/pod.
        added = {"LWS_LEADER_ADDRESS": f"{GROUP[1]}-0.{GROUP[1]}.ml", "LWS_WORKER_INDEX": str(worker_index)}
    environment = added | environment_of(container)
    words = [re.sub(r"\$\((\w+)\)", lambda found: environment[found[1]], word) for word in container["args"]]
    kind = RouterOptions if component == "router" else Config
    return config_from(cli._parser()[0].parse_args(words), environment, kind=kind)


def selected(installed: dict, labels: dict[str, str] | None = None, **selector: Any) -> set[str]:
    """Return the components whose pods match labels, or a selector of labels and expressions."""
    wanted = selector.get("matchLabels", {}) if labels is None else labels
    found = set()
    for name in [*COMPONENTS, *(["worker"] if GROUP in installed else [])]:
        there = template_of(installed, name)["metadata"]["labels"]
        expressions = selector.get("matchExpressions", ())
        assert all(one["operator"] == "In" for one in expressions)
        if wanted.items() <= there.items() and all(there.get(one["key"]) in one["values"] for one in expressions):
            found.add(name)
    return found


# --- helm and Kubernetes ---


@pytest.mark.parametrize("values", VALUES)
def test_helm_lint_accepts_the_chart(helm, values):
    ran = helm("lint", "--strict", CHART, values=values)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def supported_version(which: str) -> str:
    import kubernetes_validate

    oldest = re.search(r">=([\d.]+)", yaml.safe_load((CHART / "Chart.yaml").read_text())["kubeVersion"])[1]
    return oldest if which == "oldest" else kubernetes_validate.latest_version()


@pytest.mark.parametrize("version", ["oldest", "newest"])
def test_kubernetes_schemas_accept_all_objects(installed, version):
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    for (kind, _), manifest in installed.items():
        if kind not in OF_OTHERS:
            kubernetes_validate.validate(manifest, supported_version(version), strict=True)


@pytest.mark.parametrize("version", ["oldest", "newest"])
@pytest.mark.parametrize("component", ["engine", "worker"])
def test_kubernetes_schemas_accept_pods_of_engines_on_several_nodes(manifests, component, version):
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    template = template_of(manifests("nodes"), component)
    pod = {"apiVersion": "v1", "kind": "Pod", **template, "metadata": {"name": component, **template["metadata"]}}
    kubernetes_validate.validate(pod, supported_version(version), strict=True)


def test_notes_say_how_to_send_requests_and_warn_without_keys(helm):
    ran = helm("install", "--dry-run=client", "trioserve", CHART, "--namespace", "ml")
    assert "port-forward service/trioserve-router 8000:80" in ran.stdout
    assert "No API keys are set" in ran.stdout
    ran = helm("install", "--dry-run=client", "trioserve", CHART, values="guarded")
    assert "No API keys are set" not in ran.stdout


def test_chart_has_the_version_of_the_program():
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == __version__


# --- the program ---


def test_program_accepts_the_command_line_and_variables_of_the_chart(installed, component):
    container = container_of(installed, component)
    assert container["args"][0] == ("route" if component == "router" else "serve")
    config = config_of(installed, component)
    check_front(config)
    [port] = container["ports"]
    assert (config.host, config.port) == ("0.0.0.0", port["containerPort"])
    names = [name for name in environment_of(container) if name.startswith("TRIOSERVE_")]
    assert {name.removeprefix("TRIOSERVE_").lower() for name in names} <= options_of(type(config)).keys()


def test_service_of_the_same_name_sets_no_options(installed, component):
    assert pod_of(installed, component)["enableServiceLinks"] is False


def test_probes_use_routes_without_a_key(installed, component):
    container = container_of(installed, component)
    paths = {kind: container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness", "readiness")}
    assert paths == {"startup": "/health", "liveness": "/health", "readiness": "/ready"}
    for path in paths.values():
        route = COMPONENTS[component][1][path]
        assert "GET" in route.operations
        assert not route.needs_key


def test_pod_has_time_to_stop(installed, component):
    pod, container = pod_of(installed, component), container_of(installed, component)
    waited = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    needed = waited + config_of(installed, component).drain_timeout + SUPERVISOR_SECONDS
    assert pod["terminationGracePeriodSeconds"] >= needed


def has_ranks(installed: dict, component: str) -> bool:
    return component != "router" and config_of(installed, component).rank_count > 1


def test_folders_that_a_pod_writes_are_mounted_and_other_folders_are_read_only(installed, component):
    pod, container = pod_of(installed, component), container_of(installed, component)
    volume = re.search(r"^VOLUME (\S+)$", (ROOT / "deploy" / "Containerfile").read_text(), re.MULTILINE)[1]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
    shared = {"/dev/shm": "shared-memory"} if has_ranks(installed, component) else {}
    assert mounts == {volume: "cache", "/tmp": "tmp", **shared}
    assert set(mounts.values()) <= {one["name"] for one in pod["volumes"]}
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert PurePosixPath(volume).is_absolute()


def test_pods_have_minimal_rights(installed, component):
    check_confined(installed, component)


def check_confined(installed: dict, component: str) -> None:
    """Check the rules of the Pod Security Standard "restricted"."""
    pod, container = pod_of(installed, component), container_of(installed, component)
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_pod_runs_as_the_user_of_the_image_unless_the_cluster_chooses(manifests, component):
    user = int(re.search(r"^USER (\d+)", (ROOT / "deploy" / "Containerfile").read_text(), re.MULTILINE)[1])
    assert pod_of(manifests(), component)["securityContext"]["runAsUser"] == user
    assert "runAsUser" not in pod_of(manifests("guarded"), component)["securityContext"]


def test_keys_come_from_the_secret_and_the_routers_key_is_an_admin_key(manifests):
    router, engine = (config_of(manifests("guarded"), name) for name in COMPONENTS)
    assert router.api_key == (SECRET,)
    assert router.endpoint_api_key == engine.admin_api_key == SECRET
    for name in COMPONENTS:
        config = config_of(manifests(), name)
        assert config.api_key == ()
        assert config.admin_api_key is None
    rendered = {name: yaml.safe_dump(container_of(manifests("guarded"), name)["args"]) for name in COMPONENTS}
    assert not [name for name, args in rendered.items() if "api-key" in args]


# --- discovery ---


class DeafApiServer:
    """An API server that records requests and fails each request."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    @asynccontextmanager
    async def request(self, method: str, path: str, headers: object, body: bytes) -> Any:
        self.asked.append((method, path))
        raise EndpointLost("deaf")
        yield

    def close(self) -> None:
        pass


async def test_routers_have_the_rights_that_they_need_at_the_api_server(manifests, autojump_clock):
    installed = manifests()
    namespace, _, rest = config_of(installed, "router").endpoints_kubernetes.partition("/")
    service, _, port = rest.partition(":")
    api = DeafApiServer()
    source = KubernetesSource(
        api, namespace=namespace, service=service, port=port, template=lambda url: EndpointSpec(url=url)
    )
    with trio.move_on_after(0.5):
        await source.run(None)
    [(method, path)] = api.asked
    group, resource = re.fullmatch(r"/apis/([\w.]+)/v1/namespaces/ml/(\w+)\?.*", path).groups()
    [rule] = installed["Role", "trioserve-router"]["rules"]
    assert (method, rule) == ("GET", {"apiGroups": [group], "resources": [resource], "verbs": ["list", "watch"]})
    binding = installed["RoleBinding", "trioserve-router"]
    pod = pod_of(installed, "router")
    assert [one["name"] for one in binding["subjects"]] == [pod["serviceAccountName"]]
    assert pod["automountServiceAccountToken"]
    assert not pod_of(installed, "engine")["automountServiceAccountToken"]
    target = installed["Service", service]["spec"]
    assert selected(installed, target["selector"]) == {"engine"}
    assert [one["name"] for one in target["ports"]] == [port]
    assert not target.get("publishNotReadyAddresses")


def test_routers_find_each_other_before_they_are_ready(installed):
    [peers] = config_of(installed, "router").router_peers
    parse_peers([peers])
    _, host, port = peers.split(":")
    service = installed["Service", host.removesuffix(".ml.svc.cluster.local")]["spec"]
    assert selected(installed, service["selector"]) == {"router"}
    assert service["publishNotReadyAddresses"]
    assert service["clusterIP"] == "None"
    assert int(port) == config_of(installed, "router").port


def test_clients_reach_only_routers(installed):
    service = installed["Service", "trioserve-router"]["spec"]
    assert selected(installed, service["selector"]) == {"router"}
    assert service["ports"][0]["targetPort"] == container_of(installed, "router")["ports"][0]["name"]


def test_network_policies_allow_routers_and_configured_peers(manifests):
    def peers(policy: dict[str, Any]) -> set[str]:
        [rule] = policy["spec"]["ingress"]
        assert rule["ports"] == [{"port": Config().port}]
        return {
            name
            for peer in rule.get("from", ())
            if "podSelector" in peer
            for name in selected(installed, **peer["podSelector"])
        }

    installed = manifests()
    assert peers(installed["NetworkPolicy", "trioserve-engine"]) == {"router"}
    assert "from" not in installed["NetworkPolicy", "trioserve-router"]["spec"]["ingress"][0]
    guarded = manifests("guarded")
    assert peers(guarded["NetworkPolicy", "trioserve-router"]) == {"router"}
    assert len(guarded["NetworkPolicy", "trioserve-engine"]["spec"]["ingress"][0]["from"]) == 2
    assert not [kind for kind, _ in manifests("bare") if kind == "NetworkPolicy"]


def test_kv_aware_router_gets_cache_events(manifests):
    assert config_of(manifests("guarded"), "router").tokenizer == config_of(manifests("guarded"), "engine").model
    assert config_of(manifests("guarded"), "engine").kv_events
    assert not config_of(manifests(), "engine").kv_events


# --- scaling ---


def test_autoscaled_components_have_no_fixed_replicas(manifests):
    def replicas(values: str | None) -> dict[str, bool]:
        return {name: "replicas" in manifests(values)["Deployment", f"trioserve-{name}"]["spec"] for name in COMPONENTS}

    assert replicas(None) == {"router": True, "engine": True}
    assert replicas("scaled") == {"router": False, "engine": False}
    assert replicas("bare") == {"router": True, "engine": False}
    assert "replicas" not in manifests("nodes")[GROUP]["spec"]
    assert manifests("stages")[GROUP]["spec"]["replicas"] == 3


@pytest.mark.parametrize(
    ("values", "kind", "scaler"),
    [
        ("bare", "hpa", "HorizontalPodAutoscaler"),
        ("scaled", "keda", "ScaledObject"),
        ("nodes", "hpa", "HorizontalPodAutoscaler"),
        ("nodes", "keda", "ScaledObject"),
    ],
)
def test_autoscaling_targets_are_objects_of_the_chart(manifests, values, kind, scaler):
    installed = manifests(values, "--set", f"engine.autoscaling.kind={kind}")
    target = installed[scaler, "trioserve-engine"]["spec"]["scaleTargetRef"]
    assert installed[target["kind"], target["name"]]["apiVersion"] == target["apiVersion"]


def test_nodes_are_drained_pod_by_pod(installed, component):
    budget = installed["PodDisruptionBudget", f"trioserve-{component}"]["spec"]
    assert budget["maxUnavailable"] == 1
    workers = {"worker"} if component == "engine" and GROUP in installed else set()
    assert selected(installed, **budget["selector"]) == {component, *workers}


def triggers(manifests: Callable[..., Any]) -> Iterator[dict[str, str]]:
    scaled = manifests("scaled")["ScaledObject", "trioserve-engine"]["spec"]
    yield from (trigger["metadata"] for trigger in scaled["triggers"])


def test_metrics_in_keda_queries_exist(manifests, tmp_path):
    [trigger] = triggers(manifests)
    named = set(re.findall(r"trioserve(?:_router)?:\w+", trigger["query"]))
    assert "trioserve_router:queued_requests" in named
    assert named <= {metric.full_name for metric in CATALOGUE}
    pods = re.search(r'pod=~"([^"]+)"', trigger["query"])[1]
    assert all(re.fullmatch(pods, f"trioserve-{name}-5d4f-x7k2p") for name in COMPONENTS)
    assert re.fullmatch(pods, f"{GROUP[1]}-0")
    if shutil.which("promtool") is None:
        return
    rule = {"groups": [{"name": "keda", "rules": [{"record": "wanted", "expr": trigger["query"]}]}]}
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(rule))
    ran = subprocess.run(["promtool", "check", "rules", "rules.yml"], cwd=tmp_path, capture_output=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_prometheus_scrapes_the_metrics_path_of_pods(manifests):
    monitor = manifests("scaled")["PodMonitor", "trioserve-pods"]["spec"]
    assert selected(manifests("scaled"), monitor["selector"]["matchLabels"]) == set(COMPONENTS)
    [endpoint] = monitor["podMetricsEndpoints"]
    for name, (_, known) in COMPONENTS.items():
        assert endpoint["path"] in known
        assert endpoint["port"] == container_of(manifests("scaled"), name)["ports"][0]["name"]


def test_cache_claim_survives_uninstalling(manifests):
    claim = manifests("gpu")["PersistentVolumeClaim", "trioserve-cache"]
    assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    volumes = {one["name"]: one for one in pod_of(manifests("gpu"), "engine")["volumes"]}
    assert volumes["cache"]["persistentVolumeClaim"]["claimName"] == "trioserve-cache"


# --- engines with several processes ---


def test_engines_with_ranks_in_one_pod_are_a_deployment(manifests):
    config = config_of(manifests("ranks"), "engine")
    assert (config.tensor_parallel_size, config.nnodes, config.ranks_key) == (2, 1, None)
    assert config_of(manifests(), "engine").tensor_parallel_size == 1
    volumes = {one["name"]: one for one in pod_of(manifests("ranks"), "engine")["volumes"]}
    assert volumes["shared-memory"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "1Gi"}


def test_leader_worker_set_has_only_fields_of_its_schema(manifests):
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    group = manifests("nodes")[GROUP]
    assert group["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
    jsonschema.validate(group["spec"], LEADER_WORKER_SET)
    jsonschema.validate(manifests("stages")[GROUP]["spec"], LEADER_WORKER_SET)
    wrong = {**group["spec"], "startupPolicy": "LeaderStarted"}
    with pytest.raises(jsonschema.ValidationError, match="LeaderStarted"):
        jsonschema.validate(wrong, LEADER_WORKER_SET)


def _fields(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": properties}


SHARE = {"type": ["integer", "string"]}
LEADER_WORKER_SET = _fields(
    replicas={"type": "integer", "minimum": 0},
    startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
    networkConfig=_fields(subdomainPolicy={"enum": ["Shared", "UniquePerReplica"]}),
    rolloutStrategy=_fields(
        type={"enum": ["RollingUpdate"]},
        rollingUpdateConfiguration=_fields(maxSurge=SHARE, maxUnavailable=SHARE),
    ),
    leaderWorkerTemplate=_fields(
        size={"type": "integer"},
        restartPolicy={"enum": ["RecreateGroupOnPodRestart", "None"]},
        leaderTemplate={"type": "object"},
        workerTemplate={"type": "object"},
    ),
)
"""The fields of LeaderWorkerSet's spec that the chart uses, in versions 0.5 to 0.10. The whole schema has 1.3 MB."""


@pytest.fixture(params=["nodes", "stages"])
def grouped(request: Any, manifests: Callable[..., Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the manifests of engines on several nodes."""
    return manifests(request.param)


def test_pods_of_an_engine_are_one_group(grouped):
    spec = grouped[GROUP]["spec"]
    size = spec["leaderWorkerTemplate"]["size"]
    configs = [config_of(grouped, "worker" if index else "engine", index) for index in range(size)]
    assert [config.node_rank for config in configs] == list(range(size))
    assert [config.headless for config in configs] == [False, *[True] * (size - 1)]
    shared = "nnodes tensor_parallel_size pipeline_parallel_size master_addr master_port ranks_key model revision"
    for name in shared.split():
        assert len({getattr(config, name) for config in configs}) == 1, name
    assert (configs[0].nnodes, configs[0].ranks_key) == (size, SECRET)
    # The server is ready only after its workers have joined, so workers cannot wait for it.
    assert spec["startupPolicy"] == "LeaderCreated"


def test_workers_find_the_server_before_it_is_ready(grouped):
    # The first two parts of the name are the hostname and subdomain of the server's pod. The kubelet writes the full
    # name into the /etc/hosts of this pod.
    assert config_of(grouped, "worker", 1).master_addr == f"{GROUP[1]}-0.{GROUP[1]}.ml.svc.cluster.local"
    # LeaderWorkerSet creates a Service that also lists pods that are not ready. It creates no Service if the name is
    # taken.
    assert grouped[GROUP]["spec"]["networkConfig"] == {"subdomainPolicy": "Shared"}
    assert ("Service", GROUP[1]) not in grouped


def test_worker_pods_of_an_engine_get_no_requests(grouped):
    container = container_of(grouped, "worker")
    assert not {"ports", "startupProbe", "livenessProbe", "readinessProbe", "lifecycle"} & set(container)
    assert not [name for name in environment_of(container) if "API_KEY" in name]
    for (kind, _), manifest in grouped.items():
        if kind == "Service":
            assert "worker" not in selected(grouped, manifest["spec"]["selector"])
    assert selected(grouped, grouped["Service", "trioserve-engine"]["spec"]["selector"]) == {"engine"}


def test_workers_have_the_rights_and_volumes_of_the_server(grouped):
    check_confined(grouped, "worker")
    for name in ("volumes", "nodeSelector", "tolerations", "runtimeClassName", "securityContext", "enableServiceLinks"):
        assert pod_of(grouped, "worker").get(name) == pod_of(grouped, "engine").get(name)
    for name in ("image", "resources", "volumeMounts"):
        assert container_of(grouped, "worker")[name] == container_of(grouped, "engine")[name]
    tokens = [environment_of(container_of(grouped, name)).get("HF_TOKEN") for name in ("engine", "worker")]
    assert tokens[0] == tokens[1]


def test_only_ranks_reach_the_ports_of_ranks(grouped):
    from_, to = {name: {} for name in ("engine", "worker")}, {name: set() for name in ("engine", "worker")}
    for (kind, _), policy in grouped.items():
        if kind != "NetworkPolicy":
            continue
        assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
        for name in selected(grouped, **policy["spec"]["podSelector"]) - {"router"}:
            for rule in policy["spec"]["ingress"]:
                ports = tuple(port["port"] for port in rule.get("ports", ()))
                peers = [selected(grouped, **one["podSelector"]) for one in rule["from"] if "podSelector" in one]
                from_[name].setdefault(ports, set()).update(*peers)
            for rule in policy["spec"]["egress"]:
                if "ports" not in rule:
                    to[name] |= set().union(*(selected(grouped, **one["podSelector"]) for one in rule["to"]))
    both = {"engine", "worker"}
    assert from_ == {"engine": {(8000,): {"router"}, (): both}, "worker": {(): both}}
    assert to == {"engine": both, "worker": both}


def test_longest_release_name_leaves_space_for_pod_names(helm):
    ran = helm("template", "r" * 53, CHART, values="nodes")
    [group] = [one for one in yaml.safe_load_all(ran.stdout) if one and one["kind"] == "LeaderWorkerSet"]
    leader = f"{group['metadata']['name']}-9999"
    # LeaderWorkerSet creates a StatefulSet for the workers. One label of its pods consists of the StatefulSet's name, a
    # hyphen and 10 characters.
    assert len(leader) <= 63 - 11


def test_notes_say_how_to_wait_for_engine_groups(helm):
    ran = helm("install", "--dry-run=client", "trioserve", CHART, values="nodes")
    assert f"--for=condition=Available --timeout=1800s leaderworkerset/{GROUP[1]}\n" in ran.stdout
    assert "no network policies" not in ran.stdout
    words = "install", "--dry-run=client", "trioserve", CHART, "--set", "networkPolicy.enabled=false"
    assert "There are no network policies" in helm(*words, values="nodes").stdout
    assert "There are no network policies" not in helm(*words).stdout
