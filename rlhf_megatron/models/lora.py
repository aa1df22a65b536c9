"""Low-rank adapters (LoRA, arXiv 2106.09685) by the names and shapes of Hugging Face's tensors, as PEFT has them.

The adapter of a weight W [rows, columns] is A [rank, columns] and B [rows, rank], for W + scale x B A. Both are whole
on every rank that holds a part of the layer; which windows of them a rank's part of W needs follows from the weight
map, so that adapters know no layout.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch import Tensor

from rlhf_megatron.durable import whole_folder
from rlhf_megatron.models.architecture import Architecture, ModelError
from rlhf_megatron.models.hf_export import write_safetensors
from rlhf_megatron.models.hf_files import check_type, open_weights
from rlhf_megatron.models.weight_map import Block, Region, layer_of, tensor_shapes
from rlhf_megatron.recipe import LoraSection
from rlhf_megatron.runtime.finite import nonfinite
from rlhf_megatron.topology.layout import Layout
from rlhf_megatron.untrusted import read_json, reason_of, shown

Factor = Literal["A", "B"]
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
PEFT_PREFIX = "base_model.model."  # what PEFT puts before the names of the model that it wraps
_HIGHEST_RANK = 1 << 20
# Of an adapter_config.json: what is read, and what changes nothing once an adapter is trained. All else must be unset.
_USUAL = {
    "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying", "eva_config",
    "exclude_modules", "inference_mode", "init_lora_weights", "layers_pattern", "loftq_config", "lora_alpha",
    "lora_dropout", "lora_ga_config", "megatron_config", "megatron_core", "peft_type", "peft_version",
    "qalora_group_size", "r", "revision", "target_modules", "task_type", "use_rslora",
}  # fmt: skip
_PLAIN_BEGINNINGS = (True, False, None, "gaussian", "orthogonal", "eva")
PEFT_WEIGHTS, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"


@dataclasses.dataclass(frozen=True)
class Adaptation:
    """The layers that have adapters, their rank, and the factor of B A."""

    rank: int
    scale: float
    modules: tuple[str, ...]

    @classmethod
    def of(cls, section: LoraSection) -> Adaptation:
        """As a recipe asks for."""
        return cls(section.rank, section.scale, section.modules)


def factor_of(tensor: str, factor: Factor) -> str:
    """The name of A or B for a Hugging Face weight."""
    return f"{tensor.removesuffix('weight')}lora_{factor}.weight"


def adapted_shapes(architecture: Architecture, adaptation: Adaptation) -> dict[str, tuple[int, int]]:
    """The Hugging Face weights that have adapters, and their (rows, columns), in the order of the model."""
    return {
        name: (shape[0], shape[1])
        for name, shape in tensor_shapes(architecture).items()
        if layer_of(name) is not None and len(shape) == 2 and name.split(".")[-2] in adaptation.modules
    }


def fused_with(tensor: str) -> list[str]:
    """The Hugging Face weights of the linear layer of Megatron's that has ``tensor``, in its order."""
    if layer_of(tensor) is None:
        return [tensor]
    before, module, kind = tensor.rsplit(".", 2)
    layer = next((names for names in _FUSED if module in names), (module,))
    return [f"{before}.{name}.{kind}" for name in layer]


def factor_shapes(architecture: Architecture, adaptation: Adaptation) -> dict[str, tuple[int, ...]]:
    """Every A and B, and its shape."""
    shapes: dict[str, tuple[int, ...]] = {}
    for tensor, (rows, columns) in adapted_shapes(architecture, adaptation).items():
        shapes[factor_of(tensor, "A")] = (adaptation.rank, columns)
        shapes[factor_of(tensor, "B")] = (rows, adaptation.rank)
    return shapes


def adapter_layout(layout: Layout) -> Layout:
    """The layout of adapters on the ranks of a model in ``layout``: a stage's ranks all have those of its layers."""
    return Layout(
        pipeline=layout.pipeline,
        data=layout.size // layout.pipeline,
        virtual_pipeline=layout.virtual_pipeline,
        first_stage_layers=layout.first_stage_layers,
        last_stage_layers=layout.last_stage_layers,
    )


def parameter_name(factor: str) -> str:
    """The name of A or B as a parameter of torch's, which has no dots."""
    return factor.replace(".", "/")


def adapter_blocks(architecture: Architecture, adaptation: Adaptation, layout: Layout, position: int) -> list[Block]:
    """The blocks of the rank at ``position`` of an ``adapter_layout``, as ``megatron_blocks`` gives them for a model.

    The names of parameters begin with the chunk's number where a pipeline stage has several.
    """
    chunks = layout.stage_chunks(architecture.layers)[layout.coordinates(position).pipeline]
    chunk_of = {layer: chunk for chunk, layers in enumerate(chunks) for layer in layers}
    several = layout.virtual_pipeline > 1
    blocks = []
    for factor, shape in factor_shapes(architecture, adaptation).items():
        chunk = chunk_of.get(layer_of(factor) or 0)
        if chunk is not None:
            name = f"{chunk}." * several + parameter_name(factor)
            blocks.append(Block(factor, tuple((0, size) for size in shape), name, (0, 0)))
    return blocks


