"""The files of a tokenizer's folder, checked before they are handed to the libraries that read them.

transformers, tokenizers and sentencepiece trust these files: a pipe keeps them waiting, a wrong type ends in a
traceback or in a panic of Rust's, and a token that is not there is added under a new id. Here each is one line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rlhf_megatron.errors import DataError
from rlhf_megatron.untrusted import check_regular, read_json, shown

# Vocabularies of a quarter of a million entries have about 35 MiB.
_MOST_BYTES = 256 * 2**20
_MOST_TOKENS = 2**24
_MOST_LISTED = 2**20
_PATTERNS = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.py", "additional_chat_templates/*")
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def check_tokenizer_files(folder: Path) -> None:
    """Raise DataError for the first file of a tokenizer's folder that its library should not see."""
    for pattern in _PATTERNS:
        for file in sorted(folder.glob(pattern)):
            if not file.name.endswith(".index.json"):
                check_regular(file, DataError, _MOST_BYTES)
    settings = _object(folder / "tokenizer_config.json")
    named = _object(folder / "special_tokens_map.json")
    for name, content in (("tokenizer_config.json", settings), ("special_tokens_map.json", named)):
        _check_named(folder / name, content)
    _check_settings(folder / "tokenizer_config.json", settings)
    added = _object(folder / "added_tokens.json")
    _check_ids(folder / "added_tokens.json", "", added.items())
    _check_sizes(folder / "config.json", _object(folder / "config.json"))
    known = {*added, *_contents(settings.get("added_tokens_decoder") or {})}
    path = folder / "tokenizer.json"
    if not path.exists():
        return
    known |= _check_vocabulary(path, _object(path))
    for name in _NAMED_TOKENS:
        token = _text_of(settings.get(name)) or _text_of(named.get(name))
        if token is not None and token not in known:  # it would get a new id, which the model has never seen
            raise DataError(
                f"tokenizer: {name} {shown(repr(token), 80)} of {shown(folder)} is not in its vocabulary; set it to "
                "one of its tokens, or to null"
            )


def end_token_ids(path: Path) -> set[int]:
    """Return the eos ids of a generation_config.json; an empty set where there is none.

    Raises:
        DataError: it is no JSON object, or its eos_token_id is neither an id nor a list of ids.
    """
    value = _object(path).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        _check_id(path, "eos_token_id", token)
    return set(ids)


def _object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, empty where there is no file."""
    if not path.exists() and not path.is_symlink():
        return {}
    try:
        content = read_json(path, DataError, _MOST_BYTES)
    except DataError as error:
        raise DataError(f"tokenizer: {error}; download it again") from error
    if not isinstance(content, dict):
        raise _wrong(path, "it", "a JSON object")
    return content


def _check_sizes(path: Path, config: Mapping[str, Any]) -> None:
    """Check sizes: transformers may read the model's config for its tokenizer, and makes lists of so many."""
    for field in ("num_hidden_layers", "num_labels"):
        value = config.get(field)
        if isinstance(value, int) and value > _MOST_LISTED:
            raise DataError(f"tokenizer: {shown(path)}: {field} is {shown(repr(value), 80)}, beyond any model")


def _check_named(path: Path, content: Mapping[str, Any]) -> None:
    """Check that tokens with a role are texts, or objects with one."""
    for name in _NAMED_TOKENS:
        token = content.get(name)
        if token is not None and _text_of(token) is None:
            raise _wrong(path, name, "text, or an object with content")
    for name in ("additional_special_tokens", "extra_special_tokens"):
        tokens = content.get(name)
        listed = list(tokens.values()) if isinstance(tokens, dict) else [] if tokens is None else tokens
        if not isinstance(listed, list) or any(_text_of(token) is None for token in listed):
            raise _wrong(path, name, "a list of tokens")


