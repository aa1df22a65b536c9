"""A preflight: every check of a recipe on the ranks that are to run it, put together into one table on rank 0.

The checks of machines, agreement and links stand in runtime/preflight; here are those of tokenizer and rewards, and the
order: each rank looks at what it can see alone, rank 0 compares, and only when all have answered are links measured.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlhf_megatron.data.rows import (
    ParquetRows,
    parse_data_source,
    parse_extra_info,
    parse_ground_truth,
    parse_messages,
    with_system_prompt,
)
from rlhf_megatron.data.tokenizer import recipe_tokenizer
from rlhf_megatron.generation.conversations import TurnFunction
from rlhf_megatron.models.architecture import read_architecture
from rlhf_megatron.monitor.run_folder import RunFolder
from rlhf_megatron.planning.feasibility import check_tokens
from rlhf_megatron.planning.memory import checkpoint_bytes, export_bytes
from rlhf_megatron.planning.model_folders import planned_architectures, planning_folder
from rlhf_megatron.preflight import agreement, links, machine
from rlhf_megatron.preflight.check import (
    Check,
    NoAnswer,
    as_json,
    over_ranks,
    passed,
    print_table,
    run_check,
    within,
)
from rlhf_megatron.preflight.rank_answers import RankAnswers, answers_of_torchrun
from rlhf_megatron.recipe import Recipe, RLRecipe, UserError
from rlhf_megatron.rewards.rules import RULES, ScoreItem, judging_rule
from rlhf_megatron.rewards.score import Scorer
from rlhf_megatron.runtime.ranks import named_ranks
from rlhf_megatron.topology.world import join_world

ROWS = 4  # rows that tokenizer and rewards are tried on
GRACE_SECONDS = 15.0  # beyond a rank's own time limit, before it counts as silent


def preflight(recipe: Recipe, seconds: float, json_file: Path | None = None, attempt: str | None = None) -> bool:
    """Checks ``recipe`` on all ranks; rank 0 shows the table and writes ``json_file``. True where no check failed.

    Every process of torchrun calls it, before or after the world is joined; it joins the world if that is still to be
    done. Each of its two parts (what a rank sees alone, the links) has ``seconds``; a rank that does not answer in time
    is named. ``attempt`` as for ``answers_of_torchrun``. After a failure a thread may still hang in a collective: end
    the process by ``os._exit`` then.
    """
    answers = answers_of_torchrun(attempt)
    answers.give("place", {"host": socket.gethostname(), "node": int(os.environ.get("GROUP_RANK", "0"))})
    answers.give("alone", see_alone(recipe, answers.rank, answers.world, seconds))
    lead = _Lead(recipe, answers, seconds) if answers.rank == 0 else None
    if lead:
        lead.compare()
    nodes = answers.hear("nodes", 2 * (seconds + GRACE_SECONDS))
    if nodes:
        answers.give("links", see_links(nodes, seconds))
    if lead:
        return lead.conclude(json_file)
    return bool(answers.hear("verdict", 2 * (seconds + GRACE_SECONDS)))


# ---- on every rank


def see_alone(recipe: Recipe, rank: int, world: int, seconds: float) -> dict[str, Any]:
    """Runs one rank's own checks: {"facts": ..., "checks": ...}, as JSON values, within ``seconds``."""
    deadline = time.monotonic() + seconds
    checks: list[Check] = []
    local_rank, local_world = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    def run(name: str, work: Callable[[], Check | list[Check]]) -> None:
        checks.extend(run_check(name, deadline - time.monotonic(), work))

    facts: list[agreement.Facts] = []

    def describe() -> list[Check]:
        facts.append(agreement.facts(recipe))
        return []

    run("files", describe)
    run("gpu", lambda: machine.gpu_checks(local_rank))
    if local_rank == 0:  # one of each node speaks for it
        run("rdma", lambda: machine.rdma_check(recipe.slurm.network in ("infiniband", "roce")))
        run("disk", lambda: disk_check(recipe, local_world / world))
    if rank == 0:
        run("tokenizer", lambda: tokenizer_check(recipe))
        run("rewards", lambda: reward_check(recipe))
        run("turns", lambda: turns_check(recipe))
    return {"facts": facts[0] if facts else None, "checks": checks}


def disk_check(recipe: Recipe, share: float) -> Check:
    """Room and speed for the run's checkpoints and exports; ``share``: the part of each that this node writes."""
    section, architectures = recipe.checkpoint, planned_architectures(recipe)
    kept = section.keep_last_k + 1 + (section.keep_best is not None) if section.save_interval else 0
    in_between = (recipe.steps - 1) // section.export_interval if section.export_interval else 0
    return machine.disk_check(
        RunFolder(recipe.run_root, recipe.name).path,
        machine.Files(kept, checkpoint_bytes(recipe, architectures)),
        machine.Files(in_between + section.export_at_end, export_bytes(recipe, architectures)),
        share,
    )


