"""The plan of a run for ``--dry-run``: the recipe's own text, and the bytes that its regathering moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from rlhf_megatron.errors import UserError, errors_of
from rlhf_megatron.models.architecture import Architecture
from rlhf_megatron.models.map_files import remembered_rollout_blocks
from rlhf_megatron.models.rectangles import elements
from rlhf_megatron.models.weight_map import has_rollout_table
from rlhf_megatron.planning.dry_run import dry_run
from rlhf_megatron.planning.feasibility import architecture_checks
from rlhf_megatron.planning.host_bytes import BACKENDS, KINDS, Backend, HostBytes, host_bytes
from rlhf_megatron.planning.links import host_link
from rlhf_megatron.planning.model_folders import planned_architectures, planning_folder
from rlhf_megatron.planning.start_time import communicators_of_a_rank, expected_start
from rlhf_megatron.planning.step_time import expected_time
from rlhf_megatron.planning.token_budgets import planned_budgets
from rlhf_megatron.recipe import Recipe, RLRecipe, role_ranks, rollout_ranks
from rlhf_megatron.recipe.world_checks import world_checks
from rlhf_megatron.regather.plan import ShardSpec
from rlhf_megatron.regather.shard_specs import rollout_shards, trainer_shards
from rlhf_megatron.regather.traffic import Traffic, host_traffic
from rlhf_megatron.topology.open_files import files_needed
from rlhf_megatron.topology.role_layout import make_layout

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_GB, _MB = 2**30, 2**20
_SMALL_EXCHANGE = 0.01  # of an update, not worth a line


def plan_errors(recipe: Recipe, world_size: int) -> list[UserError]:
    """Return all reasons why there is no plan of a run on ``world_size`` GPUs, as far as they can be told apart."""
    errors = errors_of(world_checks(recipe, world_size))
    try:
        architectures = planned_architectures(recipe)
    except UserError as error:
        return [error, *errors]
    of_models = errors_of(architecture_checks(recipe, architectures))
    return [*errors, *(error for error in of_models if not _is_the_actors(recipe, error, of_models))]


def _is_the_actors(recipe: Recipe, error: UserError, all_errors: Sequence[UserError]) -> bool:
    """Return True for what is wrong with the layout of a role that has none of its own, and with the actor's as
    well."""
    name, _, text = str(error).partition(".")
    section = recipe.roles.get(name)
    shares = name != "actor" and section is not None and section.layout is None
    return shares and any(str(other) == f"actor.{text}" for other in all_errors)


def plan_text(recipe: Recipe, world_size: int) -> str:
    """Return the whole plan of a run on ``world_size`` GPUs; raises RecipeError where it cannot run."""
    architectures = planned_architectures(recipe)
    dry_run(recipe, world_size)  # its checks come first: what follows takes a layout that fits
    given, recipe = recipe, planned_budgets(recipe, architectures, world_size)
    start = start_lines(recipe, architectures, world_size)
    if not isinstance(recipe, RLRecipe):
        return dry_run(given, world_size, start=start)
    regathering = regather_lines(recipe, architectures["actor"], world_size)
    times, crossing = time_lines(recipe, architectures, world_size), host_lines(recipe, architectures, world_size)
    return dry_run(given, world_size, regathering, times, start, crossing)


def host_lines(recipe: RLRecipe, architectures: Mapping[str, Architecture], world_size: int) -> list[str]:
    """Return what hosts send each other in a step by kind, the busiest one's part and its time; [] for one host."""
    if world_size <= recipe.cluster.gpus_per_node:
        return []
    carried, over_gloo = (carried_between_hosts(recipe, architectures, world_size, backend) for backend in BACKENDS)
    busiest, rate = carried.of().busiest, host_link(recipe.cluster)
    return [
        _of_kinds(carried),
        f"of the busiest host: {_mb(busiest)}, {_seconds(busiest / rate)} s at {rate / 1e9:g} GB/s",
        f"over gloo, as on CPUs: {_of_kinds(over_gloo)}",
    ]


def _of_kinds(carried: HostBytes) -> str:
    terms = (f"{kind} {_mb(carried.of(kinds=[kind]).total)}" for kind in KINDS)
    unknown = "" if carried.has_weights else ", weights are not known yet"
    return f"{' + '.join(terms)} = {_mb(carried.of().total)}{unknown}"


def _mb(size: float) -> str:
    return f"{size / _MB:,.0f}" if size >= 1000 * _MB else f"{size / _MB:.4g}"


def carried_between_hosts(
    recipe: RLRecipe, architectures: Mapping[str, Architecture], world_size: int, backend: Backend
) -> HostBytes:
    """Return what hosts of ``cluster.gpus_per_node`` GPUs send each other in a step."""
    ends = _regather_ends(recipe, architectures["actor"], world_size)
    traffic = host_traffic(*ends, recipe.cluster.gpus_per_node) if ends else None
    return host_bytes(recipe, architectures, world_size, traffic, backend)


