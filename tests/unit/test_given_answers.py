"""Supervised rows in the forms of TRL's and verl's files: prompts, loss masks, pairs, and what is refused of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pyarrow
import pyarrow.parquet
import pytest
from transformers import AutoTokenizer

from rlhf_megatron.data.prompts import LeftOut, Prompt, PromptDataset
from rlhf_megatron.data.tokenizer import Tokenizer
from rlhf_megatron.data.tokenizer_loading import load_tokenizer
from rlhf_megatron.errors import DataError
from rlhf_megatron.loops.sft import batch_of
from rlhf_megatron.recipe import DataSection, make_recipe
from tiny_tokenizer import write_bpe_tokenizer

Row = dict[str, Any]
# transformers knows the assistant's tokens where a template marks them, which is what ours are compared with.
MARKED = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}\n"
    "{% else %}{{ message['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Templates that differ in what they write around a turn.
WITHOUT_REASONING = (  # of earlier turns, and an empty one where the last has none: so do Qwen3's and DeepSeek-R1's
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' and loop.last and '</think>' not in message['content'] %}<think></think>"
    "{% endif %}{{ message['content'] if loop.last else message['content'].split('</think>')[-1] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITHOUT_HEADERS = (  # as Mistral's
    "{% for message in messages %}{% if message['role'] == 'assistant' %} {{ message['content'] | trim }}"
    "<|endoftext|>{% else %}[INST] {{ message['content'] }} [/INST]{% endif %}{% endfor %}"
)
CALLING = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% for call in message.tool_calls or [] %}<call>{{ call.name }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def say(*texts: str, first: str = "user") -> list[Row]:
    roles = ["user", "assistant"] if first == "user" else ["assistant", "user"]
    return [{"role": roles[index % 2], "content": text} for index, text in enumerate(texts)]


CHAT = [{"role": "system", "content": "Be short."}, *say("What is 1 + 1?", "2", "And half of it?", "It is one.")]


@pytest.fixture(scope="module")
def tokenizer_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tokenizer]:
    opened: dict[str, Tokenizer] = {}

    def load(template: str) -> Tokenizer:
        if template not in opened:
            opened[template] = load_tokenizer(write_bpe_tokenizer(tmp_path_factory.mktemp("bpe"), template))
        return opened[template]

    return load


@pytest.fixture
def read(tmp_path: Path, tokenizer_of: Callable[[str], Tokenizer]) -> Callable[..., list[Prompt]]:
    """Return prompts of rows, by the chat template and keys of the data section."""

    def of_rows(
        rows: list[Row], responses: Literal["one", "pair"] = "one", template: str = MARKED, **keys: Any
    ) -> list[Prompt]:
        file = tmp_path / "rows.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
        section = DataSection(**({"train_files": ["x"], "max_prompt_length": 300} | keys))
        found = list(PromptDataset([file], tokenizer_of(template), section, responses=responses).read_all())
        prompts = [each for each in found if isinstance(each, Prompt)]
        assert len(prompts) == len(found)
        return prompts

    return of_rows


def learned_text(tokenizer: Tokenizer, prompt: Prompt) -> list[str]:
    """Return the stretches of text that the loss is on."""
    batch = batch_of([prompt])
    stretches, before = [], False
    for token, learned in zip(batch.tokens.tolist(), batch.response_mask.tolist(), strict=True):
        stretches += [[]] if learned and not before else []
        if learned:
            stretches[-1].append(token)
        before = learned
    return [tokenizer.decode(ids, skip_special_tokens=False) for ids in stretches]


def test_all_assistant_turns_are_learned_as_transformers_marks_them(
    read: Callable[..., list[Prompt]], tokenizer_of: Callable[[str], Tokenizer]
) -> None:
    chats = [CHAT, CHAT[1:3], [*CHAT, *say("Thanks.", "Gladly: ### 1.5")], [*CHAT, {"role": "user", "content": "Bye."}]]
    prompts = read([{"messages": chat, "prompt_id": "x"} for chat in chats])
    reference = AutoTokenizer.from_pretrained(tokenizer_of(MARKED).path)
    for prompt, chat in zip(prompts, chats, strict=True):
        told = reference.apply_chat_template(chat, return_assistant_tokens_mask=True, return_dict=True)
        batch = batch_of([prompt])
        mask = [bool(flag) for flag in told["assistant_masks"]]
        last = (
            max(index for index, flag in enumerate(mask) if flag) + 1
        )  # what is behind it has no loss to depend on it
        assert batch.tokens.tolist() == told["input_ids"][:last]
        assert batch.response_mask.tolist() == mask[:last]
    assert prompts[0].messages == tuple(CHAT[:2])


def test_the_last_turn_alone(read: Callable[..., list[Prompt]], tokenizer_of: Callable[[str], Tokenizer]) -> None:
    [prompt] = read([{"messages": CHAT}], learned_turns="last")
    assert learned_text(tokenizer_of(MARKED), prompt) == ["It is one.<|im_end|>"]
    assert prompt.messages == tuple(CHAT[:4])
    assert list(prompt.token_ids) == tokenizer_of(MARKED).encode_chat(CHAT[:4])


@pytest.mark.parametrize(
    ("template", "chat", "learned"),
    [
        (
            WITHOUT_REASONING,
            say("a?", "<think>why</think>first", "b?", "<think>so</think>second"),
            ["first<|im_end|>", "<think>so</think>second<|im_end|>"],
        ),
        (WITHOUT_REASONING, say("a?", "first", "b?", "second"), ["first<|im_end|>", "<think></think>second<|im_end|>"]),
        (WITHOUT_HEADERS, say("a?", "first", "b?", "second"), ["first<|endoftext|>", "second<|endoftext|>"]),
        (
            CALLING,
            [
                *say("a?"),
                {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]},
                {"role": "tool", "content": "3"},
                *say("three", first="assistant"),
            ],
            ["<call>add<|im_end|>", "three<|im_end|>"],
        ),
        (MARKED, say("turnprobe?", "turnprobe", "b?", "turnprobe0"), ["turnprobe<|im_end|>", "turnprobe0<|im_end|>"]),
    ],
)
def test_turns_are_found_whatever_the_template_writes_around_them(
    read: Callable[..., list[Prompt]],
    tokenizer_of: Callable[[str], Tokenizer],
    template: str,
    chat: list[Row],
    learned: list[str],
) -> None:
    [prompt] = read([{"messages": chat}], template=template)
    tokenizer = tokenizer_of(template)
    assert learned_text(tokenizer, prompt) == learned
    text = tokenizer.decode(batch_of([prompt]).tokens.tolist(), skip_special_tokens=False)
    plain = [turn | {"content": turn["content"] or ""} for turn in chat]
    assert tokenizer.render_chat(plain, add_generation_prompt=False).startswith(text)


def test_prompts_with_completions(read: Callable[..., list[Prompt]], tokenizer_of: Callable[[str], Tokenizer]) -> None:
    tokenizer = tokenizer_of(MARKED)
    end = tokenizer.eos_token_id
    [chat] = read([{"prompt": CHAT[:4], "completion": CHAT[4:]}])
    assert chat == read([{"messages": CHAT}], learned_turns="last")[0]
    question, answer = "The sky is", " blue."
    [plain] = read([{"prompt": question, "completion": answer}], string_prompts="plain")
    assert list(plain.token_ids) == tokenizer.encode(question)
    assert list(plain.response_token_ids or ()) == [*tokenizer.encode(answer), end]
    [asked] = read([{"prompt": question, "completion": answer}])
    assert list(asked.token_ids) == tokenizer.encode_chat(say(question))
    assert list(asked.response_token_ids or ()) == [*tokenizer.encode(answer), end]
    [verl] = read([{"question": "x", "prompt": question, "answer": answer}], response_column="answer")
    assert (verl.token_ids, verl.response_token_ids) == (asked.token_ids, asked.response_token_ids)
    [system] = read([{"prompt": question, "completion": answer}], system_prompt="Be short.")
    assert list(system.token_ids) == tokenizer.encode_chat([CHAT[0], *say(question)])


def test_pairs_in_every_form_are_the_same(
    read: Callable[..., list[Prompt]], tokenizer_of: Callable[[str], Tokenizer]
) -> None:
    tokenizer = tokenizer_of(MARKED)
    prompt, better, worse = CHAT[:4], say("one", first="assistant"), say("three", first="assistant")
    whole = {"chosen": [*prompt, *better], "rejected": [*prompt, *worse]}
    forms: list[Row] = [
        {"prompt": prompt, "chosen": "one", "rejected": "three"},
        {"prompt": prompt, "chosen": better, "rejected": worse},
        whole,
        whole | {"prompt": "And half of it?"},  # as in ultrafeedback_binarized
    ]
    pairs = [read([form], "pair")[0] for form in forms]
    expected = tokenizer.encode_answered([prompt, prompt], ["one", "three"])
    assert [list(map(list, pair.pair or ())) for pair in pairs] == [expected] * 4
    assert {pair.messages[-1]["content"] for pair in pairs} == {"And half of it?"}
    texts = ["Human: a? Assistant: b", "Human: a? Assistant: c"]
    for keys, form in (
        ({}, {"chosen": texts[0], "rejected": texts[1]}),
        ({"string_prompts": "plain"}, {"prompt": texts[0][:-1], "chosen": "b", "rejected": "c"}),
    ):
        [plain] = read([form], "pair", **keys)
        assert list(map(list, plain.pair or ())) == [
            [*tokenizer.encode(text), tokenizer.eos_token_id] for text in texts
        ]


@pytest.mark.parametrize(
    ("row", "keys", "problem"),
    [
        ({"messages": say("a?")}, {}, "column messages: has no turn of the assistant's"),
        ({"messages": say("a", first="assistant")}, {}, "column messages: begins with the assistant's turn"),
        ({"messages": "text"}, {}, "column messages: str instead of a list"),
        ({"messages": None}, {}, "column messages: empty"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, {}, "message 0 has content of type list"),
        ({"messages": CHAT, "tools": ["add"]}, {}, "column tools: tools of one row are not read"),
        ({"prompt": say("a?"), "completion": say("b?")}, {}, "column completion: has no turn of the assistant's"),
        ({"prompt": "a", "completion": say("b", first="assistant")}, {"string_prompts": "plain"}, "list of messages"),
        ({"prompt": "a", "completion": " "}, {}, "column completion: ' ' instead of a response text"),
        ({"prompt": "", "completion": "b"}, {}, "column prompt: every message is empty"),
        ({"messages": CHAT}, {"overlong_prompts": "stop", "max_response_length": 3}, "over data.max_response_length"),
        (
            {"question": "a", "answer": "b"},
            {},
            "columns prompt, reward_model: missing; the file has question, answer; loop: sft reads messages",
        ),
    ],
)
def test_one_line_says_what_is_wrong_with_a_row(
    read: Callable[..., list[Prompt]], row: Row, keys: dict[str, Any], problem: str
) -> None:
    with pytest.raises(DataError) as told:
        read([row], **keys)
    assert problem in str(told.value) and "\n" not in str(told.value)
    assert "rows.parquet" in str(told.value) and ("row 0" in str(told.value) or "missing" in problem)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"chosen": say("a?", "b"), "rejected": say("c?", "b")}, "column rejected: answers another prompt than chosen"),
        ({"chosen": say("a?", "b"), "rejected": say("a?")}, "column rejected: differs from chosen by no answer"),
        ({"chosen": say("a?", "b"), "rejected": say("a?", "b")}, "column rejected:"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "column rejected: the same text as chosen"),
        ({"chosen": "b"}, "column rejected: missing; the file has chosen; loop: reward_modeling reads"),
    ],
)
def test_one_line_says_what_is_wrong_with_a_pair(read: Callable[..., list[Prompt]], row: Row, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        read([row], "pair")


def test_a_template_that_drops_a_turn_is_refused_where_it_is_to_be_learned(read: Callable[..., list[Prompt]]) -> None:
    template = (
        "{% for message in messages %}{% if message['role'] == 'user' or loop.last %}"
        "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    with pytest.raises(DataError, match="row 0, column messages: the chat template leaves out message 2"):
        read([{"messages": CHAT}], template=template)
    [prompt] = read([{"messages": CHAT}], template=template, learned_turns="last")
    assert prompt.learned is None


def test_images_are_never_dropped_in_silence(
    tmp_path: Path, tokenizer_of: Callable[[str], Tokenizer], read: Callable[..., list[Prompt]]
) -> None:
    row = {"messages": CHAT, "images": [{"bytes": b"png", "path": None}]}
    with pytest.raises(DataError, match=r"rows\.parquet, column images: only models of text are trained"):
        read([row])
    for column, value in (("image_1", b"png"), ("plot", row["images"][0])):
        with pytest.raises(DataError, match=rf"rows\.parquet, column {column}: only models of text are trained"):
            read([{"messages": CHAT, column: value}])
    assert read([row], images="drop") == read([{"messages": CHAT}])
    kind = pyarrow.list_(pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())]))
    for nothing in ([None, None], [[], None]):
        table = pyarrow.Table.from_pylist([{"messages": CHAT}] * 2).append_column(
            "images", pyarrow.array(nothing, kind)
        )
        pyarrow.parquet.write_table(table, tmp_path / "none.parquet")
        section = DataSection(train_files=["x"], max_prompt_length=300)
        found = PromptDataset([tmp_path / "none.parquet"], tokenizer_of(MARKED), section, responses="one").read([0, 1])
        assert not any(isinstance(each, LeftOut) for each in found)


OWN = """
import numpy
class Sums:
    def __init__(self, files):
        self.numbers = [int(line) for file in files for line in open(file)]
    def __len__(self):
        return len(self.numbers)
    def __getitem__(self, row):
        return {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"{self.numbers[row]} + 1 ="}],
            "reward_model": {"ground_truth": 1 + self.numbers[row]},
            "extra_info": {"level": self.numbers[row]},
        }
