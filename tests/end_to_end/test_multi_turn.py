"""Whole runs whose responses have several turns: a function or an environment of a file speaks between the model's."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from make_tiny_model import make_talkative
from transformers import AutoModelForCausalLM

from end_to_end.commands import OWN_FRAME, Finished, torchrun
from end_to_end.runs import TRAIN, logged, make_model, make_sums, metrics_of, on_two_ranks, records_of, wait_for
from rlhf_megatron.rollout.vllm.process_environment import has_gpu

pytestmark = pytest.mark.skipif(has_gpu(), reason="the engine of this machine needs a GPU, which is hidden here")

MOST_TURNS, PROMPT_MESSAGES = 3, 1
RECIPE: dict[str, Any] = {
    "name": "whole",
    "loop": "rl",
    "steps": 3,
    "deterministic": True,
    "model": {"path": "model", "dtype": "float32"},
    "data": {"train_files": ["train.parquet"], "max_prompt_length": 64},
    "batch": {"prompts_per_step": 4, "responses_per_prompt": 4},
    "actor": {"tokens_per_gpu": 512, "optimizer": {"learning_rate": 1e-3}},
    "rollout": {
        "max_response_length": 60,
        "scheduling": "static",
        "multi_turn": {"function": "talk.py", "max_assistant_turns": MOST_TURNS, "timeout_seconds": 5.0},
    },
    "reward": {"function": "reward.py"},
    "evaluation": {"at_start": False, "at_end": False},
    "checkpoint": {"save_interval": 1, "export_at_end": False},
    "monitor": {"plots": False, "rollouts": {"every": 1}},
}
# What is said depends on what was said; one in eight conversations ends here.
TALK = """
import time
async def respond(messages, ground_truth, extra_info):
    said = messages[-1]["content"]
    assert messages[-1]["role"] == "assistant" and messages[0]["role"] in ("system", "user")
    if len(said) % 8 == 1:
        return None
    return {"role": "user", "content": f"{len(messages)}: {len(said)}"}
"""
# A state: the turns and characters so far. All responses to a prompt begin with the same number.
GAME = """
import json, os, random, time
class Environment:
    def reset(self, row):
        self.turns = self.total = 0
        self.log, self.answer = os.path.join(os.path.dirname(__file__), "games.jsonl"), row["ground_truth"]
        self.secret = random.randrange(1000)
        return {"role": "user", "content": f"{self.secret}"} if self.secret % 2 else None
    async def step(self, action):
        self.turns, self.total = self.turns + 1, self.total + len(action)
        # A FAILURE
        reward = len(action) % 5 / 4
        if len(action) % 8 == 1:
            return None, reward, True
        return {"role": "user", "content": f"{self.turns}: {self.total}"}, reward, False
    def score(self, ending):
        return {"done": 8.0, "turns": 16.0, "length": 32.0}[ending]
    def close(self):
        with open(self.log, "a") as log:
            log.write(json.dumps([self.secret, self.turns, self.total]) + "\\n")
