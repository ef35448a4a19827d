"""A run's folder: its configuration and lock, checkpoints, log, evaluations, progress and tracking.
May import infer, data, train's top and train.safety.
Start with folder.py (who may write), then checkpoints.py (what a run goes on from) and log.py (metrics.jsonl)."""
