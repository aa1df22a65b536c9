"""run_ranks: a function or a script on N real ranks with gloo, for tests. Not a test itself.

    def add(amount: int) -> float:                      # at the top level of the test's file
        value = torch.tensor([float(dist.get_rank() + amount)])
        dist.all_reduce(value)
        return value.item()

    def test_add() -> None:
        assert run_ranks(add, world_size=2, arguments={"amount": 1}) == [3.0, 3.0]

Import it as ``from parallel.ranks import run_ranks``. This file is also what each rank runs.
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
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil

from rlhf_megatron.rollout.vllm.process_environment import has_gpu, prepare_environment

RESULT_FOLDER = "RLHF_MEGATRON_TEST_RESULTS"
SECONDS_TO_END_POLITELY = 5.0


def run_ranks(
    target: Callable[..., Any] | str | Path,
    world_size: int,
    arguments: Mapping[str, Any] | Sequence[str] | None = None,
    timeout: float = 300.0,
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run ``target`` on ``world_size`` ranks and return what each rank returned, in rank order.

    ``target`` is a top-level function, "path/to/file.py:function", "module:function", or a script's Path. A function is
    called with ``arguments`` as keywords inside an initialised gloo group; arguments and results travel as JSON. A
    script gets ``arguments`` as its command line and no group; it may hand over a result with ``write_result``, else it
    is None. Scripts run under torchrun, and so do functions with an ``environment`` where there is a GPU, since what is
    imported may have read it. Else the ranks of a function are forks of one process (see nursery) that has done the
    imports, with torchrun's variables and store. With fewer GPUs than ranks, ranks share them.

    Raises RuntimeError with everything the ranks printed if one fails or ``timeout`` seconds pass; then every process
    that was started is killed.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        launcher = [
            sys.executable, "-P", "-m", "torch.distributed.run", f"--nproc-per-node={world_size}", "--nnodes=1",
            "--max-restarts=0", "--master-addr=127.0.0.1",
        ]  # fmt: skip
        rank_command = _rank_command(target, arguments, Path(folder) / "arguments.json")
        variables = {
            "OMP_NUM_THREADS": "1",
            **({} if has_gpu() else {"TORCHDYNAMO_DISABLE": "1"}),
            "GLOO_SOCKET_IFNAME": "lo",
            **os.environ,
            RESULT_FOLDER: folder,
            **(environment or {}),
        }
        forks = not isinstance(target, Path) and not (has_gpu() and environment)
        for _ in range(3):
            port = free_port()
            command = (
                [sys.executable, "-P", *rank_command, str(world_size), str(port)]
                if forks
                else [*launcher, f"--master-port={port}", *rank_command]
            )
            returncode, output = _run_to_the_end(command, variables, timeout, Path(folder) / "output", forks)
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
    target: Callable[..., Any] | str | Path, arguments: Mapping[str, Any] | Sequence[str] | None, file: Path
) -> list[str]:
    """Return the arguments of a function go by the file: those of many cases are more than a command line may have."""
    if isinstance(target, Path):
        return [__file__, "script", str(target), *(arguments or [])]
    if callable(target):
        name = target.__name__
        if target.__qualname__ != name:
            raise TypeError(f"{target.__qualname__} must stand at the top level of its file to be found by the ranks")
        target = f"{inspect.getsourcefile(target)}:{name}"
    file.write_text(json.dumps(arguments or {}), encoding="utf-8")
    return [__file__, "function", target, str(file)]


def _name(target: Callable[..., Any] | str | Path) -> str:
    return getattr(target, "__qualname__", str(target))


def _run_to_the_end(
    command: list[str], variables: Mapping[str, str], timeout: float, output: Path, forks: bool
) -> tuple[int | None, str]:
    """Return (exit status, all output), the status None after a kill. Output goes through a file: a pipe that a
    surviving grandchild holds open would keep the test waiting."""
    from nursery import Nursling, nursery  # this file on a rank has no need of it

    with output.open("wb") as sink, open(os.devnull, "rb") as none:
        process: Nursling | subprocess.Popen[bytes] = (
            subprocess.Popen(command, stdin=none, stdout=sink, stderr=sink, env=variables, start_new_session=True)
            if has_gpu() and not forks
            else nursery(sees_gpus=has_gpu()).start(
                command, Path.cwd(), variables, [file.fileno() for file in (none, sink, sink)], True
            )
        )
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
    if path.stem in sys.modules:
        return sys.modules[path.stem]
    specification = importlib.util.spec_from_file_location(path.stem, path)
    if specification is None or specification.loader is None:
        raise ImportError(f"{path} cannot be imported")
    loaded = importlib.util.module_from_spec(specification)
    sys.modules[path.stem] = loaded
    specification.loader.exec_module(loaded)
    return loaded


def _run_forks(target: str, arguments: str, world_size: int, port: int) -> int:
    """Return the ranks as forks of this process; when one fails the others are ended, as torchrun does. Returns the
    status."""
    from nursery import has_begun_cuda

    prepare_environment()
    _import_target(target.rpartition(":")[0])
    import torch.distributed as dist

    ranks, cuda_has_begun = [], has_begun_cuda()
    for rank in range(world_size):
        process = os.fork()
        if process == 0:
            _be_a_fork(target, arguments, rank, world_size, port, cuda_has_begun)
        ranks.append(process)
    # Threads do not survive a fork, so the store starts after them; they wait for it.
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    failure = 0
    while ranks:
        ended, status = os.wait()
        ranks.remove(ended)
        if status and not failure:
            failure = 1
            for process in ranks:
                os.kill(process, signal.SIGTERM)
    del store
    return failure


def _be_a_fork(target: str, arguments: str, rank: int, world_size: int, port: int, cuda_has_begun: bool) -> None:
    """Do a rank's part and end the process; by a process of its own where a fork cannot use CUDA."""
    status = 1
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ |= {name: str(value) for name, value in names.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GROUP_RANK": "0"}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    if cuda_has_begun:
        os.execv(sys.executable, [sys.executable, "-P", __file__, "function", target, arguments])
    try:
        _share_gpus()
        _run_function(target, arguments)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _share_gpus() -> None:
    """Let ranks without a GPU of their own use another's, as though they were on a node beside this one.

    NCCL refuses two ranks of one node on the same GPU. Those of different nodes talk by sockets: slow, and right.
    """
    import torch

    devices, local_rank = torch.cuda.device_count(), int(os.environ["LOCAL_RANK"])
    if 0 < devices < int(os.environ["LOCAL_WORLD_SIZE"]):
        os.environ |= {"LOCAL_RANK": str(local_rank % devices), "NCCL_HOSTID": f"node {local_rank // devices}"}
        os.environ |= {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


def _run_one_rank(kind: str, target: str, arguments: list[str]) -> None:
    if kind == "script":
        sys.argv = [target, *arguments]
        sys.path.insert(0, str(Path(target).resolve().parent))
        runpy.run_path(target, run_name="__main__")
        return
    _run_function(target, arguments[0])


def _run_function(target: str, arguments: str) -> None:
    import torch.distributed as dist

    module, _, function = target.rpartition(":")
    from rlhf_megatron.topology.world import join_world, leave_world

    join_world()  # gloo, and NCCL besides where there are GPUs
    result = getattr(_import_target(module), function)(**json.loads(Path(arguments).read_text("utf-8")))
    write_result(result)
    if dist.is_initialized():  # an engine that ends may take torch.distributed with it
        # Ranks that end before others have read their last message would break those.
        dist.barrier()
        leave_world()


if __name__ == "__main__":
    # As pytest's ``pythonpath`` does for the tests, so that a test's file imports the same things on a rank.
    root = Path(__file__).resolve().parents[2]
    sys.path[:0] = [str(root / "tests"), str(root / "tools" / "bench")]
    if sys.argv[1] == "function" and "RANK" not in os.environ:
        sys.exit(_run_forks(sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5])))
    _share_gpus()
    _run_one_rank(sys.argv[1], sys.argv[2], sys.argv[3:])
