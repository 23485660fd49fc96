"""Parses the command line. Each command imports its modules only when it runs."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from trioserve import __version__
from trioserve.commands.option_groups import (
    CHECK_OPTIONS,
    GROUPS,
    PLACED_OPTIONS,
    TERMINAL_OPTIONS,
    Parser,
    without_vllm_flags,
)
from trioserve.commands.program_end import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    STANDBY_COMMAND,
    end_program,
    hang_up_as_before,
    limit_message,
    prepare_program,
)
from trioserve.config import Config, add_arguments, config_from
from trioserve.contracts.errors import StartupError, TrioserveError
from trioserve.model.loading.default_model import DOWNLOAD_THREAD, start_reading_ahead
from trioserve.options.router import RouterOptions

__all__ = ["main", "run_program"]


SERVING_COMMANDS = ("serve", "scripted", "route", "disagg", STANDBY_COMMAND)

WELCOME = """\
Common uses of trioserve:

  trioserve serve            serve the bundled model at http://127.0.0.1:8000, as OpenAI's API; or: serve MODEL
  trioserve chat             chat with it here, in the terminal
  trioserve route --endpoint http://10.0.0.7:8000
                             put one queue before several servers

`trioserve --help` lists all commands, `trioserve doctor` shows what this machine supports."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Errors that a user can correct appear as one sentence on stderr, without a traceback.

    Args:
        argv: arguments without the program's name. None uses the arguments of the process.

    Returns:
        Exit code of the program.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments:
        print(WELCOME)
        return 0
    if arguments[0].startswith("-") and arguments[0] not in ("-h", "--help", "--version"):
        arguments.insert(0, "serve")
    if arguments[0] not in SERVING_COMMANDS:
        hang_up_as_before()
    run: Callable[[], int]
    if arguments[0] == "bench":  # The import of this parser takes long, and no other command needs the parser.
        run = functools.partial(_bench, arguments[1:])
    elif arguments[0] == STANDBY_COMMAND:
        run = _run_later
    else:
        run = functools.partial(_run_parsed, arguments)
    try:
        return run()
    except TrioserveError as error:
        print(f"trioserve: {error}", file=sys.stderr)
        return EXIT_FAILED
    except BrokenPipeError:  # The program that reads the output has closed the pipe.
        return EXIT_FAILED
    except KeyboardInterrupt:  # Ctrl-C came when the command's own signal handling was not active.
        return EXIT_INTERRUPTED
    except BaseException as error:
        message = limit_message(error)
        if message is None:
            raise
        print(f"trioserve: {message}", file=sys.stderr)
        return EXIT_FAILED


def _run_parsed(arguments: list[str]) -> int:
    if arguments[0] in ("serve", "scripted"):
        arguments = without_vllm_flags(arguments)
    parser, commands = _parser()
    parsed = parser.parse_args(arguments)
    return commands[parsed.command](parsed)


def _run_later() -> int:
    """Import the modules of a server, then read the arguments of a command from standard input, and run it.

    The arguments are a list in JSON. If there is none, the program that started this one has ended, and so does this
    one.
    """
    from trioserve.commands.serve import import_modules

    import_modules()
    given = sys.stdin.buffer.read()
    return _run_parsed(msgspec.json.decode(given, type=list[str])) if given else 0


def run_program() -> None:
    """Run `main`, and end the process with its exit code."""
    prepare_program()
    exit_code = main()
    if any(thread.name == DOWNLOAD_THREAD for thread in threading.enumerate()):
        # The command no longer needs the download, but Python would wait for the download threads until all files are
        # complete. The next attempt resumes from the files on disk.
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(exit_code)
    end_program(exit_code)


