"""The hiding of secrets in all that is written: by the name of a key, by their shape, and by value.

A value is hidden under a name such as `api_key`; a text loses what has the form of a secret, such as `Bearer ...`, and
what an environment variable with such a name holds. A secret that has neither name nor form and lies in no variable
cannot be told from other text.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

HIDDEN = "***"
# A shorter value of a variable would be met in text that is no secret.
SHORTEST = 6

# A name with one of these words anywhere in it is a secret's.
_SECRET_WORDS = {
    "secret", "secrets", "password", "passwords", "passwd", "passphrase", "passphrases", "passcode", "pwd",
    "credential", "credentials", "cred", "creds", "authorization", "auth", "oauth", "bearer", "cookie", "cookies",
    "jwt", "dsn", "webhook", "webhooks",
}  # fmt: skip
# So is one whose last word is one of these; of keys and tokens, unless the words before say what they are.
_SECRET_ENDINGS = {
    "pass", "pin", "otp", "sas", "sig", "signature", "signatures", "sid", "session", "sessions", "pat",
    "authentication",
}  # fmt: skip
_KEYS, _TOKENS = ("key", "keys"), ("token", "tokens")
_PLAIN_KEYS = {
    "public", "primary", "foreign", "prompt", "response", "answer", "label", "data", "image", "images", "video",
    "audio", "reward", "fn", "column", "row", "sort", "batch", "group", "metric", "dict", "map", "cache", "hot",
    "input", "output", "text", "message", "messages", "tool", "source", "index", "query", "value", "values", "kv",
    "num", "max", "min", "n", "per", "head", "heads",
}  # fmt: skip
_PLAIN_TOKENS = {
    "eos", "bos", "pad", "unk", "mask", "sep", "cls", "eot", "eom", "stop", "start", "end", "begin", "special",
    "added", "extra", "image", "video", "audio", "vision", "think", "thinking", "reasoning", "new", "max", "min",
    "num", "n", "total", "prompt", "response", "completion", "input", "output", "generated", "sampled", "cached",
    "batched", "kept", "per", "first", "last", "next", "previous", "text", "answer", "budget", "padding", "loss",
    "draft", "byte", "word", "control", "context", "prefix", "suffix", "middle", "fim",
}  # fmt: skip
# Names that are written without a separator, such as apikey and AccessKeyId.
_JOINED = re.compile(
    r"(api|access|secret|private|signing|encryption|account|storage|shared|license|master|deploy|ssh)keys?"
    r"|secret(?!ar)|password|passwd|passphrase|credential|connectionstring|connstr|sessionid|pwd$"
    r"|(api|auth|access|refresh|bearer|session|hf|bot|security)tokens?$"
)
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[A-Z]+")
# Parameters of URLs that sign or authorise, beside those of a secret's name.
_URL_PARAMETERS = frozenset({"code", "state", "sig", "ticket"})

_PEM = re.compile(r"-----BEGIN [A-Z0-9 ]+-----.*?(-----END [A-Z0-9 ]+-----|\Z)", re.DOTALL)
_URL_LOGIN = re.compile(r"(?<=://)[^/\s]*@")
_WEBHOOK_PATH = re.compile(r"(?<=://)(hooks\.slack\.com/|discord(?:app)?\.com/api/webhooks/)[^\s\"'<>]+")
_SCHEME = re.compile(r"\b(bearer|basic)(\s+)(?=[^\s]*[0-9=_.-])[\w.~+/=-]{8,}", re.IGNORECASE)
_TOKEN_SHAPES = re.compile(
    r"(?<![A-Za-z0-9])("
    r"sk-[A-Za-z0-9_-]{16,}|hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|(AKIA|ASIA)[A-Z0-9]{16}|xox[a-z]-[\w-]{8,}|AIza[\w-]{30,}|ya29\.[\w-]{16,}|npm_[A-Za-z0-9]{30,}|pypi-[\w-]{30,}"
    r"|eyJ[\w-]{8,}\.[\w-]{8,}(\.[\w-]*)?"
    r")"
)
# What stands before a value in `name=value`, `"name": "value"` and `?name=value`, and the value.
_NAME = re.compile(r"(?<![\w.])([A-Za-z_][\w.\-]{0,100}+)([\"']?\s{0,4}[:=]\s{0,4})")
# A value that ends in a sign, as in `auth= key: x`, goes on behind it.
_VALUE = re.compile(r"(?:[^\s,;&\"'\])}]+[:=]\s{1,4})*+(?:\"[^\"]*\"|'[^']*'|[^\s,;&\"'\])}]+)")
# In prose these alone say nothing: "unknown token: x", "write KEY=VALUE".
_PROSE = {
    "key", "keys", "token", "tokens", "session", "sessions", "signature", "signatures", "auth", "cookie",
    "cookies", "pass", "pin",
}  # fmt: skip

_declared: set[str] = set()


def read_secret(variable: str) -> str:
    """Return what an environment variable holds, stripped, or "". It is hidden from then on, whatever its name."""
    _declared.add(variable)
    return os.environ.get(variable, "").strip()


def is_secret_name(name: str) -> bool:
    """Return whether what stands under a name is a secret: `api_key`, `pwd`; not `max_tokens`, `author`."""
    words = [word.lower() for word in _WORD.findall(name)]
    if not words or words[-1] == "environment":  # it names a variable, as header_environment does
        return False
    if _SECRET_WORDS.intersection(words) or _JOINED.search("".join(words)):
        return True
    if words[-1] in _KEYS:
        return not _PLAIN_KEYS.intersection(words[:-1])
    if words[-1] in _TOKENS:
        return not _PLAIN_TOKENS.intersection(words[:-1])
    return words[-1] in _SECRET_ENDINGS


def is_secret_parameter(name: str) -> bool:
    """Return whether a parameter of that name in a URL authorises, such as `?token=` and `?sig=`."""
    return name.lower() in _URL_PARAMETERS or is_secret_name(name)


def redact(value: Any, name: str = "") -> Any:
    """Return a copy with every secret replaced by ***, at any depth of mappings, lists and tuples.

    Args:
        value: what JSON and YAML can hold.
        name: the key that it stands under. Whatever stands under a secret's is hidden, but for None.

    Raises:
        RecursionError: it is nested deeper than Python's stack.
    """
    return _redacted(value, name, secret_values(_variables_named_in(value)), {})


def hide_secrets(text: str) -> str:
    """Return a text without what has the form of a secret, and without what the environment's secrets are."""
    return _without_shapes(_without_values(text, secret_values()))


