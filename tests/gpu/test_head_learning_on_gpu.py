"""Heads in EAGLE-3's form learn on GPUs as by torch in float32: by Megatron's layers and Transformer Engine's."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from hugging_face import stored_tensors
from parallel.head_ranks import learn_heads
from parallel.parity import OPTIMIZER
from parallel.ranks import run_ranks
from parallel.test_head_learning import CASES, arguments, learn_by_torch, make_folders
from rlhf_megatron.topology.layout import Layout


class Layers(NamedTuple):
    """Whose layers, in what type, and how far losses and gradient norms may be from torch's: a share of them."""

    implementation: str
    dtype: str
    relative: float


LAYERS = {
    "Megatron float32": Layers("local", "float32", 1e-4),
    "Transformer Engine float32": Layers("transformer_engine", "float32", 2e-2),
    "Transformer Engine bfloat16": Layers("transformer_engine", "bfloat16", 3e-2),
}
NAMES = ("one rank", "layers are computed again", "TP2", "TP2 SP", "DP2", "experts, TP2", "experts, DP2 EP2")


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_are_those_of_torch(ranks: int, layers: str, tmp_path: Path) -> None:
    kind, names = LAYERS[layers], [name for name in NAMES if Layout(**CASES[name].layout).size == ranks]
    folders = {name: make_folders(tmp_path, name) for name in names}
    cases = [
        arguments(name, folders[name], transformer_implementation=kind.implementation) | {"dtype": kind.dtype}
        for name in names
    ]
    [first, *_] = run_ranks(learn_heads, ranks, {"cases": cases})
    for name, metrics in zip(names, first, strict=True):
        model, head = folders[name]
        reference, losses, norms = learn_by_torch(model, head)
        assert [each["draft_loss"] for each in metrics] == pytest.approx(losses, rel=kind.relative), name
        assert [each["draft_grad_norm"] for each in metrics] == pytest.approx(norms, rel=kind.relative), name
        written, before = stored_tensors(Path(f"{head}, exported")), stored_tensors(head)
        for tensor, value in reference.tensors().items():
            assert not torch.equal(written[tensor], before[tensor]), tensor
            assert (written[tensor] - value).abs().max() < 4.5 * OPTIMIZER["learning_rate"] + 1e-2, tensor