def _parser() -> tuple[argparse.ArgumentParser, dict[str, Callable[[argparse.Namespace], int]]]:
    program = "trioserve" if Path(sys.argv[0]).name == "trioserve" else "python -m trioserve"
    parser = Parser(
        prog=program,
        description="An LLM serving engine that can be trusted to stop. Flags without a command: serve.",
        epilog=f"'{program} COMMAND --help' shows a command's options; those of the server: serve --help.",
    )
    parser.add_argument("--version", action="version", version=f"trioserve {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    serve = subparsers.add_parser("serve", help="serve a model over HTTP, OpenAI-compatible")
    serve.add_argument("served", nargs="?", metavar="MODEL", help="the same as --model (default: smollm2)")
    add_arguments(serve, groups=GROUPS)

    scripted = subparsers.add_parser("scripted", help="serve a model that answers from a script, for tests of clients")
    _add_scripted(scripted)

    route = subparsers.add_parser("route", help="route requests to other servers; needs no model")
    add_arguments(route, RouterOptions, groups=GROUPS)

    disagg = subparsers.add_parser(
        "disagg", help="a router, a prefill server and a decode server on this machine, as one program"
    )
    _add_disagg(disagg)

    generate = subparsers.add_parser("generate", help="answer one prompt in the terminal, token by token")
    generate.add_argument("prompt", help="the prompt; - reads it from standard input")
    generate.add_argument(
        "--raw", action="store_true", help="continue the text as it is, without the chat template (default: off)"
    )
    _add_sampling(generate)
    add_arguments(generate, only=TERMINAL_OPTIONS, groups=GROUPS)

    chat = subparsers.add_parser("chat", help="chat with a model in the terminal")
    chat.add_argument("--system", metavar="TEXT", help="system message (default: the chat template's)")
    chat.add_argument(
        "--url", metavar="URL", help="a running server with OpenAI's API that answers (default: none, a model here)"
    )
    chat.add_argument("--api-key", metavar="KEY", help="for --url (default: TRIOSERVE_API_KEY)")
    _add_sampling(chat)
    add_arguments(chat, only=TERMINAL_OPTIONS, groups=GROUPS)

    pull = subparsers.add_parser("pull", help="download a model before the first start")
    pull.add_argument("model", metavar="NAME", help="smollm2, or a name of the hub like org/name")
    pull.add_argument("--revision", metavar="NAME", help="branch, tag or commit at the hub (default: the main branch)")

    models = subparsers.add_parser("models", help="list the models on this machine, or check whether a model runs")
    models.add_argument("--json", action="store_true", help="for scripts (default: off)")
    models.add_argument(
        "--check",
        metavar="NAME",
        help="say whether a model runs here, by which kernels, in how much memory, and what prevents it, without "
        "loading weights: a path, smollm2, or a name of the hub like org/name (default: list the models)",
    )
    add_arguments(models, only=CHECK_OPTIONS, groups=GROUPS)

    subparsers.add_parser("bench", help="measure a server from outside, or parts of this program from inside")

    simulate = subparsers.add_parser(
        "simulate", help="look for bugs of the engine or the router: checked histories from seeds"
    )
    _add_simulate(simulate)

    _add_operating(subparsers)

    _add_ray(subparsers)

    doctor = subparsers.add_parser("doctor", help="show what this machine supports, and what is missing for more")
    doctor.add_argument("--json", action="store_true", help="for scripts (default: off)")
    doctor.add_argument(
        "--model",
        help="the same as models --check (default: check the machine)",
    )

    random_checkpoint = subparsers.add_parser(
        "random-checkpoint", help="write a checkpoint of a real model's shape with random weights, for measuring"
    )
    _add_random_checkpoint(random_checkpoint)
    return parser, {
        "serve": _serve,
        "scripted": _scripted,
        "route": _route,
        "disagg": _disagg,
        "generate": _generate,
        "chat": _chat,
        "pull": _pull,
        "models": _models,
        "simulate": _simulate,
        "doctor": _doctor,
        "top": _top,
        **dict.fromkeys(("requests", "abort", "endpoints", "drain"), _operate),
        "ray": _ray,
        "random-checkpoint": _random_checkpoint,
    }


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-tokens", type=int, metavar="N", help="most tokens of response (default: what fits)")
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="X",
        help="0 always chooses the most probable token (default: the model's, or 1)",
    )
    parser.add_argument("--top-p", type=float, metavar="X", help="share of probability to choose from (default: 1)")
    parser.add_argument("--seed", type=int, metavar="N", help="makes a sampled response repeatable (default: none)")


