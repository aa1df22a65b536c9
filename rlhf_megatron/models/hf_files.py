"""Hugging Face checkpoint files: reading rectangles of tensors, and writing a checkpoint in shards.

Only safetensors files are read, so loading never runs code from a file. Which rectangle goes where is the matter of
``weight_map``; who holds it, of ``regather``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlhf_megatron.data.chat_template import read_template
from rlhf_megatron.durable import whole_folder
from rlhf_megatron.models.architecture import Architecture, Head, ModelError, classifier_config, read_config
from rlhf_megatron.models.config_fields import read_model_json
from rlhf_megatron.models.weight_map import SCORE, Block, Region, tensor_shapes
from rlhf_megatron.runtime.finite import are_finite, nonfinite
from rlhf_megatron.runtime.watchdog import watchdog
from rlhf_megatron.untrusted import check_regular, reason_of, shown

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_WEIGHT_TYPES = ("F64", "F32", "F16", "BF16")  # by safetensors' names
# What a model folder holds beside its weights: configs, the tokenizer, the chat template, and code for either.
_COMPANION_SUFFIXES = (".json", ".txt", ".model", ".tiktoken", ".jinja", ".py")
# What files of Llama 2's time have of the decoder, and is computed today.
_DECODER, _FORMER_BUFFER = ("model.", "lm_head."), "rotary_emb.inv_freq"
_EMBEDDING, _OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
_OF_THE_MODEL = ("generation_config.json",)
_CHAT_TEMPLATE, _SENTENCEPIECE = "chat_template.jinja", "tokenizer.model"


@dataclasses.dataclass(frozen=True)
class Companions:
    """Where the files beside the weights of an exported model come from."""

    model: Path  # a folder: the config
    tokenizer: Path | None = None  # a folder or a sentencepiece file; None: the model's folder
    chat_template: str | None = None  # in place of the tokenizer's own

    def copy_to(self, folder: Path) -> None:
        """Copies all but config.json."""
        of_model = _small_files(self.model)
        if self.tokenizer is None:
            copied = of_model
        else:
            copied = [file for file in of_model if file.name in _OF_THE_MODEL or file.suffix == ".py"]
            if self.tokenizer.is_dir():
                copied += [file for file in _small_files(self.tokenizer) if file.name not in _OF_THE_MODEL]
            else:
                shutil.copy(self.tokenizer, folder / _SENTENCEPIECE)
        for file in copied:
            shutil.copy(file, folder / file.name)
        if self.chat_template is not None:
            (folder / _CHAT_TEMPLATE).write_text(self.chat_template, encoding="utf-8")


def companions_of(model: str, tokenizer: str | None, chat_template: str | None) -> Companions:
    """Those of a run whose recipe has these paths; the template is read now, as for the run itself.

    Raises DataError where the template cannot be read.
    """
    template = read_template(chat_template) if chat_template else None
    return Companions(Path(model), Path(tokenizer) if tokenizer else None, template)


def _small_files(folder: Path) -> list[Path]:
    """What a model folder holds beside its weights and its config.json."""
    files = [file for file in sorted(folder.iterdir()) if file.suffix in _COMPANION_SUFFIXES and file.is_file()]
    return [file for file in files if file.name != "config.json" and not file.name.endswith(".index.json")]


class WeightSource(Protocol):
    """Anything that gives rectangles of Hugging Face tensors."""

    def read(self, tensor: str, region: Region) -> Tensor:
        """``tensor[region]``, on the CPU or the current device; all of it where the region is empty."""
        ...

    def where(self, tensor: str) -> str:
        """What holds it, for errors: a file."""
        ...


class CheckpointFiles:
    """The safetensors files of one Hugging Face folder, opened lazily; a context manager."""

    def __init__(self, folder: str | Path, architecture: Architecture, new_head_seed: int | None = None) -> None:
        """Finds every tensor of ``architecture``, and reads headers alone.

        Raises ModelError naming what is damaged, is missing, has another shape, or belongs to another model.

        With ``new_head_seed`` a scalar head that the folder lacks, since it holds a language model, is drawn from it.
        """
        self.folder = Path(folder)
        self._open = contextlib.ExitStack()
        self._files: dict[str, Any] = {}
        self._file_of = self._locate()
        self._shapes = tensor_shapes(architecture)
        self._new_head: RandomWeights | None = None
        if new_head_seed is not None and SCORE in self._shapes and SCORE not in self._file_of:
            self._new_head = RandomWeights(architecture, new_head_seed, torch.device("cpu"))
        drawn = {SCORE} if self._new_head else set()
        missing = [name for name in self._shapes if name not in self._file_of and name not in drawn]
        if missing:
            raise ModelError(
                f"{self.folder}: {len(missing)} of {len(self._shapes)} tensors are missing, the first is {missing[0]}"
            )
        self._check_headers()
        if architecture.tied_embeddings and architecture.head == "language":
            self._check_tied()

    def _locate(self) -> dict[str, Path]:
        index = self.folder / _INDEX
        if os.path.lexists(index):
            content = read_model_json(index)
            names = content.get("weight_map") if isinstance(content, dict) else None
            if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
                raise ModelError(f"{index}: has no weight_map of tensors and their files; download the model again")
            for file in names.values():
                if Path(file).name != file:
                    raise ModelError(f"{index}: names the file {shown(repr(file))}, which does not lie in this folder")
            if os.path.lexists(self.folder / _SINGLE) and _SINGLE not in names.values():
                raise ModelError(
                    f"{shown(self.folder)}: has {_SINGLE} and {_INDEX}, which names other files; remove those that "
                    "are not the model's, since others would read the former"
                )
            return {name: self.folder / file for name, file in names.items()}
        single = self.folder / _SINGLE
        if not os.path.lexists(single):
            raise ModelError(
                f"{shown(self.folder)}: neither {_SINGLE} nor {_INDEX} is there; "
                "model.path must hold safetensors weights (or set model.random_weights=true)"
            )
        return dict.fromkeys(self._reader(single).keys(), single)

    def _check_headers(self) -> None:
        """Every tensor's place, shape and type, which files tell at their beginnings: before memory is taken."""
        held = {path: set(self._reader(path).keys()) for path in set(self._file_of.values())}
        for path, names in held.items():
            for name in names:
                if self._file_of.get(name) != path and (name in self._shapes or name.startswith(_DECODER)):
                    raise ModelError(
                        f"{path}: has {shown(name)}, which {_INDEX} does not look for there; download the model again"
                    )
        for name, path in self._file_of.items():
            if name not in held[path]:
                raise ModelError(f"{path}: {shown(name)} is not there, and {_INDEX} says so; download the model again")
            if name not in self._shapes:
                self._check_surplus(name, path)
                continue
            piece = self._reader(path).get_slice(name)
            shape = tuple(piece.get_shape())
            if shape != self._shapes[name]:
                raise ModelError(f"{path}: {name} has shape {shape}, config.json asks for {self._shapes[name]}")
            check_type(path, name, piece.get_dtype())

    def _check_surplus(self, name: str, path: Path) -> None:
        """A tensor of the decoder that nothing reads belongs to another model; heads of other uses do no harm."""
        if name.startswith(_DECODER) and name != _OUTPUT and not name.endswith(_FORMER_BUFFER):
            raise ModelError(
                f"{path}: {shown(name)} is no tensor of the model that config.json describes; they do not belong "
                "together"
            )

    def _check_tied(self) -> None:
        """An output layer beside tied embeddings is the embeddings again: transformers would use another one."""
        path = self._file_of.get(_OUTPUT)
        if path is not None and not torch.equal(self.read(_OUTPUT, ()), self.read(_EMBEDDING, ())):
            raise ModelError(
                f"{path}: {_OUTPUT} is not {_EMBEDDING}, and config.json says that they are one "
                "(tie_word_embeddings); set it to false, or download the model again"
            )

    def _reader(self, path: Path) -> Any:
        if str(path) not in self._files:
            self._files[str(path)] = self._open.enter_context(open_weights(path))
        return self._files[str(path)]

    def read(self, tensor: str, region: Region) -> Tensor:
        """``tensor[region]`` on the CPU in the file's dtype; only these bytes are read."""
        if tensor == SCORE and self._new_head:
            return self._new_head.read(tensor, region)
        path = self._file_of[tensor]
        try:
            piece = self._reader(path).get_slice(tensor)
            selected: Tensor = piece[tuple(slice(start, stop) for start, stop in region)]
        except SafetensorError as error:
            raise ModelError(
                f"{path}: {tensor} cannot be read ({reason_of(error)}); download the model again"
            ) from error
        return selected

    def where(self, tensor: str) -> str:
        """The path of its file."""
        return str(self._file_of.get(tensor, self.folder))

    def __enter__(self) -> CheckpointFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()


