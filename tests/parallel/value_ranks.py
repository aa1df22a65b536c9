"""What the ranks of the tests of scalar heads run: critics and reward models in several layouts, all alive at once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.whole_batches import logprobs, scores, update, values
from rlhf_megatron.compat import megatron

megatron.install()

from rlhf_megatron.algorithms.aggregation import token_weights  # noqa: E402
from rlhf_megatron.checkpoint.hugging_face import export_weights  # noqa: E402
from rlhf_megatron.data.packing import assign_rows  # noqa: E402
from rlhf_megatron.data.prompts import Prompt  # noqa: E402
from rlhf_megatron.data.rollout_batch import RolloutBatch, batch_from_rows  # noqa: E402
from rlhf_megatron.data.row_numbers import SpreadRows, numbers_of  # noqa: E402
from rlhf_megatron.data.tokenizer_loading import load_tokenizer  # noqa: E402
from rlhf_megatron.loops.reward_modeling import bradley_terry  # noqa: E402
from rlhf_megatron.models.architecture import Head, read_architecture  # noqa: E402
from rlhf_megatron.models.heads import ScalarHead  # noqa: E402
from rlhf_megatron.models.hf_export import Companions  # noqa: E402
from rlhf_megatron.models.hf_files import CheckpointFiles  # noqa: E402
from rlhf_megatron.recipe import OptimizerSection, RoleSection  # noqa: E402
from rlhf_megatron.roles.outputs import SCORES  # noqa: E402
from rlhf_megatron.roles.reward_model import RewardModel  # noqa: E402
from rlhf_megatron.roles.role import Role  # noqa: E402
from rlhf_megatron.roles.shares import Home  # noqa: E402
from rlhf_megatron.topology.layout import Layout  # noqa: E402


def squared_error(values: Tensor, fields: dict[str, Tensor]) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """Return the plainest objective of a critic."""
    return ((values - fields["returns"]).square() * fields["weights"]).sum(), {}


def make_role(
    model: str, layout: dict[str, int], head: Head, section: dict[str, Any], optimizer: dict[str, Any] | None,
    steps: int, dtype: str, shares_prompts: bool = False,
) -> Role:  # fmt: skip
    """Return a role on all ranks with the weights of ``model``; it learns if there is an ``optimizer``."""
    architecture = read_architecture(model).with_head(head)
    role = Role(
        f"{head} {layout}",
        architecture,
        Layout(**layout),
        range(dist.get_world_size()),
        RoleSection(**section),
        dtype=dtype,
        seed=1,
        optimizer=OptimizerSection(**optimizer) if optimizer else None,
        training_steps=steps,
        shares_prompts=shares_prompts,
    )
    with CheckpointFiles(model, architecture) as files:
        role.load(files)
    return role


def learn_from_values(
    model: str, layout: dict[str, int], rows: list[Any], optimizer: dict[str, Any], shares_prompts: bool
) -> dict[str, Any]:
    """Return a critic's values before and after two updates, and the norms of their gradients."""
    role = make_role(model, layout, "scalar", {"tokens_per_gpu": 70}, optimizer, 2, "float32", shares_prompts)
    batch = batch_from_rows(*rows)
    weights = token_weights(batch.response_mask, batch.cu_seqlens, "token_mean")
    fields = {"weights": weights, "returns": torch.arange(len(batch.tokens)) / len(batch.tokens)}
    before = values(role, batch)
    updates = [update(role, batch, fields, squared_error) for _ in range(2)]
    norms = [metrics["grad_norm"] for metrics in updates]
    return {"before": before.tolist(), "after": values(role, batch).tolist(), "grad_norms": norms}


def learn_scalars(
    models: dict[str, str], layouts: dict[str, dict[str, int]], section: dict[str, Any], optimizer: dict[str, Any],
    steps: int, rows: list[Any], returns: list[float], pairs: list[Any], margins: list[float], folder: str, actor: str,
    rollouts: dict[str, Any], dtype: str = "float32",
) -> dict[str, Any]:  # fmt: skip
    """Return for each name: a critic and a reward model of that layout from that classifier, which compute and learn.

    Beside them all a language model ``actor`` in the last layout computes logprobs.
    """
    batch, paired = batch_from_rows(*rows), batch_from_rows(*pairs)
    critics = {
        name: make_role(models[name], layout, "scalar", section, optimizer, steps, dtype)
        for name, layout in layouts.items()
    }
    judges = {
        name: make_role(models[name], layout, "scalar", section, optimizer, steps, dtype)
        for name, layout in layouts.items()
    }
    policy = make_role(actor, list(layouts.values())[-1], "language", section, None, 1, dtype)
    results: dict[str, Any] = {}
    for name in layouts:
        critic, judge = critics[name], judges[name]
        export(critic, Path(folder) / f"{name}_imported", models[name])
        of_tokens, of_rows = values(critic, batch), scores(critic, paired)
        of_rollouts = score_rollouts(judge, **rollouts)
        of_values = [learn_values(critic, batch, returns) for _ in range(steps)]
        of_scores = [learn_scores(judge, paired, margins) for _ in range(steps)]
        export(critic, Path(folder) / f"{name}_critic", models[name])
        export(judge, Path(folder) / f"{name}_judge", models[name])
        results[name] = {
            "values": of_tokens[batch.response_mask].tolist(),
            "elsewhere": float(of_tokens[~batch.response_mask].abs().sum()),
            "scores": of_rows.tolist(),
            "of_rollouts": of_rollouts.tolist(),
            "value_updates": of_values,
            "score_updates": of_scores,
        }
    results["logprobs"] = logprobs(policy, batch).logprobs[batch.response_mask].tolist()
    return results


