"""Run every reliability case and write the table of docs/reliability.md: ``cd tests && python -m reliability``.

A case is a function that takes its own folder and returns an `Outcome`. It runs in a worker process: one that dies or
hangs counts as a difference, and the next case gets a new worker.
"""

import argparse
import contextlib
import multiprocessing
import os
import platform
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from reliability.outcome import Outcome

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"
MARKERS = ("<!-- table -->", "<!-- end -->")
NONE = "No differences."
COMMAND = "cd tests && python -m reliability"
FEW = 3  # cases of each part, with --quick


class Part(NamedTuple):
    """
    Attributes:
        module: where its cases are.
        table: the name of a dict of functions of a folder, or of one function of a name and a folder.
        names: those of the cases, or the name of a dict that has them; by default, ``table`` has them.
        patience: the seconds after which a case counts as hanging.
    """

    module: str
    table: str
    names: Sequence[int] | str = ""
    patience: float = 900.0


class Case(NamedTuple):
    title: str
    part: Part
    name: str | int


class Result(NamedTuple):
    case: Case
    outcome: Outcome
    seconds: float
    figures: Mapping[str, str] = {}


def parts(models: int, epochs: int) -> dict[str, Part]:
    return {
        "random models": Part("reliability.strange.strange_trial", "try_model", range(models)),
        "faults": Part("reliability.faults.faults", "FAULTS"),
        "several processes": Part("reliability.processes.process_cases", "PROCESS_CASES"),
        "faults in several processes": Part("reliability.processes.process_faults", "PROCESS_FAULTS"),
        "training in several processes": Part("reliability.processes.process_runs", "PROCESS_RUNS"),
        "resume": Part("reliability.resume.resume_cases", "outcome", "CASES"),
        "precision": Part("reliability.precision_cases", "outcome", "CASES"),
        "devices": Part("reliability.devices.device_cases", "outcome", "CASES"),
        "long runs": Part("reliability.soak", "soak", [epochs], patience=7200.0),
    }


def _counts(names: Iterable[str]) -> str:
    return ", ".join(f"{number} {name}" for name, number in Counter(names).most_common())


def drawn(results: list[Result]) -> str:
    """Count the layers and normalizations of the random models."""
    strange_model = import_module("reliability.strange.strange_models").strange_model
    blocks = [block for result in results for block in strange_model(result.case.name).plan.blocks]
    layers, norms = _counts(block.kind for block in blocks), _counts(block.norm for block in blocks)
    return f"{len(blocks)} layers were drawn: {layers}. Their normalization: {norms}."


def kinds(results: list[Result]) -> str:
    """Each kind of fault has a module."""
    functions = [import_module("reliability.faults.faults").FAULTS[result.case.name] for result in results]
    found = _counts(getattr(each, "func", each).__module__.rpartition("faults_")[2] for each in functions)
    return f"Injected by kind: {found}."


def figures(results: list[Result]) -> str:
    return "\n".join(f"- {name}: {text}" for result in results for name, text in result.figures.items())


def injected(results: list[Result]) -> str:
    """A case is a run with a fault in nearly every epoch."""
    module = import_module("reliability.processes.process_faults")
    total = sum(module.number_of_faults(result.case.name) for result in results)
    return f"{total} faults were injected, one in an epoch, each in one of the processes."


ABOUT: dict[str, Callable[[list[Result]], str]] = {
    "random models": drawn,
    "faults": kinds,
    "faults in several processes": injected,
    "long runs": figures,
}


