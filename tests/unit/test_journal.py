"""Trajectories that a killed run had begun: which go on, which begin again, and that none is lost or done twice."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from rlhf_megatron.data.prompts import Prompt
from rlhf_megatron.data.tokenizer import Tokenizer
from rlhf_megatron.data.tokenizer_loading import load_tokenizer
from rlhf_megatron.generation.agent_turns import AgentCounts
from rlhf_megatron.generation.conversations import conversations_of
from rlhf_megatron.generation.generated_groups import GroupScoring
from rlhf_megatron.generation.journal import Journal, JournaledCall
from rlhf_megatron.generation.partners import make_partner
from rlhf_megatron.generation.prompt_groups import Group, requests_for
from rlhf_megatron.generation.replica import Replica
from rlhf_megatron.recipe import RecipeError, RewardSection, RLRecipe
from rlhf_megatron.recipe.load import make_recipe
from rlhf_megatron.rewards.score import Scorer
from rlhf_megatron.rollout.engine import Completion, Sampling
from rlhf_megatron.rollout.engine_core import EngineOutput, EngineRequest
from rlhf_megatron.rollout.response_lengths import ResponseLengths
from rlhf_megatron.rollout.scheduler import GenerationScheduler
from rlhf_megatron.topology.team import Team
from tiny_tokenizer import write_bpe_tokenizer

# Writes down what is done to it. Row 3 of every prompt speaks longest.
GAME = """
import json, os
class Environment:
    def reset(self, row):
        self.row, self.said = row, []
        self.note("reset")
        return "A door." if row["extra_info"]["number"] % 2 else None

    def step(self, action):
        self.said.append(action)
        self.note("step")
        return f"heard {self.said}", float(len(self.said)), action == "stop"

    def note(self, what):
        with open(os.path.join(os.path.dirname(__file__), "ledger.jsonl"), "a") as ledger:
            line = [what, self.row["extra_info"]["number"], self.row["attempt"], *self.said]
            ledger.write(json.dumps(line) + "\\n")
"""
SAVED = """
    def state(self):
        return json.dumps(self.said).encode()

    def load(self, row, state):
        self.row, self.said = row, json.loads(state)
        self.note("load")
"""
# Behind the second turn all that was said is one message, which says as often "heard".
CONTEXT = """
def context(messages, ground_truth, extra_info):
    heard = sum(message["content"].count("heard") for message in messages)
    return [{"role": "user", "content": "Go." + " heard" * heard}] if heard == 2 and len(messages) > 1 else None
