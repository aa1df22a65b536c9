"""Checks of what a recipe names, on one machine and without its GPUs: packages, data, tokenizer, rewards, room.

A dry run makes them all, and a preflight most of them on rank 0. Not here: machines and links.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_megatron.agents.program import AgentProgram
from rlhf_megatron.data.column_values import (
    parse_data_source,
    parse_extra_info,
    parse_ground_truth,
    parse_messages,
    row_of_users,
    with_system_prompt,
)
from rlhf_megatron.data.own_rows import open_rows
from rlhf_megatron.data.parquet import RowLocation
from rlhf_megatron.data.prompt_columns import RESPONSES, open_columns
from rlhf_megatron.data.prompts import LeftOut, Prompt, PromptDataset
from rlhf_megatron.data.tokenizer import Tokenizer
from rlhf_megatron.data.tokenizer_loading import load_tokenizer, recipe_tokenizer
from rlhf_megatron.errors import UserError
from rlhf_megatron.generation.agent_turns import AgentTurns
from rlhf_megatron.generation.judge_questions import encode_questions
from rlhf_megatron.generation.partners import Trajectory, TurnTools, make_partner, why_failed
from rlhf_megatron.generation.tool_turns import ToolTurns, described, with_tools
from rlhf_megatron.models.architecture import ModelError, read_architecture
from rlhf_megatron.models.hf_files import located_tensors
from rlhf_megatron.monitor.run_folder import RunFolder
from rlhf_megatron.monitor.trackers import check_trackers
from rlhf_megatron.planning.feasibility import check_tokens
from rlhf_megatron.planning.memory import checkpoint_bytes, export_bytes
from rlhf_megatron.planning.model_folders import has_config, planned_architectures, planning_folder
from rlhf_megatron.preflight import machine
from rlhf_megatron.preflight.check import Check, run_check
from rlhf_megatron.recipe import MultiTurnSection, Recipe, RLRecipe
from rlhf_megatron.recipe.drafting import DRAFT
from rlhf_megatron.rewards.rules import RULES, ScoreItem, judging_rule
from rlhf_megatron.rewards.sandbox.probe import probe
from rlhf_megatron.rewards.score import Scorer
from rlhf_megatron.untrusted import shown

ROWS = 4  # rows that tokenizer and rewards are tried on
SECONDS = 120.0  # for each check of a dry run


def file_checks(recipe: Recipe) -> list[Check]:
    """Make all checks, each within SECONDS, whatever the others find.

    No folder is made, and no service asked. What needs the model is left out where that is missing.
    """
    works: dict[str, Callable[[], Check | list[Check]]] = {
        "trackers": lambda: trackers_check(recipe),
        "models": lambda: models_checks(recipe),
        "rows": lambda: data_checks(recipe),
        "rewards": lambda: reward_check(recipe, asks_services=False),
    }
    if has_model(recipe):
        works |= {
            "tokenizer": lambda: tokenizer_check(recipe),
            "judge": lambda: judge_check(recipe),
            "turns": lambda: turns_check(recipe),
            "disk": lambda: room_check(recipe),
        }
    return [check for name, work in works.items() for check in run_check(name, SECONDS, work)]


def has_model(recipe: Recipe) -> bool:
    """Return True if there is a config.json to plan with; where there is none, the plan says so."""
    try:
        planning_folder(recipe)
    except UserError:
        return False
    return True


def trackers_check(recipe: Recipe) -> Check:
    """Check that the package of every tracker is installed; raises MonitorError where not. Starts none."""
    check_trackers(recipe.monitor.trackers)
    return Check("trackers", "ok", ", ".join(recipe.monitor.trackers))


def models_checks(recipe: Recipe) -> list[Check]:
    """Check that the folders of roles with models of their own have a config.json, and warn of weights that are not
    there."""
    folders = {name: section.weights_folder for name, section in recipe.roles.items()}
    if isinstance(recipe, RLRecipe) and recipe.judge:
        folders["judge"] = recipe.judge.path
    own = {name: folder for name, folder in folders.items() if folder not in (None, recipe.model.path)}
    missing = [
        Check("models", "fail", f"{_key(name)}.path: there is no {folder}/config.json", "download the model")
        for name, folder in own.items()
        if not has_config(str(folder))
    ]
    unread = [] if recipe.model.random_weights else _missing_weights({"model": recipe.model.path} | own)
    return [*missing, *unread] or [Check("models", "ok", f"those of {', '.join(['actor', *own])}")]


def _key(role: str) -> str:
    """Return the recipe's section that names a role's folder."""
    return "rollout.speculative" if role == DRAFT else role


def _missing_weights(folders: Mapping[str, str | None]) -> list[Check]:
    """Return a warning for each model, by section, whose weights are not all in its folder: a plan needs none, but a
    run does. Snapshots of the hub are completed at its start."""
    checks = []
    for name, folder in folders.items():
        if folder is None or not has_config(folder) or Path(folder).parent.name == "snapshots":
            continue
        try:
            files = set(located_tensors(Path(folder)).values())
        except ModelError as error:
            checks.append(Check("models", "warn", f"{_key(name)}.path: {error}"))
            continue
        absent = sorted(file.name for file in files if not file.exists())
        if absent:
            lacking = f"{len(absent)} of {len(files)} files of weights, such as {absent[0]}"
            seen = f"{_key(name)}.path: {folder} lacks {lacking}"
            checks.append(Check("models", "warn", shown(seen), "download them before the run"))
    return checks


def judge_check(recipe: Recipe) -> list[Check]:
    """Check that the judge's tokenizer loads and its template renders right answers to the first rows; raises
    DataError where not. Nothing is said without a judge."""
    if not isinstance(recipe, RLRecipe) or recipe.judge is None:
        return []
    section = recipe.judge
    tokenizer = load_tokenizer(section.tokenizer or section.path, recipe.model.trust_remote_code, section.chat_template)
    if has_config(section.path) and "judge" in (known := planned_architectures(recipe)):
        check_tokens(tokenizer, known["judge"], section.path)
    columns = ["data_source", "prompt", "reward_model"]
    rows, prompts = open_rows(recipe.data.training_files, recipe.data, columns, ["extra_info"]), list[Prompt]()
    for number in range(min(ROWS, len(rows))):
        row = _row_of_turns(recipe, rows.read(number), rows.location(number))
        prompts.append(Prompt(number, row["data_source"], (), row["ground_truth"], {}, tuple(row["prompt"])))
    lengths = list(map(len, encode_questions(section, tokenizer, prompts, [each.ground_truth for each in prompts])))
    seen, limit = f"{len(lengths)} right answers in prompts of up to {max(lengths)} tokens", section.max_prompt_length
    if max(lengths) > limit:
        return [Check("judge", "fail", f"{seen}, beyond judge.max_prompt_length={limit}", "raise it")]
    return [Check("judge", "ok", seen)]


def data_checks(recipe: Recipe) -> list[Check]:
    """Check that every file can be read and has the columns of the loop, each by itself."""
    section, responses = recipe.data, RESPONSES[recipe.loop]
    files = list(dict.fromkeys([*section.training_files, *section.validation_files]))
    if section.dataset is not None:  # a class takes them together
        rows = len(open_columns(section.training_files, section, responses))
        return [Check("rows", "ok", f"{rows:,} rows of {section.dataset}")]
    counts = dict.fromkeys(files, 0)
    checks: list[Check] = []

    def opened(file: str) -> list[Check]:
        counts[file] = len(open_columns([file], section, responses))
        return []

    for file in files:
        checks += run_check("rows", SECONDS, functools.partial(opened, file))
    counted = " and ".join(
        f"{sum(counts[file] for file in dict.fromkeys(of)):,} {kind} rows"
        for kind, of in (("training", section.training_files), ("validation", section.validation_files))
        if of
    )
    return checks or [Check("rows", "ok", counted)]


def written_files(recipe: Recipe) -> tuple[machine.Files, machine.Files]:
    """Return the checkpoints that lie in the run's folder at a time, the one that is being written included, and
    exports."""
    section, architectures = recipe.checkpoint, planned_architectures(recipe)
    kept = section.keep_last_k + 1 + (section.keep_best is not None) if section.save_interval else 0
    in_between = max(0, recipe.steps - 1) // section.export_interval if section.export_interval else 0
    return (
        machine.Files(kept, checkpoint_bytes(recipe, architectures)),
        machine.Files(in_between + section.export_at_end, export_bytes(recipe, architectures)),
    )


def room_check(recipe: Recipe) -> Check:
    """Return room for the run's checkpoints and exports where they will be written."""
    return machine.space_check(RunFolder(recipe.run_root, recipe.name).path, *written_files(recipe))


