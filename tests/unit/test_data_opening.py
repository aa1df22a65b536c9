"""rlhf_megatron.data.opening: what is checked before a run starts, and what is held out of the training rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from rlhf_megatron.data.epochs import planned_in_steps
from rlhf_megatron.data.opening import open_data, open_validation
from rlhf_megatron.data.prompts import Prompt, prompt_key
from rlhf_megatron.data.tokenizer import Tokenizer
from rlhf_megatron.data.tokenizer_loading import load_tokenizer
from rlhf_megatron.errors import DataError
from rlhf_megatron.recipe import DataSection, load_recipe
from tiny_tokenizer import write_bpe_tokenizer

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_bpe_tokenizer(tmp_path_factory.mktemp("bpe")))


def write(path: Path, questions: list[str]) -> str:
    table = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": question}] if question else [],
            "reward_model": {"style": "rule", "ground_truth": str(row)},
        }
        for row, question in enumerate(questions)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), path)
    return str(path)


def section(**values: Any) -> DataSection:
    return DataSection.model_validate({"max_prompt_length": 40} | values)


def asked(prompts: list[Prompt] | None) -> list[str]:
    return [prompt.messages[-1]["content"] for prompt in prompts or []]


QUESTIONS = [f"What is {number} + 1?" for number in range(200)]


def test_all_rows_are_checked_and_what_is_left_out_or_shared_is_told(tokenizer: Tokenizer, tmp_path: Path) -> None:
    train = write(tmp_path / "train.parquet", [*QUESTIONS[:20], "long " * 60])
    held_out = write(tmp_path / "held_out.parquet", [*QUESTIONS[18:25], "long " * 60, "long " * 50])
    data = open_data(section(train_files=[train], validation_files=[held_out]), tokenizer, seed=1)
    assert data.notes == [
        "1 of 21 training rows are left out: longer than data.max_prompt_length=40 tokens",
        "2 of 9 validation rows are left out: longer than data.max_prompt_length=40 tokens",
        "warning: 2 of 7 validation prompts are also in data.train_files; take them out there, or the evaluation says "
        "nothing about new prompts",
    ]
    assert data.rows == 20
    assert asked(data.validation) == QUESTIONS[18:25]
    assert sorted(asked(data.train.next(20))) == sorted(QUESTIONS[:20])
    few = open_data(section(train_files=[train], validation_files=[held_out]), tokenizer, seed=1, max_prompts=3)
    assert asked(few.validation) == QUESTIONS[18:21]
    assert open_data(section(train_files=[train]), tokenizer, seed=1).validation is None


def test_prompts_that_all_rows_have_are_no_leak(tokenizer: Tokenizer, tmp_path: Path) -> None:
    train, held_out = (write(tmp_path / f"{name}.parquet", ["Play."] * 5) for name in ("train", "held_out"))
    assert open_data(section(train_files=[train], validation_files=[held_out]), tokenizer, seed=1).notes == []
    one = write(tmp_path / "one.parquet", ["Play."])
    [note] = open_data(section(train_files=[one], validation_files=[held_out]), tokenizer, seed=1).notes
    assert note.startswith("warning: 5 of 5 validation prompts are also in data.train_files")


def test_bad_rows_stop_a_run_before_it_starts(tokenizer: Tokenizer, tmp_path: Path) -> None:
    bad = write(tmp_path / "bad.parquet", [*QUESTIONS, ""])
    good = write(tmp_path / "good.parquet", QUESTIONS[:5])
    for values in (
        {"train_files": [good, bad]},
        {"train_files": [good], "validation_files": [bad]},
        {"mixture": [{"name": name, "files": [f], "weight": 1} for name, f in (("good", good), ("bad", bad))]},
    ):
        with pytest.raises(DataError, match=r"bad\.parquet, row 200, column prompt: empty"):
            open_data(section(**values), tokenizer, seed=1)
    with pytest.raises(
        DataError, match=r"good\.parquet: all 5 rows are too long; raise data\.max_prompt_length \(now 2"
    ):
        open_data(section(train_files=[good], max_prompt_length=2), tokenizer, seed=1)


def test_of_large_data_only_the_first_rows_are_checked(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlhf_megatron.data.opening.CHECKED_ROWS", 150)
    monkeypatch.setattr("rlhf_megatron.data.opening.SAMPLED_ROWS", 10)
    late = write(tmp_path / "late.parquet", [*QUESTIONS, ""])
    data = open_data(section(train_files=[late], shuffle=False), tokenizer, seed=1)
    [note] = data.notes
    assert note.startswith("201 training rows: the first 10 of each file are checked now")
    early = write(tmp_path / "early.parquet", [*QUESTIONS[:9], "", *QUESTIONS[9:]])
    with pytest.raises(DataError, match=r"early\.parquet, row 9, column prompt: empty"):
        open_data(section(train_files=[early]), tokenizer, seed=1)
    plain = write(tmp_path / "plain.parquet", QUESTIONS)
    with pytest.raises(
        DataError, match=r"=0\.2 of 200 rows: finding all of them takes long; set evaluation\.max_prompts"
    ):
        open_validation(section(train_files=[plain], validation_fraction=0.2), tokenizer)
    found = open_validation(section(train_files=[plain], validation_fraction=0.2), tokenizer, max_prompts=5)
    assert len(found.prompts) == 5


def test_equal_prompts_are_on_one_side_of_the_split(tokenizer: Tokenizer, tmp_path: Path) -> None:
    files = [
        write(tmp_path / "a.parquet", [*QUESTIONS[:150], *QUESTIONS[:50]]),
        write(tmp_path / "b.parquet", [*QUESTIONS[100:], *QUESTIONS[:10]]),
    ]
    split = section(train_files=files, validation_fraction=0.25)
    data = open_data(split, tokenizer, seed=1)
    held_out, rows = asked(data.validation), 310
    trained = asked(data.train.next(rows - len(held_out)))  # an epoch
    everything = [*QUESTIONS[:150], *QUESTIONS[:50], *QUESTIONS[100:], *QUESTIONS[:10]]
    assert sorted(held_out + trained) == sorted(everything)
    assert not set(held_out) & set(trained)
    assert 0.15 < len(set(held_out)) / len(QUESTIONS) < 0.35
    assert data.notes == []

    other_seed = open_data(split, tokenizer, seed=2, max_prompts=20)
    assert asked(other_seed.validation) == held_out[:20], "the same for all seeds"
    smaller = open_validation(section(train_files=files, validation_fraction=0.1), tokenizer)
    assert set(asked(smaller.prompts)) < set(held_out), "a smaller share is a part of a larger one"
    mixture = [{"name": name, "files": [file], "weight": 1} for name, file in zip("ab", files, strict=True)]
    mixed = open_data(section(mixture=mixture, validation_fraction=0.25), tokenizer, seed=1)
    assert sorted(asked(mixed.validation)) == sorted(held_out)
    assert not set(asked(mixed.train.next(600))) & set(held_out)
    for fraction, side in ((1e-9, "held out"), (1 - 1e-9, "not held out")):
        with pytest.raises(DataError, match=rf"none of (310|200) rows is {side} and within the limits"):
            open_data(section(train_files=files, validation_fraction=fraction), tokenizer, seed=1)


def test_keys_tell_roles_and_turns_apart() -> None:
    conversations = [
        [{"role": "user", "content": "ab"}],
        [{"role": "system", "content": "ab"}],
        [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
        [{"role": "user", "content": "ab\ud800"}],
    ]
    assert len({prompt_key(messages) for messages in conversations}) == 4
    assert prompt_key([{"role": "user", "content": "ab", "name": "x"}]) == prompt_key(conversations[0])


def test_a_plan_counts_the_steps_of_epochs_by_the_files(tmp_path: Path) -> None:
    train = write(tmp_path / "train.parquet", QUESTIONS)
    recipe = load_recipe(
        RECIPES / "tiny_grpo.yaml",
        ["steps=0", "epochs=2", "batch={prompts_per_step: 30, responses_per_prompt: 2}", f"data.train_files=[{train}]"],
    )
    assert planned_in_steps(recipe).steps == 14, "of 400 / 30"
    kept = recipe.model_copy(
        update={"data": recipe.data.model_copy(update={"validation_files": [], "validation_fraction": 0.25})}
    )
    assert planned_in_steps(kept).steps == 10
    Path(train).unlink()
    assert planned_in_steps(recipe).steps == 0, "which is said where it matters"