"""
END = "<|im_end|>"
RESPONSES, TURNS = 2, 4


class Killed(Exception):
    """In place of the signal."""


class Talker:
    """An engine whose rows say "NUMBER of the turn" until their last one, "stop"; it dies after some steps."""

    name, block_size, enable_prefix_caching, max_num_seqs = "talker", 0, False, 100
    prompt_tokens = prefilled_tokens = 0

    def __init__(self, tokenizer: Tokenizer, lives: int) -> None:
        self._tokenizer, self._lives = tokenizer, lives
        self._waiting: list[EngineRequest] = []

    def add_request(self, request: EngineRequest, sampling: Sampling) -> None:
        self._waiting.append(request)

    def step(self) -> list[EngineOutput]:
        if not self._lives:
            raise Killed
        self._lives -= 1
        waiting, self._waiting = self._waiting, []
        return [self._output(request) for request in waiting]

    def _output(self, request: EngineRequest) -> EngineOutput:
        turns = self._tokenizer.decode(request.token_ids, skip_special_tokens=False).count("heard")
        # By the seed, and so by the row alone: the first responses have two turns, the others four.
        line = "stop" if turns == (1 if request.seed % RESPONSES == 0 else TURNS - 1) else f"{turns}"
        tokens = self._tokenizer.encode(line + END)
        return EngineOutput(request.number, tokens, [-0.1 * len(request.token_ids)] * len(tokens), "stop")

    def running(self) -> dict[int, int]:
        return {request.number: 0 for request in self._waiting}

    def free_tokens(self) -> float:
        return math.inf

    def abort_requests(self) -> list[EngineOutput]:
        return []


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def recipe_of(folder: Path, game: str, **turns: Any) -> RLRecipe:
    write_bpe_tokenizer(folder)
    (folder / "game.py").write_text(game)
    values = {
        "name": "games",
        "loop": "rl",
        "steps": 1,
        "model": {"path": str(folder), "dtype": "float32"},
        "data": {"train_files": ["none.parquet"], "max_prompt_length": 60},
        "batch": {"prompts_per_step": 2, "responses_per_prompt": RESPONSES},
        "actor": {"tokens_per_gpu": 256, "optimizer": {"learning_rate": 1e-4}},
        "rollout": {
            "max_response_length": 400,
            "scheduling": "static",  # all answers come before the engine's next step
            "multi_turn": {"environment": str(folder / "game.py"), "timeout_seconds": 30.0, "journal": True, **turns},
        },
        "reward": {"rule": "none"},
        "evaluation": {"at_start": False, "at_end": False},
        "checkpoint": {"save_interval": 1},
    }
    made = make_recipe(values, "test")
    assert isinstance(made, RLRecipe)
    return made


def groups_of(tokenizer: Tokenizer, count: int = 2) -> list[Group]:
    messages = ({"role": "user", "content": "Go."},)
    tokens = tuple(tokenizer.encode_chat(messages))
    return [
        Group(Prompt(row, "games", (*tokens[:-1], tokens[-1]), "", {"number": row}, messages), number=70 + row)
        for row in range(count)
    ]


def play(
    folder: Path,
    recipe: RLRecipe,
    lives: int = 100,
    replica: Replica | None = None,
    engine: type[Talker] = Talker,
    counts: list[Any] | None = None,
) -> tuple[Any, JournaledCall]:
    """Return (completions by row with their scores and messages, the journal) of step 5 of a run in ``folder``.

    ``counts`` gets those of the turns."""
    tokenizer = load_tokenizer(folder)
    replica = replica or Replica([0], 1, 0)
    journal = Journal(folder / "journal", recipe, replica, Team((0,))).open(5, 4, groups_of(tokenizer), RESPONSES)
    groups, partner = journal.groups, make_partner(recipe, leads=True)
    assert partner is not None
    requests = requests_for(groups, RESPONSES, lambda _: 400, lambda row: row)
    conversations = conversations_of(recipe, partner, groups, RESPONSES, tokenizer, lambda row: row, journal)
    assert conversations is not None
    sampling = Sampling(1.0, 1.0, -1, 400, tokenizer.stop_token_ids)
    core = engine(tokenizer, lives)
    counts = [] if counts is None else counts
    counts.append(conversations.counts)
    try:
        with Scorer(RewardSection(rule="none")) as scorer, conversations:
            scoring = GroupScoring(scorer, groups, RESPONSES, tokenizer, conversations=conversations)
            for index, group in enumerate(groups):
                if group.is_whole:
                    scoring.submit_if_whole(index)

            def take(completion: Completion) -> None:
                conversations.end(completion)
                scoring.take(completion)

            lengths = ResponseLengths()
            GenerationScheduler(core, requests, sampling, 4, lengths, environment=conversations).generate(
                on_completion=take
            )
            scores = scoring.results(range(len(groups)))
        rows = {row.row_id: row for index in range(len(groups)) for row in scoring.rows_of(index)}
        return {id_: (rows[id_], scores[id_], conversations.messages(rows[id_])) for id_ in sorted(rows)}, journal
    finally:
        partner.close()


def ledger(folder: Path) -> Counter[tuple[Any, ...]]:
    """Return (what was done, number of the prompt, what had been said) -> how often."""
    lines = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    return Counter((what, number, *said) for what, number, _, *said in lines)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Counter[tuple[Any, ...]]]:
    folder = tmp_path_factory.mktemp("undisturbed")
    rows, journal = play(folder, recipe_of(folder, GAME + SAVED))
    assert (journal.replayed, journal.resumed, journal.restarted) == (0, 0, 0)
    return rows, ledger(folder)


@pytest.mark.parametrize("lives", [0, 1, 2, 3, 4])
def test_a_trajectory_goes_on_where_its_environment_was(
    lives: int, undisturbed: tuple[Any, Counter[tuple[Any, ...]]], tmp_path: Path
) -> None:
    recipe = recipe_of(tmp_path, GAME + SAVED, max_assistant_turns=TURNS)
    if lives < TURNS:
        with pytest.raises(Killed):
            play(tmp_path, recipe, lives)
    else:  # killed after the generation
        play(tmp_path, recipe)
    (last,) = (tmp_path / "journal" / "step-5").iterdir()
    last.write_bytes(last.read_bytes() + b'{"row": [70, 0], "tokens": [1')  # it was just writing
    rows, journal = play(tmp_path, recipe)
    assert rows == undisturbed[0], "tokens, logprobs, versions, rewards, and what a reward function is given"
    whole = {0: 0, 1: 0, 2: 2, 3: 2, 4: 4}[lives]
    assert (journal.replayed, journal.resumed, journal.restarted) == (whole, 4 - whole, 0)
    done = ledger(tmp_path)
    loads = [count for (what, *_), count in done.items() if what == "load"]
    assert sum(loads) == 4 - whole, "each that goes on, once"
    without_loads = Counter({key: count for key, count in done.items() if key[0] != "load"})
    assert without_loads == undisturbed[1], "nothing is done twice"
    assert [path.name for path in (tmp_path / "journal" / "step-5").iterdir()] == ["0-1-0.jsonl"]


def test_one_that_tells_no_state_begins_again(
    undisturbed: tuple[Any, Counter[tuple[Any, ...]]], tmp_path: Path
) -> None:
    recipe = recipe_of(tmp_path, GAME)
    with pytest.raises(Killed):
        play(tmp_path, recipe, 3)
    rows, journal = play(tmp_path, recipe)
    assert rows == undisturbed[0]
    assert (journal.replayed, journal.resumed, journal.restarted) == (2, 0, 2)
    lines = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert Counter(tuple(line[1:3]) for line in lines if line[0] == "reset") == {
        (0, 1): 2,
        (1, 1): 2,
        (0, 2): 1,
        (1, 2): 1,
    }


def test_what_is_of_another_past_is_not_gone_on_with(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, GAME + SAVED)
    with pytest.raises(Killed):
        play(tmp_path, recipe, 2)
    tokenizer, alone = load_tokenizer(tmp_path), Replica([0], 1, 0)
    folder = tmp_path / "journal"

    def begun(step: int, version: int, groups: Sequence[Group], of: RLRecipe = recipe, responses: int = 2) -> int:
        content = {path: path.read_bytes() for path in folder.rglob("*.jsonl")}
        call = Journal(folder, of, alone, Team((0,))).open(step, version, groups, responses)
        call.close()
        for path in list(folder.rglob("*.jsonl")):
            path.unlink()
        for path, text in content.items():
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(text)
        return len(call.rows)

    groups = groups_of(tokenizer)
    assert begun(5, 4, groups) == 4
    assert begun(5, 4, groups, responses=1) == 2 and begun(5, 4, groups[1:]) == 2
    assert begun(5, 3, groups) == 0, "of other weights"
    other = Prompt(0, "games", (1, 2), "", {"number": 0}, ())
    assert begun(5, 4, [Group(other, number=70)]) == 0, "of another prompt"
    assert begun(5, 4, groups, recipe_of(tmp_path, GAME + SAVED, max_assistant_turns=3)) == 0, "of another recipe"
    assert begun(5, 4, groups, recipe_of(tmp_path, GAME + SAVED + "\n")) == 0, "of another environment"
    recipe = recipe_of(tmp_path, GAME + SAVED)
    Journal(folder, recipe, alone, Team((0,))).open(4, 3, groups, 2).close()
    assert not (folder / "step-5").exists(), "a step between is done anew, and so are those behind it"
    Journal(folder, recipe, alone, Team((0,))).forget(4)
    assert not list(folder.iterdir())


@pytest.mark.parametrize(("lives", "whole", "resumed"), [(1, 0, 4), (3, 2, 0), (4, 4, 0)])
def test_a_conversation_that_was_rewritten_begins_again(lives: int, whole: int, resumed: int, tmp_path: Path) -> None:
    folders = tmp_path / "undisturbed", tmp_path / "killed"
    recipes = []
    for folder in folders:
        folder.mkdir()
        (folder / "context.py").write_text(CONTEXT)
        recipes.append(recipe_of(folder, GAME + SAVED, context=str(folder / "context.py")))
    wanted, _ = play(folders[0], recipes[0])
    assert [len(row.branches) for row, _, _ in wanted.values()] == [1, 0, 1, 0]
    if lives < TURNS:
        with pytest.raises(Killed):
            play(folders[1], recipes[1], lives)
    else:
        play(folders[1], recipes[1])
    counts: list[Any] = []
    rows, journal = play(folders[1], recipes[1], counts=counts)
    assert rows == wanted, "tokens of all branches, rewards, and what a reward function is given"
    assert (journal.replayed, journal.resumed, journal.restarted) == (whole, resumed, 4 - whole - resumed)
    assert counts[0].branches == (0 if whole == 4 else 2)


# Two or four answers, the history rewritten behind the second. What was heard is written down at the end.
PROGRAM = """
import json, os, urllib.request

