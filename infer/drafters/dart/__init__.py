"""The DART family: the drafter is in model.py, and its layouts of config.json are in layouts.py.
This package is optional and is named in infer/drafters/families.py. It may import the modules of
`infer.drafters`, and whatever these may import. Start reading at model.py."""
