"""Facts that must agree on all ranks: versions, code, recipe, data, the model's files, and the network's settings.

Each rank describes what it sees in short texts; rank 0 compares them item by item and names the ranks that differ.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import stat
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import yaml

import rlhf_megatron
from rlhf_megatron.monitor.environment_report import package_versions
from rlhf_megatron.preflight.check import Check, Result
from rlhf_megatron.recipe import Recipe, RLRecipe
from rlhf_megatron.runtime.ranks import named_ranks

# fact -> item -> what this rank sees
Facts = dict[str, dict[str, str]]

_ENDS_BYTES = 1 << 20  # read from either end of a data file: enough to tell files apart, quick for any size
_MODEL_FILES = ("*.json", "*.safetensors", "*.model", "*.jinja", "*.txt", "*.tiktoken", "*.py")
_SETTINGS = ("NCCL_", "TORCH_NCCL_", "GLOO_", "UCX_", "CUDA_DEVICE_MAX_CONNECTIONS", "NVTE_", "PYTORCH_")
_MISSING = "missing"
_ITEMS_SHOWN = 3
_ITEMS = {
    "versions": "packages",
    "code": "files",
    "recipe": "sections",
    "data": "files",
    "model": "files",
    "settings": "variables",
}
_ADVICE = {
    "versions": "install the same versions on all nodes",
    "code": "start all ranks from the same checkout",
    "recipe": "give all ranks the same file and overrides",
    "data": "copy the files anew, or put them on a file system that all nodes share",
    "model": "copy the folder anew, or put it on a file system that all nodes share",
    "settings": "export the same variables on all nodes, unless the nodes' interfaces do differ",
}


def facts(recipe: Recipe) -> Facts:
    """Collect this rank's facts of all that must agree. Reads the code, and both ends of data and model files."""
    sections = recipe.model_dump(mode="json")
    return {
        "versions": versions(),
        "code": code_digests() | {str(path): fingerprint(path) for path in _function_files(recipe)},
        "recipe": {key: _digest(yaml.safe_dump(value).encode()) for key, value in sections.items()},
        "data": {str(path): fingerprint(path) for path in _data_files(recipe)},
        "model": {str(path): fingerprint(path) for path in _model_files(recipe)},
        "settings": {name: value for name, value in sorted(os.environ.items()) if name.startswith(_SETTINGS)},
    }


def versions() -> dict[str, str]:
    """Return versions of Python, this package and those that it stands on."""
    own = {"python": platform.python_version(), "rlhf_megatron": rlhf_megatron.__version__}
    return own | package_versions() | {"CUDA": str(torch.version.cuda or "none")}


def code_digests() -> dict[str, str]:
    """Return the digest of every Python file of the package, kernels included, by its path in the package."""
    digests = {}
    for package in ("rlhf_megatron", "rlhf_megatron.kernels"):
        specification = importlib.util.find_spec(package)
        for folder in specification.submodule_search_locations or () if specification else ():
            for path in sorted(Path(folder).rglob("*.py")):
                name = f"{package.replace('.', '/')}/{path.relative_to(folder)}"
                digests[name] = _digest(path.read_bytes())
    return digests


def fingerprint(path: Path) -> str:
    """Return size and a digest of the first and last MB of a file; where it cannot be read: "missing (why)"."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe would be waited for, and a device has no end
            return f"{_MISSING} (is not a regular file)"
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            ends = file.read(_ENDS_BYTES)
            file.seek(max(len(ends), size - _ENDS_BYTES))
            return f"{size} bytes {_digest(ends + file.read(_ENDS_BYTES))}"
    except OSError as error:
        return f"{_MISSING} ({error.strerror})"


def agree(fact: str, seen: Mapping[int, Mapping[str, str]], hosts: Mapping[int, str]) -> Check:
    """Check that all ranks see the same; ``seen``: rank -> item -> text. What most ranks see is taken for right."""
    items = dict.fromkeys(item for of_rank in seen.values() for item in of_rank)
    values = {item: {rank: of_rank.get(item, _MISSING) for rank, of_rank in seen.items()} for item in items}
    differing = [text for item in items if (text := _difference(item, values[item], hosts))]
    if not differing:
        everywhere = "" if len(seen) == 1 else f", the same on {len(seen)} ranks"
        return Check(fact, "ok", f"{_ITEMS[fact]}: {len(items)}{everywhere}")
    more = f"; and {len(differing) - _ITEMS_SHOWN} more" if len(differing) > _ITEMS_SHOWN else ""
    # Variables name a node's own interface now and then; everything else must be equal.
    result: Result = "warn" if fact == "settings" else "fail"
    return Check(fact, result, "; ".join(differing[:_ITEMS_SHOWN]) + more, _ADVICE[fact])


def _difference(item: str, values: Mapping[int, str], hosts: Mapping[int, str]) -> str | None:
    """Return the ranks that see something else of an item than most do, or that miss it; None where all agree."""
    [(usual, _)] = Counter(values.values()).most_common(1)
    if usual.startswith(f"{_MISSING} ("):
        others = [rank for rank, value in values.items() if value == usual]
        return f"{item}: {usual} on {'all ranks' if len(others) == len(values) else named_ranks(others, hosts)}"
    where: dict[str, list[int]] = {}
    for rank, value in values.items():
        if value != usual:
            where.setdefault(value, []).append(rank)
    if not where:
        return None
    others_text = ", ".join(f"{value} on {named_ranks(ranks, hosts)}" for value, ranks in where.items())
    return f"{item}: {usual}, but {others_text}"


def _data_files(recipe: Recipe) -> Iterator[Path]:
    yield from map(Path, (*recipe.data.training_files, *recipe.data.validation_files))
    if recipe.data.chat_template:
        yield Path(recipe.data.chat_template)


def _model_files(recipe: Recipe) -> Iterator[Path]:
    """Yield the files of all model folders; one without any shows as its config.json missing."""
    roles = recipe.roles.values()
    folders = [recipe.model.path, recipe.model.tokenizer, *(role.weights_folder for role in roles)]
    if isinstance(recipe, RLRecipe) and recipe.judge:
        folders += [recipe.judge.path, recipe.judge.tokenizer]
    for folder in dict.fromkeys(Path(name) for name in folders if name is not None):
        files = sorted(path for pattern in _MODEL_FILES for path in folder.glob(pattern))
        yield from files or [folder if folder.is_file() else folder / "config.json"]
    lora = recipe.actor.lora
    if lora is not None and lora.path is not None:
        yield from (Path(lora.path) / name for name in ("adapter_config.json", "adapter_model.safetensors"))


def _function_files(recipe: Recipe) -> Iterator[Path]:
    """Yield the files of the user's own functions and data set."""
    functions = [recipe.data.dataset]
    if isinstance(recipe, RLRecipe):
        functions += [source.function for source in (recipe.reward, *recipe.reward.parts)]
        if recipe.rollout.agent:
            functions.append(recipe.rollout.agent.function)
        if recipe.rollout.multi_turn:
            turns = recipe.rollout.multi_turn
            functions += [turns.function, turns.environment, turns.context, *turns.tool_functions]
    for function in functions:
        if function is not None:
            path, colon, _ = function.rpartition(":")  # without a colon it is the path alone
            yield Path(path if colon else function)


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=6).hexdigest()
