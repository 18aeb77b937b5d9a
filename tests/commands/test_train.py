"""`mtrain train` up to the start of the workers, which have tests of their own."""

import types
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from masked_documents import masked_store
from model.tiny_models import edit_config, export, tiny_model
from typer.testing import CliRunner

from mtrain_cli.commands import train
from mtrain_cli.commands.app import app
from mtrain_cli.composition.compose import compose
from mtrain_cli.config.cluster import shipped
from mtrain_cli.config.resolved_file import load
from mtrain_cli.evaluation.in_training import TaskEvaluations
from mtrain_cli.launch import environment, local, run_dir
from mtrain_cli.launch.failures import Failure
from mtrain_cli.launch.run_dir import RunDir
from mtrain_cli.launch.run_status import RunState, write_state
from mtrain_cli.profiling.periodic_profile import TrainingProfile
from mtrain_cli.training import loop


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def launched(monkeypatch):
    """Records calls of the launcher, which starts nothing here and returns 7."""
    calls = []

    def launch(run_dir, environment, resume, config):  # noqa: ARG001
        calls.append((run_dir, environment, resume))
        run_dir.release()
        return 7

    monkeypatch.setattr(local, "launch", launch)
    return calls


def run(*words: str):
    return CliRunner().invoke(app, ["train", *words], prog_name="mtrain")


def test_cfg_prints_the_composed_configuration_and_exits(launched, tmp_path):
    result = run("model=qwen3b", "seq=32k", "--cfg")
    assert result.exit_code == 0
    Path("printed.yaml").write_text(result.stdout)
    assert load(Path("printed.yaml")) == compose(["model=qwen3b", "seq=32k"])
    assert yaml.safe_load(result.stdout)["seq"] == 32768
    assert "seq: 32768  # default " in result.stdout
    assert not launched
    assert [path.name for path in tmp_path.iterdir()] == ["printed.yaml"]


def test_dry_run_prints_the_plan_and_exits(launched, tmp_path):
    words = (
        "seq=4k",
        "topology.workers=8",
        "topology.device=cuda",
        "topology.exchange=ring",
        "--dry-run",
    )
    result = run("model=qwen3b", *words)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "Dry run: qwen3b, seq 4k; nothing is trained" in result.stdout
    assert "FLOP are those of one, as in mtrain simulate" in " ".join(result.stdout.split())
    assert not launched
    result = run("model=llama8b", *words, "topology.gpu_memory_gib=10")
    assert result.exit_code == 1, "it does not fit"
    assert "Does not fit: " in result.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("max_file_bytes", [10**9, 40_000])
def test_a_dry_run_refuses_weights_of_another_size(launched, monkeypatch, max_file_bytes):
    model = tiny_model("qwen3_moe", vocab_size=264)
    export(Path("hf"), model, max_file_bytes=max_file_bytes)
    assert Path("hf/model.safetensors").is_file() == (max_file_bytes == 10**9)
    monkeypatch.setenv("HOME", str(Path.cwd()))
    words = ("train.init_from=~/hf", "seq=256", "topology.device=cpu", "--dry-run")
    assert run(*words).exit_code == 0
    edit_config(Path("hf"), num_experts=8)
    result = run(*words)
    assert (result.exit_code, result.stdout, launched) == (2, "", [])
    assert "mlp.gate.weight has shape (6, 40); " in result.stderr


def test_a_dry_run_refuses_a_flipped_bit_of_an_export():
    export(Path("hf"), tiny_model("qwen3", vocab_size=264))
    path = Path("hf/model.safetensors")
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)
    result = run("train.init_from=hf", "seq=256", "topology.device=cpu", "--dry-run")
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"{path}: has changed since the export" in result.stderr


def test_a_dry_run_needs_no_weights_and_says_that_the_run_does():
    export(Path("hf"), tiny_model("qwen3", vocab_size=264))
    Path("hf/model.safetensors").unlink()
    result = run("train.init_from=hf", "seq=256", "topology.device=cpu", "--dry-run")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "the folder has no model.safetensors yet, which the run needs" in result.stdout


