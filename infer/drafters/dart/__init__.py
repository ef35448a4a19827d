"""The DART family: model.py, and layouts.py, which reads and writes the published layout of its
config.json. An optional package: infer/drafters/families.py names it. May import what
`infer.drafters` may, and the modules at the top of `infer.drafters`. Start reading at model.py."""
