"""The small models that propose blocks: one folder or file a family, all of them rows of the table
in families.py. May import infer.config, utils, ngrams, attention, trees and targets.
Start reading at families.py (the table), then base.py (what every family shares), then
dflash/model.py."""
