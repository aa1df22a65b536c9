"""The tokenizer of a bare sentencepiece ``.model`` file, by sentencepiece, which is imported when one is loaded."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_megatron.data.tokenizer import Tokenizer, chosen_template
from rlhf_megatron.errors import DataError
from rlhf_megatron.untrusted import MOST_BYTES, check_regular, reason_of


class SentencePieceTokenizer(Tokenizer):
    """A bare sentencepiece ``.model`` file; it carries no chat template, so chats need data.chat_template."""

    def __init__(self, model_file: Path, chat_template: str | None, chat_template_kwargs: Mapping[str, Any]) -> None:
        """Load the file.

        Raises:
            DataError: the file is no sentencepiece model, has no end-of-text piece, or the template is not valid Jinja.
        """
        import sentencepiece

        check_regular(model_file, DataError, MOST_BYTES)
        self.path = str(model_file)
        try:
            self._inner: Any = sentencepiece.SentencePieceProcessor(model_file=str(model_file))
        except (OSError, RuntimeError) as error:
            raise DataError(f"tokenizer: {model_file} is not a sentencepiece model ({reason_of(error)})") from error
        if self._inner.eos_id() < 0:
            raise DataError(f"tokenizer: {model_file} has no </s> piece; train it with eos_id set")
        self.eos_token_id = int(self._inner.eos_id())
        self.pad_token_id = int(self._inner.pad_id()) if self._inner.pad_id() >= 0 else self.eos_token_id
        self.vocab_size = int(self._inner.get_piece_size())
        # Control pieces (<s>, </s>) never come out of sentencepiece's own encoder, but chat templates write them out.
        self._control = {
            self._inner.id_to_piece(token_id): token_id
            for token_id in range(self.vocab_size)
            if self._inner.is_control(token_id)
        }
        # Of those that begin at the same place, the longest.
        longest_first = sorted(self._control, key=len, reverse=True)
        self._pieces = re.compile(f"({'|'.join(map(re.escape, longest_first))})")
        names = {
            "bos_token": self._inner.id_to_piece(self._inner.bos_id()) if self._inner.bos_id() >= 0 else "",
            "eos_token": self._inner.id_to_piece(self.eos_token_id),
            **chat_template_kwargs,
        }
        self._template = chosen_template(chat_template, None, self.path, names)
        self.stop_token_ids = self._collect_stop_tokens(model_file.parent)

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """See ``Tokenizer.encode_many``."""
        return [self._encode_with_controls(text) for text in texts]

    def _encode_with_controls(self, text: str) -> list[int]:
        """Encode the ordinary text between control pieces, and the pieces themselves as their ids."""
        token_ids: list[int] = []
        for index, part in enumerate(self._pieces.split(text) if self._control else [text]):
            token_ids += [self._control[part]] if index % 2 else self._inner.encode(part)
        return token_ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """See ``Tokenizer.decode``."""
        if skip_special_tokens:
            return str(self._inner.decode([token_id for token_id in token_ids if not self.is_special(token_id)]))
        parts: list[str] = []
        plain: list[int] = []
        for token_id in token_ids:
            if self.is_special(token_id):
                parts += [self._inner.decode(plain), self._inner.id_to_piece(token_id)]
                plain = []
            else:
                plain.append(token_id)
        return "".join([*parts, self._inner.decode(plain)])

    def is_special(self, token_id: int) -> bool:
        """See ``Tokenizer.is_special``."""
        return bool(self._inner.is_control(token_id))
