"""What every callback does: hooks, schedule, state, errors."""