def _check_settings(path: Path, settings: Mapping[str, Any]) -> None:
    template = settings.get("chat_template")
    texts: Iterable[object] = [template] if template is not None else []
    if isinstance(template, dict):
        texts = template.values()
    elif isinstance(template, list):
        texts = [part for each in template for part in _named_template(each)]
    if any(not isinstance(text, str) for text in texts):
        raise _wrong(path, "chat_template", "text, or a list of objects with name and template")
    decoder = settings.get("added_tokens_decoder")
    if decoder is not None and not isinstance(decoder, dict):
        raise _wrong(path, "added_tokens_decoder", "an object")
    numbered = [(each, int(key) if key.isdecimal() and len(key) < 20 else key) for key, each in (decoder or {}).items()]
    if any(_text_of(each) is None for each, _ in numbered):
        raise _wrong(path, "added_tokens_decoder", "an object of ids and objects with content")
    _check_ids(path, "added_tokens_decoder", [(_text_of(each), token) for each, token in numbered])
    kind = settings.get("tokenizer_class")
    if kind is not None and not isinstance(kind, str):
        raise _wrong(path, "tokenizer_class", "text")
    length = settings.get("model_max_length")
    if length is not None and (type(length) not in (int, float) or not length > 0):
        raise _wrong(path, "model_max_length", "a number above 0")


def _named_template(value: object) -> list[object]:
    return [value.get("name"), value.get("template")] if isinstance(value, dict) else [None]


def _check_vocabulary(path: Path, content: Mapping[str, Any]) -> set[str]:
    """Return the tokens in a tokenizer.json; raises DataError where two have one id, or an id is none."""
    model, added = content.get("model"), content.get("added_tokens")
    if not isinstance(model, dict):
        raise _wrong(path, "model", "an object")
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, list):  # of a Unigram: the place is the id
        if any(not isinstance(each, list) or not each or not isinstance(each[0], str) for each in vocabulary):
            raise _wrong(path, "model.vocab", "tokens and their scores")
        tokens = {str(each[0]): token for token, each in enumerate(vocabulary)}
    elif isinstance(vocabulary, dict):
        tokens = vocabulary
    else:
        raise _wrong(path, "model.vocab", "an object of tokens and their ids")
    _check_ids(path, "model.vocab", tokens.items())
    added = [] if added is None else added
    if not isinstance(added, list) or any(_text_of(each) is None or isinstance(each, str) for each in added):
        raise _wrong(path, "added_tokens", "a list of objects with id and content")
    pairs = [(str(_text_of(each)), each.get("id")) for each in added]
    _check_ids(path, "added_tokens", pairs)
    for text, token in pairs:
        if tokens.get(text, token) != token:
            raise DataError(
                f"tokenizer: {shown(path)}: {shown(repr(text), 80)} has the id {tokens[text]} in model.vocab and "
                f"{token} in added_tokens"
            )
    return tokens.keys() | {text for text, _ in pairs}


def _check_ids(path: Path, field: str, pairs: Iterable[tuple[object, object]]) -> None:
    """Check that each id is one, and of one token only."""
    seen: dict[object, object] = {}
    for text, token in pairs:
        _check_id(path, field, token)
        if seen.setdefault(token, text) != text:
            raise DataError(
                f"tokenizer: {shown(path)}: {shown(repr(seen[token]), 80)} and {shown(repr(text), 80)} have the same "
                f"id, {token}"
            )


def _check_id(path: Path, field: str, token: object) -> None:
    if type(token) is not int or not 0 <= token < _MOST_TOKENS:
        where = f"{field} has " if field else ""
        raise DataError(f"tokenizer: {shown(path)}: {where}{shown(repr(token), 80)}, which is no id of a token")


def _text_of(token: object) -> str | None:
    """Return the text of a token, which may be an object with more."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _contents(tokens: Mapping[str, Any]) -> set[str]:
    return {text for each in tokens.values() if (text := _text_of(each)) is not None}


def _wrong(path: Path, what: str, wanted: str) -> DataError:
    return DataError(f"tokenizer: {shown(path)}: {what} must be {wanted}; download it again")
