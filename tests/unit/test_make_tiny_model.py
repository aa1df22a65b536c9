"""tools/make_tiny_model.py: the folder loads, the tokenizer is lossless, the same seed gives the same bytes."""

from __future__ import annotations

import json
from pathlib import Path

import make_tiny_model as tool
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

TOOL = Path(__file__).parents[2] / "tools" / "make_tiny_model.py"
SMALL = ["--layers", "1", "--hidden-size", "64", "--intermediate-size", "64", "--heads", "2", "--kv-heads", "2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("tiny") / "model"
    assert tool.main(["--output", str(output), "--seed", "1", *SMALL]) == 0
    return output


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(folder)


def test_folder_loads_and_runs(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.model_type == "qwen3"
    assert model.dtype == torch.float32
    assert model.config.vocab_size == len(tokenizer) == 512
    logits = model(input_ids=torch.tensor([tokenizer.encode("1 + 2 =")])).logits
    assert logits.shape[-1] == 512
    assert torch.isfinite(logits).all()


def test_a_mixture_of_experts_loads_and_runs(tmp_path: Path) -> None:
    experts = ["--experts", "4", "--expert-size", "32"]
    assert tool.main(["--output", str(tmp_path / "model"), *SMALL, *experts]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert (model.config.model_type, model.config.num_experts, model.config.norm_topk_prob) == ("qwen3_moe", 4, True)
    assert torch.isfinite(model(input_ids=torch.tensor([[5, 6, 7]])).logits).all()


def test_default_size_splits_over_two_tensor_parallel_ranks() -> None:
    size = tool.TinyModelSize()
    size.check()
    assert size.heads % 2 == size.kv_heads % 2 == size.intermediate_size % 2 == size.vocabulary_size % 2 == 0


def test_stop_tokens_are_the_end_of_turn_and_the_end_of_text(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    generation = json.loads((folder / "generation_config.json").read_text())
    assert [tokenizer.convert_ids_to_tokens(token) for token in generation["eos_token_id"]] == [
        "<|im_end|>",
        "<|endoftext|>",
    ]
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token == "<|endoftext|>"


@pytest.mark.parametrize(
    "text", ["-37", "12 + 34 =", "naïve 数学 \n\t x² – end", "  two  spaces ", "State the final answer"]
)
def test_any_text_survives_the_tokenizer(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_each_digit_is_one_token(tokenizer: PreTrainedTokenizerFast) -> None:
    tokens = [tokenizer.decode([token]) for token in tokenizer.encode("-1207")]
    assert tokens == ["-", "1", "2", "0", "7"]


def test_every_id_has_a_token(tokenizer: PreTrainedTokenizerFast) -> None:
    assert sorted(tokenizer.get_vocab().values()) == list(range(len(tokenizer)))


def test_chat_template_is_chatml_and_short(tokenizer: PreTrainedTokenizerFast) -> None:
    question = "State the final answer to the following arithmetic problem: 4 + 9 - 6 ="
    messages = [{"role": "user", "content": question}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert tokenizer.decode(ids) == f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    assert len(ids) == 13


def test_same_seed_same_bytes_other_seed_other_weights(folder: Path, tmp_path: Path) -> None:
    state = torch.get_rng_state()
    for seed, name in ((1, "again"), (2, "other")):
        assert tool.main(["--output", str(tmp_path / name), "--seed", str(seed), *SMALL]) == 0
    assert torch.equal(torch.get_rng_state(), state)
    for file in sorted(folder.iterdir()):
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes(), file.name
    weights = "model.safetensors"
    assert (tmp_path / "other" / weights).read_bytes() != (folder / weights).read_bytes()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--heads", "3", "--kv-heads", "2"], "--heads 3 is no multiple"),
        (["--head-size", "16"], "--head-size is 16"),
        (["--layers", "1000000000"], "--layers is 1000000000: give 1 to 65,536"),
        (["--max-positions", "1048577"], "--max-positions is 1048577: give 1 to 65,536"),
        (["--seed", "99999999999999999999"], "--seed is 99999999999999999999: give"),
        (["--layers", "0"], "--layers is 0"),
        (["--vocabulary-size", "100"], "--vocabulary-size is 100"),
        (["--vocabulary-size", "9000"], "choose at most"),
        (["--experts", "2", "--experts-per-token", "3"], "--experts-per-token is 3: give 1 to 2"),
        (["--experts", "2", "--hidden-size", "72"], "--hidden-size is 72"),
    ],
)
def test_sizes_that_cannot_run_are_one_line_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert tool.main(["--output", str(tmp_path / "model"), *arguments]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1
    assert words in message
    assert not (tmp_path / "model").exists()


def test_a_model_is_never_overwritten(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(["--output", str(folder), *SMALL]) == 2
    assert "already holds a model" in capsys.readouterr().err
