"""The DFlash family: the drafter is in model.py, layouts.py reads its layouts of config.json, and
writers.py writes them. This package may import the modules of `infer.drafters`, and whatever these
may import. Start reading at model.py."""
