"""Writing Hugging Face model folders: safetensors in shards with their index, config, tokenizer and chat template.

``checkpoint.hugging_face`` gathers the tensors from the ranks of a role, each of which may write a shard.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from rlhf_megatron.data.chat_template import read_template
from rlhf_megatron.durable import whole_folder
from rlhf_megatron.models.architecture import Architecture, Head, ModelError, classifier_config, read_config
from rlhf_megatron.models.config_fields import LAYERS_LEFT_OUT
from rlhf_megatron.models.draft_vocabulary import DRAFTED, OFFSETS
from rlhf_megatron.models.families.wrappers import exported_config, language_config, wrapper_of
from rlhf_megatron.models.file_form import FileForm, form_in_files, prefixed_form
from rlhf_megatron.models.hf_files import INDEX_FILE, SINGLE_FILE, located_tensors, open_weights, shape_in_files
from rlhf_megatron.models.weight_map import stacked_tensors

# A model folder's files beside its weights: configs, the tokenizer, the chat template, and code for either.
_COMPANION_SUFFIXES = (".json", ".txt", ".model", ".tiktoken", ".jinja", ".py")
_OF_THE_MODEL = ("generation_config.json",)
_CHAT_TEMPLATE, _SENTENCEPIECE = "chat_template.jinja", "tokenizer.model"
SHARD_BYTES = 4 << 30  # of tensors in one file, at most

_Item = TypeVar("_Item")


@dataclasses.dataclass(frozen=True)
class Companions:
    """Sources of the files beside the weights of an exported model."""

    model: Path  # a folder: the config
    tokenizer: Path | None = None  # a folder or a sentencepiece file; None: the model's folder
    chat_template: str | None = None  # in place of the tokenizer's own

    def copy_to(self, folder: Path) -> None:
        """Copy all but config.json."""
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
    """Return those of a run whose recipe has these paths; the template is read now, as for the run itself.

    Raises DataError where the template cannot be read.
    """
    template = read_template(chat_template) if chat_template else None
    return Companions(Path(model), Path(tokenizer) if tokenizer else None, template)


def _small_files(folder: Path) -> list[Path]:
    """Return the files of a model folder beside its weights and its config.json."""
    files = [file for file in sorted(folder.iterdir()) if file.suffix in _COMPANION_SUFFIXES and file.is_file()]
    return [file for file in files if file.name != "config.json" and not file.name.endswith(".index.json")]


def write_checkpoint(
    folder: Path,
    companions: Companions,
    tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    shard_bytes: int = SHARD_BYTES,
    *,
    head: Head = "language",
    predicts: bool = False,
) -> None:
    """Write ``tensors`` as safetensors of at most ``shard_bytes`` each with an index, and the config and tokenizer.

    The config's dtype becomes ``dtype``, and with a scalar ``head`` it becomes that of a sequence classification;
    ``predicts`` as in ``write_descriptions``. A wrapper's other towers, and which tokens a head drafts, are copied
    behind ``tensors``. The folder appears whole and on disk: it is written under another name and renamed, and an older
    one is then replaced. Raises OSError where the disk fails.
    """
    with whole_folder(folder) as partial:
        copies = ((each.name, each.load()) for each in copied_tensors(companions.model, head))
        shards, total = _write_shards(partial, itertools.chain(tensors, copies), shard_bytes)
        for number, name in enumerate(shard_names(len(shards))):
            (partial / f"shard-{number}").rename(partial / name)
        write_descriptions(partial, shards, total, companions, dtype, head, predicts)


def in_runs(items: Iterable[_Item], bytes_of: Callable[[_Item], int], most: int) -> Iterator[list[_Item]]:
    """Yield ``items`` in lists of at most ``most`` bytes, in their order; what is larger is alone."""
    run: list[_Item] = []
    load = 0
    for item in items:
        size = bytes_of(item)
        if run and load + size > most:
            yield run
            run, load = [], 0
        run.append(item)
        load += size
    if run:
        yield run


def shard_names(count: int) -> list[str]:
    """Return the names that Hugging Face looks for, of so many files."""
    if count == 1:
        return [SINGLE_FILE]
    return [f"model-{number + 1:05d}-of-{count:05d}.safetensors" for number in range(count)]


def write_descriptions(
    folder: Path,
    shards: Sequence[Sequence[str]],
    total: int,
    companions: Companions,
    dtype: torch.dtype,
    head: Head,
    predicts: bool = False,
) -> None:
    """Write what stands beside the shards: an index where there are several, the config, the companions.

    ``shards`` has the tensors of each, ``total`` is the bytes of all; ``predicts``: those of the layers for multi-token
    prediction are among them. Raises OSError where the disk fails.
    """
    if len(shards) != 1:
        names = shard_names(len(shards))
        weight_map = {tensor: name for name, tensors in zip(names, shards, strict=True) for tensor in tensors}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2))
    companions.copy_to(folder)
    config = _exported_config(companions.model, dtype, head, predicts)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


class CopiedTensor(NamedTuple):
    """A tensor of an export that is that of its source: where, and how many bytes."""

    name: str
    path: Path
    nbytes: int

    def load(self) -> Tensor:
        """Read it; raises OSError where that fails."""
        try:
            with open_weights(self.path) as file:
                tensor: Tensor = file.get_tensor(self.name)
        except (ModelError, SafetensorError) as error:  # it was there at the start
            raise OSError(str(error)) from error
        return tensor


def export_form(companions: Companions, architecture: Architecture) -> FileForm:
    """Return the form of an exported model's files: that of the files of its source, where those are there.

    Raises ModelError where they are damaged.
    """
    model = companions.model
    if architecture.head == "scalar" or not _has_weights(model):
        return FileForm(stacked=stacked_tensors(architecture))
    located = located_tensors(model)
    return form_in_files(read_config(model), architecture, located, functools.partial(shape_in_files, located))


def _has_weights(model: Path) -> bool:
    return any((model / name).exists() for name in (INDEX_FILE, SINGLE_FILE))


def _is_whole_wrapper(model: Path, head: Head) -> bool:
    """Return whether an export is of all towers; a scalar head is on the language model alone, as are drawn weights."""
    return head == "language" and _has_weights(model) and wrapper_of(read_config(model)) is not None


def copied_tensors(model: Path, head: Head) -> list[CopiedTensor]:
    """Return the tensors of a wrapper's folder that are not its language model's, which exports copy; of a head that
    drafts, those that say which tokens.

    Raises ModelError where its files are damaged.
    """
    drafts = head == "draft" and _has_weights(model)
    if not drafts and not _is_whole_wrapper(model, head):
        return []
    located = located_tensors(model)
    form = prefixed_form(read_config(model), located)
    copies = (OFFSETS, DRAFTED).__contains__ if drafts else form.is_other_tower
    copied = []
    for path in sorted(set(located.values())):
        with open_weights(path) as file:
            names = sorted(name for name in located if located[name] == path and copies(name))
            copied += [CopiedTensor(name, path, _bytes_of(file.get_slice(name))) for name in names]
    return copied


def _bytes_of(piece: Any) -> int:
    """Return the size of a tensor that safetensors has opened; the number in a type's name is its bits."""
    bits = re.search(r"\d+", piece.get_dtype())
    return math.prod(piece.get_shape()) * (int(bits[0]) // 8 if bits else 1)


def _write_shards(folder: Path, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int) -> tuple[list[list[str]], int]:
    """Write shard-0, shard-1, ...; return (the tensors of each, the bytes of all)."""
    shards: list[list[str]] = []
    total = 0
    copies = ((name, tensor.detach().to("cpu", copy=True).contiguous()) for name, tensor in tensors)
    for run in in_runs(copies, lambda pair: pair[1].nbytes, shard_bytes):
        write_safetensors(folder / f"shard-{len(shards)}", dict(run), {"format": "pt"})
        shards.append([name for name, _ in run])
        total += sum(tensor.nbytes for _, tensor in run)
        run.clear()  # before the next one is in memory
    return shards, total


def _exported_config(model: Path, dtype: torch.dtype, head: Head, predicts: bool) -> dict[str, Any]:
    config, kind = read_config(model), str(dtype).removeprefix("torch.")
    if _is_whole_wrapper(model, head):
        return exported_config(model / "config.json", config, kind)
    config = language_config(model / "config.json", config) | {"dtype": kind}
    config.pop("torch_dtype", None)  # its name before transformers 5
    config.pop("quantization_config", None)
    if not predicts:
        config |= {field: 0 for field in LAYERS_LEFT_OUT if field in config}
    return classifier_config(config) if head == "scalar" else config


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write CPU tensors as one file, which others may read as the umask says; raises OSError where the disk fails."""
    path.touch()  # safetensors alone would let nobody else read it
    mode = path.stat().st_mode
    try:
        save_file(dict(tensors), path, metadata=dict(metadata))
    except SafetensorError as error:  # how safetensors reports a full disk
        raise OSError(f"{path}: {error}") from error
    path.chmod(mode)
