"""Responses of several turns: what a completion knows of them, how the template joins them, what a function may say."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from end_to_end.commands import python
from rlhf_megatron.algorithms.aggregation import token_weights
from rlhf_megatron.data.demonstrations import chain_total, tool_response
from rlhf_megatron.data.rollout_batch import batch_from_rows
from rlhf_megatron.data.tokenizer_loading import load_tokenizer
from rlhf_megatron.errors import DataError
from rlhf_megatron.generation.partners import TurnFunction
from rlhf_megatron.generation.prompt_groups import answer_text, turns_of_model
from rlhf_megatron.recipe import MultiTurnSection
from rlhf_megatron.rewards.user_function import FunctionFailure, FunctionUnusable, call_turn
from rlhf_megatron.rollout.engine import Completion
from tiny_tokenizer import CHAT_TEMPLATE, write_bpe_tokenizer

# Tools speak inside a user's turn, several of them inside one, as in Qwen's templates.
TOOLS = (
    "{% for message in messages %}{% if message.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ message.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def spoken(tokens: list[int]) -> Completion:
    return Completion(0, tokens, [-1.0] * len(tokens), "stop", [3] * len(tokens))


def test_a_completion_knows_its_turns() -> None:
    first = spoken([5, 6])
    assert (first.turns, first.sampled_tokens) == (1, 2)
    asked = first.answered([7, 8, 9])
    assert asked.token_ids == [5, 6, 7, 8, 9] and asked.logprobs == [-1.0, -1.0, 0.0, 0.0, 0.0]
    assert asked.sampled == [True, True, False, False, False] and asked.weight_versions == [3] * 5
    assert (asked.turns, asked.sampled_tokens, asked.weight_version) == (1, 2, 3)
    assert first.sampled is None, "the one before stays as it was"


TURN = "<|im_start|>{{ message.role }}\n{{ message.content }}"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}", "no control token"),
        (
            "{% for message in messages %}" + TURN + "{{ '<|endoftext|>' if loop.last else '<|im_end|>' }}{% endfor %}",
            "ends an assistant's turn otherwise where others follow: by '<|im_end|>",
        ),
        (
            "{% for message in messages %}{% if message.role != 'tool' %}" + TURN + "<|im_end|>{% endif %}{% endfor %}",
            "leaves out a message of role tool",
        ),
    ],
)
def test_templates_that_do_not_go_on_from_a_turn(template: str, expected: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_bpe_tokenizer(tmp_path, template))
    with pytest.raises(DataError, match=expected):
        tokenizer.encode_next_turn([{"role": "user", "content": "x"}, {"role": "tool", "content": "x"}])


def test_only_what_was_sampled_is_learnt() -> None:
    batch = batch_from_rows(
        [[1, 2], [3]], [[4, 5, 6], [7, 8]], [[-1.0, 0.0, -2.0], [-3.0, -4.0]], sampled=[[True, False, True], None]
    )
    assert batch.response_mask.tolist() == [False, False, True, False, True, False, True, True]
    assert batch.response_lengths.tolist() == [2, 2] and batch.lengths.tolist() == [5, 3]
    assert batch.completion_lengths.tolist() == [3, 2]
    weights = token_weights(batch.response_mask, batch.cu_seqlens, "token_mean")
    assert weights.tolist() == [0, 0, 0.25, 0, 0.25, 0, 0.25, 0.25]


@pytest.mark.parametrize(
    ("template", "roles"), [(CHAT_TEMPLATE, ["user"]), (TOOLS, ["tool"]), (TOOLS, ["tool", "tool"])]
)
def test_turns_are_joined_as_the_template_joins_a_whole_conversation(
    template: str, roles: list[str], tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(write_bpe_tokenizer(tmp_path, template))
    asked = [{"role": "user", "content": "1 + 2"}]
    said, heard = {"role": "assistant", "content": "3?"}, [{"role": role, "content": "yes"} for role in roles]
    end = tokenizer.turn_end_token()
    assert end is not None
    pieces = [*tokenizer.encode_chat(asked), *tokenizer.encode("3?"), end, *tokenizer.encode_next_turn(heard)]
    assert tokenizer.decode(pieces, skip_special_tokens=False) == tokenizer.render_chat([*asked, said, *heard])
    completion = spoken([*tokenizer.encode("3?"), end]).answered(tokenizer.encode_next_turn(heard))
    assert turns_of_model(completion, tokenizer) == ["3?"]
    four = tokenizer.encode("4")
    assert completion.sampled is not None
    again = dataclasses.replace(
        completion, token_ids=[*completion.token_ids, *four], sampled=[*completion.sampled, *[True] * len(four)]
    )
    assert turns_of_model(again, tokenizer) == ["3?", "4"] and answer_text(again, tokenizer) == "4"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return None", []),
        ("return 'ok'", [{"role": "tool", "content": "ok"}]),
        ("return {'role': 'user', 'content': 'go on', 'name': 'x'}", [{"role": "user", "content": "go on"}]),
        ("return ['a', {'role': 'user', 'content': 'b'}]", ["tool", "user"]),
        ("return []", []),
        ("return 'half of \\ud83d'", [{"role": "tool", "content": "half of ?"}]),
        ("return messages[-1]['content'] + ground_truth + extra_info['k']", [{"role": "tool", "content": "hi42v"}]),
    ],
)
@pytest.mark.parametrize("kind", ["def", "async def"])
def test_what_a_function_may_say(body: str, expected: Any, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "talk.py"
    path.write_text(f"{kind} respond(messages, ground_truth, extra_info):\n    {body}\n")
    found = call_turn(str(path), [{"role": "assistant", "content": "hi"}], "42", {"k": "v"})
    assert found == expected or [message["role"] for message in found] == expected
    json.dumps(found)


@pytest.mark.parametrize("body", ["return 7", "return {'content': 'x'}", "return {'role': 'user', 'content': None}"])
def test_what_it_may_not(body: str, tmp_path: Path) -> None:
    path = tmp_path / "talk.py"
    path.write_text(f"def respond(messages, ground_truth, extra_info):\n    {body}\n")
    with pytest.raises(FunctionFailure, match="return a text, {'role', 'content'}, or None"):
        call_turn(str(path), [], "", {})


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("", "has no function respond; it defines answer"),
        (":answer", r"must take \(messages, ground_truth, extra_info\)"),
    ],
)
def test_a_file_without_one_says_what_it_has(name: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "talk.py"
    path.write_text("def answer(data_source):\n    return None\n")
    with pytest.raises(FunctionUnusable, match=expected):
        call_turn(f"{path}{name}", [], "", {})


def call(expression: str, name: str = "calculate") -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': {'expression': expression}})}\n</tool_call>"


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("I know: 4", []),
        (call("2 * (3 + 4.5) - -1"), ["16"]),
        ('<tool_call>{"name": "\\ud83d"}</tool_call>', ["error: the only tool is calculate"]),
        (f"first {call('1/4')} then {call('7', 'search')}", ["0.25", "error: the only tool is calculate"]),
        (call("1234567 + 1"), ["1234568"]),
        (call("1/0"), ["error: ZeroDivisionError: division by zero"]),
        (call("__import__('os').getcwd()"), ["error: ValueError: only numbers, + - * / and parentheses"]),
        (call("2 +"), ["error: SyntaxError: "]),
        (call("9**9**9"), ["error: ValueError: only numbers, + - * / and parentheses"]),
        ("<tool_call>{not json}</tool_call>", ["error: JSONDecodeError: "]),
    ],
)
def test_the_calculator_of_the_recipes(said: str, expected: list[str]) -> None:
    path = Path(__file__).resolve().parents[2] / "recipes" / "turns" / "calculator.py"
    found = call_turn(str(path), [{"role": "assistant", "content": said}], "", {})
    assert len(found) == len(expected)
    for message, text in zip(found, expected, strict=True):
        assert message["role"] == "tool" and message["content"].startswith(text)


@pytest.mark.parametrize(
    ("said", "expected"),
    [("4 - 1 + 12 =", "15"), ("-3 + 4 =", "1"), ("7 =", "7"), ("15", None), ("4 - 1 + =", None), ("4 - 1 = 3", None)],
)
def test_the_calculator_of_the_tiny_model(said: str, expected: str | None) -> None:
    path = Path(__file__).resolve().parents[2] / "recipes" / "turns" / "sums.py"
    found = call_turn(str(path), [{"role": "assistant", "content": said}], "", {})
    assert found == ([{"role": "tool", "content": expected}] if expected is not None else [])


def test_demonstrations_of_calls_are_what_a_rollout_would_have(tmp_path: Path) -> None:
    """The text of the two turns is that of a conversation in which the calculator has answered."""
    python("tools/make_tiny_model.py", "--output=model", folder=tmp_path).check()
    tokenizer, expression = load_tokenizer(tmp_path / "model"), "4 - 1 - 7"
    call = {"role": "assistant", "content": f"{expression} ="}
    asked, heard = [{"role": "user", "content": "x"}], [{"role": "tool", "content": str(chain_total(expression))}]
    answer = {"role": "assistant", "content": "-4"}
    whole = tokenizer.render_chat([*asked, call, *heard, answer], add_generation_prompt=False)
    end = tokenizer.decode([tokenizer.turn_end_token() or 0], skip_special_tokens=False)
    assert tokenizer.render_chat(asked) + tool_response(expression) + end == whole.rstrip("\n")


def test_what_a_function_starts_has_nothing_to_read_and_long_answers_are_cut(tmp_path: Path) -> None:
    path = tmp_path / "talk.py"
    path.write_text(
        "import subprocess, sys\n"
        "def respond(messages, ground_truth, extra_info):\n"
        "    print('not an answer')\n"
        "    if ground_truth == 'long':\n"
        "        return 'x' * 10**6\n"
        "    return subprocess.run([sys.executable, '-c', 'input()'], capture_output=True, text=True).stderr\n"
    )
    function = TurnFunction(MultiTurnSection(function=str(path), timeout_seconds=20.0, max_answer_tokens=10, workers=1))
    try:
        read, long = (function.messages_of(function.call([], truth, {}).result()) for truth in ("read", "long"))
    finally:
        function.close()
    assert read and "EOFError" in read[0]["content"]
    assert long and len(long[0]["content"]) == 640
