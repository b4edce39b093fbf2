"""Where results say they come from."""

from __future__ import annotations

import subprocess

import pytest

from maple.runs.provenance import describe_hardware, find_commit


@pytest.fixture
def checkout(tmp_path):
    """A repository with one tracked file."""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    (tmp_path / "module.py").write_text("")
    for arguments in (["init", "-q"], ["add", "module.py"], ["commit", "-q", "-m", "Start"]):
        subprocess.run([*git, *arguments], check=True)
    return tmp_path


def test_the_commit_of_a_checkout(checkout):
    asked = subprocess.run(["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True)
    found = find_commit(checkout / "module.py")
    assert found is not None and asked.stdout.startswith(found)


def test_files_that_a_checkout_does_not_track_have_no_commit(checkout):
    """Such as the package, installed in an environment inside somebody's repository."""
    (checkout / "installed.py").write_text("")
    assert find_commit(checkout / "installed.py") is None


def test_no_checkout(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert find_commit(tmp_path / "module.py") is None


def test_no_git(checkout, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert find_commit(checkout / "module.py") is None


def test_hardware_names_the_cores():
    assert "cores" in describe_hardware()
