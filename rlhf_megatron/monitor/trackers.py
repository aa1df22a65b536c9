"""Trackers of metrics: jsonl, csv, tensorboard, wandb, mlflow, prometheus, behind one small interface.

The third-party packages are imported when a tracker is opened, never with this module. What a tracker is given to log
is decided by metrics.py; nothing secret may be handed to one, so recipe values pass through redaction.redact first.
A run that resumes goes on as the same run in each of them: services name it, and trackers.json remembers the names.
Not here: writing the jsonl and csv files (file_trackers.py).
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Protocol, runtime_checkable

from rlhf_megatron.durable import write_text
from rlhf_megatron.errors import MonitorError
from rlhf_megatron.monitor.access import METRICS_VARIABLE, given_tokens, guarded, is_loopback
from rlhf_megatron.monitor.file_trackers import CsvTracker, JsonlTracker
from rlhf_megatron.monitor.run_folder import RunFolder
from rlhf_megatron.redaction import redact
from rlhf_megatron.untrusted import read_json, reason_of

# What W&B and MLflow call a run.
_RUN = re.compile(r"[\w.-]{1,128}")


class Tracker(Protocol):
    """One place that metrics are written to."""

    is_local: ClassVar[bool]

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the numbers of one step."""

    def close(self) -> None:
        """Flush and release what is held."""


@runtime_checkable
class TableTracker(Protocol):
    """A tracker that also shows rows."""

    def log_rollouts(self, step: int, columns: Mapping[str, list[Any]]) -> None:
        """Show rows of one step, a list for each column."""


@runtime_checkable
class ModelTracker(Protocol):
    """A tracker that also keeps models."""

    def log_model(self, step: int, folder: Path) -> None:
        """Keep the model of a folder in Hugging Face's format, as it is after a step."""