def secret_values(variables: Sequence[str] = ()) -> list[str]:
    """Return what the environment's secrets are, the longest first.

    They are the values of variables with a secret's name, of those that `read_secret` has read, and of `variables`; of
    `Bearer x` also the x, and of a URL also its path, which is a webhook's secret part.
    """
    named = {name for name in os.environ if is_secret_name(name) and not _is_no_secret_of_a_shell(name)}
    found = {part for name in named.union(_declared, variables) for part in _parts(os.environ.get(name, "").strip())}
    return sorted((part for part in found if len(part) >= SHORTEST), key=len, reverse=True)


def _is_no_secret_of_a_shell(name: str) -> bool:
    """Folders, sockets and files: PWD, SSH_AUTH_SOCK, DESKTOP_SESSION."""
    return name in ("PWD", "OLDPWD") or name.endswith(("_SOCK", "SESSION", "_FILE", "_PATH", "_DIR", "_DIRECTORY"))


def _parts(value: str) -> Iterator[str]:
    yield value
    yield from re.findall(r"^(?:bearer|basic|token)\s+(\S+)$", value, re.IGNORECASE)
    if "://" in value:
        try:
            url = urlsplit(value)
        except ValueError:
            return
        yield from (f"{url.path}?{url.query}" if url.query else url.path, url.query, url.password or "")


def _variables_named_in(value: Any) -> list[str]:
    """The variables that a recipe names as holding a secret: what stands under `header_environment` and the like."""
    names, waiting, seen = [], [value], set()
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Mapping):
            names += [text for key, text in item.items() if str(key).endswith("_environment") and isinstance(text, str)]
            waiting += item.values()
        elif isinstance(item, (list, tuple)):
            waiting += item
    return names


def _redacted(value: Any, name: str, secrets: Sequence[str], seen: dict[int, Any]) -> Any:
    if value is None:
        return None
    if is_secret_name(name):
        return HIDDEN
    if isinstance(value, str):
        return _without_shapes(_without_values(value, secrets))
    if isinstance(value, (Mapping, list, tuple)):
        if id(value) not in seen:  # aliases of YAML can double at each level
            seen[id(value)] = None
            seen[id(value)] = _inside(value, secrets, seen)
        return seen[id(value)]
    return HIDDEN if str(value) in secrets else value


def _inside(value: Any, secrets: Sequence[str], seen: dict[int, Any]) -> Any:
    if isinstance(value, Mapping):
        return {
            _redacted(key, "", secrets, seen): _redacted(item, str(key), secrets, seen) for key, item in value.items()
        }
    return [_redacted(item, "", secrets, seen) for item in value]


def _without_values(text: str, secrets: Sequence[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    return text


def _without_shapes(text: str) -> str:
    text = _URL_LOGIN.sub(f"{HIDDEN}@", _PEM.sub(HIDDEN, text))
    text = _TOKEN_SHAPES.sub(HIDDEN, _WEBHOOK_PATH.sub(rf"\1{HIDDEN}", text))
    return _without_pairs(_SCHEME.sub(rf"\1\2{HIDDEN}", text))


def _without_pairs(text: str) -> str:
    """Hides the value in each `name=value` and `name: value` with a secret's name; values may hold further pairs."""
    kept, done = [], 0
    for match in _NAME.finditer(text):
        value = _VALUE.match(text, match.end())
        is_new = value and match.start() >= done and value[0].strip("\"'") != HIDDEN
        if value and is_new and _names_secret(match, text[max(0, match.start() - 1) : match.start()]):
            kept += [text[done : match.end()], HIDDEN]
            done = value.end()
    return "".join([*kept, text[done:]])


def _names_secret(match: re.Match[str], before: str) -> bool:
    name, sign = match.groups()
    if before in tuple("?&;#") and sign == "=":
        return is_secret_parameter(name)
    is_prose = name.lower() in _PROSE and before not in tuple("{,\"'(-")
    return is_secret_name(name) and not is_prose
