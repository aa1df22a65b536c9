"""Secrets are hidden in all that is written: under their names, by their shapes, and by the environment's values."""

from __future__ import annotations

import base64
import html
import json
import time
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf_megatron.errors import UserError
from rlhf_megatron.monitor.environment_report import environment_report, redact_argument, redact_arguments
from rlhf_megatron.monitor.page import write_page
from rlhf_megatron.recipe import RecipeError, load_recipe, resolved_yaml
from rlhf_megatron.recipe.load import known_keys
from rlhf_megatron.redaction import HIDDEN, hide_secrets, redact
from rlhf_megatron.runtime.recovery import Origin, RecoveryLog

ROOT = Path(__file__).parents[2]
SECRET = "hunter2"

SECRET_NAMES = [
    "api_key", "apikey", "apiKey", "API_KEY", "ApiKey", "api-key", "x-api-key", "api.key", "api_key_2",
    "accessKey", "access_key", "AccessKeyId", "access_key_id", "aws_secret_access_key", "secretKey", "secret",
    "client_secret", "clientSecret", "clientsecret", "pwd", "userpwd", "passwd", "password", "Password",
    "dbPassword", "dbpassword", "passphrase", "pass", "db_pass", "auth", "http_auth", "authHeader",
    "authorization", "Proxy-Authorization", "cookie", "cookies", "Set-Cookie", "session", "session_id",
    "sessionid", "bearer", "credential", "credentials", "creds", "private_key", "privateKey", "token", "tokens",
    "access_token", "accessToken", "accesstoken", "auth_token", "refresh_token", "id_token", "hf_token",
    "github_token", "bot_token", "sas", "sas_token", "signature", "dsn", "connection_string", "connectionString",
    "webhook", "slack_webhook", "webhookUrl", "key", "keys", "apikeys", "ssh_key", "encryption_key", "token2",
    "password1", "_token", "__password__", "jwt", "otp", "AccountKey", "SharedAccessKey", "login_password",
    "user_token", "pw", "db_pw", "userPw", "SSHPASS", "pgpass", "pass_code", "csrf", "totp", "mnemonic", "pem", "hmac",
]  # fmt: skip
PLAIN_NAMES = [
    "tokens_per_gpu", "max_tokens", "maxTokens", "max_new_tokens", "stop_tokens", "stop_token_ids", "eos_token",
    "eos_token_id", "pad_token", "pad_token_id", "special_tokens", "token_factor", "tokenizer", "token_ids",
    "num_tokens", "total_tokens", "response_tokens", "num_key_value_heads", "key_value_heads", "key.path",
    "prompt_key", "reward_fn_key", "monkey", "turkey", "author", "authors", "authority", "passes", "pass_k",
    "compass", "bypass", "keyboard", "keep", "hotkey", "signal_seconds", "signed", "webhook_environment",
    "header_environment", "passed", "tokenize", "batch_keys", "name", "account", "user", "username", "login",
    "code", "trust_remote_code", "state", "public_key", "cookbook", "keyword", "thinking_budget_tokens",
    "image_token",
]  # fmt: skip
TEXTS = [
    "postgres://u:hunter2@h/db",
    "http://u:hun@hunter2@h/",
    "https://hunter2@github.com/a",
    "https://h/p?a=1&token=hunter2&b=2",
    "https://h/?sv=1&sig=hunter2%3D",
    "https://s3/x?X-Amz-Credential=hunter2&X-Amz-Signature=hunter2",
    "http://h/#access_token=hunter2",
    "http://h/cb?code=hunter2",
    "https://h/a;token=hunter2",
    "Authorization: Bearer hunter2hunter2",
    '{"api_key": "hunter2"}',
    '{"password": "hun hunter2"}',
    "{api_key: hunter2}",
    "{style: {token: hunter2}}",
    "api_key: hunter2",
    "{'token': 'hunter2'}",
    "--api-key=hunter2 x",
    "WANDB_API_KEY=hunter2 python",
    "Server=h;Uid=u;Pwd=hunter2;",
    "AccountName=a;AccountKey=hunter2==;Suffix=x",
    "use sk-hunter2hunter2hunter2 now",
    "sk-proj-hunter2_hunter2-hunter2",
    "hf_hunter2hunter2hunter2",
    "ghp_hunter2hunter2hunter2hunter2",
    "xoxb-hunter2-hunter2",
    "eyJhunter2hunter2.hunter2hunter2.hunter2",
    "-----BEGIN RSA PRIVATE KEY-----\nhunter2\n-----END RSA PRIVATE KEY-----",
    "-----BEGIN PRIVATE KEY-----\nhunter2",
    "https://hooks.slack.com/services/T0/B0/hunter2",
    "note: 'hunter: {password: hunter2}'",
    r"{\"token\": \"hunter2\"}",
    r"https:\/\/u:hunter2@h",
    "api_key => hunter2",
    "api_key -> hunter2",
    "curl -u user:hunter2 http://h",
    "train --api-key hunter2",
    "train --password 'hunter2",
    "<password>hunter2</password>",
    "x?next=%3Ftoken%3Dhunter2",
    "Authorization: token hunter2",
    "Authorization: AWS4-HMAC-SHA256 Credential=a/b, SignedHeaders=host, Signature=hunter2",
    "{'Authorization': 'Custom hunter2'}",
    "Cookie: theme=dark; sid=hunter2",
    "xapp-1-hunter2hunter2hunter2",
    "nvapi-hunter2hunter2hunter2",
    "gsk_hunter2hunter2hunter2",
    "sk_live_hunter2hunter2hunter2",
    "SG.hunter2hunter2hunter2.hunter2hunter2hunter2",
    "https://x.webhook.office.com/webhookb2/hunter2",
    "https://api.telegram.org/bot1:hunter2/sendMessage",
    "https://open.feishu.cn/open-apis/bot/v2/hook/hunter2",
]
PLAIN_TEXTS = [
    "reward.service.header_environment: the environment variable X is not set; export it",
    "unknown key rollout.max_respons_length; did you mean rollout.max_response_length?",
    "override 'a.b=3': must have the form key.path=value, such as steps=10",
    "write KEY=LOW..HIGH, KEY=LOW..HIGH:log (above 0) or KEY=A|B|C, with LOW below HIGH",
    "https://judge.internal:8443/score?model=a&v=2",
    "unknown token: <|x|>",
    "row 3: key: missing",
    "actor.tokens_per_gpu=8192 max_tokens=5 author=me",
    "eos_token: </s>",
    "a@b.c wrote http://h/x",
    "bearer of news, basic settings",
    "task-learning-with-sk-learn models/hf_model",
    "the service answers with status 401 Unauthorized: bad key",
    "train --steps 100000 --output-tokens 123456",
    "<answer>42</answer> <think>no</think>",
    "commit 0123456789abcdef0123456789abcdef01234567",
]
ARGUMENTS = [
    "data.chat_template_kwargs={api_key: hunter2, style: x}",
    "data.chat_template_kwargs={api_key: hunter2",
    "data.chat_template_kwargs.apiKey=hunter2",
    "data.chat_template_kwargs={a: {b: [{pwd: hunter2}]}}",
    "--api-key=hunter2",
    'x={"auth": "hunter2"}',
    "a.url=http://u:hunter2@h/",
    "a=[{token: hunter2}, 2]",
    "x={auth: [hunter2, {y: hunter2}]}",
    "reward.service.url=http://h/?token=hunter2",
    "key=hunter2",
    "x=" + "[" * 3000 + "{key: hunter2}",
]


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "value-of-wandb")
    monkeypatch.setenv("JUDGE", "Bearer value-of-judge")
    monkeypatch.setenv("SOME_TOKEN", "1")
    monkeypatch.setenv("DESKTOP_SESSION", "ubuntu")
    monkeypatch.setenv("PWD", str(ROOT))


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_whatever_stands_under_a_secrets_name_is_hidden(name: str) -> None:
    for value in (SECRET, 4711, 4.5, True, [SECRET], {"a": [SECRET]}, b"hunter2", ""):
        assert redact({"a": [{"b": ({name: value, "style": "x"},)}]}) == {"a": [{"b": [{name: HIDDEN, "style": "x"}]}]}