def whole_adapter_blocks(architecture: Architecture, adaptation: Adaptation) -> list[Block]:
    """Every A and B whole, under its own name: the destination of an export."""
    shapes = factor_shapes(architecture, adaptation).items()
    return [Block(name, tuple((0, size) for size in shape), name, (0, 0)) for name, shape in shapes]


class NewAdapters:
    """Adapters to start from, drawn from a seed, the same whatever the layout; a WeightSource.

    As PEFT draws them: A uniform within 1 / sqrt(columns) around 0, and B zero, so that the model is as it was.
    """

    def __init__(self, architecture: Architecture, adaptation: Adaptation, seed: int) -> None:
        self._shapes, self._seed = factor_shapes(architecture, adaptation), seed

    def read(self, tensor: str, region: Region) -> Tensor:
        """``tensor[region]`` in float32 on the CPU."""
        shape = self._shapes[tensor]
        whole = torch.zeros(shape)
        if tensor.endswith("lora_A.weight"):
            digest = hashlib.sha256(f"{self._seed}/{tensor}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
            bound = shape[1] ** -0.5
            whole = torch.rand(shape, generator=generator).mul_(2 * bound).sub_(bound)
        return whole[tuple(slice(start, stop) for start, stop in region)]

    def where(self, tensor: str) -> str:
        """The recipe section that they come from."""
        return "actor.lora"


class PeftAdapter:
    """A folder that PEFT's ``save_pretrained`` has written; a WeightSource."""

    def __init__(self, folder: str | Path, architecture: Architecture, adaptation: Adaptation) -> None:
        """Reads all of it. Raises ModelError where it is not there, or is another adaptation than is asked for."""
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
                self._tensors = {name.removeprefix(PEFT_PREFIX): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ModelError(f"{self._path}: cannot be read as safetensors ({reason_of(error)})") from error
        for unfit in nonfinite(self._tensors.items()):
            raise ModelError(f"{self._path}: {shown(unfit.name)} is not finite; train the adapter anew")
        wanted = factor_shapes(architecture, adaptation)
        shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}
        if shapes != wanted:
            odd = min(name for name in wanted.keys() | shapes if wanted.get(name) != shapes.get(name))
            raise ModelError(
                f"{self._path}: {shown(odd)} has shape {shapes.get(odd, 'none')} and actor.lora asks for "
                f"{wanted.get(odd, 'none')}; set its target_modules to those of {PEFT_CONFIG}"
            )

    def read(self, tensor: str, region: Region) -> Tensor:
        """``tensor[region]`` in the file's type on the CPU."""
        return self._tensors[tensor][tuple(slice(start, stop) for start, stop in region)]

    def where(self, tensor: str) -> str:
        """The path of the file."""
        return str(self._path)


def write_peft(folder: Path, tensors: Iterable[tuple[str, Tensor]], adaptation: Adaptation, base: str) -> None:
    """Writes ``tensors``, every A and B by name, as an adapter that PEFT reads, for the model ``base``.

    The folder appears whole and on disk, and an older one is then replaced. Raises OSError where the disk fails.
    """
    with whole_folder(folder) as partial:
        named = {PEFT_PREFIX + name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors}
        write_safetensors(partial / PEFT_WEIGHTS, named, {"format": "pt"})
        there = tuple(module for module in adaptation.modules if any(f".{module}." in name for name in named))
        config = json.dumps(peft_config(dataclasses.replace(adaptation, modules=there), base), indent=2) + "\n"
        (partial / PEFT_CONFIG).write_text(config, encoding="utf-8")


def peft_config(adaptation: Adaptation, base: str) -> dict[str, Any]:
    """The adapter_config.json of an adapter for the model ``base``.

    PEFT's own scale is lora_alpha / r, which gives any scale.
    """
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adaptation.rank,
        "lora_alpha": adaptation.scale * adaptation.rank,
        "use_rslora": False,
        "target_modules": list(adaptation.modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


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
    """Returns PEFT's factor of B A; raises ModelError for what a plain LoRA does not have."""
    rank, alpha = config.get("r"), config.get("lora_alpha")
    ranked = type(rank) is int and 0 < rank < _HIGHEST_RANK
    scaled = type(alpha) in (int, float) and 0 < alpha < math.inf  # type: ignore[operator]  # then it is a number
    if config.get("peft_type") != "LORA" or not ranked or not scaled:
        raise ModelError(f"{path}: peft_type, r or lora_alpha is not that of a LoRA, which alone can be read")
    assert rank is not None and alpha is not None
    unusual = [key for key in config if key not in _USUAL and config[key]]
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
