"""What the quantities cost, beside other tools, in one run: ``python -m benchmarks``."""

__all__ = ["QUIET"]

# Options of the trainers whose time and memory are measured.
QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
