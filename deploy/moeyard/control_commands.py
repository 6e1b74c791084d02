"""The commands of the control door."""

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from moeyard.control import Command, ControlDoor, refused_as_text
from moeyard.options import CHANGEABLE, with_flags
from moeyard.upkeep import Refused, Say, Upkeep
from moeyard_worker.config.engine_config import EngineConfig

log = logging.getLogger(__name__)


def commands(upkeep: Upkeep, config: EngineConfig) -> dict[str, Command]:
    """By name; what else a server is told to do while it runs finds its place here."""

    def drain(fields: Mapping[str, Any], say: Say) -> str:
        with refused_as_text():
            rank, seconds = int(fields["rank"]), float(fields["seconds"])
        return upkeep.drain(rank, seconds=seconds, say=say)

    def undrain(fields: Mapping[str, Any], say: Say) -> str:
        with refused_as_text():
            rank = int(fields["rank"])
        return upkeep.undrain(rank)

    def restart(fields: Mapping[str, Any], say: Say) -> str:
        with refused_as_text():
            ranks, seconds = [int(rank) for rank in fields["ranks"]], float(fields["seconds"])
            changes = check_changes(config, fields["changes"])
        return upkeep.restart(ranks, seconds=seconds, changes=changes, say=say)

    def scale(fields: Mapping[str, Any], say: Say) -> str:
        with refused_as_text():
            size, seconds = int(fields["size"]), float(fields["seconds"])
        return upkeep.scale(size, seconds=seconds, say=say)

    return {"drain": drain, "undrain": undrain, "restart": restart, "scale": scale}


def check_changes(config: EngineConfig, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The fields in which a rank is to differ; raises Refused for those that must be alike and for impossible ones."""
    alike = sorted(changes.keys() - set(CHANGEABLE))
    if alike:
        raise Refused(f"{', '.join(alike)} must be the same on all ranks: restart the server", 2)
    try:
        dataclasses.replace(config, expert_memory=None, **changes)
    except ValueError as error:
        raise Refused(with_flags(str(error)), 2) from error
    return dict(changes)


def open_door(port: int, known: Mapping[str, Command]) -> ControlDoor | None:
    """The door of the server at `port`; without one it serves as well, and says so."""
    try:
        return ControlDoor(port, known)
    except (OSError, ValueError) as error:
        log.warning("no control door, so `moeyard drain` and `moeyard restart` do not find this server: %s", error)
        return None