class RandomWeights:
    """Weights drawn from a seed, the same whatever the layout: norms 1, biases 0, the rest N(0, 0.02).

    A scalar head has the standard deviation 1 / (hidden + 1), so that the first values are near 0.
    """

    def __init__(self, architecture: Architecture, seed: int, device: torch.device) -> None:
        self._shapes, self._seed, self._device = tensor_shapes(architecture), seed, device

    def read(self, tensor: str, region: Region) -> Tensor:
        """``tensor[region]`` in float32; the whole tensor is drawn so that every layout sees the same numbers."""
        shape = self._shapes[tensor]
        if tensor.endswith("norm.weight"):
            whole = torch.ones(shape, device=self._device)
        elif tensor.endswith(".bias"):
            whole = torch.zeros(shape, device=self._device)
        else:
            digest = hashlib.sha256(f"{self._seed}/{tensor}".encode()).digest()
            generator = torch.Generator(self._device).manual_seed(int.from_bytes(digest[:7], "little"))
            deviation = 1.0 / (shape[1] + 1) if tensor == SCORE else 0.02
            whole = torch.randn(shape, generator=generator, device=self._device).mul_(deviation)
        return whole[tuple(slice(start, stop) for start, stop in region)]

    def where(self, tensor: str) -> str:
        """What they are drawn by."""
        return "model.random_weights"