class TensorboardTracker:
    """Event files in the run folder's tensorboard/, one more for each attempt."""

    is_local: ClassVar[bool] = False

    def __init__(self, folder: Path, first_step: int) -> None:
        _import("tensorboard", "tensorboard")
        writer = _import("torch.utils.tensorboard", "tensorboard")
        # TensorBoard drops what earlier files hold from that step on: an attempt that was killed had gone further.
        self._writer = writer.SummaryWriter(log_dir=str(folder), purge_step=first_step if first_step > 1 else None)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one scalar per metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, global_step=step)
        self._writer.flush()

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class WandbTracker:
    """A Weights & Biases run. Its own variables say where it goes: WANDB_MODE=offline keeps it in the run folder."""

    is_local: ClassVar[bool] = False

    def __init__(self, run_folder: RunFolder, run_settings: Mapping[str, Any]) -> None:
        wandb = _import("wandb", "wandb")
        self._table = wandb.Table
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "rlhf_megatron"),
                id=_known_run(run_folder, "wandb"),
                resume="allow",
                name=run_folder.name,
                dir=str(run_folder.path),
                config=dict(run_settings),
                # The console's live table would be uploaded redraw by redraw.
                settings=wandb.Settings(console="off"),
            )
            _remember_run(run_folder, "wandb", self._run.id)
            # wandb's own steps only grow, and a run that resumes repeats some; so the step is a metric, and the axis.
            self._run.define_metric("step", hidden=True)
            self._run.define_metric("*", step_metric="step")
        except Exception as error:
            raise MonitorError(
                f"monitor.trackers: wandb cannot start: {reason_of(error)}; "
                "run `wandb login`, or set WANDB_MODE=offline"
            ) from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queue the numbers of one step; wandb sends them in the background."""
        self._run.log({"step": step, **metrics})

    def log_rollouts(self, step: int, columns: Mapping[str, list[Any]]) -> None:
        """Queue a table of the step."""
        rows = [list(row) for row in zip(*columns.values(), strict=True)]
        self._run.log({"step": step, "rollouts": self._table(columns=list(columns), data=rows)})

    def close(self) -> None:
        """Wait until everything is sent or, offline, written."""
        self._run.finish()


class MlflowTracker:
    """An MLflow run: on the server of MLFLOW_TRACKING_URI, or else in mlflow.db and mlflow/ of the run folder."""

    is_local: ClassVar[bool] = False

    def __init__(self, run_folder: RunFolder, run_settings: Mapping[str, Any]) -> None:
        mlflow = _import("mlflow", "mlflow")
        self._mlflow = mlflow
        experiment, folder = os.environ.get("MLFLOW_EXPERIMENT_NAME", "rlhf_megatron"), run_folder.path.resolve()
        try:
            if not os.environ.get("MLFLOW_TRACKING_URI"):
                mlflow.set_tracking_uri(f"sqlite:///{folder / 'mlflow.db'}")
                if mlflow.get_experiment_by_name(experiment) is None:  # else tables and models lie where the run began
                    mlflow.create_experiment(experiment, artifact_location=(folder / "mlflow").as_uri())
            mlflow.set_experiment(experiment)
            if not self._goes_on(_known_run(run_folder, "mlflow")):
                run = mlflow.start_run(run_name=run_folder.name)
                _remember_run(run_folder, "mlflow", run.info.run_id)
                mlflow.log_params({name: str(value)[:500] for name, value in _flatten(run_settings).items()})
        except Exception as error:
            raise MonitorError(
                f"monitor.trackers: mlflow cannot start: {reason_of(error)}; check MLFLOW_TRACKING_URI"
            ) from error

    def _goes_on(self, known: str | None) -> bool:
        """Return whether the run of that name is open again; not where the server has none, as another one would."""
        if known is None:
            return False
        try:
            self._mlflow.start_run(run_id=known)
        except self._mlflow.exceptions.MlflowException:
            return False
        return True

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the numbers of one step; the server takes no @ in a name, as in pass@8."""
        self._mlflow.log_metrics({name.replace("@", "_at_"): value for name, value in metrics.items()}, step=step)

    def log_rollouts(self, step: int, columns: Mapping[str, list[Any]]) -> None:
        """Send a table of the step."""
        self._mlflow.log_table(dict(columns), artifact_file=f"rollouts/step-{step}.json")

    def log_model(self, step: int, folder: Path) -> None:
        """Log the folder's files as they are, without loading them, as the run's model of the transformers flavour."""
        flavour = importlib.import_module("mlflow.transformers")
        packages = [f"{name}=={importlib.metadata.version(name)}" for name in ("transformers", "torch")]
        flavour.log_model(
            str(folder.resolve()), name="model", task="text-generation", step=step, pip_requirements=packages
        )

    def close(self) -> None:
        """End the run on the server."""
        self._mlflow.end_run()


class PrometheusTracker:
    """A page that a Prometheus server reads: the newest value of each metric, as rlhf_megatron_NAME{run="..."}."""

    is_local: ClassVar[bool] = False

    def __init__(self, run_folder: RunFolder, address: str = "127.0.0.1", port: int = 9400) -> None:
        client = _import("prometheus_client", "prometheus-client")
        self._client, self._run, self._registry = client, run_folder.name, client.CollectorRegistry()
        self._gauges: dict[str, Any] = {}
        tokens = given_tokens()
        try:
            self._server, self._thread = client.start_http_server(port, address, self._registry)
        except OSError as error:
            raise MonitorError(
                f"monitor.prometheus: cannot listen on {address}:{port} ({error.strerror or error}); choose another "
                "port, or 0 for any that is free"
            ) from error
        self.port: int = self._server.server_port
        if tokens.is_any:
            self._server.set_app(guarded(self._server.get_app(), tokens))
        is_open = "" if tokens.is_any or is_loopback(address) else f"open to all ({METRICS_VARIABLE} is not set), "
        print(f"metrics for Prometheus: {is_open}http://{address}:{self.port}/metrics", flush=True)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Replace the values of the metrics that this step has."""
        for name, value in {"step": step, **metrics}.items():
            known = f"rlhf_megatron_{re.sub('[^a-zA-Z0-9]+', '_', name)}"
            if known not in self._gauges:
                self._gauges[known] = self._client.Gauge(known, name, ["run"], registry=self._registry)
            self._gauges[known].labels(self._run).set(value)

    def close(self) -> None:
        """Give the port back."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


