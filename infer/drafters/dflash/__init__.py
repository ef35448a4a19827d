"""The DFlash family: model.py, and layouts.py and writers.py, which read and write the public
layouts of config.json. May import what `infer.drafters` may, and the modules at the top of
`infer.drafters`. Start reading at model.py."""
