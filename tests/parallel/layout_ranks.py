"""What the ranks of the tests of memory and placement run."""

from __future__ import annotations

import gc
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from parallel.whole_batches import logprobs, scores, update
from rlhf_megatron.compat import megatron

megatron.install()

from rlhf_megatron.algorithms.aggregation import token_weights  # noqa: E402
from rlhf_megatron.checkpoint.role_state import role_tensors  # noqa: E402
from rlhf_megatron.data.rollout_batch import batch_from_rows  # noqa: E402
from rlhf_megatron.loops.sft import negative_log_likelihood  # noqa: E402
from rlhf_megatron.models.architecture import read_architecture  # noqa: E402
from rlhf_megatron.models.hf_files import CheckpointFiles  # noqa: E402
from rlhf_megatron.recipe import OptimizerSection, RoleSection  # noqa: E402
from rlhf_megatron.roles import streaming  # noqa: E402
from rlhf_megatron.roles.placed import PlacedRole  # noqa: E402
from rlhf_megatron.roles.role import Role  # noqa: E402
from rlhf_megatron.topology.layout import Layout  # noqa: E402

KINDS = ("parameters", "gradients", "optimizer")


def learn_with_memory_away(
    model: str, rows: list[Any], section: dict[str, Any], cases: dict[str, tuple[str, dict[str, Any] | None, float]]
) -> dict[str, Any]:
    """Return for each case, a type, an optimizer and the share of its state that is streamed, what ``_compare``
    tells."""
    streaming.PIECE_BYTES = 2**16
    return {name: _compare(model, rows, section, *case) for name, case in cases.items()}


def _compare(
    model: str, rows: list[Any], section: dict[str, Any], dtype: str, optimizer: dict[str, Any] | None, streamed: float
) -> dict[str, Any]:
    """Return a role that is offloaded before every call beside one that never is: how far they differ, and what was
    freed."""
    batch = batch_from_rows(*rows)
    stays = _role(model, section, dtype, optimizer)
    leaves = _role(model, section | {"offload": _everything_away(streamed)}, dtype, optimizer)
    before, after = _bytes_on_device(leaves), []
    held = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    leaves.offload()
    freed = held - torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    for _ in range(3):
        leaves.offload()
        after.append(_bytes_on_device(leaves))
        same = torch.equal(logprobs(stays, batch).logprobs, logprobs(leaves, batch).logprobs)
        leaves.offload()
        if optimizer:
            weights = token_weights(batch.response_mask, batch.cu_seqlens, "token_mean")
            steps = [update(role, batch, {"weights": weights}, negative_log_likelihood) for role in (stays, leaves)]
            same = same and steps[0] == steps[1]
    leaves.offload()
    expected, found = (_everything(role) for role in (stays, leaves))
    equal = [name for name in expected if torch.equal(expected[name], found[name])]
    return {
        "same_results": same,
        "before": before,
        "after": after,
        "gpu_freed": freed,
        "pieces": sum(len(streamed._pieces) for streamed in leaves.memory._streamed),
        "equal": sorted(equal),
        "all": sorted(expected),
    }


def learn_with_remainders(
    model: str, rows: list[Any], section: dict[str, Any], optimizer: dict[str, Any], steps: int
) -> dict[str, Any]:
    """Return how far a role whose master weights are remainders between steps is from one where they are whole, in
    units of float32 and as a share of all numbers, and bytes of both optimizers' state."""
    batch = batch_from_rows(*rows)
    fields = {"weights": token_weights(batch.response_mask, batch.cu_seqlens, "token_mean")}
    states, sizes = [], []
    for remainders in (False, True):
        role = _role(model, section, "bfloat16", optimizer | {"master_remainders": remainders})
        for _ in range(steps):
            update(role, batch, fields, negative_log_likelihood)
        states.append({name: value for name, value in role_tensors(role, {})[0].items() if "/weights/" in name})
        sizes.append(_bytes_on_device(role)["optimizer"])
        rounded = [main.bfloat16().float() for main in states[-1].values()]
        states[-1] |= {f"bfloat16 of {name}": value for name, value in zip(states[-1].copy(), rounded, strict=True)}
    whole, kept = (torch.cat([value.flatten() for value in of.values()]).view(torch.int32) for of in states)
    apart = (whole - kept).abs()
    return {"largest": int(apart.max()), "share": float((apart > 0).float().mean()), "bytes": sizes}


def memory_over_cycles(
    model: str, rows: list[Any], section: dict[str, Any], optimizer: dict[str, Any], dtype: str, cycles: int
) -> dict[str, list[int]]:
    """Return bytes of this process, and those that torch has of its GPU, as each of many cycles of offloading ends; of
    the latter those that grow by pages, in passes and at the end."""
    role = _role(model, section | {"offload": _everything_away(streamed=0.5)}, dtype, optimizer)
    batch = batch_from_rows(*rows)
    weights = token_weights(batch.response_mask, batch.cu_seqlens, "token_mean")
    found: dict[str, list[int]] = {"host": [], "device": [], "pages": [], "pages left": []}

    def objective(*given: Any) -> Any:
        found["pages"].append(_bytes_by_pages())
        return negative_log_likelihood(*given)

    for _ in range(cycles):
        logprobs(role, batch)
        role.offload()
        update(role, batch, {"weights": weights}, objective)
        role.offload()
        found["pages left"].append(_bytes_by_pages())
        found["host"].append(psutil.Process().memory_full_info().uss)
        found["device"].append(torch.cuda.memory_allocated() if torch.cuda.is_available() else 0)
    return found


