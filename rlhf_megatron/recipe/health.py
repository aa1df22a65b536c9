"""The ``health`` section: which numbers are watched while a run goes on, and whom to tell."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from rlhf_megatron.recipe.section import Section, check_variable

SMALLEST_SLOPE_WINDOW = 4  # two halves of two values each


class HealthRuleSection(Section):
    """A rule over each step's metrics; steps without its metric do not count."""

    metric: str
    """Metric or pattern such as eval/*/accuracy."""
    when: Literal["above", "below", "moving_std_above", "slope_above", "not_finite"]
    """Value, its std or slope over window, or nan and inf (docs/health.md)."""
    value: float | None = None
    """Threshold; none for not_finite."""
    window: int = Field(default=20, gt=1)
    """Values for moving_std_above and slope_above, which wait for as many."""
    steps: int = Field(default=1, gt=0)
    """Consecutive steps it must hold. Fires again only after it has not held."""
    action: Literal["log", "alert", "stop"] = "log"
    """alert: also webhook and command; stop: also end the run."""

    @model_validator(mode="after")
    def _threshold_fits(self) -> HealthRuleSection:
        if (self.value is None) != (self.when == "not_finite"):
            raise ValueError(f"{self.metric}: give value with above, below, moving_std_above and slope_above only")
        if self.when == "slope_above" and self.window < SMALLEST_SLOPE_WINDOW:
            raise ValueError(
                f"{self.metric}: window={self.window} must be at least {SMALLEST_SLOPE_WINDOW} for a slope"
            )
        if self.when not in ("moving_std_above", "slope_above") and self.changed("window"):
            raise ValueError(
                f"{self.metric}: window={self.window} is for moving_std_above and slope_above; leave it out"
            )
        return self


class AlertSection(Section):
    """Receivers of actions alert and stop."""

    webhook_environment: str | None = None
    """Variable with the webhook's URL, a secret."""
    command: list[str] = Field(default=[])
    """Program and arguments, no shell; {message} is replaced, JSON on stdin."""
    retries: int = Field(default=4, ge=0, le=20)
    """After 1, 2, 4, ... seconds."""
    most_per_hour: int = Field(default=12, gt=0)
    """More are reported with the next. A stop is always sent."""

    @model_validator(mode="after")
    def _variable_has_a_name(self) -> AlertSection:
        check_variable("webhook_environment", self.webhook_environment)
        return self


class HealthSection(Section):
    """Rules over metrics while the run goes on (docs/health.md)."""

    default_rules: bool = True
    """They only log."""
    rules: list[HealthRuleSection] = Field(default=[])
    """Further rules."""
    alert: AlertSection = AlertSection()
    """Receivers of alerts."""

    @model_validator(mode="after")
    def _alerts_are_sent(self) -> HealthSection:
        alone = next((rule for rule in self.rules if rule.action == "alert"), None)
        if alone and not self.alert.command and self.alert.webhook_environment is None:
            raise ValueError(
                f"rules: {alone.metric} has the action alert, and nobody gets the alert; give "
                "alert.webhook_environment or alert.command, or use log"
            )
        return self

    def all_rules(self) -> tuple[HealthRuleSection, ...]:
        """Return the rules to follow, the recipe's own first."""
        return (*self.rules, *(DEFAULT_RULES if self.default_rules else ()))


def _rule(
    metric: str,
    when: Literal["above", "below", "moving_std_above", "slope_above", "not_finite"],
    value: float | None,
    steps: int,
    window: int = 20,
) -> HealthRuleSection:
    return HealthRuleSection(metric=metric, when=when, value=value, steps=steps, window=window)


# Wide of what healthy runs show, so that a line means something; docs/health.md gives the reasons.
DEFAULT_RULES = (
    _rule("*", "not_finite", None, 1),
    _rule("train/skipped", "above", 0.0, 3),
    _rule("train/entropy", "below", 0.01, 10),
    _rule("train/kl", "above", 1.0, 5),
    _rule("train/policy_kl", "above", 0.1, 5),
    _rule("train/mismatch_kl", "above", 0.02, 5),
    _rule("rollout/truncated_fraction", "above", 0.5, 10),
    _rule("reward/informative_group_fraction", "below", 0.05, 10),
    _rule("network/busy_fraction", "above", 0.3, 5),
    _rule("memory/host_gb", "slope_above", 0.02, 10, window=60),
    _rule("memory/gpu_gb", "slope_above", 0.02, 10, window=60),
    _rule("memory/gpu_retries", "slope_above", 1.0, 5, window=10),
)
