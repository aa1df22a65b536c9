"""Python commands without the seconds of their imports, for tests: forks of a process that has done them.

    process = nursery().start([sys.executable, "-P", "launch/train.py", "--help"], folder, environment, files)
    status = process.wait(60)

Torch, Megatron and vLLM take ten seconds to import, on each rank of each launch. A fork of a process that has imported
them is there at once, and is otherwise what it would be: a process with an identifier, an environment (in /proc too), a
working folder, files and a session of its own, that runs the script as ``__main__``, takes signals and ends by itself.
torchrun and tools/tune.py are run in the same way, by their own code: only how they start a process is replaced.

The environment in /proc: the kernel shows the memory that a process was started with, which a fork has from the
nursery, and of which ``os.environ`` is a copy. Others go by it: ``rlhf_megatron.runtime`` finds a rank's torchrun, and
the ranks that have ended, by TORCHELASTIC_RUN_ID and LOCAL_RANK, and tests find a rank to kill by RANK. So the nursery
is started with a long variable, ROOM, and a fork writes its own environment over that memory, through /proc/self/mem,
where a wrong address is an OSError. What a process shows:

    tr '\\0' '\\n' < /proc/PID/environ

On a machine with GPUs the ranks of tests/gpu are forks too, of a nursery of their own that may see the GPUs. CUDA does
not survive a fork, so nothing may begin to use it before; where something has, commands are started as ever.

Where a test fails, start its command with ``warm=False`` (tests/end_to_end/commands.py): an ordinary process, ten
seconds slower. If it then passes, the nursery is to blame.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

IMPORTS = (
    "torch.distributed.run",
    "torch.distributed.checkpoint",
    "vllm.entrypoints.llm",
    "rlhf_megatron.loops.rl",
    "rlhf_megatron.loops.run",
    "rlhf_megatron.evaluation.standalone",
    "rlhf_megatron.loops.reward_modeling",
    "rlhf_megatron.loops.sft",
    "rlhf_megatron.rollout.vllm.vllm_engine",
    "rlhf_megatron.regather.learned_rollout",
    # What a run imports as it makes its engine, and as it ends: half of its time on a CPU.
    "vllm.v1.core.sched.scheduler",
    "vllm.model_executor.layers.quantization.compressed_tensors.utils",
    "vllm.model_executor.model_loader",
    "vllm.model_executor.models.qwen3",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.distributed.elastic_ep.elastic_execute",
    "numpy.ma",
    "transformers.models.qwen3.modeling_qwen3",
    "rlhf_megatron.monitor.page",
    "rlhf_megatron.monitor.plots",
)
IMPORTS_OF_CPUS = (
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.distributed.device_communicators.cpu_communicator",
)
# None of these may begin to use a GPU: a fork could not.
IMPORTS_OF_GPUS = (
    "transformer_engine.pytorch",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.attention.backends.flash_attn",
)
# The same in some versions of vLLM alone: from 0.29 to 0.32, and from 0.32.
IMPORTS_OF_SOME_VERSIONS = ("vllm.entrypoints.launchers.cli_args", "vllm.v1.pool.flash_maxsim")
# What comes after the patches of Megatron in a run too.
IMPORTS_OF_PATCHED = (
    "rlhf_megatron.models.delta_net",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.mimo",
)
TORCHRUN = ["-m", "torch.distributed.run"]
COMMAND_LINE = ["-m", "rlhf_megatron.runtime.command_line"]
MESSAGE_BYTES = ENVIRONMENT_BYTES = 1 << 16
ROOM = "ROOM_FOR_THE_ENVIRONMENT_OF_FORKS"


class Nursling:
    """A started process; as much of subprocess.Popen as torchrun and the tests use."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self.pid, self._nursery = pid, nursery

    def poll(self) -> int | None:
        """Return the exit status (minus the signal that ended it), or None while it runs."""
        return self._nursery.status(self.pid)

    @property
    def returncode(self) -> int | None:
        """As ``poll``."""
        return self.poll()

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status; raises subprocess.TimeoutExpired after ``timeout`` seconds."""
        deadline = time.monotonic() + (timeout or float("inf"))
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(0.01)
        return status


class Nursery:
    """The end of the one who asks for processes."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._ended: dict[int, int] = {}

    @classmethod
    def open(cls, kind: str, environment: Mapping[str, str]) -> Nursery:
        """Connect to the process that does the imports, which all workers of a pytest share and the first one starts;
        it ends with the last of them."""
        address = f"\0nursery-{kind}-{os.environ.get('PYTEST_XDIST_TESTRUNUID', os.getpid())}"
        while True:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                connection.connect(address)
                return cls(connection)
            except ConnectionRefusedError:
                connection.close()
                start_nursery(address, environment)

    def start(
        self,
        command: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        files: Sequence[int],
        new_session: bool = False,
    ) -> Nursling:
        """Start a Python command; ``files`` are its stdin, stdout and stderr."""
        request = [list(command), str(folder), dict(environment), new_session]
        socket.send_fds(self._connection, [json.dumps(request).encode()], list(files))
        self._connection.settimeout(None)
        while (pid := self._hear()) is None:
            pass
        return Nursling(self, pid)

    def status(self, pid: int) -> int | None:
        """Return the exit status of a process, or None while it runs."""
        while select.select([self._connection], [], [], 0)[0]:
            self._hear()
        return self._ended.get(pid)

    def _hear(self) -> int | None:
        """Take one message; return the identifier of a process that has been started."""
        pid, status = json.loads(self._connection.recv(MESSAGE_BYTES))
        if status is None:
            self._ended.pop(pid, None)  # of an earlier process: systems use numbers again
            return int(pid)
        self._ended[pid] = status
        self._connection.send(json.dumps(pid).encode())
        return None


