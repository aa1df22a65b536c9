"""Looks at data files before GPU time is spent on them: their columns, the lengths of their prompts, and whether the
reward can tell a right answer from junk.

Here: the findings and their tables. Not here: the command line (tools/prepare_data.py check).
"""

from __future__ import annotations

import dataclasses
import random
from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import numpy
from rich.table import Table

from rlhf_megatron.data.chat_template import in_parts
from rlhf_megatron.data.column_values import (
    parse_data_source,
    parse_extra_info,
    parse_ground_truth,
    parse_messages,
    with_system_prompt,
)
from rlhf_megatron.data.parquet import RowLocation
from rlhf_megatron.data.prompts import CHARACTERS_PER_TOKEN, PART_CHARACTERS, longest_text, prompt_key
from rlhf_megatron.data.rows import ParquetRows
from rlhf_megatron.data.tokenizer import Tokenizer
from rlhf_megatron.errors import DataError
from rlhf_megatron.recipe import RewardSection
from rlhf_megatron.rewards.gsm8k import parse_number
from rlhf_megatron.rewards.rules import RULES, ScoreItem, rule_of
from rlhf_megatron.rewards.score import RewardError, Score, Scorer

COLUMNS = ("data_source", "prompt", "reward_model")
SHOWN_PROBLEMS = 10
# A reward is taken for sound if the right answer beats all junk in so many of the rows that were tried.
LEAST_TOLD_APART = 0.9
# Rows on which the form of a right response is found out for a function, which may want any.
ROWS_FOR_FORM = 20
# Responses: the ground truth, and junk: no text, a wrong number, the truth of another row.
KINDS = TRUTH, EMPTY, NUMBER, OTHER = "truth", "empty", "number", "other"


@dataclass(frozen=True)
class RewardFinding:
    """The reward of one data source on sampled rows.

    Attributes:
        form: what a right response was taken to look like, with {} for the ground truth.
        rows: rows that were tried.
        means: mean score of the ground truth and of each kind of junk.
        told_apart: fraction of the rows whose ground truth scores higher than all junk; 0 where none was tried.
        timed_out: samples that ran out of time.
        problem: why rows could not be scored, in one line; "" where they could.
    """

    form: str = ""
    rows: int = 0
    means: dict[str, float] = field(default_factory=dict)
    told_apart: float = 0.0
    timed_out: int = 0
    problem: str = ""


@dataclass
class Findings:
    """All that is known of some files.

    Attributes:
        rows: of each data source.
        bad_rows: rows with a column that cannot be used.
        problems: the first of them, each with file, row and column.
        repeated: rows with the prompt of a row before them.
        lengths: min, median, p95 and max of the prompts in tokens; empty without a tokenizer.
        too_long: rows over the limit that was asked about; None without one.
        rewards: by data source.
    """

    rows: dict[str, int] = field(default_factory=dict)
    bad_rows: int = 0
    problems: list[str] = field(default_factory=list)
    repeated: int = 0
    lengths: dict[str, int] = field(default_factory=dict)
    too_long: int | None = None
    rewards: dict[str, RewardFinding] = field(default_factory=dict)

    def faults(self) -> list[str]:
        """Return what makes the files unfit for training, in one line each; nothing if they are fit."""
        total = sum(self.rows.values())
        faults = [f"{self.bad_rows} rows cannot be read"] if self.bad_rows else []
        if self.too_long is not None and total and self.too_long >= total:
            faults.append("every prompt is too long")
        for source, finding in self.rewards.items():
            if finding.problem:
                faults.append(f"{source}: {finding.problem}")
            elif not finding.rows:
                faults.append(f"{source}: no row has a ground truth to try")
            elif finding.told_apart < LEAST_TOLD_APART:
                share = f"{finding.told_apart:.0%} of {finding.rows} rows"
                faults.append(f"{source}: the reward tells the right answer from junk in {share} only")
        return faults

    def as_json(self) -> dict[str, Any]:
        """Return everything as plain JSON values, with the verdict."""
        return {**dataclasses.asdict(self), "faults": self.faults(), "fit": not self.faults()}