def tokenizer_check(recipe: Recipe) -> Check:
    """Check that the tokenizer loads and the chat template renders the first rows; raises DataError where not."""
    tokenizer, folder = recipe_tokenizer(recipe), planning_folder(recipe)
    if isinstance(recipe, RLRecipe):
        tokenizer = with_tools(tokenizer, recipe)
    check_tokens(tokenizer, read_architecture(folder), folder)
    unlimited = {
        "max_prompt_length": sys.maxsize,
        "min_prompt_length": 0,
        "max_response_length": None,
        "validation_fraction": 0.0,
    }
    section = recipe.data.model_copy(update=unlimited)
    prompts = list[Prompt | LeftOut]()
    for files in filter(None, [section.training_files, section.validation_files]):
        rows = PromptDataset(files, tokenizer, section, responses=RESPONSES[recipe.loop])
        prompts += rows.read(range(min(ROWS, len(rows))))
    lengths = [len(prompt.token_ids) for prompt in prompts if isinstance(prompt, Prompt)] or [sys.maxsize]
    seen, limit = f"{len(lengths)} rows of {min(lengths)} to {max(lengths)} tokens", recipe.data.max_prompt_length
    if min(lengths) > limit:
        return Check("tokenizer", "warn", f"{seen}, all beyond {limit}", "raise data.max_prompt_length")
    return Check("tokenizer", "ok", seen)


