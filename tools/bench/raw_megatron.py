"""Megatron-core as its users run it, in a process of its own: the seconds of forward and backward over packed rows.

    python tools/bench/raw_megatron.py SETTINGS.json OUTPUT.json

The settings: a model's ``config`` (config.json of Llama, Qwen2 or Qwen3 without experts), ``dtype``, the lengths of the
``rows``, ``ways`` to compute them, and ``repeats`` of the fastest. Of each way one pass does not count and one does. A
way has ``tokens``, at most so many in a micro-batch; a ``loss``: Megatron's cross entropy "plain", "fused" or
Transformer Engine's ("te"), or logprobs by "our head"; and ``graph``: whether a CUDA graph of a micro-batch is
replayed, whose rows are padded to ``tokens``. The model is Megatron's GPTModel with Transformer Engine's layers, its
distributed wrapper sums gradients in float32, and Transformer Engine adds to these sums by itself. Without a GPU,
layers are Megatron's own and every row is a micro-batch.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
_PADDED_TO = 64  # tokens, as matrix products like them
_KEPT_BYTES = 20 << 30  # of logits, by our head


@dataclasses.dataclass(frozen=True)
class Piece:
    """A micro-batch of rows, one behind the other.

    Attributes:
        tokens, labels, positions: [1, tokens].
        offsets: [rows + 1] int32, where rows begin, and the end.
        longest: tokens of the longest row.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    offsets: Tensor
    longest: int


