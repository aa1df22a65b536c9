"""The built-in rules in one table: which data they belong to, how they judge, and what an answer looks like to them.

Not here: the rules themselves (gsm8k.py, math.py, ...), and what a sample is worth that a rule cannot judge (score.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_megatron.recipe import RewardSection, RewardSource
from rlhf_megatron.rewards import code, form, gsm8k, math, multiple_choice, reasoning_gym

GSM8K_SOURCES = ("openai/gsm8k", "gsm8k")
DAPO_SOURCES = ("math_dapo", "math_dapo_reasoning", "dapo-math-17k")
# Sources of verl's default_compute_score and of the usual test sets, compared in lower case.
MATH_SOURCES = (
    "math",
    "math500",
    "math-500",
    "lighteval/math",
    "digitallearninggmbh/math-lighteval",
    "huggingfaceh4/math-500",
    "hendrycks/competition_math",
    "olympiadbench",
    "minerva_math",
)
# ... and these, with or without an owner before the slash.
MATH_PREFIXES = ("aime", "amc", "numina_", "hmmt")
# As verl's prime_code has them.
CODE_SOURCES = ("codecontests", "apps", "codeforces", "taco")
CHOICE_PREFIXES = ("gpqa", "mmlu", "arc_challenge", "arc_easy")


@dataclass(frozen=True)
class ScoreItem:
    """One response to be scored.

    Attributes:
        data_source: chooses the rule.
        solution: the response as text, without control tokens.
        ground_truth: the right answer, from the prompt.
        extra_info: whatever the prompt's row carries.
        row_id: names the sample in errors.
        tokens: length of the response in sampled tokens; only the rule length needs it.
    """

    data_source: str
    solution: str
    ground_truth: str
    extra_info: dict[str, Any]
    row_id: int
    tokens: int | None = None


@dataclass(frozen=True)
class Rule:
    """One rule.

    Attributes:
        quick: returns the score where no worker process is needed for it, else None; raises ValueError for a ground
            truth that it cannot read. None: always in a worker.
        answer: the final answer of a response in a form that can be compared, or None where there is none. None: the
            rule looks at something else.
        response: what a right response looks like, with {} for the ground truth; None where none can be made of it.
    """

    quick: Callable[[ScoreItem, RewardSource], float | None] | None
    answer: Callable[[str], str | None] | None
    response: str | None


def _gsm8k_answer(text: str) -> str | None:
    number = gsm8k.extract_answer(text)
    return None if number is None else f"{number.normalize():f}"


def _math_answer(text: str) -> str | None:
    answer = math.extract_answer(text)
    return math.normalize(answer) if answer else None


def _length(item: ScoreItem, source: RewardSource) -> float:
    assert source.length_high is not None, "the recipe's own check asks for it"
    assert item.tokens is not None, "the rule length scores items with their tokens only"
    return form.length_score(item.tokens, source.length_low, source.length_high)


# Those without ``quick``, and math where text does not settle it, are computed in worker.py under the same names.
RULES = {
    "gsm8k": Rule(lambda item, _: gsm8k.score(item.solution, item.ground_truth), _gsm8k_answer, "#### {}"),
    "math": Rule(lambda item, _: math.quick_score(item.solution, item.ground_truth), _math_answer, "\\boxed{{{}}}"),
    "dapo_math": Rule(
        lambda item, _: math.dapo_score(item.solution, item.ground_truth), math.dapo_answer, "Answer: {}"
    ),
    "multiple_choice": Rule(
        lambda item, _: multiple_choice.score(item.solution, item.ground_truth),
        multiple_choice.extract_answer,
        "Answer: {}",
    ),
    "reasoning_gym": Rule(None, lambda text: reasoning_gym.extract_answer(text) or None, "<answer>{}</answer>"),
    "code": Rule(None, code.extract_program, code.RECALL),
    "format": Rule(None, None, None),
    "length": Rule(_length, None, None),
}


def rule_of(data_source: str) -> str | None:
    """Return the name of the rule that belongs to a data source, or None where there is none."""
    name = data_source.lower()
    short = name.rpartition("/")[2]
    if name in GSM8K_SOURCES:
        return "gsm8k"
    if name.startswith(reasoning_gym.PREFIX) and name != reasoning_gym.PREFIX:
        return "reasoning_gym"
    if short in DAPO_SOURCES:
        return "dapo_math"
    if name in MATH_SOURCES or short.startswith(MATH_PREFIXES):
        return "math"
    if short in CODE_SOURCES:
        return "code"
    if short.startswith(CHOICE_PREFIXES):
        return "multiple_choice"
    return None


def judging_rule(reward: RewardSection, data_source: str) -> str | None:
    """Return the name of the rule that judges answers, the first of several that does; None where none of them does.

    A rule of form or length judges no answer, and what a function or a service looks at, nobody knows here.
    """
    sources: Sequence[RewardSource] = reward.parts or [reward]
    for source in sources:
        rule = rule_of(data_source) if source.rule == "data_source" else source.rule
        if source.function is None and source.service is None and rule in RULES and RULES[rule].answer is not None:
            return rule
    return None


def answer_of(reward: RewardSection, data_source: str, solution: str) -> str | None:
    r"""Return a response's final answer as a vote of its prompt's samples counts it, or None where it has none.

    It is read as the rule that judges it does; without one as that of the data source does, or as mathematics does
    (\boxed{}, "Answer:").
    """
    answer = RULES[judging_rule(reward, data_source) or rule_of(data_source) or "math"].answer
    assert answer is not None, "the rules of data sources read answers"
    return answer(solution)


def unknown_source(data_source: str) -> str:
    """Return what to tell about a data source without a rule, in one line."""
    prefixes = (*MATH_PREFIXES, *CHOICE_PREFIXES)
    known = [
        *GSM8K_SOURCES, f"{reasoning_gym.PREFIX}TASK", *DAPO_SOURCES, *MATH_SOURCES, *CODE_SOURCES,
        *(f"{name}*" for name in prefixes)
    ]  # fmt: skip
    return (
        f"no reward is known for data_source {data_source!r}; known: {', '.join(known)}; for others set reward.rule or "
        "set reward.function: path/to/file.py:compute_score (data_source, solution_str, ground_truth, extra_info)"
    )