def reward_check(recipe: Recipe, asks_services: bool = True) -> Check:
    """Check that right answers to a few rows can be scored; raises RewardError where not.

    A rule must also find them better than an empty response; how an answer to a function looks, nobody knows here.
    """
    if not isinstance(recipe, RLRecipe) or recipe.reward.rule == "none":
        seen = "a model or an environment gives them" if isinstance(recipe, RLRecipe) else "this loop has none"
        return Check("rewards", "skipped", seen)
    if not asks_services and any(source.service for source in (recipe.reward, *recipe.reward.parts)):
        return Check("rewards", "skipped", "a service gives them, which tools/preflight.py asks")
    with Scorer(recipe.reward) as scorer:  # a function that cannot be loaded is reported whatever the rows are
        items = _right_answers(recipe)
        empty = [dataclasses.replace(item, solution="", tokens=0) for item in items]
        right, nothing = scorer.score(items), scorer.score(empty)
    seen = f"{len(items)} right answers: {_span(right)}; empty ones: {_span(nothing)}"
    if any(judging_rule(recipe.reward, item.data_source) == "code" for item in items):
        seen += f"; programs: {probe().described()}"
    missed = [item for item, high, low in zip(items, right, nothing, strict=True) if not high > low]
    if missed and all(_form(recipe, item) is not None for item in missed):
        seen += f"; row {missed[0].row_id} ({missed[0].data_source}) gains nothing by its right answer"
        return Check("rewards", "warn", seen, "look at this row's reward_model.ground_truth, and at the rule")
    return Check("rewards", "ok", seen)


