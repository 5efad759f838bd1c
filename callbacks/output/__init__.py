"""Where the numbers go: loggers, the run's file, the terminal.

* `run_file`: the place of ``normtheory.jsonl``, and its rows.
* `wandb`: axes, summaries, settings and the layer table for W&B.
* `fit_end`: the table at the end of a fit.
* `messages`: messages that no progress bar overwrites.
* `progress_bar`: which diagnostic is being measured, on Lightning's bar.
"""
