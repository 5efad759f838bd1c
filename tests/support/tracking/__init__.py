"""W&B: a stand-in server, runs that log to it, and what they send."""