def check_files(
    files: Sequence[str | Path],
    reward: RewardSection,
    tokenizer: Tokenizer | None = None,
    max_prompt_length: int | None = None,
    sample: int = 100,
    seed: int = 1,
    system_prompt: str | None = None,
    images: Literal["refuse", "drop"] = "refuse",
) -> Findings:
    """Read every row of some files once, and try the reward on a sample of them.

    Args:
        files: parquet files with verl's columns.
        reward: scores the samples.
        tokenizer: with one, prompts are measured, chat template included.
        max_prompt_length: in tokens; longer prompts are counted.
        sample: rows of each data source that the reward is tried on.
        seed: chooses them.
        system_prompt: as in the recipe's data section.
        images: as there.

    Raises:
        DataError: a file cannot be read, lacks a column, or has images.
        RewardError: the reward's function cannot be loaded.
    """
    findings = Findings()
    source = ParquetRows(files, COLUMNS, ["extra_info"])
    if images == "refuse":
        source.refuse_media()
    draw = random.Random(seed)
    chosen: dict[str, list[_Row]] = defaultdict(list)
    lengths = array("i")
    seen: set[int] = set()
    for first, rows in source.scan([*COLUMNS, "extra_info"]):
        texts: list[str] = []
        for offset, values in enumerate(rows):
            try:
                row, key, text = _read(
                    values, source.location(first + offset), first + offset, tokenizer, system_prompt
                )
            except DataError as error:
                findings.bad_rows += 1
                if len(findings.problems) < SHOWN_PROBLEMS:
                    findings.problems.append(str(error))
                continue
            texts.append(text)
            findings.repeated += key in seen
            seen.add(key)
            count = findings.rows[row.data_source] = findings.rows.get(row.data_source, 0) + 1
            # Reservoir sampling: every row of a data source has the same chance, whatever its place.
            if count <= sample:
                chosen[row.data_source].append(row)
            elif (slot := draw.randrange(count)) < sample:
                chosen[row.data_source][slot] = row
        if tokenizer is not None:
            lengths.extend(_lengths(texts, tokenizer, max_prompt_length))
    findings.lengths = _distribution(lengths)
    if lengths and max_prompt_length is not None:
        findings.too_long = sum(length > max_prompt_length for length in lengths)
    with Scorer(reward) as scorer:
        findings.rewards = {name: _try_reward(scorer, reward, chosen[name], draw) for name in chosen}
    return findings


def _lengths(texts: Sequence[str], tokenizer: Tokenizer, limit: int | None) -> Iterator[int]:
    """Yield how many tokens texts have; of one that is too long to be tokenized, the fewest that it can have."""
    for part in in_parts(texts, len, PART_CHARACTERS):
        short = [text if len(text) <= longest_text(limit) else "" for text in part]
        for text, token_ids in zip(part, tokenizer.encode_many(short), strict=True):
            yield len(token_ids) if token_ids or not text else len(text) // CHARACTERS_PER_TOKEN


@dataclass(frozen=True)
class _Row:
    """One row as the reward sees it."""

    location: RowLocation
    number: int
    data_source: str
    truth: str
    extra_info: dict[str, Any]

    def item(self, response: str) -> ScoreItem:
        # All responses count as equally long: they are not a model's.
        return ScoreItem(self.data_source, response, self.truth, self.extra_info, self.number, tokens=0)


def _read(
    values: dict[str, Any], location: RowLocation, number: int, tokenizer: Tokenizer | None, system_prompt: str | None
) -> tuple[_Row, int, str]:
    """Return a row, its prompt's key, and the prompt as the model sees it ("" without a tokenizer); raises DataError
    for a fault."""
    messages = parse_messages(values.get("prompt"), location)
    row = _Row(
        location,
        number,
        parse_data_source(values.get("data_source"), location),
        parse_ground_truth(values.get("reward_model"), location),
        parse_extra_info(values.get("extra_info"), location),
    )
    key = prompt_key(messages)
    if tokenizer is None:
        return row, key, ""
    try:
        return row, key, tokenizer.render_chat(with_system_prompt(messages, system_prompt))
    except DataError as error:
        raise location.error("prompt", str(error)) from error


def _distribution(lengths: array[int]) -> dict[str, int]:
    """Return nearest-rank quantiles; nothing of nothing."""
    if not lengths:
        return {}
    ordered = numpy.sort(numpy.asarray(lengths))
    shares = {"min": 0.0, "median": 0.5, "p95": 0.95, "max": 1.0}
    return {name: int(ordered[round(share * (len(ordered) - 1))]) for name, share in shares.items()}


