"""Functions that do what no function should: each costs its own sample, and no other sample gets a wrong score."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from rlhf_megatron.errors import RolloutError
from rlhf_megatron.generation.partners import TurnFunction
from rlhf_megatron.recipe import MultiTurnSection, RewardSection
from rlhf_megatron.rewards import cgroup, supervisor
from rlhf_megatron.rewards import process_tree as processes
from rlhf_megatron.rewards.score import RewardError, ScoreItem, Scorer

SIGNATURE = "compute_score(data_source, solution_str, ground_truth, extra_info):"
HEAD = """
import asyncio, builtins, ctypes, decimal, fractions, gc, json, math, os, pickle
import resource, signal, subprocess, sys, threading, time

def pipes():
    names = [name for name in os.listdir("/proc/self/fd") if int(name) > 2 and os.path.exists(f"/proc/self/fd/{name}")]
    return [int(name) for name in names if os.readlink(f"/proc/self/fd/{name}").startswith("pipe")]

def spew(data):
    for pipe in pipes():
        try:
            os.write(pipe, data)
        except OSError:
            pass
"""
SECONDS = 3.0
MEMORY_GB = 0.5

# Body -> the score of its sample; 0.0 is what a failure gets.
ODD = {
    # what it raises
    "sys.exit(0)": 0.0,
    "raise KeyboardInterrupt": 0.0,
    "raise GeneratorExit": 0.0,
    "raise StopIteration": 0.0,
    "raise asyncio.CancelledError": 0.0,
    "raise type('Own', (BaseException,), {})": 0.0,
    "raise type('x' * 10**6, (Exception,), {})": 0.0,
    "raise ValueError('x' * 10**6)": 0.0,
    "raise ValueError('a\\r\\x1b[31m\\x00\\u2028\\ud83d')": 0.0,
    "raise type('Own', (Exception,), {'__str__': lambda self: sys.exit()})": 0.0,
    "raise type('Own', (Exception,), {'__str__': lambda self: 5})": 0.0,
    # what it returns
    "return True": 1.0,
    "return 2": 2.0,
    "return fractions.Fraction(1, 2)": 0.5,
    "return __import__('numpy').float32(0.5)": 0.5,
    "return {'score': __import__('numpy').int64(3), 'more': object()}": 3.0,
    "return float('nan')": 0.0,
    "return {'score': -math.inf}": 0.0,
    "return 1e39": 0.0,
    "return 10**5000": 0.0,
    "return fractions.Fraction(10**400)": 0.0,
    "return decimal.Decimal('1')": 0.0,
    "return 1j": 0.0,
    "return '1'": 0.0,
    "return None": 0.0,
    "return [1.0]": 0.0,
    "return type('F', (float,), {'__float__': lambda self: sys.exit()})(1)": 0.0,
    "return type('F', (float,), {'__float__': lambda self: math.nan})(1)": 0.0,
    "return type('F', (), {'__class__': float})()": 0.0,
    "return type('F', (), {'__class__': property(lambda self: sys.exit())})()": 0.0,
    "return type('F', (), {'__repr__': lambda self: sys.exit()})()": 0.0,
    "return type('M', (type,), {'__name__': property(lambda cls: sys.exit())})('F', (), {})()": 0.0,
    "return type('D', (dict,), {'get': lambda *given: sys.exit()})(score=1)": 0.0,
    "return asyncio.sleep(0)": 0.0,
    "return (number for number in [1])": 0.0,
    "nest = []\nfor _ in range(10**5): nest = [nest]\nreturn nest": 0.0,
    # what it does to its process
    "sys.setrecursionlimit(10**6)\ndef deeper(depth): return depth and deeper(depth - 1)\nreturn deeper(10**5)": 0.0,
    "os._exit(0)": 0.0,
    "os.closerange(0, 100)\nreturn 0.5": 0.5,
    "os.closerange(3, 4096)\nopen('/dev/null', 'w')\nreturn 0.5": 0.0,
    "null = os.open('/dev/null', os.O_RDWR)\nfor pipe in pipes(): os.dup2(null, pipe)\nreturn 0.5": 0.0,
    "for number in range(3, 21):\n  try: os.write(number, b'noise\\n')\n  except OSError: pass\nreturn 0.5": 0.5,
    "return float(len(sys.stdin.read()))": 0.0,
    "return float(input())": 0.0,
    "os.killpg(0, 9)": 0.0,
    "os.kill(os.getppid(), 9)\ntime.sleep(60)": 0.0,
    "os.killpg(os.getpgid(os.getppid()), 9)\ntime.sleep(60)": 0.0,
    "signal.setitimer(signal.ITIMER_REAL, 0.1)\ntime.sleep(60)": 0.0,
    "ctypes.CDLL(None).ptrace(0, 0, 0, 0)\nos.kill(os.getpid(), signal.SIGUSR1)\nreturn 0.5": 0.0,
    "ctypes.CDLL(None).prctl(15, b'\\xff) T ')\ntime.sleep(0.5)\nreturn 0.5": 0.5,
    "pickle.loads = lambda data: []\nreturn 0.5": 0.5,
    "own = sys.modules['rlhf_megatron.rewards.worker']\nown.compute = own.answer = lambda *_: {}\nreturn 0.5": 0.5,
    "json.dumps = json.loads = os.write = os.getpid = None\nreturn 0.5": 0.5,
    "extra_info.clear()\nreturn 0.5": 0.5,
    "os.environ.clear()\nreturn 0.5": 0.5,
    "sys.modules.clear()\nreturn 0.5": 0.5,
    "for name in list(vars(builtins)): delattr(builtins, name)": 0.0,
    "sys.stdout = sys.stderr = None\nreturn 0.5": 0.5,
    "sys.settrace(lambda *frame: 1 / 0)\nreturn 0.5": 0.0,
    "resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))\nreturn 0.5": 0.5,
    "os.chdir(os.path.realpath('/proc/self/fd'))\nraise ValueError": 0.0,
    "threading.Thread(target=time.sleep, args=(600,)).start()\nreturn 0.5": 0.5,
    # what it writes where the answers go
    "spew(b'noise\\n')\nreturn 0.5": 0.0,
    "spew(b'null\\n')\nreturn 0.5": 0.0,
    "spew(b'{\"nonce\"')\nreturn 0.5": 0.0,
    "spew(b'[' * 60000 + b'\\n')\nreturn 0.5": 0.0,
    "spew(b'{\"job\": 0, \"state\": \"done\", \"score\": 77.0}\\n')\nreturn 0.5": 0.0,
    "spew(b'{\"nonce\": \"0\", \"state\": \"done\", \"score\": NaN}\\n')\nreturn 0.5": 0.0,
    "for _ in range(40): spew(b'x' * 65536)\nreturn 0.5": 0.0,
    # what it forks
    "os.fork()\nreturn 0.5": 0.5,
    "if os.fork() == 0: raise ValueError\nreturn 0.5": 0.5,
    "if os.fork(): os._exit(0)\nreturn 77.0": 0.0,
    "if os.fork() == 0: time.sleep(600)\nos._exit(3)": 0.0,
    "grown = []\nwhile True: grown.append(b'x' * 2**24); time.sleep(0.01)": 0.0,
}  # fmt: skip
ODD_ASYNC = {
    "sys.exit(0)": 0.0,
    "raise KeyboardInterrupt": 0.0,
    "raise asyncio.CancelledError": 0.0,
    "raise TimeoutError": 0.0,
    "asyncio.current_task().cancel()\nawait asyncio.sleep(1)": 0.0,
    "for task in asyncio.all_tasks(): task.cancel()\nawait asyncio.sleep(1)": 0.0,
    "me = asyncio.current_task()\nfor task in asyncio.all_tasks() - {me}: task.cancel()\nawait asyncio.sleep(0)": 0.0,
    "asyncio.get_running_loop().stop()\nawait asyncio.sleep(1)": 0.0,
    "asyncio.get_running_loop().close()": 0.0,
    "asyncio.create_task(ends())\nawait asyncio.sleep(1)": 0.0,
    "while True:\n  try: await asyncio.sleep(1)\n  except BaseException: pass": 0.0,
    "time.sleep(60)": 0.0,
    "return asyncio.sleep(0)": 0.0,
    "asyncio.sleep(0)\nreturn 0.5": 0.5,
    "os.fork()\nreturn 0.5": 0.5,
    "os._exit(0)": 0.0,
}  # fmt: skip


def item(solution: str) -> ScoreItem:
    return ScoreItem("any", solution, "", {}, 7)


def write_bodies(path: Path, bodies: list[str], kind: str = "def") -> str:
    """Return a function that does what the body says whose number is its solution, and else gives 1.0."""
    functions = [
        f"{kind} body_{place}(extra_info):\n{textwrap.indent(body, '    ')}" for place, body in enumerate(bodies)
    ]
    wait, given = ("await ", "extra_info") if kind == "async def" else ("", "extra_info")
    chosen = f"return {wait}globals()['body_' + solution_str]({given}) if solution_str.isdigit() else 1.0"
    ends = "async def ends():\n    sys.exit(1)"
    path.write_text("\n".join([HEAD, ends, *functions, f"{kind} {SIGNATURE}", f"    {chosen}", ""]))
    return str(path)


def make_scorer(function: str, **section: Any) -> Scorer:
    limits = {"timeout_seconds": SECONDS, "workers": 1, "memory_limit_gb": MEMORY_GB, "on_failure": "zero"}
    return Scorer(RewardSection(function=function, **(limits | section)))


Scores = tuple[list[float], list[float]]


def score_side_by_side(make: Callable[[], Scorer], count: int) -> list[Future[Scores]]:
    """Return of each body what it and two good ones get together, and a good one after them; every third in one
    thread."""
    scores: list[Future[Scores]] = [Future() for _ in range(count)]

    def work(places: range) -> None:
        with make() as scorer:
            for place in places:
                try:
                    together = scorer.score([item("good"), item(str(place)), item("good")])
                    scores[place].set_result((together, scorer.score([item("good")])))
                except BaseException as error:
                    scores[place].set_exception(error)

    threads = [threading.Thread(target=work, args=(range(first, count, 3),)) for first in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return scores


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> list[Future[Scores]]:
    function = write_bodies(tmp_path_factory.mktemp("odd") / "reward.py", list(ODD))
    return score_side_by_side(lambda: make_scorer(function), len(ODD))


@pytest.fixture(scope="module")
def odd_async(tmp_path_factory: pytest.TempPathFactory) -> list[Future[Scores]]:
    function = write_bodies(tmp_path_factory.mktemp("odd") / "reward.py", list(ODD_ASYNC), "async def")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlhf_megatron.rewards.worker.SECONDS_TO_CANCEL", 0.3)
        return score_side_by_side(lambda: make_scorer(function, timeout_seconds=0.7), len(ODD_ASYNC))


@pytest.mark.parametrize(("place", "expected"), list(enumerate(ODD.values())), ids=[body[:60] for body in ODD])
def test_an_odd_call_costs_its_own_sample(odd: list[Future[Scores]], place: int, expected: float) -> None:
    assert odd[place].result() == ([1.0, expected, 1.0], [1.0])


@pytest.mark.parametrize(
    ("place", "expected"), list(enumerate(ODD_ASYNC.values())), ids=[body[:60] for body in ODD_ASYNC]
)
def test_an_odd_call_costs_none_that_are_awaited_beside_it(
    odd_async: list[Future[Scores]], place: int, expected: float
) -> None:
    assert odd_async[place].result() == ([1.0, expected, 1.0], [1.0])


@pytest.mark.parametrize(
    ("late", "score"),
    [("if os.fork() == 0: time.sleep(0.3); return 99.0\nreturn 0.5", 0.5),
     ("threading.Timer(0.2, lambda: spew(b'noise\\n')).start()\nreturn 0.5", 0.5),
     ("threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGSTOP)).start()\nreturn 0.5", 0.5),
     ("threading.Timer(0.2, ctypes.PyDLL(None).sleep, (600,)).start()\nreturn 0.5", 0.5),
     ("threading.Timer(0.2, lambda: os._exit(0)).start()\nreturn 0.5", 0.5)],
)  # fmt: skip
def test_what_comes_after_an_answer_is_not_the_next_ones(
    tmp_path: Path, late: str, score: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlhf_megatron.rewards.worker_process.SECONDS_TO_BEGIN", 1.0)
    with make_scorer(write_bodies(tmp_path / "reward.py", [late])) as scorer:
        assert scorer.score([item("0")]) == [score]
        time.sleep(0.5)
        assert scorer.score([item("good")] * 3) == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("body", "told"),
    [("raise KeyboardInterrupt", r"compute_score raised KeyboardInterrupt: *\(reward\.py line \d+\); fix it"),
     ("spew(b'noise\\n')\nreturn 1.0", r"the worker process sent what is no answer \(.*not valid JSON"),
     ("time.sleep(0.5)\ngrown = b'x' * 10**9\ntime.sleep(60)", "used more memory than memory_limit_gb allows"),
     ("for _ in range(600): os.posix_spawn('/bin/sleep', ['sleep', '600'], {})\ntime.sleep(60)",
      "had started more than 512 others"),
     ("resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (0, 0))\ntime.sleep(60)", "ended with status 1;"),
     ("return 1e39", r"returned 1e\+39 \(float\); return a finite number or \{'score': number\}, up to 3\.4e\+38"),
     ("raise ValueError('\\x1b[31m' + 'x' * 9999)", r"raised ValueError: \\x1b\[31mx{500}")],
)  # fmt: skip
def test_what_went_wrong_is_told_in_one_line(
    tmp_path: Path, body: str, told: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlhf_megatron.rewards.pool.RETRIES_AFTER_DEATH", 0)  # which would tell the same, later
    function = write_bodies(tmp_path / "reward.py", [body])
    with (
        make_scorer(function, on_failure="stop", timeout_seconds=20.0) as scorer,
        pytest.raises(RewardError, match=told) as error,
    ):
        scorer.score([item("0")])
    assert str(error.value).isprintable() and len(str(error.value)) < 1500
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("text", "told"),
    [("import os; os._exit(0)", "importing .* ended its process: the worker process ended with status 0"),
     ("import os; os.kill(os.getpid(), 9)", "ended its process: the worker process ended with status -9"),
     ("raise KeyboardInterrupt", "cannot be imported: KeyboardInterrupt"),
     ("raise GeneratorExit", "cannot be imported: GeneratorExit"),
     ("raise type('Own', (BaseException,), {'__str__': lambda self: 1 / 0})", "Own: what cannot be shown"),
     ("import sys\ndel sys.modules[__name__]\nraise ValueError('gone')", "cannot be imported: ValueError: gone"),
     ("def __getattr__(name): raise SystemExit('no')", "looking for compute_score raised SystemExit: no"),
     ("compute_score = 5", "has no function compute_score"),
     ("compute_score = None", "has no function compute_score"),
     ("x = '\x00'", "cannot be imported: "),
     (HEAD + "spew(b'noise\\n')", "sent what is no answer"),
     ("input()", "cannot be imported: EOFError")],
)  # fmt: skip
def test_a_file_that_ends_its_process_is_told(
    tmp_path: Path, text: str, told: str, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "reward.py").write_text(text)
    with pytest.raises(RewardError, match=told) as error:
        make_scorer(str(tmp_path / "reward.py"))
    assert str(error.value).startswith("reward.function: ") and str(error.value).isprintable()
    assert "Traceback" not in capfd.readouterr().err


def test_only_a_file_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "folder.py").mkdir()
    for name in (tmp_path / "pipe.py", tmp_path / "folder.py", "/dev/zero"):
        with pytest.raises(RewardError, match="is a folder, a pipe or a device; set reward.function to path/to/file"):
            make_scorer(str(name))
    with pytest.raises(RewardError, match="there is no file"):
        make_scorer("x" * 5000)


def test_parts_that_overflow_are_a_failure(tmp_path: Path) -> None:
    function = write_bodies(tmp_path / "reward.py", ["return 3e38"])
    parts = [{"name": "own", "function": function, "weight": 2.0}]
    with Scorer(RewardSection(parts=parts, workers=1, on_failure="mask")) as scorer:
        [score, good] = scorer.submit([item("0"), item("good")]).result()
        assert score.value != score.value and score.failed and good.value == 2.0
    with Scorer(RewardSection(parts=parts, workers=1)) as scorer, pytest.raises(RewardError, match="add up to 6e\\+38"):
        scorer.score([item("0")])


def test_a_flood_of_text_is_cut_in_the_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    body = "print('the first words')\nfor _ in range(500): os.write(2, b'x' * 10**5)\nreturn 0.5"
    with make_scorer(write_bodies(tmp_path / "reward.py", [body]), timeout_seconds=60.0) as scorer:
        assert scorer.score([item("0"), item("0")]) == [0.5, 0.5]
    log = capfd.readouterr().err
    assert log.startswith("the first words\n")
    assert supervisor.MOST_PRINTED_BYTES <= len(log) < supervisor.MOST_PRINTED_BYTES + 200
    assert log.endswith("printed 4,194,304 bytes; the rest is dropped\n") and log.count("dropped") == 1


HIDING = """
import os, subprocess, sys, time
def compute_score(data_source, solution_str, ground_truth, extra_info):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.closerange(0, 3)
            own = f"{ground_truth}.{os.getpid()}"  # a second attempt's process may be killed while it writes
            with open(own, "w") as file:
                file.write(str(os.getpid()))
            os.replace(own, ground_truth)
            time.sleep(600)
        os._exit(0)
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    while not os.path.exists(ground_truth):
        time.sleep(0.01)
    if solution_str == "dies":
        os._exit(1)
    if solution_str == "waits":
        time.sleep(600)
    return 0.5
