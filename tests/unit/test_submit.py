"""The job scripts of launch/submit.py: what they ask for, that a shell can read them, and what is refused."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf_megatron.recipe import load_recipe

ROOT = Path(__file__).resolve().parents[2]
RECIPE: dict[str, Any] = {
    "name": "job",
    "loop": "sft",
    "steps": 3,
    "model": {"path": "model", "dtype": "float32"},
    "data": {"train_files": ["train.parquet"], "max_prompt_length": 64},
    "batch": {"prompts_per_step": 4},
    "actor": {"tokens_per_gpu": 512, "optimizer": {"learning_rate": 1e-3}},
    "cluster": {"gpus_per_node": 4},
}


SUBMIT = ROOT / "launch" / "submit.py"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(RECIPE))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def submit(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run launch/submit.py in ``folder``, where this process is; run in it, since a process of its own takes a
    second."""
    specification = importlib.util.spec_from_file_location("launch_submit", SUBMIT)
    assert specification is not None and specification.loader is not None
    module = sys.modules["launch_submit"] = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    out, err = io.StringIO(), io.StringIO()
    command = [str(SUBMIT), "sft.yaml", *arguments]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "argv", command)
        status = module.main()
    return subprocess.CompletedProcess(command, status, out.getvalue(), err.getvalue())


