"""Adapters as PEFT has them in files, for a mixture of experts too."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from rlhf_megatron.durable import whole_folder
from rlhf_megatron.models.architecture import Architecture, ModelError, read_config
from rlhf_megatron.models.families.wrappers import module_prefix, wrapper_of
from rlhf_megatron.models.hf_export import write_safetensors
from rlhf_megatron.models.hf_files import check_type, open_weights
from rlhf_megatron.models.lora import FACTORS, Adaptation, adapted_shapes, factor_of, factor_shapes, module_of
from rlhf_megatron.models.stacked import Stacked, joint_experts
from rlhf_megatron.models.weight_map import Region, is_expert, joins_adapters, stacked_tensors, tensor_shapes
from rlhf_megatron.runtime.finite import nonfinite
from rlhf_megatron.untrusted import read_json, reason_of, shown

PEFT_PREFIX = "base_model.model."  # what PEFT puts before the names of the model that it wraps
_HIGHEST_RANK = 1 << 20
# Of an adapter_config.json: what is read, and what changes nothing once an adapter is trained. All else must be unset.
_USUAL = {
    "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying", "eva_config",
    "exclude_modules", "inference_mode", "init_lora_weights", "layers_pattern", "loftq_config", "lora_alpha",
    "lora_dropout", "lora_ga_config", "megatron_config", "megatron_core", "peft_type", "peft_version",
    "qalora_group_size", "r", "revision", "target_modules", "target_parameters", "task_type", "use_rslora",
}  # fmt: skip
_PLAIN_BEGINNINGS = (True, False, None, "gaussian", "orthogonal", "eva")
# The parameters of all experts of a layer in transformers 5, and the expression by which PEFT finds the former.
_EXPERTS_GATE_UP, _EXPERTS_DOWN, _PATTERN = "experts.gate_up_proj", "experts.down_proj", r".*\.gate_up_proj"
_SHARED_FACTORS = (
    "in PEFT's own adapters of this model's experts gate and up share an A, and here each has one; start from adapters "
    "of single experts, or leave them out"
)
_DECODER, _WRAPPED, _OTHER_TOWERS = "model.", "model.language_model.", r"^(?!.*language_model\.).*"
PEFT_WEIGHTS, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"


class PeftAdapter:
    """A folder that PEFT's ``save_pretrained`` has written; a WeightSource."""

    def __init__(self, folder: str | Path, architecture: Architecture, adaptation: Adaptation) -> None:
        """Read all of it. Raises ModelError where it is not there, or is another adaptation than is asked for."""
        path = Path(folder)
        self._path = path / PEFT_WEIGHTS
        given = _read_config(path / PEFT_CONFIG)
        scale = _peft_scale(path / PEFT_CONFIG, given)
        if given["r"] != adaptation.rank or not math.isclose(scale, adaptation.scale, rel_tol=1e-6):
            raise ModelError(
                f"{path / PEFT_CONFIG}: rank {given['r']} and scale {scale:g}, but actor.lora has rank "
                f"{adaptation.rank} and scale {adaptation.scale:g}; set its rank, alpha and rank_stabilized to these"
            )
        try:
            with open_weights(self._path) as file:
                for name in file.keys():  # noqa: SIM118
                    check_type(self._path, shown(name), file.get_slice(name).get_dtype())
                tensors = {_own_name(name): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ModelError(f"{self._path}: cannot be read as safetensors ({reason_of(error)})") from error
        for unfit in nonfinite(tensors.items()):
            raise ModelError(f"{self._path}: {shown(unfit.name)} is not finite; train the adapter anew")
        is_joint = any(".experts.lora_" in name for name in tensors)
        wrappers = wrapped_stacks(architecture, adaptation, is_joint=is_joint)
        wanted = wrapped_shapes(factor_shapes(architecture, adaptation), wrappers)
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if shapes != wanted:
            odd = {name for name in wanted.keys() | shapes if wanted.get(name) != shapes.get(name)}
            if any(".experts.base_layer." in name for name in odd.intersection(shapes)):
                raise ModelError(f"{self._path}: {_SHARED_FACTORS}")
            first = min(odd)
            raise ModelError(
                f"{self._path}: {shown(first)} has shape {shapes.get(first, 'none')} and actor.lora asks for "
                f"{wanted.get(first, 'none')}; set its target_modules to those of {PEFT_CONFIG}"
            )
        self._tensors = unwrapped_factors(tensors, wrappers)
        if any(not torch.equal(each, tensors[name]) for name, each in wrapped_factors(self._tensors, wrappers).items()):
            raise ModelError(f"{self._path}: {_SHARED_FACTORS}")

    def read(self, tensor: str, region: Region) -> Tensor:
        """Return ``tensor[region]`` in the file's type on the CPU."""
        return self._tensors[tensor][tuple(slice(start, stop) for start, stop in region)]

    def where(self, tensor: str) -> str:
        """Return the path of the file."""
        return str(self._path)


def write_peft(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], architecture: Architecture, adaptation: Adaptation, base: str
) -> None:
    """Write ``tensors``, every A and B by name, as an adapter that PEFT reads, for the model in the folder ``base``.

    The folder appears whole and on disk, and an older one is then replaced. Raises OSError where the disk fails.
    """
    with whole_folder(folder) as partial:
        factors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors}
        write_factors(partial / PEFT_WEIGHTS, factors, architecture, adaptation, base)
        write_peft_config(partial, architecture, adaptation, base)