def tokenizer_check(recipe: Recipe) -> Check:
    """Checks that the tokenizer loads and the chat template renders the first rows; raises DataError where not."""
    tokenizer, folder = recipe_tokenizer(recipe), planning_folder(recipe)
    check_tokens(tokenizer, read_architecture(folder), folder)
    rows = ParquetRows(recipe.data.training_files, ["prompt"])
    lengths = []
    for row in range(min(ROWS, len(rows))):
        location = rows.location(row)
        messages = with_system_prompt(parse_messages(rows.read(row)["prompt"], location), recipe.data.system_prompt)
        lengths.append(len(tokenizer.encode(tokenizer.render_chat(messages))))
    seen, limit = f"{len(lengths)} rows of {min(lengths)} to {max(lengths)} tokens", recipe.data.max_prompt_length
    if min(lengths) > limit:
        return Check("tokenizer", "warn", f"{seen}, all beyond {limit}", "raise data.max_prompt_length")
    return Check("tokenizer", "ok", seen)


def reward_check(recipe: Recipe) -> Check:
    """Checks that right answers to a few rows can be scored; raises RewardError where not.

    A rule must also find them better than an empty response; how an answer to a function looks, nobody knows here.
    """
    if not isinstance(recipe, RLRecipe) or recipe.reward.rule == "none":
        seen = "the reward model alone gives them" if isinstance(recipe, RLRecipe) else "this loop has none"
        return Check("rewards", "skipped", seen)
    items = _right_answers(recipe)
    empty = [dataclasses.replace(item, solution="", tokens=0) for item in items]
    with Scorer(recipe.reward) as scorer:
        right, nothing = scorer.score(items), scorer.score(empty)
    seen = f"{len(items)} right answers: {_span(right)}; empty ones: {_span(nothing)}"
    missed = [item for item, high, low in zip(items, right, nothing, strict=True) if not high > low]
    if missed and all(_form(recipe, item) is not None for item in missed):
        seen += f"; row {missed[0].row_id} ({missed[0].data_source}) gains nothing by its right answer"
        return Check("rewards", "warn", seen, "look at this row's reward_model.ground_truth, and at the rule")
    return Check("rewards", "ok", seen)


def turns_check(recipe: Recipe) -> list[Check]:
    """Calls the function between turns, where there is one, on right answers to a few rows.

    Raises RolloutError or DataError where it cannot be loaded, or the chat template does not go on from turns.
    """
    section = recipe.rollout.multi_turn if isinstance(recipe, RLRecipe) else None
    if section is None:
        return []
    tokenizer = recipe_tokenizer(recipe)
    rows = ParquetRows(recipe.data.training_files, ["prompt", "reward_model"], ["extra_info"])
    function = TurnFunction(section)
    try:
        asked = []
        for row in range(min(ROWS, len(rows))):
            values, location = rows.read(row), rows.location(row)
            messages = with_system_prompt(parse_messages(values["prompt"], location), recipe.data.system_prompt)
            truth = parse_ground_truth(values["reward_model"], location)
            said = {"role": "assistant", "content": truth}
            asked.append(function.call([*messages, said], truth, parse_extra_info(values.get("extra_info"), location)))
        outcomes = [future.result() for future in asked]
        heard = [function.messages_of(outcome) for outcome in outcomes]
    finally:
        function.close()
    tokenizer.encode_next_turn([{"role": "user", "content": "x"}])
    for messages in filter(None, heard):
        tokenizer.encode_next_turn(messages)
    failed = [outcome for outcome, answer in zip(outcomes, heard, strict=True) if answer is None]
    seen = f"{len(heard)} right answers: {sum(map(bool, heard))} answered, {heard.count([])} ended"
    if failed:
        why = failed[0].message or failed[0].state
        return [Check("turns", "fail", f"{seen}, {len(failed)} failed: {why}", f"fix {section.function}")]
    return [Check("turns", "ok", seen)]


def _right_answers(recipe: RLRecipe) -> list[ScoreItem]:
    """The first rows with their ground truth as the response, in the form that their rule wants."""
    rows = ParquetRows(recipe.data.training_files, ["data_source", "reward_model"], ["extra_info"])
    items = []
    for row in range(min(ROWS, len(rows))):
        values, location = rows.read(row), rows.location(row)
        truth = parse_ground_truth(values["reward_model"], location)
        extra_info = parse_extra_info(values.get("extra_info"), location)
        if recipe.rollout.multi_turn:
            extra_info |= {"turns": [{"role": "assistant", "content": truth}]}
        item = ScoreItem(parse_data_source(values["data_source"], location), truth, truth, extra_info, row)
        form = _form(recipe, item)
        items.append(dataclasses.replace(item, solution=form.format(truth)) if form else item)
    return items


