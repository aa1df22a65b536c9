"""rlhf_megatron.data.tokenizer_loading, with real tokenizers that are trained here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhf_megatron.data.tokenizer import Tokenizer
from rlhf_megatron.data.tokenizer_loading import load_tokenizer
from rlhf_megatron.errors import DataError
from tiny_tokenizer import write_bpe_tokenizer, write_sentencepiece_model

MESSAGES = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "What is 2 + 3?"}]


@pytest.fixture(scope="module")
def bpe_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bpe_tokenizer(tmp_path_factory.mktemp("bpe"))


@pytest.fixture(scope="module")
def tokenizer(bpe_folder: Path) -> Tokenizer:
    return load_tokenizer(bpe_folder)


@pytest.fixture(scope="module")
def sentencepiece_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sentencepiece_model(tmp_path_factory.mktemp("sentencepiece"))


def test_text_survives_encoding_and_decoding(tokenizer: Tokenizer) -> None:
    text = "Natalia sold 48 clips, naïve café 数学\n#### 72"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode_many([]) == []
    assert tokenizer.encode_many(["a b", "c"]) == [tokenizer.encode("a b"), tokenizer.encode("c")]


def test_chat_equals_what_transformers_makes_of_it(tokenizer: Tokenizer, bpe_folder: Path) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(str(bpe_folder))
    expected = reference.apply_chat_template(MESSAGES, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert tokenizer.encode_chat(MESSAGES) == list(expected)
    assert tokenizer.decode(tokenizer.encode_chat(MESSAGES), skip_special_tokens=False).endswith(
        "<|im_start|>assistant\n"
    )


CONVERSATIONS = [
    MESSAGES[1:],
    [*MESSAGES, {"role": "assistant", "content": "5"}, {"role": "user", "content": "And 5 + 7?"}],
    [MESSAGES[1], {"role": "assistant", "content": "5"}, {"role": "user", "content": "Why?", "name": "Ann"}],
]
# In the manner of models that can think: the last turn opens differently when a name says so.
THINKING_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message.role }}{% if message.name %} {{ message.name }}"
    "{% endif %}] {{ message.content | trim }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}[assistant]"
    "{% if enable_thinking is defined and not enable_thinking %} <think></think>{% endif %}{% endif %}"
)


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("template", [None, THINKING_TEMPLATE])
@pytest.mark.parametrize("names", [{}, {"enable_thinking": False}, {"enable_thinking": True}])
def test_conversations_of_many_turns_equal_what_transformers_makes_of_them(
    bpe_folder: Path, tmp_path: Path, messages: list[dict[str, str]], template: str | None, names: dict[str, bool]
) -> None:
    from transformers import AutoTokenizer

    file = tmp_path / "template.jinja"
    file.write_text(template or "")
    own = load_tokenizer(bpe_folder, False, str(file) if template else None, names)
    reference = AutoTokenizer.from_pretrained(str(bpe_folder))
    options = {"chat_template": template, **names}
    ids = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **options)
    assert own.encode_chat(messages) == list(ids)
    assert own.render_chat(messages).endswith(" <think></think>") == bool(
        template and names == {"enable_thinking": False}
    )
    answered = [*messages, {"role": "assistant", "content": "5 + 7 = 12"}]
    ids = reference.apply_chat_template(answered, return_dict=False, **options)
    assert own.encode_answered([messages], ["5 + 7 = 12"]) == [list(ids)]


def test_stop_tokens_are_eos_and_the_templates_end_of_turn(tokenizer: Tokenizer) -> None:
    end_of_turn = tokenizer.encode("<|im_end|>")
    assert len(end_of_turn) == 1
    assert set(tokenizer.stop_token_ids) == {tokenizer.eos_token_id, end_of_turn[0]}
    assert tokenizer.pad_token_id == tokenizer.eos_token_id  # this tokenizer has no padding token


def test_stop_tokens_come_from_the_generation_config_too(tmp_path: Path) -> None:
    write_bpe_tokenizer(tmp_path, chat_template=None)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 7]}))
    assert load_tokenizer(tmp_path).stop_token_ids == (0, 7)


def test_chat_template_file_replaces_the_tokenizers_own(bpe_folder: Path, tmp_path: Path) -> None:
    template = tmp_path / "plain.jinja"
    template.write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    assert load_tokenizer(bpe_folder, chat_template=str(template)).render_chat(MESSAGES) == "Be short.What is 2 + 3?"
    with pytest.raises(DataError, match=r"data\.chat_template: .*missing\.jinja cannot be read"):
        load_tokenizer(bpe_folder, chat_template=str(tmp_path / "missing.jinja"))


def test_missing_chat_template_and_refused_messages_are_told(tokenizer: Tokenizer, tmp_path: Path) -> None:
    bare = load_tokenizer(write_bpe_tokenizer(tmp_path, chat_template=None))
    with pytest.raises(DataError, match=r"has no chat template; set data\.chat_template"):
        bare.encode_chat(MESSAGES)
    with pytest.raises(DataError, match="refuses these messages: unknown role tool"):
        tokenizer.encode_chat([{"role": "tool", "content": "x"}])


def test_nothing_to_load_is_told_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no .*nowhere"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(DataError, match="cannot be loaded") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)
    (tmp_path / "bad.model").write_bytes(b"not a model")
    with pytest.raises(DataError, match="not a sentencepiece model"):
        load_tokenizer(tmp_path / "bad.model")
    (tmp_path / "vocab.txt").write_text("x")
    with pytest.raises(DataError, match=r"not a sentencepiece \.model"):
        load_tokenizer(tmp_path / "vocab.txt")


def test_sentencepiece_file_and_folder(sentencepiece_file: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(sentencepiece_file)
    text = "Natalia sold half as many clips in May."
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.stop_token_ids == (tokenizer.eos_token_id,)
    with pytest.raises(DataError, match="has no chat template"):
        tokenizer.encode_chat(MESSAGES)
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_file.read_bytes())
    assert load_tokenizer(tmp_path).encode(text) == tokenizer.encode(text)


def test_sentencepiece_chat_uses_control_pieces(sentencepiece_file: Path, tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text(
        "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{{ eos_token }}{% endfor %}"
    )
    tokenizer = load_tokenizer(sentencepiece_file, chat_template=str(template))
    token_ids = tokenizer.encode_chat([{"role": "user", "content": "The answer is five."}])
    assert token_ids == [1, *tokenizer.encode("The answer is five."), tokenizer.eos_token_id]
    assert tokenizer.decode(token_ids) == "The answer is five."
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == "<s>The answer is five.</s>"
    broken = tmp_path / "broken.jinja"
    broken.write_text("{% for %}")
    with pytest.raises(DataError, match="not valid Jinja"):
        load_tokenizer(sentencepiece_file, chat_template=str(broken))


def test_importing_the_module_loads_neither_torch_nor_transformers() -> None:
    import subprocess
    import sys

    module = "rlhf_megatron.data.tokenizer_loading"
    code = f"import sys, {module}; print([m for m in ('torch','transformers') if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
