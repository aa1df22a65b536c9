"""Hugging Face checkpoint files: found, checked by their headers, and read by rectangles of tensors.

Files of a hub's model may still be coming (``hub_arrival``): who reads one waits for it, and it is checked then.
Only safetensors files are read, so loading never runs code from a file. Files are written in ``hf_export``; which
rectangle goes where is the matter of ``weight_map``, which rank holds it that of ``regather``.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlhf_megatron.hub_arrival import is_here, looks_until_here
from rlhf_megatron.models import mxfp4
from rlhf_megatron.models.architecture import Architecture, ModelError, read_config
from rlhf_megatron.models.block_scales import ACTIVATIONS, QUANTIZED, SCALES, dequantized, scales_region, scales_shape
from rlhf_megatron.models.config_fields import read_model_json, weight_block
from rlhf_megatron.models.families.wrappers import language_config
from rlhf_megatron.models.file_form import form_in_files
from rlhf_megatron.models.node_copy import NodeCopy
from rlhf_megatron.models.stacked import Shape, stored_shapes
from rlhf_megatron.models.weight_map import SCORE, Region, tensor_shapes
from rlhf_megatron.models.weight_source import RandomWeights
from rlhf_megatron.runtime.watchdog import watchdog
from rlhf_megatron.untrusted import check_regular, reason_of, shown

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_WEIGHT_TYPES = ("F64", "F32", "F16", "BF16")  # by safetensors' names
# What files of Llama 2's time have of the decoder, and is computed today.
_DECODER, _FORMER_BUFFER = ("model.", "lm_head."), "rotary_emb.inv_freq"
_BLOCKS, _SCALES = "_blocks", "_scales"  # of a tensor in MXFP4
_EMBEDDING, _OUTPUT = "model.embed_tokens.weight", "lm_head.weight"


class CheckpointFiles:
    """The safetensors files of one Hugging Face folder, opened lazily; a context manager."""

    def __init__(self, folder: str | Path, architecture: Architecture, new_head_seed: int | None = None) -> None:
        """Find every tensor of ``architecture``, and read headers alone, of files that are there.

        Raises ModelError naming what is damaged, is missing, has another shape, or belongs to another model. For files
        that are still to come, ``read`` and ``complete`` raise it, and HubError where they do not come.

        With ``new_head_seed`` a scalar head that the folder lacks, since it holds a language model, is drawn from it.
        """
        self.folder = Path(folder)
        self._open = contextlib.ExitStack()
        self._files: dict[Path, Any] = {}
        self.node_copy: NodeCopy | None = None
        config, located = read_config(folder), located_tensors(self.folder)
        self._form = form_in_files(config, architecture, located, functools.partial(shape_in_files, located))
        self._file_of = {self._form.model_name(name): path for name, path in located.items()}
        self._part_shapes, self._stacked = tensor_shapes(architecture), self._form.stacked
        self._place = {
            part: (name, index) for name, stack in self._stacked.items() for index, part in enumerate(stack.parts)
        }
        self._packed = self._find_packed()
        self._shapes = self._stored_shapes()
        behind = range(architecture.layers, architecture.layers + architecture.prediction_layers)
        # ERNIE has them under names of their own.
        self._left_out = (*(f"model.layers.{layer}." for layer in behind), *(["model.mtp_"] if behind else []))
        if architecture.head == "prediction":
            self._left_out = _DECODER
        packs = any(stack.packed for stack in self._stacked.values())
        self._block = None if packs else _block_of(self.folder / "config.json", config)
        self._quantized: set[str] = set()
        self._new_head: RandomWeights | None = None
        if new_head_seed is not None and SCORE in self._shapes and SCORE not in self._file_of:
            self._new_head = RandomWeights(architecture, new_head_seed, torch.device("cpu"))
        drawn = {SCORE} if self._new_head else set()
        missing = [name for name in self._shapes if name not in self._file_of and name not in drawn]
        if missing:
            raise ModelError(
                f"{self.folder}: {len(missing)} of {len(self._shapes)} tensors are missing, the first is "
                f"{self._form.stored_name(missing[0])}"
            )
        self._is_tied = architecture.tied_embeddings and architecture.head == "language"
        self._names, self._towers = defaultdict[Path, list[str]](list), defaultdict[Path, list[str]](list)
        for name, path in located.items():
            self._names[path].append(self._form.model_name(name))
            if self._form.is_other_tower(name):
                self._towers[path].append(name)
        self._unchecked = dict.fromkeys(self._names)  # in the order of the index
        self._check_those_here()
        self._is_complete = not self._unchecked
        if self._is_complete and self._is_tied:
            self._check_tied()

    def _find_packed(self) -> set[str]:
        """Return the stacked tensors that the files have in MXFP4."""
        maybe = {name for name, stack in self._stacked.items() if stack.packed and name not in self._file_of}
        return {name for name in maybe if name + _BLOCKS in self._file_of}

    def _stored_shapes(self) -> dict[str, Shape]:
        """Return every tensor that the files must have, and its shape there."""
        shapes = stored_shapes(self._part_shapes, self._stacked)
        for name in self._packed:
            del shapes[name]
            parts = self._stacked[name].parts
            rows, columns = self._part_shapes[parts[0]]
            shapes[name + _SCALES] = (len(parts), rows, columns // mxfp4.BLOCK)
            shapes[name + _BLOCKS] = (*shapes[name + _SCALES], mxfp4.BLOCK // 2)
        return shapes

    def complete(self) -> None:
        """Wait for files that are still to come, and check all that is checked of files; raises as ``read`` does."""
        if self._is_complete:
            return
        for path in self._names:
            self._reader(path)
        located_tensors(self.folder)  # another file may have come, with which the index does not agree
        self._is_complete = True
        if self._is_tied:
            self._check_tied()

    def _check_those_here(self) -> None:
        here = [path for path in self._unchecked if is_here(path)]
        for check in (self._opened, self._reader):  # that one is no file is said before what another has wrong
            for path in here:
                check(path)

    def _check_header(self, path: Path) -> None:
        """Check the place, shape and type of every tensor of a file, which its beginning tells: before memory is
        taken, if the file is there then."""
        form, file = self._form, self._opened(path)
        held = set(map(form.model_name, file.keys()))
        for name in held:
            if self._file_of.get(name) != path and (name in self._shapes or name.startswith(_DECODER)):
                raise ModelError(
                    f"{path}: has {shown(name)}, which {INDEX_FILE} does not look for there; download the model again"
                )
        for name in self._names[path]:
            if name not in held:
                raise ModelError(
                    f"{path}: {shown(name)} is not there, and {INDEX_FILE} says so; download the model again"
                )
            if name not in self._shapes:
                self._check_surplus(name, path)
                continue
            piece = file.get_slice(form.stored_name(name))
            shape = tuple(piece.get_shape())
            if shape != self._shapes[name]:
                raise ModelError(f"{path}: {name} has shape {shape}, config.json asks for {self._shapes[name]}")
            if piece.get_dtype() == QUANTIZED and self._block is not None and name + SCALES in self._file_of:
                self._check_scales(name)
            elif not name.endswith((_BLOCKS, _SCALES)):
                check_type(path, name, piece.get_dtype())
            elif piece.get_dtype() != "U8":
                raise ModelError(f"{path}: {name} has numbers of type {piece.get_dtype()}, and those of MXFP4 are U8")
        for name in self._towers[path]:  # exports copy them bit for bit
            check_type(path, shown(name), file.get_slice(name).get_dtype())

    def _check_scales(self, name: str) -> None:
        """Check the scales of a quantised matrix, which have a shape and a type of their own."""
        assert self._block is not None
        path, wanted = self._file_of[name + SCALES], scales_shape(self._shapes[name], self._block)
        piece = self._opened(path).get_slice(self._form.stored_name(name) + SCALES)
        shape = tuple(piece.get_shape())
        if shape != wanted:
            raise ModelError(f"{path}: {name}{SCALES} has shape {shape}, quantization_config asks for {wanted}")
        check_type(path, name + SCALES, piece.get_dtype())
        self._quantized.add(name)

    def _check_surplus(self, name: str, path: Path) -> None:
        """Refuse a tensor of the decoder that nothing reads: it belongs to another model; heads of other uses do no
        harm."""
        weight = f"{name.removesuffix(ACTIVATIONS)}weight" if name.endswith(ACTIVATIONS) else name.removesuffix(SCALES)
        is_scale = self._block is not None and weight in self._shapes
        if name.startswith(self._left_out) or is_scale:
            return
        if name.startswith(_DECODER) and name != _OUTPUT and not name.endswith(_FORMER_BUFFER):
            raise ModelError(
                f"{path}: {shown(name)} is no tensor of the model that config.json describes; they do not belong "
                "together"
            )

    def _check_tied(self) -> None:
        """Check that an output layer beside tied embeddings is the embeddings again: transformers would use another
        one."""
        path = self._file_of.get(_OUTPUT)
        if path is not None and not torch.equal(self.read(_OUTPUT, ()), self.read(_EMBEDDING, ())):
            raise ModelError(
                f"{path}: {_OUTPUT} is not {_EMBEDDING}, and config.json says that they are one "
                "(tie_word_embeddings); set it to false, or download the model again"
            )

    def _reader(self, path: Path) -> Any:
        """Return a file whose header is right, as safetensors opens it, when it is there."""
        if path in self._unchecked:
            for _ in _until_here(path):
                self._check_those_here()  # each rank refuses the same file then, whichever it reads
            if path in self._unchecked:  # else that was done while it came
                del self._unchecked[path]
                self._check_header(path)
        return self._opened(path)

    def _opened(self, path: Path) -> Any:
        if path not in self._files:
            self._files[path] = self._open.enter_context(open_weights(path))
        return self._files[path]

    def read_once(self, tensors: Iterable[str], group: dist.ProcessGroup) -> None:
        """Bring these of the model's tensors, and what other ranks want, to the memory of ``group``'s node.

        They are read from there from then on; see ``NodeCopy``. Collective over ``group``.
        """
        wanted: dict[Path, set[str]] = defaultdict(set)
        for name in {name for tensor in tensors for name in self._stored_names(tensor)}:
            wanted[self._file_of[name]].add(self._form.stored_name(name))
        self.complete()
        self.node_copy = self._open.enter_context(NodeCopy(wanted, group))

    def _stored_names(self, tensor: str) -> list[str]:
        """Return the parts of files that are read for one of the model's tensors."""
        if tensor == SCORE and self._new_head:
            return []
        if tensor in self._quantized:
            return [tensor, tensor + SCALES]
        name, _ = self._place.get(tensor, (tensor, 0))
        return [name + _BLOCKS, name + _SCALES] if name in self._packed else [name]

    def read(self, tensor: str, region: Region) -> Tensor:
        """Return ``tensor[region]`` on the CPU in the file's dtype; only these bytes are read.

        What is quantised comes in float32, of MXFP4 in bfloat16.
        """
        if tensor == SCORE and self._new_head:
            return self._new_head.read(tensor, region)
        self._reader(self._path(tensor))  # which says whether it is quantised
        if tensor in self._quantized:
            assert self._block is not None
            region = region or tuple((0, size) for size in self._shapes[tensor])
            scales = self._read(tensor + SCALES, scales_region(region, self._block))
            return dequantized(self._read(tensor, region), scales, region, self._block)
        return self._read_part(tensor, region) if tensor in self._place else self._read(tensor, region)

    def _read_part(self, tensor: str, region: Region) -> Tensor:
        """Return a rectangle of a tensor that is one of a stack's."""
        name, index = self._place[tensor]
        region = region or tuple((0, size) for size in self._part_shapes[tensor])
        this = (index, index + 1)
        if name in self._packed:
            rows, (first, last) = region
            blocks = (first // mxfp4.BLOCK, -(-last // mxfp4.BLOCK))
            codes = self._read(name + _BLOCKS, (this, rows, blocks, (0, mxfp4.BLOCK // 2)))
            scales = self._read(name + _SCALES, (this, rows, blocks))
            skipped = first - blocks[0] * mxfp4.BLOCK
            return mxfp4.unpacked(codes, scales)[0, :, skipped : skipped + last - first]
        stack = self._stacked[name]
        matrix, part = divmod(index, stack.joined)
        above = part * self._part_shapes[tensor][0]
        (first, last), *others = region
        inside = ((above + first, above + last), *others)
        read = self._read(name, ((matrix, matrix + 1), *(reversed(inside) if stack.transposed else inside)))[0]
        return read.t() if stack.transposed else read

    def _read(self, tensor: str, region: Region) -> Tensor:
        path = self._file_of[tensor]
        try:
            name = self._form.stored_name(tensor)
            copy = self.node_copy.reader(path, name) if self.node_copy else None
            piece = (copy or self._reader(path)).get_slice(name)
            selected: Tensor = piece[tuple(slice(start, stop) for start, stop in region)]
        except SafetensorError as error:
            raise ModelError(
                f"{path}: {tensor} cannot be read ({reason_of(error)}); download the model again"
            ) from error
        return selected

    def where(self, tensor: str) -> str:
        """Return the path of its file."""
        return str(self._path(tensor))

    def _path(self, tensor: str) -> Path:
        name, _ = self._place.get(tensor, (tensor, 0))
        return self._file_of.get(name + _BLOCKS if name in self._packed else name, self.folder)

    def __enter__(self) -> CheckpointFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()


def _block_of(path: Path, config: dict[str, Any]) -> tuple[int, ...] | None:
    return weight_block(path, language_config(path, config))


def located_tensors(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor of a model folder, by the index or the single file; raises ModelError for
    neither."""
    index = folder / INDEX_FILE
    if os.path.lexists(index):
        content = read_model_json(index)
        names = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
            raise ModelError(f"{index}: has no weight_map of tensors and their files; download the model again")
        for file in names.values():
            if Path(file).name != file:
                raise ModelError(f"{index}: names the file {shown(repr(file))}, which does not lie in this folder")
        if os.path.lexists(folder / SINGLE_FILE) and SINGLE_FILE not in names.values():
            raise ModelError(
                f"{shown(folder)}: has {SINGLE_FILE} and {INDEX_FILE}, which names other files; remove those that are "
                "not the model's, since others would read the former"
            )
        return {name: folder / file for name, file in names.items()}
    single = folder / SINGLE_FILE
    _wait_for(single)
    if not os.path.lexists(single):
        raise ModelError(
            f"{shown(folder)}: neither {SINGLE_FILE} nor {INDEX_FILE} is there; "
            "model.path must hold safetensors weights (or set model.random_weights=true)"
        )
    with open_weights(single) as file:
        return dict.fromkeys(file.keys(), single)


def shape_in_files(located: Mapping[str, Path], name: str) -> Shape | None:
    """Return the shape of a tensor by the header of its file; None where it is not there."""
    with open_weights(located[name]) as file:
        return tuple(file.get_slice(name).get_shape()) if name in file.keys() else None  # noqa: SIM118


def open_weights(path: Path) -> Any:
    """Return a safetensors file, as a context manager, when it is there.

    Raises ModelError where it is none, or is no file at all, and HubError where it does not come.
    """
    _wait_for(path)
    check_regular(path, ModelError)  # a pipe would be waited for
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError, MemoryError) as error:
        reason = reason_of(error)
        raise ModelError(f"{path}: cannot be read as safetensors ({reason}); download the model again") from error


def _wait_for(path: Path) -> None:
    for _ in _until_here(path):
        pass


def _until_here(path: Path) -> Iterator[None]:
    """Yield now and then until a file that is to come is there."""
    for has_progress in looks_until_here(path):
        if has_progress:
            watchdog.beat()
        yield


def check_types(folder: str | Path) -> None:
    """Do ``check_type`` of every tensor of a model folder, for those who leave the reading to others.

    Raises ModelError as it does; says nothing of a model whose config.json names its quantisation.
    """
    if "quantization_config" in read_config(folder):
        return
    for path in sorted(Path(folder).glob("*.safetensors")):
        with open_weights(path) as file:
            for name in file.keys():  # noqa: SIM118
                check_type(path, shown(name), file.get_slice(name).get_dtype())


def check_type(path: Path, tensor: str, kind: str) -> None:
    """Raise ModelError where a tensor's numbers are of a type (safetensors' name) that weights are not: whole numbers
    and those of a quantisation would be taken at their face value."""
    if kind not in _WEIGHT_TYPES:
        raise ModelError(
            f"{path}: {tensor} has numbers of type {kind}, and weights are {', '.join(_WEIGHT_TYPES)}; take a model "
            "that is not quantised, or download it again"
        )
