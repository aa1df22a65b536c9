"""A role out of a checkpoint's files: all of it, or one line that says what is wrong with them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hugging_face import make_model
from rlhf_megatron.checkpoint.saved_role import EXPERTS, ROWS_OF_ATTENTION, SavedRole, files_of_role
from rlhf_megatron.checkpoint.storage import TensorFile, partial_folder, write_tensors
from rlhf_megatron.errors import CheckpointError, ForeignCheckpoint
from rlhf_megatron.models.architecture import LayerKind, read_architecture
from rlhf_megatron.models.description import Experts, SharedExpert
from rlhf_megatron.models.lora import Adaptation, adapter_layout
from rlhf_megatron.models.rectangles import Implementation
from rlhf_megatron.models.rope import Llama3Scaling, LongScaling, Rope, YarnScaling
from rlhf_megatron.models.stored_form import stored_form
from rlhf_megatron.models.weight_map import megatron_blocks
from rlhf_megatron.recipe import LoraSection
from rlhf_megatron.regather.shard_specs import parameter_shapes
from rlhf_megatron.topology.layout import Layout

NAME = "decoder.final_layernorm.weight"


@dataclasses.dataclass
class Saved:
    """What a checkpoint of two data-parallel ranks holds of an actor."""

    state: dict[str, Any]
    about: list[dict[str, Any]]  # of each rank's file
    tensors: list[dict[str, Tensor]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of a small model."""
    folder = tmp_path_factory.mktemp("model")
    make_model(folder)
    return folder


@pytest.fixture
def saved(model: Path) -> Saved:
    """Return a sound one."""
    return make_saved(model)


def make_saved(model: Path, implementation: Implementation = "local") -> Saved:
    """Return a sound checkpoint of ``model``, each parameter in two ranges."""
    architecture, layout = read_architecture(model), Layout(data=2)
    state = {
        "layout": dataclasses.asdict(layout), "ranks": [0, 1], "architecture": stored_form(architecture),
        "implementation": implementation, "adapters": None, "base": None, "rows_of_attention": ROWS_OF_ATTENTION,
        "experts": EXPERTS, "steps_taken": 3, "loss_scale": None, "optimizer_steps": 3,
    }  # fmt: skip
    made = Saved(json.loads(json.dumps(state)), [{"pieces": {"actor": {}}} for _ in range(2)], [{}, {}])
    for name, shape in parameter_shapes(megatron_blocks(architecture, layout, 0, implementation)).items():
        put(made, name, torch.arange(math.prod(shape), dtype=torch.float32).view(shape))
    return made


def put(saved: Saved, name: str, value: Tensor) -> None:
    """Put a parameter in a range of each rank."""
    third = value.numel() // 3
    for rank, (start, stop) in enumerate([(0, third), (third, value.numel())]):
        saved.about[rank]["pieces"]["actor"][name] = {"start": start, "stop": stop, "shape": list(value.shape)}
        saved.tensors[rank][f"actor/weights/{name}"] = value.reshape(-1)[start:stop].clone()


def read(saved: Saved, model: Path, folder: Path) -> dict[str, Tensor]:
    for rank, (about, tensors) in enumerate(zip(saved.about, saved.tensors, strict=True)):
        write_tensors(folder, f"rank-{rank}.safetensors", tensors, about)
    with contextlib.ExitStack() as stack:
        paths = sorted(partial_folder(folder).iterdir())
        files = [stack.enter_context(TensorFile(path)) for path in paths]
        role = SavedRole("actor", read_architecture(model), saved.state, files_of_role(saved.state, files))
        return dict(role.tensors(torch.float32))


def test_all_of_a_role_is_read(saved: Saved, model: Path, tmp_path: Path) -> None:
    tensors = read(saved, model, tmp_path / "step-3")
    norm = tensors["model.norm.weight"]
    assert torch.equal(norm, torch.arange(len(norm), dtype=torch.float32))
    del saved.state["ranks"]  # as an earlier version wrote it
    assert read(saved, model, tmp_path / "step-4").keys() == tensors.keys()