def answer(base_url, api_key, messages):
    body = {"model": "policy", "messages": messages, "max_tokens": 30}
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{base_url}/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]

def run(base_url, api_key, row):
    messages, heard, number = list(row["prompt"]), [], row["extra_info"]["number"]
    for turn in range(2 + 2 * number):
        said = answer(base_url, api_key, messages)
        text = said["message"]["content"]
        heard.append(said["token_ids"])
        messages.append({"role": "assistant", "content": text.strip()})
        if turn == 1:
            messages = [{"role": "user", "content": f"In short: {text}"}]
        elif DIVERGES:
            messages.append({"role": "user", "content": f"attempt {row['attempt']}"})
        else:
            messages.append({"role": "user", "content": f"{turn}"})
    with open(os.path.join(os.path.dirname(__file__), "heard.jsonl"), "a") as file:
        file.write(json.dumps([number, row["attempt"], heard]) + "\\n")
    return sum(map(sum, heard)) % 7 / 4
"""


class Oracle(Talker):
    """Engine that says what follows from all that it is given, the row's seed included."""

    def _output(self, request: EngineRequest) -> EngineOutput:
        digest = hashlib.blake2b(json.dumps([request.seed, list(request.token_ids)]).encode()).hexdigest()
        tokens = self._tokenizer.encode(digest[: 1 + int(digest[-1], 16) % 5] + END)
        return EngineOutput(request.number, tokens, [-int(digest[:4], 16) / 2**16] * len(tokens), "stop")


