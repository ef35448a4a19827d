"""A run's folder: configuration, lock, state, checkpoints, log and evaluations.
May import infer, data and train's modules except loop. Start with prepare.py (everything before the
first step), then state.py (the state of a run) and folder.py (who may write the folder)."""
