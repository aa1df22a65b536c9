"""Tokenizers behind one small interface: Hugging Face folders and bare sentencepiece `.model` files.

Chat templates are rendered here, and the tokens that end a response are found here. Nothing here reads training data.
transformers and sentencepiece are imported when a tokenizer is loaded, so that importing this module costs nothing.
"""

from __future__ import annotations

import copy
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_megatron.data.chat_template import ChatTemplate, read_template
from rlhf_megatron.data.tokenizer_files import check_tokenizer_files, end_token_ids
from rlhf_megatron.errors import DataError
from rlhf_megatron.recipe import Recipe
from rlhf_megatron.untrusted import MOST_BYTES, check_regular, reason_of, shown

Message = Mapping[str, Any]

# Stands in for an assistant's answer while the token that the template puts behind an answer is looked up.
TURN_PROBE = "turnprobe"
# Must come back from its tokens, but for blanks and capitals.
TEXT_PROBE = "a 1"


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

    @abstractmethod
    def render_each(
        self, conversations: Sequence[Sequence[Message]], add_generation_prompt: bool = True
    ) -> list[str | DataError]:
        """Return the chat template's text for each conversation of {role, content}, or why it refuses it.

        Raises:
            DataError: there is no chat template.
        """

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
            DataError: see `render_chat`.
        """
        return self.encode(self.render_chat(messages))

    def encode_answered(self, conversations: Sequence[Sequence[Message]], answers: Sequence[str]) -> list[list[int]]:
        """Return the ids of conversations, each with the assistant's answer as its last turn, closed by the template.

        Raises:
            DataError: see `render_chat`.
        """
        asked = [
            [*messages, {"role": "assistant", "content": answer}]
            for messages, answer in zip(conversations, answers, strict=True)
        ]
        return self.encode_many(list(map(text_of_rendered, self.render_each(asked, add_generation_prompt=False))))

    def encode_next_turn(self, messages: Sequence[Message]) -> list[int]:
        """Return what the chat template puts behind a turn of the assistant's that has ended, where `messages` follow:
        up to and with the header of its next turn. Its end itself is not part of that.

        Raises:
            DataError: see `render_chat`; or the template puts no control token after an assistant's turn, or another
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
        """Return the chat template's text behind the end of an assistant's turn that `messages` follow."""
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
        """See `Tokenizer.of_transformers`."""
        return self._inner

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """See `Tokenizer.encode_many`."""
        if not texts:
            return []
        # verbose=False: a text longer than the model's context is the overlong filter's business, not a warning.
        encoded = self._inner(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)
        return [list(map(int, token_ids)) for token_ids in encoded["input_ids"]]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """See `Tokenizer.decode`."""
        text = self._inner.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return str(text)

    def render_each(
        self, conversations: Sequence[Sequence[Message]], add_generation_prompt: bool = True
    ) -> list[str | DataError]:
        """See `Tokenizer.render_each`."""
        if self._template is None:
            raise DataError(_no_template(self.path))
        return self._template.render_each(conversations, add_generation_prompt)

    def _load_template(self, replacement: str | None) -> ChatTemplate | None:
        """Return the template of data.chat_template, or else the tokenizer's own, with the names it can read."""
        tools = self._template_kwargs.get("tools")
        try:
            own = self._inner.get_chat_template(None, tools) if self._inner.chat_template else None
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise DataError(f"tokenizer: {self.path} has no usable chat template ({reason_of(error)})") from error
        names = {"tools": None, "documents": None, **self._inner.special_tokens_map, **self._template_kwargs}
        return _chat_template(replacement, own, self.path, names)

    def is_special(self, token_id: int) -> bool:
        """See `Tokenizer.is_special`."""
        return token_id in self._special


