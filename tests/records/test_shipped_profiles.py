from pathlib import Path

from mtrain_cli import resource_dir
from mtrain_cli.config.suggest import find_shipped, shipped_with

SHIPPED = resource_dir("profiles")


def test_a_name_finds_what_ships(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_shipped(Path("real-512k-4xh200")) == SHIPPED / "real-512k-4xh200"
    assert find_shipped(Path("kernels-h200")) == SHIPPED / "kernels-h200.json"
    assert find_shipped(Path("kernels-h200.json")) == SHIPPED / "kernels-h200.json"
    assert find_shipped(Path("nothing")) == Path("nothing")


def test_a_path_of_the_user_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("real-512k-4xh200").mkdir()
    assert find_shipped(Path("real-512k-4xh200")) == Path("real-512k-4xh200")
    assert find_shipped(tmp_path / "kernels-h200") == tmp_path / "kernels-h200"


def test_names_are_listed_by_the_file_that_they_hold():
    assert "real-512k-4xh200" in shipped_with("*/index.npz")
    assert all((SHIPPED / name / "index.npz").is_file() for name in shipped_with("*/index.npz"))
