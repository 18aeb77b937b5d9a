"""What the Triton kernel serves, and why not where it does not."""

import pytest

from mtrain_cli.attention.kernel import IndexRequest, KernelRequest
from mtrain_cli.attention.registry import choose, survey
from mtrain_cli.attention.triton_kernel import TritonKernel
from mtrain_cli.config.schema import ConfigError


def request(**changed) -> KernelRequest:
    default = {
        "device": "cuda", "capability": (8, 0), "dtype": "bfloat16", "head_dim": 128, "num_heads": 16, "num_kv_heads": 2,
        "index": IndexRequest(128, bitmap=False),
    }  # fmt: skip
    return KernelRequest(**{**default, **changed})


def test_it_serves_ampere_and_later_bitwise_repeatable():
    assert TritonKernel().missing(request()) is None
    assert TritonKernel().missing(request(deterministic=True, capability=(9, 0))) is None


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"index": None}, "computes under a dynamic index only"),
        ({"capability": (7, 5)}, "compute capability 8.0"),
        ({"dtype": "float16"}, "computes bfloat16 or float32, not float16"),
        ({"head_dim": 96}, "head_dim 96 is none of 16, 32, 64, 128"),
        ({"head_dim": 256}, "head_dim 256 is none of 16, 32, 64, 128"),
        ({"index": IndexRequest(256, bitmap=True)}, "sparsity.block 256 is none of"),
    ],
)
def test_it_says_what_it_does_not_serve(changed, reason):
    assert reason in TritonKernel().missing(request(**changed))


def test_without_a_gpu_it_needs_the_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert TritonKernel().missing(request(device="cpu", capability=None, dtype="float32")) == "needs a CUDA GPU"


def test_an_index_is_never_computed_densely_on_a_gpu():
    reasons = dict(survey(request(capability=(8, 0))))
    assert reasons["triton"] is None
    assert reasons["sdpa"] == "FlashAttention-2 in PyTorch computes dense attention only"
    kernel, why = choose("auto", request(capability=(8, 0)))
    assert kernel.name == "triton"
    assert "flash4: needs compute capability 9.0" in why
    with pytest.raises(ConfigError, match=r"train\.kernel=sdpa: FlashAttention-2 .* usable here: triton, reference"):
        choose("sdpa", request(capability=(8, 0)))


def test_absent_packages_are_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert TritonKernel().missing(request()).startswith("triton is not installed")
