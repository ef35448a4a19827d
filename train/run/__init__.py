"""A run's folder: its configuration and lock, state, checkpoints, log, evaluations.
May import infer, data and train's top but for loop.
Start with prepare.py (all that comes before the first step), then state.py (what a run is) and
folder.py (who may write)."""
