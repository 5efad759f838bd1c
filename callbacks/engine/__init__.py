"""What every callback does: hooks, schedule, state, errors.

* `base`: `DiagnosticCallback`, the base of every callback: its arguments, settings and state.
* `fit`: Lightning's hooks: finds the loss, measures the start, and measures when it is due.
* `schedule`: when to measure: after every n-th epoch or optimizer step.
* `guarded`: runs the diagnostics, so that none can stop the run or another one.
* `reporting`: what a callback sends to the loggers, the run's file and the terminal.
* `diagnostic`: `Diagnostic`, the interface of one quantity.
* `lifecycle`: how far a fit is.
* `planning`: what the next measurements take, said before they are made, and kept within ``max_overhead``.
* `cost`: the expected costs of measurements, in gradients.
* `budget`: the time spent on measuring, and its limit.
* `stop`: stops a measurement on SIGTERM.
* `checks`: errors in the setup, found at fit start.
* `state`: helpers for the checkpoint.
* `host`: the callback class of every Lightning package that is installed.
"""
