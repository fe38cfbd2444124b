"""cluster_configs/kuberay/rayservice.yaml against the schemas of KubeRay, Kubernetes and Serve, and against itself.

Unknown fields are errors. There is no Kubernetes here: what a cluster would do with it is not tried.
"""

import json
import re
import textwrap
from typing import Any

import pytest
import yaml
from ray._private.ray_constants import DEFAULT_DASHBOARD_AGENT_LISTEN_PORT
from ray.dashboard.http_server_agent import PUBLIC_EXACT_PATHS
from ray.serve.config import AutoscalingConfig
from ray.serve.schema import ServeDeploySchema

from ddm_ray.serve.cluster.args import ServeArgs
from ddm_ray.serve.engine.scheduler import REQUEST_TIMEOUT_S
from tests.conftest import ROOT
from tests.kuberay import fault, fields, misspelt, objects, overlooked

pytestmark = pytest.mark.integration

OBJECTS = objects("rayservice.yaml")
SPEC = OBJECTS["RayService"]["spec"]
CLUSTER = SPEC["rayClusterConfig"]
HEAD, WORKER = (group["template"] for group in (CLUSTER["headGroupSpec"], *CLUSTER["workerGroupSpecs"]))


def serve_config() -> dict[str, Any]:
    return yaml.safe_load(SPEC["serveConfigV2"])


def require_served(config: dict[str, Any]) -> None:
    """Raises ValueError or AssertionError for what Serve or `build_app` would refuse or overlook."""
    assert json.loads(ServeDeploySchema.model_validate(config).model_dump_json(exclude_unset=True)) == config
    (application,) = config["applications"]
    ServeArgs.model_validate(application["args"])
    for deployment in application["deployments"]:
        scaling = deployment.get("autoscaling_config", {})
        assert scaling.keys() <= AutoscalingConfig.model_fields.keys()
        AutoscalingConfig.model_validate(scaling)


@pytest.mark.parametrize("kind", OBJECTS)
def test_each_object_fits_its_schema(kind: str) -> None:
    assert fault(OBJECTS[kind]) == ""


@pytest.mark.parametrize("kind", OBJECTS)
def test_a_misspelt_field_fits_none(kind: str) -> None:
    assert len(list(fields(OBJECTS[kind]))) >= {"RayService": 120}.get(kind, 6)
    assert overlooked(OBJECTS[kind]) == []


def test_its_serve_config_is_understood_whole() -> None:
    require_served(serve_config())
    for path in fields(serve_config()):
        with pytest.raises((ValueError, AssertionError)):
            require_served(misspelt(serve_config(), path))


def test_its_serve_config_is_the_mixture_s() -> None:
    """serving/mixture.yaml but for the machines: where a run and tokens are, devices, and one `api` to be scraped."""
    ours, mixture = serve_config(), yaml.safe_load((ROOT / "serving/mixture.yaml").read_text())
    (our,), (application,) = ours["applications"], mixture["applications"]
    mixture["http_options"]["host"] = "0.0.0.0"
    application["args"] |= {name: our["args"][name] for name in ("run", "device", "precision", "token_file")}
    for deployment, placed in zip(application["deployments"], our["deployments"], strict=True):
        deployment["ray_actor_options"] = placed["ray_actor_options"]
    assert application["args"].pop("local"), "of this machine alone"
    api = application["deployments"][-1]
    del api["autoscaling_config"]
    api["num_replicas"] = 1
    assert ours == mixture


def test_the_colocated_config_in_its_comment() -> None:
    comment = SPEC["serveConfigV2"].partition("    # deployments:\n")[2]
    lines = re.findall(r"^ {4}# (.*)", f"    # deployments:\n{comment}", re.MULTILINE)
    config = serve_config()
    config["applications"][0]["args"]["placement"] = "colocated"
    config["applications"][0] |= yaml.safe_load(textwrap.dedent("\n".join(lines)))
    assert [deployment["name"] for deployment in config["applications"][0]["deployments"]] == ["api"]
    require_served(config)


