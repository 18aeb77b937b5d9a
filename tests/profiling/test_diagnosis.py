"""A machine's diagnosis: links are parsed and described, and kernels are compared."""

from mtrain_cli.profiling.diagnosis import (
    DetectedLink,
    KernelState,
    _check_kernel,
    describe_links,
    parse_topology,
)

TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tSYS\tPIX\t0-55,112-167\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tSYS\tNODE\t0-55,112-167\t0\t\tN/A\n"
    "GPU2\tSYS\tSYS\t X \tNODE\t56-111\t1\t\tN/A\n"
    "NIC0\tPIX\tNODE\tNODE\t X \t\t\t\t\n"
    "\nLegend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe as well as the SMP "
    "interconnect between NUMA nodes\n"
)


def test_the_nvidia_smi_topology_matrix_is_parsed():
    links = parse_topology(TOPOLOGY)
    assert len(links) == 6
    assert {(link.a, link.b): link.kind for link in links} == {
        **{
            (0, 1): "NV18",
            (1, 0): "NV18",
            (0, 2): "SYS",
            (2, 0): "SYS",
            (1, 2): "SYS",
            (2, 1): "SYS",
        }
    }


def test_links_are_described_and_grouped():
    assert describe_links(parse_topology(TOPOLOGY)) == [
        "NV18: NVLink, 18 links (0-1)",
        "SYS: PCIe and the link between sockets (0-2, 1-2)",
    ]
    assert describe_links([DetectedLink(0, 1, "NV18"), DetectedLink(1, 0, "NV18")]) == [
        "NV18: NVLink, 18 links (every pair)"
    ]
    assert describe_links([]) == []


def test_a_wrong_kernel_fails_its_check(monkeypatch):
    from mtrain_cli.attention.sdpa import SdpaKernel

    right = SdpaKernel.forward
    monkeypatch.setattr(
        SdpaKernel, "forward", lambda *arguments: tuple(1.001 * part for part in right(*arguments))
    )
    result = _check_kernel(KernelState("sdpa", "cpu", "float32", None))
    assert not result.passed
