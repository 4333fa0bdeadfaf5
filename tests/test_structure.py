"""The shape of the project: who imports whom, what importing costs, what the README promises."""

import ast
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent

# Lower layers first. A module may import from the layers below its own, and from its own package.
LAYERS = (
    {"config", "files", "graphs", "head_rows", "replicas"},
    {"data", "augment", "models", "per_example", "optimizers", "averages", "dropout", "parts"},
    {"influence", "example_weights", "methods"},
    {"checkpoints", "metrics", "event_files", "alarms", "distribution"},
    {"evaluation", "serving"},
    {"training"},
    {"outer_loop"},
    {"reporting"},
)
PEER_EXCEPTIONS = {("data", "augment")}
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}


def python_files(folder):
    return sorted((ROOT / folder).rglob("*.py"))


def imported_names(path, root=ROOT):
    """Absolute dotted names of all imports in a file; `from a import b` gives `a.b`."""
    package = path.relative_to(root).parent.parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = (*base, *(node.module.split(".") if node.module else ()))
            yield from (".".join((*module, alias.name)) for alias in node.names)


def part_of(path, root=ROOT):
    """The part of `ssl_influence` a file belongs to: its package, or its own name."""
    return path.relative_to(root).with_suffix("").parts[1]


def direction_errors(paths, root=ROOT):
    errors = []
    for path in paths:
        importer = part_of(path, root)
        if importer == "__init__":
            continue
        for name in imported_names(path, root):
            parts = name.split(".")
            if parts[0] != "ssl_influence" or len(parts) < 2 or parts[1] == importer:
                continue
            imported = parts[1]
            if imported not in LEVEL:
                errors.append(f"{path.relative_to(root)} imports {name}, which is in no layer")
            elif LEVEL[imported] >= LEVEL[importer] and (importer, imported) not in PEER_EXCEPTIONS:
                errors.append(f"{path.relative_to(root)} imports {name}, which is not below it")
    return errors


def test_every_part_of_the_library_has_a_layer():
    parts = {part_of(path) for path in python_files("ssl_influence")} - {"__init__"}
    assert parts <= set(LEVEL), f"add to LAYERS: {sorted(parts - set(LEVEL))}"


def test_library_parts_import_only_from_the_layers_below():
    assert not direction_errors([p for p in python_files("ssl_influence") if part_of(p) in LEVEL])


@pytest.mark.parametrize(
    ("importer", "statement", "allowed"),
    [
        ("methods/uda.py", "from ssl_influence import head_rows", True),
        ("methods/uda.py", "from ssl_influence.influence import softmax_head", False),
        ("methods/uda.py", "from ..influence import softmax_head", False),
        ("methods/uda.py", "from . import base", True),
        ("data/pipeline.py", "def f():\n    import ssl_influence.augment.policies", True),
        ("augment/policies.py", "from ssl_influence import data", False),
        ("config.py", "from ssl_influence import head_rows", False),
        ("evaluation.py", "import ssl_influence.training", False),
        ("training.py", "import ssl_influence.nowhere", False),
    ],
)
def test_the_direction_check_tells_right_from_wrong(tmp_path, importer, statement, allowed):
    path = tmp_path / "ssl_influence" / importer
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(statement, encoding="utf-8")
    assert (not direction_errors([path], tmp_path)) == allowed


@pytest.mark.parametrize(
    ("folder", "forbidden"),
    [
        ("ssl_influence", ("absl.flags", "absl.app", "experiments", "third_party", "tests")),
        ("third_party", ("ssl_influence", "experiments", "tests")),
        ("experiments", ("tests",)),
    ],
)
def test_folders_do_not_import_what_is_above_them(folder, forbidden):
    errors = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in python_files(folder)
        for name in imported_names(path)
        if any(name == bad or name.startswith(bad + ".") for bad in forbidden)
    ]
    assert not errors


def test_importing_the_package_loads_neither_tensorflow_nor_keras():
    code = (
        "import sys, ssl_influence, ssl_influence.config;"
        "print(sorted({'tensorflow', 'tf_keras', 'keras', 'absl'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def tracked_text_files():
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listing.returncode:
        pytest.skip("the checkout is not a Git repository, so no file counts as tracked")
    for name in listing.stdout.decode().split("\0"):
        path = ROOT / name
        if name and path.is_file():
            content = path.read_bytes()
            if b"\0" not in content:
                yield name, content.decode("utf-8")


def test_tracked_files_name_no_folder_of_one_machine():
    # Top folders that a path in a tracked file may begin with: a system's own, and examples.
    allowed = {"bin", "data", "dev", "elsewhere", "etc", "path", "tmp", "usr", "proc"}
    paths = re.compile(r"""(?:^|[\s"'=(`])/([a-z_]+)/[\w.~-]""", re.M)
    found = [
        f"{name}: /{folder}/"
        for name, text in tracked_text_files()
        for folder in paths.findall(text)
        if folder not in allowed
    ]
    assert not found


def test_files_that_the_readme_names_exist():
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.exists() else ""
    named = re.findall(r"--flagfile[= ]([\w./-]+)", text)
    named += re.findall(r"\bbash ([\w./-]+\.sh)", text)
    named += [
        module.replace(".", "/") + ".py" for module in re.findall(r"-m (experiments[\w.]+)", text)
    ]
    missing = [name for name in named if not (ROOT / name).is_file() and "runs/" not in name]
    assert not missing


def test_flagfiles_that_scripts_and_flagfiles_name_exist():
    sources = [*(ROOT / "experiments").rglob("*.sh"), *(ROOT / "experiments").rglob("*.flags")]
    missing = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sources
        for name in re.findall(r"--flagfile[= ]([\w./-]+)", path.read_text(encoding="utf-8"))
        if not (ROOT / name).is_file()
    ]
    assert not missing


def test_every_pin_lies_in_the_range_that_setup_asks_for():
    requirements = pytest.importorskip("packaging.requirements")
    pins = [
        requirements.Requirement(line)
        for line in (ROOT / "third_party" / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    tree = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
    strings = [
        node.value
        for statement in tree.body
        if isinstance(statement, ast.Assign) and statement.targets[0].id in ("REQUIRED", "EXTRAS")
        for node in ast.walk(statement.value)
        if isinstance(node, ast.Constant) and re.search(r"[<>]", node.value)
    ]
    unpinned_by_design = {"tensorflow-tpu"}
    problems = []
    for minor in (10, 11, 12, 13):
        environment = {
            "python_version": f"3.{minor}",
            "python_full_version": f"3.{minor}.0",
            "platform_system": "Linux",
            "extra": "",
        }

        def applies(requirement, environment=environment):
            return requirement.marker is None or requirement.marker.evaluate(environment)

        pinned = {pin.name.lower().replace("_", "-"): pin for pin in pins if applies(pin)}
        for wanted in filter(applies, map(requirements.Requirement, strings)):
            name = wanted.name.lower().replace("_", "-")
            if name in unpinned_by_design:
                continue
            version = next(iter(pinned[name].specifier)).version if name in pinned else None
            if version is None or version not in wanted.specifier:
                problems.append(f"Python 3.{minor}: {wanted} has the pin {version}")
    assert strings and not problems