def turns_check(recipe: Recipe) -> list[Check]:
    """Call the function or environment between turns, where there is one, on right answers to a few rows.

    Raises RolloutError or DataError where it cannot be loaded, or the chat template does not go on from turns.
    """
    partner = make_partner(recipe, leads=True) if isinstance(recipe, RLRecipe) else None
    if partner is None or not isinstance(recipe, RLRecipe):
        return []
    tokenizer = recipe_tokenizer(recipe)
    turns = recipe.rollout.multi_turn
    if turns is not None and isinstance(partner, TurnTools):
        return [_tools_check(turns, partner, tokenizer)]
    if isinstance(partner, AgentProgram):
        try:
            AgentTurns(recipe, partner, [], 1, tokenizer, int)
        finally:
            partner.close()
        return [Check("turns", "ok", f"{partner.specification} and its parsers are there; no trajectory was played")]
    columns = ["data_source", "prompt", "reward_model"]
    rows = open_rows(recipe.data.training_files, recipe.data, columns, ["extra_info"])
    trajectories: list[Trajectory] = []
    try:
        asked = []
        for number in range(min(ROWS, len(rows))):
            row = _row_of_turns(recipe, rows.read(number), rows.location(number))
            trajectories.append(partner.begin(row))
            if recipe.has_environment:
                asked.append(trajectories[-1].reset())
            said = {"role": "assistant", "content": row["ground_truth"]}
            asked.append(trajectories[-1].reply([*row["prompt"], said], None))
        outcomes = [future.result() for future in asked]
        heard = [partner.messages_of(outcome) for outcome in outcomes]
    finally:
        for trajectory in trajectories:
            trajectory.close()
        partner.close()
    tokenizer.encode_next_turn([{"role": "user", "content": "x"}])
    for messages in filter(None, heard):
        tokenizer.encode_next_turn(messages)
    failed = [outcome for outcome, answer in zip(outcomes, heard, strict=True) if answer is None]
    ended = sum(outcome.ends for outcome in outcomes)
    seen = f"{len(trajectories)} right answers: {sum(map(bool, heard))} answered, {ended} ended"
    if failed:
        why = why_failed(failed[0])
        return [Check("turns", "fail", f"{seen}, {len(failed)} failed: {why}", f"fix {partner.specification}")]
    return [Check("turns", "ok", seen)]


def _tools_check(section: MultiTurnSection, partner: TurnTools, tokenizer: Tokenizer) -> Check:
    """Have the tools described to the model, and their calls' parser loaded; raises RolloutError where that fails."""
    partner.close()
    tools = ToolTurns(section, described(tokenizer, section), leads=True).tools
    return Check("turns", "ok", f"the model is told of {', '.join(tools)}; none was called")


def _row_of_turns(recipe: RLRecipe, values: dict[str, Any], location: RowLocation) -> dict[str, Any]:
    """Return a row as those who reply between turns get it."""
    return row_of_users(
        with_system_prompt(parse_messages(values["prompt"], location), recipe.data.system_prompt),
        parse_data_source(values["data_source"], location),
        parse_ground_truth(values["reward_model"], location),
        parse_extra_info(values.get("extra_info"), location),
        recipe.seed,
    )


def _right_answers(recipe: RLRecipe) -> list[ScoreItem]:
    """Return the first rows with their ground truth as the response, in the form that their rule wants."""
    rows = open_rows(recipe.data.training_files, recipe.data, ["data_source", "reward_model"], ["extra_info"])
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
    """Return the answer format of the rule that judges an item; None where no rule does."""
    rule = judging_rule(recipe.reward, item.data_source)
    return RULES[rule].response if rule else None


def _span(scores: Sequence[float]) -> str:
    low, high = min(scores), max(scores)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"
