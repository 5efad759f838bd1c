"""The table of faults: whatever happens, the training is bitwise that of a run without our callbacks."""

from collections.abc import Callable
from pathlib import Path

from reliability.faults import (
    faults_code,
    faults_errors,
    faults_files,
    faults_interrupts,
    faults_memory,
    faults_numbers,
    faults_signals,
    faults_wandb,
)
from reliability.outcome import Outcome

PARTS = (
    faults_numbers,
    faults_errors,
    faults_code,
    faults_memory,
    faults_interrupts,
    faults_signals,
    faults_files,
    faults_wandb,
)
# Each works in the folder that it is given.
FAULTS: dict[str, Callable[[Path], Outcome]] = {name: case for part in PARTS for name, case in part.CASES.items()}