TRACKERS: dict[str, Callable[[RunFolder, Mapping[str, Any], int], Tracker]] = {
    "jsonl": lambda folder, settings, first_step: JsonlTracker(folder.metrics),
    "csv": lambda folder, settings, first_step: CsvTracker(folder.metrics.with_suffix(".csv")),
    "tensorboard": lambda folder, settings, first_step: TensorboardTracker(folder.tensorboard, first_step),
    "wandb": lambda folder, settings, first_step: WandbTracker(folder, settings),
    "mlflow": lambda folder, settings, first_step: MlflowTracker(folder, settings),
    "prometheus": lambda folder, settings, first_step: PrometheusTracker(
        folder, **settings.get("monitor", {}).get("prometheus", {})
    ),
}


# Of trackers that need one: the module that is imported, and the package that has it.
_PACKAGES = {
    "tensorboard": ("tensorboard", "tensorboard"),
    "wandb": ("wandb", "wandb"),
    "mlflow": ("mlflow", "mlflow"),
    "prometheus": ("prometheus_client", "prometheus-client"),
}


def check_trackers(names: Sequence[str]) -> None:
    """Raise MonitorError for names that are unknown, or all packages that are not installed; starts no tracker."""
    for name in names:
        if name not in TRACKERS:
            raise MonitorError(f"monitor.trackers: {name!r} is unknown; choose from {', '.join(TRACKERS)}")
    needed = [_PACKAGES[name] for name in dict.fromkeys(names) if name in _PACKAGES]
    missing = [package for module, package in needed if importlib.util.find_spec(module) is None]
    if missing:
        raise _not_usable(missing, "not installed")


def _not_usable(packages: Sequence[str], why: str) -> MonitorError:
    listed = ", ".join(packages)
    return MonitorError(
        f"monitor.trackers: {listed} {why}; pip install {' '.join(packages)} or take {listed} out of monitor.trackers"
    )


def make_tracker(name: str, run_folder: RunFolder, run_settings: Mapping[str, Any], first_step: int = 1) -> Tracker:
    """Open the tracker of that name; secrets in ``run_settings`` are hidden before it sees them.

    ``first_step`` is the first that will be logged: what an earlier attempt has logged from there on is to be replaced.
    Raises MonitorError as ``check_trackers``, and for a tracker that cannot start.
    """
    check_trackers([name])
    return TRACKERS[name](run_folder, redact(dict(run_settings)), first_step)


def _known_run(run_folder: RunFolder, tracker: str) -> str | None:
    """Return the service's name of this run, if an attempt before has begun one there; warns where the file is
    damaged."""
    path = run_folder.trackers
    if not path.exists():
        return None
    try:
        known = read_json(path, MonitorError).get(tracker)
        if known is None or (isinstance(known, str) and _RUN.fullmatch(known)):
            return known
        reason = f"{path}: the run of {tracker} has no such name"
    except (MonitorError, AttributeError) as error:  # torn as its machine died, or no object
        reason = str(error) if isinstance(error, MonitorError) else f"{path}: not a JSON object"
    print(f"warning: {reason}; {tracker} does not know the run of before", file=sys.stderr, flush=True)
    return None


def _remember_run(run_folder: RunFolder, tracker: str, run: str) -> None:
    known: dict[str, str] = {}
    with contextlib.suppress(MonitorError, AttributeError):
        known = {name: of for name, of in read_json(run_folder.trackers, MonitorError).items() if isinstance(of, str)}
    write_text(run_folder.trackers, json.dumps({**known, tracker: run}) + "\n")


def _import(module: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise _not_usable([package], f"cannot be imported ({reason_of(error)})") from error


def _flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat
