"""A run from start to end on one rank: join the others, train, export, leave."""

from __future__ import annotations

from rlhf_megatron.recipe import Recipe, check_architecture, check_world
from rlhf_megatron.topology.world import join_world, leave_world


def run(recipe: Recipe, resume: str = "auto") -> None:
    """Trains by ``recipe``; every process of torchrun calls it. ``resume``: auto, none, or a checkpoint's path.

    Raises UserError for input that is not right.
    """
    join_world()
    import torch.distributed as dist

    from rlhf_megatron.models.architecture import read_config
    from rlhf_megatron.topology import megatron_groups

    check_world(recipe, dist.get_world_size())
    check_architecture(recipe, read_config(recipe.model.path))
    megatron_groups.install()
    # Imported now, since Megatron must be mended for the machine before its models and optimizers are imported.
    from rlhf_megatron.loops.rl import run_rl
    from rlhf_megatron.loops.session import Session
    from rlhf_megatron.loops.sft import run_sft

    session = Session(recipe, resume)
    try:
        result = run_rl(session) if recipe.loop == "rl" else run_sft(session)
    except BaseException:
        session.abandon()
        raise
    folder = session.export(recipe.steps) if recipe.checkpoint.export_at_end else None
    session.close()
    if session.rank == 0:
        what = "held-out accuracy" if recipe.loop == "rl" else "held-out loss"
        if result:
            print(f"{what} {result['first']:.2f} -> {result['last']:.2f}")
        if folder:
            print(f"model: {folder}\nrun:   {session.run.path}")
    leave_world()