def write_factors(
    path: Path, factors: Mapping[str, Tensor], architecture: Architecture, adaptation: Adaptation, base: str
) -> None:
    """Write every A and B, on the CPU, as the file that PEFT reads for the model in the folder ``base``.

    Raises OSError where the disk fails.
    """
    config = _config_of(base)
    wrapper = wrapper_of(config)
    is_joint = joins_adapters(architecture) or (wrapper is not None and wrapper.joint_adapters)
    wrapped = wrapped_factors(factors, wrapped_stacks(architecture, adaptation, is_joint=is_joint))
    prefix = PEFT_PREFIX + module_prefix(config)
    named = {prefix + name.removeprefix(_DECODER): each for name, each in wrapped.items()}
    write_safetensors(path, named, {"format": "pt"})


def write_peft_config(folder: Path, architecture: Architecture, adaptation: Adaptation, base: str) -> None:
    """Write what stands beside the factors; raises OSError where the disk fails."""
    config = json.dumps(peft_config(architecture, adaptation, base), indent=2) + "\n"
    (folder / PEFT_CONFIG).write_text(config, encoding="utf-8")


def _config_of(base: str) -> dict[str, Any]:
    """Return the config.json of the model in a folder; empty where there is none."""
    return read_config(base) if os.path.lexists(Path(base) / "config.json") else {}


def _own_name(name: str) -> str:
    """Return a factor's name here, given PEFT's for the language model alone or within one of images and text."""
    inner = name.removeprefix(PEFT_PREFIX)
    return _DECODER + inner.removeprefix(_WRAPPED) if inner.startswith(_WRAPPED) else inner


def peft_config(architecture: Architecture, adaptation: Adaptation, base: str) -> dict[str, Any]:
    """Return the adapter_config.json of an adapter for the model ``base``.

    PEFT's own scale is lora_alpha / r, which gives any scale.
    """
    modules, parameters = _targets(architecture, adaptation)
    alpha = adaptation.scale * adaptation.rank
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adaptation.rank,
        "lora_alpha": alpha,
        "use_rslora": False,
        "target_modules": modules,
        # A vision tower has modules of these names too.
        **({"exclude_modules": _OTHER_TOWERS} if module_prefix(_config_of(base)) == _WRAPPED else {}),
        **({"target_parameters": parameters} if parameters else {}),
        **(_of_both(adaptation.rank, alpha) if _EXPERTS_GATE_UP in parameters else {}),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def _of_both(rank: int, alpha: float) -> dict[str, Any]:
    """Return the patterns for gate and up of experts, which PEFT has as one parameter with the adapters of both."""
    return {"rank_pattern": {_PATTERN: 2 * rank}, "alpha_pattern": {_PATTERN: 2 * alpha}}


def _targets(architecture: Architecture, adaptation: Adaptation) -> tuple[list[str], list[str]]:
    """Return (target_modules, target_parameters) of PEFT's.

    In transformers 5 an expert is no module: all of a layer are two parameters, whatever the checkpoint has. PEFT takes
    adapters of single experts all the same, as vLLM does, and stacks them as it reads them. It takes names of modules
    that experts had before for theirs alone, so that other layers of such a name are parameters too.
    """
    adapted, stack_of = adapted_shapes(architecture, adaptation), _stacks(architecture)
    of_experts = {module_of(tensor) for tensor in adapted if is_expert(tensor) and tensor not in stack_of}
    parameters = [stack_of[tensor].split(".", 3)[-1] for tensor in adapted if tensor in stack_of]
    if of_experts:
        by_stack = {_EXPERTS_GATE_UP: {"gate_proj", "w1"}, _EXPERTS_DOWN: {"down_proj", "w2"}}
        parameters = [name for name, modules in by_stack.items() if modules & of_experts]
        others = (tensor for tensor in adapted if not is_expert(tensor) and module_of(tensor) in of_experts)
        parameters += [tensor.split(".", 3)[-1] for tensor in others]
    modules = {module_of(tensor) for tensor in adapted if not is_expert(tensor)} - of_experts
    return [module for module in adaptation.modules if module in modules], list(dict.fromkeys(parameters))


def _stacks(architecture: Architecture) -> dict[str, str]:
    """Return the checkpoint's tensor that each tensor of the model is stacked in, of those that are."""
    return {part: name for name, stack in stacked_tensors(architecture).items() for part in stack.parts}


