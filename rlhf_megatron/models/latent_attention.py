"""Multi-head latent attention over packed sequences (DeepSeek-V2, arXiv 2405.04434), with vLLM's parameters.

Megatron's own builds its down projections and norms for Transformer Engine alone, and turns positions one sequence
after the other.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as functional
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from torch import Tensor

from rlhf_megatron.models.rotary import Rotary


class WholeLinear(torch.nn.Module):
    """A matrix that every tensor rank has whole, over its own tokens: a down projection."""

    def __init__(self, inputs: int, outputs: int, config: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # Megatron sums these

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        """Map hidden [s, 1, inputs] -> [s, 1, outputs], and no bias."""
        return functional.linear(hidden, self.weight), None


class LatentAttention(MultiLatentAttention):
    """Queries, keys and values out of latents that all heads share, with one key for all heads that turns.

    On several tensor ranks the sequence is cut: each rank has the latents of its own tokens. Norms of latents have the
    model's epsilon, as in vLLM.
    """

    def __init__(
        self, config: Any, submodules: Any, *arguments: Any, rotary: Rotary, norm: Any, name: Any = None, **options: Any
    ) -> None:
        super().__init__(config, submodules, *arguments, attention_type="self", **options)
        if self.pg_collection.tp.size() > 1 and not config.sequence_parallel:
            raise ValueError("latent attention on several tensor ranks needs sequence parallelism")
        self._rotary, heads = rotary, config.num_attention_heads

        def up(inputs: int, outputs: int) -> Any:
            return submodules.linear_kv_up_proj(
                inputs, outputs, config=config, init_method=config.init_method, gather_output=False, bias=False,
                skip_bias_add=False, is_expert=False, tp_group=self.pg_collection.tp,
            )  # fmt: skip

        def normed(width: int) -> Any:
            return norm(config=config, hidden_size=width, eps=config.layernorm_epsilon)

        if config.q_lora_rank is None:
            self.linear_q_proj = up(config.hidden_size, heads * self.q_head_dim)
        else:
            self.linear_q_down_proj = WholeLinear(config.hidden_size, config.q_lora_rank, config)
            self.q_layernorm = normed(config.q_lora_rank)
            self.linear_q_up_proj = up(config.q_lora_rank, heads * self.q_head_dim)
        latent = config.kv_lora_rank + config.qk_pos_emb_head_dim
        self.linear_kv_down_proj = WholeLinear(config.hidden_size, latent, config)
        self.kv_layernorm = normed(config.kv_lora_rank)
        self.linear_kv_up_proj = up(config.kv_lora_rank, heads * (config.qk_head_dim + config.v_head_dim))

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> tuple[Tensor, ...]:
        """Map hidden_states [s, 1, hidden] -> queries, keys [t, heads, d] and values [t, heads, v], and both
        latents."""
        if packed_seq_params is None:
            raise ValueError("LatentAttention takes packed sequences only; pass packed_seq_params")
        config, heads = self.config, self.num_attention_heads_per_partition
        of_query = hidden_states
        if config.q_lora_rank is None:
            query, _bias = self.linear_q_proj(hidden_states)
        else:
            of_query = self.q_layernorm(self.linear_q_down_proj(hidden_states)[0])
            query, _bias = self.linear_q_up_proj(of_query)
        both, _bias = self.linear_kv_down_proj(hidden_states)
        latent, turning = both.split([config.kv_lora_rank, config.qk_pos_emb_head_dim], dim=-1)
        latent = self.kv_layernorm(latent)
        key_value, _bias = self.linear_kv_up_proj(latent)
        if self.pg_collection.tp.size() > 1:  # the gradients of all ranks' heads are summed on the way back
            turning = gather_from_sequence_parallel_region(turning, group=self.pg_collection.tp)
        unturned, to_turn = (
            query.squeeze(1).unflatten(-1, (heads, -1)).split([config.qk_head_dim, config.qk_pos_emb_head_dim], dim=-1)
        )
        key, value = (
            key_value.squeeze(1).unflatten(-1, (heads, -1)).split([config.qk_head_dim, config.v_head_dim], dim=-1)
        )
        turned = self._turned(to_turn, packed_seq_params)
        shared = self._turned(turning.squeeze(1).unsqueeze(1), packed_seq_params).expand(-1, heads, -1)
        query, key = torch.cat([unturned, turned], dim=-1), torch.cat([key, shared], dim=-1)
        return query, key, value.contiguous(), of_query, latent

    def _turned(self, values: Tensor, packed: Any) -> Tensor:
        return self._rotary.turn(values, self.layer_number - 1, packed, self.pg_collection.cp)
