"""Parameters of vLLM as views of tensors that somebody else owns: a model loader for vLLM, alike in 0.25 to 0.33.

The views are there before vLLM looks at its memory, compiles and captures CUDA graphs, so all of these see the final
addresses. What is shared is no part of vLLM's pools: it survives its sleep, and is never vLLM's to free. vLLM's own way
is to copy weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.hooks import RemovableHandle

from rlhf_megatron.compat.patches import replacement
from rlhf_megatron.compat.vllm.names import KNOWN, PACKAGES

_ALIGNMENT = 16  # bytes: compiled code would copy an input that begins elsewhere
_SMALL = 1e-3  # dummy weights, until the first real ones come


@replacement(
    *PACKAGES,
    **KNOWN,
    why="a loader of vLLM's copies weights, and cannot take the shards that a trainer holds already",
    upstream="https://github.com/vllm-project/vllm/issues/29701",
)
@contextlib.contextmanager
def offered(tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Give an engine that is made inside with dummy weights views of ``tensors``, by the names of its parameters.

    A parameter of another shape, type or device than the tensor of its name, or without one, has memory of its own,
    with small random numbers; so have all of a model that drafts, whose names may be the policy's. Import vLLM before.
    """
    from vllm.model_executor import model_loader

    loaders = model_loader._LOAD_FORMAT_TO_MODEL_LOADER
    # Not under a name of our own: with any other than this vLLM looks into the folder's files, and unties embeddings
    # where it finds an output layer that nobody reads.
    usual = loaders["dummy"]
    loaders["dummy"] = _loader_of(tensors)
    try:
        yield
    finally:
        loaders["dummy"] = usual


def parameters_without_memory(shapes: Collection[torch.Size]) -> RemovableHandle:
    """Have parameters of these shapes give up their memory as soon as a module has them, until the handle is removed.

    Not those of torch's own modules, such as routers: these are filled after they are registered.
    """

    def give_up_memory(module: torch.nn.Module, _: str, parameter: torch.nn.Parameter) -> None:
        if parameter.shape in shapes and not hasattr(module, "reset_parameters"):
            parameter.untyped_storage().resize_(0)

    return register_module_parameter_registration_hook(give_up_memory)


def _loader_of(tensors: Mapping[str, Tensor]) -> type:
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    class SharedWeightsLoader(BaseModelLoader):  # type: ignore[misc]
        """Loader that reads no files."""

        def download_model(self, *_: Any) -> None:
            """Do nothing: there is nothing to download."""

        def load_model(self, vllm_config: Any, model_config: Any, *arguments: Any, **named: Any) -> Any:
            """Make the model; meanwhile what may become a view takes memory for one parameter at a time."""
            self._offered = tensors if model_config is vllm_config.model_config else {}
            self._registration = parameters_without_memory({tensor.shape for tensor in self._offered.values()})
            try:
                return super().load_model(vllm_config, model_config, *arguments, **named)
            finally:
                self._registration.remove()

        def load_weights(self, model: torch.nn.Module, *_: Any) -> None:
            """Make the views, and give the other parameters their memory back."""
            self._registration.remove()  # parameters that vLLM makes of these are to keep theirs
            for name, parameter in model.named_parameters():
                tensor = self._offered.get(name)
                if tensor is not None and _fits(parameter, tensor):
                    parameter.data = tensor.detach()
                    continue
                if not parameter.untyped_storage().nbytes():
                    parameter.untyped_storage().resize_(parameter.nbytes)
                # What is quantized follows from another parameter, and a reduced vocabulary's table is not random.
                if parameter.is_floating_point() and parameter.element_size() > 1:
                    torch.nn.init.uniform_(parameter, -_SMALL, _SMALL)

    return SharedWeightsLoader


def _fits(parameter: Tensor, tensor: Tensor) -> bool:
    return (
        (parameter.shape, parameter.dtype, parameter.device) == (tensor.shape, tensor.dtype, tensor.device)
        and tensor.is_contiguous()
        and tensor.data_ptr() % _ALIGNMENT == 0
    )
