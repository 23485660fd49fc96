"""The commands `trioserve ray up`, `down` and `list` for groups of engines that Ray places on nodes."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from typing import TYPE_CHECKING

import msgspec

from trioserve.commands.option_groups import PLACED_OPTIONS
from trioserve.config import Config, config_from
from trioserve.contracts.errors import StartupError
from trioserve.proxy.discovery.ray import check_ray_is_installed

if TYPE_CHECKING:
    from trioserve.ray_engines import GroupPlan

__all__ = ["plan_of", "run_ray"]


def run_ray(arguments: argparse.Namespace) -> int:
    """Run `trioserve ray up`, `down` or `list`.

    Args:
        arguments: arguments of the command line.

    Returns:
        Exit code of the program.

    Raises:
        StartupError: Ray is not installed, cannot be reached, or refuses the action.
    """
    check_ray_is_installed()
    if arguments.action == "up":
        return _up(arguments)
    return _down(arguments) if arguments.action == "down" else _list(arguments)


def plan_of(arguments: argparse.Namespace) -> tuple[GroupPlan, Config]:
    """Return the plan of the group for Ray, and the options of each engine.

    Args:
        arguments: arguments of `trioserve ray up`.

    Raises:
        StartupError: an option is wrong.
    """
    from trioserve.ray_engines import GroupPlan

    # Keep only the options of engines, because environment variables may also set options of a router on this machine.
    given = config_from(arguments, kind=Config)
    config = Config(**{name: getattr(given, name) for name in PLACED_OPTIONS})
    ranks = float(config.rank_count)
    cpus = ranks if arguments.num_cpus is None else arguments.num_cpus
    gpus = arguments.num_gpus
    if gpus is None:
        gpus = ranks if config.device == "cuda" else 0.0
    if config.threads is None and not gpus:
        # Ray does not limit the CPUs that an actor really uses, so the engine must limit its threads.
        config = dataclasses.replace(config, threads=max(1, int(cpus)))
    plan = GroupPlan(
        name=arguments.name, replicas=arguments.replicas, cpus=cpus, gpus=gpus, placement=arguments.placement
    )
    return plan, config


def _up(arguments: argparse.Namespace) -> int:
    from trioserve.ray_engines import connected, engines_in_words, start_engines

    plan, config = plan_of(arguments)
    with connected(_address(arguments)):
        urls = start_engines(plan, config, seconds_max=arguments.timeout, report=_tell)
    _tell(f"{plan.name} has {engines_in_words(len(urls))}. To use them: trioserve route --endpoints-ray {plan.name}")
    return 0


def _down(arguments: argparse.Namespace) -> int:
    from trioserve.ray_engines import connected, engines_in_words, stop_engines

    with connected(_address(arguments)):
        count = stop_engines(arguments.name, seconds_max=arguments.timeout)
    if count is None:
        raise StartupError(f'there is no group "{arguments.name}" in this cluster: `trioserve ray list` shows all')
    _tell(f"ended: {engines_in_words(count)} of {arguments.name}")
    return 0


def _list(arguments: argparse.Namespace) -> int:
    from trioserve.ray_engines import connected, engine_states, groups

    with connected(_address(arguments)):
        states = {name: state for group in groups() for name, state in engine_states(group).items()}
    if arguments.json:
        rows = [
            {"name": name, "url": state and state.url, "node": state and state.node, "failure": state and state.failure}
            for name, state in states.items()
        ]
        print(msgspec.json.encode({"data": rows}).decode())
        return 0
    for name, state in states.items():
        if state is None:
            print(f"{name}  is not placed, or does not answer")
        else:
            print(f"{name}  {state.url or state.failure or 'is starting, or stops'}  on {state.node}")
    if not states:
        print("Ray has placed no group")
    return 0


def _address(arguments: argparse.Namespace) -> str | None:
    address: str | None = arguments.ray_address or os.environ.get("TRIOSERVE_RAY_ADDRESS")
    return address


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