def test_train_creates_the_run_folder_and_returns_the_launchers_exit_code(launched):
    result = run("seq=256", "topology.device=cpu", "run.name=first")
    assert result.exit_code == 7
    ((run_dir, environment, resume),) = launched
    assert run_dir.path == Path("runs/first").absolute()
    assert load(run_dir.resolved).seq == 256
    assert (environment.device, environment.dims.workers, resume) == ("cpu", 2, False)


def test_sizes_that_do_not_fit_leave_no_folder(launched, tmp_path):
    result = run(
        "topology.device=cpu",
        "topology.workers=3",
        "topology.context_parallel=auto",
        "topology.gpus_per_node=2",
    )
    assert result.exit_code == 2
    assert not launched
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("by", ["name", "path"])
def test_resume_uses_the_saved_configuration(launched, by):
    run("seq=256", "topology.device=cpu", "run.name=first", "optim.lr=0.5")
    result = run("--resume", "first" if by == "name" else "runs/first")
    assert result.exit_code == 7
    run_dir, _, resume = launched[-1]
    assert resume
    assert run_dir.path == Path("runs/first").absolute()
    assert load(run_dir.resolved).optim.lr == 0.5


def test_a_resume_finds_the_file_of_a_cluster_from_another_folder(launched, tmp_path, monkeypatch):
    Path("mine.yaml").write_text(shipped()["a100_4x8"].read_text())
    run("topology.cluster=mine.yaml", "topology.device=cpu", "run.name=first")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    planned = run("--resume", str(tmp_path / "runs/first"), "topology.device=cuda", "--dry-run")
    assert planned.stderr == ""
    assert "A100" in planned.stdout
    assert len(launched) == 1


def test_resume_saves_overrides_for_the_workers(launched):
    run("seq=512", "topology.device=cpu", "run.name=first")
    assert run("--resume", "first", "train.steps=500", "topology.workers=4").exit_code == 7
    run_dir, environment, _ = launched[-1]
    assert (
        load(run_dir.resolved).train.steps,
        load(run_dir.resolved).seq,
        environment.dims.workers,
    ) == (500, 512, 4)


@pytest.mark.usefixtures("launched")
def test_ranks_of_a_resumed_job_decide_alike_whichever_settings_they_see(monkeypatch):
    run("run.name=mine", "topology.device=cpu", "seq=512", "train.steps=4")
    words, decisions = ["--resume", "mine", "train.steps=8"], []
    monkeypatch.setattr(
        run_dir, "decide_on_rank_zero", lambda action: decisions.append(text := action()) or text
    )
    run(*words)
    of_rank_zero = len(decisions)
    run(*words)  # as a rank that comes later: the file has the new settings
    assert len(decisions) == 2 * of_rank_zero > 0


@pytest.mark.usefixtures("launched")
def test_a_resume_with_more_steps_keeps_the_schedule():
    run("seq=256", "topology.device=cpu", "run.name=first", "train.steps=100")
    (Path("runs/first/checkpoints/step-100")).mkdir(parents=True)
    (Path("runs/first/checkpoints/step-100") / "manifest.json").write_text("{}")
    assert run("--resume", "first", "train.steps=250").exit_code == 7
    assert load(Path("runs/first/resolved.yaml")).optim.schedule_steps == 100
    refused = run("seq=256", "run.name=second", "optim.rewarm=true")
    assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
    assert not Path("runs/second").exists()
    assert run("--resume", "first", "optim.rewarm=true").exit_code == 7
    assert load(Path("runs/first/resolved.yaml")).optim.rewarm == 100


def test_a_refused_resume_changes_nothing(launched):
    run("seq=256", "topology.device=cpu", "run.name=first")
    before = Path("runs/first/resolved.yaml").read_text()
    result = run("--resume", "first", "seq=512", "train.steps=500")
    assert result.exit_code == 2
    assert "seq=512: a resumed run keeps its seq=256; start a new run to change it" in result.stderr
    assert Path("runs/first/resolved.yaml").read_text() == before
    assert len(launched) == 1


