"""From an environment in its processes to the rows of a step, over an engine whose words are written here."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from rlhf_megatron.data.prompts import Prompt
from rlhf_megatron.data.rollout_batch import RolloutBatch
from rlhf_megatron.data.tokenizer import Tokenizer
from rlhf_megatron.data.tokenizer_loading import load_tokenizer
from rlhf_megatron.generation.conversations import Conversations, conversations_of
from rlhf_megatron.generation.generated_groups import GroupPacker, GroupScoring
from rlhf_megatron.generation.partners import Partner, make_partner
from rlhf_megatron.generation.prompt_groups import Group
from rlhf_megatron.generation.replica import ALONE
from rlhf_megatron.recipe import RewardSection, RLRecipe
from rlhf_megatron.recipe.load import make_recipe
from rlhf_megatron.rewards.score import Scorer
from rlhf_megatron.rollout.engine import Completion, Request, Sampling
from rlhf_megatron.rollout.engine_core import EngineOutput, EngineRequest
from rlhf_megatron.rollout.response_lengths import ResponseLengths
from rlhf_megatron.rollout.scheduler import GenerationScheduler
from tiny_tokenizer import write_bpe_tokenizer

# The row says what the model is shown; it is paid the characters so far, and 100 where it ends.
ENVIRONMENT = """
import os
class Environment:
    def reset(self, row):
        if row["extra_info"].get("fails"):
            raise KeyError("no game")
        self.said = ""
        return row["extra_info"].get("shown")

    def step(self, action):
        if action == "crash":
            os._exit(1)
        self.said += action
        return f"heard {self.said}", len(self.said), action == "stop"

    def score(self, ending):
        return {"done": 100, "turns": 200, "length": 300}[ending]
"""
# Long conversations are cut to a summary and the last turn with its answer.
CONTEXT = """
async def context(messages, ground_truth, extra_info):
    if extra_info.get("breaks"):
        raise KeyError("no summary")
    summary = {"role": "user", "content": f"{len(messages)} before." * extra_info.get("times", 1)}
    return [messages[0], summary, *messages[-2:]] if len(messages) > 4 else None
"""
END = "<|im_end|>"


class Scripted:
    """An engine that says each row's lines, one in a turn; what is longer than allowed is cut."""

    name, block_size, enable_prefix_caching, max_num_seqs = "scripted", 0, False, 100
    prompt_tokens = prefilled_tokens = 0

    def __init__(self, tokenizer: Tokenizer, lines: Sequence[Sequence[str]]) -> None:
        self._tokenizer, self._lines = tokenizer, [list(of_row) for of_row in lines]
        self._waiting: list[EngineRequest] = []
        self.asked: list[str] = []

    def add_request(self, request: EngineRequest, sampling: Sampling) -> None:
        self._waiting.append(request)
        self.asked.append(self._tokenizer.decode(request.token_ids, skip_special_tokens=False))

    def step(self) -> list[EngineOutput]:
        waiting, self._waiting = self._waiting, []
        return [self._output(request) for request in waiting]

    def _output(self, request: EngineRequest) -> EngineOutput:
        line = self._lines[request.number].pop(0)
        tokens = self._tokenizer.encode(line + END)
        kept = tokens[: request.max_tokens]
        return EngineOutput(request.number, kept, [-1.0] * len(kept), "stop" if kept == tokens else "length")

    def running(self) -> dict[int, int]:
        return {request.number: 0 for request in self._waiting}

    def free_tokens(self) -> float:
        return math.inf

    def abort_requests(self) -> list[EngineOutput]:
        return []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_bpe_tokenizer(tmp_path_factory.mktemp("conversations"))
    (path / "game.py").write_text(ENVIRONMENT)
    return path


@pytest.fixture(scope="module")
def recipe(folder: Path) -> RLRecipe:
    return recipe_of(folder, max_assistant_turns=2)


def recipe_of(folder: Path, **more: object) -> RLRecipe:
    turns = {"environment": str(folder / "game.py"), "timeout_seconds": 30.0, **more}
    values = {
        "name": "games",
        "loop": "rl",
        "steps": 1,
        "model": {"path": str(folder), "dtype": "float32"},
        "data": {"train_files": ["none.parquet"], "max_prompt_length": 60},
        "batch": {"prompts_per_step": 1, "responses_per_prompt": 2},
        "actor": {"tokens_per_gpu": 256, "optimizer": {"learning_rate": 1e-4}},
        "rollout": {"max_response_length": 80, "scheduling": "static", "multi_turn": turns},
        "reward": {"rule": "none"},
        "evaluation": {"at_start": False, "at_end": False},
    }
    made = make_recipe(values, "test")
    assert isinstance(made, RLRecipe) and made.reward_names == ["environment"]
    return made


@pytest.fixture(scope="module")
def partner(recipe: RLRecipe) -> Iterator[Partner]:
    found = make_partner(recipe, leads=True)
    assert found is not None and make_partner(recipe, leads=False) is None
    yield found
    found.close()


def groups_of(tokenizer: Tokenizer, *infos: dict[str, object]) -> list[Group]:
    messages = ({"role": "user", "content": "Go."},)
    tokens = tuple(tokenizer.encode_chat(messages))
    return [Group(Prompt(row, "games", tokens, "", dict(info), messages)) for row, info in enumerate(infos)]


