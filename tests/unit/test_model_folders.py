"""Damaged and hostile model folders: weights, their index, and the tokenizer's files, each refused in one line."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from hugging_face import make_model
from rlhf_megatron.data.tokenizer_loading import load_tokenizer
from rlhf_megatron.errors import DataError
from rlhf_megatron.models.architecture import ModelError, read_architecture
from rlhf_megatron.models.hf_files import CheckpointFiles
from rlhf_megatron.planning.feasibility import check_tokens
from tiny_tokenizer import write_bpe_tokenizer, write_sentencepiece_model

Change = Callable[[Path], object]
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
QUERY = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bpe_tokenizer(make_model(tmp_path_factory.mktemp("whole"), vocabulary=400))


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Change:
    """Change tensors of the only file."""

    def apply(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS, {"format": "pt"})

    return apply


def index(change: Callable[[dict[str, str]], object]) -> Change:
    """Give the folder an index, changed."""

    def apply(folder: Path) -> None:
        with safe_open(folder / WEIGHTS, "pt") as file:
            names = dict.fromkeys(list(file.keys()), WEIGHTS)
        change(names)
        (folder / INDEX).write_text(json.dumps({"weight_map": names}))

    return apply


def shards(change: Callable[[Path, dict[str, str]], object]) -> Change:
    """Cut the weights into a.safetensors and b.safetensors with an index, and change them."""

    def apply(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        names = {name: f"{'ab'[place % 2]}.safetensors" for place, name in enumerate(sorted(tensors))}
        for file in ("a.safetensors", "b.safetensors"):
            save_file({name: tensors[name] for name in names if names[name] == file}, folder / file)
        (folder / WEIGHTS).unlink()
        (folder / INDEX).write_text(json.dumps({"weight_map": names}))
        change(folder, names)

    return apply


def add_to(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(load_file(file) | tensors, file)


def write(name: str, content: bytes | str) -> Change:
    return lambda folder: (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


def instead(name: str, make: Callable[[Path], object]) -> Change:
    """Return something else of this name."""

    def apply(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return apply


def edited(name: str, change: Callable[[Any], Any]) -> Change:
    """Return JSON of this name, changed in place or replaced."""

    def apply(folder: Path) -> None:
        path = folder / name
        content = json.loads(path.read_text()) if path.exists() else {}
        replaced = change(content)
        path.write_text(json.dumps(content if replaced is None else replaced))

    return apply


def header(text: str) -> bytes:
    return len(text).to_bytes(8, "little") + text.encode()


def devices(path: Path) -> None:
    path.symlink_to("/dev/zero")


DEEP = "[" * 10**5 + "]" * 10**5
BAD_WEIGHTS: dict[str, tuple[Change, str]] = {
    "none": (instead(WEIGHTS, lambda path: None), "neither model.safetensors nor"),
    "empty": (write(WEIGHTS, b""), "cannot be read as safetensors"),
    "text": (write(WEIGHTS, b"no tensors at all"), "cannot be read as safetensors"),
    "a header of 2^60 bytes": (write(WEIGHTS, (2**60).to_bytes(8, "little") + b"{}"), "cannot be read as safeten"),
    "a header beyond the file": (write(WEIGHTS, (10**6).to_bytes(8, "little") + b"{}"), "cannot be read as safeten"),
    "a deep header": (write(WEIGHTS, header(DEEP)), "cannot be read as safetensors"),
    "a header that is a list": (write(WEIGHTS, header("[]")), "cannot be read as safetensors"),
    "offsets beyond the file": (
        write(WEIGHTS, header('{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}')),
        "cannot be read as safetensors",
    ),
    "overlapping tensors": (
        write(
            WEIGHTS,
            header(
                '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, '
                '"b": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'
            )
            + b"0000",
        ),
        "cannot be read as safetensors",
    ),
    "no tensors": (write(WEIGHTS, header("{}")), "tensors are missing, the first is model.embed_tokens.weight"),
    "truncated": (
        lambda folder: os.truncate(folder / WEIGHTS, (folder / WEIGHTS).stat().st_size // 2),
        "cannot be read as safetensors",
    ),
    "a pipe": (instead(WEIGHTS, os.mkfifo), r"is not a regular file \(a pipe\)"),
    "a device": (instead(WEIGHTS, devices), r"is not a regular file \(a device\)"),
    "a folder": (instead(WEIGHTS, Path.mkdir), r"is not a regular file \(a folder\)"),
    "a link to nothing": (instead(WEIGHTS, lambda path: path.symlink_to("nowhere")), "there is no such file"),
    "a link to itself": (instead(WEIGHTS, lambda path: path.symlink_to(path.name)), "cannot be read"),
    "a tensor missing": (weights(lambda all_: all_.pop(QUERY)), f"1 of .* missing, the first is {QUERY}"),
    "another shape": (weights(lambda all_: all_.update({QUERY: torch.zeros(3, 4)})), rf"{QUERY} has shape \(3, 4\)"),
    "turned": (weights(lambda all_: all_.update({QUERY: all_[QUERY].T.contiguous()})), f"{QUERY} has shape"),
    "a tensor of no elements": (weights(lambda all_: all_.update({QUERY: torch.zeros(0)})), r"has shape \(0,\)"),
    "whole numbers": (
        weights(lambda all_: all_.update({QUERY: all_[QUERY].int()})),
        f"{QUERY} has numbers of type I32",
    ),
    "8 bits": (
        weights(lambda all_: all_.update({QUERY: all_[QUERY].to(torch.float8_e4m3fn)})),
        f"{QUERY} has numbers of type F8_E4M3, and weights are",
    ),
    "a bias that the config has not": (
        weights(lambda all_: all_.update({QUERY.replace("weight", "bias"): torch.ones(128)})),
        "q_proj.bias is no tensor of the model that config.json describes",
    ),
    "more layers than the config has": (
        weights(lambda all_: all_.update({"model.layers.4.input_layernorm.weight": torch.ones(64)})),
        "model.layers.4.input_layernorm.weight is no tensor",
    ),
    "an output layer that is not tied": (
        weights(lambda all_: all_.update({"lm_head.weight": all_["model.embed_tokens.weight"] * 2})),
        r"lm_head.weight is not model.embed_tokens.weight, and config.json says .*tie_word_embeddings",
    ),
    "an output layer of another shape": (
        weights(lambda all_: all_.update({"lm_head.weight": torch.ones(4)})),
        "lm_head.weight is not model.embed_tokens.weight",
    ),
    "a scale of the output layer": (
        weights(lambda all_: all_.update({"lm_head.weight_scale": torch.ones(1)})),
        "lm_head.weight_scale is no tensor of the model",
    ),
    "a file as large as a disk": (lambda folder: os.truncate(folder / WEIGHTS, 2**40), "cannot be read as safetensors"),
    "a tensor in two shards": (
        shards(lambda folder, names: add_to(folder / "b.safetensors", {next(iter(names)): torch.zeros(64)})),
        "b.safetensors: has model.embed_tokens.weight, which model.safetensors.index.json does not look for there",
    ),
    "a layer that the index does not name": (
        shards(lambda folder, names: add_to(folder / "b.safetensors", {"model.layers.9.x": torch.ones(3)})),
        "b.safetensors: has model.layers.9.x, which",
    ),
    "another model beside the shards": (
        shards(lambda folder, names: save_file({"a": torch.ones(1)}, folder / WEIGHTS)),
        "has model.safetensors and model.safetensors.index.json, which names other files",
    ),
    "an index of a deep list": (write(INDEX, DEEP), "nested too deeply"),
    "an index that is a list": (write(INDEX, "[]"), "has no weight_map"),
    "an index of lists": (write(INDEX, '{"weight_map": {"a": []}}'), "has no weight_map"),
    "an index of NaN": (write(INDEX, '{"weight_map": NaN}'), "NaN is no number of JSON"),
    "an index that is a pipe": (instead(INDEX, os.mkfifo), "is not a regular file"),
    "an index that is a device": (instead(INDEX, devices), "is not a regular file"),
    "an index without a tensor": (index(lambda names: names.pop(QUERY)), f"the first is {QUERY}"),
    "a shard that is not there": (index(lambda names: names.update({QUERY: "b.safetensors"})), "there is no such file"),
    "a shard of a NUL": (index(lambda names: names.update({QUERY: "b\0.safetensors"})), "cannot be read"),
    "a shard of 5,000 characters": (index(lambda names: names.update({QUERY: "b" * 5000})), "cannot be read"),
    "a shard without a name": (index(lambda names: names.update({QUERY: ""})), "is not a regular file"),
    "a shard above": (index(lambda names: names.update({QUERY: ".."})), "which does not lie in this folder|regular"),
    "a shard with control characters": (
        index(lambda names: names.update({QUERY: "/\x1b[31m\n"})),
        r"names the file .*which does not lie in this folder",
    ),
    "a tensor that its shard lacks": (
        index(lambda names: names.update({"model.layers.9.input_layernorm.weight": WEIGHTS})),
        "model.layers.9.input_layernorm.weight is not there",
    ),
}


@pytest.mark.parametrize("name", BAD_WEIGHTS)
def test_damaged_weights_are_told_before_memory_is_taken(folder: Path, name: str) -> None:
    architecture = read_architecture(folder)
    change, told = BAD_WEIGHTS[name]
    change(folder)
    with pytest.raises(ModelError, match=told) as caught:
        CheckpointFiles(folder, architecture)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 700


def test_shards_are_read(folder: Path) -> None:
    shards(lambda folder, names: None)(folder)
    with CheckpointFiles(folder, read_architecture(folder)) as files:
        assert files.read(QUERY, ((0, 2), (0, 3))).shape == (2, 3)


@pytest.mark.parametrize(
    "extra",
    ["model.layers.0.self_attn.rotary_emb.inv_freq", "lm_head.weight", "v_head.summary.weight"],
)
def test_buffers_of_former_versions_and_other_heads_do_no_harm(folder: Path, extra: str) -> None:
    embedding = load_file(folder / WEIGHTS)["model.embed_tokens.weight"]
    content = embedding if extra == "lm_head.weight" else torch.ones(4)  # tied, and written out
    weights(lambda tensors: tensors.update({extra: content.clone()}))(folder)
    with CheckpointFiles(folder, read_architecture(folder)) as files:
        assert files.read(QUERY, ((0, 2), (0, 3))).shape == (2, 3)


TOKENIZER, SETTINGS, GENERATION = "tokenizer.json", "tokenizer_config.json", "generation_config.json"


def vocabulary(change: Callable[[dict[str, int]], object]) -> Change:
    def apply(content: dict[str, Any]) -> None:
        change(content["model"]["vocab"])

    return edited(TOKENIZER, apply)


BAD_TOKENIZERS: dict[str, tuple[Change, str]] = {
    "a list": (write(TOKENIZER, "[]"), "must be a JSON object"),
    "a number": (write(TOKENIZER, "5"), "must be a JSON object"),
    "empty": (write(TOKENIZER, ""), "not valid JSON"),
    "an empty object": (write(TOKENIZER, "{}"), "model must be an object"),
    "bytes": (write(TOKENIZER, b"\xff\xfe\x00"), "not text in UTF-8"),
    "deep": (write(TOKENIZER, '{"model": ' + DEEP + "}"), "nested too deeply"),
    "NaN": (write(TOKENIZER, '{"model": NaN}'), "NaN"),
    "a pipe": (instead(TOKENIZER, os.mkfifo), "is not a regular file"),
    "a device": (instead(TOKENIZER, devices), "is not a regular file"),
    "a folder": (instead(TOKENIZER, Path.mkdir), "is not a regular file"),
    "huge": (lambda folder: os.truncate(folder / TOKENIZER, 2**40), "has 1,099,511,627,776 bytes"),
    "a model of no kind": (edited(TOKENIZER, lambda c: c["model"].update(type="Nonsense")), "cannot be loaded"),
    "merges of nothing": (edited(TOKENIZER, lambda c: c["model"].update(merges=[["no", "such"]])), "cannot be loaded"),
    "merges of numbers": (edited(TOKENIZER, lambda c: c["model"].update(merges=[5])), "cannot be loaded"),
    "a bad regular expression": (
        edited(
            TOKENIZER,
            lambda c: c.update(
                pre_tokenizer={
                    "type": "Split",
                    "pattern": {"Regex": "(("},
                    "behavior": "Isolated",
                    "invert": False,
                }
            ),
        ),
        "cannot be loaded",
    ),
    "a normalizer of garbage": (
        edited(TOKENIZER, lambda c: c.update(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"})),
        "cannot be loaded",
    ),
    "a vocabulary of texts": (vocabulary(lambda v: v.update({"a": "b"})), "'b', which is no id of a token"),
    "an id below 0": (vocabulary(lambda v: v.update({"new": -1})), "-1, which is no id"),
    "an id of 1e9": (vocabulary(lambda v: v.update({"new": 10**9})), "1000000000, which is no id"),
    "an id that is a bool": (vocabulary(lambda v: v.update({"new": True})), "True, which is no id"),
    "two tokens of one id": (vocabulary(lambda v: v.update({"new": 5})), "have the same id, 5"),
    "a vocabulary that is a list of numbers": (
        edited(TOKENIZER, lambda c: c["model"].update(vocab=[1, 2])),
        "model.vocab must be",
    ),
    "added tokens that are none": (edited(TOKENIZER, lambda c: c.update(added_tokens=[5])), "added_tokens must be"),
    "an added token without id": (
        edited(TOKENIZER, lambda c: c["added_tokens"].append({"content": "x"})),
        "added_tokens has None",
    ),
    "an added token of an id of 2^40": (
        edited(TOKENIZER, lambda c: c["added_tokens"][0].update(id=2**40)),
        "added_tokens has 1099511627776",
    ),
    "two added tokens of one id": (
        edited(TOKENIZER, lambda c: c["added_tokens"][0].update(id=c["added_tokens"][1]["id"])),
        "have the same id",
    ),
    "an added token of another id": (
        edited(TOKENIZER, lambda c: c["added_tokens"][0].update(id=399)),
        "in model.vocab and 399 in added_tokens|have the same id",
    ),
    "settings that are a list": (write(SETTINGS, "[]"), "must be a JSON object"),
    "deep settings": (write(SETTINGS, DEEP), "nested too deeply"),
    "settings that are a pipe": (instead(SETTINGS, os.mkfifo), "is not a regular file"),
    "no end": (edited(SETTINGS, lambda c: c.update(eos_token=None)), "has no end-of-text token"),
    "an end that is a number": (edited(SETTINGS, lambda c: c.update(eos_token=5)), "eos_token must be text"),
    "an end that is a list": (edited(SETTINGS, lambda c: c.update(eos_token=["a"])), "eos_token must be text"),
    "an end without text": (edited(SETTINGS, lambda c: c.update(eos_token={"a": 1})), "eos_token must be text"),
    "an end that is not there": (edited(SETTINGS, lambda c: c.update(eos_token="<nope>")), "is not in its vocabulary"),
    "a pad that is not there": (
        edited(SETTINGS, lambda c: c.update(pad_token="<pad>")),
        "pad_token '<pad>' of .* is not",
    ),
    "a beginning that is not there": (
        write("special_tokens_map.json", '{"bos_token": {"content": "<s>"}}'),
        "bos_token '<s>' of .* is not in its vocabulary",
    ),
    "all text lost": (edited(TOKENIZER, lambda c: c["post_processor"].update(single=[])), "it makes '' of the text"),
    "no decoder": (edited(TOKENIZER, lambda c: c.update(decoder=None)), "it makes 'a.*1' of the text 'a 1'"),
    "a pad that is an object": (edited(SETTINGS, lambda c: c.update(pad_token={})), "pad_token must be text"),
    "a template that is a number": (edited(SETTINGS, lambda c: c.update(chat_template=5)), "chat_template must be"),
    "a template of numbers": (edited(SETTINGS, lambda c: c.update(chat_template=[5])), "chat_template must be"),
    "a template without name": (
        edited(SETTINGS, lambda c: c.update(chat_template=[{"template": "x"}])),
        "chat_template must be",
    ),
    "a class that is a list": (edited(SETTINGS, lambda c: c.update(tokenizer_class=["A"])), "tokenizer_class must be"),
    "a decoder that is a list": (edited(SETTINGS, lambda c: c.update(added_tokens_decoder=[1])), "added_tokens_decode"),
    "a decoder of texts": (edited(SETTINGS, lambda c: c.update(added_tokens_decoder={"x": {"content": "a"}})), "'x'"),
    "a decoder of numbers": (edited(SETTINGS, lambda c: c.update(added_tokens_decoder={"1": 5})), "added_tokens_decod"),
    "special tokens that are numbers": (
        edited(SETTINGS, lambda c: c.update(additional_special_tokens=[1, 2])),
        "additional_special_tokens must be",
    ),
    "a length below 0": (edited(SETTINGS, lambda c: c.update(model_max_length=-5)), "model_max_length must be"),
    "a map that is a list": (write("special_tokens_map.json", "[1]"), "must be a JSON object"),
    "a map of numbers": (write("special_tokens_map.json", '{"eos_token": 5}'), "eos_token must be text"),
    "added tokens of texts": (write("added_tokens.json", '{"a": "b"}'), "no id of a token"),
    "added tokens that are a list": (write("added_tokens.json", "[1]"), "must be a JSON object"),
    "a generation config that is a list": (write(GENERATION, "[]"), "must be a JSON object"),
    "a deep generation config": (write(GENERATION, DEEP), "nested too deeply"),
    "a generation config that is a device": (instead(GENERATION, devices), "is not a regular file"),
    "an end of generation that is text": (write(GENERATION, '{"eos_token_id": "5"}'), "'5', which is no id"),
    "ends of generation that are texts": (write(GENERATION, '{"eos_token_id": [1, "5"]}'), "'5', which is no id"),
    "an end of generation that is a bool": (write(GENERATION, '{"eos_token_id": true}'), "True, which is no id"),
    "an end of generation below 0": (write(GENERATION, '{"eos_token_id": -1}'), "-1, which is no id"),
    "a template file that is a pipe": (instead("chat_template.jinja", os.mkfifo), "is not a regular file"),
    "a template file of bytes": (write("chat_template.jinja", b"\xff\xfe"), "cannot be loaded"),
}


@pytest.mark.parametrize("name", BAD_TOKENIZERS)
def test_a_damaged_tokenizer_is_told_in_one_line(folder: Path, name: str) -> None:
    change, told = BAD_TOKENIZERS[name]
    change(folder)
    with pytest.raises(DataError, match=told) as caught:
        load_tokenizer(folder)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 700


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (vocabulary(lambda v: v.update({"new": 400})), "has ids up to 400, and the model .* has a vocabulary of 400"),
        (write(GENERATION, '{"eos_token_id": [1, 400]}'), "ends texts with token 400"),
        (edited(SETTINGS, lambda c: c.update(extra_special_tokens=[f"<{n}>" for n in range(20)])), "has ids up"),
    ],
)
def test_a_tokenizer_of_another_model_is_told(folder: Path, change: Change, told: str) -> None:
    architecture = read_architecture(folder)
    check_tokens(load_tokenizer(folder), architecture, folder)
    change(folder)
    with pytest.raises(DataError, match=told):
        check_tokens(load_tokenizer(folder), architecture, folder)


@pytest.mark.parametrize("content", [b"", b"\x00" * 100, os.urandom(1000), "cut"])
def test_a_damaged_sentencepiece_model_is_told(tmp_path: Path, content: bytes | str) -> None:
    file = write_sentencepiece_model(tmp_path)
    file.write_bytes(file.read_bytes()[:-700] if isinstance(content, str) else content)
    with pytest.raises(DataError, match="tokenizer: .*tiny.model"):
        load_tokenizer(file)


def test_what_cannot_be_a_tokenizers_path_is_told(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.model")
    for path in ("a\0b", "a" * 5000, str(tmp_path / "a.model"), "/dev/zero"):
        with pytest.raises(DataError, match="tokenizer: there is no ") as caught:
            load_tokenizer(path)
        assert str(caught.value).isprintable() and len(str(caught.value)) < 700