def score_rollouts(
    judge: Role, conversations: list[Any], answers: list[str], policy_tokenizer: str, chat_template: str,
    judge_tokenizer: str,
) -> Tensor:  # fmt: skip
    """Return scores of rollouts that are in the policy's tokens, each ended by its end token."""
    ranks = tuple(judge.ranks)
    data = judge.layout.coordinates(judge.shard.position).data
    leaders = tuple(ranks[judge.layout.position(0, each, 0)] for each in range(judge.layout.data))
    placed: Any = SimpleNamespace(
        local=judge,
        home=Home((), leaders, data, judge.groups.model),
        assign=lambda numbers: assign_rows(numbers.lengths, judge.layout.data),
    )
    policy = load_tokenizer(policy_tokenizer, chat_template=chat_template)
    prompts = [policy.encode_chat(messages) for messages in conversations]
    responses = [[*tokens, policy.eos_token_id] for tokens in policy.encode_many(answers)]
    reward_model = RewardModel(placed, load_tokenizer(judge_tokenizer), policy)
    batch = batch_from_rows(prompts, responses)
    # One rank holds every other row, the last one the rest.
    rank, world = dist.get_rank(), dist.get_world_size()
    holder = torch.arange(batch.rows) % 2 * (world - 1)
    own = (holder == rank).nonzero().flatten().tolist()
    rows = SpreadRows(numbers_of(batch, holder), batch.select(own), rank)
    asked = [Prompt(row, "", tuple(prompts[row]), "", {}, tuple(conversations[row])) for row in own]
    return reward_model.scores(rows, asked)


def head_over_a_cut_sequence(hidden: list[Any], weight: list[float], push: list[float]) -> dict[str, list[float]]:
    """Return a scalar head whose input is cut over the ranks' sequence, as Transformer Engine's layers leave it.

    hidden [t, h]; the loss is the sum of ``push`` [t] times the values. Returns all values, the gradient of this rank's
    part of ``hidden``, and this rank's part of the weight's gradient, which Megatron sums over what is marked.
    """
    config: Any = SimpleNamespace(hidden_size=len(weight), sequence_parallel=True, params_dtype=torch.float32)
    head = ScalarHead(config, dist.group.WORLD)
    head.weight.data.copy_(torch.tensor([weight]))
    mine = torch.tensor(hidden).chunk(dist.get_world_size())[dist.get_rank()].unsqueeze(1).requires_grad_()
    values = head(mine)[0].reshape(-1)
    (values * torch.tensor(push)).sum().backward()
    assert head.weight.sequence_parallel and head.weight.grad is not None and mine.grad is not None
    return {"values": values.tolist(), "of_hidden": mine.grad.tolist(), "of_weight": head.weight.grad[0].tolist()}


def learn_values(critic: Role, batch: RolloutBatch, returns: list[float]) -> dict[str, float]:
    """Take one step towards ``returns``, one for each sampled token."""
    targets = torch.zeros(len(batch.tokens)).masked_scatter(batch.response_mask, torch.tensor(returns))
    weights = token_weights(batch.response_mask, batch.cu_seqlens, "token_mean")
    return update(critic, batch, {"returns": targets, "weights": weights}, squared_error)


def learn_scores(judge: Role, batch: RolloutBatch, margins: list[float]) -> dict[str, float]:
    """Take one step of the Bradley-Terry loss; the rows are pairs."""
    fields = {
        "margins": torch.tensor(margins).repeat_interleave(2),
        "weights": torch.full([batch.rows], 2 / batch.rows),
    }
    return update(judge, batch, fields, bradley_terry, output=SCORES, rows_together=2)


def export(role: Role, folder: Path, companions: str) -> None:
    """Write the role as a Hugging Face folder."""
    parameters = role.parameters()
    files = Companions(Path(companions))
    export_weights(folder, files, role.architecture, role.shard_spec(), parameters, torch.float32, role.device)
