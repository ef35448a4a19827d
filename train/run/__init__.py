"""A run's folder: its configuration and lock, state, checkpoints, log, evaluations.
May import infer, data and train's top but for loop.
Start with state.py (what a run is), then folder.py (who may write) and checkpoints.py (what a run goes
on from)."""
