"""rlhf_megatron.hub and recipe.hub_names, by the real client against a hub on this machine: names become folders."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hub_server import HubServer, files_in, hub
from rlhf_megatron.hub import is_hub_name
from tiny_tokenizer import write_bpe_tokenizer

ROOT = Path(__file__).resolve().parents[2]
FETCH = """
import sys
from rlhf_megatron.hub import DESCRIPTION, WEIGHTS, Repository, commit_of, folder_of
from rlhf_megatron.runtime.command import command
@command
def main():
    repository = Repository(sys.argv[1], sys.argv[2])
    print(folder_of(repository, commit_of(repository), [*DESCRIPTION, *WEIGHTS]))
    return 0
sys.exit(main())
"""
RUN = """
import sys
from pathlib import Path
from rlhf_megatron.recipe import load_recipe
from rlhf_megatron.recipe.hub_names import with_run_folders
from rlhf_megatron.runtime.command import command
@command
def main():
    recipe = load_recipe(sys.argv[1], sys.argv[3:])
    recipe = with_run_folders(recipe, Path(sys.argv[2]), dict)
    print(recipe.model.path, recipe.reference.path, recipe.model.tokenizer)
    return 0
sys.exit(main())
"""
WEIGHTS = {f"model-{number}-of-3.safetensors": bytes([number]) * 200_000 for number in (1, 2, 3)}
FILES: dict[str, bytes] = {
    "config.json": b"{}",
    "tokenizer.json": b"{ }",
    "model.safetensors.index.json": b"{  }",
    **WEIGHTS,
    "pytorch_model.bin": b"not read",
    "modeling.py": b"raise SystemExit",
    "original/consolidated.safetensors": b"not read",
}
TOKEN = "hf_" + "Abcdef0123456789" * 2


@pytest.fixture
def server() -> Iterator[HubServer]:
    with hub() as server:
        yield server


class Asked(subprocess.CompletedProcess[str]):
    """The output of a process that has asked the hub."""


def environment_of(server: HubServer, home: Path) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    return kept | {"HF_ENDPOINT": server.address, "HF_HOME": str(home), "PYTHONPATH": str(ROOT)}


def ask(server: HubServer, home: Path, script: str, *arguments: str, **environment: str) -> Asked:
    values = environment_of(server, home) | environment
    command = [sys.executable, "-P", *(["-c", script] if "\n" in script else [script]), *arguments]
    done = subprocess.run(command, env=values, capture_output=True, text=True, timeout=120, cwd=home.parent)
    return Asked(done.args, done.returncode, done.stdout, done.stderr)


def assert_error(asked: Asked, *texts: str) -> None:
    lines = [line for line in asked.stderr.splitlines() if not line.startswith("downloading ")]
    assert asked.returncode == 2 and len(lines) == 1, asked.stderr
    assert lines[0].startswith("error: model.path: me/tiny@")
    assert all(text in lines[0] for text in texts), lines[0]


def test_what_is_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "Qwen").write_text("")
    names = ["meta-llama/Llama-3.1-8B", "a/b_c.d"]
    others = ["models/tiny", "Qwen/Qwen2.5-7B", "tiny", "/a/b", "./a", "../a", "a/b/c", "a/b.model", "", "a/", "~/a"]
    assert [is_hub_name(text) for text in names + others] == [True] * 2 + [False] * 11


def test_a_snapshot_is_downloaded_once_and_then_read_without_the_hub(server: HubServer, tmp_path: Path) -> None:
    served = server.add("models/me/tiny", {"config.json": b"old"}, FILES)
    first = ask(server, tmp_path / "hf", FETCH, "me/tiny", "main")
    assert first.returncode == 0, first.stderr
    folder = Path(first.stdout.strip())
    assert folder.name == served.branches["main"]
    wanted = sorted(name for name in FILES if name.endswith((".json", ".safetensors")) and "/" not in name)
    assert sorted(files_in(folder)) == wanted == server.downloads()
    assert all((folder / name).read_bytes() == FILES[name] for name in wanted)
    assert "downloading me/tiny@" in first.stderr and "6 files" in first.stderr
    server.requests.clear()
    again = ask(server, tmp_path / "hf", FETCH, "me/tiny", served.branches["main"])
    assert (again.stdout, again.stderr, server.requests) == (first.stdout, "", [])
    offline = ask(server, tmp_path / "hf", FETCH, "me/tiny", "main", HF_HUB_OFFLINE="1")
    assert (offline.stdout, server.requests) == (first.stdout, [])
    other = ask(server, tmp_path / "hf", FETCH, "me/tiny", "first")
    assert files_in(Path(other.stdout.strip())) == {"config.json": b"old"}


def test_processes_of_a_node_download_each_file_once(server: HubServer, tmp_path: Path) -> None:
    server.add("models/me/tiny", FILES)
    environment = environment_of(server, tmp_path / "hf")
    command = [sys.executable, "-P", "-c", FETCH, "me/tiny", "main"]
    ranks = [
        subprocess.Popen(
            command,
            env=environment | {"LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    said = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * 3, said
    assert len({output for output, _ in said}) == 1
    assert len(server.downloads()) == 6


def test_a_connection_that_is_cut_is_resumed(server: HubServer, tmp_path: Path) -> None:
    large = {"model.safetensors": os.urandom(2**20) * 24}  # some of the client's pieces of 10 MB
    server.add("models/me/tiny", large, cuts=1)
    asked = ask(server, tmp_path / "hf", FETCH, "me/tiny", "main")
    assert asked.returncode == 0, asked.stderr
    folder = Path(asked.stdout.strip())
    assert files_in(folder) == large
    assert [headers["range"] for _, _, headers in server.requests if "range" in headers] == ["bytes=10485760-"]


def test_one_line_says_why_there_is_no_model(server: HubServer, tmp_path: Path) -> None:
    home = tmp_path / "hf"
    assert_error(ask(server, home, FETCH, "me/tiny", "main"), "no such folder here, and no such model", "HF_TOKEN")
    server.add("models/me/tiny", FILES, token=TOKEN)
    assert_error(ask(server, home, FETCH, "me/tiny", "other"), "no such branch, tag or commit")
    (home).mkdir(exist_ok=True)
    (home / "token").write_text(TOKEN)  # of ``hf auth login``, which is not asked
    assert_error(ask(server, home, FETCH, "me/tiny", "main"), "is gated; accept its terms", "HF_TOKEN")
    assert not any("authorization" in headers for _, _, headers in server.requests)
    assert_error(ask(server, home, FETCH, "me/tiny", "main", HF_HUB_OFFLINE="1"), "HF_HUB_OFFLINE forbids")
    found = ask(server, home, FETCH, "me/tiny", "main", HF_TOKEN=TOKEN)
    assert found.returncode == 0 and TOKEN not in found.stdout + found.stderr
    served = server.add("models/me/tiny", FILES | {"model-4.safetensors": b"x"})
    served.claimed_bytes["model-4.safetensors"] = 2**60
    assert_error(ask(server, tmp_path / "other", FETCH, "me/tiny", "main"), "GB more in", "GB are free; make room")
    server.shutdown()
    server.server_close()
    assert_error(ask(server, tmp_path / "third", FETCH, "me/tiny", "main"), "; try again")


def recipe_file(folder: Path) -> Path:
    import yaml

    tree: dict[str, Any] = {
        "name": "named",
        "loop": "rl",
        "steps": 1,
        "run_root": str(folder),
        "model": {"path": "me/tiny", "dtype": "float32"},
        "data": {"train_files": ["x"], "max_prompt_length": 8},
        "batch": {"prompts_per_step": 2, "responses_per_prompt": 2, "minibatch_prompts": 2},
        "actor": {"tokens_per_gpu": 64, "optimizer": {"learning_rate": 1e-5}},
        "reference": {"path": "me/other", "revision": "first", "tokens_per_gpu": 64},
        "rollout": {"max_response_length": 8},
        "algorithm": {"kl_coef": 0.1},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(tree))
    return folder / "recipe.yaml"


def test_a_run_keeps_to_the_commits_that_it_began_with(server: HubServer, tmp_path: Path) -> None:
    recipe, run, home = recipe_file(tmp_path), tmp_path / "named", tmp_path / "hf"
    served = server.add("models/me/tiny", FILES)
    server.add("models/me/other", FILES | {"config.json": b"older"}, FILES)
    begun = ask(server, home, RUN, str(recipe), str(run))
    assert begun.returncode == 0, begun.stderr
    actor, reference, tokenizer = begun.stdout.split()
    assert Path(actor).name == served.branches["main"] and tokenizer == "None"
    assert (Path(reference) / "config.json").read_bytes() == b"older"
    recorded = json.loads((run / "hub.json").read_text())
    assert recorded == {"me/tiny@main": Path(actor).name, "me/other@first": Path(reference).name}
    newer = "f" * 40
    served.files[newer], served.branches["main"] = {"config.json": b"newer"}, newer
    resumed = ask(server, home, RUN, str(recipe), str(run))
    assert resumed.stdout == begun.stdout
    anew = ask(server, home, RUN, str(recipe), str(tmp_path / "anew"))
    assert Path(anew.stdout.split()[0]).name == newer
    folder = ask(server, home, RUN, str(recipe), str(run), f"model.path={actor}", "model.revision=main")
    assert folder.returncode == 2 and "error: model.revision=main: " in folder.stderr


def test_weights_of_roles_may_still_come_but_not_those_of_a_judge_or_for_a_preflight(
    server: HubServer, tmp_path: Path
) -> None:
    recipe, home, last = recipe_file(tmp_path), tmp_path / "hf", "model-3-of-3.safetensors"
    served = [server.add(f"models/me/{name}", FILES, FILES) for name in ("tiny", "other", "judge")]
    for each in served[:2]:
        each.held[last] = threading.Event()
    judge = "judge={path: me/judge, prompt: '{response}', max_prompt_length: 8}"
    begun = ask(server, home, RUN, str(recipe), str(tmp_path / "named"), judge)
    assert begun.returncode == 0, begun.stderr
    for folder in begun.stdout.split()[:2]:
        assert (Path(folder) / "model.safetensors.index.json").exists() and not (Path(folder) / last).exists()
    assert [path.parents[2].name for path in home.rglob(f"snapshots/*/{last}")] == ["models--me--judge"]
    waits = RUN.replace("dict)", "dict, is_whole=True)")
    threading.Timer(3.0, lambda: [each.held[last].set() for each in served[:2]]).start()
    whole = ask(server, home, waits, str(recipe), str(tmp_path / "named"), judge)
    assert whole.stdout == begun.stdout
    assert all((Path(folder) / last).exists() for folder in whole.stdout.split()[:2])


def test_a_head_that_drafts_has_a_name_too(server: HubServer, tmp_path: Path) -> None:
    recipe, home = recipe_file(tmp_path), tmp_path / "hf"
    for name in ("tiny", "other", "head"):
        server.add(f"models/me/{name}", FILES, FILES)
    head = "rollout.speculative={method: eagle3, path: me/head}"
    tells = RUN.replace("print(recipe.model.path,", "print(recipe.rollout.speculative.path,")
    begun = ask(server, home, tells, str(recipe), str(tmp_path / "named"), head)
    assert begun.returncode == 0, begun.stderr
    assert (Path(begun.stdout.split()[0]) / "model.safetensors.index.json").exists()
    assert "models--me--head" in begun.stdout.split()[0]


def test_a_run_waits_for_a_hub_that_is_away(server: HubServer, tmp_path: Path) -> None:
    recipe, home = recipe_file(tmp_path), tmp_path / "hf"
    server.add("models/me/tiny", FILES)
    server.add("models/me/other", FILES)
    retry = "retry.network={max_retries: 2, backoff_seconds: 0.05}"
    server.away = 2  # the client itself asks twice
    begun = ask(server, home, RUN, str(recipe), str(tmp_path / "named"), retry)
    assert begun.returncode == 0, begun.stderr
    told = [line for line in begun.stderr.splitlines() if line.startswith("warning: ")]
    assert len(told) == 1 and told[0].endswith("; try again (in 0.05 s, 1 of 2)")
    server.away = 99
    away = ask(server, tmp_path / "other", RUN, str(recipe), str(tmp_path / "given_up"), retry)
    assert "(in 0.05 s, 1 of 2)" in away.stderr and "(in 0.1 s, 2 of 2)" in away.stderr
    assert away.returncode == 2 and "error: model.path: me/tiny@main: the hub fails" in away.stderr.splitlines()[-1]


def test_a_repository_without_safetensors_is_refused_before_a_run(server: HubServer, tmp_path: Path) -> None:
    recipe, home = recipe_file(tmp_path), tmp_path / "hf"
    server.add("models/me/tiny", {"config.json": b"{}", "pytorch_model.bin": b"x", "onnx/a.safetensors": b"x"})
    plans = RUN.replace("with_run_folders(recipe, Path(sys.argv[2]), dict)", "planned(recipe)")
    plans = plans.replace("import with_run_folders", "import planned")
    options = [str(tmp_path / "named"), "reference.path=null", "reference.revision=null"]
    assert_error(ask(server, home, plans, str(recipe), *options), "has no *.safetensors, and no other weights")
    drawn = ask(server, home, plans, str(recipe), *options, "model.random_weights=true")
    assert drawn.returncode == 0, drawn.stderr


def write_sums(path: Path) -> None:
    import pyarrow.parquet

    asked = {"prompt": [{"role": "user", "content": "1 + 2?"}], "data_source": "openai/gsm8k"}
    row = asked | {"reward_model": {"style": "rule", "ground_truth": "3"}}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path)


CONFIG = {
    "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "tie_word_embeddings": False, "architectures": ["Qwen2ForCausalLM"],
    "torch_dtype": "float32", "hidden_act": "silu",
}  # fmt: skip


def test_a_plan_takes_a_name_for_the_folder_of_a_config(server: HubServer, tmp_path: Path) -> None:
    recipe, home = recipe_file(tmp_path), tmp_path / "hf"
    server.add("models/me/tiny", FILES | {"config.json": json.dumps(CONFIG).encode()})
    options = ["reference.path=null", "reference.revision=null", "model.path=/nowhere", "model.config=me/tiny"]
    planned = ask(server, home, str(ROOT / "launch" / "train.py"), str(recipe), *options, "--dry-run")
    assert planned.returncode == 0, planned.stderr
    assert "Memory of the fullest GPU" in planned.stdout and server.downloads() == ["config.json"]
    absent = ask(
        server, home, str(ROOT / "launch" / "plan.py"), str(recipe), *options, "model.config=me/none", "--world=2"
    )
    assert absent.returncode == 2 and absent.stderr.startswith("error: model.config: me/none@main")
    saved = ["checkpoint-to-hf", "--input", str(tmp_path), "--output", str(tmp_path / "out"), "--model", "me/none"]
    absent = ask(server, home, str(ROOT / "tools" / "convert.py"), *saved)
    assert absent.returncode == 2 and absent.stderr.startswith("error: --model: me/none@main")


def test_a_command_of_verls_is_planned_by_name_and_keeps_it(server: HubServer, tmp_path: Path) -> None:
    import yaml

    server.add("models/me/tiny", FILES | {"config.json": json.dumps(CONFIG).encode()})
    output = tmp_path / "recipe.yaml"
    words = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.model.path=me/tiny", "trainer.n_gpus_per_node=2"]
    words += ["data.max_prompt_length=64", "data.max_response_length=64", "actor_rollout_ref.rollout.n=2"]
    words += ["actor_rollout_ref.rollout.tensor_model_parallel_size=1", "--rows=4096", "--plan", f"--output={output}"]
    tool = ROOT / "tools" / "verl" / "from_verl.py"
    done = ask(server, tmp_path / "hf", str(tool), *words, PYTHONPATH=os.pathsep.join([str(ROOT), str(tool.parent)]))
    assert done.returncode == 0, done.stderr
    written = yaml.safe_load(output.read_text())
    assert written["model"]["path"] == "me/tiny" and "config" not in written["model"]
    assert not [name for name in server.downloads() if name.endswith(".safetensors")]


def test_a_dry_run_downloads_no_weights(server: HubServer, tmp_path: Path) -> None:
    tokenizer = files_in(write_bpe_tokenizer(tmp_path / "tokenizer"))
    server.add("models/me/tiny", tokenizer | WEIGHTS | {"config.json": json.dumps(CONFIG).encode()})
    recipe, data = recipe_file(tmp_path), tmp_path / "sums.parquet"
    write_sums(data)
    options = ["reference.path=null", "reference.revision=null", f"data.train_files=[{data}]", "--dry-run"]
    planned = ask(server, tmp_path / "hf", str(ROOT / "launch" / "train.py"), str(recipe), *options)
    assert planned.returncode == 0, planned.stderr
    assert "Memory of the fullest GPU" in planned.stdout and "tokenizer: warn: 1 rows of" in planned.stdout
    assert server.downloads() == sorted({*tokenizer, "config.json"})


def test_a_data_set_is_imported_by_name(server: HubServer, tmp_path: Path) -> None:
    import pyarrow.parquet

    rows = "".join(json.dumps({"question": f"{n} + 1?", "answer": n + 1}) + "\n" for n in range(3)).encode()
    served = server.add("datasets/me/sums", {"train.jsonl": rows, "test.jsonl": rows[:40], "README.md": b"# Sums"})
    output = tmp_path / "sums.parquet"
    fields = ["--prompt-field", "question", "--answer-field", "answer", "--output", str(output)]
    tool = str(ROOT / "tools" / "prepare_data.py")
    done = ask(server, tmp_path / "hf", tool, "import", "--input", "me/sums", *fields)
    assert done.returncode == 0, done.stderr
    assert f"me/sums at {served.branches['main']}" in done.stderr
    written = pyarrow.parquet.read_table(output).to_pylist()
    assert [row["reward_model"]["ground_truth"] for row in written] == ["1", "2", "3"]
    assert written[0]["data_source"] == "me/sums"
    assert "test.jsonl" not in server.downloads()
