"""Training of drafters. A step's path: main.py, loop.py (`train`, `run_steps`, `take_one`), step.py
(`train_step`, `block_loss`, `score`), objective.py, divergences.py, engine.py (`take_step`).
May import infer and data; nothing imports train except infer/cli and the table of commands, when a
command runs. Start with loop.py."""
