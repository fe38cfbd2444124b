"""Clusters that KubeRay and Ray's launcher make for `ddm work`: their files against schemas, and what they run.

Neither is here: what they would do with the files isn't tried.
"""

import copy
import re
import shlex
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import botocore.session
import pytest
import yaml
from botocore.validate import ParamValidator
from jsonschema import ValidationError
from ray._private import ray_constants
from ray.autoscaler._private.aws.config import _create_default_inbound_rules
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.dashboard.modules.job import job_supervisor

from tests import kuberay
from tests.conftest import ROOT
from tests.engines import AGAIN_OR_NOT, Machine, blocks, document, gpus, ray_understands, understood, words_of

pytestmark = pytest.mark.contract

AWS, LAB = document("aws/cluster.yaml"), document("local/cluster.yaml")
RAYJOB, RAYCLUSTER = kuberay.objects("rayjob.yaml"), kuberay.objects("raycluster.yaml")
JOB = RAYJOB["RayJob"]["spec"]
CLUSTERS = {"rayjob": JOB["rayClusterSpec"], "raycluster": RAYCLUSTER["RayCluster"]["spec"]}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine.at(tmp_path)


# Kubernetes.


@pytest.mark.parametrize("objects", [RAYJOB, RAYCLUSTER], ids=["rayjob", "raycluster"])
def test_kubernetes_understands_each_field(objects: dict[str, Any]) -> None:
    assert [kuberay.fault(each) for each in objects.values()] == ["", ""]
    assert [kuberay.overlooked(each) for each in objects.values()] == [[], []]


@pytest.mark.parametrize(("ends", "status"), AGAIN_OR_NOT)
def test_a_rayjob_tries_75_again_where_it_is(machine: Machine, ends: str, status: int) -> None:
    entrypoint = JOB["entrypoint"]
    dockerfile = (ROOT / "Dockerfile").read_text()
    (folder,) = re.findall("^WORKDIR (.*)", dockerfile, re.MULTILINE)
    assert "\nCOPY cluster_configs cluster_configs\n" in dockerfile and entrypoint.startswith(f"{folder}/")
    assert machine.run("sh", "-c", entrypoint.replace(folder, str(ROOT)), ends=ends) == status
    assert len(machine.calls("ddm")) == len(ends.split())
    options = understood(machine.calls("ddm")[0])
    assert (options["only"], options["island"]) == (("expert:0",), RAYJOB["RayJob"]["metadata"]["name"])
    (group,) = CLUSTERS["rayjob"]["workerGroupSpecs"]
    workers = options["trained"].workers
    assert workers.min == workers.max == group["replicas"] * gpus(group["template"])