"""
FAILURES = {2: "raise KeyError(action)", 3: "time.sleep(60)", 4: "os._exit(1)"}
WHERE = "\n        ".join(f"if len(action) % 8 == {size}: {failure}" for size, failure in FAILURES.items())
BADLY = GAME.replace("# A FAILURE", WHERE)
# Half of the games can be saved. All write down what is done to them, and one kills its rank in the second step.
KILLING = """
import json, os, signal
HERE = os.path.dirname(__file__)
class Environment:
    def reset(self, row):
        self.row, self.said = row, []
        self.note("reset")
    def step(self, action):
        self.said.append(len(action))
        self.note("step")
        if len(self.said) == 2 and os.path.exists(f"{HERE}/runs/journaled/checkpoints/latest"):
            self.kill_rank()
        return f"{len(self.said)}", len(action) % 5 / 4, len(action) % 8 == 1
    def kill_rank(self):
        try:
            os.close(os.open(f"{HERE}/killed", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        with open(f"/proc/{os.getppid()}/stat") as supervisor:
            os.kill(int(supervisor.read().rpartition(")")[2].split()[1]), signal.SIGKILL)
        signal.pause()
    def state(self):
        return json.dumps(self.said).encode() if self.row["seed"] % 2 else None
    def load(self, row, state):
        self.row, self.said = row, json.loads(state)
        self.note("load")
    def note(self, what):
        with open(f"{HERE}/ledger.jsonl", "a") as ledger:
            row = self.row
            line = [what, row["seed"], row["attempt"], row["prompt"][0]["content"], self.said]
            ledger.write(json.dumps(line) + "\\n")
"""
# The prompt and the newest observation stay, where there has been another.
CONTEXT = """
def context(messages, ground_truth, extra_info):
    return [messages[0], messages[-1]] if sum(message["role"] == "assistant" for message in messages) > 1 else None
"""
# Of a model that often begins what might be a call, and never ends one.
TOOLS = '''
def add(first: int, second: int) -> int:
    """
    Adds two numbers.

    Args:
        first: One of them.
        second: The other.
    """
    return first + second
'''
TEMPLATE = r"""{%- if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
REWARD = """
import json
def compute_score(data_source, solution_str, ground_truth, extra_info):
    with open("seen.jsonl", "a") as seen:
        seen.write(json.dumps([solution_str, extra_info["turns"]]) + "\\n")
    return (len(solution_str) % 5) / 4
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("turns")
    for name, text in (("talk.py", TALK), ("game.py", GAME), ("badly.py", BADLY), ("reward.py", REWARD)):
        (path / name).write_text(text)
    (path / "killing.py").write_text(KILLING)
    (path / "slow.py").write_text(TALK.replace("    said =", "    time.sleep(0.8)\n    said ="))
    (path / "always.py").write_text("def respond(messages, ground_truth, extra_info):\n    return 7\n")
    (path / "turns.yaml").write_text(yaml.safe_dump(RECIPE))
    (path / "tools.py").write_text(TOOLS)
    (path / "context.py").write_text(CONTEXT)
    (path / "tools.jinja").write_text(TEMPLATE)
    make_model(path, 2, "--max-positions=1024")
    shutil.copytree(path / "model", path / "caller")
    make_talkative(path / "caller", also="[")
    make_talkative(path / "model")
    make_sums(path, 24, "--seed=1")
    make_sums(path, 6, "--seed=9", name="held_out")
    return path


@pytest.fixture(scope="module")
def train(folder: Path) -> Callable[..., Finished]:
    return on_two_ranks(folder, "turns.yaml")


@pytest.fixture(scope="module")
def whole(folder: Path, train: Callable[..., Finished]) -> dict[int, dict[str, float]]:
    train().check()
    return metrics_of(folder / "runs" / "whole")


PLAYED = (
    "rollout.multi_turn={environment: game.py, max_assistant_turns: 3, timeout_seconds: 20}",
    "reward={rule: none}",
)


@pytest.fixture(scope="module")
def played(folder: Path, train: Callable[..., Finished]) -> dict[int, dict[str, float]]:
    train("name=played", *PLAYED).check()
    return metrics_of(folder / "runs" / "played")


@pytest.fixture(scope="module")
def seen(folder: Path, whole: dict[int, dict[str, float]]) -> list[tuple[str, list[dict[str, str]]]]:
    """Return what the reward function was given of each response of the first run: its text, and its turns."""
    return [tuple(json.loads(line)) for line in (folder / "seen.jsonl").read_text().splitlines()[:48]]  # type: ignore[misc]


def test_what_others_say_is_read_and_not_learnt(whole: dict[int, dict[str, float]]) -> None:
    for metrics in whole.values():
        assert metrics["rollout/turn_answers"] > 8
        # Where a logprob came from another place of the row, or of a token that was not sampled, these differ.
        assert metrics["train/mismatch_kl"] < 1e-9
        assert metrics["train/rollout_logprob_abs_diff"] < 1e-5


def test_kept_rows_say_who_wrote_what(folder: Path, whole: dict[int, dict[str, float]]) -> None:
    for step in whole:
        rows = pq.read_table(folder / "runs" / "whole" / "rollouts" / f"step-{step}.parquet").to_pylist()
        assert {len(row["turns"]) for row in rows} >= {1, 3, 5}
        for row in rows:
            assert [turn["sampled"] for turn in row["turns"]] == ([True, False] * MOST_TURNS)[: len(row["turns"])]
            assert all(re.search(r"\d+: \d+", turn["text"]) for turn in row["turns"][1::2])


def test_turns_alternate_and_answer_each_other(seen: Sequence[tuple[str, list[dict[str, str]]]]) -> None:
    assert len(seen) == 48
    assert {len(turns) for _, turns in seen} >= {1, 3, 5}
    for text, turns in seen:
        assert [turn["role"] for turn in turns] == (["assistant", "user"] * MOST_TURNS)[: len(turns)]
        own = [turn["content"] for turn in turns[::2]]
        assert len(own) <= MOST_TURNS and text == own[-1]
        for place, answer in enumerate(turns[1::2]):
            found = re.fullmatch(r"(\d+): (\d+)", answer["content"])
            assert found, answer
            before, length = map(int, found.groups())
            assert length == len(own[place]) and length % 8 != 1
            # The conversation up to there: what the prompt has, and the turns before.
            assert before == PROMPT_MESSAGES + 2 * place + 1


def kept(folder: Path, step: int) -> list[dict[str, Any]]:
    return pq.read_table(folder / "runs" / "played" / "rollouts" / f"step-{step}.parquet").to_pylist()


def test_an_environment_keeps_a_state_and_gives_rewards(folder: Path, played: dict[int, dict[str, float]]) -> None:
    closed = [json.loads(line) for line in (folder / "games.jsonl").read_text().splitlines()[:48]]
    for step, metrics in played.items():
        assert metrics["train/mismatch_kl"] < 1e-9 and metrics["rollout/turn_failures"] == 0
        rewards = []
        for row in kept(folder, step):
            texts = [turn["text"] for turn in row["turns"]]
            actions = [re.sub(r"<\|(im_start|im_end|endoftext)\|>", "", text) for text in texts[::2]]
            cut = not texts[-1].endswith(("<|im_end|>", "<|endoftext|>"))
            sizes = [len(action) for action in (actions[:-1] if cut else actions)]
            for place, observed in enumerate(texts[1::2], start=1):
                assert f"user\n{place}: {sum(sizes[:place])}<" in observed
            last = 32 if row["truncated"] else 8 if sizes[-1] % 8 == 1 else 16
            given = [size % 5 / 4 for size in sizes]
            given = [*given, last] if cut else [*given[:-1], given[-1] + last]
            assert [turn["reward"] for turn in row["turns"][::2]] == pytest.approx(given)
            assert row["reward"] == pytest.approx(sum(given))
            assert row["reward_environment"] == row["reward"]
            rewards.append(row["reward"])
        assert len(rewards) == 16
        assert metrics["reward/environment"] == pytest.approx(sum(rewards) / 16, rel=1e-6)
        assert metrics["reward/mean"] == pytest.approx(sum(rewards) / 16, rel=1e-6)
    assert len(closed) == 48 and all(turns <= 3 for _, turns, _ in closed), "every game was closed"


def test_what_an_environment_observes_first_belongs_to_the_prompt(
    folder: Path, played: dict[int, dict[str, float]]
) -> None:
    prompts = {(step, row["group_id"]): set[str]() for step in played for row in kept(folder, step)}
    for step in played:
        for row in kept(folder, step):
            prompts[step, row["group_id"]].add(row["prompt"])
    assert all(len(of_group) == 1 for of_group in prompts.values()), "a group begins alike"
    observed = re.compile(r"<\|im_start\|>user\n\d+<\|im_end\|>\n<\|im_start\|>assistant\n$")
    two = [observed.search(min(of_group)) for of_group in prompts.values()]
    assert any(two) and not all(two)


def test_a_killed_run_goes_on_to_the_last_bit(
    folder: Path, played: dict[int, dict[str, float]], train: Callable[..., Finished]
) -> None:
    with torchrun(2, TRAIN, "turns.yaml", "name=killed", *PLAYED, folder=folder) as command:
        wait_for(command, lambda: logged(folder / "runs" / "killed") >= 1)
        command.rank(1).kill()
        command.finish()
    train("name=killed", *PLAYED).check()
    assert metrics_of(folder / "runs" / "killed") == played


def test_a_killed_run_goes_on_with_the_trajectories_that_it_had_begun(folder: Path) -> None:
    turns = "rollout.multi_turn={environment: killing.py, max_assistant_turns: 3, timeout_seconds: 20}"
    queue = ("rollout.scheduling=queue", "deterministic=false", "reward={rule: none}")
    with torchrun(2, TRAIN, "turns.yaml", "name=journaled", turns, *queue, folder=folder, restarts=1) as command:
        command.finish().check()
    run = folder / "runs" / "journaled"
    metrics = metrics_of(run)
    begun = {
        step: [values[f"rollout/trajectories_{what}"] for what in ("replayed", "resumed", "restarted")]
        for step, values in metrics.items()
    }
    # The checkpoint of the second step is not to be seen yet when the third is killed: its trajectories are there.
    assert begun[1] == [0, 0, 0] and begun[2] == [16, 0, 0] and sum(begun[3]) > 0
    ledger = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    begins = Counter((what, attempt) for what, _, attempt, _, _ in ledger if what != "step")
    assert (begins["reset", 2], begins["load", 2]) == (begun[3][2], begun[3][1])
    assert 48 - begun[3][2] <= begins["reset", 1] <= 48, "no other is begun twice"
    rows = [row for step in metrics for row in pq.read_table(run / "rollouts" / f"step-{step}.parquet").to_pylist()]
    assert len(rows) == 48 and all(values["train/mismatch_kl"] < 1e-9 for values in metrics.values())
    # What is trained on is what the games have said: no turn is lost or comes twice.
    for row in rows:
        assert [turn["text"].split("user\n")[1][0] for turn in row["turns"][1::2]] == ["1", "2"][
            : len(row["turns"]) // 2
        ]
    assert not any(run.glob("journal/*")), "the last checkpoint has all"


def test_a_replica_of_two_ranks_hears_the_same(
    folder: Path, played: dict[int, dict[str, float]], train: Callable[..., Finished]
) -> None:
    train("name=pair", "steps=2", *PLAYED, "rollout.layout.tensor=2", "actor.layout.tensor=2").check()
    pair = metrics_of(folder / "runs" / "pair")
    for step in (1, 2):
        metrics = played[step]
        for name in ("rollout/turn_answers", "rollout/turn_ends", "rollout/response_length_mean", "reward/mean"):
            assert pair[step][name] == pytest.approx(metrics[name], rel=1e-6), (step, name)
        assert pair[step]["train/mismatch_kl"] < 1e-9


def test_an_environment_that_fails_or_takes_too_long_costs_its_response_alone(
    folder: Path, train: Callable[..., Finished]
) -> None:
    slow = (*PLAYED, "rollout.multi_turn.environment=badly.py", "rollout.multi_turn.timeout_seconds=2", "steps=2")
    queue = ("rollout.scheduling=queue", "deterministic=false", "rollout.oversample=1.5")
    critic = (
        "algorithm={advantage: gae, discount_per: turn, gamma: 0.9, gae_lambda: 0.9}",
        "critic={tokens_per_gpu: 512, optimizer: {learning_rate: 1.0e-3}}",
    )
    held_out = (
        "data.validation_files=[held_out.parquet]",
        "evaluation={at_start: false, temperature: 1.0, samples_per_prompt: 2, correct_from: 16}",
    )
    finished = train("name=badly", *slow, *queue, *critic, *held_out).check()
    assert "rollout.multi_turn.environment: a trajectory failed and is left out: " in finished.err
    for step, metrics in metrics_of(folder / "runs" / "badly").items():
        assert metrics["rollout/turn_failures"] > 0 and metrics["rollout/turn_answers"] > 0
        assert metrics["reward/masked"] > 0 and metrics["train/mismatch_kl"] < 1e-9
        file = folder / "runs" / "badly" / "rollouts" / f"step-{step}.parquet"
        rewards = pq.read_table(file).column("reward").to_pylist()
        assert len(rewards) == 16 - metrics["reward/masked"] and all(reward >= 8 for reward in rewards)
        assert metrics["critic/loss"] > 0 and metrics["rollout/turn_calls"] > 16
        assert 0 < metrics["rollout/prefix_cache_hit_rate"] < 1
    for record in records_of(folder / "runs" / "badly")[:2]:
        seconds = record["rollout/engine_seconds"] + record["rollout/idle_seconds"]
        assert 0 < seconds <= record["train/step_time_ms"] / 1000
        assert record["rollout/waiting_mean"] > 0
    [source] = {name.split("/")[1:-1][0] for name in metrics if name.startswith("eval/")}
    evaluated = {name.rpartition("/")[2]: value for name, value in metrics.items() if name.startswith(f"eval/{source}")}
    assert 0 < evaluated["accuracy"] <= evaluated["pass@2"] <= 1 and evaluated["score"] > 0


def test_conversations_that_are_cut_are_trained_in_rows_of_their_own(
    folder: Path, train: Callable[..., Finished]
) -> None:
    managed = (*PLAYED, "rollout.multi_turn.context=context.py", "rollout.multi_turn.max_assistant_turns=4")
    held_out = ("data.validation_files=[held_out.parquet]", "evaluation={at_start: false, correct_from: 16}")
    train("name=managed", "steps=2", *managed, *held_out, "actor.shared_prompts=true").check()
    for step, metrics in list(metrics_of(folder / "runs" / "managed").items())[:2]:
        assert metrics["rollout/turn_branches"] > 4 and metrics["train/mismatch_kl"] < 1e-9
        rows = pq.read_table(folder / "runs" / "managed" / "rollouts" / f"step-{step}.parquet").to_pylist()
        assert len(rows) == 16 + metrics["rollout/turn_branches"]
        assert sum(row["sampled_tokens"] for row in rows) == metrics["rollout/sampled_tokens"], "each is trained once"
        assert len({(row["group_id"], row["advantage"]) for row in rows}) <= 16, "those of a trajectory share one"
        beginnings = {tuple(row["tokens"][:size]) for row in rows for size in range(1, len(row["tokens"]) + 1)}
        most = 1 - len(beginnings) / sum(len(row["tokens"]) for row in rows)  # were all in one micro-batch
        assert 0.7 * most < metrics["train/shared_prompt_fraction"] <= most


def test_a_replica_that_waits_for_answers_does_not_hang(folder: Path, train: Callable[..., Finished]) -> None:
    slow = ("rollout.multi_turn.function=slow.py", "rollout.multi_turn.workers=1", "retry.hang_seconds=6")
    train("name=slow", "steps=1", *slow).check()
    assert metrics_of(folder / "runs" / "slow")[1]["rollout/turn_answers"] > 8


def test_tools_are_told_to_the_model_and_its_calls_are_counted(folder: Path, train: Callable[..., Finished]) -> None:
    tools = "rollout.multi_turn={tools: ['tools.py:add'], tool_parser: pythonic, max_assistant_turns: 3}"
    lengths = ("data.max_prompt_length=500", "rollout.max_response_length=300", "actor.tokens_per_gpu=2048")
    template = ("model.path=caller", "data.chat_template=tools.jinja")
    train("name=called", "steps=1", "batch.prompts_per_step=2", tools, *template, *lengths).check()
    metrics = metrics_of(folder / "runs" / "called")[1]
    assert metrics["tools/malformed"] > 0 and metrics["tools/add/calls"] == 0
    assert {"tools/add/failed", "tools/add/latency_ms_mean", "tools/add/truncated"} <= metrics.keys()
    assert metrics["train/mismatch_kl"] < 1e-9 and metrics["rollout/turn_answers"] == metrics["tools/malformed"]
    rows = pq.read_table(folder / "runs" / "called" / "rollouts" / "step-1.parquet").to_pylist()
    assert all('"name": "add"' in row["prompt"] for row in rows)
    answers = [turn["text"] for row in rows for turn in row["turns"] if not turn["sampled"]]
    assert answers and all("user\nerror: this call cannot be read" in answer for answer in answers)


def test_turns_generated_a_step_ahead_are_of_the_weights_that_they_name(
    folder: Path, train: Callable[..., Finished]
) -> None:
    """Their logprobs are those that transformers finds with what the run exported of these weights."""
    apart = ("actor.ranks=0", "rollout.ranks=1", "rollout.steps_ahead=1", "algorithm.rollout_correction.type=tis")
    train("name=ahead", *apart, "checkpoint.export_interval=1").check()
    versions = []
    for step in (1, 2, 3):
        rows = pq.read_table(folder / "runs" / "ahead" / "rollouts" / f"step-{step}.parquet").to_pylist()
        (version,) = {row["weight_version"] for row in rows}
        versions.append(version)
        export = folder / "runs" / "ahead" / "export" / f"step-{version - 1}" if version > 1 else folder / "model"
        model = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
        assert max(len(row["turns"]) for row in rows) == 2 * MOST_TURNS - 1
        for row in rows:
            tokens = torch.tensor([row["tokens"]])
            with torch.no_grad():
                logprobs = model(tokens).logits[0, :-1].log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]
            own = torch.tensor(row["sampled"][1:])
            torch.testing.assert_close(torch.tensor(row["rollout_logprobs"])[1:][own], logprobs[own], atol=1e-4, rtol=0)
    assert versions == [1, 1, 2]


def test_evaluations_have_turns_too(folder: Path, whole: dict[int, dict[str, float]]) -> None:
    held_out = ("name=evaluated", "data.validation_files=[held_out.parquet]", "evaluation.temperature=1.0")
    samples = ("evaluation.samples_per_prompt=2", "evaluation.correct_from=17")
    with torchrun(2, "launch/evaluate.py", "turns.yaml", *held_out, *samples, *PLAYED, folder=folder) as command:
        command.finish().check()
    [file] = (folder / "runs" / "evaluated").rglob("*.parquet")
    responses = pq.read_table(file).column("response").to_pylist()
    assert len(responses) == 12
    assert any(re.search(r"user\n\d+: \d+\n", response) for response in responses), "the whole conversation is kept"
    found = json.loads((folder / "runs" / "evaluated" / "evaluation.json").read_text())
    [metrics] = found["metrics"].values()
    assert 0 < metrics["mean@2"]["value"] <= metrics["pass@2"]["value"] and found["unscored_samples"] == 0


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["rollout.multi_turn.function=nowhere.py"], "rollout.multi_turn.function: there is no file nowhere.py"),
        (["rollout.multi_turn.function=always.py"], "never answered: respond returned 7"),
    ],
)
def test_what_cannot_be_is_told_in_one_line(
    overrides: list[str], expected: str, train: Callable[..., Finished]
) -> None:
    refused = train("name=refused", *overrides)
    lines = refused.error_lines()  # of one rank or of both
    assert refused.status and lines and all(expected in line for line in lines), refused.err
    assert not OWN_FRAME.search(refused.err), refused.err
