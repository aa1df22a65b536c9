"""Recipes and overrides that are damaged, hostile or senseless: each ends in one line, and soon."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlhf_megatron.recipe import RecipeError, load_recipe, load_rl

SMALL = """
name: small
loop: sft
steps: 3
model: {path: somewhere, dtype: bfloat16}
data: {train_files: [a.parquet], max_prompt_length: 100}
batch: {prompts_per_step: 8}
actor:
  tokens_per_gpu: 1000
  optimizer: {learning_rate: 1e-4}
"""


def refused(path: Path | str, *overrides: str) -> str:
    """Return the line of a recipe that is refused, which a terminal shows as one line."""
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides)
    line = str(caught.value)
    assert line.isprintable() and len(line) < 4000
    return line


@pytest.fixture
def small(tmp_path: Path) -> Path:
    (tmp_path / "small.yaml").write_text(SMALL)
    return tmp_path / "small.yaml"


def nested(start: str, step: str, levels: int, width: int) -> str:
    """Return YAML whose aliases multiply: each level has the one before so many times."""
    lines = [f"x0: &x0 {start}"]
    lines += [f"x{level}: &x{level} {step % ', '.join([f'*x{level - 1}'] * width)}" for level in range(1, levels)]
    return "{" + ", ".join(lines) + "}"


# ---- files that are none

NAMES = [
    "/dev/zero",
    "/dev/null",
    "",
    ".",
    "/",
    "a\0b.yaml",
    "x" * 5000,
    "y/" * 3000 + "r.yaml",
    "\x1b[31mred",
    "\ud800",
]


@pytest.mark.parametrize("name", NAMES, ids=lambda name: repr(name)[:20])
def test_what_is_no_file(name: str) -> None:
    assert refused(name)


def test_pipes_links_to_themselves_and_giants(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("link")
    with (tmp_path / "giant").open("wb") as file:
        file.truncate(2**40)
    assert "is not a regular file (a pipe)" in refused(tmp_path / "pipe")
    assert "cannot be read" in refused(tmp_path / "link")
    assert "at most 1,048,576 are read" in refused(tmp_path / "giant")


WHOLE = [
    "", "# nothing\n", "---\n---\n", "- a\n", "hello\n", "null\n", "%YAML 9.9\n---\na: 1\n", SMALL + "---\n" + SMALL,
    SMALL + "\0", SMALL + "steps: 3\n", SMALL + '"steps": 3\n', SMALL + "\ufeffseed: 3\n", "&a\nname: *a\n",
    "&a\n<<: *a\nname: x\n", SMALL + "cluster: &c\n  <<: *c\n", SMALL + "cluster: {<<: 3}\n",
    SMALL + "cluster: {<<: {gpus_per_node: 4, gpus_per_node: 8}}\n", "x: &x {seed: 2}\n<<: *x\n" + SMALL[1:],
    "name: *x\n", "<html><body>404</body></html>", "<<<<<<< HEAD\nname: x\n=======\nname: y\n", "name: {{ name }}\n",
    "a:\n   b: 1\n  c: 2\n", "name:\tx\n\tloop: rl\n", "[" * 100_000, "{a: " * 3000 + "1" + "}" * 3000,
    "- " * 1500 + "x\n", "? " * 1500 + "x\n", "\n".join(" " * level + "a:" for level in range(1500)),
    nested("[x,x,x,x,x,x,x,x,x,x]", "[%s]", 12, 10), nested("{x: 1}", "{<<: [%s]}", 12, 10),
    nested("[x]", "[%s]", 200, 1),
    SMALL + "".join(f"stepz{number}: 1\n" for number in range(2000)), SMALL + "k" * 2**19 + ": 1\n",
    SMALL.replace("[a.parquet]", "[" + "1," * 2000 + "]"), SMALL + "monitor: &m {trackers: *m}\n",
]  # fmt: skip


@pytest.mark.parametrize("content", WHOLE, ids=lambda content: content[:30])
def test_what_is_no_recipe(small: Path, content: str) -> None:
    small.write_bytes(content.encode())
    assert refused(small).startswith(str(small))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32"])
def test_other_encodings(small: Path, encoding: str) -> None:
    small.write_bytes(SMALL.encode(encoding))
    assert refused(small)


@pytest.mark.parametrize(
    "content",
    [
        "\ufeff" + SMALL, SMALL.replace("\n", "\r\n"), "---\n" + SMALL + "...\n",
        SMALL.replace("steps: 3", "steps: 0x3"),
        SMALL + "cluster: {<<: {gpus_per_node: 4}, gpus_per_node: 8}\n", SMALL + "monitor: {}\nseed: &s 5\n",
    ],
)  # fmt: skip
def test_unusual_recipes_that_are_right(small: Path, content: str) -> None:
    small.write_bytes(content.encode())
    assert load_recipe(small).steps == 3


# ---- values and keys of the wrong kind

KEYS = [
    "1", "null", "true", "yes", "2024-01-01", "[a]", "{a: b}", "1.5", "~", "''", "!!binary aGk=", "=", '"\\e[31m"',
    '"\\n"', '"\\0"', "Steps", "model.path", "__class__", "model_fields", "\u202e", "x" * 3000,
]  # fmt: skip


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key[:20])
def test_keys_that_are_none(small: Path, key: str) -> None:
    assert refused(write(small, SMALL + f"{key}: 1\n"))
    assert refused(write(small, SMALL.replace("actor:\n", f"actor:\n  {key}: 1\n")))


VALUES = [
    "[]", "{}", "''", "null", "true", "yes", "-1", ".inf", ".nan", "1.5", "1:30", "190:20:30", "017",
    "2024-01-01", "[1]", "{a: 1}", "9" * 5000, "0x" + "f" * 5000, "1" + ":59" * 5000, '"\\0"', '"\\ud800"',
    '"\\e[31mred\\n"', "*x", "=",
    "<<", "!!python/name:os.system", "!!python/object/apply:os.system [id]", "!!set {a, b}", "!!omap [a: 1]",
    "!!binary aGVsbG8=", "!!timestamp 2024-01-01", "!!int x", "!!bool maybe", "!foo 1", "&a [*a]", "{a: &b {c: *b}}",
    "[" * 3000, "x" * 10_000,
]  # fmt: skip


def write(path: Path, text: str) -> Path:
    path.write_bytes(text.encode())
    return path


@pytest.mark.parametrize("value", VALUES, ids=lambda value: value[:20])
def test_values_of_no_sense(small: Path, value: str) -> None:
    """In the place of a number, a text, a section, a list and a list of overlays; in a file and in an override."""
    for old, key in [("3", "steps"), ("small", "name"), ("{path: somewhere, dtype: bfloat16}", "model")]:
        assert refused(write(small, SMALL.replace(f"{key}: {old}", f"{key}: {value}"))), key
    write(small, SMALL)
    assert refused(small, f"steps={value}")
    assert refused(small, f"actor.optimizer={value}")
    if value != "[]":
        assert refused(write(small, f"defaults: {value}\n{SMALL}"))


@pytest.mark.parametrize(
    "name", [".", "..", "a/b", "/abs", "a b", "-x", "x" * 201, "é", "ｎ", "'$(id)'", "a;b", ".x", "x%j"]
)
def test_names_of_no_folder(small: Path, name: str) -> None:
    assert "cannot name a run folder" in refused(write(small, SMALL.replace("name: small", f"name: {name}")))


# ---- overlays


def test_overlays_that_lead_nowhere(small: Path) -> None:
    folder = small.parent
    for name, content in {"empty": "", "list": "- 1\n", "null": "defaults: null\n", "scalar": "actor: 3\n"}.items():
        write(folder / f"{name}.yaml", content)
        assert refused(write(small, f"defaults: [{name}.yaml]\n" + (SMALL if name != "scalar" else SMALL[:90])))
    for name in ("gone.yaml", "''", '"a\\0b"', ".", "/dev/zero", "x" * 5000, "small.yaml", "./small.yaml"):
        assert refused(write(small, f"defaults: [{name}]\n{SMALL}"))


def test_overlays_without_end(small: Path) -> None:
    """Eight files in each of five levels, and a chain of a thousand."""
    folder = small.parent
    for level in range(5):
        below = f"defaults: [{', '.join([f'fan{level + 1}.yaml'] * 8)}]\n" if level < 4 else ""
        write(folder / f"fan{level}.yaml", below + "seed: 3\n")
    for link in range(1000):
        write(folder / f"chain{link}.yaml", f"defaults: [chain{link + 1}.yaml]\n")
    for name in ("fan0.yaml", "chain0.yaml"):
        assert "more than 64 files" in refused(write(small, f"defaults: [{name}]\n{SMALL}"))


def test_what_one_use_of_an_alias_changes_the_others_do_not_see(small: Path) -> None:
    """An overlay whose roles are one mapping, of which the recipe changes one role."""
    role = "tokens_per_gpu: 9, optimizer: {learning_rate: 1e-4}"
    write(small.parent / "shared.yaml", f"actor: &role {{{role}}}\ncritic: *role\n")
    of_rl = ["loop=rl", "rollout.max_response_length=5", "algorithm.advantage=gae"]
    recipe = load_rl(write(small, f"defaults: [shared.yaml]\n{SMALL}"), [*of_rl, "actor.optimizer.beta1=0.5"])
    assert recipe.critic is not None
    assert (recipe.actor.tokens_per_gpu, recipe.critic.tokens_per_gpu) == (1000, 9)
    assert (recipe.actor.optimizer.beta1, recipe.critic.optimizer.beta1) == (0.5, 0.9)


# ---- overrides

OVERRIDES = [
    "", "=", "==", "=x", "steps", "a..b=1", ".steps=1", "steps.=1", "steps =4", "steps=", "steps=[", "steps=a: b: c",
    "steps=3\nseed: 4", "steps=3\0", "\0=1", "\x1b[31m=1", "name=\x1b[31mred", "name=a\nb", "steps=--- 3\n--- 4",
    "data.train_files.0=b", "data.train_files[0]=b", "model=x", "model.path.x=1", "actor=null", "defaults=[x.yaml]",
    "model.__class__=x", "steps:3", "--steps=3", "\udcff=1", "name=\udcff", "steps=" + "9" * 10**6, "x" * 10**6 + "=1",
    ".".join(["a"] * 5000) + "=1", "data.chat_template_kwargs." + ".".join(["a"] * 99) + "={b: {c: 1}}", "model.path=",
    "model.path=\"a\\0b\"", "model.path='" + "x" * 5000 + "'", "model.path='a\x7fb'", "run_root=' '", "steps=true",
    "data.train_files=['']", "rollout={max_response_length: 5, steps_ahead: true}",
]  # fmt: skip


@pytest.mark.parametrize("override", OVERRIDES, ids=lambda override: repr(override)[:25])
def test_overrides_of_no_sense(small: Path, override: str) -> None:
    assert refused(small, override)


def test_many_overrides(small: Path) -> None:
    assert load_recipe(small, ["steps=4"] * 2000).steps == 4
    assert refused(small, *(f"actor.layout.k{number}=1" for number in range(2000))).endswith("; and more")
