"""GLM-4 of 2024, as transformers has it (glm-4-9b-chat-hf): GLM-4-0414 without norms after its sublayers."""

import dataclasses

from rlhf_megatron.models.families import glm4
from rlhf_megatron.models.families.norm_names import NORMS_BEFORE

FAMILY = dataclasses.replace(glm4.FAMILY, classes="Glm", norms=NORMS_BEFORE)
