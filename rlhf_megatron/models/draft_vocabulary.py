"""The tokens that a head in EAGLE-3's form drafts: some of those of the model that it drafts for.

Files of a head have them twice: ``d2t`` [drafted] int64 is what is added to the place of a token among the drafted ones
to make its id, and ``t2d`` [vocabulary] says of each id whether it is drafted.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from rlhf_megatron.errors import ModelError
from rlhf_megatron.models.description import Architecture
from rlhf_megatron.models.hf_files import located_tensors, open_weights
from rlhf_megatron.untrusted import reason_of

OFFSETS, DRAFTED = "d2t", "t2d"
OFFSETS_IN_VLLM = "draft_id_to_target_id"  # a parameter that is there where not all tokens are drafted
_OWN_EMBEDDINGS = "embed_tokens.weight"


@dataclasses.dataclass(frozen=True, eq=False)
class DraftVocabulary:
    """``target_ids`` [drafted] int64: the id of each drafted token, on the CPU; ``target_size``: of all there are."""

    target_ids: Tensor
    target_size: int

    @functools.cached_property
    def draft_ids(self) -> Tensor:
        """[vocabulary] int64: the place of each token among the drafted ones, -1 for others."""
        places = torch.full((self.target_size,), -1)
        places[self.target_ids] = torch.arange(len(self.target_ids))
        return places

    @property
    def offsets(self) -> Tensor:
        """[drafted] int64: ``d2t``, which vLLM has as ``OFFSETS_IN_VLLM``."""
        return self.target_ids - torch.arange(len(self.target_ids))

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that a head's files have of it."""
        return {OFFSETS: self.offsets, DRAFTED: self.draft_ids >= 0}


def whole_vocabulary(head: Architecture) -> DraftVocabulary:
    """Return that of a head that drafts all tokens."""
    return DraftVocabulary(torch.arange(head.target_vocabulary), head.target_vocabulary)


def read_draft_vocabulary(folder: str | Path, head: Architecture) -> DraftVocabulary:
    """Return that of the head whose files are in ``folder``.

    Raises ModelError where it is missing, damaged, or not what vLLM would make of it, and where the head has embeddings
    of its own: drafts are made by those of the model.
    """
    located = located_tensors(Path(folder))
    if _OWN_EMBEDDINGS in located:
        raise ModelError(
            f"{located[_OWN_EMBEDDINGS]}: {_OWN_EMBEDDINGS} is there, and heads with embeddings of their own are not "
            "supported; take another head, or leave the tensor out if it is a copy of the model's"
        )
    is_whole = head.vocabulary == head.target_vocabulary
    if OFFSETS not in located:
        if is_whole:
            return whole_vocabulary(head)
        raise ModelError(
            f"{folder}: {OFFSETS} is missing, and config.json says that {head.vocabulary} of {head.target_vocabulary} "
            "tokens are drafted (draft_vocab_size); download the head again"
        )
    path, offsets = located[OFFSETS], _read(located[OFFSETS], OFFSETS)
    if offsets.shape != (head.vocabulary,) or offsets.is_floating_point() or offsets.dtype == torch.bool:
        raise ModelError(f"{path}: {OFFSETS} must have {head.vocabulary} whole numbers (draft_vocab_size)")
    ids = offsets.long() + torch.arange(head.vocabulary)
    if bool(((ids < 0) | (ids >= head.target_vocabulary)).any()) or len(ids.unique()) < len(ids):
        raise ModelError(
            f"{path}: {OFFSETS} does not give each drafted token an id of its own in the vocabulary, 0 to "
            f"{head.target_vocabulary - 1}"
        )
    if is_whole and bool(offsets.any()):
        raise ModelError(f"{path}: {OFFSETS} changes the order of a whole vocabulary, which vLLM does not read")
    vocabulary = DraftVocabulary(ids, head.target_vocabulary)
    if DRAFTED in located and not torch.equal(_read(located[DRAFTED], DRAFTED).bool(), vocabulary.draft_ids >= 0):
        raise ModelError(f"{located[DRAFTED]}: {DRAFTED} and {OFFSETS} do not name the same tokens")
    return vocabulary


def _read(path: Path, name: str) -> Tensor:
    with open_weights(path) as file:
        try:
            tensor: Tensor = file.get_tensor(name)
        except SafetensorError as error:
            raise ModelError(f"{path}: {name} cannot be read ({reason_of(error)}); download the head again") from error
    return tensor