def script(folder: Path, *arguments: str) -> str:
    """Return a job's script, which bash can read, and in which shellcheck finds nothing where it is installed."""
    shown = submit(folder, *arguments, "--print")
    assert shown.returncode == 0, shown.stderr
    checked = subprocess.run(["bash", "-n"], input=shown.stdout, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")
    if shutil.which("shellcheck"):
        # Functions that a trap calls are reached (SC2317), what stands in single quotes is to stay as it is (SC2016),
        # and so is a line of the recipe that looks like its end (SC1039).
        command = ["shellcheck", "--exclude=SC2317,SC2016,SC1039", "-"]
        found = subprocess.run(command, input=shown.stdout, capture_output=True, text=True, check=False)
        assert found.returncode == 0, found.stdout
    return shown.stdout


def options(text: str) -> dict[str, str]:
    """Return what the script asks of sbatch, read as sbatch does: by a shell's rules for quotes."""
    lines = [shlex.split(line.removeprefix("#SBATCH ")) for line in text.splitlines() if line.startswith("#SBATCH ")]
    assert all(len(words) == 1 for words in lines)
    return dict(words[0].removeprefix("--").partition("=")[::2] for words in lines)


def refusal(folder: Path, *arguments: str) -> str:
    done = submit(folder, *arguments, "--print")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    return line


def overrides_of(text: str, task: int) -> list[str]:
    """Return the run and the overrides that launch/train.py would be given, by running the script's own case
    statement."""
    case = text[text.index("case ${SLURM") : text.index("esac")] + 'esac\nprintf "%s\\n" "$run" "${overrides[@]}"\n'
    done = subprocess.run(
        ["bash", "-c", case], env={"SLURM_ARRAY_TASK_ID": str(task)}, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def test_the_recipe_decides_what_is_asked_of_slurm(folder: Path) -> None:
    asked = options(script(folder))
    assert asked["nodes"] == "1" and asked["gpus-per-node"] == "4" and asked["ntasks-per-node"] == "1"
    assert asked["time"] == "24:00:00" and asked["signal"] == "B:USR1@600" and "requeue" in asked
    assert asked["output"] == "runs/job/logs/slurm-%j.log" and asked["chdir"] == str(folder)
    assert not {"account", "partition", "array"} & set(asked)
    more = ["slurm.account=our lab", "slurm.partition=gpu", "slurm.time_limit_hours=1.51", "slurm.requeue=false"]
    asked = options(script(folder, *more, "slurm.request_gpus=false", "slurm.options=[--qos=high]", "--nodes=2"))
    assert (asked["account"], asked["partition"], asked["qos"], asked["nodes"]) == ("our lab", "gpu", "high", "2")
    assert asked["time"] == "1:31:00" and "no-requeue" in asked and "gpus-per-node" not in asked


def test_one_task_per_node_starts_torchrun_with_the_ranks_of_its_gpus(folder: Path) -> None:
    text = script(folder, "--nodes=2", "retry.max_retries=7", "slurm.network=roce", "slurm.venv=/opt/my env")
    (launch,) = re.findall(r"^srun .*?&$", text, flags=re.MULTILINE | re.DOTALL)
    words = shlex.split(launch)
    node = words.index(str(ROOT / "launch" / "slurm" / "node.sh"))
    assert "--nodes=2" in words and "--ntasks-per-node=1" in words
    assert words[node + 1 : node + 5] == ["4", "7", "torchrun", "1800"]
    assert words[node + 6 : node + 10] == ["roce", "", "/opt/my env/bin/python", str(ROOT / "launch" / "train.py")]
    in_container = script(folder, "slurm.container=image.sqsh", "slurm.container_mounts=['/data:/data']")
    assert "--container-image=image.sqsh" in in_container and f"{folder}:{folder}" in in_container
    assert " python3 " in in_container and sys.executable not in in_container


def test_every_value_reaches_its_place_as_it_is(folder: Path) -> None:
    nasty = "$(touch hacked) `touch hacked` \"a\" 'b'; touch hacked # %j"
    values = ["--nodes=1", f"slurm.account={json.dumps(nasty)}", f"data.train_files=[{json.dumps(nasty)}]"]
    text = script(folder, *values)
    assert options(text)["account"] == nasty
    assert overrides_of(text, 0) == ["runs/job", *values[1:], "slurm.nodes=1"]
    assert not (folder / "hacked").exists()


def test_a_sweep_is_an_array_of_runs_with_names_of_their_own(folder: Path) -> None:
    (folder / "sweep.txt").write_text("seed=1  # the first\n\nseed=2 'data.train_files=[a b.parquet]'\nname=third\n")
    text = script(folder, "steps=9", "--array=sweep.txt")
    asked = options(text)
    assert asked["array"] == "0-2" and asked["output"].endswith("slurm-%A_%a.log")
    assert overrides_of(text, 0) == ["runs/job-0", "steps=9", "seed=1", "name=job-0"]
    second = ["runs/job-1", "steps=9", "seed=2", "data.train_files=[a b.parquet]", "name=job-1"]
    assert overrides_of(text, 1) == second
    assert overrides_of(text, 2)[0] == "runs/third"


def test_the_job_carries_the_recipe_as_it_was_submitted(folder: Path) -> None:
    prompt = 'It\'s $HOME,\nEND_OF_RECIPE\n`id` "no" ümlaut: 1e3\n'
    overlay = {"actor": {"optimizer": {"weight_decay": 0.25}}, "data": {"system_prompt": prompt}, "name": "1e3"}
    (folder / "overlay.yaml").write_text(yaml.safe_dump(overlay))
    recipe = {key: value for key, value in RECIPE.items() if key != "name"}
    (folder / "sft.yaml").write_text(yaml.safe_dump(recipe | {"defaults": ["overlay.yaml"]}))
    text, asked = script(folder, "steps=9"), load_recipe("sft.yaml", ["steps=9"])
    (folder / "sft.yaml").write_text("no recipe")
    (folder / "overlay.yaml").unlink()
    (folder / "runs" / "1e3").mkdir(parents=True)
    part = text[text.index("recipe=$run") : text.index("\nhost=")]
    bash = ["bash", "-c", f'run=runs/1e3 SLURM_JOB_ID=7; {part}\nprintf %s "$recipe"']
    done = subprocess.run(bash, capture_output=True, text=True, check=True)
    assert done.stdout == "runs/1e3/job-7.yaml"
    assert load_recipe(done.stdout, overrides_of(text, 0)[1:]) == asked
    (launch,) = re.findall(r"^srun .*?&$", text, flags=re.MULTILINE | re.DOTALL)
    assert shlex.split(launch)[-3:] == ["$recipe", "${overrides[@]}", "&"]


def test_a_recipe_with_a_secret_is_not_carried_which_is_told(folder: Path) -> None:
    recipe = yaml.safe_load((folder / "sft.yaml").read_text())
    recipe["data"]["chat_template_kwargs"] = {"api_key": "hunter2"}
    (folder / "sft.yaml").write_text(yaml.safe_dump(recipe))
    done = submit(folder, "--print")
    assert done.returncode == 0 and "recipe=sft.yaml" in done.stdout
    assert "warning: sft.yaml: holds what looks like a secret" in done.stderr
    assert "hunter2" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    "override",
    [
        "cluster.gpus_per_node=8",
        "retry.max_retries=7",
        "retry.launcher=ft_launcher",
        "retry.hang_seconds=60",
        "slurm.account=lab",
        "slurm.partition=gpu",
        "slurm.time_limit_hours=48",
        "slurm.nodes=2",
        "slurm.request_gpus=false",
        "slurm.options=[--qos=high]",
        "slurm.venv=/opt/venv",
        "slurm.container=image.sqsh",
        "slurm.container_mounts=['/data:/data']",
        "slurm.setup_script=modules.sh",
        "slurm.network=roce",
        "slurm.rendezvous_host=first",
        "slurm.requeue=false",
        "slurm.signal_seconds=900",
    ],
)
def test_a_run_of_a_sweep_cannot_change_the_job_of_all(folder: Path, override: str) -> None:
    container = ["slurm.container=other.sqsh"] if "container" in override else []
    (folder / "plain.txt").write_text("seed=1\nseed=2\n")
    (folder / "sweep.txt").write_text(f"seed=1\nseed=2 {shlex.quote(override)}\n")
    with_it, without = (
        re.sub("^case .*?^esac$", "", script(folder, *container, *more, "--array=plain.txt"), flags=re.M | re.S)
        for more in ([override], [])
    )
    assert with_it != without, "what all runs share is made of it"
    refused = refusal(folder, *container, "--array=sweep.txt")
    assert refused.startswith(f"error: sweep.txt, line 2: {override.partition('=')[0]}: the runs of an array share one")


def test_a_line_may_repeat_what_the_job_has_and_set_what_each_run_reads_itself(folder: Path) -> None:
    (folder / "sweep.txt").write_text("slurm.nodes=2 retry.max_repeats=9 cluster.gpu_memory_gb=40\n")
    assert options(script(folder, "--nodes=2", "--array=sweep.txt"))["nodes"] == "2"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["name=a/b"],
            "error: sft.yaml: name: 'a/b' cannot name a run folder; begin with a letter or digit, go on with",
        ),
        (["name=../up"], "error: sft.yaml: name: '../up' cannot name a run folder"),
        (["name=$(id)"], "error: sft.yaml: name: '$(id)' cannot name a run folder"),
        (['slurm.account="a\\nb"'], "error: '--account=a\\nb': a job's script cannot carry line breaks"),
        (["slurm.options=[qos]"], "error: sft.yaml: slurm: options: 'qos' is none of sbatch's; write each as --name"),
        (["slurm.venv=a", "slurm.container=b"], "error: sft.yaml: slurm: venv and container exclude each other"),
        (
            ["slurm.time_limit_hours=0.1"],
            "error: sft.yaml: slurm: signal_seconds=600 must be below the 360 s of time_lim",
        ),
        (["--nodes=0"], "error: sft.yaml: slurm.nodes: Input should be greater than 0"),
        (["actor.layout.tensor=3"], "error: actor.layout: tensor 3 does not divide 4 GPUs"),
        (["--array=nowhere.txt"], "error: --array nowhere.txt: cannot be read ("),
        (["--array=empty.txt"], "error: --array empty.txt: has no line with overrides"),
        (["--array=twice.txt"], "error: --array twice.txt: two runs would write runs/x; give each a name of its own"),
        (["--array=quote.txt"], "error: quote.txt, line 2: No closing quotation; quote it as in a shell"),
        (["--array=bad.txt"], "error: sft.yaml: unknown key stepz; did you mean steps?"),
    ],
)
def test_what_cannot_be_submitted_is_told_in_one_line(folder: Path, arguments: list[str], line: str) -> None:
    (folder / "empty.txt").write_text("# nothing\n")
    (folder / "twice.txt").write_text("name=x seed=1\nname=x seed=2\n")
    (folder / "quote.txt").write_text("seed=1\nname='x\n")
    (folder / "bad.txt").write_text("stepz=1\n")
    assert refusal(folder, *arguments).startswith(line)


