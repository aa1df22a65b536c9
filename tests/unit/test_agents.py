"""Agents that ask the endpoint with the real openai client, over an engine whose words are written here."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_megatron.agents.message_parsing import AnswerReader
from rlhf_megatron.agents.program import AgentProgram
from rlhf_megatron.agents.protocol import Question, Refusal
from rlhf_megatron.agents.trajectory import AgentTrajectory, Event, Limits
from rlhf_megatron.data.rollout_batch import RolloutBatch
from rlhf_megatron.data.tokenizer_loading import load_tokenizer
from rlhf_megatron.errors import RolloutError
from rlhf_megatron.generation.agent_turns import AgentTurns
from rlhf_megatron.generation.conversations import conversations_of
from rlhf_megatron.generation.generated_groups import GroupPacker, GroupScoring
from rlhf_megatron.generation.partners import make_partner
from rlhf_megatron.generation.replica import ALONE
from rlhf_megatron.recipe import AgentSection, RewardSection, RLRecipe
from rlhf_megatron.recipe.load import make_recipe
from rlhf_megatron.rewards.answers import Outcome
from rlhf_megatron.rewards.score import Score, Scorer
from rlhf_megatron.rollout.engine import Completion, Request, Sampling
from rlhf_megatron.rollout.response_lengths import ResponseLengths
from rlhf_megatron.rollout.scheduler import GenerationScheduler
from tiny_tokenizer import write_bpe_tokenizer
from unit.test_conversations import END, Scripted, groups_of

# Each row names what its program does; what programs were told goes to a file.
PROGRAMS = """
import asyncio, json, os, time
import openai

def run(base_url, api_key, row):
    told = []
    client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    try:
        return globals()[row["extra_info"]["does"]](client, told, row)
    finally:
        with open(os.path.join(os.path.dirname(__file__), row["extra_info"]["does"] + ".json"), "w") as file:
            json.dump(told, file)

def user(text):
    return {"role": "user", "content": text}

def say(client, told, messages, **more):
    answer = client.chat.completions.create(model="any", messages=messages, **more)
    choice = answer.choices[0]
    told.append([choice.message.content, choice.finish_reason, choice.token_ids, answer.usage.completion_tokens])
    messages.append({"role": "assistant", "content": choice.message.content.strip()})

def plain(client, told, row):
    messages = [*row["prompt"], user("So?")]
    say(client, told, messages)
    messages.append(user("And?"))
    say(client, told, messages, stop=["!"])
    messages[-1]["content"] += "!"  # as smolagents does
    messages.append(user("Well?"))
    say(client, told, messages, max_tokens=2)
    messages.append(user("Oh."))
    say(client, told, messages)
    return 1.5

def rewrites(client, told, row):
    messages = [user("So?")]
    say(client, told, messages)
    messages.append(user("And?"))
    say(client, told, messages)
    say(client, told, messages[:2] + [user("Or?")])  # back to the first answer
    messages = [user("In short.")]
    say(client, told, messages)
    return 0.25

def streams(client, told, row):
    async def both():
        several = openai.AsyncOpenAI(base_url=client.base_url, api_key=client.api_key)
        async def ask(text):
            parts = []
            options = {"include_usage": True}
            stream = await several.chat.completions.create(
                model="any", messages=[user(text)], stream=True, stream_options=options
            )
            async for chunk in stream:
                parts += [choice.delta.content or "" for choice in chunk.choices]
                used = chunk.usage
            told.append(["".join(parts), used.completion_tokens])
        await asyncio.gather(ask("One."), ask("Two."))
    asyncio.run(both())
    return 0

def responds(client, told, row):
    first = client.responses.create(model="any", instructions="Be short.", input="So?")
    told.append([first.output_text, first.status])
    second = client.responses.create(model="any", input="And?", previous_response_id=first.id)
    told.append([second.output_text, second.status])
    history = [user("So?"), *first.output, user("Or?")]  # its own history, as the agents SDK sends it
    events = list(client.responses.create(model="any", instructions="Be short.", input=history, stream=True))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    told.append(["".join(deltas), events[-1].type])
    return None