def _form(recipe: RLRecipe, item: ScoreItem) -> str | None:
    """The answer format of the rule that judges an item; None where no rule does."""
    rule = judging_rule(recipe.reward, item.data_source)
    return RULES[rule].response if rule else None


def _span(scores: Sequence[float]) -> str:
    low, high = min(scores), max(scores)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def see_links(nodes: Sequence[int], seconds: float) -> dict[str, Any]:
    """Measures the links within ``seconds``; else {"at": where this rank stands, "error": ...}.

    Joins the world first if that is still to be done, since that can fail as well.
    """
    stage = ["joining"]

    def work() -> dict[str, Any]:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # each thread has its own
        if not dist.is_initialized():
            join_world(timeout_minutes=2 * seconds / 60)
        return links.measure(nodes, lambda what: stage.__setitem__(0, what))

    try:
        measured: dict[str, Any] = within(seconds, work)
    except NoAnswer:
        return {"at": stage[0]}
    except Exception as error:
        return {"at": stage[0], "error": (str(error).strip().splitlines() or [type(error).__name__])[0]}
    return measured


# ---- on rank 0


class _Lead:
    """Rank 0's part: what all ranks saw, compared and shown."""

    def __init__(self, recipe: Recipe, answers: RankAnswers, seconds: float) -> None:
        self._recipe, self._answers, self._seconds = recipe, answers, seconds
        self._checks: list[Check] = []
        self._hosts: dict[int, str] = {}
        self._nodes: list[int] = []

    def compare(self) -> None:
        """Waits for all ranks, judges what each saw alone, and calls for the measuring of links if all are there."""
        world = self._answers.world
        alone = self._answers.collect("alone", self._seconds + GRACE_SECONDS)
        identities = self._answers.collect("place", 0.0)
        self._hosts = {rank: identity["host"] for rank, identity in identities.items()}
        silent = sorted(set(range(world)) - set(alone))
        if silent:
            seen = f"{named_ranks(silent, self._hosts)} did not answer within {self._seconds + GRACE_SECONDS:g} s"
            self._checks.append(Check("ranks", "fail", seen, "look at these processes and their machines"))
        else:
            self._nodes = [identities[rank]["node"] for rank in range(world)]
            count = len(set(self._nodes))
            self._checks.append(Check("ranks", "ok", f"{world} on {count} {'node' if count == 1 else 'nodes'}"))
        described = {rank: answer["facts"] for rank, answer in alone.items() if answer["facts"]}
        for fact in next(iter(described.values()), {}):
            seen_by = {rank: facts[fact] for rank, facts in described.items()}
            self._checks.append(agreement.agree(fact, seen_by, self._hosts))
        checks = {rank: [Check(*check) for check in answer["checks"]] for rank, answer in alone.items()}
        self._checks += over_ranks(checks, self._hosts)
        self._answers.announce("nodes", self._nodes if world > 1 else [])

    def conclude(self, json_file: Path | None) -> bool:
        """Judges the links, shows and writes everything, and tells the verdict to all."""
        if not self._nodes:
            self._checks.append(Check("links", "skipped", "not all ranks have answered"))
        elif len(self._nodes) == 1:
            self._checks.append(Check("links", "skipped", "one rank has none"))
        else:
            measured = self._answers.collect("links", self._seconds + GRACE_SECONDS)
            expected = self._recipe.cluster.link_gb_per_sec
            self._checks += links.judge(measured, self._nodes, self._hosts, expected)
        verdict = passed(self._checks)
        print_table(self._checks, f"preflight of {self._recipe.name}: {'passed' if verdict else 'failed'}", sys.stdout)
        try:
            self._write(json_file)
        finally:  # not before all is shown: the first rank that ends with a failure has torchrun end all others
            sys.stdout.flush()
            self._answers.announce("verdict", verdict)
        return verdict

    def _write(self, json_file: Path | None) -> None:
        if json_file is None:
            return
        about = {"recipe": self._recipe.name, "hosts": [self._hosts.get(r) for r in range(self._answers.world)]}
        try:
            json_file.write_text(as_json(self._checks, about), encoding="utf-8")
        except OSError as error:
            raise UserError(f"--json {json_file}: {error.strerror}; name a file that can be written") from error
