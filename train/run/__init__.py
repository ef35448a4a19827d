"""Everything in the folder of a training run: configuration, lock, checkpoints, log, evaluations.
This package may import infer, data, and train's modules except loop. Start with prepare.py
(everything before the first step), then read state.py (the state of a run) and folder.py (who may
write to the folder)."""
