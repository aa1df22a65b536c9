"""Reinforcement learning: the whole loop, from prompts to a better model, in one place.

Each step: generate -> score -> old and reference logprobs -> advantages -> update -> regather -> log -> evaluate ->
save.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from statistics import fmean

import pyarrow as pa
import pyarrow.parquet as pq

from rlhf_megatron.algorithms.advantage import ADVANTAGES
from rlhf_megatron.algorithms.aggregation import token_weights
from rlhf_megatron.algorithms.metrics import mismatch_metrics
from rlhf_megatron.algorithms.objective import policy_objective
from rlhf_megatron.data.batch import RolloutBatch
from rlhf_megatron.data.prompts import Prompt
from rlhf_megatron.loops.collection import Collector
from rlhf_megatron.loops.history import History
from rlhf_megatron.loops.rollouts import Rollouts, gather_scores
from rlhf_megatron.loops.session import Session
from rlhf_megatron.roles.role import Role


def run_rl(session: Session) -> dict[str, float]:
    """Trains the actor by the recipe's algorithm; returns the last evaluation's metrics (with the first's as start)."""
    recipe, actor = session.recipe, session.actor
    # Without a KL term nothing reads the reference, so it is not made.
    reference = (
        session.make_role("reference", recipe.reference) if recipe.reference and recipe.algorithm.kl_coef else None
    )
    rollouts = Rollouts(session)
    collector = Collector(session, rollouts)
    history = History()
    session.at_end(rollouts.close)
    checkpoints = session.checkpoints(
        {"actor": actor}, {"data": session.train, "rollouts": rollouts, "collector": collector, "history": history}
    )
    rollouts.refresh()
    if recipe.evaluation.at_start and session.first_step == 1:
        evaluate(session, rollouts, 0, history)

    for step in range(session.first_step, recipe.steps + 1):
        session.begin_step()
        batch, metrics, tokens = collector.collect(step)  # generate and score, with dynamic sampling in rounds
        rollouts.engine.sleep()
        if batch.rows:  # with dynamic sampling there may be nothing to learn
            with session.phase("logprobs"):
                batch, compared = with_logprobs(batch, actor, reference, recipe.algorithm.old_logprobs)
            batch = with_advantages(batch, session)
            with session.phase("update"):
                metrics |= compared | update(session, batch)
        with session.phase("regather"):
            rollouts.refresh()
        session.end_step(step, metrics, tokens)
        interval = recipe.evaluation.interval
        if (interval and step % interval == 0) or (step == recipe.steps and recipe.evaluation.at_end):
            evaluate(session, rollouts, step, history)
        checkpoints.after(step, last=step == recipe.steps)
        if recipe.checkpoint.export_interval and step % recipe.checkpoint.export_interval == 0 and step < recipe.steps:
            session.export(step)
    return history.summary()


def with_logprobs(
    batch: RolloutBatch, actor: Role, reference: Role | None, old: str
) -> tuple[RolloutBatch, dict[str, float]]:
    """Adds the logprobs that the objective compares with, and measures how far trainer and rollout disagree."""
    metrics: dict[str, float] = {}
    old_logprobs = batch.rollout_logprobs
    if old == "recompute":
        outputs = actor.logprobs(batch)
        old_logprobs = outputs.logprobs
        metrics = mismatch_metrics(old_logprobs, batch.rollout_logprobs, batch.response_mask)
        metrics["train/entropy"] = float(outputs.entropy[batch.response_mask].mean())
    reference_logprobs = reference.logprobs(batch).logprobs if reference else None
    return batch.with_fields(old_logprobs=old_logprobs, reference_logprobs=reference_logprobs), metrics


def with_advantages(batch: RolloutBatch, session: Session) -> RolloutBatch:
    """Adds each row's advantage, on all of its sampled tokens."""
    algorithm = session.recipe.algorithm
    per_row = ADVANTAGES[algorithm.advantage](batch.rewards, batch.group_id, algorithm.normalize_by_std)
    return batch.with_fields(advantages=batch.spread(per_row))


def update(session: Session, batch: RolloutBatch) -> dict[str, float]:
    """All optimizer steps on one batch, in minibatches of whole groups; the means of their metrics."""
    recipe, settings = session.recipe, session.recipe.algorithm
    responses = recipe.batch.responses_per_prompt
    prompts = batch.rows // responses  # fewer than asked for where dynamic sampling found no more
    size = recipe.batch.minibatch_prompts or recipe.batch.prompts_per_step
    objective = functools.partial(policy_objective, settings=settings)

    collected = defaultdict(list)
    for _ in range(recipe.batch.epochs_per_step):
        for first in range(0, prompts, size):
            minibatch = batch.select(range(first * responses, min(first + size, prompts) * responses))
            weights = token_weights(minibatch.response_mask, minibatch.cu_seqlens, settings.loss_aggregation)
            for name, value in session.actor.update(minibatch, minibatch.fields(weights), objective).items():
                collected[f"train/{name}"].append(value)
    return {name: fmean(values) for name, values in collected.items()}


def evaluate(session: Session, rollouts: Rollouts, step: int, history: History) -> None:
    """Logs held-out accuracy per data source, over all replicas; saves some answers as samples/step-N.parquet."""
    recipe, dataset = session.recipe, session.validation
    if dataset is None:
        return
    settings = recipe.evaluation
    count = min(len(dataset), settings.max_prompts or len(dataset))
    prompts = [dataset[index] for index in range(count)]
    samples = settings.samples_per_prompt
    sampling = dataclasses.replace(rollouts.sampling, temperature=settings.temperature, top_p=1.0, top_k=-1)
    rolled = rollouts.generate(prompts, samples, sampling, -1)  # the same seeds every time
    rewards = rollouts.score(rolled)
    scores = gather_scores(rolled, rewards)
    by_source = defaultdict(list)
    for row, score in scores.items():
        by_source[prompts[row // samples].data_source].append(score)
    if session.rank == 0:
        save_samples(session, step, rolled.prompts, rollouts.texts(rolled), rewards)
    metrics = {f"eval/{source}/accuracy": fmean(values) for source, values in sorted(by_source.items())}
    session.log(step, metrics)
    history.add(step, fmean(metrics.values()))


def save_samples(
    session: Session, step: int, prompts: list[Prompt], responses: list[str], rewards: list[float]
) -> None:
    """Writes the first answers of an evaluation for people to read."""
    shown = slice(session.recipe.monitor.sample_rows)
    columns = {
        "prompt": [session.tokenizer.decode(prompt.token_ids) for prompt in prompts[shown]],
        "response": responses[shown],
        "ground_truth": [prompt.ground_truth for prompt in prompts[shown]],
        "reward": list(rewards[shown]),
    }
    pq.write_table(pa.table(columns), session.run.sample_file(step))
