"""Evaluation of a model from its files: vLLM alone on every rank, no trainer. And what it shares with the loops: the
table of samples, and the metrics made of it.

Each replica answers its share of the questions; a question is scored as soon as all of its samples are there.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import json
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch.distributed as dist
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from rlhf_megatron.agents.program import AgentProgram
from rlhf_megatron.data.opening import open_validation
from rlhf_megatron.data.prompts import Prompt
from rlhf_megatron.data.tokenizer import Tokenizer
from rlhf_megatron.data.tokenizer_loading import recipe_tokenizer
from rlhf_megatron.evaluation.estimates import Answered, Estimate, evaluation_metrics
from rlhf_megatron.evaluation.judging import check_judge, judge_of, judged, make_judge
from rlhf_megatron.generation.conversations import conversations_of
from rlhf_megatron.generation.generated_groups import GroupScoring
from rlhf_megatron.generation.judge_building import check_weights
from rlhf_megatron.generation.judge_verdicts import Judge
from rlhf_megatron.generation.partners import Partner, make_partner
from rlhf_megatron.generation.prompt_groups import Group, answer_text
from rlhf_megatron.generation.tool_turns import with_tools
from rlhf_megatron.models.architecture import (
    check_generates,
    read_architecture,
    read_config,
    wrapped_language,
)
from rlhf_megatron.models.families import FAMILIES
from rlhf_megatron.models.hf_files import CheckpointFiles, check_types
from rlhf_megatron.monitor.run_folder import RunFolder
from rlhf_megatron.planning.feasibility import check_tokens
from rlhf_megatron.recipe import RecipeError, RolloutRecipe
from rlhf_megatron.redaction import redact
from rlhf_megatron.rewards.rules import answer_of
from rlhf_megatron.rewards.score import Score, Scorer
from rlhf_megatron.rollout.engine import Completion, Request, RolloutEngine, Sampling, request_seed
from rlhf_megatron.rollout.engine_registry import make_engine
from rlhf_megatron.rollout.work_queue import WorkQueues
from rlhf_megatron.topology.exchange import gather_bytes, refused_by_all
from rlhf_megatron.topology.team import world_of_their_own
from rlhf_megatron.topology.world import join_world, leave_world

Metrics = dict[str, dict[str, Estimate]]

# In place of a training step, so that an evaluation's sampling seeds are the same every time and no step's.
NO_STEP = -1
# Replicas that have answered wait for the slowest one.
_LONGEST_MINUTES = 24 * 60.0


def evaluate(recipe: RolloutRecipe) -> None:
    """Evaluate ``recipe.model.path`` on the validation files and report; every process of torchrun calls it.

    Raises UserError for input that is not right.
    """
    check(recipe, int(os.environ.get("WORLD_SIZE", "1")))
    known = str(read_config(recipe.model.path).get("model_type")) in FAMILIES  # vLLM has more, which can be evaluated
    architecture = read_architecture(recipe.model.path) if known else None
    if architecture is not None:
        check_generates(architecture, recipe.model.path)
    join_world(_LONGEST_MINUTES)
    rank = dist.get_rank()
    if rank == 0:
        RunFolder(recipe.run_root, recipe.name).prepare(resume=True)  # answers that cannot be kept need not be found
    tokenizer = with_tools(recipe_tokenizer(recipe), recipe)
    if architecture is not None:
        check_tokens(tokenizer, architecture, recipe.model.path)
    validation = open_validation(recipe.data, tokenizer, max_prompts=recipe.evaluation.max_prompts)
    prompts = validation.prompts
    leads = rank % recipe.rollout.layout.tensor == 0  # its replica: the others generate the same and score nothing
    with contextlib.ExitStack() as stack:
        scorer = stack.enter_context(Scorer(recipe.reward)) if leads else None
        partner = make_partner(recipe, leads)
        if partner:
            stack.callback(partner.close)
        if scorer:
            scorer.check_sources(dict.fromkeys(prompt.data_source for prompt in prompts))
        if architecture is None:
            check_types(recipe.model.path)
        else:
            with CheckpointFiles(recipe.model.path, architecture):
                pass  # told before the engine takes memory
        section = judge_of(recipe)
        judge = make_judge(recipe, section, tokenizer) if section else None  # before an engine that takes what is left
        engine = _engine(recipe, own_ranks=judge.own_ranks if judge else [])
        with refused_by_all():
            check_weights(recipe.model.path, engine.parameters())
        engine.weights_updated(0)
        dist.barrier()  # time that others need to start is not this rank's generation
        started = time.perf_counter()
        with Progress(console=Console(stderr=True), transient=True, disable=rank != 0) as progress:
            own = answer(recipe, prompts, engine, scorer, partner, tokenizer, progress, judge)
    samples = gather_tables(own)
    if samples is not None:
        report(recipe, samples, time.perf_counter() - started, validation.left_out)
    dist.barrier()  # an engine that ends may take torch.distributed with it
    engine.close()
    if judge:
        judge.close()
    leave_world()


def _engine(recipe: RolloutRecipe, own_ranks: Sequence[int]) -> RolloutEngine:
    """Return this rank's engine, whose world are ``own_ranks`` as that of a judge, if there is one; collective."""
    with world_of_their_own(own_ranks):
        return make_engine(
            recipe.model.path,
            recipe.rollout,
            recipe.model.dtype,
            recipe.data.max_prompt_length,
            recipe.seed,
            "auto",
            language=wrapped_language(recipe.model.path),
        )


