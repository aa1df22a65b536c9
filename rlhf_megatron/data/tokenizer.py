"""Tokenizers behind one small interface.

Chat templates are rendered here, and the tokens that end a response are found here. Nothing here reads training data.
Not here: loading one (tokenizer_loading.py), and the two kinds (hugging_face_tokenizer.py, sentencepiece_tokenizer.py).
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_megatron.data.chat_template import ChatTemplate
from rlhf_megatron.data.tokenizer_files import end_token_ids
from rlhf_megatron.errors import DataError
from rlhf_megatron.untrusted import shown

Message = Mapping[str, Any]

# Stands in for an assistant's answer while the token that the template puts behind an answer is looked up.
TURN_PROBE = "turnprobe"


class Tokenizer(ABC):
    """Text to token ids and back.

    Attributes:
        path: where it was loaded from, for messages.
        eos_token_id: the token that ends a text.
        pad_token_id: the tokenizer's padding token, or eos_token_id where it has none.
        stop_token_ids: sorted ids on which generation stops: eos, the ids of generation_config.json, and the token
            that the chat template puts after an assistant's turn.
        vocab_size: one more than the highest id of a token (the model's vocabulary may be padded beyond it).
    """

    path: str
    eos_token_id: int
    pad_token_id: int
    stop_token_ids: tuple[int, ...]
    vocab_size: int
    _template: ChatTemplate | None

    @abstractmethod
    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of every text; control tokens written out in a text are recognised, and none are added."""

    @abstractmethod
    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of the ids, without control tokens unless skip_special_tokens is False."""

    def render_each(
        self, conversations: Sequence[Sequence[Message]], add_generation_prompt: bool = True
    ) -> list[str | DataError]:
        """Return the chat template's text for each conversation of {role, content}, or why it refuses it.

        Raises:
            DataError: there is no chat template.
        """
        if self._template is None:
            what = f"the tokenizer at {self.path} has no chat template"
            raise DataError(f"{what}; set data.chat_template to a Jinja file")
        return self._template.render_each(conversations, add_generation_prompt)

    def render_chat(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """Return the chat template's text for messages of {role, content}.

        Raises:
            DataError: there is no chat template, or the template refuses these messages.
        """
        return text_of_rendered(self.render_each([messages], add_generation_prompt)[0])

    def with_template_names(self, **names: Any) -> Tokenizer:
        """Return the same tokenizer, whose chat template reads these names too, such as ``tools``."""
        other = copy.copy(self)
        other._template = self._template.with_names(names) if self._template else None
        return other

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The tools that the chat template describes to the model."""
        return self._template.names.get("tools") or [] if self._template else []

    @property
    def of_transformers(self) -> Any:
        """The tokenizer of transformers; None for a bare sentencepiece file."""
        return None

    @abstractmethod
    def is_special(self, token_id: int) -> bool:
        """Return whether the id is a control token (never part of ordinary text)."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of one text; no control token is added."""
        return self.encode_many([text])[0]

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of a conversation, up to and with the header that opens the assistant's next turn.

        Raises:
            DataError: see ``render_chat``.
        """
        return self.encode(self.render_chat(messages))

    def encode_answered(self, conversations: Sequence[Sequence[Message]], answers: Sequence[str]) -> list[list[int]]:
        """Return the ids of conversations, each with the assistant's answer as its last turn, closed by the template.

        Raises:
            DataError: see ``render_chat``.
        """
        asked = [
            [*messages, {"role": "assistant", "content": answer}]
            for messages, answer in zip(conversations, answers, strict=True)
        ]
        return self.encode_many(list(map(text_of_rendered, self.render_each(asked, add_generation_prompt=False))))

    def encode_next_turn(self, messages: Sequence[Message]) -> list[int]:
        """Return what the chat template puts behind a turn of the assistant's that has ended, where ``messages``
        follow: up to and with the header of its next turn. Its end itself is not part of that.

        Raises:
            DataError: see ``render_chat``; or the template puts no control token after an assistant's turn, or another
                one where others follow, or leaves a message out.
        """
        end = self.turn_end_token()
        if end is None:
            raise DataError("the chat template puts no control token after an assistant's turn")
        probes = [{**message, "content": f"{TURN_PROBE}{index}"} for index, message in enumerate(messages)]
        tried = self._behind_turn(probes, end)
        left_out = [
            message["role"] for message, probe in zip(messages, probes, strict=True) if probe["content"] not in tried
        ]
        if left_out:
            raise DataError(f"the chat template leaves out a message of role {left_out[0]}")
        return self.encode(self._behind_turn(messages, end))

    def _behind_turn(self, messages: Sequence[Message], end: int) -> str:
        """Return the chat template's text behind the end of an assistant's turn that ``messages`` follow."""
        conversation = [{"role": "user", "content": "x"}, {"role": "assistant", "content": TURN_PROBE}, *messages]
        _, _, behind = self.render_chat(conversation).partition(TURN_PROBE)
        begin, end_text = behind.lstrip(), self.decode([end], skip_special_tokens=False)
        if not begin.startswith(end_text):
            raise DataError(
                f"the chat template ends an assistant's turn otherwise where others follow: by {begin[:20]!r}, and not "
                f"by {end_text!r}"
            )
        return begin.removeprefix(end_text)

    def turn_end_token(self) -> int | None:
        """Return the control token that the chat template puts after an assistant's turn, if there is one."""
        conversation = [{"role": "user", "content": "x"}, {"role": "assistant", "content": TURN_PROBE}]
        try:
            rendered = self.render_chat(conversation, add_generation_prompt=False)
        except DataError:
            return None
        _, separator, tail = rendered.rpartition(TURN_PROBE)
        token_ids = self.encode(tail) if separator and tail else []
        return token_ids[0] if token_ids and self.is_special(token_ids[0]) else None

    def _collect_stop_tokens(self, folder: Path) -> tuple[int, ...]:
        """Return the sorted ids that end a response (see the class)."""
        stops = {self.eos_token_id, *end_token_ids(folder / "generation_config.json")}
        turn_end = self.turn_end_token()
        if turn_end is not None:
            stops.add(turn_end)
        return tuple(sorted(stops))


def text_of_rendered(rendered: str | DataError) -> str:
    """Return a text, or raise what there is instead."""
    if isinstance(rendered, DataError):
        raise rendered
    return rendered


def chosen_template(replacement: str | None, own: Any, path: str, names: Mapping[str, Any]) -> ChatTemplate | None:
    """Return the template that replaces a tokenizer's own, or else that one, if there is one."""
    if replacement is not None:
        return ChatTemplate(replacement, "data.chat_template", names)
    return ChatTemplate(own, f"tokenizer: the chat template of {shown(path)}", names) if own else None