def test_without_slurm_submitting_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(folder))
    command = [sys.executable, "-P", str(SUBMIT), "sft.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.startswith("error: sbatch: there is no Slurm on this machine")


@pytest.mark.parametrize("network", ["infiniband", "roce", "tcp"])
def test_a_network_profile_keeps_what_the_user_has_set(network: str) -> None:
    profile = ROOT / "launch" / "env" / f"{network}.sh"
    command = f"set -euo pipefail; source {shlex.quote(str(profile))}; env"
    plain, own = (
        dict(line.split("=", 1) for line in subprocess.run(
            ["bash", "-c", command], env=env, capture_output=True, text=True, check=True
        ).stdout.splitlines())
        for env in ({}, {"NCCL_IB_DISABLE": "7", "NCCL_SOCKET_IFNAME": "ib0"})
    )  # fmt: skip
    assert plain["NCCL_IB_DISABLE"] == ("1" if network == "tcp" else "0") and "GLOO_SOCKET_IFNAME" not in plain
    assert (own["NCCL_IB_DISABLE"], own["GLOO_SOCKET_IFNAME"]) == ("7", "ib0")


def test_the_script_of_a_node_can_be_read_by_bash() -> None:
    for path in (ROOT / "launch" / "slurm" / "node.sh", *(ROOT / "launch" / "env").glob("*.sh")):
        assert subprocess.run(["bash", "-n", str(path)], check=False).returncode == 0


@pytest.mark.parametrize(
    "override",
    [
        "data.chat_template_kwargs={api_key: hunter2}",
        "data.chat_template_kwargs.apiKey=hunter2",
        "data.chat_template_kwargs={style: 'https://u:hunter2@h/'}",
        "data.chat_template_kwargs={style: value-of-wandb}",
    ],
)
@pytest.mark.parametrize("is_array", [False, True])
def test_an_override_with_a_secret_is_refused_since_the_script_would_keep_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, override: str, is_array: bool
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "value-of-wandb")
    (folder / "runs.txt").write_text(f"steps=1\n{shlex.quote(override)}\n")
    done = submit(folder, *(["--array", "runs.txt"] if is_array else [override]), "--print")
    assert done.returncode == 2 and not done.stdout
    assert "looks like a secret" in done.stderr and "write it into a recipe that only you can read" in done.stderr
    assert "hunter2" not in done.stderr and "value-of-wandb" not in done.stderr
