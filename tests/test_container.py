"""The container image and the compose file name what exists, and are strict."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import numpy as np
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from maple.deploy.serve.metrics import ServeMetrics

ROOT = Path(__file__).parents[1]
in_repository = pytest.mark.skipif(
    not (ROOT / "Dockerfile").exists(), reason="containers are not part of a source distribution"
)


@in_repository
def test_the_dockerfile_names_what_exists():
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    steps = [line.split(maxsplit=1) for line in text.splitlines() if line.strip() and not line.startswith("#")]
    named = [word for step, rest in steps if step == "COPY" and "--from" not in rest for word in rest.split()[:-1]]
    assert named and all((ROOT / name).exists() for name in named)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (wanted,) = re.findall(r"\.\[([\w,]+)\]", text)
    assert set(wanted.split(",")) <= set(extras) and not any("torch" in name for name in wanted.split(","))
    assert not any("torch" in package for name in wanted.split(",") for package in extras[name])
    users = [rest for step, rest in steps if step == "USER"]
    assert users and users[-1].split(":")[0] not in ("root", "0")
    assert any(step == "HEALTHCHECK" for step, _ in steps)


@in_repository
def test_the_compose_file_is_strict_and_its_files_exist():
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    assert set(services) == {"maple", "prometheus"}
    for service in services.values():
        assert service["read_only"] is True and service["cap_drop"] == ["ALL"]
        assert "no-new-privileges:true" in service["security_opt"]
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
    files = [volume.split(":")[0] for volume in services["prometheus"]["volumes"] if volume.startswith("./")]
    assert files and all((ROOT / name).exists() for name in files)
    jobs = yaml.safe_load((ROOT / "deploy" / "prometheus.yml").read_text())["scrape_configs"]
    assert jobs[0]["static_configs"][0]["targets"] == ["maple:8000"]


@in_repository
def test_alerts_are_about_metrics_that_the_service_has():
    config = yaml.safe_load((ROOT / "deploy" / "prometheus.yml").read_text())
    mounted = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["prometheus"]["volumes"]
    assert {volume.split(":")[1] for volume in mounted} >= set(config["rule_files"])
    (group,) = yaml.safe_load((ROOT / "deploy" / "alerts.yml").read_text())["groups"]
    text = ServeMetrics(np.arange(100.0), lambda: 0).to_text().decode()
    known = {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}
    known |= {f"{name}{end}" for name in re.findall(r"# TYPE (\w+) ", text) for end in ("", "_total", "_bucket")}
    for rule in group["rules"]:
        named = re.findall(r"\bmaple_\w+", rule["expr"])
        assert rule["annotations"]["summary"] and set(named) <= known, rule["alert"]
        assert named or "up{" in rule["expr"]
