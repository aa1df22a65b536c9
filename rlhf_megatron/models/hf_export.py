"""Writing Hugging Face model folders: safetensors in shards with their index, config, tokenizer and chat template.

Gathering the tensors from a role's ranks is the matter of ``checkpoint.hugging_face``.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from rlhf_megatron.data.chat_template import read_template
from rlhf_megatron.durable import whole_folder
from rlhf_megatron.models.architecture import Head, classifier_config, read_config
from rlhf_megatron.models.config_fields import LAYERS_LEFT_OUT
from rlhf_megatron.models.hf_files import INDEX_FILE, SINGLE_FILE

# A model folder's files beside its weights: configs, the tokenizer, the chat template, and code for either.
_COMPANION_SUFFIXES = (".json", ".txt", ".model", ".tiktoken", ".jinja", ".py")
_OF_THE_MODEL = ("generation_config.json",)
_CHAT_TEMPLATE, _SENTENCEPIECE = "chat_template.jinja", "tokenizer.model"


@dataclasses.dataclass(frozen=True)
class Companions:
    """Sources of the files beside the weights of an exported model."""

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
    """The files of a model folder beside its weights and its config.json."""
    files = [file for file in sorted(folder.iterdir()) if file.suffix in _COMPANION_SUFFIXES and file.is_file()]
    return [file for file in files if file.name != "config.json" and not file.name.endswith(".index.json")]


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
        _name_shards(partial, *_write_shards(partial, tensors, shard_bytes))
        companions.copy_to(partial)
        _write_config(partial, companions.model, dtype, head)


def _write_shards(folder: Path, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int) -> tuple[list[list[str]], int]:
    """Writes shard-0, shard-1, ...; returns (the tensors of each, the bytes of all)."""
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
    return shards, total


def _name_shards(folder: Path, shards: Sequence[Sequence[str]], total: int) -> None:
    """Gives the shards the names that Hugging Face looks for, with an index where there are several."""
    if len(shards) == 1:
        (folder / "shard-0").rename(folder / SINGLE_FILE)
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards):
        shard = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"shard-{number}").rename(folder / shard)
        weight_map |= dict.fromkeys(names, shard)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2))


def _write_config(folder: Path, model: Path, dtype: torch.dtype, head: Head) -> None:
    config = read_config(model) | {"dtype": str(dtype).removeprefix("torch.")}
    config.pop("torch_dtype", None)  # its name before transformers 5
    config.pop("quantization_config", None)
    config |= {field: 0 for field in LAYERS_LEFT_OUT if field in config}
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