@pytest.mark.usefixtures("launched")
def test_a_resume_refused_by_the_workers_changes_nothing(monkeypatch):
    run("seq=256", "topology.device=cpu", "run.name=first")
    first, host = RunDir(Path("runs/first").absolute()), "here"
    state = RunState(phase="finished", time=1.0, began=0.0, host=host, step=300)
    write_state(first, state)
    files = [Path("runs/first") / name for name in ("resolved.yaml", "overrides.txt", "state.json")]
    before = [file.read_bytes() for file in files]

    mistake = Failure(0, 2, "config", "data.path=x: is too short", "", 0.0)
    monkeypatch.setattr(
        local,
        "launch",
        lambda run_dir, *_, **__: local._report_failure(
            types.SimpleNamespace(failures=[mistake]), run_dir, state
        ),
    )
    result = run("--resume", "first", "train.steps=400")
    assert (result.exit_code, result.stderr) == (2, "mtrain: data.path=x: is too short\n")
    assert [file.read_bytes() for file in files] == before


@pytest.mark.parametrize("word", ["topology=a100_4x8", "topology.device=cuda"])
def test_a_run_on_absent_gpus_is_refused_with_a_way_out(word, launched, monkeypatch):
    monkeypatch.setattr(environment, "_visible_gpus", lambda: 0)
    result = run("model=qwen3b", "seq=512k", word)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert result.stderr.startswith("mtrain: topology.device=cuda: torch sees no GPU")
    assert "--dry-run" in result.stderr
    assert not launched


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["data=text", "data.path=a.csv"], "cannot read a .csv file as text"),
        (["data=text", "data.path=empty"], "the folder holds no .txt, .md, .py, .jsonl, .json or"),
        (["data=tokens", "data.path=a.csv"], "is another kind of file; give the output of"),
    ],
)
def test_data_of_another_kind_are_refused_before_workers_start(launched, words, problem):
    Path("a.csv").write_text("{}")
    Path("empty").mkdir()
    for command in ("train", "profile step"):
        result = CliRunner().invoke(app, [*command.split(), *words])
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
        assert problem in result.stderr
    assert not launched
    assert sorted(path.name for path in Path().iterdir()) == ["a.csv", "empty"]


def test_columns_that_the_data_lack_are_refused_before_workers_start(launched, tmp_path):
    path = masked_store(tmp_path / "masked")
    for words in (["data.mask_key=m"], ["data.positions_key=at", "seq=8"]):
        result = CliRunner().invoke(app, ["train", "data=tokens", f"data.path={path}", *words])
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
        assert words[0] in result.stderr
    assert not launched


@pytest.mark.parametrize("command", [["train"], ["profile", "step"], ["profile", "imbalance"]])
def test_a_kernel_that_needs_a_gpu_is_refused_before_workers_start(launched, command, monkeypatch):
    monkeypatch.setattr(environment, "_visible_gpus", lambda: 0)
    result = CliRunner().invoke(app, [*command, "train.kernel=flash4"])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "train.kernel=flash4: needs a CUDA GPU; usable here: sdpa, " in result.stderr
    assert not launched
    assert not Path("runs").exists()
    assert not Path("measurements").exists()


@pytest.mark.parametrize(
    ("word", "problem"),
    [
        ("topology.chunks=99", "does not divide the 2 key-value heads of a worker; allowed: 1, 2"),
        ("topology.circulates=queries", "works only with ring and hierarchical_ring"),
        ("topology.ulysses=3", "cannot share 4 query heads and 2 key-value heads"),
    ],
)
def test_settings_of_the_exchange_are_checked_before_workers_start(
    launched, tmp_path, word, problem
):
    workers = ("topology.workers=2", "topology.device=cpu")
    result = run(word, "topology.exchange=all_gather", *workers)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"mtrain: {word}: {problem}")
    assert len(result.stderr.splitlines()) == 1
    assert not launched
    assert not list(tmp_path.iterdir())


