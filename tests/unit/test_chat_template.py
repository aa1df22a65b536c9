"""Chat templates: what transformers makes of good ones, one line for bad ones, whatever they loop, double or write."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from data_rows import opened, row, table, written
from rlhf_megatron.data import chat_template
from rlhf_megatron.data.chat_template import ChatTemplate, UnusableTemplate, read_template
from rlhf_megatron.data.tokenizer_loading import load_tokenizer
from rlhf_megatron.errors import DataError
from tiny_tokenizer import write_bpe_tokenizer

MESSAGES = "{% for message in messages %}{{ message.content }}{% endfor %}"
QUESTION = [{"role": "user", "content": "What is 2 + 3?"}]
NAMES = {"bos_token": "<s>", "eos_token": "</s>", "tools": None, "documents": None}

# As the models' folders have them, but for the texts that they put in.
PUBLISHED = {
    "chatml": (
        "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + "
        "'\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "llama-3": (
        "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + "
        "message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 "
        "%}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    ),
    "llama-3.1": (
        "{{- bos_token }}\n{%- if not date_string is defined %}\n    {%- if strftime_now is defined %}\n        "
        '{%- set date_string = strftime_now("%d %b %Y") %}\n    {%- else %}\n        {%- set date_string = "26 Jul '
        "2024\" %}\n    {%- endif %}\n{%- endif %}\n{%- if messages[0]['role'] == 'system' %}\n    {%- set "
        "system_message = messages[0]['content']|trim %}\n    {%- set messages = messages[1:] %}\n{%- else %}\n    "
        '{%- set system_message = "" %}\n{%- endif %}\n{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}\n'
        '{%- if tools is not none %}\n    {{- "Environment: ipython\\n" }}\n    {%- for t in tools %}\n        {{- t | '
        'tojson(indent=4) }}\n        {{- "\\n\\n" }}\n    {%- endfor %}\n{%- endif %}\n{{- "Today Date: " + '
        'date_string + "\\n\\n" }}\n{{- system_message }}\n{{- "<|eot_id|>" }}\n{%- for message in messages %}\n'
        "    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + "
        "'<|eot_id|>' }}\n{%- endfor %}\n{%- if add_generation_prompt %}\n    {{- "
        "'<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}\n{%- endif %}\n"
    ),
    "mistral": (
        "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}{% if "
        "message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == "
        "'assistant' %}{{ message['content'] + eos_token}}{% else %}{{ raise_exception('Only user and assistant roles "
        "are supported!') }}{% endif %}{% endfor %}"
    ),
    "qwen2.5": (
        "{%- if tools %}\n    {{- '<|im_start|>system\\n' }}\n    {{- \"# Tools\\n<tools>\" }}\n    {%- for tool in "
        'tools %}\n        {{- "\\n" }}\n        {{- tool | tojson }}\n    {%- endfor %}\n    {{- "\\n</tools>'
        '<|im_end|>\\n" }}\n{%- endif %}\n{%- for message in messages %}\n    {%- if (message.role == "user") or '
        '(message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}\n'
        "        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}\n    {%- elif "
        "message.role == \"assistant\" %}\n        {{- '<|im_start|>' + message.role }}\n        {%- for tool_call in "
        "message.tool_calls %}\n            {%- if tool_call.function is defined %}\n                {%- set tool_call "
        '= tool_call.function %}\n            {%- endif %}\n            {{- \'\\n<tool_call>\\n{"name": "\' }}{{- '
        "tool_call.name }}{{- '\", \"arguments\": ' }}{{- tool_call.arguments | tojson }}{{- '}\\n</tool_call>' }}\n"
        "        {%- endfor %}\n        {{- '<|im_end|>\\n' }}\n    {%- elif message.role == \"tool\" %}\n    "
        "    {%- if "
        "(loop.index0 == 0) or (messages[loop.index0 - 1].role != \"tool\") %}\n            {{- '<|im_start|>user' }}\n"
        "        {%- endif %}\n        {{- '\\n<tool_response>\\n' }}\n        {{- message.content }}\n        {{- "
        "'\\n</tool_response>' }}\n        {%- if loop.last or (messages[loop.index0 + 1].role != \"tool\") "
        "%}\n        "
        "    {{- '<|im_end|>\\n' }}\n        {%- endif %}\n    {%- endif %}\n{%- endfor %}\n{%- if "
        "add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}\n{%- endif %}\n"
    ),
    "qwen3": (
        "{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}\n{%- for message in "
        "messages[::-1] %}\n    {%- set index = (messages|length - 1) - loop.index0 %}\n    {%- if ns.multi_step_tool "
        'and message.role == "user" and message.content is string and not(message.content.startswith('
        "'<tool_response>') and message.content.endswith('</tool_response>')) %}\n        {%- set ns.multi_step_tool = "
        "false %}\n        {%- set ns.last_query_index = index %}\n    {%- endif %}\n{%- endfor %}\n{%- for message in "
        'messages %}\n    {%- set content = message.content %}\n    {%- if message.role == "assistant" %}\n        '
        "{%- set reasoning_content = '' %}\n        {%- if '</think>' in content %}\n            {%- set "
        "reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}\n"
        "            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}\n        {%- endif %}\n        "
        "{%- if loop.index0 > ns.last_query_index and reasoning_content %}\n            {{- '<|im_start|>' + "
        "message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content }}\n        "
        "{%- else %}\n            {{- '<|im_start|>' + message.role + '\\n' + content }}\n        {%- endif "
        "%}\n        "
        "{{- '<|im_end|>\\n' }}\n    {%- else %}\n        {{- '<|im_start|>' + message.role + '\\n' + content + "
        "'<|im_end|>' + '\\n' }}\n    {%- endif %}\n{%- endfor %}\n{%- if add_generation_prompt %}\n    {{- "
        "'<|im_start|>assistant\\n' }}\n    {%- if enable_thinking is defined and enable_thinking is false %}\n        "
        "{{- '<think>\\n\\n</think>\\n\\n' }}\n    {%- endif %}\n{%- endif %}"
    ),
    "loop controls and marks of generation": (
        "{% for message in messages %}{% if message.role == 'tool' %}{% continue %}{% endif %}{% if message.role == "
        "'assistant' %}{% generation %}{{ message.content }}</s>{% endgeneration %}{% else %}\n    {% if true %}\n"
        "[{{ message.role }}] {{ message.content }}\n    {% endif %}\n{% endif %}{% endfor %}"
    ),
}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    QUESTION,
    [{"role": "user", "content": "  naïve <b>&'\" 数学\n"}],
    [*QUESTION, {"role": "assistant", "content": "<think>\n2+3\n</think>\n\n5"}, {"role": "user", "content": "Why?"}],
    [{"role": "system", "content": "Be short."}, *QUESTION],
    [
        *QUESTION,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2, "b": 3.5, "c": "<é'\">", "d": [True]}}}],
        },
        {"role": "tool", "content": "5"},
    ],
]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds <two> numbers & says 'é'"}}]


def of_transformers(text: str, messages: list[dict[str, Any]], **names: Any) -> str | None:
    try:
        return render_jinja_template(conversations=[messages], chat_template=text, **names)[0][0]
    except Exception:
        return None


def packaged_templates() -> Iterator[Path]:
    """Yield what vLLM ships for models that have none of their own."""
    import vllm

    yield from sorted((Path(vllm.__file__).parent / "transformers_utils" / "chat_templates").glob("*.jinja"))


@pytest.mark.parametrize("text", PUBLISHED.values(), ids=PUBLISHED)
@pytest.mark.parametrize("names", [{}, {"tools": TOOLS}, {"enable_thinking": False}])
def test_published_templates_make_what_transformers_makes_of_them(text: str, names: dict[str, Any]) -> None:
    template = ChatTemplate(text, "the chat template", NAMES | names)
    for generate in (True, False):
        found = template.render_each(CONVERSATIONS, generate)
        expected = [
            of_transformers(text, messages, add_generation_prompt=generate, **NAMES | names)
            for messages in CONVERSATIONS
        ]
        assert [None if isinstance(item, DataError) else item for item in found] == expected
        assert isinstance(expected[0], str)


def test_packaged_templates_make_what_transformers_makes_of_them() -> None:
    files = list(packaged_templates())
    assert len(files) > 3
    for file in files:
        text = read_template(file)
        expected = [of_transformers(text, messages, add_generation_prompt=True, **NAMES) for messages in CONVERSATIONS]
        if len(set(expected)) == 1:  # one of them reads another name than ``messages``
            with pytest.raises(UnusableTemplate, match="ignores the messages"):
                ChatTemplate(text, file.name, NAMES)
            continue
        found = ChatTemplate(text, file.name, NAMES).render_each(CONVERSATIONS)
        assert [None if isinstance(item, DataError) else item for item in found] == expected, file.name


LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
BAD = {
    "endless loop": (LOOP + MESSAGES, "takes more than 0.3 seconds"),
    "endless recursion": (
        "{% macro f(n) %}{% if n > 0 %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}" + MESSAGES,
        "takes more than 0.3 seconds",
    ),
    "doubling": (
        "{% set n = namespace(x='a' * 1000) %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}" + MESSAGES,
        "needs too much memory|takes more than 0.3",
    ),
    "folded": ("{{ 'a' * 10**10 }}" + MESSAGES, "needs too much memory"),
    "formatted": ("{{ '%1000000000d' % messages|length }}" + MESSAGES, "needs too much memory|takes more than 0.3"),
    "centered": ("{{ messages[0].content.center(10**10) }}" + MESSAGES, "needs too much memory"),
    "replaced": ("{% set s = 'a' * 10**6 %}{{ s.replace('a', s) }}" + MESSAGES, "needs too much memory"),
    "power": (
        "{{ (messages|length + 9) ** (10 ** 8) }}" + MESSAGES,
        "takes more than 0.3 seconds|needs too much memory",
    ),
    "long text": (MESSAGES + "{% for i in range(300) %}{{ 'a' * 10000 }}{% endfor %}", r"writes 3,000,01\d characters"),
    "no Unicode": ("{{ '\\ud800' }}" + MESSAGES, "writes text that is not Unicode"),
    "constant": ("hello", "ignores the messages: different questions become the same text"),
    "empty": ("", "ignores the messages"),
    "without the last": ("{% for m in messages[:-1] %}{{ m.content }}{% endfor %}", "ignores the messages"),
    "length alone": ("{{ messages[-1].content|length }}", "changes the question: 'first probe' is not in the text"),
    "first word alone": ("{{ messages[-1].content.split()[0] }}", "changes the question"),
    "capitals": ("{{ messages[-1].content|upper }}", "changes the question"),
    "chance": ("{{ [1, 2]|random }}" + MESSAGES, "is not valid Jinja: No filter named 'random'"),
    "no Jinja": ("{% for %}\n\n", "is not valid Jinja: Expected an expression"),
    "unknown tag": ("{% do x %}", "is not valid Jinja: Encountered unknown tag 'do'"),
    "unknown filter": ("{{ 1 | nonsense }}", "is not valid Jinja: No filter named 'nonsense'"),
    "deep": ("{{ " + "[" * 5000 + "]" * 5000 + " }}", "is not valid Jinja: "),
    "nested": ("{% if 1 %}" * 3000 + MESSAGES + "{% endif %}" * 3000, "is not valid Jinja: "),
    "long template": ("x" * 2**21, "has 2,097,152 characters; at most 1,048,576"),
    "a list": ([1], "is list instead of text"),
}


@pytest.mark.parametrize(("text", "problem"), BAD.values(), ids=BAD)
def test_a_bad_template_ends_in_one_line(monkeypatch: pytest.MonkeyPatch, text: Any, problem: str) -> None:
    monkeypatch.setattr(chat_template, "MOST_SECONDS", 0.3)
    monkeypatch.setattr(chat_template, "MOST_BYTES", 2**27)
    with pytest.raises(UnusableTemplate, match=f"^the chat template ({problem})") as caught:
        ChatTemplate(text, "the chat template", NAMES)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 500


REFUSED = {
    "raises": ("{{ raise_exception('a\nb') }}", "refuses these messages: a$"),
    "raises without end": ("{{ raise_exception('x' * 9000) }}", r"refuses these messages: x+\.\.\. \(500 characters\)"),
    "no such name": ("{{ nothing.at.all }}", "'nothing' is undefined"),
    "by zero": ("{{ 1 // (messages|length - messages|length) }}", "refuses these messages: "),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion depth"),
    "long range": ("{% for i in range(10**12) %}{% endfor %}", "Range too big"),
    "a file": ("{% include '/etc/passwd' %}", "no loader"),
    "Python's objects": ("{{ messages.__class__.__mro__ }}", "access to attribute '__class__'"),
    "changes": ("{{ messages.append(1) }}", "access to attribute 'append'"),
}


@pytest.mark.parametrize(("text", "problem"), REFUSED.values(), ids=REFUSED)
def test_what_a_template_refuses_is_told_for_the_conversation(text: str, problem: str) -> None:
    [found] = ChatTemplate(text, "the chat template", NAMES).render_each([QUESTION])
    assert isinstance(found, DataError) and str(found).startswith("the chat template refuses these messages: ")
    with pytest.raises(DataError, match=problem):
        raise found


def test_only_the_conversation_that_loops_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MOST_SECONDS", 0.3)
    text = "{% if 'loop' in messages[-1].content %}" + LOOP + "{% endif %}" + MESSAGES
    template = ChatTemplate(text, "the chat template", NAMES)
    asked = [[{"role": "user", "content": content}] for content in ("a", "b", "loop", "c")]
    found = template.render_each(asked)
    assert found[:2] == ["a", "b"] and isinstance(found[2], UnusableTemplate)
    assert template.render_each([asked[0], asked[3]]) == ["a", "c"]


def test_a_row_that_the_template_loops_on_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MOST_SECONDS", 0.3)
    looping = "{% if 'loop' in messages[-1].content %}" + LOOP + "{% endif %}" + MESSAGES
    tokenizer = load_tokenizer(write_bpe_tokenizer(tmp_path, chat_template=looping))
    path = written(tmp_path / "rows.parquet", table(row("good"), row("a loop"), row("good too")))
    with pytest.raises(
        DataError, match=r"rows\.parquet, row 1, column prompt: .*chat template .*more than 0\.3 seconds"
    ):
        opened(tokenizer, path)


def test_a_template_that_reads_only_some_messages_is_told_by_the_rows(tmp_path: Path) -> None:
    hidden = "{% if 'probe' in messages[-1].content %}" + MESSAGES + "{% else %}hello{% endif %}"
    tokenizer = load_tokenizer(write_bpe_tokenizer(tmp_path, chat_template=hidden))
    path = written(tmp_path / "rows.parquet", table(row("one"), row("two")))
    with pytest.raises(
        DataError, match="row 0, column prompt: the chat template ignores the messages: other questions"
    ):
        opened(tokenizer, path)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("/dev/zero", r"/dev/zero cannot be read \(is not a regular file \(a device\)\); give a Jinja file"),
        (".", r"\. cannot be read \(is not a regular file \(a folder\)\)"),
        ("x" * 5000, r"x+\.\.\. \(5,000 characters\) cannot be read \(cannot be read \(File name too long\)\)"),
        ("a\0b", r"a\\x00b cannot be read"),
    ],
)
def test_a_template_file_that_is_none_is_told(name: str, problem: str) -> None:
    with pytest.raises(DataError, match=r"^data\.chat_template: " + problem) as caught:
        read_template(name)
    assert str(caught.value).isprintable()


def test_the_process_ends_with_the_one_that_started_it() -> None:
    program = (
        "from rlhf_megatron.data.chat_template import ChatTemplate\n"
        f"template = ChatTemplate({MESSAGES!r}, 'x', {{}})\n"
        "print(template._process.pid, flush=True)\n"
        "import os; os.kill(os.getpid(), 9)\n"
    )
    started = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60)
    pid = int(started.stdout)
    for _ in range(100):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except FileNotFoundError:
            return
        subprocess.run(["sleep", "0.1"], check=True)
    pytest.fail("the process is still there")
