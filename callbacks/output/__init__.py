"""Where the numbers go: loggers, the run's file, the terminal."""