def find_cases(chosen: Mapping[str, Part], quick: bool) -> list[Case]:
    """List all cases, or a few of each part; raise if a part cannot be imported."""
    found = []
    for title, part in chosen.items():
        module = import_module(part.module)
        names = list(getattr(module, part.names or part.table) if isinstance(part.names, str) else part.names)
        if quick:
            names = names[:: max(1, len(names) // FEW)][:FEW]
        found += [Case(title, part, name) for name in names]
    return sorted(found, key=lambda case: -case.part.patience)  # the longest first, beside which the others run


def work(connection: Any) -> None:
    """Run cases one after the other in this worker process until the connection closes."""
    os.setsid()  # so that it can be ended with all its children
    with contextlib.suppress(EOFError):
        while True:
            case, folder = connection.recv()
            connection.send(run(case, folder))


def run(case: Case, folder: Path) -> Result:
    begin = time.perf_counter()
    os.chdir(folder)
    with (folder / "output.txt").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    try:
        table = getattr(import_module(case.part.module), case.part.table)
        found = table(case.name, folder) if callable(table) else table[case.name](folder)
    except BaseException as error:  # noqa: BLE001  # also an interrupt: it was not asked for
        where = traceback.extract_tb(error.__traceback__)[-1]
        found = Outcome(0, (f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})",))
    outcome = getattr(found, "outcome", found)
    return Result(case, outcome, time.perf_counter() - begin, getattr(found, "figures", {}))


class Worker:
    """Starts a process when there is something to do, and a new one after its end."""

    process: Any = None

    def result(self, case: Case, folder: Path) -> Result:
        if self.process is None:
            context = multiprocessing.get_context("spawn")
            self.connection, theirs = context.Pipe()
            self.process = context.Process(target=work, args=(theirs,))
            self.process.start()
            theirs.close()
        begin = time.perf_counter()
        try:
            self.connection.send((case, folder))
            if self.connection.poll(case.part.patience):
                return self.connection.recv()
            words = f"no end after {case.part.patience:g} s"
        except (EOFError, OSError):
            self.process.join()
            output = (folder / "output.txt").read_text(errors="replace")
            words = f"the process died with {self.process.exitcode}: {output[-500:]}"
        self.stop()
        return Result(case, Outcome(0, (words,)), time.perf_counter() - begin)

    def stop(self) -> None:
        if self.process is not None:
            self.connection.close()
            self.process.join(5)  # an idle one ends by itself
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)  # with all that it has started
            self.process.kill()  # in case it did not have its own group yet
            self.process.join()
            self.process = None


def run_all(cases: Sequence[Case], jobs: int) -> list[Result]:
    """Run each case in a temporary folder and print a line of progress."""
    here, workers = threading.local(), []

    def one(case: Case) -> Result:
        if not hasattr(here, "worker"):
            here.worker = Worker()
            workers.append(here.worker)
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            result = here.worker.result(case, Path(folder))
        told = f"{result.outcome.compared} values, {'; '.join(result.outcome.differences) or 'ok'}"
        print(f"{case.title}, {case.name}: {result.seconds:.1f} s, {told}", flush=True)
        return result

    pool = ThreadPoolExecutor(jobs)
    try:
        return list(pool.map(one, cases))
    finally:
        pool.shutdown(cancel_futures=True, wait=False)
        for worker in workers:
            worker.stop()


def different(title: str, own: Sequence[Result]) -> list[str]:
    return [f"- {title}, {each.case.name}: {words}" for each in own for words in each.outcome.differences]


def row(title: str, own: Sequence[Result]) -> str:
    compared, seconds = sum(result.outcome.compared for result in own), sum(result.seconds for result in own)
    return f"| {title} | {len(own)} | {compared:,} | {len(different(title, own))} | {seconds / 60:.1f} |"


def note(title: str, own: Sequence[Result]) -> str:
    return f"### {title.capitalize()}\n\n{ABOUT[title](list(own))}"


def table(chosen: Mapping[str, Part], results: Sequence[Result], command: str) -> str:
    """Return the results as Markdown."""
    rows = ["| part | cases | values compared | differences | minutes |", "|---|---|---|---|---|"]
    notes, differences = [], []
    for title in chosen:
        own = [result for result in results if result.case.title == title]
        rows.append(row(title, own))
        differences += different(title, own)
        if title in ABOUT:
            notes.append(note(title, own))
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "pytorch-lightning"))
    notes.append(f"`{command}` with {versions}, Python {platform.python_version()}.")
    return "\n\n".join(["\n".join(rows), "\n".join(differences) or NONE, *notes])


def put_into(page: str, text: str) -> str:
    """Replace the table between the markers of the page; keep the rest."""
    before, _, rest = page.partition(MARKERS[0])
    _, _, after = rest.partition(MARKERS[1])
    return f"{before}{MARKERS[0]}\n\n{text}\n\n{MARKERS[1]}{after}"


def put_part_into(page: str, title: str, own: Sequence[Result], titles: Iterable[str]) -> str:
    """Replace the row, the differences and the note of one part in the page."""
    lines = [line for line in page.splitlines() if not line.startswith((f"- {title}, ", NONE))]
    place = next(i for i, line in enumerate(lines) if line.startswith(f"| {title} |"))
    lines[place] = row(title, own)
    end = next(i for i in range(place, len(lines)) if not lines[i].startswith("|"))
    others = any(line.startswith(tuple(f"- {each}, " for each in titles)) for line in lines)
    lines[end:end] = ["", *(different(title, own) or ([] if others else [NONE])), ""]
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(lines)) + "\n"
    old = rf"### {title.capitalize()}\n\n.*?(?=\n\n(?:###|`{COMMAND}))"
    return re.sub(old, lambda _: note(title, own), text, flags=re.DOTALL) if title in ABOUT else text


def main(arguments: Sequence[str] = (), chosen: Mapping[str, Part] | None = None, page: Path = PAGE) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=300, help="how many random models (300)")
    parser.add_argument("--jobs", type=int, default=2, help="how many cases at a time (2)")
    parser.add_argument("--only", choices=chosen or parts(0, 0), help="run one part and replace only its row")
    parser.add_argument("--quick", action="store_true", help="a few cases of each part; the page is left as it is")
    options = parser.parse_args(arguments)
    os.environ.update(OMP_NUM_THREADS="1", WANDB_MODE="offline", WANDB_SILENT="true")
    chosen = chosen or parts(options.models, 12 if options.quick else 200)
    titles = list(chosen)
    if options.only is not None:
        chosen = {options.only: chosen[options.only]}
    results = run_all(find_cases(chosen, options.quick), options.jobs)
    text = table(chosen, results, " ".join([COMMAND, *arguments]))
    print(f"\n{text}")
    if not options.quick:
        before = page.read_text(encoding="utf-8")
        after = put_part_into(before, options.only, results, titles) if options.only else put_into(before, text)
        page.write_text(after, encoding="utf-8")
    return int(any(result.outcome.differences for result in results))


if __name__ == "__main__":  # the workers find functions of the package, but none of a __main__ of a package
    sys.exit(import_module("reliability.__main__").main(sys.argv[1:]))
