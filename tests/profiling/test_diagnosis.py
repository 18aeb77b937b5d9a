"""A machine's diagnosis compares kernels."""

from mtrain_cli.profiling.diagnosis import KernelState, _check_kernel


def test_a_wrong_kernel_fails_its_check(monkeypatch):
    from mtrain_cli.attention.sdpa import SdpaKernel

    right = SdpaKernel.forward
    monkeypatch.setattr(
        SdpaKernel, "forward", lambda *arguments: tuple(1.001 * part for part in right(*arguments))
    )
    result = _check_kernel(KernelState("sdpa", "cpu", "float32", None))
    assert not result.passed
