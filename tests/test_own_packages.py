"""What the packages of this repository import of mtrain, and where a mask is named."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from mtrain_cli.attention.named_masks import NAMED
from mtrain_cli.config.pattern_settings import OWN

ROOT = Path(__file__).parents[1]
# A new line says that a study needs more of mtrain. Prefer what the list has.
IMPORTED = {
    "mtrain_extras/lm_eval": """
        attention.named_masks commands.evaluate commands.options config.documents
        config.mask_settings config.problem config.schema config.suggest data.tokenizers
        evaluation.cost evaluation.request evaluation.results evaluation.runner grouping
        inference.engine inference.limits inference.model_source inference.sampling inference.scorer
        inference.text inference.worker launch.environment parallel.collectives
        reporting.evaluations reporting.table
    """,
    "mtrain_extras/live": """
        commands.status commands.train config.documents config.schema launch launch.run_dir
        launch.run_status printable reporting reporting.html reporting.report_source
        reporting.sections
    """,
    "mtrain_extras/ruler": """
        commands.completion commands.evaluate commands.options config config.documents config.schema
        config.sizes config.suggest console data.checked_files data.corpora data.needles
        data.tokenizers evaluation.measurement evaluation.request evaluation.results
        evaluation.runner grouping inference.engine inference.limits inference.model_source
        inference.sampling inference.scorer inference.text launch.environment reporting.evaluations
        reporting.table
    """,
    "mtrain_extras/chat": """
        config.data_kinds config.schema config.sizes data.checked_files data.corpora
        data.text_files data.token_documents data.tokenizers
    """,
    "mtrain_extras/places": """
        config config.problem config.schema launch launch.job launch.manifest launch.run_dir
        launch.temporary_folders model.huggingface_config printable records.metrics reporting
        reporting.html training.callback training.checkpointer training.evaluation
        training.trainer
    """,
    "mtrain_extras/watch": """
        config config.schema grouping launch launch.environment launch.failure_channel
        launch.failures launch.guarded_streams launch.job launch.progress_record launch.run_dir
        launch.run_status training.trainer
    """,
    "mtrain_extras/mds": """
        commands.data_output config config.data_kinds config.schema console data.checked_files
        data.corpora data.store data.text_files data.token_cache data.tokenizers
    """,
    "mtrain_extras/start": """
        commands.options composition.compose config config.schema config.suggest printable
    """,
    "mtrain_extras/trackers": """
        config config.schema evaluation.results launch.run_dir records.metrics reporting
        training.callback training.evaluation training.trainer
    """,
    "mtrain_extras/masks": """
        attention.mask attention.mask_rule commands.options commands.profile composition.compose
        config.parallel_checks config.schema config.sizes console data.dataset data.labels
        data.open_dataset parallel.cast_rows parallel.dispatch parallel.layout parallel.traffic
        reporting reporting.table reporting.terminal training.batch training.flops
        training.layout_choice
    """,
    "mtrain_extras/bench": """
        attention.index attention.kernel attention.kernel_registry attention.mask
        attention.mask_rule attention.mask_tables attention.named_masks attention.tiles
        commands.completion commands.options commands.profile commands.train composition.compose
        config.cluster config.documents config.mask_settings config.schema config.sizes console
        grouping launch launch.environment launch.failures launch.local launch.temporary_folders
        model.decoder model.parallelize model.rope parallel parallel.collectives
        parallel.context_attention parallel.mesh parallel.profiler_labels parallel.recording
        printable profiling.diagnosis profiling.measurement profiling.record_collector records
        records.expert_loads records.metrics reporting.step_tables reporting.table
        reporting.terminal simulation.calibration simulation.calibration_files
        simulation.non_attention_cost simulation.work_counts sparsity.fixed sparsity.pattern
        training.dry_run training.flops training.hardware training.out_of_memory training.resolution
        training.run_plan training.trainer
    """,
    "mtrain_extras/methods": """
        attention.mask_rule commands.options commands.simulate commands.simulate_output
        commands.simulate_request config.documents config.exchanges config.parallel_checks
        config.schema config.sizes config.validate console parallel.layout reporting.table
        reporting.terminal simulation.scenario training.memory training.run_plan
        training.state_memory
    """,
    "mtrain_extras/validate": """
        commands.completion commands.options commands.simulate commands.simulate_actions
        commands.simulate_request config config.cluster config.documents config.exchanges
        config.schema config.suggest console grouping parallel.exchange_selection parallel.recording
        records records.analysis records.index_file records.record_files reporting.table
        reporting.terminal simulation.calibration simulation.calibration_files simulation.prediction
        simulation.scenario simulation.what_if training.flops training.layout_choice
    """,
    "mtrain_extras/lora": "config.keys config.schema",
    "mtrain_extras/studies/attention": """
        attention.mask attention.partials commands.options config config.documents config.schema
        config.sizes console evaluation.cost model.rope profiling.pattern_quality reporting
        reporting.plots sparsity.pattern sparsity.recall
    """,
}


@pytest.mark.parametrize("package", IMPORTED)
def test_packages_import_only_what_is_listed(package):
    found = set[str]()
    for file in (ROOT / package).glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mtrain_cli."):
                found.add((node.module or "").removeprefix("mtrain_cli."))
            elif isinstance(node, ast.ImportFrom) and node.module == "mtrain_cli.reporting":
                found.add("reporting")
    assert sorted(found) == IMPORTED[package].split()


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("prefix_lm", {"attention/named_masks.py"}),
        ("vertical_slash", {"config/pattern_settings.py", "config/earlier_versions.py"}),
    ],
)
def test_rules_of_a_mask_or_pattern_are_in_its_own_file(name, files):
    """Elsewhere, only examples in the help of commands name it, and what old runs lack."""
    assert name in {**NAMED, **OWN}
    spelled = set()
    for file in (ROOT / "mtrain_cli").rglob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
        helps = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and id(node) not in helps and name in str(node.value):
                spelled.add(file.relative_to(ROOT / "mtrain_cli").as_posix())
    assert spelled == files
