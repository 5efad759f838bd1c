"""The package: what is installed, what imports what, and that the examples in the documentation are true."""

import ast
import configparser
import doctest
import graphlib
import importlib
import itertools
import json
import re
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.utils._device

ROOT = Path(__file__).parent.parent
FOLDERS = {  # of a floor, from the ground up
    "lightning_normtheory": "lightning_normtheory",
    "lightning_normtheory.callbacks": "callbacks",
    "lightning_normtheory.recipes": "recipes",
}
# What the rooms of a floor may import from outside; rooms that are named may import less.
THEORY = {"torch"}
OUTSIDE = {
    "lightning_normtheory": THEORY,
    "lightning_normtheory.record": {"yaml"},
    "lightning_normtheory.view": {"jinja2", "rich", "wandb", "wandb_workspaces", "yaml"},
    "lightning_normtheory.callbacks": {"torch", "pytorch_lightning", "torchmetrics"},
    "lightning_normtheory.recipes": {
        *("torch", "pytorch_lightning", "torchvision", "numpy", "PIL"),
        *("filelock", "matplotlib", "rich", "wandb", "yaml"),
    },
}
# Quantities that know nothing of one another.
INDEPENDENT = ("hessian", "ntk", "norms", "theorems")
MOST_MODULES = 16


def modules():
    """Every module of the three floors by name, from the files: a new folder is seen without being named here."""
    found = {}
    for floor, folder in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join([floor, *parts]).removesuffix(".__init__")] = path
    return found


MODULES = modules()


def floor_of(module):
    return max((floor for floor in FOLDERS if module == floor or module.startswith(floor + ".")), key=len)


def room_of(module):
    """The floor, or the folder in it that the module is below. What lies on the floor itself is a room, too."""
    floor = floor_of(module)
    inside = MODULES[module].relative_to(ROOT / FOLDERS[floor]).parts
    return f"{floor}.{inside[0]}" if len(inside) > 1 else floor


def imported(module):
    """Return a module's imports: this package's modules by full name, other packages by their first name."""
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative imports break the doctests of mapped packages"
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES else node.module for name in full]
        else:
            continue
        yield from (name if name in MODULES else name.partition(".")[0] for name in names)


def rooms():
    """Room → the rooms that it imports, with an example of each."""
    graph = {room_of(module): {} for module in MODULES}
    for module in MODULES:
        for target in imported(module):
            if target in MODULES and room_of(target) != room_of(module):
                graph[room_of(module)].setdefault(room_of(target), f"{module} imports {target}")
    return graph


