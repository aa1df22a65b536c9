"""The package as it is installed: kernels/ under its mapped name only, every room a package, versions in one place."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import rlhf_megatron

ROOT = Path(rlhf_megatron.__file__).resolve().parent.parent


def run_python(*arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )


def test_kernels_are_part_of_the_package() -> None:
    found = run_python("-P", "-c", "import rlhf_megatron.kernels as room; print(room.__file__)")
    assert found.returncode == 0, found.stderr
    assert Path(found.stdout.strip()).parent == ROOT / "kernels"


def test_kernels_are_no_top_level_package_here_or_for_a_launched_script(tmp_path: Path) -> None:
    # Looked up, not imported: a package of that name from PyPI may be there, and is then the one to be found.
    look_up = "import importlib.util as u; s = u.find_spec('kernels'); print(s.origin if s else None)"
    script = tmp_path / "script.py"
    script.write_text(look_up, encoding="utf-8")
    for found in (run_python("-P", "-c", look_up), run_python(str(script))):
        assert found.returncode == 0, found.stderr
        assert not found.stdout.startswith(str(ROOT))


def test_tests_run_without_the_repository_root_on_the_path() -> None:
    assert str(ROOT) not in [str(Path(entry).resolve()) for entry in sys.path if entry]
    assert "" not in sys.path


def test_version_is_the_one_in_the_package() -> None:
    assert importlib.metadata.version("rlhf-megatron") == rlhf_megatron.__version__


def test_every_room_is_a_package() -> None:
    rooms = [path for path in (ROOT / "rlhf_megatron").iterdir() if path.is_dir() and list(path.rglob("*.py"))]
    assert rooms
    assert [room.name for room in rooms if not (room / "__init__.py").exists()] == []


def pins_of(name: str) -> dict[str, str]:
    """Return the versions in a file of tools/environment, by package; each line is one exact version, and none comes
    twice."""
    lines = (ROOT / "tools" / "environment" / name).read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.lstrip().startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", pin) for pin in pins)
    names = [canonicalize_name(pin.partition("==")[0]) for pin in pins]
    assert sorted(names) == sorted(set(names))
    return dict(zip(names, (pin.partition("==")[2] for pin in pins), strict=True))


@pytest.mark.parametrize("machine", ["cpu", "gpu"])
def test_pinned_requirements_are_what_the_package_asks_for(machine: str) -> None:
    pins = pins_of(f"requirements-{machine}.txt")
    if machine == "cpu":
        script = (ROOT / "tools" / "environment" / "setup_cpu.sh").read_text(encoding="utf-8")
        pins["megatron-core"] = re.findall(r"^megatron=megatron-core==(.*)$", script, flags=re.MULTILINE)[0]
    wanted = [
        requirement
        for requirement in map(Requirement, importlib.metadata.requires("rlhf-megatron") or [])
        for extra in ("", machine, "convert", "dev", "resiliency", "tasks", "tune")
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra})
    ]
    assert {"torch", "pytest", f"vllm{'-cpu' * (machine == 'cpu')}"} <= {requirement.name for requirement in wanted}
    for requirement in wanted:
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), requirement


def test_the_newest_versions_are_within_the_bounds() -> None:
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    for name, version in pins_of("requirements-newest.txt").items():
        bounds = re.findall(rf'"({name}>=[^"]*)"', setup)
        assert [Requirement(each).specifier.contains(version) for each in bounds] == [True], name


def test_monitor_imports_neither_torch_nor_the_engines() -> None:
    rooms = ("console", "environment_report", "metrics", "plots", "run_folder", "trackers")
    imports = "; ".join(f"import rlhf_megatron.monitor.{room}" for room in rooms)
    check = "import sys; print([name for name in ('torch', 'megatron', 'vllm') if name in sys.modules])"
    found = run_python("-P", "-c", f"{imports}; {check}")
    assert found.stdout.strip() == "[]", found.stdout + found.stderr
