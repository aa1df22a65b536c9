"""Programs of a response on a row's test cases, in real confined processes: right, wrong and hostile ones."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest

from rlhf_megatron.child_python import child_command
from rlhf_megatron.recipe import RewardCodeSection, RewardSection
from rlhf_megatron.rewards import code
from rlhf_megatron.rewards.rules import RULES, rule_of
from rlhf_megatron.rewards.sandbox import probe
from rlhf_megatron.rewards.score import RewardError, ScoreItem, Scorer

ROOT = Path(__file__).parents[2]
SUMS = {"inputs": ["1 2\n", "5 -7\n"], "outputs": ["3\n", "-2\n"]}
RIGHT = "print(sum(map(int, input().split())))"


def block(program: str) -> str:
    return f"I add them.\n```python\n{program}\n```\nDone."


def scores(section: dict[str, Any], *items: tuple[str, Any]) -> list[float]:
    """Return the scores of (response, test cases)."""
    with Scorer(RewardSection(timeout_seconds=60.0, workers=2, code=RewardCodeSection(**section))) as scorer:
        return scorer.score(
            [ScoreItem("taco", text, json.dumps(truth), {}, row) for row, (text, truth) in enumerate(items)]
        )


def test_the_data_sources_of_prime_code_are_scored_by_it() -> None:
    assert {rule_of(name) for name in ("codecontests", "apps", "codeforces", "TACO", "BAAI/TACO")} == {"code"}


def test_programs_are_graded_by_what_they_print_or_return() -> None:
    call = {"fn_name": "f", "inputs": ["[1, 2]\n3", [[4], 5]], "outputs": ["[1, 2, 3]", [[4, 5]]]}
    half = "a, b = map(int, input().split())\nprint(abs(a + b))"
    tables = [RULES["code"].response.format(json.dumps(truth)) for truth in (SUMS, call)]  # type: ignore[union-attr]
    graded = {
        block(RIGHT): (SUMS, 1.0),
        block(half): (SUMS, 0.5),
        block(RIGHT + "\nraise ValueError"): (SUMS, 0.0),
        block(RIGHT + "\nexit(1)"): (SUMS, 1.0),
        block(f"if __name__ == '__main__':\n    {RIGHT}"): (SUMS, 1.0),
        block("def main():\n    " + RIGHT + "\nfrom threading import Thread\nThread(target=main).start()"): (SUMS, 1.0),
        block("print("): (SUMS, 0.0),
        f"<think>{block(RIGHT)}</think>It cannot be done.": (SUMS, 0.0),
        "": (SUMS, 0.0),
        block("def f(xs: List[int], x):\n    print('loud')\n    return (*xs, x)"): (call, 1.0),
        block("class Solution:\n    def f(self, xs, x):\n        return xs + [5]"): (call, 0.5),
        block("def g(xs, x):\n    return xs + [x]"): (call, 0.0),
        tables[0]: (SUMS, 1.0),
        tables[1]: (call, 1.0),
    }
    found = scores({}, *((text, truth) for text, (truth, _) in graded.items()))
    assert dict(zip(graded, found, strict=True)) == {text: expected for text, (_, expected) in graded.items()}
    assert scores({"score": "all"}, (block(half), SUMS), (block(RIGHT), SUMS)) == [0.0, 1.0]


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(0.0)
        yield listening


@pytest.mark.grid
def test_hostile_programs_get_nothing_in_bounded_time(tmp_path: Path, server: socket.socket) -> None:
    """Each prints the expected text only where it escapes."""
    port, victim = server.getsockname()[1], tmp_path / "victim"
    victim.write_text("untouched")
    victim.chmod(0o640)
    before = victim.stat()
    hostile = [
        "open('/etc/hostname').read()",
        f"open({str(ROOT / 'README.md')!r}).read()",
        f"open({__file__!r}).read()",
        "open('/proc/self/environ').read()",
        f"open('/proc/{os.getpid()}/environ').read()",
        "__import__('os').listdir('/')",
        f"open({str(tmp_path / 'new')!r}, 'w')",
        "open(__import__('os').path.expanduser('~/new'), 'w')",
        "open('/dev/shm/new', 'w')",
        f"__import__('os').truncate({str(victim)!r}, 0)",
        f"__import__('os').chmod({str(victim)!r}, 0o777)",
        f"__import__('os').utime({str(victim)!r}, (0, 0))",
        f"__import__('os').unlink({str(victim)!r})",
        f"__import__('os').rename({str(victim)!r}, {str(tmp_path / 'moved')!r})",
        f"__import__('socket').create_connection(('127.0.0.1', {port}), 2)",
        "__import__('socket').socketpair()",
        "__import__('os').fork()",
        "__import__('subprocess').run(['/bin/true'])",
        "__import__('os').kill(__import__('os').getppid(), 0)",
        "__import__('resource').prlimit(__import__('os').getppid(), 0)",
        "__import__('resource').setrlimit(__import__('resource').RLIMIT_AS, (2**40, 2**40))",
        "__import__('ctypes').CDLL(None).unshare(0x10000000) and [][0]",
        "bytearray(2**31)",
        "__import__('os').memfd_create('x')",
    ]  # fmt: skip
    endless = [
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
        "import threading, time\nwhile True:\n    threading.Thread(target=time.sleep, args=(99,)).start()",
        "while True:\n    print('escaped' * 1000)",
        "import time, signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(10**6)",
        "import os, time\nprint('escaped', flush=True)\nos.close(1)\ntime.sleep(10**6)",
        "while True:\n    pass",
    ]
    truth = {"inputs": [""], "outputs": ["escaped"]}
    programs = [f"{line}\nprint('escaped')" for line in hostile] + endless
    found = scores(
        {"timeout_seconds": 2.0}, ("```python\nprint('escaped')\n```", truth), *((block(p), truth) for p in programs)
    )
    assert found[0] == 1.0
    assert [program for program, score in zip(programs, found[1:], strict=True) if score] == []
    with pytest.raises(BlockingIOError):
        server.accept()
    after = victim.stat()
    assert (victim.read_text(), after.st_mode, after.st_mtime) == ("untouched", before.st_mode, before.st_mtime)
    assert os.listdir(tmp_path) == ["victim"] and not os.path.exists("/dev/shm/new")
    assert not os.path.exists(os.path.expanduser("~/new")) and not os.path.exists("/new")


def test_a_sample_ends_at_its_limit_with_what_passed_before() -> None:
    truth = {"inputs": ["1", *["9"] * 20], "outputs": ["1", *["9"] * 20]}
    program = "import time\nn = input()\nprint(n)\nif n != '1':\n    time.sleep(99)"
    with Scorer(RewardSection(timeout_seconds=3.0, code=RewardCodeSection(timeout_seconds=2.0))) as scorer:
        assert scorer.score([ScoreItem("apps", block(program), json.dumps(truth), {}, 0)]) == [1 / 21]


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("1 2\n3\n", "1 2\n3", True),
        ("  1 2 \n\n 3", "1 2\n3\n", True),
        ("1 2 3", "1 2\n3", False),
        ("1  2", "1 2", False),
        ("YES", "Yes", False),
        ("", "0", False),
        ("0.3333333", "0.3333334", True),
        ("0.333", "0.334", False),
        ("2", "2.0", True),
        ("1000000", "1000001", False),
        ("-1000000", "-1000001", False),
        ("nan", "nan", True),
        ("nan", "1.5", False),
        ("inf", "1.5", False),
        ("1.5", "inf", False),
        ("9" * 5000, "8" * 5000, False),
    ],
)
def test_outputs_are_compared_by_line(printed: str, expected: str, same: bool) -> None:
    assert code.same_output(printed, expected) is same


def test_decimals_are_as_close_as_numpy_says() -> None:
    draw = numpy.random.default_rng(1)
    pairs = [
        (value * (1 + draw.normal() * 1e-5), value)
        for value in draw.normal(size=200) * 10.0 ** draw.integers(-9, 9, 200)
    ]
    verdicts = [bool(numpy.allclose(value, right)) for value, right in pairs]
    assert [code.same_output(repr(float(value)), repr(float(right))) for value, right in pairs] == verdicts
    assert 20 < sum(verdicts) < 180


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```python\na\n```\nthen\n```py\nb\n```\nprints\n```\n3\n```", "b"),
        ("```cpp\na\n```\n```\nb\n```", "b"),
        ("```python\nprint(1)", "print(1)"),
        ("print(1)", "print(1)"),
        ("```python\na\n```</think>", None),
        ("```python\n\n```", None),
    ],
)
def test_the_last_block_is_the_program(response: str, program: str | None) -> None:
    assert code.extract_program(response) == program


@pytest.mark.parametrize(
    "truth",
    [
        "42",
        "{",
        '{"inputs": [], "outputs": []}',
        '{"inputs": ["1"], "outputs": []}',
        '{"inputs": [1], "outputs": ["1"]}',
        '{"inputs": ["x"], "outputs": ["1"], "fn_name": "f"}',
        '{"inputs": ["1"], "outputs": ["1"], "fn_name": "f("}',
    ],
)
def test_test_cases_that_cannot_be_used_are_refused(truth: str) -> None:
    with pytest.raises(code.EntryError, match="^the ground truth of rule code"):
        code.parse_cases(truth)


def test_a_row_without_test_cases_stops_the_run() -> None:
    with (
        Scorer(RewardSection(rule="code")) as scorer,
        pytest.raises(RewardError, match="row 3 .data_source any.: the ground truth of rule code must be JSON"),
    ):
        scorer.score([ScoreItem("any", block(RIGHT), "42", {}, 3)])


def test_this_machine_holds_everything() -> None:
    held = probe.probe()
    assert held.isolation == "full" and {"Landlock", "seccomp"} <= set(held.steps)


def test_a_container_that_blocks_calls_is_found_out() -> None:
    """As Docker's own filter does with unshare, and older kernels with Landlock: network stays away, files do not."""
    script = """
from rlhf_megatron.rewards.sandbox import probe, process, system_calls
refuse, number = (0x06, 0, 0, 0x00050001), (0x20, 0, 0, 0)
unshare = system_calls._REFUSED["unshare"][platform.machine() == "aarch64"]
system_calls.no_new_privileges()
system_calls.install([number, (0x15, 0, 1, unshare), refuse, (0x15, 0, 1, 444), refuse, (0x06, 0, 0, 0x7FFF0000)])
print(probe.probe().described())
for least in ("limits", "network", "full"):
    try:
        print(least, probe.required_steps(least))
    except process.SandboxError as error:
        print(least, error)
for required in ([], ["Landlock"]):
    try:
        print(process.run("print(7)", "", process.Limits(20.0, 2**29, required)))
    except process.SandboxError as error:
        print(error)
"""
    command = child_command("import platform\n" + script)
    lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout.splitlines()
    held = "isolation network (memory, network, processes; this machine refuses: network namespace, Landlock)"
    steps = "('capabilities', 'no new privileges', 'seccomp')"
    assert lines[:3] == [held, f"limits {steps}", f"network {steps}"]
    assert lines[3].startswith(f"full programs of the policy would run with {held}")
    assert lines[3].endswith("reward.code.isolation: network allows that")
    assert lines[4:] == ["b'7\\n'", "a process could not be confined as it was at the start"]
