"""A program's messages to the tokens that were sampled: what is continued, what is rendered again, and where."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from rlhf_megatron.agents import chat_completions
from rlhf_megatron.agents.answer_tree import AnswerTree, Message, Plan, digests
from rlhf_megatron.agents.message_parsing import AnswerReader
from rlhf_megatron.agents.protocol import Answer
from rlhf_megatron.data.tokenizer import Tokenizer
from rlhf_megatron.data.tokenizer_loading import load_tokenizer
from rlhf_megatron.errors import DataError, RolloutError
from rlhf_megatron.recipe import AgentSection
from tiny_tokenizer import write_bpe_tokenizer

END = "<|im_end|>"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_bpe_tokenizer(tmp_path_factory.mktemp("tree")))


@pytest.fixture
def tree(tokenizer: Tokenizer) -> AnswerTree:
    end = tokenizer.turn_end_token()
    assert end is not None
    return AnswerTree(end)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def says(text: str, **fields: Any) -> Message:
    return {"role": "assistant", "content": text, **fields}


def answered(tree: AnswerTree, tokenizer: Tokenizer, plan: Plan, text: str, told: Message | None = None) -> list[int]:
    """Sample a text letter by letter, as no tokenizer would encode it."""
    tokens = [token for letter in text for token in tokenizer.encode(letter)] + tokenizer.encode(END)
    tree.commit(plan, [told or says(text)], tokens)
    return tokens


def test_an_answer_that_comes_back_keeps_the_tokens_that_were_sampled(tree: AnswerTree, tokenizer: Tokenizer) -> None:
    first = tree.plan([user("What is two?")], tokenizer)
    assert first.parent is None and first.prompt == first.tail == tokenizer.encode_chat([user("What is two?")])
    sampled = answered(tree, tokenizer, first, " The answer is five. ")
    conversation = [user("What is two?"), says("The answer is five."), user("And three?")]  # spaces were stripped
    second = tree.plan(conversation, tokenizer)
    assert second.parent == 0 == tree.latest and tree.rendered == 0
    assert second.prompt == [*first.prompt, *sampled, *tokenizer.encode_next_turn([user("And three?")])]
    assert second.prompt != tokenizer.encode_chat(conversation), "a peer that renders again would have other tokens"
    assert second.tail == second.prompt[len(first.prompt) + len(sampled) :]


def test_an_answer_that_was_cut_off_gets_its_end_and_the_model_did_not_say_it(
    tree: AnswerTree, tokenizer: Tokenizer
) -> None:
    plan = tree.plan([user("x")], tokenizer)
    tokens = tokenizer.encode("half")
    tree.commit(plan, [says("half"), says("half.")], tokens)
    following = tree.plan([user("x"), says("half"), user("y")], tokenizer)
    (end,) = tokenizer.encode(END)
    assert following.tail == [end, *tokenizer.encode_next_turn([user("y")])]
    assert tree.plan([user("x"), says("half."), user("y")], tokenizer).tail == following.tail, "its other form"


def test_what_is_rewritten_begins_anew(tree: AnswerTree, tokenizer: Tokenizer) -> None:
    answered(tree, tokenizer, tree.plan([user("x")], tokenizer), "one")
    for conversation in (
        [user("x"), says("one (sure)"), user("y")],
        [user("other"), says("one"), user("y")],
        [user("x"), says("one"), user("y"), says("of its own"), user("z")],
        [user("In short: one.")],
    ):
        plan = tree.plan(conversation, tokenizer)
        assert plan.parent is None and plan.prompt == tokenizer.encode_chat(conversation)
    assert tree.rendered == 4


def test_an_earlier_answer_may_be_continued_twice(tree: AnswerTree, tokenizer: Tokenizer) -> None:
    begin = [user("x")]
    first = answered(tree, tokenizer, tree.plan(begin, tokenizer), "one")
    begin += [says("one")]
    answered(tree, tokenizer, tree.plan([*begin, user("y")], tokenizer), "two")
    other = tree.plan([*begin, user("z")], tokenizer)
    assert other.parent == 0 != tree.latest
    assert other.prompt[: -len(other.tail)][-len(first) :] == first and tree.rendered == 0
    answered(tree, tokenizer, other, "three")
    deep = tree.plan([*begin, user("z"), says("three"), user("!")], tokenizer)
    assert deep.parent == 2 and deep.prompt[: len(other.prompt)] == other.prompt


def test_tool_calls_and_tools_tell_messages_apart_and_other_fields_do_not() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": {"x": 1, "y": 2}}}
    turned = {"id": "b", "function": {"arguments": {"y": 2, "x": 1}, "name": "add"}}
    same = [
        says("", tool_calls=[call]),
        says(" ", tool_calls=[turned], reasoning_content="so"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    assert len({digests([message])[-1] for message in same}) == 1
    other = says("", tool_calls=[{"function": {"name": "add", "arguments": {"x": 1, "y": 3}}}])
    assert digests([other])[-1] != digests(same[:1])[-1] != digests(same[:1], tools=[{"name": "add"}])[-1]
    results = [{"role": "tool", "content": "3", "tool_call_id": each} for each in "ab"]
    assert digests(results[:1])[-1] != digests(results[1:])[-1]


class Refusing:
    """A template that renders no tail."""

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        return [1, 2, 3]

    def encode_next_turn(self, messages: Sequence[Message]) -> list[int]:
        raise DataError("refused")


def test_a_tail_that_the_template_refuses_is_rendered_with_all_before_it(tree: AnswerTree) -> None:
    tree.commit(tree.plan([user("x")], Refusing()), [says("a")], [7])
    plan = tree.plan([user("x"), says("a"), user("y")], Refusing())
    assert plan == Plan(None, plan.digest, [1, 2, 3], [1, 2, 3]) and tree.rendered == 1


def test_calls_come_back_as_they_were_told(tree: AnswerTree, tokenizer: Tokenizer) -> None:
    reader = AnswerReader(AgentSection(function="x.py", tool_parser="hermes"), tokenizer)
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    asked = {"messages": [user("What is two?")], "tools": tools}
    question = chat_completions.question_of(asked)
    plan = tree.plan(question.messages, tokenizer, question.tools)
    said = 'So: <tool_call>{"name": "add", "arguments": {"x": 1, "y": 2}}</tool_call>' * 2
    tokens = tokenizer.encode(said + END)
    read = reader.read(tokens, "stop", question, "a1")
    assert read.finish_reason == "tool_calls" and read.kept == len(tokens) and read.message["content"] == "So: "
    tree.commit(plan, read.forms, tokens)
    answer = Answer(read.message, read.finish_reason, len(plan.prompt), tokens, [0.0] * len(tokens), 0)
    told = chat_completions.completion_of(answer, "a1", {})["choices"][0]["message"]
    assert [call["id"] for call in told["tool_calls"]] == ["call_a1_0", "call_a1_1"]
    assert json.loads(told["tool_calls"][1]["function"]["arguments"]) == {"x": 1, "y": 2}
    again = chat_completions.question_of({"messages": [user("What is two?"), told, user("3")], "tools": tools})
    assert tree.plan(again.messages, tokenizer, again.tools).parent == 0
    in_text = reader.read(tokens, "stop", chat_completions.question_of({"messages": [user("x")]}), "a2")
    assert in_text.message["content"] == said, "without tools there are no calls"
    broken = reader.read(tokenizer.encode("<tool_call>{oops</tool_call>"), "stop", question, "a3")
    assert "tool_calls" not in broken.message and "{oops" in broken.message["content"]
    with pytest.raises(RolloutError, match=r"tool_parser=hermet: vLLM has no parser hermet; it has .*hermes"):
        AnswerReader(AgentSection(function="x.py", tool_parser="hermet"), tokenizer)
