"""The DFlash drafter family: model.py contains the drafter, layouts.py reads config.json in several
formats, and writers.py converts drafters to these formats. This package may import the modules of
`infer.drafters`, and whatever these may import. Start reading at model.py."""
