"""The DFlash family: its drafter in model.py, its layouts of config.json in layouts.py (read) and
writers.py (write). May import what `infer.drafters` may, and the modules of `infer.drafters`. Start
reading at model.py."""
