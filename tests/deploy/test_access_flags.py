"""Limits on the command line become fields of RouterConfig and EngineConfig; a bad one is refused in one line."""

import os
from dataclasses import fields

import pytest

from moeyard.cli.commands import build_parser
from moeyard.local.settings import access_config, engine_config, router_fields
from moeyard_router.config import KEY_VARIABLE, RouterConfig


def parse(*flags):
    args = build_parser().parse_args(["serve", "/m", "--workers", "2", *flags])
    return args, engine_config(args)


def test_without_flags_the_fleet_determines_its_limits():
    args, config = parse("--max-num-seqs", "16", "--max-waiting", "4")
    found = router_fields(args, config)
    fleet = {"max_inflight": 2 * (16 + 4), "inflight_per_worker": 16 + 4, "worker_places": 16}
    assert found == {**found, **fleet, "max_queue_seconds": None}
    defaults = {field.name: field.default for field in fields(RouterConfig)}
    assert {name for name in found if found[name] != defaults[name]} == fleet.keys()
    assert config.max_queue_seconds is None


def test_flags():
    args, config = parse(
        *(
            "--max-inflight",
            "7",
            "--max-waiting-tokens",
            "5000",
            "--max-queue-seconds",
            "2.5",
            "--intake-processes",
            "1",
        ),
        *("--max-body-bytes", "1MiB", "--max-buffered-bytes", "4MiB", "--max-header-bytes", "8KiB"),
        *("--header-timeout", "3", "--body-timeout", "4.5", "--keep-alive-timeout", "6"),
        *("--send-timeout", "7"),
    )
    found = router_fields(args, config)
    assert found == {
        **found,
        "max_inflight": 7,
        "max_waiting_tokens": 5000,
        "max_body_bytes": 2**20,
        "max_buffered_bytes": 2**22,
        "max_header_bytes": 8192,
        "header_timeout": 3.0,
        "body_timeout": 4.5,
        "keep_alive_timeout": 6.0,
        "intake_processes": 1,
        "send_timeout": 7.0,
        "max_queue_seconds": 2.5,
        "worker_places": config.max_num_seqs,
        "inflight_per_worker": None,
    }
    assert config.max_queue_seconds == 2.5


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--max-inflight", "0"), "'0' is not a whole number of at least 1"),
        (("--max-waiting-tokens", "many"), "'many' is not a whole number"),
        (("--header-timeout", "-1"), "'-1' is not a number of seconds above 0"),
        (("--max-queue-seconds", "nan"), "'nan' is not a number of seconds above 0"),
        (("--max-body-bytes", "big"), "'big' is not a size"),
    ],
)
def test_bad_flags(capsys, flags, message):
    with pytest.raises(SystemExit) as caught:
        parse(*flags)
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_key_is_removed_from_the_environment(monkeypatch):
    """Otherwise every process that the server starts would inherit it."""
    monkeypatch.setenv(KEY_VARIABLE, "sk-secret")
    args, _ = parse()
    assert access_config(args).api_keys == ("sk-secret",)
    assert KEY_VARIABLE not in os.environ


def test_the_api_listens_on_loopback_by_default():
    args, _ = parse()
    assert args.host == "127.0.0.1"
