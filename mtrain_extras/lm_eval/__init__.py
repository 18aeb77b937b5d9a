"""`mtrain eval lm-eval` and `Model.lm_eval`: the tasks of lm-evaluation-harness."""
