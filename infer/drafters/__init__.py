"""Drafters: small models that propose blocks of tokens. Each drafter family (drafters with the same
architecture, such as DFlash) is one folder or file and has an entry in the table of families.py.
This package may import infer.config, utils, ngrams, attention, trees and targets. Start reading at
families.py (the table), then base.py (the base class), then dflash/model.py."""
