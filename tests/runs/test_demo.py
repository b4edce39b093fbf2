"""``maple demo``: it replaces only demos."""

from __future__ import annotations

from commands import contents, interrupt, run


def test_demo_replaces_only_demos(finished, tmp_path, monkeypatch, capsys):
    before = contents(finished)
    assert run("demo", "--out", finished) == 2
    assert str(finished) in capsys.readouterr().err
    assert contents(finished) == before
    requests = []

    def record(request):
        requests.append(request)
        interrupt()

    monkeypatch.setattr("maple.runs.demo.train_run", record)
    (tmp_path / "config.toml").write_text('[origin]\nformat = 2\ncommand = "maple demo"\n')
    for folder in (tmp_path, tmp_path / "new"):
        run("demo", "--out", folder)
    assert [request.overwrite for request in requests] == [True, False]