def _try_reward(scorer: Scorer, reward: RewardSection, rows: Sequence[_Row], draw: random.Random) -> RewardFinding:
    """Score the ground truth and junk of rows of one data source."""
    rows = [row for row in rows if row.truth.strip()]
    if not rows:
        return RewardFinding()
    try:
        form = _form(scorer, reward, rows)
        responses = [_responses(row, rows, form, draw) for row in rows]
        scored = _score(scorer, rows, [list(texts.values()) for texts in responses])
    except RewardError as error:
        return RewardFinding(problem=str(error))
    values: dict[str, list[float]] = defaultdict(list)
    told_apart = 0
    for texts, scores in zip(responses, scored, strict=True):
        truth, *junk = (score.value for score in scores)
        told_apart += truth > max(junk)
        for kind, score in zip(texts, scores, strict=True):
            values[kind].append(score.value)
    timed_out = sum(score.timed_out for scores in scored for score in scores)
    means = {kind: fmean(of_kind) for kind, of_kind in values.items()}
    return RewardFinding(form, len(rows), means, told_apart / len(rows), timed_out)


def _score(scorer: Scorer, rows: Sequence[_Row], responses: Sequence[Sequence[str]]) -> list[list[Score]]:
    """Return the scores of several responses to each row; a RewardError names the row's file."""
    pending = [scorer.submit([row.item(text) for text in texts]) for row, texts in zip(rows, responses, strict=True)]
    scores = []
    for row, scoring in zip(rows, pending, strict=True):
        try:
            scores.append(scoring.result())
        except RewardError as error:
            raise RewardError(f"{row.location.file}, row {row.location.row}: {error}") from error
    return scores


def _form(scorer: Scorer, reward: RewardSection, rows: Sequence[_Row]) -> str:
    """Return what a right response looks like: as the rule asks, or whatever scores best with a reward of one's own."""
    ruled = reward.function is None and reward.service is None and not reward.parts
    name = reward.rule if reward.rule != "data_source" else rule_of(rows[0].data_source)
    known = RULES[name].response if ruled and name in RULES else None
    if known is not None:
        return known
    forms = dict.fromkeys(["{}", *(rule.response for rule in RULES.values() if rule.response)])
    tried = rows[:ROWS_FOR_FORM]
    scored = _score(scorer, tried, [[form.format(row.truth) for form in forms] for row in tried])
    means = [fmean(score.value for score in of_form) for of_form in zip(*scored, strict=True)]
    return max(zip(means, forms, strict=True), key=lambda pair: pair[0])[1]


def _responses(row: _Row, rows: Sequence[_Row], form: str, draw: random.Random) -> dict[str, str]:
    """Return a response with the ground truth, and junk of each kind; junk is never the truth by chance."""
    number = parse_number(row.truth)
    responses = {TRUTH: form.format(row.truth), EMPTY: "", NUMBER: form.format(number + 1 if number is not None else 0)}
    others = [other.truth for other in rows if other.truth.strip() != row.truth.strip()]
    if others:
        responses[OTHER] = form.format(draw.choice(others))
    return responses


def tables(findings: Findings) -> list[Table]:
    """Return what ``check`` shows: rows and lengths, and what the reward says of each data source."""
    rows = Table(title="rows", show_header=False)
    for source, count in findings.rows.items():
        rows.add_row(source, str(count))
    rows.add_row("cannot be read", str(findings.bad_rows))
    rows.add_row("prompts seen before", str(findings.repeated))
    if findings.lengths:
        rows.add_row("prompt tokens", ", ".join(f"{name} {length}" for name, length in findings.lengths.items()))
    if findings.too_long is not None:
        rows.add_row("prompts too long", str(findings.too_long))
    scores = Table(title="mean score of the right answer and of junk")
    scores.add_column("source", no_wrap=True)
    for heading in ("rows", *KINDS, "told apart", "late"):
        scores.add_column(heading, justify="right")
    for source, finding in findings.rewards.items():
        means = [f"{finding.means[kind]:.3f}" if kind in finding.means else "-" for kind in KINDS]
        scores.add_row(source, str(finding.rows), *means, f"{finding.told_apart:.0%}", str(finding.timed_out))
    return [rows, scores]
