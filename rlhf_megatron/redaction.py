"""The hiding of secrets in all that is written: by the name of a key, by their shape, and by value.

A value is hidden under a name such as ``api_key``; a text loses what has the form of a secret, such as ``Bearer ...``,
and what an environment variable with such a name holds. A secret that has neither name nor form and lies in no variable
cannot be told from other text.
"""

from __future__ import annotations

import base64
import functools
import html
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote, quote_plus, unquote, urlsplit

HIDDEN = "***"
# A shorter value of a variable would be met in text that is no secret, and so would a shorter one of its lines.
SHORTEST = 6
_SHORTEST_LINE = 12

# A name with one of these words anywhere in it is a secret's.
_SECRET_WORDS = {
    "secret", "secrets", "password", "passwords", "passwd", "passphrase", "passphrases", "passcode", "pwd",
    "credential", "credentials", "cred", "creds", "authorization", "auth", "oauth", "bearer", "cookie", "cookies",
    "jwt", "dsn", "webhook", "webhooks", "pw", "csrf", "xsrf", "totp", "mnemonic", "pem", "hmac",
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
    r"|secret(?!ar)|password|passwd|passphrase|passcode|credential|connectionstring|connstr|sessionid|pwd$|(pg|ssh)pass$"
    r"|(api|auth|access|refresh|bearer|session|hf|bot|security)tokens?$"
)
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[A-Z]+")
# Parameters of URLs that sign or authorise, beside those of a secret's name.
_URL_PARAMETERS = frozenset({"code", "state", "sig", "ticket"})

