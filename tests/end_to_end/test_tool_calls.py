"""A whole run of a model that calls a tool: supervised steps teach it the form of a call, and it samples the rest."""

from __future__ import annotations

import random
import re
import runpy
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from transformers import AutoTokenizer
from transformers.utils import get_json_schema

from end_to_end.runs import SUPERVISED, make_model, on_two_ranks, steps_of
from rlhf_megatron.rollout.vllm.process_environment import has_gpu

pytestmark = pytest.mark.skipif(has_gpu(), reason="the engine of this machine needs a GPU, which is hidden here")

TOOLS = '''
def add(a: int, b: int) -> int:
    """
    Adds.

    Args:
        a: One.
        b: Two.
    """
    if a == 0:
        raise ValueError("a is zero")
    return a + b
'''
# As Qwen2.5's, but for a system turn that is short.
TEMPLATE = r"""{%- if tools %}{{ '<|im_start|>system\n' }}
{%- for tool in tools %}{{ tool.function.name + ': ' + tool.function.description }}{% endfor %}
{{- '<|im_end|>\n' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
{%- else %}{{ '<|im_start|>' + message.role }}{% if message.content %}{{ '\n' + message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return float(any(turn["role"] == "tool" for turn in extra_info["turns"]))
"""
TAUGHT_STEPS = 64
DATA: dict[str, Any] = {"max_prompt_length": 60}
TAUGHT: dict[str, Any] = SUPERVISED | {
    "name": "taught",
    "steps": TAUGHT_STEPS,
    "batch": {"prompts_per_step": 16},
    "actor": {"tokens_per_gpu": 4096, "optimizer": {"learning_rate": 1e-2, "warmup_steps": 3}},
    "checkpoint": {"export_at_end": True},
}
CALLING: dict[str, Any] = SUPERVISED | {
    "name": "calling",
    "loop": "rl",
    "steps": 2,
    "deterministic": True,
    "model": {"path": f"runs/taught/export/step-{TAUGHT_STEPS}", "dtype": "float32"},
    "data": DATA | {"train_files": ["sums.parquet"]},
    "batch": {"prompts_per_step": 4, "responses_per_prompt": 4},
    "actor": {"tokens_per_gpu": 4096, "optimizer": {"learning_rate": 1e-4}},
    "rollout": {
        "max_response_length": 200,
        "scheduling": "static",
        "multi_turn": {"tools": ["tools.py:add"], "tool_parser": "hermes", "max_assistant_turns": 3},
    },
    "reward": {"function": "reward.py"},
    "monitor": {"plots": False, "rollouts": {"every": 1}},
}
CALL = re.compile(r'<tool_call>\n\{"name": "add", "arguments": \{"a": (\d+), "b": (\d+)\}\}\n</tool_call>')
END = "<|im_end|>"


def conversation(a: int, b: int) -> list[dict[str, str]]:
    """Return a sum that a call of the tool answers; the call in the form that the template gives it."""
    call = f'<tool_call>\n{{"name": "add", "arguments": {{"a": {a}, "b": {b}}}}}\n</tool_call>'
    said = [("user", f"{a} + {b} ="), ("assistant", call), ("tool", f"{a + b}"), ("assistant", f"{a + b}")]
    return [{"role": role, "content": content} for role, content in said]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where a model was taught to call, and then has learned by calling."""
    path = tmp_path_factory.mktemp("calls")
    make_model(path, 2, "--max-positions=1024")
    (path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    (path / "tools.py").write_text(TOOLS)
    (path / "reward.py").write_text(REWARD)
    draw = random.Random(0)
    asked = [conversation(draw.randrange(10), draw.randrange(10)) for _ in range(256)]
    sums = [{"data_source": "sums", "prompt": messages[:1], "reward_model": {"ground_truth": ""}} for messages in asked]
    pq.write_table(pa.Table.from_pylist([{"messages": messages} for messages in asked]), path / "taught.parquet")
    pq.write_table(pa.Table.from_pylist(sums[:16]), path / "sums.parquet")
    described = {"train_files": ["taught.parquet"], "chat_template_kwargs": {"tools": [schema_of(path)]}}
    for recipe in (TAUGHT | {"data": DATA | described}, CALLING):
        (path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        on_two_ranks(path, "recipe.yaml")().check()
    return path


def schema_of(folder: Path) -> dict[str, Any]:
    """Return the tool as transformers describes it."""
    schema: dict[str, Any] = get_json_schema(runpy.run_path(str(folder / "tools.py"))["add"])
    return schema


def kept(folder: Path, step: int) -> list[dict[str, Any]]:
    return pq.read_table(folder / "runs" / "calling" / "rollouts" / f"step-{step}.parquet").to_pylist()


def turns_of(row: dict[str, Any]) -> list[str]:
    """Return the texts of a row's turns, without what the template puts around them."""
    begins, ends = "\n<|im_start|>user\n", f"{END}\n<|im_start|>assistant\n"
    texts = [turn["text"] for turn in row["turns"]]
    assert all(text.startswith(begins) and text.endswith(ends) for text in texts[1::2])
    return [
        text.removesuffix(END) if place % 2 == 0 else text.removeprefix(begins).removesuffix(ends)
        for place, text in enumerate(texts)
    ]


