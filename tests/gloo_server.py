"""Do once what every process of `gloo.run` and `warm.run` would do.

That is: import, compose configurations, and read the sources of Python's library. The server from
which the processes are forked imports this module. Test modules import pytest, optimizers import
torch._dynamo, and records import pandas.
"""

import atexit
import contextlib
import functools
import gc
import os
import types

import pandas  # noqa: F401
import pytest  # noqa: F401
import torch._dynamo
import torch.distributed.fsdp  # noqa: F401

import mtrain_cli.commands.app
import mtrain_cli.launch.local
import mtrain_cli.launch.worker
import mtrain_cli.training.loop  # noqa: F401
from mtrain_cli.composition.compose import compose
from mtrain_cli.data import kinds
from mtrain_cli.training import trainer

with contextlib.suppress(ImportError):  # a machine for GPU tests may lack them
    import peft  # noqa: F401
    import transformers.models.qwen2.modeling_qwen2  # noqa: F401
if os.environ.get("TRITON_INTERPRET") == "1":
    with contextlib.suppress(ImportError):
        import triton_interpreter

        triton_interpreter.remember_types()
for words in [], ["sparsity=vertical_slash"], ["sparsity=fixed"], ["sparsity=block_topk"]:
    compose(words)
kinds.stdlib_corpus = functools.cache(kinds.stdlib_corpus)
kinds.stdlib_corpus()
# The collection after a first step would visit, and so copy, all objects of the server.
trainer.gc = types.SimpleNamespace(
    collect=lambda: 0, freeze=lambda: gc.freeze(), unfreeze=lambda: gc.unfreeze()
)
# A process need not visit the objects of the server in each of its garbage collections.
gc.collect()
gc.freeze()
# Exit without finalization, in which Triton's library would print what it leaks.
atexit.register(os._exit, 0)