def open_weights(path: Path) -> Any:
    """A safetensors file, as a context manager; raises ModelError where it is none, or is no file at all."""
    check_regular(path, ModelError)  # a pipe would be waited for
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError, MemoryError) as error:
        reason = reason_of(error)
        raise ModelError(f"{path}: cannot be read as safetensors ({reason}); download the model again") from error


def check_types(folder: str | Path) -> None:
    """``check_type`` of every tensor of a model folder, for those who leave the reading to others.

    Raises ModelError as it does; says nothing of a model whose config.json names its quantisation.
    """
    if "quantization_config" in read_config(folder):
        return
    for path in sorted(Path(folder).glob("*.safetensors")):
        with open_weights(path) as file:
            for name in file.keys():  # noqa: SIM118
                check_type(path, shown(name), file.get_slice(name).get_dtype())


def check_type(path: Path, tensor: str, kind: str) -> None:
    """Raises ModelError where a tensor's numbers are of a type (safetensors' name) that weights are not: whole numbers
    and those of a quantisation would be taken at their face value."""
    if kind not in _WEIGHT_TYPES:
        raise ModelError(
            f"{path}: {tensor} has numbers of type {kind}, and weights are {', '.join(_WEIGHT_TYPES)}; take a model "
            "that is not quantised, or download it again"
        )


@torch.no_grad()
def load_blocks(blocks: Sequence[Block], parameters: dict[str, Tensor], source: WeightSource) -> None:
    """Fills ``parameters`` (by name) from ``source``; what no block covers (vocabulary padding) becomes zero.

    Raises ModelError where blocks and parameters do not name the same set, and where a parameter is not finite then.
    """
    named = {block.parameter for block in blocks}
    if named != set(parameters):
        odd = sorted(named ^ set(parameters))
        raise ModelError(f"the weight map and the model disagree on {len(odd)} parameters, the first is {odd[0]}")
    for parameter in parameters.values():
        parameter.zero_()
    for block in blocks:
        watchdog.beat()  # a large model takes its time
        window(parameters[block.parameter], block.offset, block.region).copy_(source.read(block.tensor, block.region))
    finite = dict(zip(parameters, are_finite(parameters.values()), strict=True))
    for block in blocks:
        if not finite[block.parameter]:
            _refuse_nonfinite(block.tensor, parameters[block.parameter].dtype, source)


