"""Questions to a judge: responses in the recipe's prompt and the judge's chat template, as tokens.

Free of torch's and Megatron's layers, so that a dry run tries them too. Not here: verdicts and scores.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_megatron.data.prompts import Prompt
from rlhf_megatron.data.tokenizer import Tokenizer, text_of_rendered
from rlhf_megatron.recipe import JudgeSection


def encode_questions(
    section: JudgeSection, tokenizer: Tokenizer, prompts: Sequence[Prompt], responses: Sequence[str]
) -> list[list[int]]:
    """Return the tokens that a judge with ``tokenizer`` reads of each response to its prompt.

    Raises DataError where its chat template refuses them.
    """
    messages = [
        [{"role": "user", "content": section.message(_fields(prompt, _without_control_tokens(response, tokenizer)))}]
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    return tokenizer.encode_many(list(map(text_of_rendered, tokenizer.render_each(messages))))


def _without_control_tokens(text: str, tokenizer: Tokenizer) -> str:
    """Return a response in which no control token is written out, by which it could speak as the judge."""
    token_ids = tokenizer.encode(text)
    while any(map(tokenizer.is_special, token_ids)):  # what is taken out may join what makes another
        text = tokenizer.decode(token_ids)
        token_ids = tokenizer.encode(text)
    return text


def _fields(prompt: Prompt, response: str) -> dict[str, str]:
    """Return values of the fields of judge.prompt; a conversation of several messages is written out with their
    roles."""
    messages = prompt.messages
    question = str(messages[0]["content"])
    if len(messages) > 1:
        question = "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)
    return {"question": question, "response": response, "ground_truth": prompt.ground_truth}
