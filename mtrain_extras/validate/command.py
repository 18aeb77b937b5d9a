"""`mtrain simulate validate`: compare predictions with the measured cases of profiles."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from mtrain_cli.commands.completion import complete_measured
from mtrain_cli.commands.options import MOST_WORKERS, Json, argument, bounded, option
from mtrain_cli.commands.simulate import Calibrations, ClusterName, Files, Out
from mtrain_cli.commands.simulate_request import DEFAULT_CLUSTER
from mtrain_cli.config.cluster import load_cluster


def validate(
    runs: Annotated[list[Path], argument("RUN", complete_measured)],
    prediction: Annotated[list[Path] | None, option("DIR")] = None,
    cluster: ClusterName = None,
    nodes: Annotated[
        int | None, bounded(1, MOST_WORKERS, "Number of nodes; by default the cluster's.")
    ] = None,
    calibration: Calibrations = None,
    out: Out = None,
    files: Files = True,
    as_json: Json = False,
) -> None:
    """Compare predictions with `mtrain profile imbalance`, for every step and worker.

    [bold]Examples[/bold]

      [cyan]mtrain simulate validate measurements/imbalance-x --cluster my.yaml[/cyan]
          Predict the cases of a profile now

    Args:
        runs: Profiles: folders, names under measurements/ or runs/, or names of shipped ones.
        prediction: Predictions that `mtrain simulate run --out DIR` saved before the measurement,
            instead of new ones. Can be repeated.
    """
    from mtrain_cli.simulation.calibration_files import calibration_files

    machine = load_cluster(cluster or DEFAULT_CLUSTER, nodes=nodes)
    if calibration is not None:
        calibration_files(calibration)
    # Imported late: it takes seconds, and mistakes are reported above.
    from mtrain_extras.validate.actions import validate as compare

    compare(runs, prediction or [], machine, calibration, out, files=files, as_json=as_json)