def refused(client, told, row):
    def fails(call):
        try:
            call()
        except openai.APIStatusError as error:
            told.append([error.status_code, error.code, error.message])
    chat = client.chat.completions.create
    other = openai.OpenAI(base_url=client.base_url, api_key="nobody", max_retries=0).chat.completions.create
    fails(lambda: other(model="any", messages=[user("x")]))
    fails(lambda: chat(model="any", messages=[user("x")], n=2))
    fails(lambda: chat(model="any", messages=[{"role": "user", "content": [{"type": "image_url"}]}]))
    fails(lambda: chat(model="any", messages=[user("x")], response_format={"type": "json_object"}))
    fails(lambda: chat(model="any", messages=[{"role": "nobody", "content": "x"}]))
    fails(lambda: chat(model="any", messages=[user("x " * 500)]))
    told.append([model.id for model in client.models.list()])
    chat(model="any", messages=[user("x")])
    return 3

def endless(client, told, row):
    messages = [user("x")]
    while True:
        say(client, told, messages)
        messages.append(user("more"))

def crashes(client, told, row):
    say(client, told, [user("x")])
    raise KeyError("what is this")

def silent(client, told, row):
    return 1.0

def hurries(client, told, row):
    hasty = client.with_options(timeout=0.3, max_retries=9)
    say(hasty, told, [user("x")])
    return 2.0
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_bpe_tokenizer(tmp_path_factory.mktemp("agents"))
    (path / "programs.py").write_text(PROGRAMS)
    return path


def recipe_of(folder: Path, **agent: Any) -> RLRecipe:
    section = {"function": str(folder / "programs.py"), "max_turns": 5, "timeout_seconds": 120.0, **agent}
    values = {
        "name": "agents",
        "loop": "rl",
        "steps": 1,
        "model": {"path": str(folder), "dtype": "float32"},
        "data": {"train_files": ["none.parquet"], "max_prompt_length": 60},
        "batch": {"prompts_per_step": 1, "responses_per_prompt": 2},
        "actor": {"tokens_per_gpu": 512, "optimizer": {"learning_rate": 1e-4}},
        "rollout": {"max_response_length": 160, "agent": section},
        "reward": {"rule": "none"},
        "evaluation": {"at_start": False, "at_end": False},
    }
    made = make_recipe(values, "test")
    assert isinstance(made, RLRecipe) and made.reward_names == ["agent"]
    return made


@pytest.fixture(scope="module")
def program(folder: Path) -> Iterator[AgentProgram]:
    found = make_partner(recipe_of(folder), leads=True)
    assert isinstance(found, AgentProgram)
    yield found
    found.close()


Played = tuple[list[Completion], dict[int, Score], RolloutBatch, AgentTurns]
Play = Callable[..., Played]


@pytest.fixture
def play(folder: Path, program: AgentProgram) -> Play:
    tokenizer = load_tokenizer(folder)

    def played(lines: dict[str, Sequence[str]], **agent: Any) -> Played:
        """Return the rows of programs, two trajectories of which the first does something."""
        recipe = recipe_of(folder, **agent)
        groups = groups_of(tokenizer, *({"does": does} for does in lines))
        turns = conversations_of(recipe, program, groups, 1, tokenizer, lambda row: row)
        assert isinstance(turns, AgentTurns)
        packer = GroupPacker(ThreadPoolExecutor(1), ALONE, groups, has_branches=recipe.has_branches)
        core = Scripted(tokenizer, list(lines.values()))
        with Scorer(RewardSection(rule="none")) as scorer, turns:
            scoring = GroupScoring(scorer, groups, 1, tokenizer, on_group=packer.begin, conversations=turns)
            requests = [Request(row, group.prompt.token_ids, row, row) for row, group in enumerate(groups)]
            sampling = Sampling(1.0, 1.0, -1, recipe.rollout.max_response_length, tokenizer.stop_token_ids)
            scheduler = GenerationScheduler(core, requests, sampling, 1, ResponseLengths(), environment=turns)
            completions = scheduler.generate(on_completion=scoring.take)
        every = range(len(groups))
        return completions, scoring.results(every), packer.batch(every), turns

    return played