def check(recipe: RolloutRecipe, world: int) -> None:
    """Raise RecipeError where there is nothing to evaluate, or the replicas do not fill ``world`` ranks."""
    if not recipe.data.evaluates:
        raise RecipeError("data.validation_files: an evaluation needs some; name parquet files")
    if recipe.model.random_weights:
        raise RecipeError("model.random_weights: there is nothing to evaluate in random weights; use false")
    if recipe.actor.lora and recipe.actor.lora.path:
        raise RecipeError(
            "actor.lora.path: an evaluation reads model.path alone; name an export, which has the adapters merged, and "
            "leave it out"
        )
    judge, tensor = judge_of(recipe), recipe.rollout.layout.tensor
    if recipe.reward.rule == "none" and not recipe.plays and not judge:
        raise RecipeError("reward.rule=none: an evaluation asks no reward model; name a rule, or leave it out")
    if judge:
        check_judge(judge, tensor)
    if world % tensor:
        raise RecipeError(
            f"rollout.layout.tensor={tensor} does not divide {world} GPUs; change it, or run on a multiple of it"
        )


def answer(
    recipe: RolloutRecipe,
    prompts: Sequence[Prompt],
    engine: RolloutEngine,
    scorer: Scorer | None,
    partner: Partner | AgentProgram | None,
    tokenizer: Tokenizer,
    progress: Progress,
    judge: Judge | None = None,
) -> pa.Table:
    """Return this replica's share of the questions, answered and scored on the rank that has a scorer; elsewhere no
    rows.

    Collective over the world where there is a judge."""
    settings, tensor, seed = recipe.evaluation, recipe.rollout.layout.tensor, recipe.seed
    replica, replicas = dist.get_rank() // tensor, dist.get_world_size() // tensor
    count = settings.samples_per_prompt
    by_length = sorted(range(len(prompts)), key=lambda index: -len(prompts[index].token_ids))
    requests = [
        Request(row, prompts[index].token_ids, request_seed(seed, NO_STEP, row), index)
        for index in by_length
        for row in range(index * count, (index + 1) * count)
    ]
    sampling = Sampling(
        settings.temperature, settings.top_p, -1, recipe.rollout.max_response_length, tokenizer.stop_token_ids
    )
    groups = [Group(prompt) for prompt in prompts]
    conversations = conversations_of(
        recipe, partner, groups, count, tokenizer, lambda row: request_seed(seed, NO_STEP, row)
    )
    scoring = GroupScoring(scorer, groups, count, tokenizer, conversations=conversations)
    task = progress.add_task("generate", total=None)
    queue = WorkQueues(recipe.rollout.scheduling, replica, replicas).open(len(prompts))
    with conversations or contextlib.nullcontext():
        completions = engine.generate(
            requests,
            sampling,
            lambda done, begun: progress.update(task, completed=done, total=begun),
            scoring.take,
            queue,
            conversations,
        )
    scores = scoring.results(scoring.submitted())
    scored = [completion for completion in completions if completion.row_id in scores]
    asked, matching = [prompts[each.row_id // count] for each in scored], [scores[each.row_id] for each in scored]
    if (section := judge_of(recipe)) and judge:
        matching = judged(judge, section.weight, asked, scored, matching)
    return sample_table(
        asked,
        scored,
        matching,
        [name for name in recipe.reward_names if name != "reward_model"],
        tokenizer,
        recipe,
    )


def sample_table(
    prompts: Sequence[Prompt],
    completions: Sequence[Completion],
    scores: Sequence[Score],
    part_names: Sequence[str],
    tokenizer: Tokenizer,
    recipe: RolloutRecipe,
) -> pa.Table:
    """Return one row for each response, with what it is worth; ``prompts`` and ``scores`` have those of each, and
    ``part_names`` the names of the scores' parts, if there are several.

    ``question`` counts the validation prompts, ``sample`` the responses to one. ``correct`` looks at the first part of
    the reward; ``answer`` is what the response votes for. A score is NaN where it could not be found.
    """
    count = recipe.evaluation.samples_per_prompt
    responses = [tokenizer.decode(completion.token_ids) for completion in completions]
    said = [answer_text(completion, tokenizer) for completion in completions]
    columns: dict[str, list[Any]] = {
        "question": [completion.row_id // count for completion in completions],
        "sample": [completion.row_id % count for completion in completions],
        "data_source": [prompt.data_source for prompt in prompts],
        "prompt": [
            tokenizer.decode(completion.prompt_token_ids or prompt.token_ids, skip_special_tokens=False)
            for prompt, completion in zip(prompts, completions, strict=True)
        ],
        "response": responses,
        "ground_truth": [prompt.ground_truth for prompt in prompts],
        "answer": [
            answer_of(recipe.reward, prompt.data_source, text) for prompt, text in zip(prompts, said, strict=True)
        ],
        "score": [score.value for score in scores],
        **{f"score_{name}": [score.parts[index] for score in scores] for index, name in enumerate(part_names)},
        "correct": [score.parts[0] >= recipe.evaluation.correct_from for score in scores],
        "tokens": [completion.sampled_tokens for completion in completions],
        "truncated": [completion.finish_reason == "length" for completion in completions],
        "unscored": [score.timed_out or score.failed for score in scores],
    }
    numbers = {name: pa.float64() for name in columns if name.startswith("score")}
    numbers |= {"question": pa.int64(), "sample": pa.int64(), "tokens": pa.int64()}
    numbers |= dict.fromkeys(("correct", "truncated", "unscored"), pa.bool_())
    return pa.table({name: pa.array(values, numbers.get(name, pa.string())) for name, values in columns.items()})


def gather_tables(table: pa.Table) -> pa.Table | None:
    """Return all ranks' tables of one schema as one in the order of question and sample, on rank 0; collective."""
    stream = io.BytesIO()
    with pa.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table)
    parts = [pa.ipc.open_stream(part).read_all() for part in gather_bytes(stream.getvalue())]
    return pa.concat_tables(parts).sort_by([("question", "ascending"), ("sample", "ascending")]) if parts else None


def metrics_of(samples: pa.Table, seed: int) -> Metrics:
    """Return mean@n, pass@k, maj@k and the mean score of each data source in a whole ``sample_table``; NaN scores count
    0."""
    groups: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in samples.select(["question", "data_source", "correct", "answer", "score"]).to_pylist():
        groups[row["question"]].append(row)
    answered = [
        Answered(
            rows[0]["data_source"],
            tuple(row["correct"] for row in rows),
            tuple(row["answer"] for row in rows),
            tuple(row["score"] if row["score"] == row["score"] else 0.0 for row in rows),
        )
        for rows in groups.values()
    ]
    return evaluation_metrics(answered, seed)


def report(recipe: RolloutRecipe, samples: pa.Table, seconds: float, dropped: int) -> None:
    """Print the results and write them, and all samples, into the run's folder."""
    metrics = metrics_of(samples, recipe.seed)
    questions = {source: 0 for source in metrics}
    for entry in samples.group_by(["data_source"]).aggregate([("question", "count_distinct")]).to_pylist():
        questions[entry["data_source"]] = entry["question_count_distinct"]
    facts = {
        "questions": questions,
        "questions_too_long": dropped,
        "samples_per_prompt": recipe.evaluation.samples_per_prompt,
        "truncated_samples": sum(samples["truncated"].to_pylist()),
        "unscored_samples": sum(samples["unscored"].to_pylist()),
        "response_tokens": sum(samples["tokens"].to_pylist()),
        "seconds": round(seconds, 3),
    }
    folder = RunFolder(recipe.run_root, recipe.name).path
    folder.mkdir(parents=True, exist_ok=True)
    results = {
        "name": recipe.name,
        "model": recipe.model.path,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **facts,
        "metrics": {source: {name: asdict(of) for name, of in named.items()} for source, named in metrics.items()},
        "recipe": redact(recipe.model_dump(mode="json")),
    }
    replace_file(folder / "evaluation.json", json.dumps(results, indent=2, ensure_ascii=False).encode() + b"\n")
    stream = io.BytesIO()
    pq.write_table(samples, stream, compression="zstd")
    replace_file(folder / "evaluation.parquet", stream.getvalue())
    Console().print(results_table(metrics, questions))
    print(
        f"{recipe.model.path}: {samples.num_rows} responses, {facts['response_tokens']} tokens in {seconds:.1f} s; "
        f"{facts['truncated_samples']} cut off, {facts['unscored_samples']} not scored, {dropped} prompts too long\n"
        f"{folder / 'evaluation.json'}\n{folder / 'evaluation.parquet'}"
    )


def results_table(metrics: Metrics, questions: dict[str, int]) -> Table:
    """Return the metrics of each data source, with their intervals."""
    table = Table()
    table.add_column("")
    for source in metrics:
        table.add_column(f"{escape(source)}\n{questions[source]} questions", justify="right")
    for name in dict.fromkeys(name for named in metrics.values() for name in named):
        estimates = [named.get(name) for named in metrics.values()]
        table.add_row(name, *(f"{of.value:.4f} ({of.low:.4f} .. {of.high:.4f})" if of else "" for of in estimates))
    return table


def replace_file(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_bytes(content)
    partial.replace(path)
