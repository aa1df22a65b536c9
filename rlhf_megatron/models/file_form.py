"""The form in which a folder's files have a model's tensors: names, stacks, and the towers of a wrapper beside it.

The same form is read (``hf_files``) and exported (``hf_export``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rlhf_megatron.models.architecture import Architecture
from rlhf_megatron.models.families.wrappers import wrapper_of
from rlhf_megatron.models.stacked import Shape, Stacked, joint_experts, stored_shapes, stored_tensors
from rlhf_megatron.models.weight_map import stacked_tensors, tensor_shapes

if TYPE_CHECKING:
    from torch import Tensor

_DECODER, _OUTPUT = "model.", "lm_head."


@dataclasses.dataclass(frozen=True)
class FileForm:
    """``decoder``, ``output``: what the names of the decoder's and the output layer's tensors begin with.

    ``stacked``: tensors of the files that stack several of the model's, by names without these prefixes.
    ``has_towers``: there are others than the language model.
    """

    decoder: str = _DECODER
    output: str = _OUTPUT
    stacked: Mapping[str, Stacked] = dataclasses.field(default_factory=dict)
    has_towers: bool = False

    def model_name(self, stored: str) -> str:
        """Return the model's name of a tensor of the files; those of other towers do not begin with "model."."""
        for prefix, own in ((self.decoder, _DECODER), (self.output, _OUTPUT)):
            if stored.startswith(prefix):
                return own + stored.removeprefix(prefix)
        return stored.removeprefix(_DECODER)

    def is_other_tower(self, stored: str) -> bool:
        """Return whether a tensor of the files is none of the language model's."""
        return self.has_towers and not stored.startswith((self.decoder, self.output))

    def stored_name(self, name: str) -> str:
        """Return the files' name of a tensor of the language model, the inverse of ``model_name``."""
        for prefix, own in ((self.decoder, _DECODER), (self.output, _OUTPUT)):
            if name.startswith(own):
                return prefix + name.removeprefix(own)
        return name

    def stored(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the files' tensors, given the model's."""
        for name, tensor in stored_tensors(tensors, self.stacked):
            yield self.stored_name(name), tensor


def form_in_files(
    config: Mapping[str, Any],
    architecture: Architecture,
    names: Collection[str],
    shape_of: Callable[[str], Shape | None],
) -> FileForm:
    """Return the form of files with tensors of these ``names``, beside ``config``; ``shape_of`` one of them."""
    form, own = prefixed_form(config, names), stacked_tensors(architecture)
    if own or architecture.experts is None:
        return dataclasses.replace(form, stacked=own)
    shapes, present = tensor_shapes(architecture), {form.model_name(name) for name in names}
    stacked = {name: stack for name, stack in joint_experts(shapes).items() if name in present}
    wrapper = wrapper_of(config)
    if wrapper is not None and wrapper.transposed_experts:
        plain = stored_shapes(shapes, stacked)
        for name, stack in stacked.items():
            is_plain = shape_of(form.stored_name(name)) == plain[name]  # by which transformers decides too
            stacked[name] = dataclasses.replace(stack, transposed=not is_plain)
    return dataclasses.replace(form, stacked=stacked)


def prefixed_form(config: Mapping[str, Any], names: Collection[str]) -> FileForm:
    """Return the same without stacks: how files with tensors of these ``names`` begin them."""
    wrapper = wrapper_of(config)
    if wrapper is None:
        return FileForm()
    there = (pair for pair in wrapper.prefixes if any(name.startswith(pair[0]) for name in names))
    return FileForm(*next(there, wrapper.prefixes[0]), has_towers=True)