def agent_recipe_of(folder: Path, diverges: bool = False) -> RLRecipe:
    recipe = recipe_of(folder, GAME)
    (folder / "agent.py").write_text(PROGRAM.replace("DIVERGES", str(diverges)))
    values = recipe.model_dump(mode="json", exclude_unset=True)
    del values["rollout"]["multi_turn"]
    values["rollout"]["agent"] = {"function": str(folder / "agent.py"), "timeout_seconds": 60.0, "journal": True}
    made = make_recipe(values, "test")
    assert isinstance(made, RLRecipe) and made.keeps_journal
    return made


def heard_in(folder: Path) -> list[tuple[int, int, list[list[int]]]]:
    return sorted(json.loads(line) for line in (folder / "heard.jsonl").read_text().splitlines())


def sampled(completion: Completion) -> list[int]:
    """Return the model's tokens in all branches."""
    rows = (*completion.branches, completion)
    marked = ((row.token_ids, row.sampled or [True] * len(row.token_ids)) for row in rows)
    return [token for tokens, marks in marked for token, own in zip(tokens, marks, strict=True) if own]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[Any]]:
    folder = tmp_path_factory.mktemp("unbroken")
    rows, _ = play(folder, agent_recipe_of(folder), engine=Oracle)
    assert [len(row.branches) for row, _, _ in rows.values()] == [0, 0, 1, 1]
    return rows, heard_in(folder)