@pytest.mark.parametrize("name", [*PLAIN_NAMES, *known_keys()])
def test_other_names_are_kept(name: str) -> None:
    values = {name: 5, "inner": {name.rpartition(".")[2]: ["text"]}}
    assert redact(values) == values


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_with_the_shape_of_a_secret_loses_it(text: str) -> None:
    assert SECRET not in hide_secrets(text) and SECRET not in str(redact({"a": [text]}))
    assert SECRET not in str(UserError(text))


@pytest.mark.parametrize("text", PLAIN_TEXTS)
def test_other_texts_are_kept(text: str) -> None:
    assert hide_secrets(text) == text == str(UserError(text))


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_an_argument_is_looked_into(argument: str) -> None:
    [hidden] = redact_arguments([argument])
    assert SECRET not in hidden and HIDDEN in hidden


@pytest.mark.parametrize("name", ["--api-key", "--token", "-password"])
def test_the_argument_behind_a_secrets_name_is_hidden(name: str) -> None:
    assert redact_arguments([name, SECRET, "steps=10"]) == [name, HIDDEN, "steps=10"]


@pytest.mark.parametrize(
    "argument", ["steps=10", "a=[b.parquet, c]", "t=2024-13-45", "x={? [a] : b}", "k={a: &a 1, b: *a}"]
)
def test_an_argument_without_secrets_stays_as_it_was_typed(argument: str) -> None:
    assert redact_argument(argument) == argument