def test_it_names_the_ray_that_is_pinned() -> None:
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
    assert CLUSTER["rayVersion"] == pins["ray"]
    assert CLUSTER["authOptions"] == {"mode": "token"}


def test_probes_ask_ray_for_what_it_answers_without_a_token() -> None:
    """The proxy's own is asked of a server in test_mixture_yaml.py."""
    (head,), (worker,) = HEAD["spec"]["containers"], WORKER["spec"]["containers"]
    for probe in (head["livenessProbe"], head["readinessProbe"], worker["livenessProbe"]):
        assert probe["httpGet"]["path"] in PUBLIC_EXACT_PATHS
        assert probe["httpGet"]["port"] == DEFAULT_DASHBOARD_AGENT_LISTEN_PORT
    serve_port = serve_config()["http_options"]["port"]
    assert {"name": worker["readinessProbe"]["httpGet"]["port"], "containerPort": serve_port} in worker["ports"]


def test_pods_have_no_rights_and_what_they_may_use() -> None:
    for template in (HEAD, WORKER):
        pod, (container,) = template["spec"], template["spec"]["containers"]
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not pod.keys() & {"hostNetwork", "hostPID", "hostIPC"}
        assert {key for volume in pod["volumes"] for key in volume} == {"name", "emptyDir", "secret"}
        for part in (container, CLUSTER["autoscalerOptions"]):
            assert part["resources"]["requests"] == part["resources"]["limits"]
            assert part["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
                "readOnlyRootFilesystem": True,
            }
    assert WORKER["spec"]["automountServiceAccountToken"] is False


def test_its_parts_name_each_other() -> None:
    (application,) = serve_config()["applications"]
    secrets = set()
    for template in (HEAD, WORKER):
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        (container,) = template["spec"]["containers"]
        mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
        tokens = mounts[application["args"]["token_file"].rpartition("/")[0]]["secret"]["secretName"]
        secrets |= {tokens, *(each["secretRef"]["name"] for each in container["envFrom"])}
        for name in ("NetworkPolicy", "PodDisruptionBudget"):
            selected = OBJECTS[name]["spec"].get("podSelector") or OBJECTS[name]["spec"]["selector"]
            own = {key: value for key, value in selected["matchLabels"].items() if not key.startswith("ray.io/")}
            assert own and own.items() <= template["metadata"]["labels"].items()
    readme = (ROOT / "cluster_configs/README.md").read_text()
    assert set(re.findall(r"kubectl -n ddm create secret generic (\S+)", readme)) == secrets


def test_only_those_named_reach_its_ports() -> None:
    among, *others = OBJECTS["NetworkPolicy"]["spec"]["ingress"]
    assert among == {"from": [{"podSelector": OBJECTS["NetworkPolicy"]["spec"]["podSelector"]}]}
    reached = {}
    for rule in others:
        (peer,) = rule["from"]
        (namespace,) = peer["namespaceSelector"]["matchLabels"].values()
        reached[namespace] = {port["port"] for port in rule["ports"]}
    assert reached == {"kuberay-system": {8265}, "ingress-nginx": {8000}, "monitoring": {8000, 8080}}


def test_numbers_fit_each_other() -> None:
    (application,), (group,) = serve_config()["applications"], CLUSTER["workerGroupSpecs"]
    experts = [each["autoscaling_config"] for each in application["deployments"] if each["name"].startswith("expert")]
    (container,) = WORKER["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert group["minReplicas"] == sum(expert["min_replicas"] for expert in experts)
    assert group["maxReplicas"] == sum(expert["max_replicas"] for expert in experts)
    assert 0 < OBJECTS["PodDisruptionBudget"]["spec"]["minAvailable"] < group["minReplicas"]
    assert serve_config()["http_options"]["request_timeout_s"] == REQUEST_TIMEOUT_S
    assert SPEC["rayClusterDeletionDelaySeconds"] > REQUEST_TIMEOUT_S