@pytest.mark.parametrize("lives", [0, 1, 3, 4])
def test_an_agent_begins_again_and_hears_what_it_heard(
    lives: int, unbroken: tuple[Any, list[Any]], tmp_path: Path
) -> None:
    recipe, counts = agent_recipe_of(tmp_path), list[AgentCounts]()
    if lives < 4:
        with pytest.raises(Killed):
            play(tmp_path, recipe, lives, engine=Oracle)
    else:  # killed after the generation
        play(tmp_path, recipe, engine=Oracle)
    rows, _ = play(tmp_path, recipe, engine=Oracle, counts=counts)
    assert rows == unbroken[0], "tokens, logprobs, versions, branches, rewards, messages"
    assert [[number, heard] for number, _, heard in heard_in(tmp_path)] == [
        [number, heard] for number, _, heard in unbroken[1]
    ], "no program that had ended has run again"
    whole = {0: 0, 1: 0, 3: 2, 4: 4}[lives]
    begun = {0: (0, 0, 4), 1: (0, 4, 0), 3: (2, 2, 0), 4: (4, 0, 0)}[lives]
    assert (counts[0].replayed, counts[0].resumed, counts[0].restarted) == begun
    assert counts[0].recalled == {0: 0, 1: 4, 3: 6, 4: 0}[lives] and counts[0].diverged == 0
    assert sum(attempt == 2 for _, attempt, _ in heard_in(tmp_path)) == 4 - whole
    again = list[AgentCounts]()
    assert play(tmp_path, recipe, engine=Oracle, counts=again)[0] == rows and again[0].replayed == 4


def test_an_agent_that_asks_otherwise_than_before_is_answered_anew_and_counted(tmp_path: Path) -> None:
    recipe, counts = agent_recipe_of(tmp_path, diverges=True), list[AgentCounts]()
    with pytest.raises(Killed):
        play(tmp_path, recipe, 3, engine=Oracle)
    rows, _ = play(tmp_path, recipe, engine=Oracle, counts=counts)
    # The third answer was to what only the first attempt asks.
    assert (counts[0].resumed, counts[0].recalled, counts[0].diverged) == (2, 2, 2)
    heard = [[token for answer in said for token in answer] for _, attempt, said in heard_in(tmp_path) if attempt == 2]
    assert sorted(sampled(rows[row_id][0]) for row_id in (2, 3)) == sorted(heard)
    assert all(each[0].is_whole for each in rows.values())


def test_a_recipe_that_could_not_keep_its_promise_is_refused(tmp_path: Path) -> None:
    values = recipe_of(tmp_path, GAME).model_dump(mode="json", exclude_unset=True)
    with pytest.raises(RecipeError, match=r"journal: without checkpoint\.save_interval a killed run begins anew"):
        make_recipe(values | {"checkpoint": {}}, "test")
    with pytest.raises(RecipeError, match="with deterministic a killed run repeats its step"):
        make_recipe(values | {"deterministic": True}, "test")
    del values["rollout"]["multi_turn"]["journal"]
    static = make_recipe(values, "test")
    assert isinstance(static, RLRecipe) and not static.keeps_journal, "it repeats the step bit-for-bit"
    queue = make_recipe(values | {"rollout": values["rollout"] | {"scheduling": "queue"}}, "test")
    assert isinstance(queue, RLRecipe) and queue.keeps_journal
