"""Training of drafters. A step's path: main, config, loop, objective, divergences, blocks, batches,
optim, engine. May import infer and data; nothing imports train except infer/cli and the table of
commands, when a command runs. Start with loop.py: `train`, then `run_steps`, `train_step` and
`block_loss`; the formulas are in divergences.py."""
