"""What a Ray application is to run: the fields, what is refused, and the config file of the examples. Needs no Ray."""

from __future__ import annotations

import ast
import socket
from pathlib import Path

import pytest
import yaml
from ninfer_cli.server.settings import ServerSettings
from ray_ninfer.plan import Plan, check_address

from ninfer_core import Engine
from ninfer_core.engine import engine_options
from ninfer_core.errors import InvalidRequestError, ServerUnreachableError

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ({"replicas": 0}, "at least 1, or auto; not 0"),
        ({"replicas": "many"}, "not 'many'"),
        ({"replicas": "2"}, "not '2'"),
        ({"replica": 2}, "args has replica; it knows drain, fronts, "),
        ({"settings": {"slot": 2}}, "settings has slot; it knows api_keys, "),
        ({"settings": {"slots": 0}}, "slots must be above 0, not 0"),
        ({"settings": {"stored_responses": 5}}, "store_responses is 5"),
        ({"max_replicas": 0}, "max_replicas must be a number of at least 1, not 0"),
        ({"fronts": "two"}, "fronts must be a number of at least 1, not 'two'"),
        ({"drain": -1}, "drain must be a number of at least 0, not -1"),
        ({"grow_after": None}, "grow_after must be a number of at least 0, not None"),
        ({"health_period": 0}, "health_period must be a number of above 0, not 0"),
        ({"settings": {"host": "0.0.0.0"}}, "without an API key"),
    ],
)
def test_a_wrong_plan_is_refused(args: dict, text: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        Plan.of(args)
    assert text in str(raised.value)


def test_the_engines_follow_the_servers_settings_unless_told_otherwise() -> None:
    plan = Plan.of(
        {"settings": {"slots": 2, "api_keys": ["k"], "metrics_compat": ["vllm"]}, "options": {"device": "cpu"}}
    )
    assert plan.options == {"max_sequences": 2, "max_queue": plan.settings.max_queue, "device": "cpu"}
    assert plan.settings == ServerSettings(slots=2, api_keys=("k",), metrics_compat=frozenset({"vllm"}))
    assert Plan.of({"options": {"max_sequences": 1}}).options["max_sequences"] == 1


def test_the_example_config_is_one_that_loads() -> None:
    config = yaml.safe_load((ROOT / "examples" / "ray_serve.yaml").read_text())
    (application,) = config["applications"]
    module, _, function = application["import_path"].partition(":")
    tree = ast.parse((ROOT / "integrations" / (module.replace(".", "/") + ".py")).read_text())
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    plan = Plan.of(application["args"])
    assert plan.replicas == "auto" and plan.settings.slots == 4
    with Engine(engine_options(plan.model, plan.options)) as engine:  # the options are an engine's
        assert engine.health()["status"] == "ok"
    assert set(config["http_options"]) == {"host", "port"}


@pytest.mark.parametrize("form", ["127.0.0.1:{}", "ray://127.0.0.1:{}"])
def test_an_address_where_nobody_listens_is_said_at_once(form: str) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))  # bound, so that nobody else takes it, but it does not listen
        address = form.format(listener.getsockname()[1])
        with pytest.raises(ServerUnreachableError) as raised:
            check_address(address)
        assert f"RAY_ADDRESS={address} does not answer" in str(raised.value)
        assert "ray start --head" in str(raised.value)
        listener.listen()
        check_address(address)


@pytest.mark.parametrize("address", ["", "auto", "local", "nonsense"])
def test_other_addresses_are_rays_to_judge(address: str) -> None:
    check_address(address)
