"""The plan of a run for ``--dry-run``: the recipe's own text, and the bytes that its regathering moves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rlhf_megatron.models.architecture import Architecture
from rlhf_megatron.models.weight_map import has_rollout_table
from rlhf_megatron.planning.dry_run import dry_run
from rlhf_megatron.planning.model_folders import planned_architectures, planning_folder
from rlhf_megatron.planning.step_time import expected_time
from rlhf_megatron.recipe import Recipe, RLRecipe, role_ranks, rollout_ranks
from rlhf_megatron.regather.learned_rollout import remembered_rollout_blocks
from rlhf_megatron.regather.plan import RankPlan, plan_regather
from rlhf_megatron.regather.shard_specs import rollout_shards, trainer_shards
from rlhf_megatron.topology.role_layout import make_layout

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_GB = 2**30


def plan_text(recipe: Recipe, world_size: int) -> str:
    """Return the whole plan of a run on ``world_size`` GPUs; raises RecipeError where it cannot run."""
    architectures = planned_architectures(recipe)
    plan = dry_run(recipe, world_size)  # its checks come first: what follows takes a layout that fits
    if not isinstance(recipe, RLRecipe):
        return plan
    summary = regather_summary(recipe, architectures["actor"], world_size)
    return dry_run(recipe, world_size, summary, time_lines(recipe, architectures, world_size))


def time_lines(recipe: RLRecipe, architectures: Mapping[str, Architecture], world_size: int) -> list[str]:
    """Return the time of each phase of a step and its throughput, or what is lacking to say so."""
    if recipe.cluster.gpu is None:
        return ["set cluster.gpu, such as cluster.gpu=H100"]
    time = expected_time(recipe, architectures, world_size)
    if time is None:
        return ["there are no figures to estimate float32 by"]
    phases = " beside ".join(
        " + ".join(f"{phase} {_seconds(seconds)}" for phase, seconds in team.items()) for team in time.teams
    )
    tokens = f"prompts of {time.prompt:,.0f} tokens and responses of {time.response:,.0f} on average"
    return [
        f"{tokens}, {recipe.cluster.gpu}",
        f"{phases} = {_seconds(time.seconds)} s, {time.speed(world_size):,.0f} tokens/s per GPU, "
        f"update at {time.mfu:.0%} MFU",
    ]


def _seconds(seconds: float) -> str:
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.3g}"


def regather_summary(recipe: RLRecipe, architecture: Architecture, world_size: int) -> str:
    """One line on what the ranks of the first rollout replica lack and give, with whom, and how long that takes."""
    ranks = role_ranks(recipe, "actor", world_size)
    sources = trainer_shards(architecture, make_layout(recipe.actor.layout, len(ranks)), ranks)
    rollout = recipe.rollout.layout
    generating = rollout_ranks(recipe, world_size)
    learned = None
    if not has_rollout_table(architecture):
        folder = planning_folder(recipe)
        learned = remembered_rollout_blocks(folder, rollout.tensor, rollout.expert_parallel, recipe.run_root)
        if learned is None:
            learning = f"the first run under {recipe.run_root} learns it from vLLM, or tools/learn_weight_map.py"
            return f"not known yet: {learning}"
    wanted = rollout_shards(architecture, rollout.tensor, generating, rollout.expert_parallel, learned)
    element_bytes = _BYTES[recipe.rollout.dtype or recipe.model.dtype]

    def plans_of(some: Iterable[int]) -> list[RankPlan]:
        return [plan_regather(sources, wanted, rank, recipe.cluster.gpus_per_node) for rank in some]

    plans = plans_of(generating[: rollout.tensor])
    givers = {copy.source for plan in plans for copy in plan.receives}.difference(generating)
    received = max(plan.bytes_received(element_bytes) for plan in plans)
    sent = max(plan.bytes_sent(element_bytes) for plan in [*plans, *plans_of(sorted(givers))])
    kept = max(plan.bytes_kept(element_bytes) for plan in plans)
    peers = max(len({copy.source for copy in plan.receives}) for plan in plans)
    text = (
        f"{received / _GB:.2f} of {kept / _GB:.2f} GB of rollout weights per GPU come from {peers} other GPUs, and "
        f"{sent / _GB:.2f} GB go to others, at most"
    )
    link = recipe.cluster.link_gb_per_sec
    return f"{text}; {max(received, sent) / 1e9 / link:.2f} s at {link:g} GB/s" if link else text
