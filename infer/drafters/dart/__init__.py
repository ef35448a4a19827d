"""The DART family: model.py, and layouts.py, which reads and writes the published layout of its
config.json. May import what `infer.drafters` may, and the modules at the top of `infer.drafters`.
Start reading at model.py."""
