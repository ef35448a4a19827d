"""The DFlash family: model.py, and layouts.py, which reads and writes the public layouts of its config.json.
May import what `infer.drafters` may, and the modules at the top of `infer.drafters`.
Start reading at model.py."""
