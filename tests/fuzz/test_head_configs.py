"""Whatever the config.json of a head that drafts says, it is refused in one line, or read as transformers reads it."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig

from fuzz.test_model_configs import JSON, SIZES, VALUES
from rlhf_megatron.errors import ModelError
from rlhf_megatron.models.architecture import parse_architecture
from rlhf_megatron.models.config_fields import _ONLY, _TYPES, DECODER_FIELDS
from rlhf_megatron.models.draft_heads import parse_head
from rlhf_megatron.models.families.eagle3_head import FAMILY
from rlhf_megatron.models.weight_map import tensor_shapes

STATES = {"eagle_aux_hidden_state_layer_ids": [0, 2], "use_aux_hidden_state": True}
HEAD = SIZES | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "draft_vocab_size": 60,
    "eagle_config": STATES,
    "model_type": "llama",
    "num_hidden_layers": 1,
}
TARGET = parse_architecture(SIZES | {"model_type": "qwen3"}, "there")
FIELDS = sorted(DECODER_FIELDS | FAMILY.fields.read | set(FAMILY.fields.only) | set(_ONLY) | set(_TYPES))
OF_STATES = st.fixed_dictionaries({key: st.sampled_from([value]) | VALUES | JSON for key, value in STATES.items()})
CHANGES = st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=9), VALUES | JSON | OF_STATES, max_size=3)


@given(CHANGES, st.sets(st.sampled_from(FIELDS), max_size=2))
def test_a_config_is_refused_in_one_line_or_read_as_transformers_reads_it(
    changes: dict[str, Any], absent: set[str]
) -> None:
    config = {field: value for field, value in (HEAD | changes).items() if field not in absent}
    try:
        read = parse_head(config, "here", TARGET)
    except ModelError as error:
        assert str(error).startswith("here/config.json: ") and str(error).isprintable() and len(str(error)) < 600
        return
    theirs = LlamaConfig.from_dict(config)
    heads = (read.heads, read.key_value_heads, read.head_dim)
    assert heads == (theirs.num_attention_heads, theirs.num_key_value_heads, theirs.head_dim)
    sizes = (read.layers, read.hidden, read.feed_forward, read.target_vocabulary, read.max_positions)
    assert sizes == (1, 64, theirs.intermediate_size, 100, theirs.max_position_embeddings)
    assert (read.norm_epsilon, read.rope.theta) == (theirs.rms_norm_eps, theirs.rope_parameters["rope_theta"])
    assert read.vocabulary == (config.get("draft_vocab_size") or 100)
    assert set(read.auxiliary_layers) <= set(range(TARGET.layers + 1))
    assert tensor_shapes(read)["fc.weight"] == (64, 64 * len(read.auxiliary_layers))