def test_what_the_environment_holds_is_hidden_wherever_it_stands() -> None:
    values = {"a": ["x value-of-wandb y"], "value-of-wandb": 1, "n": 1, "os": "ubuntu", "folder": str(ROOT)}
    assert redact(values) == {"a": ["x *** y"], HIDDEN: 1, "n": 1, "os": "ubuntu", "folder": str(ROOT)}
    named = {"header_environment": "JUDGE", "a": "value-of-judge", "b": "Bearer value-of-judge"}
    assert redact(named) == {"header_environment": "JUDGE", "a": HIDDEN, "b": HIDDEN}
    assert str(UserError("it says value-of-wandb")) == "it says ***"


def test_aliases_cost_no_more_than_what_they_stand_for() -> None:
    value: list[Any] = [SECRET]
    for _ in range(80):
        value = [value, value]
    redact({"a": value})
    value.append(value)
    redact({"a": value})


@pytest.mark.parametrize(
    "text", ["a" * 10**6, "a=b " * 10**5, "://" * 10**5, "\"'" * 10**5, "a.b-" * 10**5, "eyJ" * 10**5]
)
def test_long_texts_take_no_time_that_grows_with_their_square(text: str) -> None:
    assert hide_secrets(text) == text


OVERRIDES = [
    "data.chat_template_kwargs={api_key: hunter2, tokens: 4711, deep: [{auth: {user: hunter2}}], note: value-of-wandb}"
]


def test_the_records_of_a_run_hold_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe(ROOT / "recipes" / "tiny_sft.yaml", OVERRIDES)
    monkeypatch.setattr("sys.argv", ["train.py", *OVERRIDES])
    (tmp_path / "recipe.yaml").write_text(resolved_yaml(recipe, redact))
    (tmp_path / "environment.json").write_text(json.dumps(environment_report()))
    log = RecoveryLog(tmp_path, Origin("1"))
    assert log.begin(3) is None
    log.append("fault", 1, "RuntimeError: token=x; password=hunter2 value-of-wandb")
    written = "".join(path.read_text() for path in tmp_path.iterdir())
    assert not any(secret in written for secret in (SECRET, "4711", "value-of-wandb"))


