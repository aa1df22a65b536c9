"""run_ranks: a function or a script on N real torchrun ranks with gloo, for tests. Not a test itself.

    def add(amount: int) -> float:                      # at the top level of the test's file
        value = torch.tensor([float(dist.get_rank() + amount)])
        dist.all_reduce(value)
        return value.item()

    def test_add() -> None:
        assert run_ranks(add, world_size=2, arguments={"amount": 1}) == [3.0, 3.0]

Import it as `from parallel.ranks import run_ranks`. This file is also what each rank runs.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil

from rlhf_megatron.rollout.environment import has_gpu

RESULT_FOLDER = "RLHF_MEGATRON_TEST_RESULTS"
SECONDS_TO_END_POLITELY = 5.0


def run_ranks(
    target: Callable[..., Any] | str | Path,
    world_size: int,
    arguments: Mapping[str, Any] | Sequence[str] | None = None,
    timeout: float = 300.0,
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run `target` on `world_size` ranks of one torchrun and return what each rank returned, in rank order.

    `target` is a top-level function, "path/to/file.py:function", "module:function", or a script's Path. A function is
    called with `arguments` as keywords inside an initialised gloo group; arguments and results travel as JSON. A script
    gets `arguments` as its command line and no group; it may hand over a result with `write_result`, else it is None.

    Raises RuntimeError with everything the ranks printed if one fails or `timeout` seconds pass; then every process
    that was started is killed.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        launcher = [
            sys.executable, "-P", "-m", "torch.distributed.run", f"--nproc-per-node={world_size}", "--nnodes=1",
            "--max-restarts=0", "--master-addr=127.0.0.1",
        ]  # fmt: skip
        rank_command = _rank_command(target, arguments)
        variables = {
            "OMP_NUM_THREADS": "1",
            **({} if has_gpu() else {"TORCHDYNAMO_DISABLE": "1"}),
            "GLOO_SOCKET_IFNAME": "lo",
            **os.environ,
            RESULT_FOLDER: folder,
            **(environment or {}),
        }
        for _ in range(3):
            command = [*launcher, f"--master-port={free_port()}", *rank_command]
            returncode, output = _run_to_the_end(command, variables, timeout, Path(folder) / "output")
            # Another process took the port between the probe and the start: nothing that the target did.
            if returncode in (0, None) or "EADDRINUSE" not in output:
                break
        if returncode is None:
            raise RuntimeError(f"{_name(target)} on {world_size} ranks ran past {timeout:g} s, killed:\n{output}")
        if returncode != 0:
            raise RuntimeError(f"{_name(target)} on {world_size} ranks ended with status {returncode}:\n{output}")
        return [_read_result(Path(folder) / f"rank-{rank}.json") for rank in range(world_size)]


def write_result(value: Any) -> None:
    """Hand a JSON value from a rank's script to the test that started it with run_ranks."""
    path = Path(os.environ[RESULT_FOLDER]) / f"rank-{os.environ['RANK']}.json"
    path.write_text(json.dumps(value), encoding="utf-8")


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _rank_command(
    target: Callable[..., Any] | str | Path, arguments: Mapping[str, Any] | Sequence[str] | None
) -> list[str]:
    if isinstance(target, Path):
        return [__file__, "script", str(target), *(arguments or [])]
    if callable(target):
        name = target.__name__
        if target.__qualname__ != name:
            raise TypeError(f"{target.__qualname__} must stand at the top level of its file to be found by the ranks")
        target = f"{inspect.getsourcefile(target)}:{name}"
    return [__file__, "function", target, json.dumps(arguments or {})]


def _name(target: Callable[..., Any] | str | Path) -> str:
    return getattr(target, "__qualname__", str(target))


def _run_to_the_end(
    command: list[str], variables: Mapping[str, str], timeout: float, output: Path
) -> tuple[int | None, str]:
    """Return (exit status, all output), the status None after a kill. Output goes through a file: a pipe that a
    surviving grandchild holds open would keep the test waiting."""
    with output.open("wb") as sink:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT, env=dict(variables),
            start_new_session=True,
        )  # fmt: skip
        returncode: int | None
        try:
            returncode = process.wait(timeout)
        except subprocess.TimeoutExpired:
            returncode = None
        finally:
            if process.poll() is None:
                _kill_family(process.pid)
                process.wait()
    return returncode, output.read_text(encoding="utf-8", errors="replace")


def _kill_family(pid: int) -> None:
    """End a process and all its descendants. torchrun gives each rank a session, so one process group is not enough."""
    try:
        parent = psutil.Process(pid)
        family = [*parent.children(recursive=True), parent]
    except psutil.NoSuchProcess:
        return
    for process in family:
        _send(process, signal.SIGTERM)
    _, alive = psutil.wait_procs(family, timeout=SECONDS_TO_END_POLITELY)
    for process in alive:
        _send(process, signal.SIGKILL)


def _send(process: psutil.Process, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def _read_result(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _import_target(module: str) -> ModuleType:
    if not module.endswith(".py"):
        return importlib.import_module(module)
    path = Path(module).resolve()
    specification = importlib.util.spec_from_file_location(path.stem, path)
    if specification is None or specification.loader is None:
        raise ImportError(f"{path} cannot be imported")
    loaded = importlib.util.module_from_spec(specification)
    sys.modules[path.stem] = loaded
    specification.loader.exec_module(loaded)
    return loaded


def _run_one_rank(kind: str, target: str, arguments: list[str]) -> None:
    # As pytest's `pythonpath` does for the tests, so that a test's file imports the same things on a rank.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    if kind == "script":
        sys.argv = [target, *arguments]
        sys.path.insert(0, str(Path(target).resolve().parent))
        runpy.run_path(target, run_name="__main__")
        return
    import torch.distributed as dist

    module, _, function = target.rpartition(":")
    from rlhf_megatron.topology.world import join_world

    join_world()  # gloo, and NCCL besides where there are GPUs
    result = getattr(_import_target(module), function)(**json.loads(arguments[0]))
    write_result(result)
    # Ranks that end before others have read their last message would break those.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _run_one_rank(sys.argv[1], sys.argv[2], sys.argv[3:])
