"""What notices that a run goes wrong: losses and gradients, mistakes of computation, processes that stall.
May import infer, data, train's top and train.run.
Start with processes.py (how a run starts and ends), then selfcheck.py (before step 1), guards.py."""
