import json

import pytest
import torch

from switchhead import cli, doctor


@pytest.fixture(scope="module")
def report():
    return doctor.examine()


def test_versions_are_those_installed(report):
    assert report.packages["torch"] == torch.__version__
    assert all(name in report.packages for name in doctor.OPTIONAL_PACKAGES)


def test_the_cpu_comes_first_and_every_kind_of_device_has_its_choices(report):
    assert report.devices[0].name == "cpu"
    kinds = {device.name.split(":")[0] for device in report.devices}
    wanted = {
        (operation, kind, dtype)
        for operation in ("expert projections", "causal attention")
        for kind in kinds
        for dtype in ("float32", "bfloat16")
    }
    assert {(c.operation, c.device, c.dtype) for c in report.backends} == wanted
    assert all(c.backend and c.reason for c in report.backends)


def test_missing_packages_are_told_with_their_purpose(report, monkeypatch):
    missing = {name: None if name == "matplotlib" else version for name, version in report.packages.items()}
    text = doctor.render(doctor.Report(**{**vars(report), "packages": missing, "compiler": None}))
    assert "not installed; needed for: plots" in text
    assert "install g++" in text


def test_the_command_prints_the_report(capsys, report):
    assert cli.main(["doctor"]) == 0
    assert capsys.readouterr().out.strip() == doctor.render(report)
    assert cli.main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["packages"] == report.packages