def measured(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the ways with the ``seconds`` of a pass over all rows, and its ``loss_of_a_token``; or with why one
    ``failed``."""
    model, wrapped = build(settings["config"], settings["dtype"])
    found: list[dict[str, Any]] = []
    for way in settings["ways"]:
        try:
            run = passes(model, wrapped, settings["rows"], way)
            run()
            loss, seconds = timed(run)
            found.append({**way, "seconds": [seconds], "loss_of_a_token": loss})
        except (RuntimeError, AssertionError, ValueError) as error:  # too little memory, or not together
            found.append({**way, "failed": str(error).split("\n")[0][:200]})
        if ON_GPU:
            torch.cuda.empty_cache()
    fastest = min((one for one in found if "seconds" in one), key=lambda one: one["seconds"][0], default=None)
    if fastest:
        run = passes(model, wrapped, settings["rows"], fastest)
        run()
        fastest["seconds"] = [timed(run)[1] for _ in range(settings["repeats"])]
    return found


def build(config: Mapping[str, Any], dtype: str) -> tuple[Any, Any]:
    """Return Megatron's model with random weights, and its wrapper for data parallelism on one rank."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    dist.init_process_group("nccl" if ON_GPU else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1, use_cudagraphable_rng=ON_GPU)
    kind: torch.dtype = getattr(torch, dtype)
    heads = config["num_attention_heads"]
    has_norms = config["model_type"].startswith("qwen3")
    made = TransformerConfig(
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config["intermediate_size"],
        num_attention_heads=heads,
        num_query_groups=config["num_key_value_heads"],
        kv_channels=config.get("head_dim") or config["hidden_size"] // heads,
        normalization="RMSNorm",
        layernorm_epsilon=config["rms_norm_eps"],
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=config["model_type"] == "qwen2",
        qk_layernorm=has_norms,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=kind == torch.bfloat16,
        params_dtype=kind,
        bias_activation_fusion=ON_GPU,
        apply_rope_fusion=ON_GPU,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,  # of Megatron's output layer, by a kernel of Apex
        use_cpu_initialization=not ON_GPU,
    )
    spec = get_gpt_layer_with_transformer_engine_spec if ON_GPU else get_gpt_layer_local_spec
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    model = GPTModel(
        made, spec(qk_layernorm=has_norms, **({} if ON_GPU else {"normalization": "RMSNorm"})),
        vocab_size=config["vocab_size"], max_sequence_length=config["max_position_embeddings"],
        share_embeddings_and_output_weights=config["tie_word_embeddings"], position_embedding_type="rope",
        rotary_base=theta,
    ).to(DEVICE)  # fmt: skip
    for module in model.modules():
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True
    return model, DistributedDataParallel(made, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)


def passes(model: Any, wrapped: Any, rows: Sequence[int], way: Mapping[str, Any]) -> Callable[[], float]:
    """Return what computes the gradients of all rows, and returns the mean loss of their tokens."""
    vocabulary = model.vocab_size
    cut = pieces(rows, way["tokens"]) if ON_GPU else [[length] for length in rows]
    if way["graph"]:
        longest = max(max(rows), *(way["tokens"] - sum(of_piece) for of_piece in cut))
        most = max(map(len, cut)) + 1
        made = [piece_of(of_piece, vocabulary, way["tokens"], most, longest) for of_piece in cut]
        compute = graphed(model, wrapped, way["loss"], made[0])
    else:
        made = [piece_of(of_piece, vocabulary) for of_piece in cut]
        compute = lambda piece: loss_and_gradients(model, way["loss"], piece)  # noqa: E731

    def run() -> float:
        wrapped.zero_grad_buffer()
        losses = [compute(piece).clone() for piece in made]
        counts = [piece.tokens.numel() for piece in made]
        return sum(float(loss) for loss in losses) / sum(counts)

    return run


def pieces(rows: Sequence[int], tokens: int) -> list[list[int]]:
    """Return rows by micro-batch: longest first, each where it fits first; a longer row than ``tokens`` stands
    alone."""
    cut: list[list[int]] = []
    for length in sorted(rows, reverse=True):
        room = next((each for each in cut if sum(each) + length <= tokens), None)
        if room is None:
            cut.append([length])
        else:
            room.append(length)
    return cut


def piece_of(
    rows: Sequence[int], vocabulary: int, tokens: int | None = None, most_rows: int = 0, longest: int = 0
) -> Piece:
    """Return random tokens of ``rows``, and one row more to fill up: to a multiple, or to just ``tokens`` and
    ``most_rows``, none of them above ``longest``."""
    filled = tokens or -(-sum(rows) // _PADDED_TO) * _PADDED_TO
    if not ON_GPU:
        filled = sum(rows)
    lengths = [*rows, filled - sum(rows)] if filled > sum(rows) else list(rows)
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(vocabulary, (1, filled + 1), generator=generator)
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    ends = torch.full((max(0, most_rows + 1 - len(offsets)),), filled, dtype=torch.int32)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return Piece(
        drawn[:, :-1].to(DEVICE), drawn[:, 1:].to(DEVICE).contiguous(), positions.to(DEVICE),
        torch.cat([offsets, ends]).to(DEVICE), max(longest, *lengths),
    )  # fmt: skip


def loss_and_gradients(model: Any, kind: str, piece: Piece) -> Tensor:
    """Return the sum of the losses of a micro-batch's tokens; add their gradients."""
    loss = token_losses(model, kind, piece).sum()
    loss.backward()
    return loss.detach()


def token_losses(model: Any, kind: str, piece: Piece) -> Tensor:
    """Return the loss of each token of a micro-batch."""
    from megatron.core.packed_seq_params import PackedSeqParams

    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=piece.offsets, cu_seqlens_kv=piece.offsets, max_seqlen_q=piece.longest,
        max_seqlen_kv=piece.longest,
    ) if ON_GPU else None  # fmt: skip
    mask = None if ON_GPU else torch.ones(1, 1, piece.longest, piece.longest).tril() < 0.5
    ours = kind == "our head"
    model.config.cross_entropy_loss_fusion = kind in ("fused", "te")
    model.config.cross_entropy_fusion_impl = "te" if kind == "te" else "native"
    model.post_process = not ours
    output: Tensor = model(
        piece.tokens, piece.positions, mask, labels=None if ours else piece.labels, packed_seq_params=packed
    )
    if not ours:
        return output
    from rlhf_megatron.kernels.linear_logprob import linear_logprobs

    tied = model.share_embeddings_and_output_weights
    weight = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
    return -linear_logprobs(output[:, 0], weight, piece.labels[0], None, model.vocab_size, kept_bytes=_KEPT_BYTES)[0]


def graphed(model: Any, wrapped: Any, kind: str, example: Piece) -> Callable[[Piece], Tensor]:
    """Return what computes a micro-batch of the example's shape by one CUDA graph."""
    from megatron.core.tensor_parallel.random import get_all_rng_states

    tensors = ("tokens", "labels", "positions", "offsets")
    static = dataclasses.replace(example, **{name: getattr(example, name).clone() for name in tensors})
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            loss_and_gradients(model, kind, static)
    torch.cuda.current_stream().wait_stream(stream)
    wrapped.zero_grad_buffer()
    graph = torch.cuda.CUDAGraph()
    for state in get_all_rng_states().values():
        graph.register_generator_state(state)
    with torch.cuda.graph(graph):
        loss = loss_and_gradients(model, kind, static)

    def replay(piece: Piece) -> Tensor:
        for name in tensors:
            getattr(static, name).copy_(getattr(piece, name))
        graph.replay()
        return loss

    return replay


def timed(run: Callable[[], float]) -> tuple[float, float]:
    """Return what ``run`` does and its seconds."""
    if ON_GPU:
        torch.cuda.synchronize()
    began = time.perf_counter()
    result = run()
    if ON_GPU:
        torch.cuda.synchronize()
    return result, time.perf_counter() - began


def main() -> None:
    """Measure by the settings, leave the result in a file."""
    settings, output = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2])
    if not ON_GPU:
        from rlhf_megatron.compat import megatron

        megatron.install()  # without it Megatron needs a GPU
        from megatron.core import parallel_state

        parallel_state.destroy_global_memory_buffer()  # which ours makes, and Megatron's own start too
    output.write_text(json.dumps(measured(settings)), encoding="utf-8")


if __name__ == "__main__":
    main()