def told(folder: Path, does: str) -> Any:
    return json.loads((folder / f"{does}.json").read_text())


def texts_of(folder: Path, batch: RolloutBatch) -> list[str]:
    tokenizer = load_tokenizer(folder)
    return [tokenizer.decode(row.tolist(), False) for row in batch.tokens.split(batch.lengths.tolist())]


def sampled_of(folder: Path, batch: RolloutBatch) -> list[str]:
    tokenizer, lengths = load_tokenizer(folder), batch.lengths.tolist()
    rows = zip(batch.tokens.split(lengths), batch.response_mask.split(lengths), strict=True)
    return [tokenizer.decode(tokens[mask].tolist(), False) for tokens, mask in rows]


def asked(*texts: str) -> str:
    return "".join(f"<|im_start|>user\n{text}{END}\n" for text in texts) + "<|im_start|>assistant\n"


def test_a_conversation_is_one_row_of_what_was_sampled(folder: Path, play: Play) -> None:
    completions, scores, batch, turns = play({"plain": [" a b ", "yes! no", "five six seven", "end"]})
    first, stopped, cut, last = told(folder, "plain")
    assert [first[:2], stopped[:2], last[:2]] == [[" a b ", "stop"], ["yes", "stop"], ["end", "stop"]]
    assert cut[1] == "length" and cut[3] == 2
    # The stop text ends the turn where it was complete; a turn that ends so, or by its length, is ended for the model.
    (text,) = texts_of(folder, batch)
    half = load_tokenizer(folder).decode(cut[2])
    assert text == (
        f"{asked('Go.', 'So?')} a b {END}\n{asked('And?')}yes!{END}\n"
        f"{asked('Well?')}{half}{END}\n{asked('Oh.')}end{END}"
    )
    assert sampled_of(folder, batch) == [f" a b {END}yes!{half}end{END}"]
    assert batch.rollout_logprobs[batch.response_mask].unique().tolist() == [-1.0]
    heard = [token for each in (first, stopped, cut, last) for token in each[2]]
    assert heard == batch.tokens[batch.response_mask].tolist()
    assert scores[0].value == 1.5 and completions[0].turns == 4
    counts = {name: count for name, count in vars(turns.counts).items() if count}
    assert counts == {"requests": 4, "ended": 1}
    assert [message["content"] for message in turns.messages(completions[0])][-2:] == ["Oh.", "end"]


def test_rewritten_histories_are_rows_of_one_trajectory(folder: Path, play: Play) -> None:
    lines = {"rewrites": ["one", "two", "three", "four"], "silent": []}
    completions, scores, batch, turns = play(lines)
    begin = f"{asked('So?')}one{END}\n"
    assert texts_of(folder, batch)[:3] == [
        f"{begin}{asked('And?')}two{END}",
        f"{begin}{asked('Or?')}three{END}",
        f"{asked('In short.')}four{END}",
    ]
    # What rows share is learned in the first.
    assert sampled_of(folder, batch)[:3] == [f"one{END}two{END}", f"three{END}", f"four{END}"]
    assert batch.trajectory_id is not None and batch.trajectory_id.tolist() == [0, 0, 0, 1]
    assert len(set(batch.row_id.tolist())) == 4 and batch.group_id.tolist() == [0, 0, 0, 1]
    assert scores[0].value == 0.25 and turns.counts.branches == 2
    assert math.isnan(scores[1].value) and turns.counts.failed == 1, "without a turn there is nothing to learn"
    assert [len(each.branches) for each in completions] == [2, 0]
    _, _, batch, _ = play(lines, branches="last")
    assert batch.trajectory_id is None and texts_of(folder, batch)[0] == f"{asked('In short.')}four{END}"