def _bytes_by_pages() -> int:
    segments = torch.cuda.memory_snapshot() if torch.cuda.is_available() else []
    return sum(segment["total_size"] for segment in segments if segment["is_expandable"])


def inputs_left(
    model: str, rows: list[Any], section: dict[str, Any], optimizer: dict[str, Any], cases: dict[str, dict[str, Any]]
) -> dict[str, list[list[int]]]:
    """Return shapes of inputs of layers that are in memory after an update with each of the ``cases`` of
    ``recompute``."""
    batch = batch_from_rows(*rows)
    weights = token_weights(batch.response_mask, batch.cu_seqlens, "token_mean")
    found = {}
    for name, recompute in cases.items():
        role = _role(model, section | {"recompute": recompute}, "float32", optimizer)
        update(role, batch, {"weights": weights}, negative_log_likelihood)
        gc.collect()
        leaves = [each for each in gc.get_objects() if isinstance(each, Tensor) and each.requires_grad and each.is_leaf]
        # Inputs of layers are [tokens, 1, hidden]; no parameter has three dimensions.
        found[name] = [list(leaf.shape) for leaf in leaves if leaf.dim() == 3]
    return found


def _role(model: str, section: dict[str, Any], dtype: str, optimizer: dict[str, Any] | None) -> Role:
    """Return one with the weights of ``model``, data-parallel over all ranks."""
    architecture, world = read_architecture(model), dist.get_world_size()
    role = Role(
        "actor", architecture, Layout(data=world), range(world), RoleSection(**section), dtype=dtype, seed=1,
        optimizer=OptimizerSection(**optimizer) if optimizer else None,
    )  # fmt: skip
    with CheckpointFiles(model, architecture) as files:
        role.load(files)
    return role


def _everything_away(streamed: float) -> dict[str, Any]:
    """Return the section ``offload`` in which all memory leaves, and a share of the optimizer's state is streamed."""
    return dict.fromkeys(KINDS, True) | {"streamed_optimizer": streamed}


def learn_placed(
    models: dict[str, str], rows: list[Any], roles: dict[str, dict[str, Any]], section: dict[str, Any],
    optimizer: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """Return roles of a "language" or "scalar" head, each in its layout on its ranks, all alive: what they compute and
    learn.

    Every rank returns what every role found.
    """
    batch = batch_from_rows(*rows)
    generator = torch.Generator().manual_seed(5)
    fields = {
        "weights": token_weights(batch.response_mask, batch.cu_seqlens, "token_mean"),
        "returns": torch.randn(len(batch.tokens), generator=generator),
    }
    made: dict[str, PlacedRole] = {}
    for name, about in roles.items():
        architecture = read_architecture(models[about["head"]]).with_head(about["head"])
        made[name] = PlacedRole(
            name, architecture, Layout(**about["layout"]), about["ranks"], RoleSection(**section), dtype="float32",
            seed=1, optimizer=OptimizerSection(**optimizer) if about["learns"] else None, training_steps=3,
        )  # fmt: skip
        with CheckpointFiles(models[about["head"]], architecture) as files:
            made[name].load(files)
    found: dict[str, Any] = {name: {"steps": []} for name in roles}
    for _ in range(3):
        # Between here and the exchange no rank waits for one of another role.
        metrics = {
            name: update(role, batch, fields, _OBJECTIVES[roles[name]["head"]])
            for name, role in made.items()
            if roles[name]["learns"]
        }
        for name in metrics:
            found[name]["steps"].append(made[name].broadcast(metrics[name]))
    for name, role in made.items():
        is_language = roles[name]["head"] == "language"
        output = logprobs(role, batch).logprobs if is_language else scores(role, batch)
        found[name]["output"] = output.tolist()
        found[name]["here"] = role.local is not None
    return found


def _squared_error(values: Tensor, fields: dict[str, Tensor]) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    return ((values - fields["returns"]).square() * fields["weights"]).sum(), {}


_OBJECTIVES = {"language": negative_log_likelihood, "scalar": _squared_error}


def _everything(role: Role) -> dict[str, Tensor]:
    """Return parameters, and what a checkpoint has of the optimizer."""
    return {**role.parameters(), **(role_tensors(role, {})[0] if role.trainer else {})}


def _bytes_on_device(role: Role) -> dict[str, int]:
    """Return bytes of the distinct storages of each kind of memory."""
    memory: Any = role.memory
    storages = {kind: {t.untyped_storage()._cdata: t for t in memory._tensors(kind)} for kind in KINDS}
    return {kind: sum(t.untyped_storage().nbytes() for t in of_kind.values()) for kind, of_kind in storages.items()}
