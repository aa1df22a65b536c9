"""Held-out evaluation while a policy trains: the rollout's own replicas answer, and the answers are scored."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from statistics import fmean

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist

from rlhf_megatron.data.prompts import Prompt
from rlhf_megatron.data.tokenizer import Tokenizer
from rlhf_megatron.durable import whole_file
from rlhf_megatron.evaluation.standalone import NO_STEP, gather_tables, metrics_of, sample_table
from rlhf_megatron.generation.prompt_groups import Group
from rlhf_megatron.generation.rollout_worker import RolloutWorker
from rlhf_megatron.recipe import RLRecipe
from rlhf_megatron.runtime.run_context import RunContext


def headline_metric(recipe: RLRecipe) -> str:
    """Return which metric of an evaluation is a run's headline: to a reward model alone, no answer is right or
    wrong."""
    return "score" if recipe.reward.rule == "none" else "accuracy"


def held_out_metrics(
    context: RunContext[RLRecipe], worker: RolloutWorker, prompts: Sequence[Prompt], tokenizer: Tokenizer, step: int
) -> dict[str, float]:
    """Have all replicas answer the prompts; return the metrics by data source on rank 0, elsewhere none.

    Collective. The first answers go to samples/step-N.parquet, for people to read.
    """
    table = _answers(context.recipe, worker, prompts, tokenizer)
    if table is None:
        return {}
    try:
        with whole_file(context.folder.sample_file(step)) as partial:
            pq.write_table(table.slice(0, context.recipe.monitor.sample_rows), partial)
    except OSError as error:  # a full disk costs what people read, not the run
        context.say(f"warning: no answers of step {step} were written: {error.strerror or error}")
    return _metrics_by_source(context.recipe, table)


def headline_mean(recipe: RLRecipe, metrics: Mapping[str, float]) -> float:
    """Return the mean of the headline metric over rank 0's data sources, on every rank; collective."""
    values = [value for name, value in metrics.items() if name.endswith(f"/{headline_metric(recipe)}")]
    mean = torch.tensor([fmean(values) if values else 0.0], dtype=torch.float64)
    dist.broadcast(mean, 0)
    return float(mean)


def _answers(
    recipe: RLRecipe, worker: RolloutWorker, prompts: Sequence[Prompt], tokenizer: Tokenizer
) -> pa.Table | None:
    """Return the ``sample_table`` of all replicas, on rank 0."""
    settings = recipe.evaluation
    sampling = dataclasses.replace(
        worker.sampling, temperature=settings.temperature, top_p=settings.top_p, top_k=-1, by_length=()
    )
    groups = [Group(prompt) for prompt in prompts]
    samples = settings.samples_per_prompt
    generated = worker.generate(groups, samples, sampling, NO_STEP, for_training=False)  # the same seeds every time
    worker.gather(generated)
    worker.reset_prefix_cache()  # a run that is resumed here has none either
    return gather_tables(
        sample_table(
            generated.prompts, generated.completions, generated.scores(), recipe.reward_names, tokenizer, recipe
        )
    )


def _metrics_by_source(recipe: RLRecipe, table: pa.Table) -> dict[str, float]:
    headline, metrics = headline_metric(recipe), dict[str, float]()
    for source, named in metrics_of(table, recipe.seed).items():
        named["accuracy"] = named.pop(f"mean@{recipe.evaluation.samples_per_prompt}")
        main = named.pop(headline)
        metrics |= {
            f"eval/{source}/{headline}": main.value,
            f"eval/{source}/{headline}_low": main.low,
            f"eval/{source}/{headline}_high": main.high,
        }
        if headline == "accuracy" or recipe.has_environment:  # by whose rewards a trajectory is right
            metrics |= {f"eval/{source}/{name}": estimate.value for name, estimate in named.items()}
    return metrics