def test_what_depends_on_the_memory_of_a_gpu_is_left_to_the_workers(launched, monkeypatch):
    monkeypatch.setattr(environment, "_visible_gpus", lambda: 2)
    assert run("topology.circulates=queries").exit_code == 7
    assert len(launched) == 1


def test_resume_of_an_unknown_run_names_the_nearest(launched):
    assert "there are no runs in runs/" in run("--resume", "first").stderr
    run("seq=256", "topology.device=cpu", "run.name=first")
    assert "did you mean first?" in run("--resume", "frist").stderr
    result = run("--resume", "zzz")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "zzz: no such run; allowed: first, or a folder with a resolved.yaml" in result.stderr
    assert len(launched) == 1


def test_a_run_to_resume_may_be_in_the_home_folder(launched, tmp_path, monkeypatch):
    run("seq=256", "topology.device=cpu", "run.name=first")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert run("--resume", "~/runs/first").exit_code == 7
    (_, resumed) = launched
    assert resumed[0].path == tmp_path / "runs" / "first"


def test_a_resume_to_fewer_steps_is_refused_and_changes_nothing(launched):
    run("seq=256", "topology.device=cpu", "run.name=first")
    before = Path("runs/first/resolved.yaml").read_text()
    checkpoint = Path("runs/first/checkpoints/step-15")
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").touch()
    result = run("--resume", "first", "train.steps=4")
    assert (result.exit_code, result.stderr) == (
        2,
        "mtrain: train.steps=4: the run is already at step 15. Give more than 15.\n",
    )
    assert Path("runs/first/resolved.yaml").read_text() == before
    assert len(launched) == 1
    assert run("--resume", "first", "train.steps=15").exit_code == 7


def test_config_dir_adds_own_options(tmp_path):
    folder = tmp_path / "conf/model"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text("defaults: [tiny]\nname: mine\n")
    result = run("model=mine", "--config-dir", "conf", "--cfg")
    assert yaml.safe_load(result.stdout)["model"]["name"] == "mine"
    assert run("model=mine", "--cfg").exit_code == 2


def test_resume_auto_starts_a_run_and_then_resumes_it(launched):
    line = ("seq=256", "topology.device=cpu", "run.name=night", "--resume", "auto")
    assert run(*line).exit_code == 7
    again = run(*line)  # the run was lost before its first checkpoint
    assert again.stderr == (
        f"mtrain: warning: {Path('runs/night').absolute()}: has no checkpoint yet; the run starts "
        "again from step 0\n"
    )
    checkpoint = Path("runs/night/checkpoints/step-2")
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").touch()
    assert run(*line).stderr == ""
    assert {call[0].path for call in launched} == {Path("runs/night").absolute()}
    assert [call[2] for call in launched] == [False, False, True]
    assert Path("runs/night/overrides.txt").read_text().count("seq=256") == 1, (
        "the same words are not added again"
    )
    refused = run("--resume", "auto", "seq=256")
    line = (
        "mtrain: --resume auto: needs run.name=NAME or run.dir=DIR, so that the same command line "
        "finds its run again\n"
    )
    assert (refused.exit_code, refused.stderr) == (2, line)


@pytest.mark.parametrize(
    ("words", "callbacks"),
    [
        ([], []),
        (["profile.every=2"], [TrainingProfile]),
        (["train.eval_tasks=[niah]"], [TaskEvaluations]),
    ],
)
def test_callbacks_follow_the_settings(monkeypatch, words, callbacks):
    seen = []
    monkeypatch.setattr(loop, "train", lambda *given: seen.append(given) or True)
    config = compose(words)
    environment = SimpleNamespace(device="cpu", rank=0)
    assert train.run_worker(config, "run", environment, resume=False)
    assert seen == [(config, "run", environment, False, callbacks, None)]