def test_streams_and_requests_at_the_same_time(folder: Path, play: Play) -> None:
    _, _, batch, _ = play({"streams": ["one", "two"]})
    assert sorted(each[0] for each in told(folder, "streams")) == ["one", "two"]
    assert sorted(sampled_of(folder, batch)) == [f"one{END}", f"two{END}"] and batch.rows == 2


def test_the_responses_api_keeps_tokens_too(folder: Path, play: Play) -> None:
    _, scores, batch, turns = play({"responds": [" one", " two", " three"]})
    assert told(folder, "responds") == [[" one", "completed"], [" two", "completed"], [" three", "response.completed"]]
    begin = f"<|im_start|>system\nBe short.{END}\n{asked('So?')} one{END}\n"
    assert texts_of(folder, batch) == [f"{begin}{asked('And?')} two{END}", f"{begin}{asked('Or?')} three{END}"]
    assert math.isnan(scores[0].value), "nothing has given a reward"
    assert turns.counts.failed == 1


def test_bad_requests_get_one_line_and_cost_nothing(folder: Path, play: Play) -> None:
    _, scores, _, turns = play({"refused": ["ok"]})
    *refusals, models = told(folder, "refused")
    assert [each[:2] for each in refusals] == [
        [401, "invalid_api_key"],
        *[[400, "invalid_request"]] * 4,
        [400, "context_length_exceeded"],
    ]
    assert all("\n" not in each[2] for each in refusals) and models == ["policy"]
    assert scores[0].value == 3.0 and turns.counts.requests == 1 and turns.counts.refused == 1


def test_failures_are_left_out_and_want_of_turns_is_none(
    folder: Path, play: Play, capsys: pytest.CaptureFixture[str]
) -> None:
    _, scores, batch, turns = play({"endless": ["a"] * 5, "crashes": ["b"], "hurries": ["c"]})
    assert scores[0].value == 0.0, "a model that needs too many turns has failed, and nothing broke"
    assert math.isnan(scores[1].value) and scores[2].value == 2.0
    assert (turns.counts.refused, turns.counts.failed, turns.counts.ended) == (1, 1, 2)
    error = capsys.readouterr().err
    assert error.count("rollout.agent.function: a trajectory failed and is left out: run raised KeyError") == 1
    assert batch.rows == 3 and torch.isfinite(batch.rollout_logprobs).all()


def test_a_generation_that_ends_early_gives_its_programs_up(folder: Path) -> None:
    tokenizer, future = load_tokenizer(folder), Future[Event]()
    reader = AnswerReader(AgentSection(function="x.py"), tokenizer)
    trajectory = AgentTrajectory(tokenizer, reader, tokenizer.stop_token_ids[-1], Limits(100, 50, 5), seed=1)
    trajectory.expect(Completion(0, [], [], "stop", []), future)
    future.cancel()
    trajectory.end(Outcome("done", 1.0))

    async def late() -> None:
        question = Question([{"role": "user", "content": "x"}])
        with pytest.raises(Refusal, match="this trajectory has ended"):
            await trajectory.ask(question, "digest", is_retry=False)

    asyncio.run(late())


def test_a_program_that_cannot_work_stops_the_start(folder: Path) -> None:
    (folder / "other.py").write_text("def run(url):\n    return 1\n")
    for function, why in (("nowhere.py", "no file"), ("other.py", "must take")):
        with pytest.raises(RolloutError, match=rf"rollout\.agent\.function: .*{why}"):
            make_partner(recipe_of(folder, function=str(folder / function)), leads=True)