def played(
    recipe: RLRecipe, partner: Partner, tokenizer: Tokenizer, groups: Sequence[Group], core: Scripted
) -> tuple[list[Completion], GroupScoring, GroupPacker, Conversations]:
    conversations = conversations_of(recipe, partner, groups, 2, tokenizer, lambda row: row)
    assert conversations is not None
    packer = GroupPacker(ThreadPoolExecutor(1), ALONE, groups, has_turn_rewards=True, has_branches=recipe.has_branches)
    with Scorer(RewardSection(rule="none")) as scorer, conversations:
        scoring = GroupScoring(scorer, groups, 2, tokenizer, on_group=packer.begin, conversations=conversations)
        requests = [Request(row, groups[row // 2].prompt.token_ids, row, row // 2) for row in range(2 * len(groups))]
        sampling = Sampling(1.0, 1.0, -1, recipe.rollout.max_response_length, tokenizer.stop_token_ids)
        scheduler = GenerationScheduler(core, requests, sampling, 1, ResponseLengths(), environment=conversations)
        completions = scheduler.generate(on_completion=scoring.take)
    return completions, scoring, packer, conversations


def test_rewards_of_turns_and_observations_reach_the_rows(recipe: RLRecipe, partner: Partner, folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    groups = groups_of(tokenizer, {}, {"shown": "A door."})
    core = Scripted(tokenizer, [["ab", "stop"], ["abc", "de"], ["stop"], ["x", "y" * 99]])
    _, scoring, packer, conversations = played(recipe, partner, tokenizer, groups, core)
    scores = scoring.results([0, 1])
    rewards = {0: [2.0, 106.0], 1: [3.0, 205.0], 2: [104.0], 3: [1.0, 300.0]}
    assert {row: score.value for row, score in scores.items()} == {row: sum(of) for row, of in rewards.items()}
    assert all(score.parts == (score.value,) and not score.failed for score in scores.values())
    batch = packer.batch([0, 1])
    assert batch.turn_rewards is not None and batch.truncated.tolist() == [False, False, False, True]
    for row, part in enumerate(batch.turn_rewards.split(batch.lengths.tolist())):
        assert part[part != 0].tolist() == rewards[row]
    texts = [tokenizer.decode(row.tolist(), False) for row in batch.tokens.split(batch.lengths.tolist())]
    begin = f"<|im_start|>user\nGo.{END}\n"
    shown, header = f"<|im_start|>user\nA door.{END}\n", "<|im_start|>assistant\n"
    heard = f"{END}\n<|im_start|>user\nheard ab{END}\n"
    assert texts[0] == f"{begin}{header}ab{heard}{header}stop{END}"
    assert texts[2] == f"{begin}{shown}{header}stop{END}" and texts[3].startswith(f"{begin}{shown}{header}x{END}\n")
    assert (conversations.counts.answers, conversations.counts.ended, conversations.counts.failed) == (3, 2, 0)
    sampled = [tokenizer.decode(batch.tokens[batch.response_mask].tolist(), False)]
    assert sampled[0].startswith(f"ab{END}stop{END}abc{END}de{END}stop{END}x{END}yyy")


def test_what_fails_is_left_out_and_the_others_stay(
    recipe: RLRecipe, partner: Partner, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = load_tokenizer(folder)
    groups = groups_of(tokenizer, {"fails": True}, {"shown": "A door. " * 60}, {})
    core = Scripted(tokenizer, [[], [], [], [], ["crash"], ["stop"]])
    completions, scoring, packer, conversations = played(recipe, partner, tokenizer, groups, core)
    scores = scoring.results([0, 1, 2])
    assert [math.isnan(scores[row].value) for row in range(6)] == [True] * 5 + [False]
    assert scores[4].failed and scores[5].value == 104.0
    assert (
        conversations.counts.failed == 5
        and [len(each.token_ids) > 0 for each in completions] == [False] * 4 + [True] * 2
    )
    batch = packer.batch([0, 1, 2])
    assert batch.response_lengths[:4].tolist() == [0] * 4 and torch.isfinite(batch.turn_rewards).all()
    warning = capsys.readouterr().err
    assert warning.count("warning: rollout.multi_turn.environment: a trajectory failed and is left out: ") == 1


def test_a_conversation_that_is_rewritten_goes_on_in_another_row(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "context.py").write_text(CONTEXT)
    recipe = recipe_of(folder, context=str(folder / "context.py"), max_assistant_turns=4)
    partner = make_partner(recipe, leads=True)
    assert isinstance(partner, Partner)
    tokenizer = load_tokenizer(folder)
    groups = groups_of(tokenizer, {}, {"breaks": True}, {"times": 30})
    lines = [["a", "b", "c", "d"], ["ab", "stop"], ["stop"], ["a"], ["stop"], ["a", "b"]]
    completions, scoring, packer, conversations = played(recipe, partner, tokenizer, groups, Scripted(tokenizer, lines))
    partner.close()
    scores = scoring.results([0, 1, 2])
    # 1 + 2 + 3 for what was said in the first three turns, 4 + 200 for the last.
    assert [scores[row].value for row in (0, 1, 2, 4)] == [210.0, 2.0 + 106.0, 104.0, 104.0]
    assert math.isnan(scores[3].value) and math.isnan(scores[5].value), "it raises; it returns too much"
    assert "context raised KeyError" in capsys.readouterr().err
    assert conversations.counts.branches == 2 and conversations.counts.failed == 2
    batch = packer.batch([0])
    texts = [tokenizer.decode(row.tolist(), False) for row in batch.tokens.split(batch.lengths.tolist())]
    user, said = f"<|im_start|>user\n{{}}{END}\n", f"<|im_start|>assistant\n{{}}{END}"
    begin, header = user.format("Go."), "<|im_start|>assistant\n"

    def told(before: int, last: str, heard: str) -> str:
        parts = (user.format(f"{before} before."), f"{said.format(last)}\n", user.format(f"heard {heard}"))
        return begin + "".join(parts)

    assert texts == [
        f"{begin}{said.format('a')}\n{user.format('heard a')}{said.format('b')}",
        f"{told(5, 'b', 'ab')}{said.format('c')}",
        f"{told(6, 'c', 'abc')}{said.format('d')}",
        f"{begin}{said.format('ab')}\n{user.format('heard ab')}{said.format('stop')}",
    ]
    sampled = [row[mask].tolist() for row, mask in rows_of(batch)]
    assert [tokenizer.decode(row, False) for row in sampled] == [
        f"a{END}b{END}", f"c{END}", f"d{END}", f"ab{END}stop{END}"
    ], "each token that was sampled once, and header and rewritten turns not"  # fmt: skip
    assert header in texts[1] and batch.trajectory_id is not None
    assert batch.trajectory_id.tolist() == [0, 0, 0, 1] and len(set(batch.row_id.tolist())) == 4
    whole = ["a", "heard a", "b", "heard ab", "c", "heard abc", "d"]
    assert [message["content"] for message in conversations.messages(completions[0])] == whole


def rows_of(batch: RolloutBatch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    lengths = batch.lengths.tolist()
    return list(zip(batch.tokens.split(lengths), batch.response_mask.split(lengths), strict=True))