def planned_network(
    recipe: RLRecipe, world_size: int, backend: Backend
) -> Callable[[int], dict[str, tuple[float, float]]]:
    """Return what tells, of a step of so many tokens, (bytes of the busiest host, seconds of these at
    ``cluster.link_gb_per_sec``) by phase."""
    carried = carried_between_hosts(recipe, planned_architectures(recipe), world_size, backend)

    def of_step(tokens: int) -> dict[str, tuple[float, float]]:
        sizes = {phase: carried.of([phase], tokens=tokens).busiest for phase in carried.phases}
        return {phase: (size, size / host_link(recipe.cluster)) for phase, size in sizes.items()}

    return of_step


def start_lines(recipe: Recipe, architectures: Mapping[str, Architecture], world_size: int) -> list[str]:
    """Return the terms of the time before the first step, and what a rank has to connect to."""
    seconds = expected_start(recipe, architectures, world_size)
    terms = " + ".join(f"{name} {_seconds(value)}" for name, value in seconds.items())
    groups, files = len(communicators_of_a_rank(recipe, world_size)), files_needed(world_size)
    return [
        f"{terms} = {_seconds(sum(seconds.values()))} s",
        f"process groups of a rank in all roles: {groups} besides the world's; files and sockets: up to {files:,} open",
    ]


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
    exchange = f"of update: {_seconds(time.exchange)} s of gradients and weights between data-parallel ranks"
    if time.least_exchange < time.exchange:
        exchange += f"; {_seconds(time.least_exchange)} with actor.optimizer.overlap_*"
    return [
        f"{tokens}, {recipe.cluster.gpu}",
        f"{phases} = {_seconds(time.seconds)} s, {time.speed(world_size):,.0f} tokens/s per GPU, "
        f"update at {time.mfu:.0%} MFU",
        *([exchange] if time.exchange > _SMALL_EXCHANGE * time.phases["update"] else []),
    ]


def _seconds(seconds: float) -> str:
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.3g}"


def regather_lines(recipe: RLRecipe, architecture: Architecture, world_size: int) -> list[str]:
    """Return lines on what ranks lack and give in a weight sync, and what goes from host to host, in which time."""
    ends = _regather_ends(recipe, architecture, world_size)
    if ends is None:
        learning = f"the first run under {recipe.run_root} learns it from vLLM, or tools/learn_weight_map.py"
        return [f"not known yet: {learning}"]
    wanted, element_bytes = ends[1], weight_bytes(recipe)
    traffic = host_traffic(*ends, recipe.cluster.gpus_per_node)
    whole = [sum(elements(block.region) for block in wanted.blocks_of(shard)) for shard in wanted.ranks]
    received, sent, kept = (
        most * element_bytes / _GB for most in (traffic.most_received, traffic.most_sent, max(whole))
    )
    peers = max(map(len, traffic.peers.values()), default=0)
    return [
        f"{received:.2f} of {kept:.2f} GB of rollout weights per GPU come from {peers} other GPUs, and "
        f"{sent:.2f} GB go to others, at most",
        *_between_hosts(traffic, element_bytes, recipe.cluster.link_gb_per_sec),
    ]


def sent_between_hosts(recipe: RLRecipe, world_size: int) -> str:
    """Return GB of 2^30 bytes that a weight sync sends from host to host, as text; "?": not known yet."""
    ends = _regather_ends(recipe, planned_architectures(recipe)["actor"], world_size)
    if ends is None:
        return "?"
    sent = host_traffic(*ends, recipe.cluster.gpus_per_node).between_hosts * weight_bytes(recipe) / _GB
    return f"{sent:,.0f}" if sent >= 10 or not sent else f"{sent:.2g}"


def weight_bytes(recipe: RLRecipe) -> int:
    """Return bytes of one of the rollout's weights."""
    return _BYTES[recipe.rollout.dtype or recipe.model.dtype]


def _regather_ends(recipe: RLRecipe, architecture: Architecture, world_size: int) -> tuple[ShardSpec, ShardSpec] | None:
    """Return the trainer's shards and the rollout's; None where these are yet to be learned from vLLM."""
    ranks = role_ranks(recipe, "actor", world_size)
    sources = trainer_shards(architecture, make_layout(recipe.actor.layout, len(ranks)), ranks)
    rollout = recipe.rollout.layout
    learned = None
    if not has_rollout_table(architecture):
        folder = planning_folder(recipe)
        learned = remembered_rollout_blocks(folder, rollout.tensor, rollout.expert_parallel, recipe.run_root)
        if learned is None:
            return None
    generating = rollout_ranks(recipe, world_size)
    return sources, rollout_shards(architecture, rollout.tensor, generating, rollout.expert_parallel, learned)


def _between_hosts(traffic: Traffic, element_bytes: int, link: float | None) -> Iterator[str]:
    """Yield a line on what crosses from host to host, if anything does, and how long that takes."""
    moved = (traffic.between_hosts, sum(traffic.unshared.values()), traffic.most_between_hosts)
    total, unshared, busiest = (count * element_bytes for count in moved)
    if total:
        less = f", of {unshared / _GB:.2f} without forwarding" if unshared > 1.005 * total else ""
        time = f"; {busiest / 1e9 / link:.2f} s at {link:g} GB/s" if link else ""
        yield f"{total / _GB:.2f} GB go from host to host{less}, {busiest / _GB:.2f} per GPU at most{time}"