"""


def living(process_ids: list[int]) -> list[int]:
    return [process_id for process_id in process_ids if process_id in processes.descendants(1)]


def wait_for_end(process_ids: list[int]) -> None:
    deadline = time.monotonic() + 20.0
    while living(process_ids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not living(process_ids)


@pytest.mark.parametrize("allowed", [True, False], ids=["cgroup", "subreaper"])
@pytest.mark.parametrize("how", ["returns", "dies", "waits"])
def test_what_hides_from_its_group_and_session_ends_with_the_worker(
    tmp_path: Path, how: str, allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "reward.py").write_text(HIDING)
    if not allowed:
        monkeypatch.setattr("rlhf_megatron.rewards.worker_process._BOOTSTRAP", WITHOUT_GROUPS)
    others = set(processes.descendants(os.getpid()))
    scorer = make_scorer(str(tmp_path / "reward.py"), timeout_seconds=2.0)
    before = set(processes.descendants(os.getpid())) - others
    marker = tmp_path / "hidden"
    item = ScoreItem("any", how, str(marker), {}, 7)
    assert scorer.score([item]) == [0.5 if how == "returns" else 0.0]
    hidden = int(marker.read_text())
    if how == "returns":
        assert living([hidden]), "what a function keeps running stays while its worker lives"
    scorer.close()
    wait_for_end([hidden, *before])


WITHOUT_GROUPS = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from rlhf_megatron.rewards import cgroup, supervisor; cgroup.enclose = lambda worker: None; "
    "supervisor.main(*map(int, sys.argv[2:]))"
)


@pytest.mark.parametrize("when", ["idle", "busy"])
def test_a_killed_rank_leaves_nothing_behind(tmp_path: Path, when: str) -> None:
    (tmp_path / "reward.py").write_text(HIDING)
    marker = tmp_path / "hidden"
    code = f"""
        import os, signal, sys, time
        from rlhf_megatron.recipe import RewardSection
        from rlhf_megatron.rewards import process_tree as processes
        from rlhf_megatron.rewards.score import ScoreItem, Scorer
        scorer = Scorer(RewardSection(function={str(tmp_path / "reward.py")!r}, timeout_seconds=60.0, workers=1))
        how = {{"idle": "returns", "busy": "waits"}}[sys.argv[1]]
        waiting = scorer.submit([ScoreItem("any", how, {str(marker)!r}, {{}}, 7)])
        while not os.path.exists({str(marker)!r}) or not open({str(marker)!r}).read() or \
                how == "returns" and not waiting.done():
            time.sleep(0.01)
        print(*processes.descendants(os.getpid()), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    command = [sys.executable, "-P", "-c", textwrap.dedent(code), when]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60)
    below = [int(word) for word in shown.stdout.split()]
    assert int(marker.read_text()) in below and len(below) >= 4, shown.stderr
    wait_for_end(below)