def is_readable(text: str) -> bool:
    """Return whether a turn is one call in the form that was taught, or none at all."""
    return bool(CALL.fullmatch(text)) or "<tool_call>" not in text


def test_each_call_is_run_answered_and_counted(folder: Path) -> None:
    steps = steps_of(folder / "runs" / "calling")
    assert sorted(steps) == [1, 2]
    for step, metrics in steps.items():
        calls = failed = 0
        rows = kept(folder, step)
        for row in rows:
            turns = turns_of(row)
            assert [turn["sampled"] for turn in row["turns"]] == [place % 2 == 0 for place in range(len(turns))]
            for said, told in zip(turns[::2], turns[1::2], strict=False):
                found = CALL.fullmatch(said)
                if found is None:
                    assert told.startswith(("error: ", "<tool_response>")) and "<tool_call>" in said
                    continue
                a, b = map(int, found.groups())
                expected = f"{a + b}" if a else "error: ValueError: a is zero .*"
                assert re.fullmatch(f"<tool_response>\n{expected}\n</tool_response>", told)
                calls, failed = calls + 1, failed + (a == 0)
        assert len(rows) == 16 and calls > 4
        # Beside these there may be calls among other text, which the parser finds as well.
        others = sum(not is_readable(said) for row in rows for said in turns_of(row)[::2])
        assert calls <= metrics["tools/add/calls"] <= calls + others
        assert failed <= metrics["tools/add/failed"] <= failed + others
        assert metrics["tools/add/latency_ms_mean"] > 0 and metrics["tools/add/truncated"] == 0
        assert metrics["train/mismatch_kl"] < 1e-9 and metrics["train/rollout_logprob_abs_diff"] < 1e-5
        answered = [any("<tool_response>" in told for told in turns_of(row)[1::2]) for row in rows]
        assert [row["reward"] for row in rows] == answered, "reward functions see the answers"


def test_the_tokens_of_a_conversation_are_those_of_the_template(folder: Path) -> None:
    tokenizer, schema = AutoTokenizer.from_pretrained(folder / "model"), schema_of(folder)
    compared = 0
    for row in [*kept(folder, 1), *kept(folder, 2)]:
        turns = turns_of(row)
        whole = row["turns"][-1]["text"].endswith(END) and all(map(is_readable, turns[::2])) and len(turns) > 1
        if not whole or tokenizer.encode(tokenizer.decode(row["tokens"])) != row["tokens"]:
            continue  # cut, without a call in the taught form, or sampled in tokens that no text is encoded as
        asked = re.search(r"user\n(.*)<\|im_end\|>", row["prompt"])
        assert asked
        messages: list[dict[str, Any]] = [{"role": "user", "content": asked[1]}]
        for place, text in enumerate(turns):
            call = CALL.fullmatch(text)
            if place % 2:
                answer = text.removeprefix("<tool_response>\n").removesuffix("\n</tool_response>")
                messages.append({"role": "tool", "name": "add", "content": answer})
            elif call:
                arguments = {"a": int(call[1]), "b": int(call[2])}
                called = {"type": "function", "function": {"name": "add", "arguments": arguments}}
                messages.append({"role": "assistant", "content": "", "tool_calls": [called]})
            else:
                messages.append({"role": "assistant", "content": text})
        expected = tokenizer.apply_chat_template(messages, tools=[schema], return_dict=False)
        assert expected == [*row["tokens"], *tokenizer.encode("\n")]
        compared += 1
    assert compared > 8
