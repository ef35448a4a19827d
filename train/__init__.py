"""Training of drafters. Start with loop.py (`train`, `run_steps`, `run_step`). A single training
step is in step.py (`train_step`, `compute_block_loss`), objective.py, divergences.py and engine.py
(`step_engine`). This package may import infer and data. Only infer/cli and the table of commands
in infer/main.py import this package, and only when a command runs."""
