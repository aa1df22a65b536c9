"""Rows that a run keeps: which of a step, and the table made of what several ranks know of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
import torch

from rlhf_megatron.data.prompts import Prompt
from rlhf_megatron.data.rollout_batch import RolloutBatch, batch_from_rows
from rlhf_megatron.data.row_numbers import numbers_of
from rlhf_megatron.generation.kept_rollouts import chosen_rows, held_table, outputs_table
from rlhf_megatron.generation.score_notes import ScoreNotes
from rlhf_megatron.monitor.kept_files import read_rows
from rlhf_megatron.monitor.kept_rows import OUTPUTS, columns_for_people, digest_of, kept_table, notes_schema
from rlhf_megatron.recipe import load_recipe
from rlhf_megatron.rewards.score import Score
from rlhf_megatron.rollout.engine import Completion

PROMPTS, ANSWERS = [[1, 2], [1, 2], [3]], [[10, 11, 12, 13], [14], [15, 16]]
SAMPLED = [[True, False, False, True], [True], [True, True]]  # the first has two tokens from somebody else


def batch() -> RolloutBatch:
    logprobs = [[-0.5, 0.0, 0.0, -0.25], [-1.0], [-2.0, -3.0]]
    given = {
        "group_id": [0, 0, 1],
        "row_id": [0, 1, 2],
        "sampled": SAMPLED,
        "turn_rewards": [[-0.25, 1.5], None, [0.5]],
    }
    rows = batch_from_rows(PROMPTS, ANSWERS, logprobs, **given)  # type: ignore[arg-type]
    return rows.with_fields(rewards=torch.tensor([1.0, 0.0, 0.5]))


def words(ids: Sequence[int]) -> str:
    return "".join(f"<{token}>" for token in ids)


def test_tables_of_several_ranks_become_one() -> None:
    rows = batch()
    learned = rows.select([0]).with_fields(
        old_logprobs=torch.tensor([0.0, 0, -0.75, 0, 0, -0.25]), advantages=torch.tensor([0.0, 0, 2, 0, 0, 4])
    )
    digest = digest_of([1, 2, 10, 11, 12, 13])
    notes = {"digest": digest, "data_source": "sums", "ground_truth": "7", "reward_rule": 1.0}
    noted = pa.Table.from_pylist([notes], schema=notes_schema(["rule"]))
    held = [held_table(rows.select([2])), held_table(rows.select([0, 1]))]
    table = kept_table(pa.concat_tables(held), outputs_table(learned), noted, 5, words)
    first, second, third = table.to_pylist()
    assert (first["prompt"], first["response"]) == ("<1><2>", "<10><11><12><13>")
    assert first["turns"] == [
        {"sampled": True, "text": "<10>", "reward": -0.25},
        {"sampled": False, "text": "<11><12>", "reward": None},
        {"sampled": True, "text": "<13>", "reward": 1.5},
    ]
    assert first["logprob_differences"] == pytest.approx([0, 0, -0.25, 0, 0, 0])
    assert (first["advantage"], first["sampled_tokens"], first["prompt_tokens"]) == (3.0, 2, 2)
    assert (first["data_source"], first["ground_truth"], first["reward_rule"]) == ("sums", "7", 1.0)
    assert (second["row_id"], second["data_source"], second["trainer_logprobs"], second["advantage"]) == (1,) + (
        None,
    ) * 3
    assert (third["prompt"], third["reward"], third["step"]) == ("<3>", 0.5, 5)
    shown = columns_for_people(table)
    assert shown["response"][1] == "<14>" and "tokens" not in shown and "turns" not in shown
    assert (shown["model_turns"][0], shown["turn_rewards"][0]) == (2, "-0.25, 1.5")


def test_a_right_answer_stays_right_where_the_reward_is_less_by_a_penalty(tmp_path: Path) -> None:
    recipe: Any = load_recipe(Path(__file__).parents[2] / "recipes/qwen32b_dapo.yaml")
    answered: Any = SimpleNamespace(
        prompts=[Prompt(0, "sums", (3,), "7", {})],
        completions=[Completion(0, [15, 16], [-2.0, -3.0], "stop", [1, 1])],
        scores=lambda: [Score(1.0, (1.0,))],
    )
    notes = ScoreNotes(1, recipe.kept_reward_names)
    notes.add(answered)
    row = batch_from_rows([[3]], [[15, 16]], group_id=[0], row_id=[0], rewards=[0.75])
    table = kept_table(held_table(row), OUTPUTS.empty_table(), notes.table([digest_of([3, 15, 16])]), 5, words)
    (tmp_path / "rollouts").mkdir()
    pyarrow.parquet.write_table(table, tmp_path / "rollouts" / "step-5.parquet")
    [kept] = read_rows(tmp_path, "training", 5, recipe.evaluation.correct_from)
    assert (kept.reward, kept.parts, kept.wrong) == (0.75, {"rule": 1.0}, False)


def test_the_latest_outputs_of_a_row_count() -> None:
    rows = batch().select([1])
    outputs = [outputs_table(rows.with_fields(advantages=torch.full((3,), value))) for value in (1.0, 2.0)]
    table = kept_table(held_table(rows), pa.concat_tables(outputs), notes_schema([]).empty_table(), 1, words)
    assert table["advantage"].to_pylist() == [2.0] and table["trainer_logprobs"].to_pylist() == [None]
    none = kept_table(held_table(rows), OUTPUTS.empty_table(), notes_schema([]).empty_table(), 1, words)
    assert none.schema == table.schema


@pytest.mark.parametrize(("most", "rows"), [(1, 2), (2, 2), (4, 2), (5, 5), (99, 6)])
def test_whole_groups_are_chosen(most: int, rows: int) -> None:
    batch = batch_from_rows([[1]] * 6, [[2]] * 6, group_id=[0, 0, 1, 1, 1, 2], row_id=list(range(6)))
    numbers = numbers_of(batch, 0)
    assert int(chosen_rows(numbers, most).sum()) == rows