def _add_scripted(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--script", metavar="FILE", help="JSON array of rules (default: none)")
    parser.add_argument("--family", default="hermes", metavar="NAME", help="format of its tool calls (default: hermes)")
    parser.add_argument("--thinks", action="store_true", help="begin every response with reasoning (default: off)")
    add_arguments(parser, groups=GROUPS)


def _add_disagg(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--router-args", default="", metavar="FLAGS", help="flags of the router, as one text: see route --help"
    )
    parser.add_argument(
        "--server-args", default="", metavar="FLAGS", help="flags of both servers, as one text: see serve --help"
    )
    parser.add_argument("--prefill-port", type=int, default=8001, metavar="PORT", help="(default: 8001)")
    parser.add_argument("--decode-port", type=int, default=8002, metavar="PORT", help="(default: 8002)")


def _add_operating(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Add commands that call a running server."""
    top = subparsers.add_parser("top", help="watch a running server or router in the terminal")
    top.add_argument("url", nargs="?", metavar="URL", help="(default: TRIOSERVE_URL, or http://127.0.0.1:8000)")
    top.add_argument(
        "--interval",
        type=float,
        default=0.5,
        metavar="SECONDS",
        help="time between two updates, 0.1 to 10 (default: 0.5)",
    )
    requests = subparsers.add_parser("requests", help="list the requests of a running server")
    abort = subparsers.add_parser("abort", help="abort requests of a running server by their ids")
    abort.add_argument("ids", nargs="+", metavar="ID")
    endpoints = subparsers.add_parser("endpoints", help="list the endpoints of a running router")
    drain = subparsers.add_parser("drain", help="empty an endpoint of a running router")
    drain.add_argument("name", metavar="NAME")
    drain.add_argument("--move", action="store_true", help="move its streams to other endpoints now (default: off)")
    for parser in (requests, abort, endpoints, drain):
        parser.add_argument("--url", metavar="URL", help="(default: TRIOSERVE_URL, or http://127.0.0.1:8000)")
    for parser in (top, requests, abort, endpoints, drain):
        parser.add_argument("--api-key", metavar="KEY", help="(default: TRIOSERVE_API_KEY)")
        parser.add_argument("--json", action="store_true", help="for scripts (default: off)")


def _add_ray(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Add the commands for engines that Ray places. Their options are those of `serve`."""
    parser = subparsers.add_parser(
        "ray", help="start or end groups of engines on a Ray cluster, for `route --endpoints-ray`"
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    up = actions.add_parser("up", help="start a group of engines on free nodes; it continues after this command ends")
    down = actions.add_parser("down", help="end a group, after its requests")
    listing = actions.add_parser("list", help="list the groups and the addresses of their engines")
    for each in (up, down):
        each.add_argument("name", metavar="GROUP")
    for each in (up, down, listing):
        each.add_argument(
            "--ray-address",
            metavar="ADDRESS",
            help="such as 10.0.0.7:6379, or ray://10.0.0.7:10001 from outside of the cluster (default: "
            "RAY_ADDRESS, or the cluster of this machine)",
        )
    up.add_argument("--replicas", type=int, default=1, metavar="N", help="number of engines (default: 1)")
    up.add_argument(
        "--num-cpus",
        type=float,
        metavar="X",
        help="CPUs that Ray reserves for one engine, and its --threads (default: one for each rank)",
    )
    up.add_argument(
        "--num-gpus",
        type=float,
        metavar="X",
        help="GPUs of one engine, all on one node (default: with --device cuda one for each rank, otherwise none)",
    )
    up.add_argument(
        "--placement",
        choices=("pack", "spread", "strict-pack", "strict-spread"),
        default="spread",
        help="how engines spread over nodes: few nodes, many, exactly one, or one engine each (default: spread)",
    )
    up.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="time until all engines must serve (default: 600)",
    )
    down.add_argument(
        "--timeout", type=float, default=60.0, metavar="SECONDS", help="longest time for requests to end (default: 60)"
    )
    listing.add_argument("--json", action="store_true", help="for scripts (default: off)")
    add_arguments(up, only=PLACED_OPTIONS, groups=GROUPS)


def _add_simulate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seeds", metavar="A:B", help="seeds A to B - 1, one history each (default: 0:1000, with --routers N 0:3)"
    )
    parser.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help="events of each history (default: 100, with --router 150, with --pair 300), or clients with --stack (12)",
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes (default: 1)")
    parser.add_argument("--replay", metavar="SEED|FILE", help="run one seed or script again, with a trace")
    parser.add_argument(
        "--stack",
        action="store_true",
        help="simulate the whole stack: HTTP clients and direct ones, in a seeded order of tasks (default: off)",
    )
    parser.add_argument(
        "--router", action="store_true", help="simulate the router's decisions: queue and routing (default: off)"
    )
    parser.add_argument(
        "--pair",
        action="store_true",
        help="simulate an engine for prompts, one for responses, and KV transfer between them (default: off)",
    )
    parser.add_argument(
        "--lasting",
        action="store_true",
        help="simulate streams and responses that continue without their clients, who reconnect (default: off)",
    )
    parser.add_argument(
        "--ranks",
        action="store_true",
        help="simulate an engine with ranks that die, hang and break at any moment (default: off)",
    )
    parser.add_argument(
        "--iterative",
        action="store_true",
        help="simulate requests with a known number of steps, as in diffusion: encode, denoise, decode (default: off)",
    )
    parser.add_argument(
        "--images",
        action="store_true",
        help="simulate an engine for images, with everything that clients and operators do to it (default: off)",
    )
    parser.add_argument(
        "--models",
        action="store_true",
        help="simulate the decisions of a server with several models: which ones are loaded within one memory budget "
        "(default: off)",
    )
    parser.add_argument(
        "--routers",
        type=int,
        nargs="*",
        metavar="N",
        help="simulate several routers before the same endpoints, which die, return and lose contact with each other. "
        "With numbers: simulate steady traffic with so many routers, and print a table for routers without shares of "
        "the endpoints' limits, with shares, and with one router that dies (default: off)",
    )
    parser.add_argument(
        "--endpoints", type=int, nargs="+", default=[32], metavar="N", help="with --routers N: endpoints (default: 32)"
    )
    parser.add_argument("--no-shrink", action="store_true", help="show a failing history as it is (default: off)")


def _add_random_checkpoint(parser: argparse.ArgumentParser) -> None:
    from trioserve.model.real_shapes import SHAPES

    parser.add_argument("shape", choices=SHAPES, help=", ".join(SHAPES), metavar="SHAPE")
    parser.add_argument("path", type=Path, help="an empty or new directory, or a new file that ends in .gguf")
    parser.add_argument(
        "--type", choices=("bf16", "q8_0", "q4_0"), help="data type of the matrices of a .gguf file (default: bf16)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="equal seeds give equal weights (default: 0)")


def _serve(arguments: argparse.Namespace) -> int:
    if arguments.served is not None:
        if arguments.model not in (None, arguments.served):
            raise StartupError(
                f"the model is named twice, {arguments.served} and --model {arguments.model}: remove one of them"
            )
        arguments.model = arguments.served
    config = config_from(arguments, kind=Config)
    start_reading_ahead(config.model)
    if config.headless:
        from trioserve.commands.headless import run_headless

        return run_headless(config)
    from trioserve.commands.serve import run_server

    return run_server(config)


def _scripted(arguments: argparse.Namespace) -> int:
    config = config_from(arguments, kind=Config)
    from trioserve.commands.scripted import run_scripted

    return run_scripted(arguments, config)


def _route(arguments: argparse.Namespace) -> int:
    config = config_from(arguments, kind=RouterOptions)
    if config.router_processes > 1:
        from trioserve.commands.router_processes import run_router_processes

        return run_router_processes(config)
    from trioserve.commands.route import run_router

    return run_router(config)


def _disagg(arguments: argparse.Namespace) -> int:
    from trioserve.commands.disagg import DisaggSettings, run_disagg

    return run_disagg(DisaggSettings.from_arguments(arguments))


def _generate(arguments: argparse.Namespace) -> int:
    config = config_from(arguments, kind=Config)
    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    from trioserve.commands.terminal import SamplingOptions, run_generate

    return run_generate(config, prompt, SamplingOptions.from_arguments(arguments), raw=arguments.raw)


def _chat(arguments: argparse.Namespace) -> int:
    config = config_from(arguments, kind=Config)
    from trioserve.commands.chat import ChatPlace, run_chat
    from trioserve.commands.terminal import SamplingOptions

    place = None
    if arguments.url is not None:
        keys = (arguments.api_key or os.environ.get("TRIOSERVE_API_KEY", "")).replace(",", " ").split()
        url = arguments.url if "://" in arguments.url else f"http://{arguments.url}"
        place = ChatPlace(url, keys[0] if keys else None, arguments.model)
    return run_chat(config, SamplingOptions.from_arguments(arguments), system=arguments.system, place=place)


def _pull(arguments: argparse.Namespace) -> int:
    from trioserve.commands.models import run_pull

    return run_pull(arguments.model, revision=arguments.revision)


def _models(arguments: argparse.Namespace) -> int:
    from trioserve.commands.models import run_check, run_models

    if arguments.check is not None:
        config = config_from(arguments, kind=Config)
        return run_check(arguments.check, config.model_settings(), as_json=arguments.json, revision=config.revision)
    return run_models(as_json=arguments.json)


def _bench(arguments: Sequence[str]) -> int:
    from trioserve.commands.bench import run_bench

    return run_bench(arguments)


def _simulate(arguments: argparse.Namespace) -> int:
    from trioserve.commands.simulate import SimulateSettings, run_replay, run_routers, run_simulate, seeds_of

    if arguments.routers:
        return run_routers(arguments, seeds_of(arguments.seeds or "0:3"))
    settings = SimulateSettings.from_arguments(arguments)
    return run_simulate(settings) if arguments.replay is None else run_replay(arguments.replay, settings)


def _doctor(arguments: argparse.Namespace) -> int:
    if arguments.model is not None:
        from trioserve.commands.models import run_check

        return run_check(arguments.model, as_json=arguments.json)
    from trioserve.commands.doctor import run_doctor

    return run_doctor(as_json=arguments.json)


def _top(arguments: argparse.Namespace) -> int:
    from trioserve.commands.remote import RemoteServer, run_top

    server = RemoteServer.from_arguments(arguments.url, arguments.api_key)
    return run_top(server, interval=arguments.interval, as_json=arguments.json)


def _operate(arguments: argparse.Namespace) -> int:
    from trioserve.commands.remote import RemoteServer, run_abort, run_drain, run_endpoints, run_requests

    server = RemoteServer.from_arguments(arguments.url, arguments.api_key)
    if arguments.command == "abort":
        return run_abort(server, arguments.ids, as_json=arguments.json)
    if arguments.command == "drain":
        return run_drain(server, arguments.name, move=arguments.move, as_json=arguments.json)
    run = run_requests if arguments.command == "requests" else run_endpoints
    return run(server, as_json=arguments.json)


def _ray(arguments: argparse.Namespace) -> int:
    from trioserve.commands.ray_group import run_ray

    return run_ray(arguments)


def _random_checkpoint(arguments: argparse.Namespace) -> int:
    from trioserve.commands.random_checkpoint import run_random_checkpoint

    return run_random_checkpoint(arguments.shape, arguments.path, seed=arguments.seed, gguf_type=arguments.type)
