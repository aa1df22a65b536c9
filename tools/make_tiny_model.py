"""Write a small Qwen3-style model with random weights and its own tokenizer, as a Hugging Face folder.

With --experts it is a mixture of experts, in the style of Qwen3-MoE.

Here: the tokenizer (byte-level BPE, one token per digit, ChatML template), the configuration, the random weights.
Not here: training (recipes/tiny_sft.yaml does that) and data (tools/prepare_data.py).

    python tools/make_tiny_model.py --output models/tiny --seed 1

The folder loads with AutoTokenizer, AutoModelForCausalLM and vLLM. The same arguments write the same bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_megatron.errors import UserError
from rlhf_megatron.runtime.command import ArgumentParser, command, path_argument
from rlhf_megatron.untrusted import reason_of, shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3MoeConfig

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"

MOST = 65536  # of anything that a small model has

# Head sizes that vLLM's CPU attention accepts; any other loads and then fails at the first forward pass.
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# What the tokenizer is trained on, with the number of times each text is seen: the turns of the chat template and the
# wording of arithmetic problems; a 0 stands where a number will cut the text. The first lines are frequent enough to
# become one token each, and so do the pieces of a worked answer.
CORPUS: tuple[tuple[str, int], ...] = (
    ("system\n", 4000),
    ("user\n", 4000),
    ("assistant\n", 4000),
    ("State the final answer to the following arithmetic problem: 0 + 0 - 0 =", 3000),
    ("<think>0 + 0 = 0; 0 - 0 = -0</think>0", 3000),
    ("0 * 0 / 0", 2000),
    ("Solve the following multiplication: 0 * 0. Give only the result as your final answer.", 600),
    ("Calculate 0 + 0 * 0.", 300),
    ("Calculate -( 0 + 0 ) / 0.", 300),
    ("Put your final answer within <answer></answer> tags.", 200),
    ("You are a helpful assistant.", 200),
    ("Let's think step by step. First, we add the numbers, then we subtract. So the answer is 0.", 100),
    ("What is the sum of these numbers? How many are left in total?", 50),
    ("A shop sells 0 boxes of pencils for $0.00 each. How much does it earn per day? Show your work.", 20),
    ("If a train travels 0 miles every hour, how far will it go before noon? Explain the result.", 20),
)


@dataclass(frozen=True)
class TinyModelSize:
    """Sizes of the model; the defaults give 1.6 million parameters that split over two tensor-parallel ranks."""

    layers: int = 2
    hidden_size: int = 256
    intermediate_size: int = 768
    heads: int = 8
    kv_heads: int = 2
    head_size: int = 32
    vocabulary_size: int = 512
    max_positions: int = 512
    tied_embeddings: bool = True
    experts: int = 0
    experts_per_token: int = 2
    expert_size: int = 256

    def check(self) -> None:
        """Raise UserError, in one line, for sizes that no engine would run."""
        for name in ("layers", "hidden_size", "intermediate_size", "heads", "kv_heads", "max_positions", "expert_size"):
            if not 1 <= getattr(self, name) <= MOST:
                raise UserError(f"--{name.replace('_', '-')} is {getattr(self, name)}: give 1 to {MOST:,}")
        if not 0 <= self.experts <= MOST:
            raise UserError(f"--experts is {self.experts}: give 0 to {MOST:,}")
        if self.heads % self.kv_heads:
            raise UserError(f"--heads {self.heads} is no multiple of --kv-heads {self.kv_heads}: change one of them")
        if self.experts and not 1 <= self.experts_per_token <= self.experts:
            raise UserError(
                f"--experts-per-token is {self.experts_per_token}: give 1 to {self.experts}, as --experts has"
            )
        if self.experts and self.hidden_size % 32:
            raise UserError(f"--hidden-size is {self.hidden_size}: vLLM runs experts on a CPU for multiples of 32 only")
        if self.head_size not in CPU_HEAD_SIZES:
            raise UserError(
                f"--head-size is {self.head_size}, which vLLM cannot run on a CPU: choose one of {CPU_HEAD_SIZES}"
            )
        if self.vocabulary_size > MOST:
            raise UserError(f"--vocabulary-size is {self.vocabulary_size}: give at most {MOST:,}")
        if self.vocabulary_size < 320:
            raise UserError(
                f"--vocabulary-size is {self.vocabulary_size}: 256 bytes, special tokens and a few merges need 320"
            )


def build_tokenizer(vocabulary_size: int, max_positions: int = 512) -> PreTrainedTokenizerFast:
    """Train the tokenizer: byte-level BPE with exactly ``vocabulary_size`` entries.

    Any text encodes (all 256 bytes are in the alphabet) and decodes to itself. Each digit is a token of its own, so
    that place value stays visible to the model. What stands between digits may merge across spaces, so that the fixed
    wording of a problem costs one token (the idea of SuperBPE, arXiv:2503.13423): short prompts, less work for a CPU.

    Raises UserError if CORPUS is too small for the vocabulary.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("[0-9]"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for text, times in CORPUS for _ in range(times)), trainer)
    if tokenizer.get_vocab_size() != vocabulary_size:
        raise UserError(
            f"--vocabulary-size is {vocabulary_size}, but the built-in texts give only "
            f"{tokenizer.get_vocab_size()} tokens: choose at most that many"
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[TURN_START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_positions,
        clean_up_tokenization_spaces=False,
    )


def build_config(size: TinyModelSize, tokenizer: PreTrainedTokenizerFast) -> Qwen3Config | Qwen3MoeConfig:
    """Return the Qwen3 or Qwen3-MoE configuration for ``size``, with the token ids of ``tokenizer``."""
    from transformers import Qwen3Config, Qwen3MoeConfig

    mixture: dict[str, Any] = {}
    if size.experts:
        mixture = {
            "num_experts": size.experts,
            "num_experts_per_tok": size.experts_per_token,
            "moe_intermediate_size": size.expert_size,
            "norm_topk_prob": True,
        }
    return (Qwen3MoeConfig if size.experts else Qwen3Config)(
        vocab_size=size.vocabulary_size,
        hidden_size=size.hidden_size,
        intermediate_size=size.intermediate_size,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_size,
        max_position_embeddings=size.max_positions,
        tie_word_embeddings=size.tied_embeddings,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        attention_bias=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        dtype="float32",
        **mixture,
    )


def write_model(output: Path, seed: int, size: TinyModelSize) -> int:
    """Write tokenizer, configuration and random float32 weights to the folder ``output``; return the parameter count.

    Raises UserError for sizes that cannot run and for a folder that already holds a model.
    """
    size.check()
    if not 0 <= seed < 2**63:
        raise UserError(f"--seed is {shown(seed, 40)}: give 0 to 2^63 - 1")
    if os.path.lexists(output / "config.json"):
        raise UserError(f"{output} already holds a model: choose another --output or remove that folder")
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.utils.logging import disable_progress_bar

    from rlhf_megatron.models.architecture import parse_architecture

    tokenizer = build_tokenizer(size.vocabulary_size, size.max_positions)
    config = build_config(size, tokenizer)
    parse_architecture(json.loads(config.to_json_string()), output)  # sizes that no machine has room for, too
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    stop_token_ids = [tokenizer.convert_tokens_to_ids(token) for token in (TURN_END, END_OF_TEXT)]
    model.generation_config = GenerationConfig(
        eos_token_id=stop_token_ids, pad_token_id=tokenizer.pad_token_id, do_sample=True, temperature=1.0
    )
    output.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(output)
    disable_progress_bar()  # of writing one small file
    model.save_pretrained(output)
    return sum(parameter.numel() for parameter in model.parameters())


def make_talkative(folder: Path, also: str = "") -> None:
    """Have a written model end its turns every few tokens: all embeddings lean to one side, and that of the token
    behind a turn, which is also its row of the output layer, the most; ``also`` a token that is said as often."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoTokenizer

    weights, tokenizer = load_file(folder / "model.safetensors"), AutoTokenizer.from_pretrained(folder)
    embedding = weights["model.embed_tokens.weight"]
    lean = torch.zeros(embedding.shape[1])
    lean[0] = 0.5
    embedding += lean
    for token in tokenizer.encode(TURN_END + also, add_special_tokens=False):
        embedding[token] = 2.1 * lean
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line (``arguments`` in place of sys.argv for tests)."""
    defaults = TinyModelSize()
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=path_argument, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=1, help="seed of the random weights (default %(default)s)")
    for name in (
        "layers",
        "hidden_size",
        "intermediate_size",
        "heads",
        "kv_heads",
        "head_size",
        "vocabulary_size",
        "max_positions",
        "experts",
        "experts_per_token",
        "expert_size",
    ):
        option = "--" + name.replace("_", "-")
        parser.add_argument(option, type=int, default=getattr(defaults, name), help="default %(default)s")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--untied-embeddings", action="store_true", help="give the output layer weights of its own")
    output.add_argument("--talkative", action="store_true", help="end turns every few tokens, for runs of many turns")
    return parser.parse_args(arguments)


@command
def main(arguments: list[str] | None = None) -> int:
    """Write the model that the command line asks for; return the exit status (2 for bad input)."""
    options = parse_arguments(arguments)
    size = TinyModelSize(
        layers=options.layers,
        hidden_size=options.hidden_size,
        intermediate_size=options.intermediate_size,
        heads=options.heads,
        kv_heads=options.kv_heads,
        head_size=options.head_size,
        vocabulary_size=options.vocabulary_size,
        max_positions=options.max_positions,
        tied_embeddings=not options.untied_embeddings,
        experts=options.experts,
        experts_per_token=options.experts_per_token,
        expert_size=options.expert_size,
    )
    try:
        parameters = write_model(options.output, options.seed, size)
        if options.talkative:
            make_talkative(options.output)
    except OSError as error:
        raise UserError(f"--output: {options.output} cannot be written ({reason_of(error)})") from error
    print(json.dumps({"output": str(options.output), "parameters": parameters, "seed": options.seed}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