class Bare(Sums):
    def __getitem__(self, row):
        return {"prompt": [{"role": "user", "content": "x"}]}
class Seeing(Sums):
    def __getitem__(self, row):
        return super().__getitem__(row) | {"images": numpy.zeros(0 if row < 2 else 2)}
class Failing(Sums):
    def __len__(self):
        raise OSError("no such table")
"""


def test_rows_of_a_users_own_class(tmp_path: Path, tokenizer_of: Callable[[str], Tokenizer]) -> None:
    from rlhf_megatron.data.opening import open_data

    code, numbers = tmp_path / "own.py", tmp_path / "numbers.txt"
    code.write_text(OWN)
    numbers.write_text("".join(f"{number}\n" for number in range(3000)))

    def section(name: str, **keys: Any) -> DataSection:
        return DataSection(
            **{"dataset": f"{code}:{name}", "train_files": [str(numbers)], "max_prompt_length": 50, **keys}
        )

    tokenizer = tokenizer_of(MARKED)
    data = open_data(section("Sums", validation_fraction=0.1), tokenizer, seed=1)
    assert data.validation is not None
    drawn = data.train.next(3000 - len(data.validation))
    assert sorted(int(each.ground_truth) for each in [*drawn, *data.validation]) == list(range(1, 3001))
    state = data.train.state()
    resumed = open_data(section("Sums", validation_fraction=0.1), tokenizer, seed=1).train
    resumed.load(state)
    assert resumed.next(40) == data.train.next(40)
    curriculum = open_data(section("Sums", curriculum={"column": "extra_info.level"}), tokenizer, seed=1).train
    assert [each.ground_truth for each in curriculum.next(3)] == ["1", "2", "3"]
    numbers.write_text("7\n8\n9\n")
    for name, problem in (
        ("Seeing", "own.py:Seeing, row 2, column images: only models of text are trained"),
        ("Bare", "own.py:Bare, row 0, column data_source: missing; the row has prompt"),
        ("Failing", r"data\.dataset: .*own\.py:Failing raised OSError: no such table when it was asked for its len"),
        ("Absent", "own.py has no class Absent"),
    ):
        with pytest.raises(DataError, match=problem):
            open_data(section(name), tokenizer, seed=1)
    assert len(open_data(section("Seeing", images="drop"), tokenizer, seed=1).train.next(3)) == 3


@pytest.mark.parametrize(
    "keys", [{"learned_turns": "last"}, {"string_prompts": "plain"}, {"response_column": "answer"}]
)
def test_rl_refuses_keys_of_given_answers(keys: dict[str, str]) -> None:
    tree = {
        "name": "x",
        "loop": "rl",
        "steps": 1,
        "model": {"path": "x", "dtype": "float32"},
        "actor": {"tokens_per_gpu": 64, "optimizer": {"learning_rate": 1e-5}},
        "data": {"train_files": ["x"], "max_prompt_length": 8, **keys},
        "batch": {"prompts_per_step": 2, "responses_per_prompt": 2, "minibatch_prompts": 2},
        "rollout": {"max_response_length": 8},
    }
    [(key, value)] = keys.items()
    with pytest.raises(ValueError, match=rf"data\.{key}={value}: loop rl does not read it"):
        make_recipe(tree, "x")
