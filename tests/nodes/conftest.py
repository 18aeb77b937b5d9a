import pytest

from nodes import bytes_table, node_network


@pytest.fixture(scope="session", autouse=True)
def _namespaces():
    if (reason := node_network.why_not()) is not None:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """Return the setting that names a text."""
    return bytes_table.write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="session")
def alone(text, tmp_path_factory):
    """Return the losses of one process."""
    return bytes_table.one_process(text, tmp_path_factory.mktemp("alone"))
