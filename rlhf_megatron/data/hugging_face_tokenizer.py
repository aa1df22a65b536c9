"""The tokenizer of a Hugging Face folder, by transformers, which is imported when one is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_megatron.data.chat_template import ChatTemplate
from rlhf_megatron.data.tokenizer import Tokenizer, chosen_template
from rlhf_megatron.data.tokenizer_files import check_tokenizer_files
from rlhf_megatron.errors import DataError
from rlhf_megatron.untrusted import reason_of, shown

# Must come back from its tokens, but for blanks and capitals.
TEXT_PROBE = "a 1"


class HuggingFaceTokenizer(Tokenizer):
    """A folder that transformers' AutoTokenizer can read (tokenizer.json, tokenizer_config.json, ...)."""

    def __init__(
        self,
        folder: Path,
        trust_remote_code: bool,
        chat_template: str | None,
        chat_template_kwargs: Mapping[str, Any],
    ) -> None:
        """Load from the folder, never from the network.

        Raises:
            DataError: transformers cannot read the folder, or its tokenizer has no end-of-text token.
        """
        check_tokenizer_files(folder)
        self.path = str(folder)
        self._template_kwargs = dict(chat_template_kwargs)
        try:
            self._load(trust_remote_code)
        except Exception as error:
            raise self._unreadable(error) from error
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # Rust's, which is no Exception
                raise
            raise self._unreadable(error) from error
        if self._inner.eos_token_id is None:
            raise DataError(f"tokenizer: {folder} has no end-of-text token; set eos_token in its tokenizer_config.json")
        self.eos_token_id = int(self._inner.eos_token_id)
        pad = self._inner.pad_token_id
        self.pad_token_id = self.eos_token_id if pad is None else int(pad)
        self._template = self._load_template(chat_template)
        self.stop_token_ids = self._collect_stop_tokens(folder)

    def _load(self, trust_remote_code: bool) -> None:
        """Have transformers read the folder, and look at every token: it reads some files late."""
        from transformers import AutoTokenizer

        self._inner: Any = AutoTokenizer.from_pretrained(
            self.path, trust_remote_code=trust_remote_code, local_files_only=True
        )
        self.vocab_size = max(len(self._inner), 1 + max(self._inner.get_vocab().values(), default=0))
        self._special = frozenset(int(token_id) for token_id in self._inner.all_special_ids) | frozenset(
            int(token_id) for token_id, token in self._inner.added_tokens_decoder.items() if token.special
        )
        given_back = self.decode(self.encode(TEXT_PROBE))
        if "".join(given_back.split()).casefold() != "".join(TEXT_PROBE.split()):
            raise ValueError(f"it makes {shown(repr(given_back), 80)} of the text {TEXT_PROBE!r}")

    def _unreadable(self, error: BaseException) -> DataError:
        return DataError(
            f"tokenizer: {self.path} cannot be loaded ({reason_of(error)}); model.tokenizer must be a Hugging Face "
            "folder with tokenizer.json (or tokenizer_config.json), or a sentencepiece .model file"
        )

    @property
    def of_transformers(self) -> Any:
        """See ``Tokenizer.of_transformers``."""
        return self._inner

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """See ``Tokenizer.encode_many``."""
        if not texts:
            return []
        # verbose=False: a text longer than the model's context is the overlong filter's business, not a warning.
        encoded = self._inner(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)
        return [list(map(int, token_ids)) for token_ids in encoded["input_ids"]]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """See ``Tokenizer.decode``."""
        text = self._inner.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return str(text)

    def _load_template(self, replacement: str | None) -> ChatTemplate | None:
        """Return the template of data.chat_template, or else the tokenizer's own, with the names it can read."""
        tools = self._template_kwargs.get("tools")
        try:
            own = self._inner.get_chat_template(None, tools) if self._inner.chat_template else None
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise DataError(f"tokenizer: {self.path} has no usable chat template ({reason_of(error)})") from error
        names = {"tools": None, "documents": None, **self._inner.special_tokens_map, **self._template_kwargs}
        return chosen_template(replacement, own, self.path, names)

    def is_special(self, token_id: int) -> bool:
        """See ``Tokenizer.is_special``."""
        return token_id in self._special
