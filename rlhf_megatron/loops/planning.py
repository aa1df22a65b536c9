"""The plan of a run for ``--dry-run``: the recipe's own text, and the bytes that its regathering moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlhf_megatron.loops.layouts import make_layout
from rlhf_megatron.models.architecture import Architecture, parse_architecture
from rlhf_megatron.models.weight_map import megatron_blocks, rollout_blocks
from rlhf_megatron.recipe import Recipe, dry_run
from rlhf_megatron.recipe.model_shape import planning_config
from rlhf_megatron.regather.plan import Copy, bytes_received, plan_regather

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def plan_text(recipe: Recipe, world_size: int) -> str:
    """All that is known of a run on ``world_size`` GPUs before it starts; raises RecipeError where it cannot run."""
    dry_run(recipe, world_size)  # its checks come first: what follows takes a layout that fits
    summary = None
    if recipe.rollout is not None:
        architecture = parse_architecture(planning_config(recipe), recipe.model.path)
        summary = regather_summary(recipe, architecture, world_size)
    return dry_run(recipe, world_size, summary)


def regather_summary(recipe: Recipe, architecture: Architecture, world_size: int) -> str:
    """One line on what the ranks of the first rollout replica lack, and from whom it comes."""
    assert recipe.rollout is not None
    layout = make_layout(recipe.actor.layout, world_size)
    tensor = recipe.rollout.layout.tensor
    element_bytes = _BYTES[recipe.rollout.dtype or recipe.model.dtype]
    sources = {rank: megatron_blocks(architecture, layout, rank, "local") for rank in range(world_size)}
    wanted = {rank: rollout_blocks(architecture, tensor, rank) for rank in range(tensor)}
    copies = plan_regather(sources, wanted, recipe.cluster.gpus_per_node)
    received = bytes_received(copies, element_bytes)
    kept = sum(copy.elements for copy in copies) * element_bytes / tensor
    most = max(received.values())
    text = (
        f"{most / 2**30:.2f} of {kept / 2**30:.2f} GB of rollout weights per GPU come from other GPUs, "
        f"in at most {_most_peers(received, copies)} streams"
    )
    link = recipe.cluster.link_gb_per_sec
    return f"{text}; {most / 1e9 / link:.2f} s at {link:g} GB/s" if link else text


def _most_peers(received: Mapping[int, int], copies: Sequence[Copy]) -> int:
    peers: dict[int, set[int]] = {rank: set() for rank in received}
    for copy in copies:
        if copy.source != copy.destination:
            peers[copy.destination].add(copy.source)
    return max(len(of_rank) for of_rank in peers.values())