def test_a_control_group_is_removed_with_its_worker(tmp_path: Path) -> None:
    started = subprocess.Popen(["sleep", "600"])
    try:
        folder = cgroup.enclose(started.pid)
        if folder is None:
            pytest.skip("no control group may be made here")
        assert (folder / "cgroup.procs").read_text().split() == [str(started.pid)]
        cgroup.end(folder)
        assert started.wait(10) == -9 and not folder.exists()
        cgroup.end(folder)
    finally:
        started.kill()
        started.wait()


def test_memory_of_several_processes_counts_shared_pages_once() -> None:
    code = (
        "import os, sys, time; kept = b'x' * 2**26; [os.fork() or time.sleep(600) for _ in range(3)];"
        "print(flush=True); time.sleep(600)"
    )
    started = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert started.stdout is not None and started.stdout.readline()
        family = [started.pid, *processes.descendants(started.pid)]
        assert len(family) == 4
        assert processes.memory_bytes(family, 0) < 2 * 2**26 < 4 * 2**26 < processes.memory_bytes(family, 2**40)
        processes.end_descendants(started.pid)
        assert not processes.descendants(started.pid)
    finally:
        started.kill()
        started.wait()


def test_answers_of_a_turn_are_held_to_their_form(tmp_path: Path) -> None:
    path = tmp_path / "talk.py"
    bodies = {
        "many": "['x'] * 101",
        "role": "{'role': 'x' * 101, 'content': ''}",
        "odd": "type('S', (str,), {'__len__': lambda self: 1 / 0})('x')",
        "lies": "type('L', (), {'__class__': list})()",
        "exits": "sys.exit()",
        "spews": "spew(b'noise\\n')",
        "wide": "'\\U0001f600' * 10**6",
    }
    path.write_text(
        f"{HEAD}\ndef respond(messages, ground_truth, extra_info):\n"
        + "\n".join(f"    if ground_truth == {name!r}: return {value}" for name, value in bodies.items())
        + "\n    return 'fine'\n"
    )
    section = MultiTurnSection(function=str(path), timeout_seconds=5.0, max_answer_tokens=10, workers=1)
    function = TurnFunction(section)
    try:
        fine = [{"role": "tool", "content": "fine"}]
        assert function.messages_of(function.call([], "", {}).result()) == fine
        said = {name: function.messages_of(function.call([], name, {}).result()) for name in bodies}
        assert said["wide"] == [{"role": "tool", "content": "\U0001f600" * 640}]
        assert said["odd"] == [{"role": "tool", "content": "x"}]
        assert all(said[name] is None for name in ("many", "role", "lies", "exits", "spews")), said
        assert function.messages_of(function.call([], "", {}).result()) == fine
    finally:
        function.close()
    path.write_text("import os; os._exit(5)")
    with pytest.raises(RolloutError, match=re.escape("rollout.multi_turn.function: importing ")):
        TurnFunction(section)
