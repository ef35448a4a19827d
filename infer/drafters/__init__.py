"""The small models that propose blocks of tokens: one folder or file per family, each an entry of
the table in families.py. May import infer.config, utils, ngrams, attention, trees and targets.
Start reading at families.py (the table), then base.py (the base class), then dflash/model.py."""