class SentencePieceTokenizer(Tokenizer):
    """A bare sentencepiece `.model` file; it carries no chat template, so chats need data.chat_template."""

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
        self._template = _chat_template(chat_template, None, self.path, names)
        self.stop_token_ids = self._collect_stop_tokens(model_file.parent)

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """See `Tokenizer.encode_many`."""
        return [self._encode_with_controls(text) for text in texts]

    def _encode_with_controls(self, text: str) -> list[int]:
        """Encode the ordinary text between control pieces, and the pieces themselves as their ids."""
        token_ids: list[int] = []
        for index, part in enumerate(self._pieces.split(text) if self._control else [text]):
            token_ids += [self._control[part]] if index % 2 else self._inner.encode(part)
        return token_ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """See `Tokenizer.decode`."""
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

    def render_each(
        self, conversations: Sequence[Sequence[Message]], add_generation_prompt: bool = True
    ) -> list[str | DataError]:
        """See `Tokenizer.render_each`."""
        if self._template is None:
            raise DataError(_no_template(self.path))
        return self._template.render_each(conversations, add_generation_prompt)

    def is_special(self, token_id: int) -> bool:
        """See `Tokenizer.is_special`."""
        return bool(self._inner.is_control(token_id))


def recipe_tokenizer(recipe: Recipe) -> Tokenizer:
    """Load the tokenizer of a recipe's policy, with the chat template that the recipe asks for.

    Raises:
        DataError: see `load_tokenizer`.
    """
    return load_tokenizer(
        recipe.model.tokenizer or recipe.model.path,
        recipe.model.trust_remote_code,
        recipe.data.chat_template,
        recipe.data.chat_template_kwargs,
    )


def load_tokenizer(
    path: str | Path,
    trust_remote_code: bool = False,
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> Tokenizer:
    """Load a tokenizer from a Hugging Face folder, a sentencepiece `.model` file, or a folder with only the latter.

    Args:
        path: the folder or file (recipe: model.tokenizer, else model.path). Names on the Hugging Face hub are not
            looked up: every rank would ask the network for them.
        trust_remote_code: run Python code that comes with the folder.
        chat_template: path of a Jinja file that replaces the tokenizer's own template (recipe: data.chat_template).
        chat_template_kwargs: names that the template reads (recipe: data.chat_template_kwargs).

    Raises:
        DataError: there is nothing to load at the path, or it cannot be loaded.
    """
    location = Path(path)
    template = None if chat_template is None else read_template(chat_template)
    names = chat_template_kwargs or {}
    if os.path.isfile(location):  # which holds for no path that is too long, or has a NUL, and raises nothing
        if location.suffix != ".model":
            raise DataError(f"tokenizer: {location} is a file but not a sentencepiece .model; name its folder instead")
        return SentencePieceTokenizer(location, template, names)
    if not os.path.isdir(location):
        raise DataError(
            f"tokenizer: there is no {shown(location)}; set model.tokenizer (or model.path) to a local folder with "
            "tokenizer.json or to a sentencepiece .model file"
        )
    model_file = location / "tokenizer.model"
    described = any((location / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
    if model_file.is_file() and not described:
        return SentencePieceTokenizer(model_file, template, names)
    # Without any, transformers makes an empty tokenizer of the model's config.json, and says nothing.
    vocabularies = ("tokenizer.json", "vocab.json", "vocab.txt", "*.model", "*.tiktoken")
    if not trust_remote_code and not any(next(location.glob(name), None) for name in vocabularies):
        raise DataError(
            f"tokenizer: {location} cannot be loaded: it has no tokenizer.json (nor {', '.join(vocabularies[1:])}); "
            "copy the tokenizer's files there, or set model.tokenizer to the folder that has them"
        )
    return HuggingFaceTokenizer(location, trust_remote_code, template, names)


def _chat_template(replacement: str | None, own: Any, path: str, names: Mapping[str, Any]) -> ChatTemplate | None:
    """Return the template that replaces a tokenizer's own, or else that one, if there is one."""
    if replacement is not None:
        return ChatTemplate(replacement, "data.chat_template", names)
    return ChatTemplate(own, f"tokenizer: the chat template of {shown(path)}", names) if own else None


def text_of_rendered(rendered: str | DataError) -> str:
    """Return a text, or raise what there is instead."""
    if isinstance(rendered, DataError):
        raise rendered
    return rendered


def _no_template(path: str) -> str:
    return f"the tokenizer at {path} has no chat template; set data.chat_template to a Jinja file"
