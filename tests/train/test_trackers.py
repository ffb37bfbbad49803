import sys
import types

import pytest

from switchhead.errors import RunError
from switchhead.train import train


class Service(types.ModuleType):
    """Stands for wandb or trackio: records what it is told."""

    def __init__(self):
        super().__init__("service")
        self.calls = []

    def init(self, **settings):
        self.calls.append(("init", settings))

    def log(self, values, *, step):
        self.calls.append(("log", step, values))

    def finish(self):
        self.calls.append(("finish",))


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_service_is_told_what_the_run_measures_and_goes_on_with_it(name, settings, monkeypatch):
    service = Service()
    monkeypatch.setitem(sys.modules, name, service)
    train(**settings, tracker=name)
    kind, started = service.calls[0]
    assert (kind, service.calls[-1]) == ("init", ("finish",))
    assert (started["project"], started["name"], started["resume"]) == ("switchhead", "run", "allow")
    assert started["config"]["training"]["steps"] == 6
    steps = [call[1] for call in service.calls if call[0] == "log"]
    assert steps == [1, 2, 3, 3, 4, 5, 6, 6]  # validations after 3 and 6
    assert all(isinstance(value, float) for call in service.calls if call[0] == "log" for value in call[2].values())
    service.calls.clear()
    train(**settings, resume=True, tracker=name)
    assert service.calls[0][1] == started


def test_a_service_that_is_not_installed_is_named(settings, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(RunError, match=r"--tracker wandb needs the package 'wandb': pip install wandb"):
        train(**settings, tracker="wandb")
    assert not settings["out"].exists()


def test_a_service_that_does_not_start_ends_the_run_with_one_error(settings, monkeypatch):
    service = Service()
    service.init = lambda **settings: 1 / 0
    monkeypatch.setitem(sys.modules, "trackio", service)
    with pytest.raises(RunError, match=r"trackio did not start: division by zero"):
        train(**settings, tracker="trackio")


def test_a_service_that_fails_on_the_way_is_told_no_more_and_the_run_goes_on(settings, monkeypatch, caplog):
    service = Service()

    def fail(values, *, step):
        service.calls.append(("log", step))
        raise ConnectionError("no network")

    service.log = fail
    monkeypatch.setitem(sys.modules, "trackio", service)
    assert train(**settings, tracker="trackio").finished
    assert service.calls[1:] == [("log", 1)]
    assert "trackio failed and is told no more: no network" in caplog.text