@pytest.mark.parametrize(
    ("implementation", "name"),
    [
        ("local", "mlp.experts.local_experts.{expert}.linear_fc{layer}.{kind}"),
        ("transformer_engine", "mlp.experts.linear_fc{layer}.{kind}{expert}"),
    ],
)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_experts_that_an_earlier_version_wrote_apart_are_read(
    family: str, implementation: Implementation, name: str, tmp_path: Path
) -> None:
    """Its parameters were one for each expert, in the order that there still is."""
    model = make_model(tmp_path / "model", family)
    now, earlier = read(make_saved(model), model, tmp_path / "now"), make_saved(model, implementation)
    del earlier.state["experts"]
    architecture = read_architecture(model)
    assert architecture.experts is not None
    for parameter in [each for each in earlier.about[0]["pieces"]["actor"] if ".experts." in each]:
        pieces = [tensors.pop(f"actor/weights/{parameter}") for tensors in earlier.tensors]
        shape, _ = (about["pieces"]["actor"].pop(parameter)["shape"] for about in earlier.about)
        layer, kind = parameter.partition("linear_fc")[2].split(".")
        parts = torch.cat(pieces).view(shape).chunk(architecture.experts.count)
        for expert, own in enumerate(parts):
            apart = name.format(expert=expert, layer=layer, kind=kind.removesuffix("0"))
            put(earlier, parameter.partition("mlp.")[0] + apart, own)
    then = read(earlier, model, tmp_path / "earlier")
    assert now.keys() == then.keys() and all(torch.equal(now[tensor], then[tensor]) for tensor in now)


