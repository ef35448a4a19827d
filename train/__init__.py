"""Training of drafters. Start with loop.py (`train`, `run_steps`, `run_step`).
A step continues in step.py (`train_step`, `compute_block_loss`), objective.py, divergences.py and
engine.py (`step_engine`). May import infer and data.
Nothing imports train, except infer/cli and the table of commands, when a command runs."""