def start_nursery(address: str, environment: Mapping[str, str]) -> None:
    """Start the process behind an address, unless another worker is about to."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        try:
            listener.bind(address)
        except OSError:
            time.sleep(0.01)
            return
        listener.listen()
        subprocess.Popen(
            [sys.executable, "-P", __file__, str(listener.fileno())],
            env={**environment, ROOM: " " * ENVIRONMENT_BYTES},
            pass_fds=[listener.fileno()],
        )


def nursery(sees_gpus: bool = False) -> Nursery:
    """Return the one of this process, whose forks see the GPUs or do not."""
    return _opened(sees_gpus)


@functools.cache
def _opened(sees_gpus: bool) -> Nursery:
    return Nursery.open("gpu" if sees_gpus else "cpu", environment_of(sees_gpus))


def environment_of(sees_gpus: bool) -> dict[str, str]:
    """Return one thread for each rank, no search of the network for models, and no GPU, or GPUs that are counted
    without CUDA."""
    settings = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    gpus = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"} if sees_gpus else {"CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, **settings, **gpus}


def accept_workers(listener: socket.socket) -> socket.socket | None:
    """Fork for each worker of pytest. Returns its connection in the fork, and None when all have ended.

    The first of them has connected before the imports were done.
    """
    listener.settimeout(1.0)
    forks: set[int] = set()
    while True:
        with contextlib.suppress(TimeoutError):
            connection, _ = listener.accept()
            pid = os.fork()
            if pid == 0:
                listener.close()
                return connection
            connection.close()
            forks.add(pid)
        forks -= {pid for pid in forks if os.waitpid(pid, os.WNOHANG)[0]}
        if not forks:
            return None


def serve(connection: socket.socket) -> list[Any] | None:
    """Fork for each request, and tell of each fork that ends. In a fork it returns the request; None at the end.

    A fork that has ended keeps its identifier until the one who asked for it knows, as with subprocess.Popen: what it
    thinks is running can be sent a signal.
    """
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: set[int] = set()
    while True:
        ready, _, _ = select.select([connection, wake], [], [])
        if wake in ready:
            os.read(wake, MESSAGE_BYTES)
            for pid in list(children):
                ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if ended:
                    children.discard(pid)
                    status = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
                    connection.send(json.dumps([pid, status]).encode())
        if connection in ready:
            message, files, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 3)
            if not message:
                return None
            request = json.loads(message)
            if isinstance(request, int):
                os.waitpid(request, 0)
                continue
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for number in (wake, woken):
                    os.close(number)
                connection.close()
                for number, file in enumerate(files):
                    os.dup2(file, number)
                    os.close(file)
                return list(request)
            children.add(pid)
            for file in files:
                os.close(file)
            connection.send(json.dumps([pid, None]).encode())


def become(request: list[Any], cuda_has_begun: bool = False) -> None:
    """Make this process the one that was asked for, and run its command to the end."""
    command, folder, environment, new_session = request
    if new_session:
        os.setsid()
    os.chdir(folder)
    if cuda_has_begun:
        os.execve(command[0], command, environment)
    take_environment(environment)
    arguments = command[1:]
    flags = []
    while arguments[0] in ("-P", "-u"):
        flags.append(arguments.pop(0))
    sys.stdout = stream_of(1, sys.stdout, "-u" in flags)
    sys.stderr = stream_of(2, sys.stderr, "-u" in flags)
    further = None
    if arguments[:2] in (TORCHRUN, COMMAND_LINE) or arguments[0].endswith("launch/torchrun.py"):
        further = take_over(starts_of_torchrun)
    elif arguments[0].endswith("tools/tune.py"):
        further = take_over(starts_of_tune)
    if further is not None:
        become(further)
        return
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = arguments
    if "-P" not in flags:
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
    runpy.run_path(arguments[0], run_name="__main__")


def has_begun_cuda() -> bool:
    """Say whether this process has begun to use CUDA, so that its forks cannot."""
    not_begun = 3  # CUDA_ERROR_NOT_INITIALIZED
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return driver.cuCtxGetCurrent(ctypes.byref(ctypes.c_void_p())) != not_begun


def stream_of(number: int, like: TextIO, unbuffered: bool) -> TextIO:
    """Return a stream of this process's own file: the nursery's remembers what its own file was, and where it was in
    that."""
    raw = io.FileIO(number, "w", closefd=False)
    buffer: Any = raw if unbuffered else io.BufferedWriter(raw)
    by_line = number == 2 or raw.isatty()
    return io.TextIOWrapper(buffer, like.encoding, like.errors, line_buffering=by_line, write_through=unbuffered)


def take_over(starts: Callable[[Nursery], None]) -> list[Any] | None:
    """Let a command's code start processes as forks of one that stays as it is now, without the command's threads.

    ``starts`` replaces how it does that. Returns None in the command, and in each fork its request.
    """
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        here.close()
        request = serve(there)
        if request is None:
            os._exit(0)
        return request
    there.close()
    starts(Nursery(here))
    return None


def starts_of_torchrun(nursery: Nursery) -> None:
    """Start its ranks. It looks up no names of methods for its record of events, which would take it a second here: it
    goes through the sources of all modules."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    def popen(handler: Any, command: Sequence[str], environment: Mapping[str, str]) -> Nursling:
        files = [0, *(file.fileno() if file else n for n, file in ((1, handler._stdout), (2, handler._stderr)))]
        return nursery.start(command, Path.cwd(), environment, files, new_session=True)

    SubprocessHandler._popen = popen  # type: ignore[method-assign, assignment]
    dynamic_rendezvous.get_method_name = lambda depth=2: "unknown"


