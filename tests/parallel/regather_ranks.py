"""What the ranks of the regathering tests run: an actor learns, its weights go to vLLM, and vLLM answers."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from parallel.whole_batches import logprobs, update
from rlhf_megatron.compat import megatron

megatron.install()

from rlhf_megatron.algorithms.aggregation import token_weights  # noqa: E402
from rlhf_megatron.checkpoint.hugging_face import export_weights  # noqa: E402
from rlhf_megatron.compat.vllm import internals  # noqa: E402
from rlhf_megatron.data.rollout_batch import batch_from_rows  # noqa: E402
from rlhf_megatron.loops.sft import negative_log_likelihood  # noqa: E402
from rlhf_megatron.models.architecture import check_generates, read_architecture, read_config, wrapped_language  # noqa: E402
from rlhf_megatron.models.file_form import form_in_files  # noqa: E402
from rlhf_megatron.models.hf_export import Companions  # noqa: E402
from rlhf_megatron.models.hf_files import CheckpointFiles  # noqa: E402
from rlhf_megatron.recipe import ActorSection, OptimizerSection, RoleSection, RolloutSection  # noqa: E402
from rlhf_megatron.regather.execute import Regather  # noqa: E402
from rlhf_megatron.regather.learned_rollout import check_engine, learned_rollout_blocks  # noqa: E402
from rlhf_megatron.regather.peer_memory import map_peers  # noqa: E402
from rlhf_megatron.regather.plan import plan_regather  # noqa: E402
from rlhf_megatron.regather.shard_specs import rollout_shards  # noqa: E402
from rlhf_megatron.roles.role import Role  # noqa: E402
from rlhf_megatron.rollout.engine import Request, Sampling  # noqa: E402
from rlhf_megatron.rollout.vllm.vllm_engine import VllmEngine  # noqa: E402
from rlhf_megatron.topology.layout import Layout  # noqa: E402

_ENGINES: list[VllmEngine] = []


def learn_and_answer(
    model: str,
    layout: dict[str, int],
    rollout_layout: dict[str, Any],
    rows: list[Any],
    prompts: list[list[int]],
    updates: int,
    exported: str,
    dtype: str = "float32",
    staging_bytes: int = 4096,
    direct_bytes: int = 2048,
    rollout: dict[str, Any] | None = None,
    peer_memory: bool = False,
    lora: dict[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Return for each update: vLLM's greedy and sampled answers, the trainer's logprobs of the latter, and an export.

    Staging is small, so that weights travel in many rounds, and some of them directly; or they are read.
    """
    architecture, world, rank = read_architecture(model).for_rows(48), dist.get_world_size(), dist.get_rank()
    check_generates(architecture, model)
    learning = OptimizerSection(learning_rate=2e-3, weight_decay=0.0)
    role = Role(
        "actor",
        architecture,
        Layout(**layout),
        range(world),
        ActorSection(tokens_per_gpu=200, optimizer=learning, lora=lora),
        dtype=dtype,
        seed=1,
        optimizer=learning,
    )
    with CheckpointFiles(model, architecture) as files:
        role.load(files)
    section = RolloutSection(max_response_length=16, layout=rollout_layout, **(rollout or {}))
    tensor, whole = section.layout.tensor, section.layout.expert_parallel
    learned = learned_rollout_blocks(architecture, model, range(world), tensor, whole, dtype, exported)
    engine = VllmEngine(model, section, dtype, 32, seed=1, language=wrapped_language(model))
    _ENGINES.append(engine)
    if learned is not None:
        check_engine(architecture, learned[rank % tensor], list(engine.parameters()), model)
    for parameter in engine.parameters().values():
        parameter.fill_(torch.nan)  # what a regathering leaves out is seen
    wanted = rollout_shards(architecture, tensor, range(world), whole, learned)
    plan = plan_regather(role.shard_spec(), wanted, rank)
    weights_dtype = next(iter(engine.parameters().values())).dtype
    peers = map_peers(plan, role.parameters()) if peer_memory else None
    regather = Regather(
        plan, weights_dtype, role.device, None, staging_bytes, direct_bytes, getattr(torch, dtype), peers
    )
    batch = batch_from_rows(*rows)
    weights = token_weights(batch.response_mask, batch.cu_seqlens, "token_mean")
    results = []
    for number in range(updates):
        engine.sleep()
        update(role, batch, {"weights": weights}, negative_log_likelihood)
        engine.wake_weights()
        regather.run(role.parameters(), engine.parameters())
        engine.wake_kv_cache()
        engine.weights_updated(number + 1)
        requests = [Request(row, prompt, seed=row + 1) for row, prompt in enumerate(prompts)]
        greedy = engine.generate(requests, Sampling(0.0, 1.0, -1, 12, [1]))
        sampled = engine.generate(requests, Sampling(1.0, 1.0, -1, 12, [1]))
        own = logprobs(role, batch_from_rows(prompts, [completion.token_ids for completion in sampled]))
        if results:  # what the engine would be off by if it had missed this update
            later = logprobs(role, batch_from_rows(prompts, results[-1]["sampled"]))
            results[-1]["later_logprobs"] = later.logprobs[later.logprobs != 0].tolist()
        export_weights(
            Path(exported) / f"update-{number}", Companions(Path(model)), architecture, role.shard_spec(),
            role.parameters(), getattr(torch, dtype), role.device,
        )  # fmt: skip
        latent = latent_halves(engine)
        differing = differ_from_loading(engine, Path(exported) / f"update-{number}")
        results.append(
            {
                "differing": differing,
                "latent": latent,
                "greedy": [completion.token_ids for completion in greedy],
                "sampled": [completion.token_ids for completion in sampled],
                "rollout_logprobs": [value for completion in sampled for value in completion.logprobs],
                "trainer_logprobs": own.logprobs[own.logprobs != 0].tolist(),
                "versions": sorted({completion.weight_version for completion in greedy}),
                "bytes_received": regather.bytes_received,
                "reads": peers is not None,
            }
        )
    return results