class Noting(TensorFile):
    """A file that notes what is read of it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.read: list[tuple[str, int]] = []

    def part(self, name: str, start: int, stop: int) -> Tensor:
        self.read.append((name, stop - start))
        return super().part(name, start, stop)


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_range_is_read_from_the_files_that_have_it(saved: Saved, model: Path, tmp_path: Path, tensor: int) -> None:
    """And where the reader has another layout it is the same range of the whole."""
    for rank, (about, tensors) in enumerate(zip(saved.about, saved.tensors, strict=True)):
        write_tensors(tmp_path / "step-3", f"rank-{rank}.safetensors", tensors, about)
    architecture = read_architecture(model)
    blocks = megatron_blocks(architecture, Layout(tensor=tensor), tensor - 1, "local")
    with contextlib.ExitStack() as stack:
        paths = sorted(partial_folder(tmp_path / "step-3").iterdir())
        files = [stack.enter_context(Noting(path)) for path in paths]
        role = SavedRole("actor", architecture, saved.state, files_of_role(saved.state, files))
        copies, shapes = role.copies(blocks), parameter_shapes(blocks)
        for name, shape in shapes.items():
            whole = torch.zeros(shape)
            role.fill(whole, copies[name], "weights")
            size = whole.numel()
            for start, stop in ((0, size // 4), (size // 2, size), (0, size)):
                for file in files:
                    file.read.clear()
                found = role.part(whole, copies[name], "weights", start, stop)
                assert torch.equal(found, whole.view(-1)[start:stop])
                if tensor == 1:
                    assert sum(count for file in files for _, count in file.read) == stop - start
                    assert bool(files[0].read) == (start < size // 3) and bool(files[1].read) == (stop > size // 3)


def test_a_file_that_nothing_is_asked_of_is_not_opened(tmp_path: Path) -> None:
    with TensorFile(tmp_path / "nowhere") as file, pytest.raises(CheckpointError, match="there is no such file"):
        file.shape("x")


# What a checkpoint of an earlier version says of a model, to the letter.
EARLIER = [
    "family", "layers", "hidden", "feed_forward", "heads", "key_value_heads", "head_dim", "vocabulary", "max_positions",
    "norm_epsilon", "rope_theta", "rope_scaling_factor", "tied_embeddings", "query_key_norm", "qkv_bias",
    "end_token_ids", "pad_token_id", "head", "experts",
]  # fmt: skip


def test_a_checkpoint_says_of_a_model_what_earlier_versions_said(saved: Saved, model: Path, tmp_path: Path) -> None:
    architecture = read_architecture(model)
    assert list(stored_form(architecture)) == EARLIER
    mixture = dataclasses.replace(architecture, experts=Experts(4, 2, 8, True))
    assert stored_form(mixture)["experts"] == {"count": 4, "chosen": 2, "feed_forward": 8, "normalized": True}
    saved.state["architecture"] = json.loads(json.dumps(stored_form(architecture)))
    assert read(saved, model, tmp_path / "step-3")


def test_other_rotary_embeddings_are_another_model(saved: Saved, model: Path, tmp_path: Path) -> None:
    architecture = read_architecture(model)
    llama3 = Rope(1e4, Llama3Scaling(8.0, 1.0, 4.0, 8192))
    assert list(stored_form(dataclasses.replace(architecture, rope=llama3))) == EARLIER
    yarn = YarnScaling(4.0, 64)
    for change in (
        {"rope": llama3}, {"rope": Rope(1e4, yarn)}, {"mixed_ropes": (architecture.rope, None) * 2}
    ):  # fmt: skip
        changed: Any = dataclasses.replace(architecture, **change)
        saved.state["architecture"] = json.loads(json.dumps(stored_form(changed)))
        with pytest.raises(CheckpointError, match="of another model than actor's: it has (rope|mixed_ropes)"):
            read(saved, model, tmp_path / "step-3")
    long = Rope(1e4, LongScaling((1.0,) * 16, (2.0,) * 16, 64, 128))
    forms = [stored_form(dataclasses.replace(architecture, rope=each)) for each in (long, long.for_rows(100))]
    assert forms[0] == forms[1]  # which factors a run takes is no matter of the model


@pytest.mark.parametrize("later", ["mixed_layers", "shared", "window"])
def test_layers_of_another_kind_are_another_model(saved: Saved, model: Path, tmp_path: Path, later: str) -> None:
    architecture = read_architecture(model)
    changed = dataclasses.replace(architecture, mixed_layers=(LayerKind("full", "dense"),) * architecture.layers)
    if later == "shared":
        changed = dataclasses.replace(architecture, experts=Experts(4, 2, 8, True, SharedExpert(8, gated=True)))
    if later == "window":
        changed = dataclasses.replace(architecture, window=4)
    saved.state["architecture"] = json.loads(json.dumps(stored_form(changed)))
    with pytest.raises(CheckpointError, match="of another model than actor's: it has (mixed_layers|experts|window) "):
        read(saved, model, tmp_path / "step-3")


def test_adapters_on_other_layers_are_another_checkpoint(saved: Saved, model: Path) -> None:
    architecture, every = read_architecture(model), Adaptation.of(LoraSection(rank=4))
    saved.state["layout"] = dataclasses.asdict(adapter_layout(Layout(data=2)))

    def opened(adapted: list[str], wanted: Adaptation) -> SavedRole:
        saved.state["adapters"] = {"rank": 4, "scale": 1.0, "modules": adapted}
        return SavedRole("actor", architecture, saved.state, [None, None], wanted)  # type: ignore[list-item]

    # An earlier version knew of no layers but these, which are all that the model has.
    usual = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert opened(usual, every).whole_blocks()
    with pytest.raises(ForeignCheckpoint) as caught:
        opened(["q_proj", "v_proj"], every)
    assert str(caught.value).startswith(
        "the checkpoint has adapters of rank 4 and scale 1 on q_proj, v_proj of actor, and the recipe asks for "
        f"adapters of rank 4 and scale 1 on {', '.join(usual)} (actor.lora); change it back"
    )


def piece(saved: Saved, rank: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = saved.about[rank]["pieces"]["actor"][NAME]
    return found


def set_tensor(saved: Saved, value: Tensor) -> None:
    saved.tensors[0][f"actor/weights/{NAME}"] = value


def part(saved: Saved) -> Tensor:
    return saved.tensors[0][f"actor/weights/{NAME}"]


DAMAGES: dict[str, Callable[[Saved], Any]] = {
    "layout null": lambda s: s.state.update(layout=None),
    "layout of text": lambda s: s.state["layout"].update(data="2"),
    "layout of null": lambda s: s.state["layout"].update(data=None),
    "layout of 0": lambda s: s.state["layout"].update(data=0),
    "layout without end": lambda s: s.state["layout"].update(data=10**12),
    "layout of another key": lambda s: s.state["layout"].update(other=1),
    "ranks of text": lambda s: s.state.update(ranks="01"),
    "ranks beyond": lambda s: s.state.update(ranks=[0, 9]),
    "ranks below 0": lambda s: s.state.update(ranks=[0, -1]),
    "ranks twice": lambda s: s.state.update(ranks=[0, 0]),
    "no ranks": lambda s: s.state.update(ranks=[]),
    "architecture a list": lambda s: s.state.update(architecture=[]),
    "architecture of another": lambda s: s.state["architecture"].update(layers=10**9),
    "implementation": lambda s: s.state.update(implementation="other"),
    "adapters of text": lambda s: s.state.update(adapters={"rank": "x", "scale": 1.0, "modules": []}),
    "steps null": lambda s: s.state.update(steps_taken=None),
    "steps without end": lambda s: s.state.update(optimizer_steps=10**30),
    "loss scale of nan": lambda s: s.state.update(loss_scale=[float("nan"), 0]),
    "loss scale of 0": lambda s: s.state.update(loss_scale=[0.0, 0]),
    "steps below 0": lambda s: s.state.update(optimizer_steps=-1),
    "no steps": lambda s: s.state.pop("optimizer_steps"),
    "pieces gone": lambda s: s.about[0].pop("pieces"),
    "pieces a list": lambda s: s.about[0].update(pieces=[]),
    "pieces of another role": lambda s: s.about[0].update(pieces={"critic": {}}),
    "piece null": lambda s: s.about[0]["pieces"]["actor"].update({NAME: None}),
    "piece gone": lambda s: s.about[0]["pieces"]["actor"].pop(NAME),
    "shape of text": lambda s: piece(s).update(shape="8"),
    "shape without end": lambda s: piece(s).update(shape=[10**15]),
    "shape below 0": lambda s: piece(s).update(shape=[-1, -64]),
    "shape of two dimensions": lambda s: [piece(s, rank).update(shape=[8, 8]) for rank in (0, 1)],
    "start below 0": lambda s: piece(s).update(start=-1),
    "ranges that overlap": lambda s: piece(s, 1).update(start=0),
    "a hole": lambda s: piece(s).update(stop=piece(s)["stop"] - 1),
    "stop beyond": lambda s: piece(s, 1).update(stop=10**12),
    "tensor gone": lambda s: s.tensors[0].pop(f"actor/weights/{NAME}"),
    "tensor too short": lambda s: set_tensor(s, part(s)[:-1].clone()),
    "tensor of two dimensions": lambda s: set_tensor(s, part(s)[None].clone()),
    "tensor of whole numbers": lambda s: set_tensor(s, part(s).int()),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damage_is_one_line(saved: Saved, model: Path, tmp_path: Path, damage: Callable[[Saved], Any]) -> None:
    damage(saved)
    with pytest.raises(CheckpointError) as caught:
        read(saved, model, tmp_path / "step-3")
    assert str(caught.value).isprintable() and len(str(caught.value)) < 600
