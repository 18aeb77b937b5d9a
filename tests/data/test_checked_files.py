"""Errors of reading files become one line."""

import errno
import json

import pytest

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.data.checked_files import explain_read_errors, read_metadata, require_folder
from mtrain_cli.launch.failures import RunError


def test_a_missing_file_has_its_own_message(tmp_path):
    with pytest.raises(ConfigError, match=r"^give one$"), explain_read_errors("x:", "give one"):
        (tmp_path / "missing").read_text()
    no_file = pytest.raises(ConfigError, match=r"^x: cannot be read \(No such file")
    with no_file, explain_read_errors("x:"):
        (tmp_path / "missing").read_text()


def test_a_failing_disk_is_not_the_users_mistake():
    with pytest.raises(RunError, match=r"^x: cannot be read"), explain_read_errors("x:"):
        raise OSError(errno.EIO, "Input/output error")
    with pytest.raises(ConfigError, match=r"Permission denied"), explain_read_errors("x:"):
        raise PermissionError(errno.EACCES, "Permission denied")


def test_a_file_in_place_of_a_folder_is_refused(tmp_path):
    require_folder(tmp_path, "data.path=x", "of text")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"^data.path=x: is not a folder. Give a folder of t"):
        require_folder(tmp_path / "file", "data.path=x", "of text")
    with pytest.raises(ConfigError, match=r"no such folder"):
        require_folder(tmp_path / "none", "data.path=x", "of text")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "o: no m.json in it. Give a store."),
        ("{", "o: m.json is not JSON"),
        ('{"version": 3}', "o: m.json has version 3, but mtrain reads version 2. Give a store."),
    ],
)
def test_metadata_of_another_version_or_format_is_refused(tmp_path, content, message):
    file = tmp_path / "m.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError) as caught:
        read_metadata(file, "o", 2, "Give a store.")
    assert str(caught.value).startswith(message)
    file.write_text(json.dumps({"version": 2, "a": 1}))
    assert read_metadata(file, "o", 2, "Give a store.") == {"version": 2, "a": 1}