def test_a_page_of_an_older_run_holds_no_secret(tmp_path: Path) -> None:
    recipe = load_recipe(ROOT / "recipes" / "tiny_sft.yaml", OVERRIDES)
    (tmp_path / "recipe.yaml").write_text(resolved_yaml(recipe))
    (tmp_path / "environment.json").write_text(json.dumps({"argv": ["train.py", *OVERRIDES, "--token", SECRET]}))
    (tmp_path / "recovery.jsonl").write_text(json.dumps({"what": "fault", "why": "password=hunter2"}) + "\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/loss": 1.0}\n')
    write_page({"run": tmp_path}, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "chat_template_kwargs" in page
    assert not any(secret in page for secret in (SECRET, "4711", "value-of-wandb"))


def test_a_runs_own_recipe_is_not_taken_for_the_one_it_was_made_from(tmp_path: Path) -> None:
    recipe = load_recipe(ROOT / "recipes" / "tiny_sft.yaml", OVERRIDES)
    saved = tmp_path / "recipe.yaml"
    saved.write_text(resolved_yaml(recipe, redact))
    with pytest.raises(RecipeError, match=r"data\.chat_template_kwargs\.api_key is \*\*\*, as a run's records hide"):
        load_recipe(saved)
    again = load_recipe(saved, [*OVERRIDES])
    assert again == recipe


def test_all_recipes_are_recorded_as_they_are() -> None:
    recipes = [path for path in (ROOT / "recipes").glob("*.yaml")]
    assert len(recipes) > 5
    for path in recipes:
        recipe = load_recipe(path)
        assert yaml.safe_load(resolved_yaml(recipe, redact)) == recipe.model_dump(mode="json")


FORMS = {
    "URL": lambda text: urllib.parse.quote(text, safe=""),
    "form": urllib.parse.quote_plus,
    "JSON": lambda text: json.dumps(text)[1:-1],
    "repr": lambda text: repr(text)[1:-1],
    "bytes": lambda text: repr(text.encode())[2:-1],
    "HTML": html.escape,
    "hexadecimal": lambda text: text.encode().hex(),
    "base64": lambda text: base64.b64encode(text.encode()).decode().rstrip("="),
    "base64 of a login": lambda text: base64.urlsafe_b64encode(f"user:{text}".encode()).decode(),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("value", ["plain-value-1", 'pa"ss\\w/o rd+%&\u00e9<1', "\U0001f600" * 6])
def test_a_variables_value_is_hidden_in_other_forms(
    form: Callable[[str], str], value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_SECRET", value)
    hidden = hide_secrets(f"failed at [{form(value)}] there")
    assert hidden.startswith("failed at [") and hidden.endswith("] there") and HIDDEN in hidden
    assert len(hidden) - len("failed at [***] there") <= 10, "but for the name of a login"


@pytest.mark.parametrize(
    ("value", "part"),
    [("first-line-of-it\nsecond-line-of-it", "second-line-of-it"),
     ("AccountName=a;AccountKey=QUJDREVG;Suffix=b", "QUJDREVG"),
     ("https://h/services/T0/B0/hook-9?x=1", "/services/T0/B0/hook-9")],
)  # fmt: skip
def test_a_part_of_a_variables_value_is_hidden(value: str, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_SECRET", value)
    assert part not in hide_secrets(f"failed: <{part}>")


def test_the_password_of_a_url_in_any_variable_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://user:hunter%402@h/")
    assert "hunter" not in hide_secrets("401 for user, hunter@2 and hunter%402")


@pytest.mark.parametrize(
    "piece", ["token=", "a: ", "://a", "a= b= ", "token: '", "-eyJaaaaaaaa", "cookie=", "-u a", "<a>"]
)
def test_a_long_text_takes_no_longer_than_its_length(piece: str) -> None:
    begun = time.monotonic()
    hide_secrets(piece * (300_000 // len(piece)))
    assert time.monotonic() - begun < 20.0
