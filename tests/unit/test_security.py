"""The promises of docs/security.md that no other test is about."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
import torch
import yaml

from hugging_face import make_model
from rlhf_megatron.data.tokenizer import load_tokenizer
from rlhf_megatron.errors import DataError
from rlhf_megatron.models.architecture import ModelError, read_architecture
from rlhf_megatron.models.hf_files import CheckpointFiles
from rlhf_megatron.monitor.environment import redact
from rlhf_megatron.recipe import load_recipe, resolved_yaml
from rlhf_megatron.runtime.checkpoint import CheckpointError, publish, read_manifest, write_tensors
from tiny_tokenizer import write_bpe_tokenizer

ROOT = Path(__file__).parents[2]
# What runs code that it is given. A reward worker gets jobs from its own rank through a pipe.
DANGEROUS = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "eval", "exec"}
ALLOWED = {("rlhf_megatron/rewards/worker.py", "pickle")}


def names_used(tree: ast.AST) -> set[str]:
    """Modules that are imported, functions that are called by their bare name, and torch.load and torch.save."""
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
    files = [path for folder in ("rlhf_megatron", "launch", "kernels") for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 100
    found = {
        (str(path.relative_to(ROOT)), name)
        for path in files
        for name in names_used(ast.parse(path.read_text())) & (DANGEROUS | {"torch.load", "torch.save"})
    }
    assert found == ALLOWED


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
