"""Run `mtrain` on a GPU that gives each worker only a share of its memory: the first argument."""

from __future__ import annotations

import functools
import os
import sys

VARIABLE = "MEMORY_SHARE"


def train(config, run_dir, environment, resume):
    import torch

    from mtrain_cli.training import loop

    torch.cuda.set_per_process_memory_fraction(float(os.environ[VARIABLE]))
    return loop.train(config, run_dir, environment, resume)


if __name__ == "__main__":
    os.environ[VARIABLE] = sys.argv.pop(1)
    from mtrain_cli import __main__
    from mtrain_cli.launch import local

    local.launch = functools.partial(local.launch, target="full_memory:train")
    __main__.main()