def latent_halves(engine: VllmEngine) -> dict[str, list[Any]]:
    """Return of each half of an up projection of latents, which vLLM keeps for decoding: whether it is what the
    projection says, and its address."""
    found = {}
    for name, module in internals.model(engine._engine).named_modules():
        if not hasattr(module, "W_UK_T"):
            continue
        by_head = module.kv_b_proj.weight.T.reshape(module.kv_lora_rank, module.num_heads, -1)
        of_keys, of_values = by_head.split([module.qk_nope_head_dim, module.v_head_dim], dim=-1)
        for half, wanted in (("W_UK_T", of_keys.permute(1, 2, 0)), ("W_UV", of_values.transpose(0, 1))):
            held = getattr(module, half)
            found[f"{name}.{half}"] = [torch.equal(held, wanted), held.data_ptr()]
    return found


def follow_families(cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Run ``learn_and_answer`` for several models, one after the other: the result of each, or the traceback of a
    failure.

    Engines are kept to the end, since one that is collected ends torch.distributed for the process.
    """
    results: dict[str, Any] = {}
    for name, arguments in cases.items():
        try:
            results[name] = learn_and_answer(**arguments)
        except Exception:
            results[name] = {"failed": traceback.format_exc()}
    return results


def differ_from_loading(engine: VllmEngine, folder: Path) -> list[str]:
    """Return the engine's parameters that are not, bit for bit, what vLLM's own loader makes of the files in
    ``folder``.

    In the end the engine has the loaded ones, in the same places.
    """
    parameters = engine.parameters()
    regathered = {name: parameter.clone() for name, parameter in parameters.items()}
    for parameter in parameters.values():
        parameter.fill_(torch.nan)
    internals.model(engine._engine).load_weights(stored_language(folder))
    return [name for name, parameter in parameters.items() if not torch.equal(parameter, regathered[name])]


def stored_language(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the files in ``folder`` as that of a language model alone has them."""
    stored = {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}
    config, architecture = read_config(folder), read_architecture(folder)
    form = form_in_files(config, architecture, stored, lambda name: tuple(stored[name].shape))
    language = {form.model_name(name): tensor for name, tensor in stored.items() if not form.is_other_tower(name)}
    with CheckpointFiles(folder, architecture) as files:
        for name, stack in form.stacked.items() if form.has_towers else ():
            language |= {part: files.read(part, ()) for part in stack.parts}
            del language[name]
    yield from language.items()


def follow_files(
    models: list[str], layouts: dict[str, dict[str, int]], rollout_layout: dict[str, Any]
) -> dict[str, Any]:
    """Run one engine, fed by a frozen role in each of ``layouts``, whose weights come from ``models`` by turns.

    For each layout the parameters that differ from what vLLM's own loader makes of the same files, and the version.
    """
    architecture, world, rank = read_architecture(models[0]), dist.get_world_size(), dist.get_rank()
    section = RolloutSection(max_response_length=16, layout=rollout_layout)
    engine = VllmEngine(models[0], section, "float32", 32, seed=1)
    wanted = rollout_shards(architecture, section.layout.tensor, range(world), section.layout.expert_parallel)
    found = {}
    frozen = RoleSection(tokens_per_gpu=64)
    for number, (name, layout) in enumerate(layouts.items()):
        model = models[number % len(models)]
        role = Role(name, architecture, Layout(**layout), range(world), frozen, dtype="float32", seed=number)
        with CheckpointFiles(model, architecture) as files:
            role.load(files)
        for parameter in engine.parameters().values():
            parameter.fill_(torch.nan)  # what a regathering leaves out is seen
        plan = plan_regather(role.shard_spec(), wanted, rank)
        Regather(plan, torch.float32, role.device, staging_bytes=65536).run(role.parameters(), engine.parameters())
        engine.weights_updated(number + 1)  # which looks whether a parameter has moved
        found[name] = differ_from_loading(engine, Path(model))
    return found
