"""The promises of docs/security.md that no other test is about."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml

from hugging_face import make_model
from rlhf_megatron.checkpoint.storage import publish, read_manifest, write_tensors
from rlhf_megatron.data.tokenizer_loading import load_tokenizer
from rlhf_megatron.errors import CheckpointError, DataError
from rlhf_megatron.models.architecture import ModelError, read_architecture
from rlhf_megatron.models.hf_files import CheckpointFiles
from rlhf_megatron.monitor.environment_report import redact
from rlhf_megatron.recipe import load_recipe, resolved_yaml
from tiny_tokenizer import write_bpe_tokenizer

ROOT = Path(__file__).parents[2]
# What runs code that it is given. A reward worker gets jobs from its own rank through a pipe.
DANGEROUS = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "eval", "exec"}
# The sandbox runs the policy's programs, in a process that can do nothing else.
ALLOWED = {("rlhf_megatron/rewards/worker.py", "pickle"), ("rlhf_megatron/rewards/sandbox/confined_program.py", "exec")}
# What reads a whole file, or a text of any depth. What others wrote goes through untrusted.py; these read the kernel's
# files, the project's own, or what this process or its neighbours have just written.
READS = {"json.load", "json.loads", "yaml.load", "yaml.safe_load"}
READING_METHODS = {"read_text", "read_bytes", "read", "readlines"}
ALLOWED_READS = {
    "rlhf_megatron/agents/endpoint.py": "bodies of requests, within the server's limit",
    "rlhf_megatron/compat/private_names.py": "the source of installed packages",
    "rlhf_megatron/data/chat_template.py": "a child's answer, whose length the child is given",
    "rlhf_megatron/data/template_process.py": "/proc",
    "rlhf_megatron/runtime/phases.py": "spans of other ranks",
    "rlhf_megatron/models/map_files.py": "layers that it has packed a line before",
    "rlhf_megatron/monitor/environment_report.py": "/proc, and one argument of the command line",
    "rlhf_megatron/monitor/run_files.py": "a text that untrusted.py has read, without aliases",
    "rlhf_megatron/rewards/cgroup.py": "/proc",
    "rlhf_megatron/rewards/worker_process.py": "answers of at most 64 KiB that are checked by answers.py",
    "rlhf_megatron/rewards/process_tree.py": "/proc",
    "rlhf_megatron/rewards/reasoning_gym.py": "an entry within a row's bounds, in a worker",
    "rlhf_megatron/rewards/code.py": "a program's result, of at most 16 MiB",
    "rlhf_megatron/rewards/sandbox/probe.py": "what its own program printed",
    "rlhf_megatron/rewards/sandbox/confined_program.py": "what its parent gave it, in the sandbox",
    "launch/submit.py": "the recipe that it has resolved a line before",
    "rlhf_megatron/monitor/recipe_versions.py": "the recipe that this process has resolved",
    "rlhf_megatron/checkpoint/saved_role.py": "its own dataclass, written a line before",
    "rlhf_megatron/checkpoint/manifest.py": "its own manifest, written a line before",
    "rlhf_megatron/preflight/agreement.py": "the package's own source",
    "rlhf_megatron/preflight/rank_answers.py": "answers of other ranks",
    "rlhf_megatron/preflight/machine.py": "/sys",
    "rlhf_megatron/runtime/processes.py": "/proc",
    "rlhf_megatron/runtime/watchdog.py": "one line that a rank has just written",
    "rlhf_megatron/runtime/clocks.py": "/proc",
    "rlhf_megatron/runtime/host_network.py": "/proc and /sys",
    "rlhf_megatron/untrusted.py": "the bounded readers themselves",
}


def sources(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def names_used(tree: ast.AST) -> set[str]:
    """Return modules that are imported, functions that are called by their bare name, and torch.load and torch.save."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").partition(".")[0])
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            names.add(node.func.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
            names.add(f"torch.{node.attr}")
    return names


def test_nothing_is_pickled_and_no_text_is_run() -> None:
    files = sources("rlhf_megatron", "launch", "kernels")
    assert len(files) > 100
    found = {
        (str(path.relative_to(ROOT)), name)
        for path in files
        for name in names_used(ast.parse(path.read_text())) & (DANGEROUS | {"torch.load", "torch.save"})
    }
    assert found == ALLOWED


def calls_in(tree: ast.AST) -> Iterator[ast.Call]:
    yield from (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def test_no_shell_is_started() -> None:
    for path in sources("rlhf_megatron", "launch", "kernels", "tools"):
        for call in calls_in(ast.parse(path.read_text())):
            shells = [word.arg for word in call.keywords if word.arg == "shell"]
            assert not shells and ast.unparse(call.func) not in ("os.system", "os.popen"), f"{path}:{call.lineno}"


def test_whole_files_and_deep_texts_are_read_in_one_place() -> None:
    reading = set()
    for path in sources("rlhf_megatron", "launch", "kernels"):
        for call in calls_in(ast.parse(path.read_text())):
            method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
            if ast.unparse(call.func) in READS or (method in READING_METHODS and not call.args):
                reading.add(str(path.relative_to(ROOT)))
    assert reading == ALLOWED_READS.keys()


def test_a_checkpoint_names_no_file_outside_its_folder(tmp_path: Path) -> None:
    checkpoint = tmp_path / "step-1"
    publish(checkpoint, [write_tensors(checkpoint, "rank-00000.safetensors", {"a": torch.ones(1)}, {})], {}, 1)
    manifest = checkpoint / "manifest.json"
    manifest.write_text(manifest.read_text().replace("rank-00000", "../rank-00000"))
    with pytest.raises(CheckpointError, match="names the file '../rank-00000.safetensors', which does not lie in"):
        read_manifest(checkpoint)


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/model.safetensors"])
def test_a_model_names_no_file_outside_its_folder(tmp_path: Path, file: str) -> None:
    make_model(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(ModelError, match=f"names the file '{file}', which does not lie in this folder"):
        CheckpointFiles(tmp_path, read_architecture(tmp_path))


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"[]", b"{}", b'{"weight_map": {"a": 1}}'])
def test_a_damaged_index_of_a_model_is_told_in_one_line(tmp_path: Path, content: bytes) -> None:
    make_model(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_bytes(content)
    with pytest.raises(
        ModelError, match=r"index\.json: (not valid JSON|has no weight_map).*; download the model again$"
    ):
        CheckpointFiles(tmp_path, read_architecture(tmp_path))


def test_code_in_a_model_folder_is_not_run(tmp_path: Path) -> None:
    write_bpe_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Spy", "auto_map": {"AutoTokenizer": ["spy.Spy", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "spy.py").write_text(f"open({str(tmp_path / 'trace')!r}, 'w').close()\nraise SystemExit\n")
    try:
        load_tokenizer(tmp_path)
    except DataError as error:
        assert "custom code" in str(error)
    assert not (tmp_path / "trace").exists()


def test_a_saved_recipe_holds_no_secret(tmp_path: Path) -> None:
    recipe = load_recipe(ROOT / "recipes" / "tiny_sft.yaml", ["data.chat_template_kwargs={api_key: hunter2, style: x}"])
    saved = yaml.safe_load(resolved_yaml(recipe, redact))
    assert saved["data"]["chat_template_kwargs"] == {"api_key": "***", "style": "x"}
    assert saved == recipe.model_dump(mode="json") | {"data": saved["data"]}