def wrapped_stacks(architecture: Architecture, adaptation: Adaptation, *, is_joint: bool) -> dict[str, Stacked]:
    """Return those stacks of a checkpoint that have adapters, by the name of PEFT's wrapper around their module.

    ``is_joint``: experts are stacked as transformers has them, whatever the checkpoint has.
    Several of a module have as many wrappers, each around the next, of which the first parameter has the innermost.
    """
    adapted = adapted_shapes(architecture, adaptation)
    by_module: dict[str, list[Stacked]] = {}
    stacks = stacked_tensors(architecture) or (joint_experts(tensor_shapes(architecture)) if is_joint else {})
    for name, stack in stacks.items():
        if stack.parts[0] in adapted:
            by_module.setdefault(name.rpartition(".")[0], []).append(stack)
    return {
        module + ".base_layer" * (len(stacks) - 1 - number): stack
        for module, stacks in by_module.items()
        for number, stack in enumerate(stacks)
    }


def wrapped_factors(factors: Mapping[str, Tensor], wrappers: Mapping[str, Stacked]) -> dict[str, Tensor]:
    """Return ``factors`` with those of each stack in one A [parts x rank, columns] and one B [rows, rank x parts].

    Parts that are one matrix there have the rows of their A, and in B the blocks beside which there are zeros.
    """
    wrapped = dict(factors)
    for module, stack in wrappers.items():
        down, up = ([wrapped.pop(factor_of(part, kind)) for part in stack.parts] for kind in FACTORS)
        matrices = range(0, len(up), stack.joined)
        of_matrices = [torch.block_diag(*up[first : first + stack.joined]) for first in matrices]
        wrapped[f"{module}.lora_A.weight"] = torch.cat(down)
        wrapped[f"{module}.lora_B.weight"] = torch.stack(of_matrices, dim=-1).flatten(1)
    return wrapped


def unwrapped_factors(wrapped: Mapping[str, Tensor], wrappers: Mapping[str, Stacked]) -> dict[str, Tensor]:
    """Return the inverse of ``wrapped_factors``."""
    factors = dict(wrapped)
    for module, stack in wrappers.items():
        down, up = (factors.pop(f"{module}.lora_{kind}.weight") for kind in FACTORS)
        of_matrices = up.unflatten(1, (-1, len(stack.parts) // stack.joined)).unbind(-1)
        blocks = [
            rows.chunk(stack.joined, dim=1)[number]
            for matrix in of_matrices
            for number, rows in enumerate(matrix.chunk(stack.joined))
        ]
        for part, a, b in zip(stack.parts, down.chunk(len(stack.parts)), blocks, strict=True):
            factors[factor_of(part, "A")], factors[factor_of(part, "B")] = a, b
    return factors


def wrapped_shapes(shapes: Mapping[str, Sequence[int]], wrappers: Mapping[str, Stacked]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of ``wrapped_factors``, given those of all factors."""
    empty = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    return {name: tuple(tensor.shape) for name, tensor in wrapped_factors(empty, wrappers).items()}


def _read_config(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path, ModelError)
    except ModelError as error:
        raise ModelError(
            f"{error}, so it is not that of a LoRA; actor.lora.path must be a folder that PEFT has written"
        ) from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: is not a JSON object; actor.lora.path must be a folder that PEFT has written")
    return content


def _peft_scale(path: Path, config: dict[str, Any]) -> float:
    """Return PEFT's factor of B A; raises ModelError for what a plain LoRA does not have."""
    rank, alpha = config.get("r"), config.get("lora_alpha")
    ranked = type(rank) is int and 0 < rank < _HIGHEST_RANK
    scaled = type(alpha) in (int, float) and 0 < alpha < math.inf  # type: ignore[operator]  # then it is a number
    if config.get("peft_type") != "LORA" or not ranked or not scaled:
        raise ModelError(f"{path}: peft_type, r or lora_alpha is not that of a LoRA, which alone can be read")
    assert rank is not None and alpha is not None
    both = {} if config.get("use_rslora") else _of_both(rank, alpha)
    unusual = [key for key in config if key not in _USUAL and config[key] and config[key] != both.get(key)]
    unusual += [key for key in ("bias",) if config.get(key, "none") != "none"]
    # Others have A and B belong to weights that PEFT changes as it loads them.
    unusual += [key for key in ("use_rslora",) if not isinstance(config.get(key), bool | None)]
    unusual += [key for key in ("init_lora_weights",) if config.get(key, True) not in _PLAIN_BEGINNINGS]
    if unusual:
        raise ModelError(
            f"{path}: {shown(unusual[0])}={shown(repr(config[unusual[0]]))} is not supported; train it without"
        )
    try:
        return float(alpha / (rank**0.5 if config.get("use_rslora") else rank))
    except OverflowError as error:
        raise ModelError(f"{path}: lora_alpha is not that of a LoRA ({error})") from error
