"""One, two and four processes give the same numbers, and a failure in one of them stops none."""

import pytest
import pytorch_lightning as pl
import torch

from reliability.processes.process_cases import PROCESS_CASES, differences
from reliability.processes.process_faults import PROCESS_FAULTS
from reliability.processes.process_runs import PROCESS_RUNS, undisturbed

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch cannot distribute")
# Of each kind one; all of them: pytest -m slow, or cd tests && python -m reliability.
QUICK = {"2 processes, WeightNorm", "4 processes, BatchNorm", "2 processes, unused parameters"}
QUICK_FAULTS: set[str] = set()  # test_ddp.py has two
QUICK_RUNS = {"2 processes, resumed"}


def cases(table, quick):
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in table]


@pytest.mark.parametrize("case", cases(PROCESS_CASES, QUICK))
def test_several_processes_give_the_numbers_of_one(case, tmp_path):
    outcome = PROCESS_CASES[case](tmp_path)
    assert outcome.compared > 0
    assert outcome.differences == ()


@pytest.mark.parametrize("case", cases(PROCESS_FAULTS, QUICK_FAULTS))
def test_a_failure_in_one_process_is_a_nan_in_all_and_no_deadlock(case, tmp_path):
    outcome = PROCESS_FAULTS[case](tmp_path)
    assert outcome.compared > 0
    assert outcome.differences == ()


@pytest.mark.parametrize("case", cases(PROCESS_RUNS, QUICK_RUNS))
def test_training_in_several_processes(case, tmp_path):
    outcome = PROCESS_RUNS[case](tmp_path)
    assert outcome.compared > 0
    assert outcome.differences == ()


def test_the_comparison_notices_a_disturbance(tmp_path):
    class Careless(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            if trainer.global_rank == 1:
                torch.rand(1)

    assert "process 1 is elsewhere" in undisturbed(tmp_path, 2, [Careless()]).differences


def test_the_comparison_notices_a_wrong_number_and_a_missing_one():
    one = {0: {"normtheory/rsc_ratio": 1.0, "normtheory/loss": 2.0}}
    assert differences(one, one, 1e-6).differences == ()
    assert len(differences(one, {0: {"normtheory/rsc_ratio": 1.1, "normtheory/loss": 2.0}}, 1e-6).differences) == 1
    assert len(differences(one, {0: {"normtheory/rsc_ratio": 1.0}}, 1e-6).differences) == 1
    assert len(differences(one, {}, 1e-6).differences) == 1