def test_all_experts_are_that_of_the_file_with_another_number() -> None:
    block = blocks("Kubernetes")[0].replace("kubectl -n ddm get rayjobs\n", "")
    made = subprocess.run(
        ["bash", "-ec", f"kubectl() {{ cat; echo; echo ---; }}\n{block}"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    documents = [each for each in yaml.safe_load_all(made) if each]
    jobs = [each for each in documents if each["kind"] == "RayJob"]
    names = ["expert-0", "expert-1", "expert-2", "expert-3", "router"]
    assert [job["metadata"]["name"] for job in jobs] == names
    for job, policy, name in zip(jobs, (each for each in documents if each["kind"] != "RayJob"), names, strict=True):
        assert (kuberay.fault(job), kuberay.fault(policy)) == ("", "")
        options = understood(shlex.split(job["spec"]["entrypoint"])[3:])
        assert (options["only"], options["island"]) == ((name.replace("-", ":"),), name)
        labels = {"ddm/island": name}
        assert policy["spec"]["podSelector"]["matchLabels"] == labels
        assert policy["spec"]["ingress"][0] == {"from": [{"podSelector": {"matchLabels": labels}}]}
        cluster = job["spec"]["rayClusterSpec"]
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            assert group["template"]["metadata"]["labels"] == labels


def test_the_two_clusters_differ_in_name_and_number_alone() -> None:
    job, cluster = (yaml.safe_dump(each) for each in CLUSTERS.values())
    for name in ("replicas", "minReplicas", "maxReplicas"):
        assert f" {name}: 1\n" in job
        job = job.replace(f" {name}: 1\n", f" {name}: 2\n")
    assert job.replace("expert-0", "north") == cluster
    ((*_, placement),) = [words for words in words_of(blocks("Kubernetes")[1], "ray") if words[1] == "job"]
    (group,) = CLUSTERS["raycluster"]["workerGroupSpecs"]
    options = ray_understands(words_of(blocks("Kubernetes")[1], "ray")[0][1:])
    workers = understood(list(options["entrypoint"])[1:])["trained"].workers
    assert (workers.min, workers.max) == (gpus(group["template"]), group["replicas"] * gpus(group["template"]))
    assert placement in options["entrypoint"]


def test_pods_have_the_time_to_save_a_state() -> None:
    cluster = CLUSTERS["rayjob"]
    head, worker = (group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]))
    variables = {each["name"]: each["value"] for pod in (head, worker) for each in pod["containers"][0]["env"]}
    assert hasattr(ray_constants, "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S")
    assert '"RAY_JOB_STOP_WAIT_TIME_S"' in Path(job_supervisor.__file__).read_text()
    for name in ("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "RAY_JOB_STOP_WAIT_TIME_S"):
        assert 60 <= int(variables[name]) < head["terminationGracePeriodSeconds"]
    assert worker["terminationGracePeriodSeconds"] == head["terminationGracePeriodSeconds"]
    assert not [each for each in head.get("tolerations", []) if "spot" in each["key"]]


def test_a_head_that_ends_has_the_work_leave_first(tmp_path: Path) -> None:
    """As preStop of the head's pod; among the processes of a folder in place of /proc, where ours are two."""
    hook = CLUSTERS["rayjob"]["headGroupSpec"]["template"]["spec"]["containers"][0]["lifecycle"]["preStop"]
    code = "import signal, sys, time; say = lambda: print(flush=True)"
    code += "; signal.signal(signal.SIGTERM, lambda *_: (say(), time.sleep(1), sys.exit(75))); say(); time.sleep(60)"
    work = [subprocess.Popen([sys.executable, "-c", code, word], stdout=subprocess.PIPE) for word in ("work", "worker")]
    try:
        for process in work:
            assert process.stdout and process.stdout.readline()
            (tmp_path / str(process.pid)).symlink_to(f"/proc/{process.pid}")
        *shell, script = hook["exec"]["command"]
        waiting = subprocess.Popen([*shell, script.replace("/proc/", f"{tmp_path}/")], stderr=subprocess.DEVNULL)
        assert work[0].stdout and work[0].stdout.readline()
        assert waiting.poll() is None
        assert work[0].wait(30) == 75
        waiting.wait(30)
        assert work[1].poll() is None
    finally:
        for process in work:
            process.kill()
            process.wait()


# Ray's launcher.


def launchable(config: dict[str, Any]) -> bool:
    """True if Ray's launcher would take it."""
    try:
        validate_config(prepare_config(copy.deepcopy(config)))
    except (ValidationError, ValueError):
        return False
    return True


def test_rays_launcher_knows_each_field() -> None:
    assert launchable(AWS) and launchable(LAB)
    assert not [name for name in LAB if name != "provider" and launchable(kuberay.misspelt(LAB, (name,)))]
    paths: list[kuberay.Keys] = [(name,) for name in AWS if name != "provider"]
    paths += [("auth", "ssh_user"), ("provider", "security_group", "GroupName")]
    paths += [("available_node_types", name, "resources") for name in AWS["available_node_types"]]
    assert [path for path in paths if launchable(kuberay.misspelt(AWS, path))] == []


def test_aws_knows_each_field_of_a_machine() -> None:
    asked = botocore.session.get_session().get_service_model("ec2").operation_model("RunInstances").input_shape
    for each in AWS["available_node_types"].values():
        request = {"MinCount": 1, "MaxCount": 1, **each["node_config"]}
        assert ParamValidator().validate(request, asked).generate_report() == ""
        for path in kuberay.fields(each["node_config"]):
            assert ParamValidator().validate(kuberay.misspelt(request, path), asked).has_errors(), path


def test_aws_opens_ssh_alone() -> None:
    assert AWS["provider"]["security_group"].keys() == {"GroupName"}
    open_to_all = [rule for rule in _create_default_inbound_rules({"sg-1"}) if "IpRanges" in rule]
    assert [(rule["FromPort"], rule["ToPort"]) for rule in open_to_all] == [(22, 22)]
    assert not [each for each in AWS["available_node_types"].values() if "SecurityGroupIds" in each["node_config"]]


@pytest.mark.parametrize(("engine", "config", "home"), [("AWS", AWS, "/home/ubuntu/"), ("Lab", LAB, "~/")])
def test_a_machine_has_the_project_and_the_token(engine: str, config: dict[str, Any], home: str) -> None:
    mounts = {path.removeprefix(home): source for path, source in config["file_mounts"].items()}
    (token,) = re.findall(r"openssl rand -hex 32 > (\S+)\)", blocks(engine)[0])
    assert mounts.pop(".ray/auth_token") == token
    assert all((ROOT / source).exists() and path == f"ddm-ray/{source}" for path, source in mounts.items())
    needed = re.findall(r"^COPY (.*) \./$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)[0].split()
    assert {*needed, "ddm_ray"} <= {*mounts.values()}


@pytest.mark.parametrize("config", [AWS, LAB], ids=["aws", "lab"])
def test_ray_understands_how_the_launcher_starts_it(config: dict[str, Any]) -> None:
    starts = {}
    for name in ("head", "worker"):
        (line,) = [each for each in config[f"{name}_start_ray_commands"] if "ray start" in each]
        starts[name] = ray_understands(shlex.split(line[line.index("ray start") :])[1:])
        if config is LAB:
            assert starts[name]["resources"] == '{"$(hostname -s)": 64}'
    assert (starts["head"]["head"], starts["head"]["dashboard_host"]) == (True, "127.0.0.1")
    assert starts["worker"]["address"] == f"$RAY_HEAD_IP:{starts['head']['port']}"


def work_of(engine: str, config: dict[str, Any]) -> dict[str, Any]:
    """The options of the `ddm work` that README has Ray's launcher submit."""
    (block,) = blocks(engine)
    (_, _, file, command), *_ = [words for words in words_of(block.replace("\\\n", " "), "ray") if words[1] == "exec"]
    assert document(file.removeprefix("cluster_configs/")) == config
    submit = shlex.split(command[command.index("ray job submit") :].replace("\\\n", " "))
    entrypoint = list(ray_understands(submit[1:])["entrypoint"])
    assert entrypoint[0].removeprefix("~/ddm-ray/") == "cluster_configs/again.sh" and entrypoint[2] == "ddm"
    return understood(entrypoint[3:])


def test_the_work_on_aws() -> None:
    workers = work_of("AWS", AWS)["trained"].workers
    assert (workers.min, workers.max) == (4, 4 * AWS["max_workers"])  # g6e.12xlarge has 4 GPUs


def test_the_work_in_a_lab_is_bound_to_a_machine() -> None:
    options = work_of("Lab", LAB)
    assert options["trained"].resources_per_worker == {"CPU": 4, "GPU": 1, options["island"]: 1}


def test_a_spot_machine_of_aws_tells_ray_that_it_goes(machine: Machine) -> None:
    asked: list[tuple[str, str | None]] = []

    class Metadata(BaseHTTPRequestHandler):
        """Knows of no end at first."""

        def do_PUT(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"T")

        def do_GET(self) -> None:
            asked.append((self.path, self.headers["X-aws-ec2-metadata-token"]))
            self.send_response(404 if len(asked) == 1 else 200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    server = HTTPServer(("127.0.0.1", 0), Metadata)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        (line,) = [each for each in AWS["worker_start_ray_commands"] if "notice.sh" in each]
        script = re.findall(r"~/ddm-ray/(\S+)", line)[0]
        assert machine.run(script, METADATA=f"http://127.0.0.1:{server.server_port}") == 0
    finally:
        server.shutdown()
        server.server_close()
    assert asked == [("/latest/meta-data/spot/instance-action", "T")] * 2
    (call,) = machine.calls("ray")
    drain = ray_understands(call)
    assert (drain["reason"], drain["node_id"]) == ("DRAIN_NODE_REASON_PREEMPTION", None)
    assert 60 <= drain["deadline_remaining_seconds"] < 120  # AWS gives two minutes