def starts_of_tune(nursery: Nursery) -> None:
    """Start its runs; other programs are started as ever."""
    usual = subprocess.Popen

    def popen(command: Sequence[str], *arguments: Any, **named: Any) -> Any:
        if list(command[:1]) != [sys.executable] or not named.get("start_new_session"):
            return usual(command, *arguments, **named)
        log = named["stdout"].fileno()
        return nursery.start(command, Path.cwd(), os.environ, [0, log, log], new_session=True)

    subprocess.Popen = popen  # type: ignore[misc, assignment]


def take_environment(environment: Mapping[str, str]) -> None:
    """Make it this process's, also where the kernel shows it to others: in the memory that ROOM has made large.

    What is longer than that memory is cut off there, and only there: a process started without ROOM has little.
    """
    os.environ.clear()
    os.environ.update(environment)  # copies: nothing points into the old memory any more
    shown = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items())
    start, end = (int(field) for field in Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47:49])
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        memory.seek(start)
        memory.write(shown[: end - start].ljust(end - start, b"\0"))


def end_with(action: Callable[[], None]) -> None:
    """Run ``action`` and end the process as Python would, but for taking apart what the imports have made."""
    status: Any = 0
    try:
        action()
    except SystemExit as end:
        status = end.code or 0
        if not isinstance(status, int):
            print(status, file=sys.stderr)
            status = 1
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


def prepare_megatron() -> None:
    """Patch it, which each process does once."""
    from rlhf_megatron.compat import megatron

    megatron.install()
    for module in IMPORTS_OF_PATCHED:
        importlib.import_module(module)


def prepare_vllm() -> None:
    """Do what an engine would do in each fork: its kernels for CPUs take a search of all modules, its log of all
    loggers."""
    from vllm.platforms import current_platform

    with contextlib.suppress(ImportError):  # versions before 0.31 do neither
        from vllm.config.logging import LoggingConfig
        from vllm.logger import configure_logging_if_needed

        configure_logging_if_needed(LoggingConfig())
        current_platform.register_triton_kernel_overrides()
        type(current_platform).register_triton_kernel_overrides = classmethod(lambda _: None)


def prepare_transformers() -> None:
    """Make its table of the tensors of all models, which each process that saves a model would make."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("qwen3")


def prepare_page() -> None:
    """Compile the templates of the page, which each run writes as it ends."""
    from rlhf_megatron.monitor import rendering

    templates = rendering._templates()
    for name in templates.list_templates():
        templates.get_template(name)


def keep_what_is_imported() -> None:
    """Leave what the imports have made out of the garbage collection of forks, and of what they do as they end.

    An engine that ends gives it back to the collector, and then collects twice: a second and a half each time.
    """
    gc.freeze()
    gc.unfreeze = lambda: None
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False


def main() -> None:
    """Run the nursery itself."""
    listener = socket.socket(fileno=int(sys.argv[1]))
    os.environ.pop(ROOM)
    from rlhf_megatron.rollout.vllm.process_environment import has_gpu, prepare_environment

    prepare_environment()
    for module in (*IMPORTS, *(() if has_gpu() else IMPORTS_OF_CPUS)):
        importlib.import_module(module)
    for module in (*IMPORTS_OF_SOME_VERSIONS, *(IMPORTS_OF_GPUS if has_gpu() else ())):
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(module)
    prepare_megatron()
    if not has_gpu():
        prepare_vllm()
    prepare_transformers()
    prepare_page()
    keep_what_is_imported()
    cuda_has_begun = has_begun_cuda()  # before any fork, in which the driver would deny it
    connection = accept_workers(listener)
    request = None if connection is None else serve(connection)
    if request is not None:
        end_with(lambda: become(request, cuda_has_begun))


if __name__ == "__main__":
    main()
