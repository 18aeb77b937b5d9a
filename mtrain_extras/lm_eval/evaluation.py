"""What mtrain needs of this package: the evaluation ``lm-eval`` of `mtrain.evaluations`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from mtrain_cli import install_command
from mtrain_cli.config.schema import ConfigError

if TYPE_CHECKING:
    from lm_eval.api.model import LM

    from mtrain_cli.evaluation.request import EvaluationRequest
    from mtrain_cli.evaluation.results import Result
    from mtrain_cli.inference.engine import Engine
    from mtrain_cli.inference.model_source import ModelSource
    from mtrain_cli.inference.text import TextCodec
    from mtrain_cli.reporting.table import Table
    from mtrain_extras.lm_eval.runner import HarnessRunner
    from mtrain_extras.lm_eval.tasks import HarnessTasks


class LmEval:
    """The tasks of lm-eval."""

    def check(
        self, request: EvaluationRequest, source: ModelSource, *, beyond: bool
    ) -> HarnessTasks:
        """Load the tasks and check their requests. Raises ConfigError if one cannot be served."""
        from mtrain_cli.inference.limits import require_hidden_labels
        from mtrain_cli.inference.text import open_codec
        from mtrain_extras.lm_eval.requests import Plan
        from mtrain_extras.lm_eval.runner import load_tasks

        codec = open_codec(source, request.tokenizer)
        _ = codec.required  # refuses a model without a tokenizer
        require_hidden_labels(source.config, "this evaluation")
        tasks = load_tasks(request)
        tasks.plan(codec, Plan.of(source, beyond=beyond))
        return tasks

    def runner(self, *arguments: Any, **more: Any) -> HarnessRunner:
        from mtrain_extras.lm_eval.runner import HarnessRunner

        return HarnessRunner(*arguments, **more)

    def tables(self, results: Sequence[Result]) -> Iterator[Table]:
        from mtrain_extras.lm_eval.tables import lm_eval_tables

        return lm_eval_tables(results)

    def adapter(self, engine: Engine, codec: TextCodec, source: ModelSource, beyond: bool) -> LM:
        """Return an open model for `lm_eval.simple_evaluate`; ConfigError if it cannot serve."""
        try:
            from mtrain_extras.lm_eval.model import HarnessModel
        except ImportError:
            needs = f"lm_eval: needs the package lm-eval: {install_command('lm-eval')}"
            raise ConfigError(needs) from None
        from mtrain_cli.inference.limits import require_hidden_labels
        from mtrain_extras.lm_eval.requests import Plan
        from mtrain_extras.lm_eval.runner import EngineAnswers

        require_hidden_labels(source.config, "lm_eval")
        plan = Plan.of(source, beyond=beyond)
        return HarnessModel(codec, plan.positions, EngineAnswers(engine, codec, plan))


LM_EVAL = LmEval()