_PEM = re.compile(r"-----BEGIN [A-Z0-9 ]+-----.*?(-----END [A-Z0-9 ]+-----|\Z)", re.DOTALL)
_URL_LOGIN = re.compile(r"(?:(?<=://)|(?<=:\\/\\/))[^/\s]*@")
_WEBHOOK_PATH = re.compile(
    r"(?<=://)(hooks\.slack\.com/|api\.telegram\.org/bot|[^\s\"'<>]{1,200}?/(?:webhooks?|webhookb2|hooks?|with/key)/)"
    r"[^\s\"'<>]+"
)
_SCHEME = re.compile(r"\b(bearer|basic)(\s+)(?=[^\s]*[0-9=_.-])[\w.~+/=-]{8,}", re.IGNORECASE)
_TOKEN_SHAPES = re.compile(
    r"(?<![A-Za-z0-9])("
    r"sk-[A-Za-z0-9_-]{16,}|hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|(AKIA|ASIA)[A-Z0-9]{16}|xox[a-z]-[\w-]{8,}|AIza[\w-]{30,}|ya29\.[\w-]{16,}|npm_[A-Za-z0-9]{30,}|pypi-[\w-]{30,}"
    r"|(xapp|nvapi|tvly|pplx|xai)-[\w-]{16,}|(dckr_pat|dop_v1|r8|gsk|[sr]k_live|[sr]k_test|shpat|lin_api|wandb_v1)_[\w-]{16,}"
    r"|SG\.[\w-]{16,}\.[\w-]{16,}|AGE-SECRET-KEY-\w{16,}"
    r"|eyJ[\w-]{8,2000}+\.[\w-]{8,}(\.[\w-]*)?"
    r")"
)
# Headers that end with their line; arguments of a command line; elements of XML.
_AUTHORIZATION = re.compile(
    r"(authorization[\"']?\s{0,4}[:=]\s{0,4}[\"']?)[\w-]{1,40}[ \t]{1,4}[^\n\"']+", re.IGNORECASE
)
_COOKIE = re.compile(r"(cookie[\"']?\s{0,4}[:=]\s{0,4}[\"']?)[\w.-]{1,100}+=[^\n\"']+", re.IGNORECASE)
_LOGIN_ARGUMENT = re.compile(r"(?<!\S)((?:-u|--user)[ \t=]{1,4}[\"']?[^\s:\"']{1,100}:)[^\s\"']+")
_ARGUMENT = re.compile(rf"(?<!\S)(--([A-Za-z][\w-]{{0,100}})[ \t]{{1,4}})[\"']?(?!-)[^\s\"']{{{SHORTEST},}}")
_ELEMENT = re.compile(r"(<([A-Za-z][\w.:-]{0,100})>)[^<>]+(?=</)")
# What stands before a value in ``name=value``, ``"name": "value"`` and ``?name=value``, and the value.
_NAME = re.compile(
    r"(?:(?<![\w.])|(?<=%3F)|(?<=%26))([A-Za-z_][\w.\-]{0,100}+)(\\{0,3}[\"']?\s{0,4}(?:=>|->|[:=]|%3[Dd])\s{0,4})"
)
# A value that ends in a sign, as in ``auth= key: x``, goes on behind it.
_VALUE = re.compile(
    r"(?:[^\s,;&\"'\])}]+[:=]\s{1,4})*+(?:\\{1,3}[\"'][^\"']*|b?\"[^\"]*\"|b?'[^']*'|[^\s,;&\"'\])}]+)?"
)
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
    """Return whether what stands under a name is a secret: ``api_key``, ``pwd``; not ``max_tokens``, ``author``."""
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
    """Return whether a parameter of that name in a URL authorises, such as ``?token=`` and ``?sig=``."""
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

    They are the values of variables with a secret's name, of those that ``read_secret`` has read, and of ``variables``;
    of ``Bearer x`` also the x, and of a URL also its path, which is a webhook's secret part.
    """
    named = {name for name in os.environ if is_secret_name(name) and not _is_no_secret_of_a_shell(name)}
    secrets = {form for name in named.union(_declared, variables) for form in _forms(os.environ.get(name, "").strip())}
    secrets.update(form for value in os.environ.values() if "@" in value for form in _forms(_url_password(value)))
    return sorted(secrets, key=len, reverse=True)


def _is_no_secret_of_a_shell(name: str) -> bool:
    """Return folders, sockets and files: PWD, SSH_AUTH_SOCK, DESKTOP_SESSION."""
    return name in ("PWD", "OLDPWD") or name.endswith(("_SOCK", "SESSION", "_FILE", "_PATH", "_DIR", "_DIRECTORY"))


@functools.lru_cache(maxsize=1024)
def _forms(value: str) -> frozenset[str]:
    """Return a secret and its parts, each also as URLs, JSON, Python, HTML, hexadecimal digits and base64 would hold
    it."""
    parts = [part for part in _parts(value) if len(part) >= SHORTEST]
    return frozenset(form for part in parts for form in _encoded(part) if len(form) >= SHORTEST)


def _encoded(part: str) -> Iterator[str]:
    data = part.encode(errors="surrogateescape")
    yield from (part, quote(data, safe=""), quote(data), quote_plus(data))
    yield from (json.dumps(part)[1:-1], json.dumps(part, ensure_ascii=False)[1:-1], repr(part)[1:-1], repr(data)[2:-1])
    yield from (html.escape(part), data.hex())
    for before in range(3):  # as it may stand behind other text, such as a login's name
        coded = base64.b64encode(bytes(before) + data).decode()
        own = coded[-(-8 * before // 6) : 8 * (before + len(data)) // 6]
        yield from (own, own.replace("+", "-").replace("/", "_"))


def _url_password(value: str) -> str:
    try:
        return unquote(urlsplit(value).password or "")
    except ValueError:
        return ""


def _parts(value: str) -> Iterator[str]:
    yield value
    lines = value.splitlines() if "\n" in value else []
    yield from (line.strip() for line in lines if len(line.strip()) >= _SHORTEST_LINE)
    yield from re.findall(r"^(?:bearer|basic|token)\s+(\S+)$", value, re.IGNORECASE)
    yield from re.findall(r"(?:key|password|pwd|secret|signature)=([^;&]+)", value, re.IGNORECASE)
    if "://" in value:
        try:
            url = urlsplit(value)
        except ValueError:
            return
        yield from (f"{url.path}?{url.query}", url.path, url.query, url.password or "", _url_password(value))


def _variables_named_in(value: Any) -> list[str]:
    """Return the variables that a recipe names as holding a secret: what stands under ``header_environment`` and the
    like."""
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
    for pattern in (_AUTHORIZATION, _COOKIE, _LOGIN_ARGUMENT):
        text = pattern.sub(rf"\1{HIDDEN}", text)
    for pattern in (_ARGUMENT, _ELEMENT):
        text = pattern.sub(lambda match: match[1] + HIDDEN if is_secret_name(match[2]) else match[0], text)
    return _without_pairs(_SCHEME.sub(rf"\1\2{HIDDEN}", text))


def _without_pairs(text: str) -> str:
    """Hide the value in each ``name=value`` and ``name: value`` with a secret's name; values may hold further pairs.

    Linear in the text: a value is looked for behind a secret's name alone, and what it covers is passed over.
    """
    kept, done = [], 0
    for match in _NAME.finditer(text):
        before = text[max(0, match.start() - 1) : match.start()]
        if match.start() < done or not _names_secret(match, before):
            continue
        value = _VALUE.match(text, match.end())
        if value and value[0] and value[0].strip("\"'") != HIDDEN:
            kept += [text[done : match.end()], HIDDEN]
            done = value.end()
    return "".join([*kept, text[done:]])


def _names_secret(match: re.Match[str], before: str) -> bool:
    name, sign = match.groups()
    if (before in tuple("?&;#") and sign == "=") or sign.lower() == "%3d":
        return is_secret_parameter(name)
    is_prose = name.lower() in _PROSE and before not in tuple("{,\"'(-")
    return is_secret_name(name) and not is_prose
