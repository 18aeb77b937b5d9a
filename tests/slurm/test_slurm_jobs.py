"""A real SLURM starts, warns, requeues, preempts and cancels `examples/slurm.sbatch`."""

from __future__ import annotations

import os
import re
import signal

import pytest

from slurm import cluster as clusters
from slurm.cluster import Cluster, wait_for
from slurm.jobs import Jobs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
STEPS, MORE_STEPS = 100, 350
SAVED_S = 15.0  # a bound for a busy machine; docs/long-runs.md has a measured time


@pytest.fixture(scope="module", autouse=True)
def _installed():
    if (reason := clusters.why_not()) is not None:
        pytest.skip(reason)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("jobs")) as cluster:
        yield Jobs(cluster)


@pytest.fixture(scope="module")
def undisturbed(jobs):
    """Return the losses of a job that runs to its end at once."""
    job = jobs.submit(MORE_STEPS)
    found = jobs.cluster.wait(job, "COMPLETED")
    assert found["Restarts"] == "0"
    losses = jobs.losses(job)
    assert len(set(losses)) > MORE_STEPS // 2
    return losses


def ends_like(undisturbed: list[float], jobs: Jobs, job: str, steps: int = STEPS) -> dict[str, str]:
    """Wait for the end of a job, and compare its losses with those of the undisturbed one."""
    found = jobs.cluster.wait(job, "COMPLETED", 300)
    assert jobs.phase(job) == "finished"
    assert jobs.losses(job) == undisturbed[:steps]
    assert jobs.tasks() == []
    return found


def test_a_job_at_its_time_limit_saves_starts_again_and_ends(jobs, undisturbed):
    # SLURM looks for jobs to warn every 30 seconds, and up to 30 seconds early: here, the signal
    # comes after 30 to 60 seconds.
    job = jobs.submit(MORE_STEPS, options=["--time=2", "--signal=USR2@60"], PACE_S="0.3")
    found = ends_like(undisturbed, jobs, job, MORE_STEPS)
    assert int(found["Restarts"]) >= 1
    output = jobs.output(job)
    (stopped, *_) = re.findall(r"^stopped on request after step (\d+), saved$", output, re.M)
    assert f"resumed from the checkpoint of step {stopped}, restart 1, on 2 workers" in output
    assert "TIME LIMIT" not in output


def preempt(jobs: Jobs) -> None:
    jobs.cluster.submit("--partition=urgent", "--nodes=2", "--exclusive", "--wrap=true")


@pytest.mark.parametrize("way", ["scontrol", "signal", "preempt", "grace"])
def test_a_job_that_slurm_stops_saves_starts_again_and_ends(way, jobs, undisturbed):
    job = jobs.submit(STEPS, options=["--partition=graceful"] * (way == "grace"), PACE_S="0.05")
    jobs.wait_for_steps(job, 25)
    if way == "scontrol":
        jobs.cluster.run("scontrol", "requeue", job)
    elif way == "signal":
        jobs.cluster.run("scancel", "--signal=USR2", job)
    else:
        preempt(jobs)
    assert jobs.seconds_until_saved(job) < SAVED_S
    reached = len(jobs.losses(job))
    assert f"step-{reached}" in jobs.checkpoints(job)
    assert int(ends_like(undisturbed, jobs, job)["Restarts"]) >= 1
    assert f"resumed from the checkpoint of step {reached}, restart " in jobs.output(job)


def test_a_job_that_is_preempted_before_its_first_step_starts_again(jobs, undisturbed):
    job = jobs.submit(20, options=["--partition=graceful"])
    wait_for(lambda: len(jobs.tasks()) == 2)
    preempt(jobs)
    assert int(ends_like(undisturbed, jobs, job, 20)["Restarts"]) >= 1


def test_an_array_trains_a_seed_in_each_task(jobs, undisturbed):
    array = jobs.submit(20, options=["--array=0-2", "--output=%a.out"])
    wait_for(lambda: not jobs.cluster.run("squeue", "--noheader", "--job", array), 120)
    losses = []
    for task in range(3):
        (run,) = re.findall(r"runs/slurm-(\d+)$", (jobs.folder / f"{task}.out").read_text(), re.M)
        losses.append(jobs.losses(run))
    assert losses[0] == undisturbed[:20]
    assert len({tuple(one) for one in losses}) == 3


def test_a_job_whose_rank_is_killed_fails_and_goes_on_when_it_is_requeued(jobs, undisturbed):
    job = jobs.submit(STEPS, PACE_S="0.05")
    jobs.wait_for_steps(job, 25)
    os.kill(jobs.tasks()[-1], signal.SIGKILL)
    jobs.cluster.wait(job, "FAILED")
    wait_for(lambda: not jobs.tasks(), 10)
    jobs.cluster.run("scontrol", "requeue", job)
    assert ends_like(undisturbed, jobs, job)["Restarts"] == "1"


def test_a_cancelled_job_leaves_committed_checkpoints_and_no_process(jobs):
    job = jobs.submit(2000)
    jobs.wait_for_steps(job, 25)
    jobs.cluster.run("scancel", job)
    jobs.cluster.wait(job, "CANCELLED")
    wait_for(lambda: not jobs.tasks(), 10)
    assert f"step-{len(jobs.losses(job))}" in jobs.checkpoints(job)
    assert [name for name in jobs.checkpoints(job) if "tmp" in name] == []
    wait_for(jobs.cluster.is_idle)
    assert jobs.cluster.job(job)["JobState"] == "CANCELLED"


def test_each_task_gets_the_cores_that_the_script_asks_for(jobs):
    job = jobs.submit(2000)
    jobs.wait_for_steps(job, 1)
    step = jobs.cluster.run("scontrol", "show", "step", f"{job}.0")
    jobs.cluster.run("scancel", job)
    assert "TresPerStep=cpu:16" in step.split()
    wait_for(jobs.cluster.is_idle)


def test_a_batch_script_without_srun_saves_at_the_signal_of_its_shell(jobs):
    script = jobs.folder / "alone.sbatch"
    script.write_text(
        "#!/bin/bash\nexec mtrain train run.name=slurm-$SLURM_JOB_ID topology.workers=2 $@\n"
    )
    job = jobs.submit(2000, script=str(script), options=["--nodes=1"])
    jobs.wait_for_steps(job, 25)
    jobs.cluster.run("scancel", "--batch", "--signal=USR2", job)
    jobs.cluster.wait(job, "COMPLETED")
    assert jobs.phase(job) == "stopped"
    assert f"step-{len(jobs.losses(job))}" in jobs.checkpoints(job)


def test_a_job_survives_a_new_start_of_a_node_daemon(jobs, undisturbed):
    job = jobs.submit(STEPS, PACE_S="0.05")
    jobs.wait_for_steps(job, 25)
    jobs.cluster.kill_daemon(2)
    jobs.cluster.start_daemon(2)
    assert ends_like(undisturbed, jobs, job)["Restarts"] == "0"


@pytest.mark.parametrize("how", ["kill_daemon", "lose_power"])
def test_a_job_goes_on_without_a_lost_node(how, tmp_path, undisturbed):
    with Cluster(tmp_path, nodes=3) as cluster:
        jobs = Jobs(cluster)
        job = jobs.submit(STEPS, PACE_S="0.05" if how == "lose_power" else "0.5")
        jobs.wait_for_steps(job, 25)
        getattr(cluster, how)(2)
        found = ends_like(undisturbed, jobs, job)
        assert found["Restarts"] == "1"
        assert found["NodeList"] == "node[1,3]"
        assert re.search(r"resumed from the checkpoint of step \d+, restart 1", jobs.output(job))