def _refuse_nonfinite(tensor: str, dtype: torch.dtype, source: WeightSource) -> None:
    """Raises ModelError where a tensor is not finite as ``dtype``; of all of it, so that every rank says the same."""
    whole = source.read(tensor, ())
    given, cast = nonfinite([(tensor, whole)]), nonfinite([(tensor, whole.to(dtype))])
    if given:
        count = given[0].nan + given[0].infinite
        raise ModelError(
            f"{source.where(tensor)}: {tensor} holds {count} values that are not finite (NaN or infinity); download "
            "the model again"
        )
    if cast:
        kind, largest = str(dtype).removeprefix("torch."), torch.finfo(dtype).max
        raise ModelError(
            f"{source.where(tensor)}: {tensor} holds {cast[0].infinite} values beyond {largest:.3g}, the largest of "
            f"{kind}; set model.dtype to a type that has them, or take another model"
        )


def window(parameter: Tensor, offset: Sequence[int], region: Region) -> Tensor:
    """The view of ``parameter`` that begins at ``offset`` and has ``region``'s extents.

    vLLM stacks the matrices of experts in one parameter, which counts as one matrix here (see ``weight_map.Block``).
    """
    if parameter.dim() > len(offset):
        parameter = parameter.view(-1, *parameter.shape[2:])
    for dimension, (begin, (start, stop)) in enumerate(zip(offset, region, strict=True)):
        parameter = parameter.narrow(dimension, begin, stop - start)
    return parameter


def write_checkpoint(
    folder: Path,
    companions: Companions,
    tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    shard_bytes: int = 4 << 30,
    *,
    head: Head = "language",
) -> None:
    """Writes ``tensors`` as safetensors of at most ``shard_bytes`` each with an index, and the config and tokenizer.

    The config's dtype becomes ``dtype``, and with a scalar ``head`` it becomes that of a sequence classification. The
    folder appears whole and on disk: it is written under another name and renamed, and an older one is then replaced.
    Raises OSError where the disk fails.
    """
    with whole_folder(folder) as partial:
        _write_into(partial, companions, tensors, dtype, shard_bytes, head)


def _write_into(
    folder: Path,
    companions: Companions,
    tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    shard_bytes: int,
    head: Head,
) -> None:
    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    total = 0

    def flush() -> None:
        if pending:
            write_safetensors(folder / f"shard-{len(shards)}", pending, {"format": "pt"})
            shards.append(list(pending))
            pending.clear()

    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if sum(t.numel() * t.element_size() for t in pending.values()) + size > shard_bytes:
            flush()
        pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
        total += size
    flush()
    if len(shards) == 1:
        (folder / "shard-0").rename(folder / _SINGLE)
    else:
        weight_map: dict[str, str] = {}
        for number, names in enumerate(shards):
            shard = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
            (folder / f"shard-{number}").rename(folder / shard)
            weight_map |= dict.fromkeys(names, shard)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / _INDEX).write_text(json.dumps(index, indent=2))
    companions.copy_to(folder)
    config = read_config(companions.model) | {"dtype": str(dtype).removeprefix("torch.")}
    config.pop("torch_dtype", None)  # its name before transformers 5
    if head == "scalar":
        config = classifier_config(config)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Writes CPU tensors as one file, which others may read as the umask says; raises OSError where the disk fails."""
    path.touch()  # safetensors alone would let nobody else read it
    mode = path.stat().st_mode
    try:
        save_file(dict(tensors), path, metadata=dict(metadata))
    except SafetensorError as error:  # how safetensors reports a full disk
        raise OSError(f"{path}: {error}") from error
    path.chmod(mode)