def test_imports_between_rooms_go_downwards_only():
    """The floors in their order, and on each floor an order of its rooms that no import breaks."""
    graph, order = rooms(), list(FOLDERS)
    assert {floor_of(module) for module in MODULES} == set(FOLDERS)
    for targets in graph.values():
        for example in targets.values():
            module, target = example.split(" imports ")
            assert order.index(floor_of(target)) <= order.index(floor_of(module)), example
    try:
        tuple(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        circle = error.args[1]
        pytest.fail("\n".join(graph[upper][lower] for lower, upper in itertools.pairwise(circle)))
    for room, other in itertools.permutations([f"lightning_normtheory.{name}" for name in INDEPENDENT], 2):
        assert other not in graph[room], graph[room][other]


def test_a_module_imports_what_its_floor_may():
    for module in MODULES:
        allowed = OUTSIDE.get(room_of(module), OUTSIDE[floor_of(module)])
        for target in imported(module):
            known = target in MODULES or target in sys.stdlib_module_names or target in allowed
            assert known, f"{module} imports {target}"


ALLOCATING = torch.utils._device._device_constructors()


def test_tensors_are_allocated_on_a_named_device():
    """Otherwise `torch.set_default_device` moves them, also to a device without float64."""
    for module, path in MODULES.items():
        if floor_of(module) == "lightning_normtheory.recipes" or module.endswith(".dyadic"):  # data for the user
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                allocating = ast.unparse(node.func.value) == "torch" and getattr(torch, node.func.attr) in ALLOCATING
                named = any(keyword.arg == "device" for keyword in node.keywords)
                assert named or not allocating, f"{path}:{node.lineno}"


def test_no_folder_is_full():
    counts = Counter(path.parent for path in MODULES.values() if path.name != "__init__.py")
    assert {str(folder): number for folder, number in counts.items() if number > MOST_MODULES} == {}


def test_no_test_is_imported_by_another():
    """What tests share is in `support`, or in a module of the folder that is not a test."""
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(part.startswith("test_") for name in names for part in name.split(".")), f"{path}: {names}"


def test_every_folder_is_installed():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    packages = {name for name, path in MODULES.items() if path.name == "__init__.py"}
    assert set(config["options"]["packages"].split()) == packages


WITHOUT_TORCH = ("lightning_normtheory.record", "lightning_normtheory.view")


def loaded(*modules, watched):
    """Which of the watched packages a fresh interpreter has loaded after it has imported some modules."""
    code = f"import sys, {', '.join(modules)}; print(*[name for name in {watched} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_the_ground_floor_loads_torch_alone():
    """In a fresh interpreter, since this one has loaded everything."""
    upper = ("pytorch_lightning", "lightning", "wandb", "torchvision", "torchmetrics")
    names = [
        name for name in MODULES if floor_of(name) == "lightning_normtheory" and room_of(name) not in WITHOUT_TORCH
    ]
    assert loaded(*names, watched=upper) == []
    assert loaded(*names, watched=("torch",)) == ["torch"]


def test_record_and_view_load_neither_torch_nor_lightning():
    names = [name for name in MODULES if room_of(name) in WITHOUT_TORCH]
    assert loaded(*names, watched=("torch", "pytorch_lightning", "lightning", "numpy")) == []


@pytest.mark.parametrize("module", [name for name in MODULES if not name.endswith("__main__")])
def test_examples_in_docstrings(module):
    result = doctest.testmod(importlib.import_module(module), optionflags=doctest.ELLIPSIS)
    assert result.failed == 0


# Users rely on these names: add to them, and rename none.
PUBLIC = {
    "lightning_normtheory": """
        Eigenpair History Margin NormalizedLayers RSC RSCConstants RSCTrain TangentKernel TheoremStatus
        WeightNormConstants applicable_theorems batchnorm_margin batchnorm_rademacher empirical_ntk
        hessian_eigenpairs hessian_top_eigenvalue hessian_vector_product infinite_width_kernels
        min_weight_norm normalized_layers predictor_hessian_norm read_histories rsc_constants
        rsc_ratio rsc_ratio_train weight_norms weightnorm_constants weightnorm_generalization_bound write_report
    """,
    "lightning_normtheory.callbacks": """
        BatchNormTheory ConvergenceCertificate DiagnosticCallback HessianTopEigenvalue HessianTrace Linearity
        MinWeightNorm NTKLeastEigenvalue NormTheory Probe ProgressiveBound RSCRatio RademacherBound
        WeightNormTheory
    """,
    "lightning_normtheory.theorems": """
        BatchNormForm BatchNormGDTheorem BatchNormTheorem BestScale Complexity ErrorBound
        GeneralizationBound KernelSize KnownLoss LossState Margin NetworkConstants Problem
        RSCCondition RSCConstants RSCRadii TheoremStatus WeightNormConstants applicable_theorems
        batchnorm_complexity batchnorm_factors batchnorm_form batchnorm_gd_theorem batchnorm_margin
        batchnorm_rademacher batchnorm_theorem best_scale curvature_ratio dyadic_data
        dyadic_linear_margin generalization_bound guaranteed_step infinite_width_kernels
        kernel_change_bound lin_form loss_constants mean_gradient_condition network_complexity
        network_constants network_problem ntk_lower_bound progressive_bound rsc_condition
        rsc_constants rsc_radii theorem_table weightnorm_constants weightnorm_generalization_bound
        weightnorm_rademacher
    """,
}


@pytest.mark.parametrize("package", PUBLIC)
def test_public_names_are_frozen_and_documented(package):
    """Names at the top are loaded on first use, so each must be there, and `dir` must list it."""
    module = importlib.import_module(package)
    assert sorted(module.__all__) == sorted(PUBLIC[package].split())
    for name in module.__all__:
        assert (getattr(module, name).__doc__ or "").strip(), name
        assert name in dir(module)


def test_examples_in_the_readme_run(tmp_path):
    """Every python block, in order, in one interpreter and its own folder."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    code = "\n".join(blocks)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.rglob("normtheory.jsonl"))


SLOW_PAGES = ("measuring", "any_training")


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.stem, marks=[pytest.mark.slow] * (page.stem in SLOW_PAGES))
        for page in sorted((ROOT / "docs").glob("*.md"))
    ],
)
def test_examples_in_the_documentation_run(page, tmp_path):
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", block], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr


def test_all_metadata_is_in_setup_cfg():
    assert "[project]" not in (ROOT / "pyproject.toml").read_text()
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    assert config["metadata"]["name"] == "lightning-normtheory"
    requirements = [line for line in config["options"]["install_requires"].splitlines() if line]
    extras = [
        line for key in ("wandb", "recipes", "test") for line in config["options.extras_require"][key].splitlines()
    ]
    named = [line for line in requirements + extras if line and not line.startswith("%")]
    first = {}
    for line in named:
        first.setdefault(line.split(">=")[0], line)
    for name, line in first.items():
        assert ">=" in line, f"{name} states no oldest version"
        assert "#" in line or name in ("pytest", "mypy", "ruff"), f"{name} gives no reason"
        assert "<" not in line or "removes" in line, f"{name} has an upper limit without a reason"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy of the tracked files, as a stranger would have them."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE", *FOLDERS.values()):
        copy(ROOT / name, source / name)
    # The build tools of this environment are used: this test is about the content, not about downloading.
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-q",
        "-w",
        str(out),
        str(source),
    ]
    subprocess.run(command, check=True, capture_output=True)
    (path,) = out.glob("*.whl")
    return path


def copy(source, target):
    if source.is_dir():
        for path in source.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                copy(path, target / path.relative_to(source))
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(source.read_bytes())


def test_the_wheel_holds_three_floors_and_the_data(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        str(Path(*floor.split("."), path.relative_to(ROOT / folder)))
        for floor, folder in FOLDERS.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert expected <= names
    assert "lightning_normtheory/recipes/datasets/embedded/NOTICE" in names
    assert not any(name.startswith(("callbacks/", "recipes/", "tests/")) for name in names)


def test_the_wheel_works_from_another_directory(wheel, tmp_path):
    """Unpacked in front of everything else, with this checkout out of reach."""
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    code = (
        f"import sys; sys.path.insert(0, {str(site)!r}); sys.meta_path = "
        "[f for f in sys.meta_path if 'editable' not in getattr(f, '__module__', repr(f))]\n"
        "import lightning_normtheory.callbacks, lightning_normtheory.recipes.cli as cli\n"
        "from lightning_normtheory.recipes.datasets import FashionMNISTSlice\n"
        "data = FashionMNISTSlice(); data.setup('fit'); cli.main(['list'])\n"
        "print(len(data.train), lightning_normtheory.callbacks.__file__)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"2000 {site}/lightning_normtheory/callbacks/__init__.py"


@pytest.mark.slow
def test_the_benchmark_runs_without_its_peers(tmp_path):
    """On its smallest model, as a user would, from the checkout."""
    what, file = ("hessian", "ntk", "limits"), tmp_path / "figures.jsonl"
    options = ("--case", "tiny", "--runs", "1", "--busy", "--output", str(file))
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks", *what, *options]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    for part in (
        "product, after that",
        "ours, lanczos, warm",
        "ours, power, cold",
        "curvlinops",
        "ours, float64, all parts",
        "λ_max, warm",
        "tangent kernel, all parts",
    ):
        assert part in result.stdout
    about, *figures = map(json.loads, file.read_text().splitlines())
    assert {"command", "versions", "cpu", "threads"} <= about.keys()
    assert {"limits, tiny", "tiny: top eigenvalue, 1 networks with a start each, median (worst)"} <= {
        each["table"] for each in figures
    }


def test_the_benchmark_counts_second_derivatives_and_fits_exponents(monkeypatch):
    """By hand: x (n, d) through W (k, d) and the square loss; the gradient, then its derivative along a vector."""
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks.scaling.axes import power
    from benchmarks.scaling.counting import Counter as Operations

    n, d, k = 7, 5, 3
    x, weight, vector = torch.ones(n, d), torch.ones(k, d, requires_grad=True), torch.ones(k, d)
    with Operations() as counter:
        (gradient,) = torch.autograd.grad((x @ weight.T).square().sum(), weight, create_graph=True)
        first = counter.flops
        torch.autograd.grad(gradient, weight, vector)
    assert first == 2 * 2 * n * d * k  # forward, and the gradient of the weights
    assert counter.flops - first == 2 * 2 * n * d * k  # the same for the tangents
    assert counter.peak >= counter.live >= gradient.nbytes
    slope, error = power([1, 2, 4], [3, 12, 48])
    assert (slope, error) == pytest.approx((2, 0), abs=1e-12)
