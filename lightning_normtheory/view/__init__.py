"""How a run is shown: report, dashboard, terminal. Loads neither torch nor Lightning."""
